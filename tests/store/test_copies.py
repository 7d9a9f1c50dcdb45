"""Copies of what was erased, in the fast tiers of other nodes: clean ones, and some to be uploaded."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvstore.conformance.faulty import FaultyPayloads, Plan, Rule
from kvstore.index.maintenance import FullIndex
from kvstore.keys import NO_SALT, SaltId, salt_id
from kvstore.payloads.tiered.store import TieredPayloads
from kvstore.store.space import Space
from kvstore.store.store import Store
from tests.payloads.tiered.world import check_ledger
from tests.store.test_tier import Node, files, loads, node
from tests.store.world import chain, content, slots
from tests.waiting import PATIENCE_S, until

__all__ = ["node"]

ALICE, BOB = salt_id("alice"), salt_id("bob")
A, B, C = chain(*range(40)), chain(*range(100, 140)), chain(*range(200, 240))


def erase(store: Store, space: Space, salt: SaltId) -> None:
    """What `cache-admin erase` does on a node that has no folder."""
    index = store.maintenance
    index.forbid(space.id, salt)
    gone = [one.segment for one in index.of_salt(space.id, salt)]
    index.evict(space.id, gone, delete_after_s=0, rule="erased")
    index.reaped(space.id, gone)


def tend(store: Store) -> None:
    """Housekeeping, as reads and saves queue it; all of the work behind it."""
    tier = store.backends.tier
    assert isinstance(tier, TieredPayloads)
    tier.housekeeping()
    while tier.chore():
        pass
    assert store.transfers.drain(PATIENCE_S)


def test_copies_of_a_salt_go_and_others_stay(tmp_path: Path, node: Node) -> None:
    (mine, space), (theirs, other) = node("mine"), node("theirs")
    for hashes, salt in ((A, ALICE), (B, BOB), (C, NO_SALT)):
        space.save(slots(hashes), salt=salt)
        assert loads(other, hashes) == [content(one) for one in hashes]
    assert theirs.transfers.drain(PATIENCE_S)
    assert len(files(tmp_path / "theirs")) == 3
    tend(theirs)
    assert len(files(tmp_path / "theirs")) == 3
    erase(mine, space, ALICE)
    tend(theirs)
    assert len(files(tmp_path / "theirs")) == 2
    assert loads(other, A) == []
    for hashes in (B, C):
        assert loads(other, hashes) == [content(one) for one in hashes]
    tier = theirs.backends.tier
    assert tier is not None
    check_ledger(tier._ledger, tmp_path / "theirs")


def test_what_waits_for_its_upload_is_never_uploaded(tmp_path: Path, node: Node) -> None:
    (mine, space), (theirs, other) = node("mine"), node("theirs", write="back")
    tier = theirs.backends.tier
    assert tier is not None
    shared = FaultyPayloads(tier._back._slow, Plan(Rule("transient", verbs=("put",))))
    tier._back._slow = shared
    other.save(slots(A), salt=ALICE)
    other.save(slots(B), salt=BOB)
    assert theirs.transfers.drain(PATIENCE_S)
    assert (len(files(tmp_path / "theirs")), files(tmp_path / "shared")) == (2, [])
    erase(mine, space, ALICE)
    # Before the bucket can be written again, as after a partition.
    assert tier.chore() is False
    tier._back._slow = tier._slow
    tier._back._retry_at = 0.0
    tend(theirs)
    assert len(files(tmp_path / "shared")) == len(files(tmp_path / "theirs")) == 1
    assert loads(space, B) == [content(one) for one in B]


def test_what_is_computed_later_under_the_same_salt_stays(
    tmp_path: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mine, space), (theirs, other) = node("mine"), node("theirs")
    monkeypatch.setattr("kvstore.index.scripted.salts.CLOCKS_DIFFER_S", 1)
    erase(mine, space, ALICE)
    last_s = mine.maintenance.forbidden(space.id)[ALICE] + 1
    until(lambda: mine.maintenance.now(space.id) > last_s)
    saved = other.save(slots(A), salt=ALICE)
    assert saved.outcome == "stored"
    tend(theirs)
    assert len(files(tmp_path / "theirs")) == 1
    # Evicted for another reason: its copy is left to the order of use.
    index: FullIndex = mine.maintenance
    gone = [one.segment for one in index.of_salt(space.id, ALICE)]
    index.evict(space.id, gone, delete_after_s=0, rule="capacity")
    tend(theirs)
    assert len(files(tmp_path / "theirs")) == 1


def test_a_whole_namespace(tmp_path: Path, node: Node) -> None:
    (mine, space), (theirs, other) = node("mine"), node("theirs")
    for hashes, salt in ((A, ALICE), (C, NO_SALT)):
        other.save(slots(hashes), salt=salt)
    mine.maintenance.forbid(space.id, NO_SALT)
    mine.maintenance.invalidate(space.id)
    tend(theirs)
    assert files(tmp_path / "theirs") == files(tmp_path / "shared") == []


def test_a_folder_is_gone_through_until_nothing_can_follow(tmp_path: Path, node: Node) -> None:
    (mine, space), (theirs, other) = node("mine"), node("theirs")
    tier = theirs.backends.tier
    assert tier is not None
    looked: list[str] = []
    listed = tier.copies.list

    def listing(prefix: str = "") -> object:
        # Without a prefix it is the ledger that is compared with the folder.
        looked.extend([prefix] if prefix else [])
        return listed(prefix)

    tier.copies.list = listing  # type: ignore[method-assign, assignment]
    other.save(slots(B), salt=BOB)
    # From here on nobody else goes through the folder.
    tier._later = lambda nbytes, job: True
    assert theirs.transfers.drain(PATIENCE_S)
    tier.chore()
    assert looked == []
    erase(mine, space, ALICE)
    for _ in range(3):
        tier.chore()
    assert looked == [f"{space.id}/"] * 3
    theirs.backends.maintenance.now = lambda namespace: time.time() + 3600  # type: ignore[method-assign]
    for _ in range(3):
        tier.chore()
    assert looked == [f"{space.id}/"] * 4
