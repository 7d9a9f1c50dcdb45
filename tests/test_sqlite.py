"""kvstore.sqlite by itself; what an index and a ledger make of it is tested with them."""

from __future__ import annotations

import sqlite3

from kvstore.errors import KVStoreError, TransientError
from kvstore.sqlite import classified


def test_every_code_of_sqlite_is_of_the_tree() -> None:
    for code in range(30):
        exc = sqlite3.OperationalError("text")
        exc.sqlite_errorcode = code | 0x300
        error = classified(exc, "somewhere: match")
        assert isinstance(error, KVStoreError)
        assert str(error) == "somewhere: match"
    assert type(classified(sqlite3.ProgrammingError("x"), "")) is TransientError
