"""du: the payload store by what the index says of its payloads."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import pytest

from kvstore.admin.backends import Cache, Sources
from kvstore.admin.inspect.du import du
from kvstore.admin.inspect.reports import DuReport
from kvstore.keys import NamespaceId, SegmentId, namespace_id
from schemas.records import PartRecord, SegmentRecord
from tests.admin.conftest import Admin, Filled, chain, kv_slots, opened


def test_du_tells_states_apart(admin: Admin, either: Filled) -> None:
    [_, middle, tail] = chain(either)
    files = {path.name.split(".")[0]: path for path in either.payload_files()}
    orphan = files[middle.segment.hex()].with_name("0" * 16 + ".0")
    orphan = orphan.parent.parent / "00" / orphan.name
    orphan.parent.mkdir(exist_ok=True)
    orphan.write_bytes(b"x" * 777)
    os.utime(orphan, (1e9, 1e9))
    stranger = either.folder / "fedcba9876543210" / "aa" / f"aa{'1' * 14}.0"
    stranger.parent.mkdir(parents=True)
    stranger.write_bytes(b"y" * 55)
    with opened(either) as index:
        name = namespace_id(either.kv)
        index.evict(name, [tail.segment], delete_after_s=4e9, rule="admin")
        index.invalidate(namespace_id(either.ec))
        parts = (PartRecord(10, (10,)),)
        record = SegmentRecord(parts, 1, "none", int(time.time()))
        waiting = SegmentId(bytes(7) + b"\x07")
        index.commit(name, waiting, bytes(16), record, rank=0, ranks=2)
        half = either.folder / name / "00" / f"{waiting.hex()}.0"
        half.write_bytes(b"z" * 20)
    ran = admin("du", "--json", *either.options)
    assert ran.code == 0, ran.err
    report = DuReport.model_validate_json(ran.out)
    found = {(line.namespace, line.state): (line.payloads, line.stored_bytes) for line in report.lines}
    size = tail.record.nbytes
    items = [path for path in files.values() if either.ec_id in path.parts]
    assert found == {
        (either.kv_id, "visible"): (2, 2 * size),
        (either.kv_id, "incomplete"): (1, 20),
        (either.kv_id, "trash"): (1, size),
        (either.kv_id, "orphan"): (1, 777),
        (either.ec_id, "bygone"): (2, sum(path.stat().st_size for path in items)),
        ("fedcba9876543210", "orphan"): (1, 55),
    }
    assert report.payloads == 8
    assert report.stored_bytes == sum(nbytes for _, nbytes in found.values())
    assert report.indexed.stored_bytes == 2 * size
    old = next(line for line in report.lines if line.stored_bytes == 777)
    assert (old.oldest_s, old.newest_s, old.model) == (1e9, 1e9, "tiny-random")
    only = DuReport.model_validate_json(admin("du", either.ec_id[:5], "--json", *either.options).out)
    assert [line.state for line in only.lines] == ["bygone"]
    assert "8 payloads" in admin("du", *either.options).out


def test_du_holds_a_page_at_a_time_and_shows_how_far_it_is(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(6):
        filled.save(filled.kv, kv_slots(1, seed=20 + seed))
    # By its full name: in the package, the function hides the module.
    monkeypatch.setattr(sys.modules["kvstore.admin.inspect.du"], "_PAGE", 4)
    asked: list[int] = []

    class Shown:
        done = 0

        def begin(self, what: str, total_bytes: int | None = None) -> None:
            self.what = what

        def advance(self, nbytes: int) -> None:
            self.done += nbytes

    with Cache(Sources(payloads=f"file://{filled.folder}", environ={}).settings()) as cache:
        assert cache.index is not None
        real = cache.index.states

        def states(name: NamespaceId, segments: list[SegmentId]) -> Any:
            asked.append(len(segments))
            return real(name, segments)

        monkeypatch.setattr(cache.index, "states", states)
        shown = Shown()
        report = du(cache, None, time.time(), shown)
    assert report.payloads == 11
    assert {line.state for line in report.lines} == {"visible"}
    assert (max(asked) <= 4, sum(asked)) == (True, 11)
    assert shown.done == report.stored_bytes
