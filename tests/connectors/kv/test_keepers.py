"""A request's blocks have one keeper, and change it only as vLLM survives it."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.kv.requests import Keeper, Keepers

pytestmark = pytest.mark.engine


def test_a_load_or_a_hand_off_keeps_blocks_and_then_nobody() -> None:
    keepers = Keepers()
    keepers.give("a", Keeper.LOAD)
    keepers.give("b", Keeper.HANDOFF)
    assert [keepers.of(one) for one in "abc"] == [Keeper.LOAD, Keeper.HANDOFF, Keeper.NOBODY]
    assert keepers.loads("a") and not keepers.loads("b")
    # Reports of what is another connector's, or of the other kind, change nothing.
    keepers.release(Keeper.LOAD, ["b", "c"])
    keepers.release(Keeper.HANDOFF, ["a", "c"])
    assert len(keepers) == 2
    keepers.release(Keeper.LOAD, ["a"])
    keepers.release(Keeper.HANDOFF, ["b"])
    assert len(keepers) == 0
    keepers.give("b", Keeper.LOAD)


@pytest.mark.parametrize("before", [Keeper.LOAD, Keeper.HANDOFF])
@pytest.mark.parametrize("then", [Keeper.LOAD, Keeper.HANDOFF])
def test_who_has_a_keeper_gets_no_other(before: Keeper, then: Keeper) -> None:
    keepers = Keepers()
    keepers.give("a", before)
    with pytest.raises(AssertionError, match=f"blocks of a: {before.value} -> {then.value}"):
        keepers.give("a", then)
    assert keepers.of("a") is before
