"""explain: each reason for a miss is told as what it is, by tokens, request and digest."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from kvstore.admin.explain.reports import Cause
from kvstore.build import open_store
from kvstore.format.segment import Slot
from kvstore.index.port import Outcome
from kvstore.keys import (
    SegmentId,
    block_key,
    chain_like,
    digest,
    digests,
    item_key,
    new_segment_id,
    payload_name,
)
from kvstore.rules.hashing import DEFAULT_SEED, block_hashes, root_digest
from kvstore.rules.reasons import TOLD_MISSES, TOLD_UNSAVED
from kvstore.rules.weighed import Weighed
from kvstore.store.space import Space
from kvstore.store.store import Store
from schemas.namespace import GroupSpec, Namespace
from schemas.records import EvictionRule
from tests.admin.conftest import Admin, Ran

SIZE = 4
SHAPE = (1, 1, SIZE, 2)
FULL = GroupSpec(kind="full", block_tokens=SIZE, dtype="F32", shape=SHAPE)
WINDOW = GroupSpec(kind="sliding_window", block_tokens=SIZE, dtype="F32", shape=SHAPE, window=9)
PROMPT = list(range(100, 135))  # 8 full blocks and 3 tokens
_numbers = itertools.count()


def kv(**changes: Any) -> Namespace:
    fields: dict[str, Any] = {
        "kind": "kv", "model": "tiny", "weights": "w", "dtype": "float32", "block_tokens": SIZE,
        "hash_algo": "sha256", "hash_root": root_digest(DEFAULT_SEED), "kv_dtype": "auto",
        "page_order": "LHNC", "groups": (FULL,),
    }  # fmt: skip
    return Namespace(**fields | changes)


EC = Namespace(kind="ec", model="eye", weights="w", dtype="float32")


class World:
    """A store in memory with one namespace, and cache-admin run on it."""

    def __init__(self, admin: Admin, **given: Any) -> None:
        self.url = f"memory://explain-{next(_numbers)}"
        self.given = given
        self.now = 1_790_000_000.0
        made = {"payloads": self.url, "index": self.url, **given}
        self.store: Store = open_store(made)
        self.space = self.open(kv())
        self._admin = admin

    def open(self, namespace: Namespace) -> Space:
        space = self.store.open(namespace, block_bytes=64)
        space.register()
        return space

    def save(
        self,
        blocks: range,
        *,
        space: Space | None = None,
        group: int = 0,
        tokens: Sequence[int] = PROMPT,
        created_s: int | None = None,
    ) -> SegmentId:
        """Blocks of a prompt, as one segment."""
        space, segment = space or self.space, new_segment_id()
        hashes = names(tokens, space.namespace)[blocks.start : blocks.stop]
        data = memoryview(bytes(4 * SIZE * 2))
        slots = [Slot(block_key(one, group), data, "F32", SHAPE) for one in hashes]
        saved = space.save(
            slots, depth=blocks.start, chain=chain_like(segment), segment=segment, created_s=created_s
        )
        assert saved.stored == len(blocks)
        return segment

    def evict(self, segment: SegmentId, rule: EvictionRule, *, space: Space | None = None) -> None:
        later = time.time() + 100
        where = (space or self.space).id
        assert self.store.maintenance.evict(where, [segment], delete_after_s=later, rule=rule) == 1

    def tell(
        self, op: Any, reason: str, block: int, count: int = 1, *, request: str = "r", detail: str = ""
    ) -> None:
        """An outcome of PROMPT whose first missing block is `block`."""
        missing = digests(names()[block:])
        one = Outcome(time.time(), request, op, count, 0, reason, block, missing, detail)
        assert self.space.tell([one])

    def explain(self, *words: str) -> Ran:
        env = {f"KVSTORE_{name.upper()}": str(value) for name, value in self._flat(self.given).items()}
        return self._admin("explain", "--index", self.url, "--payloads", self.url, *words, env=env)

    def _flat(self, given: dict[str, Any]) -> dict[str, Any]:
        return {f"{outer}__{inner}": value for outer, more in given.items() for inner, value in more.items()}

    def tokens(self, tokens: Sequence[int] = PROMPT, *words: str, code: int = 0) -> Any:
        file = Path(self.folder) / "prompt.json"
        file.write_text(json.dumps(list(tokens)))
        ran = self.explain("--tokens", str(file), "--json", *words)
        assert ran.code == code, ran.err
        return ran.json

    folder: Path


def names(tokens: Sequence[int] = PROMPT, namespace: Namespace | None = None) -> list[bytes]:
    made = namespace or kv()
    return block_hashes(tokens, algorithm=made.hash_algo, block_tokens=made.block_tokens)


Make = Callable[..., World]


@pytest.fixture
def make(admin: Admin, tmp_path: Path) -> Iterator[Make]:
    made: list[World] = []

    def world(**given: Any) -> World:
        made.append(World(admin, **given))
        made[-1].folder = tmp_path
        return made[-1]

    yield world
    for one in made:
        one.store.close()


@pytest.fixture
def world(make: Make) -> World:
    return make()


def the_stop(report: Any) -> Any:
    """The only group's."""
    [group] = report["chain"]["groups"]
    return group["stop"]


def causes(block: Any) -> list[str]:
    return [one["cause"] for one in block["findings"]]


# ---- by tokens --------------------------------------------------------------------------------------


def test_what_is_stored_whole_stops_nowhere(world: World) -> None:
    world.save(range(8))
    report = world.tokens()
    assert the_stop(report) is None
    assert report["chain"]["resumable_tokens"] == 32
    assert "all 8 full blocks are stored" in world.explain("--tokens", str(world.folder / "prompt.json")).out


def test_what_was_never_stored_is_told_so_with_how_far_back_that_is_known(world: World) -> None:
    world.save(range(3))
    report = world.tokens()
    stop = the_stop(report)
    assert (stop["block"], stop["token"], causes(stop)) == (3, 12, ["never_stored"])
    assert stop["digest"] == digest(block_key(names()[3])).hex()
    assert report["chain"]["resumable_tokens"] == 12
    [reach] = report["reach"]
    assert reach["events"] == 1
    assert reach["events_complete"]
    assert "since the journal began" in stop["findings"][0]["text"]


@pytest.mark.parametrize("rule", get_args(EvictionRule))
def test_an_eviction_is_told_with_its_rule_and_time(world: World, rule: EvictionRule) -> None:
    world.save(range(3))
    tail = world.save(range(3, 8))
    world.evict(tail, rule)
    stop = the_stop(world.tokens())
    first = stop["findings"][0]
    assert (stop["block"], first["cause"], first["rule"]) == (3, "evicted", rule)
    assert (first["segment"], abs(first["at_s"] - time.time()) < 60) == (tail.hex(), True)


def test_a_block_inside_an_evicted_segment_is_placed_by_the_segments_first(world: World) -> None:
    gone = world.save(range(8))
    world.evict(gone, "capacity")
    world.save(range(5))
    # Nothing of it is left in the index.
    while world.store.maintenance.sweep(world.space.id, 4096):
        pass
    stop = the_stop(world.tokens())
    assert (stop["block"], stop["findings"][0]["cause"]) == (5, "evicted")
    assert stop["findings"][0]["segment"] == gone.hex()


@pytest.mark.parametrize("rule", get_args(EvictionRule))
def test_every_rule_is_told_in_words(world: World, rule: EvictionRule) -> None:
    gone = world.save(range(8))
    world.evict(gone, rule)
    [finding] = the_stop(world.tokens())["findings"]
    assert f"evicted ({rule})" not in finding["text"]
    words = {"salt_quota": "salt", "erased": "erased", "capacity": "capacity_bytes"}
    words |= {"named": "deleted by name", "ttl": "older than its time to live"}
    assert words.get(rule, "") in finding["text"]


def test_what_happened_last_comes_first(world: World) -> None:
    gone = world.save(range(8))
    world.evict(gone, "tenant_quota")
    world.tell("save", "dropped", 0, 8)
    world.tell("save", "held", 0, 8)
    assert causes(the_stop(world.tokens())) == ["held", "dropped", "evicted"]


def test_an_invalidated_block_is_told_from_one_that_was_stored_afterwards(world: World) -> None:
    first = world.save(range(8))
    world.store.maintenance.invalidate(world.space.id)
    stop = the_stop(world.tokens())
    assert (causes(stop), stop["findings"][0]["segment"]) == (["invalidated"], first.hex())
    second = world.save(range(8))
    world.evict(second, "admin")
    stop = the_stop(world.tokens())
    assert [(one["cause"], one["segment"]) for one in stop["findings"]] == [
        ("evicted", second.hex()),
        ("invalidated", first.hex()),
    ]


def test_another_namespace_that_has_it_is_named_with_what_differs(world: World) -> None:
    other = world.open(kv(dtype="bfloat16", codec="lz4"))
    world.save(range(6), space=other)
    shorter = world.open(kv(kv_dtype="fp8"))
    world.save(range(2), space=shorter)
    world.save(range(3))
    stop = the_stop(world.tokens(PROMPT, world.space.id))
    assert causes(stop) == ["never_stored", "elsewhere"]
    found = stop["findings"][1]
    assert found["namespace"] == other.id
    assert [(one["path"], one["a"], one["b"]) for one in found["differences"]] == [
        ("codec", "none", "lz4"),
        ("dtype", "float32", "bfloat16"),
    ]
    assert "its first 24 tokens" in found["text"]


def test_a_namespace_of_other_blocks_is_found_by_its_own_names(world: World) -> None:
    big = GroupSpec(kind="full", block_tokens=8, dtype="F32", shape=(1, 1, 8, 1))
    other = world.open(kv(block_tokens=8, groups=(big,), hash_algo="xxhash_cbor"))
    data = memoryview(bytes(32))
    hashes = names(PROMPT, other.namespace)
    other.save([Slot(block_key(one), data, "F32", (1, 1, 8, 1)) for one in hashes[:2]])
    stop = the_stop(world.tokens(PROMPT, world.space.id))
    assert stop["findings"][-1]["namespace"] == other.id
    assert {one["path"] for one in stop["findings"][-1]["differences"]} >= {"block_tokens", "hash_algo"}


@pytest.mark.parametrize(
    ("admission", "offered", "rule"),
    [({"min_blocks": 9}, 8, "min_blocks"), ({"second_use": "true"}, 8, "second_use"), ({}, 8, "")],
)
def test_which_setting_kept_a_prompt_out(make: Make, admission: Any, offered: int, rule: str) -> None:
    world = make(admission=admission) if admission else make()
    world.tell("save", "not_admitted", 0, offered)
    stop = the_stop(world.tokens())
    assert (stop["findings"][0]["cause"], stop["findings"][0]["rule"]) == ("not_admitted", rule)
    assert stop["findings"][0]["request"] == "r"


@pytest.mark.parametrize("reason", [one for one in TOLD_UNSAVED if one != "not_admitted"])
def test_a_save_that_did_not_come_about_covers_the_blocks_that_were_offered(
    world: World, reason: str
) -> None:
    world.save(range(2))
    world.tell("save", reason, 2, 3)
    assert causes(the_stop(world.tokens())) == [reason]
    world.save(range(2, 4))
    assert causes(the_stop(world.tokens())) == [reason]
    world.save(range(4, 5))
    # The next one was not among them.
    assert causes(the_stop(world.tokens())) == ["never_stored"]


@pytest.mark.parametrize("reason", [one for one in TOLD_MISSES if one != "absent"])
def test_a_request_that_went_without_is_told_with_its_reason(world: World, reason: str) -> None:
    world.tell("match", reason, 0, 8, request="chat-1")
    report = world.tokens()
    stop = the_stop(report)
    assert (stop["findings"][0]["cause"], stop["findings"][0]["request"]) == (reason, "chat-1")
    assert [one["reason"] for one in report["told"]] == [reason]


def test_what_is_stored_but_was_not_loaded_says_what_requests_met(world: World) -> None:
    world.save(range(8))
    world.tell("match", "below_threshold", 4, 4, request="a")
    world.tell("load", "deadline", 6, 2, request="b")
    report = world.tokens()
    assert the_stop(report) is None
    assert [(one["request"], one["op"], one["reason"]) for one in report["told"]] == [
        ("b", "load", "deadline"),
        ("a", "match", "below_threshold"),
    ]


def test_what_was_weighed_is_told_in_numbers(world: World) -> None:
    world.save(range(8))
    world.tell("match", "computing_is_faster", 0, 8, request="slow", detail=Weighed(3.4, 0.12, 32).told())
    text = "loading 32 tokens was expected to take 3.4 s, computing them 0.12 s"
    [told] = world.tokens()["told"]
    assert told["text"].endswith(text)
    ran = world.explain("--request", "slow")
    assert text in " ".join(ran.out.split())


def test_every_reason_that_an_engine_has_is_explained() -> None:
    assert {*TOLD_MISSES, *TOLD_UNSAVED} - {"absent"} < set(get_args(Cause))


@pytest.mark.parametrize("damage", ["flip", "delete"])
def test_damage_is_found_by_reading_and_stops_the_chain_there(world: World, damage: str) -> None:
    world.save(range(3))
    bad = world.save(range(3, 8))
    name = payload_name(world.space.id, bad, 0)
    payloads = world.store.payloads
    if damage == "flip":
        size = next(one.nbytes for one in payloads.list() if one.name == name)
        data = bytearray(size)
        payloads.read(name, 0, [memoryview(data)])
        data[-1] ^= 1
        payloads.put(name, [memoryview(data)])
    else:
        payloads.delete([name])
    assert the_stop(world.tokens()) is None
    report = world.tokens(PROMPT, "--verify", code=3)
    stop = the_stop(report)
    cause = "corrupt" if damage == "flip" else "missing"
    assert (stop["block"], stop["findings"][0]["cause"]) == (3, cause)
    assert (report["damaged"], report["chain"]["resumable_tokens"]) == (1, 12)


def test_the_index_itself_remembers_what_the_journal_has_forgotten(make: Make) -> None:
    world = make(journal={"events": 1})
    gone = world.save(range(8))
    world.evict(gone, "capacity")
    # A ring loses a hundred at a time.
    for first in range(500, 500 + 110 * 16, 16):
        world.save(range(4), tokens=range(first, first + 16))
    report = world.tokens()
    [reach] = report["reach"]
    assert not reach["events_complete"]
    stop = the_stop(report)
    assert (causes(stop), stop["findings"][0]["segment"]) == (["evicted"], gone.hex())
    assert stop["findings"][0]["rule"] == ""


def test_without_a_journal_nobody_claims_that_it_was_never_stored(make: Make) -> None:
    world = make(journal={"events": 0, "outcomes": 0})
    [finding] = the_stop(world.tokens())["findings"]
    assert "the journal is off" in finding["text"]


def test_a_salt_and_a_seed_are_part_of_the_names(world: World) -> None:
    salted = block_hashes(PROMPT, algorithm="sha256", block_tokens=SIZE, salt="t")
    data = memoryview(bytes(32))
    world.space.save([Slot(block_key(one), data, "F32", SHAPE) for one in salted])
    assert the_stop(world.tokens())["block"] == 0
    salt = world.folder / "salt.txt"
    salt.write_text("t\n")
    assert the_stop(world.tokens(PROMPT, "--salt-file", str(salt))) is None
    both = world.explain("--tokens", "-", "--salt-file", "-")
    assert (both.code, "both be on stdin" in both.err) == (2, True)
    ran = world.explain("--tokens", str(world.folder / "prompt.json"), "--seed", "7")
    assert (ran.code, "leave out --seed" in ran.err) == (2, True)


def test_a_prompt_shorter_than_a_block_says_so(world: World) -> None:
    report = world.tokens(PROMPT[:3])
    assert report["chain"]["resumable_tokens"] == 0
    assert any("less than a block of 4" in one for one in report["remarks"])


# ---- windows ----------------------------------------------------------------------------------------


def test_a_window_that_lacks_a_block_is_the_group_that_stops(make: Make) -> None:
    world = make()
    space = world.open(kv(groups=(FULL, WINDOW)))
    world.save(range(8), space=space)
    for blocks in (range(1), range(2, 3), range(4, 8)):
        world.save(blocks, space=space, group=1)
    report = world.tokens(PROMPT, space.id)
    full, window = report["chain"]["groups"]
    assert (full["stop"], window["stop"]) == (None, None)
    assert report["chain"]["resumable_tokens"] == 32
    # A shorter one needs a block that isn't there, and what would do for a still shorter one isn't either.
    report = world.tokens(PROMPT[:22], space.id)
    full, window = report["chain"]["groups"]
    assert (full["stop"], window["stop"]["block"], window["stop"]["group"]) == (None, 3, 1)
    assert report["chain"]["resumable_tokens"] == 4


# ---- by request and digest --------------------------------------------------------------------------


def test_a_request_is_explained_with_how_its_block_is_now(world: World) -> None:
    gone = world.save(range(8))
    world.evict(gone, "namespace_quota")
    world.tell("match", "absent", 0, 8, request="chatcmpl-1")
    world.tell("match", "absent", 0, 8, request="chatcmpl-12")
    report = world.explain("--request", "chatcmpl-1", "--json").json
    [told] = report["told"]
    assert (told["request"], told["reason"], told["asked"]) == ("chatcmpl-1", "absent", 8)
    assert (told["block"]["findings"][0]["cause"], told["block"]["findings"][0]["rule"]) == (
        "evicted",
        "namespace_quota",
    )
    assert told["because"] == told["block"]["findings"][0]
    # What happened to it later is not why it was absent then.
    later = world.save(range(8))
    world.evict(later, "admin")
    [told] = world.explain("--request", "chatcmpl-1", "--json").json["told"]
    assert told["because"]["rule"] == "namespace_quota"
    assert told["block"]["findings"][0]["rule"] == "admin"
    parts = world.explain("--request", "cmpl-", "--json").json
    assert {one["request"] for one in parts["told"]} == {"chatcmpl-1", "chatcmpl-12"}
    nothing = world.explain("--request", "nobody")
    assert (nothing.code, "nothing is remembered" in nothing.err) == (0, True)


def test_a_request_that_came_before_the_eviction_of_what_was_too_old(world: World) -> None:
    index, before = world.store.maintenance, time.time() - 10
    world.tell("match", "absent", 0, 8, request="never")
    old = world.save(range(8), created_s=int(time.time()) - 280)
    # It is too old from now on, and this call has looked at no segment: it begins after the last.
    end = str(int.from_bytes(b"\1" + b"\xff" * 7, "big"))
    assert index.age_out(world.space.id, 200, delete_after_s=0, after=end)[0] == 0
    assert world.space.match(digests(names())).blocks == 0
    world.tell("match", "absent", 0, 8, request="late")
    [told] = world.explain("--request", "late", "--json").json["told"]
    assert (told["because"]["cause"], told["because"]["rule"]) == ("expired", "ttl")
    assert before - 200 < told["because"]["at_s"] < before
    assert index.age_out(world.space.id, 200, delete_after_s=0)[0] == 1
    [told] = world.explain("--request", "late", "--json").json["told"]
    assert (told["because"]["cause"], told["because"]["rule"]) == ("evicted", "ttl")
    assert told["because"]["segment"] == old.hex()
    # This one came before the block was stored at all.
    [told] = world.explain("--request", "never", "--json").json["told"]
    assert told["because"] is None


def test_a_request_that_failed_while_loading_says_so(world: World) -> None:
    world.save(range(8))
    world.tell("load", "corrupt", 2, 6, request="a")
    ran = world.explain("--request", "a")
    assert "its payload failed verification" in ran.out
    assert "it is stored" in ran.out


def test_an_item_is_explained_by_its_key(world: World) -> None:
    cat, dog, fish = (item_key(bytes([number]) * 32) for number in range(3))
    space, segment = world.open(EC), new_segment_id()
    slot = Slot(cat, memoryview(bytes(32)), "F32", (2, 4))
    space.save([slot], segment=segment)
    [block] = world.explain("--digest", cat.hex(), "--json").json["blocks"]
    assert causes(block) == ["stored"]
    world.evict(segment, "capacity", space=space)
    [block] = world.explain("--digest", cat.hex(), "--json").json["blocks"]
    assert (causes(block), block["findings"][0]["rule"]) == (["evicted"], "capacity")
    missing = digest(dog)
    assert space.tell([Outcome(time.time(), "r", "save", 1, 0, "not_admitted", 0, missing)])
    [block] = world.explain("--digest", dog.hex(), "--json").json["blocks"]
    assert causes(block) == ["not_admitted"]
    [block] = world.explain("--digest", fish.hex(), "--json").json["blocks"]
    assert causes(block) == ["never_stored"]
    other = world.open(EC.model_copy(update={"dtype": "bfloat16"}))
    other.save([slot])
    found = world.explain("--digest", cat.hex(), space.id, "--json").json["blocks"]
    assert causes(found[0]) == ["evicted", "elsewhere"]


@pytest.mark.parametrize("form", ["digest", "hash", "key"])
def test_a_block_is_explained_by_any_of_its_names(world: World, form: str) -> None:
    segment = world.save(range(8))
    key = block_key(names()[0])
    text = {"digest": digest(key), "hash": key[:-2], "key": key}[form].hex()
    [block] = world.explain("--digest", text, "--json").json["blocks"]
    assert (causes(block), block["namespace"]) == (["stored"], world.space.id)
    world.evict(segment, "admin")
    [block] = world.explain("--digest", text, "--json").json["blocks"]
    assert (causes(block), block["findings"][0]["rule"]) == (["evicted"], "admin")
    # One in the middle: its entry still says in which segment it was.
    middle = digest(block_key(names()[4])).hex()
    [block] = world.explain("--digest", middle, "--json").json["blocks"]
    assert [(one["cause"], one["segment"]) for one in block["findings"]] == [("evicted", segment.hex())]


# ---- the command ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["[1, 2", "[1, true]", '["1"]', "1 -2", "1,2", "{}", "[1.5]", "[99999999999]"]
)
def test_what_is_no_prompt_is_refused_in_words(world: World, text: str) -> None:
    file = world.folder / "bad"
    file.write_text(text)
    ran = world.explain("--tokens", str(file))
    assert (ran.code, "token ids are numbers" in ran.err) == (2, True)


def test_tokens_may_be_separated_by_blanks(world: World) -> None:
    world.save(range(8))
    file = world.folder / "prompt.txt"
    file.write_text("\n".join(map(str, PROMPT)))
    assert the_stop(world.explain("--tokens", str(file), "--json").json) is None


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--request", "a", "--digest", "b"),
        ("--request", "a", "--seed", "0"),
        ("--digest", "xyz"),
        ("--digest", "00"),
    ],
)
def test_wrong_usage_says_what_to_give(world: World, words: tuple[str, ...]) -> None:
    ran = world.explain(*words)
    assert (ran.code, bool(ran.err.strip())) == (2, True)


def test_a_cache_that_nobody_used_has_no_namespace(admin: Admin, tmp_path: Path) -> None:
    file = tmp_path / "p"
    file.write_text("[1]")
    ran = admin("explain", "--payloads", f"file://{tmp_path}/none", "--tokens", str(file))
    assert (ran.code, "no index yet" in ran.err) == (1, True)
