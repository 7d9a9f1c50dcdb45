"""The recorder: what it writes is what was asked for, bounded in memory and on disk, and never in the way."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.admin.advise.traces import Assumed, Said, Trace, read_traces
from kvstore.admin.progress import Silent
from kvstore.build import open_store
from kvstore.keys import NamespaceId, digests, namespace_id
from kvstore.store.trace import TraceRecorder
from kvstore.threads.transfers import Transfers
from schemas.namespace import Namespace
from schemas.settings import TraceSettings, TransferSettings
from tests.store.world import SLOT_BYTES, chain, namespace
from tests.waiting import PATIENCE_S

NAME = namespace_id(namespace())
NOW = 1_790_000_000.0


class Later:
    """Jobs that run when they are told to."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []
        self.full = False

    def __call__(self, nbytes: int, job: Callable[[], None]) -> bool:
        if not self.full:
            self.jobs.append(job)
        return not self.full

    def run(self) -> None:
        while self.jobs:
            self.jobs.pop(0)()


def at_once(nbytes: int, job: Callable[[], None]) -> bool:
    job()
    return True


class Lost:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, requests: int) -> None:
        self.count += requests


def recorder(
    folder: Path, later: Callable[[int, Callable[[], None]], bool], lost: Callable[[int], None] = print
) -> TraceRecorder:
    made = TraceRecorder(TraceSettings(folder=str(folder)), later, lost=lost, clock=lambda: NOW)
    made.describe(NAME, namespace(), SLOT_BYTES)
    return made


def packed(*path: int) -> bytes:
    return digests(chain(*path))


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for path in sorted(folder.iterdir()) for line in path.read_bytes().splitlines()]


def read(folder: Path) -> Trace:
    return read_traces([folder], Assumed(), Silent())


def shapes(trace: Trace) -> list[tuple[float, list[int]]]:
    return [(round(request.at_s - NOW, 3), request.chain) for request in trace.requests]


def test_what_was_asked_for_is_what_is_read(tmp_path: Path) -> None:
    later = Later()
    trace = recorder(tmp_path, later)
    trace.record(NAME, packed(1, 2, 3), NOW)
    trace.record(NAME, packed(1, 2, 4, 5), NOW + 0.5)
    trace.record(NAME, packed(1, 2, 4), NOW + 1)
    trace.record(NAME, packed(9), NOW + 90)
    trace.close()
    found = read(tmp_path)
    assert shapes(found) == [(0, [0, 1, 2]), (0.5, [0, 1, 3, 4]), (1.0, [0, 1, 3]), (90.0, [5])]
    (space,) = found.spaces
    assert (space.namespace, space.kind, space.block_tokens) == (NAME, "kv", 8)
    assert (space.block_bytes, space.parts, found.skipped) == (SLOT_BYTES, 1, 0)
    # A prefix that is there already is named, not repeated.
    assert [line.get("like") for line in lines(tmp_path)[2:]] == [None, [2, 2], [3, 3], None]


def test_sessions_and_what_is_said_of_them_are_read_again(tmp_path: Path) -> None:
    trace = recorder(tmp_path, Later())
    one, two = bytes(range(16)), bytes(range(1, 17))
    trace.record(NAME, packed(1, 2), NOW, one)
    trace.record_hints(NAME, one, NOW + 1, retain_s=60.5)
    trace.record_hints(NAME, one, NOW + 1)  # nothing is said
    trace.record(NAME, packed(1, 2, 3), NOW + 2, two)
    trace.record(NAME, packed(1, 2, 3), NOW + 3)
    trace.record_hints(NAME, two, NOW + 4, end=True, priority="low")
    trace.close()
    found = read(tmp_path)
    # Lines are counted as before, by which chains refer to each other.
    assert [request.chain for request in found.requests] == [[0, 1], [0, 1, 2], [0, 1, 2]]
    names = [request.session for request in found.requests]
    assert len({*names}) == 3 and names[2] is None and found.skipped == 0
    first, last = found.said
    assert first == Said(NOW + 1, 0, str(names[0]), retain_s=60.5)
    assert last == Said(NOW + 4, 0, str(names[1]), end=True, priority="low")
    # Eight bytes of a session's id, and no more of it.
    assert base64.b64decode(str(names[0])) == one[-8:]


@pytest.mark.parametrize(
    "line",
    [
        '{"t": 1, "n": 0, "session": "AAAA", "end": true}',
        '{"t": 1, "n": 0, "session": 7, "end": true}',
        '{"t": 1, "n": 0, "session": "AAAAAAAAAAA=", "end": "yes"}',
        '{"t": 1, "n": 0, "session": "AAAAAAAAAAA=", "retain": "long"}',
        '{"t": 1, "n": 0, "session": "AAAAAAAAAAA=", "retain": 1e999}',
        '{"t": 1, "n": 0, "session": "AAAAAAAAAAA=", "priority": "most"}',
        '{"t": 1, "n": 0, "session": "AAAAAAAAAAA="}',
        '{"t": 1, "n": 5, "session": "AAAAAAAAAAA=", "end": true}',
        '{"t": 1, "n": 0, "end": true}',
    ],
)
def test_a_hint_that_makes_no_sense_is_skipped(tmp_path: Path, line: str) -> None:
    trace = recorder(tmp_path, Later())
    trace.record(NAME, packed(1), NOW)
    trace.close()
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text() + line + "\n")
    found = read(tmp_path)
    assert (len(found.requests), found.said, found.skipped) == (1, [], 1)


def test_groups_of_a_hybrid_model_are_told_apart(tmp_path: Path) -> None:
    """Their digests differ in the last two bytes alone."""
    trace = recorder(tmp_path, Later())
    trace.record(NAME, digests(chain(1, 2), 0), NOW)
    trace.record(NAME, digests(chain(1, 2), 1), NOW)
    trace.close()
    assert read(tmp_path).blocks == 4


def test_any_requests_come_back(tmp_path: Path) -> None:
    draw = random.Random(1)
    trace = recorder(tmp_path, Later())
    other = namespace(model="other")
    trace.describe(namespace_id(other), other, 77)
    given: list[tuple[NamespaceId, tuple[int, ...]]] = []
    for number in range(400):
        path = [draw.randrange(3) for _ in range(draw.randrange(1, 12))]
        name = draw.choice([NAME, namespace_id(other)])
        given.append((name, tuple(path)))
        trace.record(name, packed(*path), NOW + number)
    trace.close()
    found = read(tmp_path)
    numbers: dict[tuple[NamespaceId, tuple[int, ...]], int] = {}
    for (name, path), request in zip(given, found.requests, strict=True):
        assert found.spaces[request.space].namespace == name
        prefixes = [(name, path[: i + 1]) for i in range(len(path))]
        assert request.chain == [
            numbers.setdefault(prefix, request.chain[i]) for i, prefix in enumerate(prefixes)
        ]
    assert len(set(numbers.values())) == len(numbers) == found.blocks


def test_what_is_remembered_of_chains_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.store.recorded._REMEMBERED", 10)
    trace = recorder(tmp_path, Later())
    for number in range(5):
        trace.record(NAME, packed(1, 2, 3, 4, 10 + number), NOW + number)
    trace.close()
    assert [line.get("like") for line in lines(tmp_path)[2:]] == [None, [2, 4], [2, 4], [2, 4], [2, 4]]
    trace = recorder(tmp_path / "again", Later())
    for number in range(4):
        trace.record(NAME, packed(1, 2, number, 4, 10 + number), NOW + number)
    trace.close()
    # 5 + 3, then 3 more would be too many: all are forgotten, and known again from there on.
    likes = [line.get("like") for line in lines(tmp_path / "again")[2:]]
    assert likes == [None, [2, 2], [2, 2], [4, 2]]
    assert len(read(tmp_path / "again").requests) == 4


def test_writing_is_somebody_elses_and_comes_in_batches(tmp_path: Path) -> None:
    later = Later()
    trace = recorder(tmp_path, later)
    trace.record(NAME, packed(1), NOW)
    assert len(later.jobs) == 1
    assert not list(tmp_path.iterdir())
    for number in range(10):
        trace.record(NAME, packed(number), NOW + 0.05 * number)
    assert len(later.jobs) == 1
    later.run()
    assert len(lines(tmp_path)) == 2 + 11
    trace.record(NAME, packed(1), NOW + 0.9)
    assert not later.jobs  # nobody is woken for one, within the second
    trace.record(NAME, packed(1), NOW + 1.1)
    assert len(later.jobs) == 1
    later.run()
    for _ in range(63):
        trace.record(NAME, packed(1), NOW + 1.2)
    assert not later.jobs
    trace.record(NAME, packed(1), NOW + 1.2)
    assert len(later.jobs) == 1
    trace.close()


def test_a_clock_that_is_set_back_does_not_stop_it(tmp_path: Path) -> None:
    later = Later()
    trace = recorder(tmp_path, later)
    trace.record(NAME, packed(1), NOW)
    later.run()
    trace.record(NAME, packed(1), NOW - 3600)
    assert later.jobs
    trace.close()


def test_what_waits_is_bounded_and_what_is_lost_is_counted(tmp_path: Path) -> None:
    later, lost = Later(), Lost()
    trace = recorder(tmp_path, later, lost)
    long = bytes(range(256)) * (1 << 12)  # a megabyte
    for _ in range(20):
        trace.record(NAME, long, NOW)
    assert lost.count == 4
    later.run()
    assert lost.count == 4
    assert len(lines(tmp_path)) == 2 + 16
    # A queue of jobs that is full: it is asked again with the next one.
    later.full = True
    trace.record(NAME, packed(1), NOW + 5)
    later.full = False
    trace.record(NAME, packed(2), NOW + 5.001)
    assert not later.jobs
    trace.record(NAME, packed(3), NOW + 6.5)
    later.run()
    assert len(lines(tmp_path)) == 2 + 16 + 3
    trace.record(namespace_id(namespace(model="never described")), packed(1), NOW + 9)
    later.run()
    assert lost.count == 5
    trace.close()
    trace.record(NAME, packed(1), NOW)
    assert lost.count == 6


def test_a_file_is_bounded_and_complete_by_itself(tmp_path: Path) -> None:
    most = 1 << 16
    trace = TraceRecorder(TraceSettings(folder=str(tmp_path), most_bytes=most), at_once)
    trace.describe(NAME, namespace(), SLOT_BYTES)
    lost_at = []
    for number in range(900):
        # Every other one shares what was said before, also across files.
        trace.record(NAME, packed(1, 2, 3, *range(number - number % 2, number + 12)), NOW + number)
        sizes = [path.stat().st_size for path in tmp_path.iterdir()]
        assert len(sizes) <= 2
        assert sum(sizes) <= most
        lost_at.append(len(sizes))
    assert set(lost_at) == {1, 2}
    trace.close()
    for path in tmp_path.iterdir():
        found = read_traces([path], Assumed(), Silent())
        assert found.skipped == 0
        assert len(found.requests) > 50
    assert read(tmp_path).requests[-1].at_s == NOW + 899


def test_a_request_longer_than_a_file_is_lost_alone(tmp_path: Path) -> None:
    lost = Lost()
    settings = TraceSettings(folder=str(tmp_path), most_bytes=1 << 16)
    trace = TraceRecorder(settings, at_once, lost=lost)
    trace.describe(NAME, namespace(), SLOT_BYTES)
    trace.record(NAME, packed(1), NOW)
    trace.record(NAME, hashlib.shake_128(b"long").digest(16 * 4000), NOW)
    trace.record(NAME, packed(2), NOW + 2)
    trace.close()
    assert lost.count == 1
    assert len(read(tmp_path).requests) == 2
    assert len(list(tmp_path.iterdir())) == 1


def test_a_disk_that_fails_costs_requests_of_a_minute_and_nothing_else(tmp_path: Path) -> None:
    folder, lost, now = tmp_path / "file", Lost(), [NOW]
    folder.write_text("not a folder")
    trace = TraceRecorder(TraceSettings(folder=str(folder)), at_once, lost=lost, clock=lambda: now[0])
    trace.describe(NAME, namespace(), SLOT_BYTES)
    trace.record(NAME, packed(1), now[0])
    assert lost.count == 1
    folder.unlink()
    now[0] += 30
    trace.record(NAME, packed(2), now[0])
    assert lost.count == 2
    now[0] += 31
    trace.record(NAME, packed(3), now[0])
    assert lost.count == 2
    trace.close()
    assert len(read(folder).requests) == 1


def test_a_full_disk_deletes_nothing_that_was_recorded(tmp_path: Path) -> None:
    most, now = 1 << 16, [NOW]
    settings = TraceSettings(folder=str(tmp_path), most_bytes=most)
    trace = TraceRecorder(settings, at_once, clock=lambda: now[0])
    trace.describe(NAME, namespace(), SLOT_BYTES)

    def ask() -> int:
        now[0] += 61
        trace.record(NAME, packed(*range(int(now[0] - NOW), int(now[0] - NOW) + 12)), now[0])
        return len(list(tmp_path.iterdir()))

    while ask() < 2:
        pass
    ask()
    before = {path.name for path in tmp_path.iterdir()}
    known = len(read(tmp_path).requests)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        for _ in range(6):
            ask()
            assert {path.name for path in tmp_path.iterdir()} == before
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert len(read(tmp_path).requests) == known
    assert ask() == 3
    found = read(tmp_path)
    assert (len(found.requests), found.skipped) == (known + 1, 0)
    # Room is made when it is needed, and not before.
    for _ in range(1000):
        ask()
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= most
    trace.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert read(tmp_path).requests[-1].at_s == now[0]


def test_a_torn_last_line_is_skipped(tmp_path: Path) -> None:
    trace = recorder(tmp_path, Later())
    trace.record(NAME, packed(1, 2), NOW)
    trace.record(NAME, packed(3, 4), NOW + 1)
    trace.close()
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for cut in range(len(whole) - 2, whole.rindex(b"{"), -7):
        path.write_bytes(whole[:cut])
        found = read(tmp_path)
        assert [request.chain for request in found.requests] == [[0, 1]]
        assert found.skipped == 1


def test_many_threads_record_at_once(tmp_path: Path) -> None:
    lost = Lost()
    transfers = Transfers(TransferSettings())
    trace = recorder(tmp_path, transfers.errand, lost)

    def ask(thread: int) -> None:
        for number in range(200):
            trace.record(NAME, packed(thread, number), NOW + number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert transfers.drain(PATIENCE_S)
    trace.close()
    transfers.close()
    assert lost.count == 0
    found = read(tmp_path)
    assert found.skipped == 0
    assert len(found.requests) == 800
    assert found.blocks == 4 + 800


def test_a_store_records_what_it_is_asked_for(tmp_path: Path) -> None:
    """From the settings to a file that can be read; nothing is recorded unless it is asked for."""
    settings = {"payloads": "memory://traced", "index": "memory://traced"}
    with open_store(settings) as store:
        assert store.backends.trace is None
    folder = tmp_path / "made" / "for it"
    with open_store({**settings, "trace": {"folder": str(folder)}}) as store:
        space = store.open(namespace(), block_bytes=SLOT_BYTES)
        space.register()
        assert space.match(packed(1, 2, 3)).blocks == 0
        space.match(packed(1, 2))
    (path,) = folder.iterdir()
    assert str(os.getpid()) in path.name
    found = read(folder)
    assert [request.chain for request in found.requests] == [[0, 1, 2], [0, 1]]
    assert found.spaces[0].namespace == NAME


def test_items_of_encoders_are_traced_as_chains_of_one(tmp_path: Path) -> None:
    items = Namespace(kind="ec", model="eyes", weights="w", dtype="bfloat16")
    trace = recorder(tmp_path, Later())
    trace.describe(namespace_id(items), items, 1 << 20)
    trace.record(namespace_id(items), packed(1), NOW)
    trace.close()
    (space,) = read(tmp_path).spaces
    assert (space.kind, space.block_tokens, space.block_bytes) == ("ec", 0, 1 << 20)


def test_the_lines_are_pinned(tmp_path: Path) -> None:
    """What is recorded now is read by later releases: a change of it is a decision."""
    trace = recorder(tmp_path, Later())
    trace.record_hashes(NAME, chain(1, 2), 0, NOW, local=1)
    trace.record_hashes(NAME, chain(1, 2, 3), 0, NOW + 1.5, session=bytes(range(16)), local=0)
    trace.record_hashes(NAME, chain(4), 1, NOW + 2)
    trace.record_cost(NAME, NOW + 2.5, 81.234567, 0.00123456)
    observed = namespace(model="observed")
    trace.describe(namespace_id(observed), observed, SLOT_BYTES, gpus=8)
    trace.record_cost(namespace_id(observed), NOW + 3, 1.0)
    trace.close()
    [file] = tmp_path.iterdir()
    assert file.read_text().splitlines() == [
        '{"kvstore_trace": 1, "began_s": 1790000000.000}',
        f'{{"space": 0, "namespace": "{NAME}", "kind": "kv", "block_tokens": 8, "block_bytes": {SLOT_BYTES}, '
        '"parts": 1, "model": "tiny", "tenant": "default"}',
        '{"t": 0.000, "n": 0, "d": "3UYzqiUUTHYreRgC3JsS4A==", "local": 1}',
        '{"t": 1.500, "n": 0, "like": [2, 2], "d": "KkRfmrgqeY4=", "session": "CAkKCwwNDg8=", "local": 0}',
        '{"t": 2.000, "n": 0, "d": "L1mEJSrxbpE="}',
        '{"t": 2.500, "n": 0, "token_us": 81.23, "depth_us": 0.001235}',
        f'{{"space": 1, "namespace": "{namespace_id(observed)}", "kind": "kv", "block_tokens": 8, '
        f'"block_bytes": {SLOT_BYTES}, "parts": 1, "model": "observed", "tenant": "default", "gpus": 8}}',
        '{"t": 3.000, "n": 1, "token_us": 1, "depth_us": 0}',
    ]


def test_chains_may_be_packed_where_they_are_written(tmp_path: Path) -> None:
    later, lost = Later(), Lost()
    trace = recorder(tmp_path, later, lost)
    growing = chain(1, 2, 3)
    trace.record_hashes(NAME, growing, 0, NOW, local=2)
    growing += chain(9)  # what is generated after the prompt
    trace.record(NAME, packed(1, 2, 3), NOW + 1)
    trace.record_hashes(NAME, [b"short"], 0, NOW + 2)
    trace.record_hashes(NAME, [], 0, NOW + 3)
    trace.close()
    found = read(tmp_path)
    assert [(one.chain, one.local) for one in found.requests] == [([0, 1, 2], 2), ([0, 1, 2], None)]
    assert (lost.count, found.skipped) == (1, 0)


def test_what_waits_to_be_packed_is_bounded_too(tmp_path: Path) -> None:
    later, lost = Later(), Lost()
    trace = recorder(tmp_path, later, lost)
    hashes = chain(*range(1000)) * 50
    for number in range(10):
        trace.record_hashes(NAME, hashes, 0, NOW + number)
    assert lost.count == 6  # 80 bytes for each of 50,000, of 16 MiB
    trace.close()


def test_costs_are_read_and_nonsense_is_not(tmp_path: Path) -> None:
    trace = recorder(tmp_path, Later())
    trace.record_hashes(NAME, chain(1), 0, NOW)
    trace.record_cost(NAME, NOW + 1, 80.0, 0.5)
    trace.close()
    [file] = tmp_path.iterdir()
    with file.open("a") as out:
        for bad in ("-1", '"x"', "1e300", '1, "depth_us": -1'):
            out.write(f'{{"t": 1, "n": 0, "token_us": {bad}}}\n')
        for local in (-1, 2, 1.5, '"x"'):
            out.write(f'{{"t": 1, "n": 0, "like": [2, 1], "local": {local}}}\n')
    found = read(tmp_path)
    assert [(cost.at_s - NOW, cost.token_us, cost.depth_us) for cost in found.costs] == [(1.0, 80.0, 0.5)]
    assert (found.skipped, len(found.requests)) == (8, 1)
    [space] = found.spaces
    assert (space.model, space.tenant) == ("tiny", "default")
