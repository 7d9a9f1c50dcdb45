"""What the doctor says of keys, and of payloads that they don't fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.admin.conftest import Filled, kv_slots
from tests.admin.doctor.test_doctor import examine, named

KEY = "5e" * 32


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / "new").write_text(KEY)
    (folder / "new").chmod(0o400)
    return {"KVSTORE_SIGNING__KEYS": str(folder), "KVSTORE_SIGNING__KEY": "new"}


@pytest.fixture
def empty(tmp_path: Path) -> Filled:
    return Filled(tmp_path / "cache", [], {"payloads": f"file://{tmp_path}/cache"})


def test_without_keys_there_is_nothing_to_say(empty: Filled) -> None:
    empty.save(empty.kv, kv_slots(4))
    report = examine(empty)
    assert named(report, "signing") == named(report, "signatures") == []


def test_keys_that_work(empty: Filled, environ: dict[str, str]) -> None:
    [check] = named(examine(empty, environ=environ), "signing")
    assert (check.state, check.found) == (
        "ok",
        "signs with key new, believes new; unsigned payloads are refused",
    )
    [check] = named(examine(empty, environ=environ | {"KVSTORE_SIGNING__ENCRYPT": "1"}), "signing")
    assert check.found.startswith("signs and encrypts with key new")


def test_keys_that_do_not(empty: Filled, environ: dict[str, str], tmp_path: Path) -> None:
    [check] = named(examine(empty, environ=environ | {"KVSTORE_SIGNING__KEY": "old"}), "signing")
    assert check.state == "problem" and "there is no key old in" in check.found
    (tmp_path / "keys" / "new").unlink()
    [check] = named(examine(empty, environ=environ), "signing")
    assert check.state == "problem" and "there is no key in" in check.found


def test_keys_that_others_may_read(empty: Filled, environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "keys" / "new").chmod(0o644)
    [check] = named(examine(empty, environ=environ), "signing")
    assert check.state == "warning" and "may read new" in check.found and "chmod 400" in check.advice


def test_unsigned_payloads(empty: Filled, environ: dict[str, str]) -> None:
    empty.save(empty.kv, kv_slots(4))
    [check] = named(examine(empty, environ=environ), "signatures")
    assert (check.state, check.found) == (
        "warning",
        "1 of 1 sampled segments are not signed, and are refused",
    )
    accepting = environ | {"KVSTORE_SIGNING__UNSIGNED": "accept"}
    report = examine(empty, environ=accepting)
    assert named(report, "signatures") == []
    [check] = named(report, "signing")
    assert check.state == "warning" and "unsigned payloads are accepted" in check.found


def test_payloads_whose_key_is_gone(empty: Filled, environ: dict[str, str], tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "old").write_text("6f" * 32)
    empty.settings["signing"] = {"keys": str(old), "key": "old", "encrypt": True}
    empty.save(empty.kv, kv_slots(4))
    for given in (environ, {}):
        [check] = named(examine(empty, environ=given), "signatures")
        assert check.state == "problem" and "it was written with key old" in check.found
