"""evict, pin, unpin, quota and du: plans that change nothing, and what is done when it is asked for."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore.admin import Cache, Sources, du, evictions, pin
from kvstore.build import load_settings, open_index
from kvstore.catalogue import Listing
from kvstore.chains import block_hashes, root_digest
from kvstore.codec import Slot
from kvstore.errors import TransientError
from kvstore.eviction import MINUTE_S, WORTH_MINUTES, shift_s, worth
from kvstore.index.redis import RedisIndex
from kvstore.index.sqlite import SqliteIndex
from kvstore.keys import NamespaceId, SegmentId, block_key, namespace_id
from schemas.namespace import Namespace
from schemas.records import PartRecord, SegmentRecord
from schemas.reports import StatusReport
from schemas.upkeep import EvictReport, PinReport, PinsReport, QuotaReport, QuotasReport
from schemas.usage import DuReport
from tests.admin.conftest import BLOCK_SHAPE, Admin, Filled, ec_space, kv_slots, kv_space
from tests.admin.test_inventory import row


@contextmanager
def opened(filled: Filled) -> Iterator[RedisIndex | SqliteIndex]:
    with closing(open_index(load_settings(filled.settings, {}))) as index:
        yield index


def chain(filled: Filled) -> list[Listing]:
    """The KV segments, heads first."""
    with opened(filled) as index:
        listings = list(index.segments(namespace_id(filled.kv)))
    return sorted(listings, key=lambda each: each.record.depth)


def ids(listings: list[Listing]) -> list[str]:
    return [listing.segment.hex() for listing in listings]


def snapshot(filled: Filled) -> Any:
    """All that a plan must not change."""
    with opened(filled) as index:
        return index.accounts(), index.quotas(), filled.payload_files()


def evict(admin: Admin, filled: Filled, *words: str, code: int = 0) -> EvictReport:
    ran = admin("evict", *words, "--json", *filled.options)
    assert ran.code == code, ran.err
    report = EvictReport.model_validate_json(ran.out)
    assert ("nothing was changed" in ran.err) == (not report.applied and report.planned.segments > 0)
    return report


# -- evict ---------------------------------------------------------------------------------------------------


def test_evict_named_segments(admin: Admin, either: Filled) -> None:
    [head, middle, tail] = ids(chain(either))
    before = snapshot(either)
    planned = evict(admin, either, tail, middle[:10])
    assert (planned.applied, planned.planned.segments, planned.evicted_segments) == (False, 2, 0)
    assert planned.delete_after_s is None
    assert snapshot(either) == before
    done = evict(admin, either, tail, middle[:10], "--apply")
    assert (done.applied, done.evicted_segments, done.spared_segments) == (True, 2, 0)
    assert done.delete_after_s == pytest.approx(time.time() + 120, abs=20)
    assert ids(chain(either)) == [head]
    with opened(either) as index:
        states = index.states(namespace_id(either.kv), [SegmentId(bytes.fromhex(x)) for x in (middle, tail)])
        events = index.events(namespace_id(either.kv))
    assert states == ["trash", "trash"]
    assert [event.rule for event in events[-2:]] == ["admin", "admin"]
    assert len(either.payload_files()) == 5, "the payloads stay for their grace time"
    assert admin("evict", "0123456789abcdef", *either.options).code == 1
    text = admin("evict", head, *either.options)
    assert row(text.out, either.kv_id)[2:4] == ["1", "4"]
    assert "--apply" in text.err


def test_pinned_segments_are_evicted_only_if_that_is_said(admin: Admin, either: Filled) -> None:
    [head, *_] = chain(either)
    with opened(either) as index:
        index.pin(namespace_id(either.kv), [head.segment], most_bytes=1 << 30)
    for words in ([head.segment.hex()], ["--unused-for", "0s", "--namespace", either.kv_id]):
        spared = evict(admin, either, *words)
        assert (spared.pinned.segments, spared.pinned.stored_bytes) == (1, head.record.nbytes)
        assert head.segment.hex() not in json.dumps(spared.model_dump())
    assert evict(admin, either, head.segment.hex(), "--apply").evicted_segments == 0
    assert evict(admin, either, head.segment.hex(), "--pinned", "--apply").evicted_segments == 1
    with opened(either) as index:
        assert index.usage(namespace_id(either.kv)).pinned_bytes == 0


def test_evict_what_was_not_used(admin: Admin, either: Filled) -> None:
    hour = 3600
    [head, middle, tail] = chain(either)
    with opened(either) as index:
        # All were made a moment ago; a use in the future makes one younger than the others.
        index.touch(namespace_id(either.kv), [head.segment, middle.segment], time.time() + 2 * hour)
    none = evict(admin, either, "--unused-for", "1h")
    assert (none.planned.segments, none.why) == (0, "not used for 3600 s")
    made = time.time()
    plan = None
    with Cache(load_settings(either.settings, {})) as cache:
        plan = evictions.plan_unused(
            cache, either.kv_id[:5], unused_for_s=hour, pinned=False, now_s=made + 1.5 * hour
        )
        assert [entry.segment for entry in plan.entries] == [tail.segment]
        everything = evictions.plan_unused(
            cache, None, unused_for_s=hour, pinned=False, now_s=made + 4 * hour
        )
        order = [entry.segment for entry in everything.entries if entry.namespace == either.kv_id]
        assert order == [tail.segment, middle.segment, head.segment], "tails before heads"
        # Used between plan and turn: spared.
        assert cache.index is not None
        cache.index.touch(namespace_id(either.kv), [tail.segment], made + 600)
        report = evictions.evict(cache, plan, applied=True, now_s=made)
    assert (report.evicted_segments, report.spared_segments) == (0, 1)
    assert len(chain(either)) == 3


def test_a_segment_that_is_pinned_after_the_plan_is_spared(either: Filled) -> None:
    with Cache(load_settings(either.settings, {})) as cache:
        plan = evictions.plan_keep(cache, either.kv_id, keep_bytes=1, now_s=time.time())
        assert len(plan.entries) == 3
        assert cache.index is not None
        cache.index.pin(namespace_id(either.kv), [chain(either)[0].segment], most_bytes=1 << 30)
        report = evictions.evict(cache, plan, applied=True, now_s=time.time())
    assert (report.evicted_segments, report.spared_segments) == (2, 1)


def oracle(filled: Filled, excess: int, now_s: float) -> list[SegmentId]:
    """Who goes first, said in the plainest way: of all, what was not used just now, then the rest."""
    found = []
    with opened(filled) as index:
        for account in index.accounts():
            for listing in index.segments(account.namespace):
                record = listing.record
                keep = listing.last_use_s + shift_s(account.kind, account.usage)
                if account.kind == "ec":
                    keep += worth(record.cost_us, record.nbytes) * WORTH_MINUTES * MINUTE_S
                fresh = listing.last_use_s >= now_s - 120
                if not listing.pinned:
                    order = (fresh, keep, -record.depth, listing.last_use_s, listing.segment)
                    found.append((order, listing.segment, record.nbytes))
    gone = []
    for _, segment, nbytes in sorted(found):
        if excess <= 0:
            break
        gone.append(segment)
        excess -= nbytes
    return gone


@pytest.mark.parametrize("seed", range(4))
def test_evict_down_to_a_size_takes_what_the_order_says(filled: Filled, seed: int) -> None:
    """Against an oracle: several namespaces, costs, pins, uses then and now."""
    noise = random.Random(seed)
    now = 60.0 * (int(time.time()) // 60)
    spaces = [kv_space(tenant=name) for name in ("a", "b")] + [ec_space(tenant="c")]
    with opened(filled) as index:
        for space in spaces:
            name = index.register(space, expected_blocks=100)
            for number in range(30):
                size, cost = noise.randint(1000, 90_000), noise.choice([0, 10**4, 10**7])
                record = SegmentRecord(
                    (PartRecord(64, (size,)),),
                    1,
                    "none",
                    int(now) - 9000,
                    depth=0 if space.kind == "ec" else noise.randint(0, 40),
                    cost_us=cost,
                )
                segment = SegmentId(noise.randbytes(8))
                index.commit(name, segment, noise.randbytes(16), record, rank=0, ranks=1)
                if noise.random() < 0.1:
                    index.pin(name, [segment], most_bytes=1 << 30)
                if number % 3:
                    index.touch(name, [segment], now + 60 * noise.randint(1, 200))
        held = sum(account.usage.nbytes for account in index.accounts())
    at = now + 60 * 150
    for keep in (held, int(held * 0.7), int(held * 0.3), 1):
        with Cache(load_settings(filled.settings, {})) as cache:
            plan = evictions.plan_keep(cache, None, keep_bytes=keep, now_s=at)
        assert [entry.segment for entry in plan.entries] == oracle(filled, held - keep, at), keep
    with Cache(load_settings(filled.settings, {})) as cache:
        assert cache.index is not None
        for space in spaces:
            plan = evictions.plan_keep(cache, namespace_id(space), keep_bytes=1, now_s=at + 86400)
            order = cache.index.order(namespace_id(space), 100)
            assert [entry.segment for entry in plan.entries] == [each.segment for each in order]
        plan = evictions.plan_keep(cache, None, keep_bytes=int(held * 0.4), now_s=at)
        report = evictions.evict(cache, plan, applied=True, now_s=at)
    with opened(filled) as index:
        left = sum(account.usage.nbytes for account in index.accounts())
    assert report.evicted_segments == report.planned.segments == len(plan.entries)
    assert held - left == report.planned.stored_bytes
    assert left <= held * 0.4 < left + 90_064


def test_evict_to_a_size_by_hand(admin: Admin, either: Filled) -> None:
    one = chain(either)[0].record.nbytes
    done = evict(admin, either, "--keep", str(2 * one), "--namespace", either.kv_id, "--apply")
    assert (done.held.stored_bytes, done.evicted_segments) == (3 * one, 1)
    assert [listing.record.depth for listing in chain(either)] == [0, 4]
    assert evict(admin, either, "--keep", "1GiB").planned.segments == 0


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--keep", "1GiB", "--unused-for", "1d"],
        ["abcd", "--keep", "1GiB"],
        ["--keep", "some"],
        ["--keep", "0"],
        ["--unused-for", "1y"],
        ["--unused-for", "-1"],
        ["--keep", "1GiB", "--pinned"],
    ],
)
def test_evict_wants_to_be_told_what(admin: Admin, filled: Filled, words: list[str]) -> None:
    ran = admin("evict", *words, *filled.options)
    assert (ran.code, ran.out) == (2, "")
    assert len(chain(filled)) == 3


def test_an_eviction_that_the_index_ends_says_how_far_it_came(
    either: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evictions, "_STEP", 1)
    with Cache(load_settings(either.settings, {})) as cache:
        plan = evictions.plan_unused(cache, None, unused_for_s=-1e6, pinned=False, now_s=time.time())
        assert cache.index is not None
        real, calls = cache.index.evict, 0

        def failing(*args: Any, **options: Any) -> int:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise stop
            return real(*args, **options)

        monkeypatch.setattr(cache.index, "evict", failing)
        stop: BaseException = TransientError("gone")
        report = evictions.evict(cache, plan, applied=True, now_s=time.time())
        assert (report.ended, report.problem, report.evicted_segments) == ("failed", "gone", 2)
        calls, stop = 0, KeyboardInterrupt()
        plan = evictions.plan_unused(cache, None, unused_for_s=-1e6, pinned=False, now_s=time.time())
        report = evictions.evict(cache, plan, applied=True, now_s=time.time())
        assert (report.ended, report.evicted_segments) == ("cancelled", 2)


# -- pin, unpin ----------------------------------------------------------------------------------------------


def pin_verb(admin: Admin, filled: Filled, verb: str, *words: str, code: int = 0, **env: str) -> PinReport:
    ran = admin(verb, *words, "--json", *filled.options, env=env)
    assert ran.code == code, ran.err
    return PinReport.model_validate_json(ran.out)


def pinned(admin: Admin, filled: Filled) -> PinsReport:
    ran = admin("pin", "--json", *filled.options)
    assert ran.code == 0, ran.err
    return PinsReport.model_validate_json(ran.out)


def test_pin_list_and_unpin(admin: Admin, either: Filled) -> None:
    [head, middle, tail] = ids(chain(either))
    assert pinned(admin, either).segments == ()
    before = snapshot(either)
    plan = pin_verb(admin, either, "pin", head, middle[:9])
    assert (plan.applied, plan.planned.segments, plan.changed) == (False, 2, 0)
    assert snapshot(either) == before
    done = pin_verb(admin, either, "pin", head, middle[:9], "--apply")
    assert (done.changed, done.left_out) == (2, 0)
    again = pin_verb(admin, either, "pin", head, tail, "--apply")
    assert (again.planned.segments, again.already.segments, again.changed) == (1, 1, 1)
    found = pinned(admin, either)
    assert [line.segment for line in found.segments] == [head, middle, tail]
    assert found.pinned.stored_bytes == sum(line.stored_bytes for line in found.segments)
    assert found.most_bytes == 50 << 30
    assert "pinned" in row(admin("ls", *either.options).out, head)
    assert "pinned" in admin("show", head, *either.options).out
    with opened(either) as index:
        assert index.order(namespace_id(either.kv), 10) == []
    assert pin_verb(admin, either, "unpin", tail, "--apply").changed == 1
    rest = pin_verb(admin, either, "unpin", "--all")
    assert (rest.planned.segments, rest.changed) == (2, 0)
    assert pin_verb(admin, either, "unpin", "--all", "--namespace", either.ec_id, "--apply").changed == 0
    assert pin_verb(admin, either, "unpin", "--all", "--apply").changed == 2
    assert pinned(admin, either).segments == ()


def test_pin_beginnings(admin: Admin, either: Filled) -> None:
    [head, middle, _] = ids(chain(either))
    done = pin_verb(admin, either, "pin", "--namespace", either.kv_id[:6], "--depth", "5", "--apply")
    assert [line.segment for line in done.segments] == [head, middle]
    assert [line.segment for line in pinned(admin, either).segments] == [head, middle]


def test_only_a_share_of_every_quota_can_be_pinned(admin: Admin, either: Filled) -> None:
    [head, _, tail] = chain(either)
    size = head.record.nbytes
    # Of the store half: two and a half segments.
    small = {"KVSTORE_CAPACITY_BYTES": str(5 * size)}
    words = ("pin", "--namespace", either.kv_id, "--depth", "99")
    plan = pin_verb(admin, either, *words, code=3, **small)
    assert (plan.planned.segments, plan.left_out) == (2, 1)
    assert plan.left[0].segment == tail.segment.hex(), "heads first"
    assert "pinned_share" in plan.left[0].reason
    done = pin_verb(admin, either, *words, "--apply", code=4, **small)
    assert (done.changed, done.left_out) == (2, 1)
    # What other namespaces have pinned counts against the same quota.
    items = [
        line["segment"] for line in admin("ls", either.ec_id, "--json", *either.options).json["segments"]
    ]
    none = pin_verb(admin, either, "pin", *items, "--apply", code=3, **small)
    assert (none.changed, none.left_out) == (0, 2)
    pin_verb(admin, either, "unpin", "--all", "--apply")
    # The smallest scope decides.
    with opened(either) as index:
        index.set_quota("tenant/default", 3 * size)
    tenant = pin_verb(admin, either, *words, "--apply", code=4)
    assert (tenant.changed, tenant.left_out) == (1, 2)
    pin_verb(admin, either, "unpin", "--all", "--apply")
    with opened(either) as index:
        index.set_quota(f"namespace/{either.kv_id}", size)
    assert pin_verb(admin, either, *words, "--apply", code=3).left_out == 3


def test_what_follows_something_too_large_is_not_pinned_without_it(admin: Admin, either: Filled) -> None:
    sizes = {0: 1000, 1: 9000, 2: 1000}
    with opened(either) as index:
        name = index.register(kv_space(tenant="blue"), expected_blocks=10)
        for depth, size in sizes.items():
            record = SegmentRecord((PartRecord(0, (size,)),), 1, "none", 1, depth=depth)
            names = bytes([depth]) * 16
            index.commit(name, SegmentId(bytes(7) + bytes([depth])), names, record, rank=0, ranks=1)
        index.set_quota("tenant/blue", 12_000)
    done = pin_verb(admin, either, "pin", "--namespace", name, "--depth", "9", "--apply", code=4)
    assert [line.depth for line in done.segments] == [0]
    assert (done.changed, done.left_out) == (1, 2)


def test_pins_of_somebody_else_at_the_same_moment_stay_within_the_bound(either: Filled) -> None:
    [head, middle, tail] = chain(either)
    size = head.record.nbytes
    settings = load_settings(either.settings, {"KVSTORE_CAPACITY_BYTES": str(4 * size)})
    with Cache(settings) as cache, opened(either) as index:
        assert cache.index is not None
        name = namespace_id(either.kv)
        real = cache.index.quotas

        def quotas() -> dict[str, int]:
            index.pin(name, [tail.segment], most_bytes=1 << 30)
            return real()

        cache.index.quotas = quotas  # type: ignore[method-assign]
        report = pin(cache, [(name, head), (name, middle)], applied=True, now_s=time.time())
        assert (report.changed, report.left_out) == (0, 2)
        assert index.usage(name).pinned_bytes == size


def prompt_space() -> Namespace:
    return kv_space(hash_algo="sha256_cbor", hash_root=root_digest("7"), tenant="prompts")


def test_pin_a_prompt_by_its_tokens(admin: Admin, either: Filled, tmp_path: Path) -> None:
    noise = random.Random(3)
    tokens = [noise.randrange(50_000) for _ in range(16 * 7 + 5)]
    hashes = block_hashes(tokens, algorithm="sha256_cbor", block_tokens=16, seed="7")
    assert len(hashes) == 7
    template = kv_slots(1)[0]
    slots = [Slot(block_key(each), template.data, "BF16", BLOCK_SHAPE) for each in hashes]
    for first, end in ((0, 3), (3, 6)):
        either.save(prompt_space(), slots[first:end], depth=first)
    either.save(prompt_space(), kv_slots(2, seed=4))
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps(tokens))
    name = namespace_id(prompt_space())
    words = ("pin", "--namespace", name, "--tokens", str(path), "--seed", "7")
    done = pin_verb(admin, either, *words, "--apply")
    assert [(line.depth, line.slots) for line in done.segments] == [(0, 3), (3, 3)]
    assert done.changed == 2
    wrong = admin("pin", "--namespace", name, "--tokens", str(path), *either.options)
    assert (wrong.code, "--seed" in wrong.err) == (2, True)
    items = admin("pin", "--namespace", either.ec_id, "--tokens", str(path), *either.options)
    assert (items.code, "encoder items" in items.err) == (2, True)


@pytest.mark.parametrize(
    "words",
    [
        ["pin", "--apply"],
        ["pin", "--depth", "3"],
        ["pin", "abcd", "--depth", "3", "--namespace", "ab"],
        ["pin", "--tokens", "x"],
        ["pin", "abcd", "--seed", "7"],
        ["unpin"],
        ["unpin", "abcd", "--all"],
    ],
)
def test_pin_wants_to_be_told_what(admin: Admin, filled: Filled, words: list[str]) -> None:
    ran = admin(*words, *filled.options)
    assert (ran.code, ran.out) == (2, "")


# -- quota ---------------------------------------------------------------------------------------------------


def quota(admin: Admin, filled: Filled, *words: str) -> QuotaReport:
    ran = admin("quota", *words, "--json", *filled.options)
    assert ran.code == 0, ran.err
    return QuotaReport.model_validate_json(ran.out)


def quotas(admin: Admin, filled: Filled, **env: str) -> dict[str, Any]:
    ran = admin("quota", "--json", *filled.options, env=env)
    assert ran.code == 0, ran.err
    return {line.scope: line for line in QuotasReport.model_validate_json(ran.out).quotas}


def test_quotas_are_set_shown_and_cleared(admin: Admin, either: Filled) -> None:
    assert list(quotas(admin, either)) == ["store"]
    before = snapshot(either)
    plan = quota(admin, either, "set", "store", "30KiB")
    assert (plan.applied, plan.before_bytes, plan.after_bytes) == (False, 100 << 30, 30 << 10)
    assert plan.used_bytes == sum(path.stat().st_size for path in either.payload_files())
    assert plan.excess_bytes == plan.used_bytes - int(0.9 * (30 << 10))
    assert snapshot(either) == before
    quota(admin, either, "set", "store", "30KiB", "--apply")
    quota(admin, either, "set", f"namespace/{either.kv_id[:5]}", "1GiB", "--apply")
    new = quota(admin, either, "set", "tenant/still to come", "2GiB", "--apply")
    assert (new.known, new.before_bytes) == (False, None)
    found = quotas(admin, either)
    assert [*found] == ["tenant/still to come", f"namespace/{either.kv_id}", "store"]
    assert (found["store"].source, found["store"].state) == ("set", "over")
    text = admin("quota", *either.options).out
    assert row(text, "store")[-2:] == ["set", "over"]
    assert "above 95% of a quota and goes on down to 90%" in text
    cleared = quota(admin, either, "clear", "store", "--apply")
    assert (cleared.before_bytes, cleared.after_bytes) == (30 << 10, 100 << 30)
    assert quota(admin, either, "clear", f"namespace/{either.kv_id}", "--apply").after_bytes is None
    assert [*quotas(admin, either)] == ["tenant/still to come", "store"]
    status = StatusReport.model_validate_json(admin("status", "--json", *either.options).out)
    assert status.capacity_bytes == 100 << 30


def test_settings_quotas_are_shown_as_such(admin: Admin, filled: Filled) -> None:
    found = quotas(
        admin, filled, KVSTORE_EVICTION__TENANT_BYTES="1GiB", KVSTORE_EVICTION__NAMESPACE_BYTES="25KiB"
    )
    assert {scope: line.source for scope, line in found.items()} == {
        f"namespace/{filled.kv_id}": "settings",
        f"namespace/{filled.ec_id}": "settings",
        "tenant/default": "settings",
        "store": "settings",
    }
    assert found[f"namespace/{filled.kv_id}"].state == "high", "24 KiB of 25"
    assert found[f"namespace/{filled.ec_id}"].state == "ok"


def test_a_quota_that_pins_stand_against_says_so(admin: Admin, filled: Filled) -> None:
    with opened(filled) as index:
        index.pin(namespace_id(filled.kv), [each.segment for each in chain(filled)], most_bytes=1 << 30)
    plan = quota(admin, filled, "set", "store", "10KiB")
    assert (plan.pinned_bytes, plan.excess_bytes) == (24 << 10, plan.used_bytes - (24 << 10))
    assert "unpin" in plan.problem


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["set", "everything", "1GiB"], 1, "is no scope"),
        (["set", "tenant/", "1GiB"], 1, "is no scope"),
        (["set", "namespace/", "1GiB"], 1, "is no scope"),
        (["set", "namespace/zz", "1GiB"], 1, "no namespace starts with"),
        (["set", "store", "much"], 2, "SIZE"),
        (["set", "store", "0"], 2, "less than one byte"),
        (["clear", "store"], 1, "no quota was set"),
        (["clear", "tenant/default"], 1, "no quota was set"),
    ],
)
def test_what_can_t_be_a_quota(admin: Admin, filled: Filled, words: list[str], code: int, said: str) -> None:
    ran = admin("quota", *words, "--apply", *filled.options)
    assert (ran.code, ran.out) == (code, "")
    assert said in ran.err
    assert [*quotas(admin, filled)] == ["store"]


def test_verbs_on_nothing_make_nothing(admin: Admin, tmp_path: Path) -> None:
    folder = tmp_path / "none"
    options = ["--payloads", f"file://{folder}"]
    for words in (
        ["stats"],
        ["top"],
        ["du"],
        ["events"],
        ["quota"],
        ["quota", "set", "store", "1GiB"],
        ["pin"],
        ["unpin", "--all", "--apply"],
        ["evict", "--unused-for", "1d", "--apply"],
        ["evict", "--keep", "1GiB", "--apply"],
    ):
        ran = admin(*words, *options)
        assert ran.code == 0, (words, ran.err)
        assert not folder.exists(), words
    assert admin("quota", "set", "store", "1GiB", "--apply", *options).code == 0
    assert (folder / "index.sqlite").exists(), "a quota may be set before the first save"


# -- du ------------------------------------------------------------------------------------------------------


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
    text = admin("du", *either.options).out
    assert row(text, "orphan")[0] in (either.kv_id, "fedcba9876543210")
    assert "8 payloads" in text


def test_du_holds_a_page_at_a_time_and_shows_how_far_it_is(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(6):
        filled.save(filled.kv, kv_slots(1, seed=20 + seed))
    # By its full name: in the package, the function hides the module.
    monkeypatch.setattr(sys.modules["kvstore.admin.du"], "_PAGE", 4)
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
