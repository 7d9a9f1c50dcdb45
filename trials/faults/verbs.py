"""What a process may be doing when it is killed: everything that changes a store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvstore.admin.remove.drop import drop
from kvstore.admin.repair.check import Depth
from kvstore.admin.repair.fsck import fsck
from kvstore.admin.repair.rebuild import rebuild
from kvstore.janitor.janitor import Janitor
from kvstore.keys import new_segment_id, payload_name
from kvstore.rules.lateness import SETTLED_S
from tests.store.ground import HASTY, Ground, ids, later, segment_of

#: A capacity into which less than half of what a ground holds at first fits. No number of its segments lies
#: between the two marks of eviction: one that was interrupted there would be over.
FEW_BYTES = 45_000
#: The writer of a segment whose ranks are two processes: an engine's ranks have one name.
TWO_RANKS = "an engine of two ranks"
#: Grace times are kept in whole seconds, rounded up.
DUE_S = 1.4


def _nothing(ground: Ground) -> None:
    """There is nothing to prepare besides what was saved, or to be done meanwhile."""


@dataclass(frozen=True)
class Verb:
    """Something that changes a store."""

    name: str
    work: Callable[[Ground], None]
    prepare: Callable[[Ground], None] = _nothing
    #: What another process does as soon as the first one is dead.
    meanwhile: Callable[[Ground], None] = _nothing
    #: How long what was prepared takes to be due.
    wait_s: float = 0.0


def _save(ground: Ground) -> None:
    with ground.store(**HASTY) as store:
        ground.save(store, "one", 100)


def _save_two(ground: Ground) -> None:
    with ground.store(**HASTY) as store:
        ground.save(store, "two", 100)


def _save_first(ground: Ground) -> None:
    with ground.store(**HASTY) as store:
        store.backends.writer.adopt(TWO_RANKS)
        ground.save(store, "two", 100, ranks=[0] if not ground.attempt else [0, 1])


def _save_second(ground: Ground) -> None:
    with ground.store(**HASTY) as store:
        store.backends.writer.adopt(TWO_RANKS)
        ground.save(store, "two", 100, ranks=[1])


def _evict(ground: Ground) -> None:
    with ground.housekeeping(capacity_bytes=FEW_BYTES) as housekeeping:
        housekeeping.evict()


def _throw_away(ground: Ground) -> None:
    """Puts a chain of each namespace into the trash."""
    with ground.index(**HASTY) as index:
        for which, name in ids().items():
            gone = [segment_of(which, 0, first) for first in (0, 2)]
            assert index.evict(name, gone, delete_after_s=0, rule="admin") == len(gone)


def _reap(ground: Ground) -> None:
    with ground.housekeeping() as housekeeping:
        for name in ids().values():
            housekeeping.reap(name)


def _sweep(ground: Ground) -> None:
    with ground.housekeeping() as housekeeping:
        for name in ids().values():
            housekeeping.sweep(name)


def _invalidate(ground: Ground) -> None:
    name = ids()["one"]
    with ground.index() as index:
        index.invalidate(name)
    with ground.housekeeping() as housekeeping:
        housekeeping.drain(name)


def _empty(ground: Ground) -> None:
    """Leaves nothing of a namespace but its name and entries that dangle."""
    name = ids()["two"]
    with ground.cache(**HASTY) as cache:
        index = cache.made_index()
        index.invalidate(name)
        while index.drain(name, delete_after_s=0, limit=1000):
            pass
        due = index.reapable(name, later(), 1000)
        cache.payloads.delete([payload_name(name, one, rank) for one, ranks in due for rank in range(ranks)])
        index.reaped(name, [one for one, _ in due])


def _erase(ground: Ground) -> None:
    with ground.index() as index:
        while index.erase(ids()["two"], 3) == "more":
            pass


def _drop(ground: Ground) -> None:
    name = ids()["one"]
    with ground.cache(**HASTY) as cache:
        if name in cache.namespaces():
            drop(cache, name, apply=True, now=True, clock=later)


def _lose_the_index(ground: Ground) -> None:
    with ground.index() as index, ground.cache() as cache:
        if cache.index_file is None:
            index.leaf._client.command("FLUSHDB")  # type: ignore[attr-defined]
            return
    for end in ("", "-wal", "-shm"):
        Path(f"{cache.index_file}{end}").unlink(missing_ok=True)


def rebuild_index(ground: Ground) -> None:
    """As `cache-admin rebuild --apply`, one payload after the other."""
    with ground.cache(**HASTY) as cache:
        assert rebuild(cache, apply=True, jobs=1).ended == "complete"


def _make_waste(ground: Ground) -> None:
    """Payloads that no index ever knew, and some in the trash."""
    _throw_away(ground)
    with ground.cache() as cache:
        for name in ids().values():
            for _ in range(3):
                cache.payloads.put(payload_name(name, new_segment_id(), 0), [memoryview(bytes(1000))])


def _delete_waste(ground: Ground) -> None:
    with ground.cache(**HASTY) as cache:
        depth = Depth(only_list=True)
        report = fsck(cache, depth=depth, apply=True, older_than_s=SETTLED_S, clock=later)
        assert report.ended == "complete"


def _janitor(ground: Ground) -> None:
    changes = {**HASTY, "capacity_bytes": FEW_BYTES}
    changes["janitor"] = {"scrub_percent": 100.0, "reconcile_s": 0.01}
    with ground.cache(**changes) as cache:
        Janitor(cache.made_index(), cache.payloads, cache.evidence, cache.settings).round()


SAVE_TWO = Verb("save and commit, two ranks", _save_two)
#: Those that change the payload store.
ON_BUCKETS = [
    Verb("save and commit", _save),
    SAVE_TWO,
    Verb("reap", _reap, prepare=_throw_away, wait_s=DUE_S),
    Verb("drop a namespace", _drop),
    Verb("delete waste", _delete_waste, prepare=_make_waste, wait_s=DUE_S),
]
VERBS = [
    *ON_BUCKETS,
    Verb("save and commit as one of two ranks, the other goes on", _save_first, meanwhile=_save_second),
    Verb("evict", _evict),
    Verb("sweep", _sweep, prepare=_throw_away),
    Verb("invalidate and drain", _invalidate),
    Verb("erase a namespace", _erase, prepare=_empty),
    Verb("rebuild", rebuild_index, prepare=_lose_the_index),
    Verb("a janitor's round", _janitor, prepare=_throw_away, wait_s=DUE_S),
]
