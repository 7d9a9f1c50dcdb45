"""Children that are killed at a step of their work, and what they can say before.

A step is what outlasts the process: a statement of SQLite (inside of a transaction too), just before and just
after a round trip to Redis, a request that changes the bucket, or a system call by which a folder's payload
is written, named or unlinked; a write that is killed has stored half of its bytes.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvstore import files, sqlite
from kvstore.index.redis.client import RedisClient
from kvstore.index.scripted import index as scripted
from kvstore.payloads import local
from kvstore.payloads.s3.store import S3Payloads
from kvstore.store import saving
from tests.payloads.test_local import _Crashing, _in_child

#: Seconds after which a child of this module forgets an incomplete commit, instead of an hour.
INCOMPLETE_S = 4


class _Writes(_Crashing):
    CALLS = ("mkdir", "pwritev", "rename", "unlink")


class _Makes(_Crashing):
    CALLS = ("mkdir", "open")


class Steps(Iterator[int]):
    """Numbers the steps of this process, and kills it at one."""

    def __init__(self, at: int) -> None:
        self.at = at
        self._next = 0

    def __next__(self) -> int:
        self._next += 1
        return self._next - 1

    def __call__(self, *_: object) -> None:
        if next(self) == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def announce(self, *, of_buckets: bool = False) -> None:
        """From now on each step of this process is one of these, or each that changes a bucket. For a child:
        nothing is put back."""
        self._around(S3Payloads, "put")
        self._around(S3Payloads, "delete")
        if of_buckets:
            return
        local.os = _Writes(os, self, self.at)  # type: ignore[assignment]
        files.os = _Makes(os, self, self.at)  # type: ignore[assignment]
        connect = sqlite.connect

        def connected(path: str, timeout_s: float) -> sqlite3.Connection:
            connection = connect(path, timeout_s)
            connection.set_trace_callback(self)
            return connection

        sqlite.connect = connected  # type: ignore[assignment]
        self._around(RedisClient, "_attempt")

    def _around(self, owner: type, name: str) -> None:
        inner = getattr(owner, name)

        def call(*args: Any, **more: Any) -> Any:
            self()
            answer = inner(*args, **more)
            self()
            return answer

        setattr(owner, name, call)


def asked(folder: Path, work: Callable[[], Any]) -> Any:
    """What `work` answers, in a child of its own: so no connection and no thread of it stays behind."""
    answer = folder / "answer.json"

    def say() -> None:
        _hurry()
        answer.write_text(json.dumps(work()))

    assert _in_child(say) == 0, "the child says above what is wrong"
    return json.loads(answer.read_text())


def killed(work: Callable[[], object], at: int, *, of_buckets: bool = False) -> bool:
    """Does `work` in a child that is killed at its step `at`; returns whether it came to that."""

    def do() -> None:
        _hurry()
        Steps(at).announce(of_buckets=of_buckets)
        work()

    status = _in_child(do)
    assert status in (0, -signal.SIGKILL), "the child says above what is wrong"
    return status != 0


def steps_of(work: Callable[[], object], *, of_buckets: bool = False) -> int:
    """Does `work` and returns how many steps it took. For a child, too."""
    steps = Steps(-1)
    steps.announce(of_buckets=of_buckets)
    work()
    return next(steps)


def _hurry() -> None:
    scripted.INCOMPLETE_TTL_S = INCOMPLETE_S  # type: ignore[misc]
    # Else an index counts what a ground says was written hours ago from its own clock: by when the save came.
    saving.MOST_WAITED_S = 1e12
