"""pin: what a quota must not evict, within the share of it that may be pinned."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from kvstore.admin.backends import Cache
from kvstore.admin.curate.pin import pin
from kvstore.admin.curate.reports import PinReport, PinsReport
from kvstore.build import load_settings
from kvstore.format.segment import Slot
from kvstore.keys import SegmentId, block_key, namespace_id
from kvstore.rules.hashing import block_hashes, root_digest
from schemas.namespace import Namespace
from schemas.records import PartRecord, SegmentRecord
from tests.admin.conftest import BLOCK_SHAPE, Admin, Filled, chain, ids, kv_slots, kv_space, opened, snapshot
from tests.admin.inspect.test_status import row


def pin_verb(admin: Admin, filled: Filled, *words: str, code: int = 0, **env: str) -> PinReport:
    ran = admin("pin", *words, "--json", *filled.options, env=env)
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
    plan = pin_verb(admin, either, either.kv_id, head, middle[:9])
    assert (plan.applied, plan.planned.segments, plan.changed) == (False, 2, 0)
    assert snapshot(either) == before
    done = pin_verb(admin, either, either.kv_id, head, middle[:9], "--apply")
    assert (done.changed, done.left_out) == (2, 0)
    again = pin_verb(admin, either, either.kv_id, head, tail, "--apply")
    assert (again.planned.segments, again.already.segments, again.changed) == (1, 1, 1)
    found = pinned(admin, either)
    assert [line.segment for line in found.segments] == [head, middle, tail]
    assert found.pinned.stored_bytes == sum(line.stored_bytes for line in found.segments)
    assert found.most_bytes == 50 << 30
    assert "pinned" in row(admin("ls", *either.options).out, head)
    assert "pinned" in admin("show", head, *either.options).out
    with opened(either) as index:
        assert index.order(namespace_id(either.kv), 10) == []
    assert pin_verb(admin, either, either.kv_id, tail, "--remove", "--apply").changed == 1
    rest = pin_verb(admin, either, "--remove")
    assert (rest.planned.segments, rest.changed) == (2, 0)
    assert pin_verb(admin, either, either.ec_id, "--remove", "--apply").changed == 0
    assert pin_verb(admin, either, "--remove", "--apply").changed == 2
    assert pinned(admin, either).segments == ()


def test_pin_beginnings(admin: Admin, either: Filled) -> None:
    [head, middle, _] = ids(chain(either))
    done = pin_verb(admin, either, either.kv_id[:6], "--depth", "5", "--apply")
    assert [line.segment for line in done.segments] == [head, middle]
    assert [line.segment for line in pinned(admin, either).segments] == [head, middle]


def test_only_a_share_of_every_quota_can_be_pinned(admin: Admin, either: Filled) -> None:
    [head, _, tail] = chain(either)
    size = head.record.nbytes
    # Of the store half: two and a half segments.
    small = {"KVSTORE_CAPACITY_BYTES": str(5 * size)}
    words = (either.kv_id, "--depth", "99")
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
    none = pin_verb(admin, either, either.ec_id, *items, "--apply", code=3, **small)
    assert (none.changed, none.left_out) == (0, 2)
    pin_verb(admin, either, "--remove", "--apply")
    # The smallest scope decides.
    with opened(either) as index:
        index.set_quota("tenant/default", 3 * size)
    tenant = pin_verb(admin, either, *words, "--apply", code=4)
    assert (tenant.changed, tenant.left_out) == (1, 2)
    pin_verb(admin, either, "--remove", "--apply")
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
    done = pin_verb(admin, either, name, "--depth", "9", "--apply", code=4)
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
    words = (name, "--tokens", str(path), "--seed", "7")
    salt = tmp_path / "salt.txt"
    salt.write_text("hers")
    assert pin_verb(admin, either, *words, "--salt-file", str(salt)).planned.segments == 0
    done = pin_verb(admin, either, *words, "--apply")
    assert [(line.depth, line.slots) for line in done.segments] == [(0, 3), (3, 3)]
    assert done.changed == 2
    wrong = admin("pin", name, "--tokens", str(path), *either.options)
    assert (wrong.code, "--seed" in wrong.err) == (2, True)
    items = admin("pin", either.ec_id, "--tokens", str(path), *either.options)
    assert (items.code, "encoder items" in items.err) == (2, True)


@pytest.mark.parametrize(
    "words",
    [
        ["--apply"],
        ["--depth", "3"],
        ["ab", "abcd", "--depth", "3"],
        ["--tokens", "x"],
        ["ab", "abcd", "--seed", "7"],
        ["ab", "abcd", "--salt-file", "-"],
        ["ab", "--tokens", "-", "--salt-file", "-"],
        ["--depth", "3", "--remove"],
    ],
)
def test_pin_wants_to_be_told_what(admin: Admin, filled: Filled, words: list[str]) -> None:
    ran = admin("pin", *words, *filled.options)
    assert (ran.code, ran.out) == (2, "")
