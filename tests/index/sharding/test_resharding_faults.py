"""Resharding, when somebody else does it too, a lease runs out, or Redis loses what it was told last."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import KVStoreError, NamespaceUnknown, TransientError
from kvstore.index.port import CommitState
from kvstore.index.redis import layouts as redis_layouts
from kvstore.index.redis.index import RedisIndex
from kvstore.index.sharding.index import ShardedIndex
from kvstore.index.sharding.layouts import LOOK_S, lease_of
from kvstore.index.sharding.names import shard_names
from kvstore.keys import NamespaceId, new_segment_id
from tests.index.contract.chains import CREATED_S, chain, namespace, put, record, served
from tests.index.sharding.flaky import FlakyLeaf
from tests.index.sharding.moving import (
    ALL,
    FEW,
    SALT,
    STEPS,
    WAYS,
    Engine,
    Stepped,
    filled,
    found,
    resharded,
    some_steps,
    steps_of,
)

pytestmark = pytest.mark.servers

#: Has register.lua of the release before there were seals.
GOLDEN = Path(__file__).parent / "golden"
#: What of `meta` tells how a namespace lies.
LAYOUT = ("schema", "shards", "to", "from", "run", "bucket_bits", "aside_bits", "sealed", "role")


def restored(raw: Any, name: NamespaceId, fields: dict[bytes, bytes]) -> None:
    """Lets a namespace lie as it did, as after a failover to a server that was behind."""
    where = f"kvs:{{{name}}}:meta"
    raw.hdel(where, *LAYOUT)
    raw.hset(where, mapping={one: text for one, text in fields.items() if one.decode() in LAYOUT})


def whole(leaf: RedisIndex, engine: Engine, chains: list[bytes]) -> None:
    """All that there was can be matched, and all that was saved, by who looks, and engines save again."""
    index = ShardedIndex(leaf)
    index.register(namespace(), expected_blocks=1000)
    assert found(index, engine.name, chains) == ALL
    assert found(index, engine.name, engine.saved) == [3] * len(engine.saved)
    engine.check(index)
    put(index, engine.name, one := chain(2, seed="at last"))
    assert served(index.match(engine.name, one)) == 2


@pytest.mark.parametrize(("before", "after"), WAYS)
@pytest.mark.parametrize("other", [2, 3, 8])
@pytest.mark.parametrize("ends", [True, False])
def test_of_two_only_the_later_one_changes_anything(
    redis_url: str,
    leaf: RedisIndex,
    stepped: Stepped,
    raw: Any,
    before: int,
    after: int,
    other: int,
    *,
    ends: bool,
) -> None:
    """One is held up for longer than its lease, at any step. Meanwhile another one begins, and comes to its
    end, or is in the middle of it when the first one goes on."""
    second = Stepped(redis_url)
    name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
    count = steps_of(stepped, name, after)
    for step in some_steps(count, STEPS // 2):
        raw.flushall()
        name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
        engine = Engine(leaf, name)

        def meanwhile() -> None:
            if ends:
                resharded(second.leaf, name, other, lease=False)
            else:
                with suppress(KVStoreError), second.killed(step=40 + step % 50, surely=False):
                    resharded(second.leaf, name, other, lease=False)
            engine.now += LOOK_S
            engine.save(chain(3, seed="meanwhile"))

        stepped.at(step, meanwhile)
        with suppress(TransientError):
            resharded(stepped.leaf, name, after, lease=False)
        engine.now += LOOK_S
        index = ShardedIndex(leaf)
        assert found(index, name, chains) == ALL, step
        assert found(index, name, engine.saved) == [3] * len(engine.saved), step
        resharded(leaf, name, after)
        whole(leaf, engine, chains)
    second.close()


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_a_turn_that_is_lost_is_taken_again(
    leaf: RedisIndex, stepped: Stepped, raw: Any, before: int, after: int
) -> None:
    """At any step after it, `meta` is as it was before; nothing is dropped, or withdrawn, on its word."""
    name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
    first = stepped.steps
    at: list[int] = []
    stepped.before("turn", lambda: at.append(stepped.steps - first))
    count = steps_of(stepped, name, after)
    for step in range(at[0] + 1, count + 1):
        raw.flushall()
        name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
        engine = Engine(leaf, name)
        kept: dict[bytes, bytes] = {}

        def lose() -> None:
            engine.now += LOOK_S
            engine.save(chain(3, seed="after the turn"))
            # Of one shard after nothing tells that it is, but those before.
            olds = [f"kvs:{{{one}}}:meta" for one in shard_names(name, before)]
            if after > 1 or raw.exists(*olds):
                restored(raw, name, kept)

        def turn() -> None:
            kept.update(raw.hgetall(f"kvs:{{{name}}}:meta"))
            stepped.at(step - at[0], lose)

        stepped.before("turn", turn)
        with suppress(TransientError):
            resharded(stepped.leaf, name, after)
        resharded(leaf, name, after)
        whole(leaf, engine, chains)


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_nothing_is_dropped_on_the_word_of_a_turn_that_is_lost(
    leaf: RedisIndex, stepped: Stepped, raw: Any, before: int, after: int
) -> None:
    """It is lost during the wait, and whoever took it is killed at its end."""
    name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
    engine, kept = Engine(leaf, name), dict[bytes, bytes]()

    def turn() -> None:
        kept.update(raw.hgetall(f"kvs:{{{name}}}:meta"))
        stepped.before("end", stepped.kill)

    def lose(seconds: float) -> None:
        engine.now += LOOK_S
        if kept:
            engine.save(chain(3, seed="after the turn"))
            restored(raw, name, kept)
            kept.clear()

    with stepped.killed():
        stepped.before("turn", turn)
        resharded(stepped.leaf, name, after, wait=lose, lease=False)
    resharded(leaf, name, after)
    whole(leaf, engine, chains)


@pytest.mark.parametrize(("before", "after"), [(8, 2), (2, 8)])
@pytest.mark.parametrize("asked", ["before", "after", "another"])
def test_what_says_how_it_lies_is_lost(
    leaf: RedisIndex, stepped: Stepped, raw: Any, before: int, after: int, asked: str
) -> None:
    """At any step, and an engine registers it, whose settings say one number or the other: what is found is
    what was there, and it can be saved again."""
    number = {"before": before, "after": after, "another": 4}[asked]
    name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
    count = steps_of(stepped, name, after)
    for step in some_steps(count, STEPS // 2):
        raw.flushall()
        name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
        engine = Engine(leaf, name)

        def lose() -> None:
            raw.delete(f"kvs:{{{name}}}:meta")
            ShardedIndex(leaf, shards=number).register(namespace(), expected_blocks=1000)

        stepped.at(step, lose)
        with suppress(TransientError):
            resharded(stepped.leaf, name, after)
        whole(leaf, engine, chains)
        resharded(leaf, name, after)
        index = ShardedIndex(leaf)
        assert found(index, name, chains) == ALL, step
        assert {one.segment for one in index.segments(name)} >= engine.payloads - {
            one for one, _ in index.reapable(name, 1 << 40, 1000)
        }


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_an_engine_ends_the_seal_of_who_is_about_it_no_more(
    leaf: RedisIndex, stepped: Stepped, raw: Any, before: int, after: int
) -> None:
    """And then that run can't turn, though it was only held up."""
    name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
    engine = Engine(leaf, name)
    lease = f"kvs:lease:{lease_of(name)}"

    def held_up() -> None:
        assert engine.save(chain(3, seed="sealed")) is None
        raw.delete(lease)
        assert engine.save(chain(3, seed="unsealed"))
        engine.tools.evict(name, engine.segments(chains[:3]), delete_after_s=0, rule="bad")
        engine.reap()

    stepped.before("turn", held_up)
    with pytest.raises(TransientError, match="run it again"):
        resharded(stepped.leaf, name, after)
    index = ShardedIndex(leaf)
    assert index.accounts()[0].shards == before
    resharded(leaf, name, after)
    index = ShardedIndex(leaf)
    assert found(index, name, chains) == [0] * 3 + ALL[3:]
    assert found(index, name, engine.saved) == [3]
    engine.check(index)


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_older_releases_leave_alone_what_is_sealed(
    leaf: RedisIndex, stepped: Stepped, raw: Any, before: int, after: int
) -> None:
    """Their engines register what is unknown to them, and empty what of schema 2 has lost its bits."""
    name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
    folder = Path(redis_layouts.__file__).parent / "lua"
    older = raw.register_script(
        (folder / "keys.lua").read_text() + (GOLDEN / "register_without_seals.lua").read_text()
    )
    answers = []

    def register() -> None:
        for shard in shard_names(name, before):
            answers.append(older([f"kvs:{{{shard}}}:meta"], ["{}", "kv", "", 4, 1, 1]))

    stepped.before("turn", register)
    resharded(stepped.leaf, name, after)
    assert answers == [2] * before
    index = ShardedIndex(leaf)
    assert found(index, name, chains) == ALL
    Engine(leaf, name).check(index)
    # And one that is unsealed is theirs again.
    with stepped.killed(before="turn"):
        resharded(stepped.leaf, name, before, lease=False)
    index.register(namespace(), expected_blocks=1000)
    for shard in shard_names(name, after):
        assert older([f"kvs:{{{shard}}}:meta"], ["{}", "kv", "", 4, 1, 1]) == 0
    assert found(index, name, chains) == ALL


@pytest.mark.parametrize("number", [8, 2])
def test_seals_of_one_that_is_forgotten_are_ended(leaf: RedisIndex, raw: Any, number: int) -> None:
    """By a registration, or by bringing it where it lies."""
    name, chains = filled(ShardedIndex(leaf, shards=number), FEW)
    for how in ("register", "reshard"):
        for shard in shard_names(name, number):
            assert leaf.reshard(shard, "seal", run="forgotten")
        index = ShardedIndex(leaf)
        with pytest.raises(NamespaceUnknown):
            put(index, name, chain(2, seed=how))
        if how == "register":
            index.register(namespace(), expected_blocks=1000)
        else:
            resharded(leaf, name, number)
        put(index, name, chain(2, seed=how))
    assert found(index, name, chains) == ALL


@pytest.mark.parametrize(("before", "after"), WAYS)
@pytest.mark.parametrize("verb", ["reconcile", "erase"])
def test_upkeep_that_is_held_up_drops_nothing_of_it(
    redis_url: str, leaf: RedisIndex, raw: Any, before: int, after: int, verb: str
) -> None:
    """The whole of it, or half of it, falls between any two requests of another process."""
    upkeep, mover = Stepped(redis_url), Stepped(redis_url)
    for half in (False, True):
        step = 0
        over = False
        while not over:
            step += 1
            raw.flushall()
            name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
            # Of a number that it lay in once.
            for shard in shard_names(name, after) if after > 1 else ():
                leaf.register_shard(shard, namespace(), expected_blocks=100)
                put(leaf, shard, chain(2, seed=shard))
            engine, over = Engine(leaf, name), True

            def move() -> None:
                nonlocal over
                over = False
                if half:
                    with mover.killed(before="turn"):
                        resharded(mover.leaf, name, after, lease=False)
                else:
                    resharded(mover.leaf, name, after)
                    engine.now += LOOK_S
                    assert engine.save(chain(3, seed="new"))

            upkeep.at(step, move)
            index = ShardedIndex(upkeep.leaf)
            if verb == "reconcile":
                index.reconcile(name)
            else:
                assert index.erase(name, 1000) == "in_use"
            upkeep.between = lambda: None
            resharded(leaf, name, after)
            whole(leaf, engine, chains)
    upkeep.close()
    mover.close()


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_who_lists_it_meanwhile_is_told(leaf: RedisIndex, raw: Any, before: int, after: int) -> None:
    name, _ = filled(ShardedIndex(leaf, shards=before), FEW)
    for walk in ("segments", "entries", "of_salt"):
        index = ShardedIndex(leaf)
        listing = getattr(index, walk)(name, *([SALT] if walk == "of_salt" else []))
        next(listing)
        number = after if ShardedIndex(leaf).accounts()[0].shards == before else before
        resharded(leaf, name, number)
        with pytest.raises(TransientError, match="try again"):
            list(listing)


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_what_was_asked_of_shards_that_are_gone_is_asked_again(
    redis_url: str, leaf: RedisIndex, raw: Any, before: int, after: int
) -> None:
    """Else a `gc` that was held up would take all payloads for waste."""
    asking = Stepped(redis_url)
    name, _ = filled(ShardedIndex(leaf, shards=before), FEW)
    segments = [one.segment for one in ShardedIndex(leaf).segments(name)]
    index = ShardedIndex(asking.leaf)
    assert index.states(name, segments) == ["visible"] * len(segments)
    # The layout was looked at, and then it is held up.
    asking.at(2, lambda: resharded(leaf, name, after) and None)
    assert index.states(name, segments) == ["visible"] * len(segments)
    # Whoever can't ask does not go by what was.
    flaky = FlakyLeaf(leaf)
    index = ShardedIndex(flaky)
    index.states(name, segments)
    flaky.down.add(name)
    with pytest.raises(TransientError):
        index.states(name, segments)
    asking.close()


def test_what_is_believed_is_believed_from_when_it_was_asked(leaf: RedisIndex) -> None:
    """A look that takes long is no longer bound, and the old shards are dropped by then."""
    name, chains = filled(ShardedIndex(leaf, shards=8), FEW)
    now, flaky = 0.0, FlakyLeaf(leaf)
    index = ShardedIndex(flaky, monotonic=lambda: now)

    def slow(verb: str, where: Any) -> None:
        nonlocal now
        now += LOOK_S * 0.75 if verb == "layout" else 0.0

    flaky.between = slow
    assert found(index, name, chains[:1]) == ALL[:1]
    flaky.between = lambda verb, where: None
    resharded(leaf, name, 2)
    now += LOOK_S * 0.5
    assert found(index, name, chains) == ALL


def test_what_an_erasure_was_refused_is_deleted(leaf: RedisIndex, stepped: Stepped) -> None:
    """Its salt was forbidden, and what is saved with it was sealed: no payload is forgotten."""
    name, chains = filled(ShardedIndex(leaf, shards=8), FEW)
    engine = Engine(leaf, name)
    one = chain(2, seed="late")
    late, salted = new_segment_id(one), record(2, salt=SALT, created_s=CREATED_S)

    def save() -> None:
        assert engine.index.commit(name, late, one, salted, rank=0, ranks=1) is CommitState.VISIBLE
        engine.payloads.add(late)

    def erase() -> None:
        engine.tools.forbid(name, SALT)
        with pytest.raises(NamespaceUnknown):
            engine.tools.evict(name, [late], delete_after_s=0, rule="erased")
        stepped.kill()

    def seal() -> None:
        save()
        stepped.before("turn", erase)

    with stepped.killed():
        stepped.before("seal", seal)
        resharded(stepped.leaf, name, 2, lease=False)
    resharded(leaf, name, 2)
    engine.now += LOOK_S
    engine.reap()
    assert late not in engine.payloads
    index = ShardedIndex(leaf)
    assert found(index, name, chains) == [2] * FEW
    assert list(index.of_salt(name, SALT)) == []
    engine.check(index)
