"""What routers are told of segments: no block with its tokens before its parent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvstore.admin.feed.view import Announced, RoutersView
from kvstore.admin.feed.wire import BlockTokens, Owner, SizedHash
from kvstore.keys import NamespaceId, SegmentId
from schemas.namespace import GroupSpec

FULL = GroupSpec(kind="full", block_tokens=1, dtype="BF16", shape=(1, 1, 1, 1))
OWNER = Owner("ns", 0, FULL)
#: A chain of two segments, a branch of it, and one that goes on after the branch.
HEAD, TAIL, BRANCH, LEAF = (0, 1, 2), (2, 3, 4), (2, 5, 6), (4, 7, 8)
PARENTS = {1: None, 2: 1, 3: 2, 4: 3, 5: 2, 6: 5, 7: 6, 8: 7}


def key(segment: tuple[int, ...]) -> tuple[NamespaceId, SegmentId]:
    return NamespaceId("ns"), SegmentId(bytes(segment))


def add(view: RoutersView, segment: tuple[int, ...]) -> list[dict[str, Any]]:
    return view.add(key(segment), Announced(OWNER, segment[0], segment[1:]))


def learn(view: RoutersView, blocks: Iterable[int], size: int = 1) -> list[dict[str, Any]]:
    return view.learn(
        [(SizedHash(b, size), BlockTokens(PARENTS.get(b), bytes(4), None, None)) for b in blocks]
    )


def shape(events: Iterable[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Returns the blocks of each event, and their parent, "bare" or "gone"."""
    found = []
    for event in events:
        kind = "gone" if event["type"] == "BlockRemoved" else "bare"
        found.append((event["block_hashes"], event["parent_block_hash"] if event.get("token_ids") else kind))
    return found


def placed(events: Iterable[dict[str, Any]], known: set[int] | None = None) -> set[int]:
    """What a router can place of a stream; it must be all that has tokens."""
    known = set() if known is None else known
    for event in events:
        for block in event["block_hashes"] if event["token_ids"] else ():
            assert PARENTS[block] is None or PARENTS[block] in known, f"{block} before its parent"
            known.add(block)
    return known


def test_children_wait_for_their_parents() -> None:
    view = RoutersView(100)
    assert learn(view, PARENTS) == []
    assert shape(add(view, LEAF)) == [([7, 8], "bare")]
    assert shape(add(view, TAIL)) == [([3, 4], "bare")]
    assert shape(add(view, BRANCH)) == [([5, 6], "bare")]
    assert shape(add(view, HEAD)) == [([1, 2], None), ([3, 4], 2), ([5, 6], 2), ([7, 8], 6)]
    assert view.bare_blocks == 0
    assert placed(view.snapshot()) == set(PARENTS)


def test_what_is_learnt_late_is_told_when_all_before_it_is_known() -> None:
    view = RoutersView(100)
    for segment in (HEAD, BRANCH, LEAF):
        add(view, segment)
    assert learn(view, [6, 7, 8, 2]) == [] and view.bare_blocks == 6
    assert shape(learn(view, [1])) == [([1, 2], None)]
    assert shape(learn(view, [5])) == [([5, 6], 2), ([7, 8], 6)]
    assert view.bare_blocks == 0 and learn(view, PARENTS) == []


def test_a_snapshot_places_all_and_what_lost_its_parent_waits_for_it() -> None:
    view = RoutersView(100)
    learn(view, PARENTS)
    for segment in (HEAD, BRANCH, LEAF):
        add(view, segment)
    assert shape(view.drop(key(BRANCH))) == [([5, 6], "gone")]
    known = placed(view.snapshot())
    assert known == {1, 2} and view.bare_blocks == 2
    # Whoever has read the snapshot can place what comes, too.
    assert placed(add(view, BRANCH), known) == {1, 2, 5, 6, 7, 8}


def test_a_wrong_word_does_not_stay() -> None:
    view = RoutersView(100)
    add(view, HEAD)
    assert view.learn([(SizedHash(1, 1), BlockTokens(99, bytes(4), None, None))]) == []
    assert learn(view, [2]) == [] and learn(view, [1], size=2) == []
    assert shape(learn(view, [1])) == [([1, 2], None)]


def test_what_is_announced_keeps_its_tokens_whatever_engines_tell() -> None:
    view = RoutersView(2)
    learn(view, [1, 2])
    add(view, HEAD)
    for block in range(100, 200):
        learn(view, [block])
    assert len(view.told) == 4
    assert placed(view.snapshot()) == {1, 2}


def test_the_deepest_is_crowded_out() -> None:
    view = RoutersView(4)
    add(view, HEAD)
    add(view, BRANCH)
    learn(view, PARENTS)
    assert shape(add(view, LEAF)) == [([7, 8], 6), ([7, 8], "gone")]
    assert shape(add(view, TAIL)) == [([3, 4], 2), ([5, 6], "gone")]
    assert view.crowded_out == 2 and key(HEAD) in view
    assert view.drop(key(LEAF)) == []


def test_a_block_of_two_segments_is_told_with_the_first_and_gone_with_the_last() -> None:
    view = RoutersView(100)
    add(view, (0, 1, 2))
    add(view, (0, 1))
    assert shape(learn(view, [1, 2])) == [([1, 2], None)]
    assert view.drop(key((0, 1))) == []
    assert add(view, (0, 1)) == []
    assert shape(view.drop(key((0, 1, 2)))) == [([2], "gone")]
    assert shape(view.drop(key((0, 1)))) == [([1], "gone")]
    assert view.bare_blocks == view.blocks == len(view) == 0
