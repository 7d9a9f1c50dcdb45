"""KV of multimodal prompts: whatever a client calls a picture, its blocks are found by what it is."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.engine import provenance
from connectors.engine.contents import HANDLE, Contents, content_digest, loaded
from connectors.engine.media import Media
from connectors.engine.names import BlockNames
from connectors.engine.step import RequestView
from connectors.kv.events import Events, Table
from connectors.kv.handoff.handoffs import Handoffs
from connectors.kv.messages import GroupLoad, Save
from connectors.kv.scheduler import KVScheduler
from kvstore.format.segment import Slot
from kvstore.index.port import Run
from kvstore.keys import SegmentId, block_key
from kvstore.store.space import Space
from kvstore.store.store import Store
from tests.connectors.groups import SCHEDULERS, TOKENS
from tests.connectors.kv.world import answer, half
from tests.fake_vllm import FakeData, FakeFeature, FakeField, FakePlace, FakeRequest, step
from tests.store.world import SHAPE, make_store, open_space

pytestmark = pytest.mark.engine

#: Tokens of the pictures: in the second block, and from the fourth into the fifth.
FIRST, SECOND = FakePlace(TOKENS + 2, 4), FakePlace(3 * TOKENS + 6, 4)
#: Those of six blocks of a prompt that have names of their own with pictures at these places.
BEHIND = range(1, 6)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = make_store(tmp_path / "store", identity={"client_uuids": "refuse"})
    yield made
    made.close()


@pytest.fixture
def space(store: Store) -> Space:
    return open_space(store)


@pytest.fixture
def make(store: Store, space: Space) -> Iterator[Callable[..., KVScheduler]]:
    made: list[KVScheduler] = []

    def open_half(**changes: Any) -> KVScheduler:
        made.append(half(store, space, **changes))
        return made[-1]

    yield open_half
    for one in made:
        one._namespace.close()


def picture(what: str, name: str = "", place: FakePlace = FIRST) -> FakeFeature:
    """A picture that a client calls `name`."""
    return FakeFeature(name or what, data=FakeData({"pixels": FakeField(what)}), mm_position=place)


def request(
    request_id: str, *pictures: FakeFeature, blocks: int = 6, prompt: str = "", **more: Any
) -> FakeRequest:
    """A request whose blocks vLLM hashes alike, as far as its pictures are called alike: its steps stand for
    tokens and names."""
    steps = []
    for block in range(blocks):
        names = [one.identifier for one in pictures if one.mm_position.offset < (block + 1) * TOKENS]
        steps.append(zlib.crc32(repr((prompt, block, names)).encode()))
    return FakeRequest(request_id, steps, mm_features=list(pictures), **more)


def names(one: FakeRequest, *, refuse: bool = True) -> list[bytes]:
    contents = Contents(Media({})) if refuse else None
    return list(BlockNames(RequestView(one), contents, TOKENS).all())


def run(scheduler: KVScheduler, one: FakeRequest, computed: int = 0, **encodes: Any) -> list[bytes]:
    """Has a request computed, with its pictures encoded, and returns the names under which it is saved."""
    answer(scheduler, one, computed)
    one.num_computed_tokens = computed
    indices = [i for i, each in enumerate(one.mm_features) if each.mm_position.offset >= computed]
    encoded = {"scheduled_encoder_inputs": {one.request_id: indices}} | encodes
    made = step(scheduler, (one, one.num_prompt_tokens - computed), **encoded)
    return [name for save in made.saves for name in save.hashes]


def behind(some: list[bytes]) -> list[bytes]:
    """Those of a request's blocks that are at or behind its picture, which is in the second one."""
    return [name for name in some if name != request("any").block_hashes[0]]


def put(space: Space, some: list[bytes]) -> None:
    space.save([Slot(block_key(one), memoryview(bytes(1024)), "BF16", SHAPE) for one in some])


# ---- names ------------------------------------------------------------------------------------------


def test_a_prompt_without_pictures_keeps_vllms_hashes() -> None:
    one = request("r")
    assert names(one) == one.block_hashes


def test_blocks_from_a_picture_on_are_bound_to_it() -> None:
    honest, forged = request("r", picture("cat")), request("f", picture("dog", "cat"))
    assert honest.block_hashes == forged.block_hashes, "vLLM can't tell them apart"
    assert names(honest)[:1] == names(forged)[:1] == honest.block_hashes[:1]
    assert all(names(honest)[i] != names(forged)[i] for i in BEHIND)
    assert all(names(honest)[i] != honest.block_hashes[i] for i in BEHIND)
    assert names(request("again", picture("cat"))) == names(honest)
    assert names(forged, refuse=False) == forged.block_hashes


def test_equal_names_mean_equal_pictures_before_them() -> None:
    """Also of several: the second one's bytes, their order, and those of the first behind the second."""
    one, two = picture("cat"), picture("dog", place=SECOND)
    base = names(request("r", one, two))
    second = names(request("s", one, picture("fox", "dog", SECOND)))
    assert base[:3] == second[:3]
    assert not set(base[3:]) & set(second[3:])
    first = names(request("t", picture("fox", "cat"), two))
    assert not set(base[1:]) & set(first[1:])
    assert len({*base, *second, *first}) == 1 + 5 + 3 + 5


def test_the_names_grow_with_the_request_and_a_session_takes_some_back() -> None:
    one = request("r", picture("cat"), blocks=3)
    grown = BlockNames(RequestView(one), Contents(Media({})), TOKENS)
    before = list(grown.all())
    more = request("r", picture("cat"), picture("dog", place=SECOND))
    one.block_hashes[:] = more.block_hashes
    one.mm_features.append(picture("dog", place=SECOND))
    assert list(grown.all())[:3] == before
    assert list(grown.all()) == names(more)
    other = request("r", picture("cat"), picture("fox", place=SECOND))
    one.block_hashes[:] = [*other.block_hashes[:3]]
    assert list(grown.all()) == before


@pytest.mark.parametrize("why", ["long", "no data", "shared memory", "unknown", "told"])
def test_what_nobody_can_tell_has_no_name(why: str, make: Any, store: Store, space: Space) -> None:
    """Its prompt is served up to it, and the rest counted."""
    odd = picture("cat", name="x" * 1025 if why == "long" else "")
    params = None
    if why == "shared memory":
        odd.data = FakeData({one: FakeField(1) for one in ("address", "monotonic_id", "signature")})
    elif why == "unknown":
        odd.data = FakeData({"pixels": FakeField(object())})
    elif why != "long":
        odd.data = None
    if why == "told":
        params = {"cat": {HANDLE: content_digest("image", {"pixels": "cat"}).hex()}}
    one = request("r", odd, ec_transfer_params=params)
    if why == "told":
        assert names(one) == names(request("s", picture("cat")))
        return
    assert names(one) == one.block_hashes[:1]
    put(space, one.block_hashes)
    assert answer(make(), one) == (TOKENS, True)
    assert store.counters.snapshot()["miss_blocks{unnamed}"] == 5


# ---- the attack -------------------------------------------------------------------------------------


def test_a_forged_name_serves_nobody(make: Any, space: Space) -> None:
    """The picture of a dog under a cat's hash, and then the cat, on another engine."""
    forged, real = request("f", picture("dog", "cat")), request("r", picture("cat"))
    put(space, run(make(), forged))
    assert answer(make(), real) == (TOKENS, True), "the block before the picture, and no more"
    put(space, run(make(), real))
    assert answer(make(), request("s", picture("cat"))) == (6 * TOKENS, True)
    assert answer(make(), request("t", picture("dog", "cat"))) == (6 * TOKENS, True)


def test_with_trust_names_are_as_they_are(make: Any, store: Store, space: Space) -> None:
    object.__setattr__(store.settings.identity, "client_uuids", "trust")
    try:
        put(space, run(make(), request("f", picture("dog", "cat"))))
        assert answer(make(), request("r", picture("cat"))) == (6 * TOKENS, True)
    finally:
        object.__setattr__(store.settings.identity, "client_uuids", "refuse")


# ---- one engine, which goes by names ------------------------------------------------------------------


def test_what_stands_on_anothers_blocks_is_not_saved(make: Any) -> None:
    one = make()
    assert len(run(one, request("f", picture("dog", "cat")))) == 6
    # The engine's own cache has four blocks of "this prompt", by the name.
    assert behind(run(one, request("r", picture("cat")), 4 * TOKENS)) == []
    # Nor is it when it is computed anew: from now on nobody knows which of them is in the engine's cache.
    assert behind(run(one, request("s", picture("cat")))) == []
    assert behind(run(one, request("t", picture("dog", "cat"), blocks=7), 4 * TOKENS)) == []


def test_what_stands_on_its_own_blocks_is_saved(make: Any) -> None:
    one = make()
    first, longer = request("r", picture("cat"), blocks=4), request("s", picture("cat"))
    assert run(one, first) == names(first)
    assert run(one, longer, 4 * TOKENS)[-2:] == names(longer)[4:]


def test_what_another_connector_brought_is_not_saved(make: Any) -> None:
    """Blocks that aren't known to be this picture's: from before, or from vLLM's own CPU tier."""
    one, brought = make(), request("r", picture("cat"))
    assert behind(run(one, request("q", picture("cat")), 4 * TOKENS)) == []
    answer(one, brought)
    brought.num_computed_tokens = 4 * TOKENS
    made = step(one, (brought, 20), scheduled_encoder_inputs={})
    assert behind([name for save in made.saves for name in save.hashes]) == []
    assert behind(run(one, request("s", picture("cat")))) == []


def test_what_was_computed_from_anothers_output_is_not_saved(make: Any) -> None:
    """The encoder cache has the dog's output under the cat's name."""
    one = make()
    dog = request("f", picture("dog", "cat"), blocks=1)
    dog.num_prompt_tokens = dog.num_tokens = 2 * TOKENS - 1
    run(one, dog)
    assert behind(run(one, request("r", picture("cat")), scheduled_encoder_inputs={})) == []
    # Dropped for others, and encoded anew from the cat, for another prompt.
    other = request("s", picture("cat"), prompt="other")
    dropped = {"scheduled_encoder_inputs": {"s": [0]}, "free_encoder_mm_hashes": ["cat"]}
    assert run(one, other, **dropped) == names(other)


def test_an_output_that_the_encoder_connector_loads_is_known(make: Any) -> None:
    one, other = make(), make()
    cat = request("r", picture("cat"))
    answer(one, cat)
    loaded("cat", content_digest("image", {"pixels": "cat"}))
    made = step(one, (cat, cat.num_prompt_tokens), scheduled_encoder_inputs={})
    assert [name for save in made.saves for name in save.hashes] == names(cat)
    # It was dropped, and comes again, with one and the same step.
    again = request("s", picture("cat"), prompt="other")
    answer(other, again)
    loaded("cat", content_digest("image", {"pixels": "cat"}))
    made = step(other, (again, again.num_prompt_tokens), free_encoder_mm_hashes=["cat"])
    assert [name for save in made.saves for name in save.hashes] == names(again)


def test_what_is_forgotten_is_not_believed(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "MOST", 8)
    one = make()
    for number in range(50):
        run(one, request(f"r{number}", picture(f"cat {number}")))
    assert len(one._provenance) <= 16
    assert behind(run(one, request("s", picture("cat 0"), blocks=8), 4 * TOKENS)) == []
    longer = request("t", picture("cat 49"), blocks=8)
    assert run(one, longer, 4 * TOKENS) == names(longer)[6:]


def test_a_reset_forgets(make: Any) -> None:
    one = make()
    run(one, request("r", picture("cat")))
    one.reset_cache()
    assert len(one._provenance) == 0


# ---- hand-off and events ------------------------------------------------------------------------------


def test_a_hand_off_names_what_the_pictures_are(make: Any, space: Space) -> None:
    hands = Handoffs(space, SCHEDULERS, hash_tokens=TOKENS, hash_function=repr_hash, fits=lambda *_: True)
    contents = Contents(Media({}))

    def handed(one: FakeRequest) -> list[bytes] | None:
        view = TailView(one)
        return hands.names.of(BlockNames(view, contents, TOKENS), one.num_prompt_tokens)

    real, forged = handed(request("r", picture("cat"))), handed(request("f", picture("dog", "cat")))
    assert real is not None and forged is not None
    assert len(real) == len(forged) == 7
    assert real[:1] == forged[:1] and not set(real[1:]) & set(forged[1:])
    odd = picture("cat")
    odd.data = None
    unknown = request("u", odd, kv_transfer_params={"do_remote_decode": True})
    assert handed(unknown) is None
    assert hands.sending(RequestView(unknown), BlockNames(RequestView(unknown), contents, TOKENS)) is None


def test_a_prompt_that_may_be_wrong_is_not_handed_over(make: Any, space: Space) -> None:
    hands = Handoffs(space, SCHEDULERS, hash_tokens=TOKENS, hash_function=repr_hash, fits=lambda *_: True)
    one = make(handoffs=hands)
    for what, whole in (("cat", True), ("dog", False)):
        asked = request(what, picture(what, "cat"), blocks=2, kv_transfer_params={"do_remote_decode": True})
        asked.num_prompt_tokens = asked.num_tokens = 2 * TOKENS
        one.on_new_request(asked)
        # The encoder cache has the cat's output, and the dog comes by its name.
        run(one, asked, scheduled_encoder_inputs={"cat": [0]} if whole else {})
        sending = one.requests.get(what).sending
        assert sending.complete is whole


def test_what_may_be_wrong_by_itself_is_not_compared(make: Any, store: Store, space: Space) -> None:
    """Else a forged name would have the right blocks evicted, and the engine leave its namespace."""
    object.__setattr__(store.settings.kv, "audit_every", 1)
    for what, compared in (("cat", 6), ("dog", 1)):
        asked = request(what, picture(what, "x"), prompt=what)
        put(space, names(asked))
        one = make()
        answer(one, asked)
        # The encoder cache has the cat's output under this name.
        loaded("x", content_digest("image", {"pixels": "cat"}))
        made = step(one, (asked, asked.num_prompt_tokens), scheduled_encoder_inputs={})
        assert sum(len(group.hashes) for load in made.audits for group in load.groups) == compared, what


def repr_hash(value: Any) -> bytes:
    return repr(value).encode().ljust(32)[:32]


class TailView(RequestView):
    """Names a partial block without vLLM's request."""

    def name_of_tail(self, tokens: int, hash_tokens: int, hash_function: Any) -> bytes:
        return bytes(hash_function(tokens))


def test_events_name_blocks_as_vllm_does() -> None:
    """Routers match on vLLM's hashes."""
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    group = SCHEDULERS[:1]
    events = Events(group, [Table("full_attention", None)], TOKENS, ownership="ns", remote=True)
    one = request("r", picture("cat"))
    made = names(one)
    events.planned(RequestView(one), [Save(0, SegmentId(bytes(8)), 1, 0, made, {})])
    events.ended(SegmentId(bytes(8)), written=True)
    [event] = events.take()
    assert event.block_hashes == [maybe_convert_block_hash(each) for each in one.block_hashes]
    run = Run(2, SegmentId(bytes(8)), 0, 2, None)  # type: ignore[arg-type]
    events.loading(RequestView(one), [GroupLoad(0, 2, [run], made[2:6], {})])
    events.bad({SegmentId(bytes(8))})
    [event] = events.take()
    assert event.block_hashes == [maybe_convert_block_hash(each) for each in one.block_hashes[2:4]]
