"""quota --ttl: what is set holds at once, is shown, and is a reason that explain names."""

from __future__ import annotations

import time
from contextlib import closing

import pytest

from kvstore.admin.curate.reports import QuotaReport, QuotasReport
from kvstore.admin.inspect.reports import AskedStatus
from kvstore.build import load_settings, open_store
from kvstore.keys import block_key, digest, digests, namespace_id
from kvstore.metrics import Counters
from kvstore.store.housekeeping import Housekeeping
from tests.admin.conftest import Admin, Filled, kv_slots, kv_space, opened, snapshot
from tests.admin.inspect.test_status import row
from tests.waiting import until

HOUR_S, DAY_S = 3600, 86_400


def ttl(admin: Admin, filled: Filled, scope: str, time: str, *words: str) -> QuotaReport:
    ran = admin("quota", scope, "--ttl", time, *words, "--json", *filled.options)
    assert ran.code == 0, ran.err
    report = QuotaReport.model_validate_json(ran.out)
    assert ("nothing was changed" in ran.err) is not report.applied
    return report


def age(filled: Filled, seconds: int) -> str:
    """Saves a block that was computed so long ago; returns its digest, in hex."""
    [slot] = kv_slots(1, seed=seconds)
    with closing(open_store(filled.settings)) as store:
        space = store.open(filled.kv, block_bytes=4096)
        assert space.save([slot], created_s=int(time.time()) - seconds).stored == 1
    return digest(slot.key).hex()


def test_what_is_set_holds_at_once(admin: Admin, either: Filled) -> None:
    old = bytes.fromhex(age(either, 2 * DAY_S))
    before = snapshot(either)
    planned = ttl(admin, either, f"namespace/{either.kv_id[:6]}", "1d")
    assert (planned.applied, planned.scope) == (False, f"namespace/{either.kv_id}")
    assert (planned.before_ttl_s, planned.after_ttl_s, planned.known) == (None, DAY_S, True)
    assert (planned.older.segments, planned.older.blocks) == (1, 1)
    assert snapshot(either) == before
    with opened(either) as index:
        assert index.find(namespace_id(either.kv), old)[0] is not None
    done = ttl(admin, either, f"namespace/{either.kv_id[:6]}", "1d", "--apply")
    assert (done.applied, done.older.segments) == (True, 1)
    with opened(either) as index:
        assert index.find(namespace_id(either.kv), old) == [None]
        young = digests([slot.key[:-2] for slot in kv_slots(1)])
        assert index.find(namespace_id(either.kv), young) != [None]
    listed = QuotasReport.model_validate_json(admin("quota", "--json", *either.options).out).quotas
    assert [(one.scope, one.ttl_s, one.ttl_source, one.quota_bytes) for one in listed] == [
        (f"namespace/{either.kv_id}", DAY_S, "set", None),
        ("store", None, None, 100 << 30),
    ]
    assert listed[0].used_bytes and listed[0].used_bytes < listed[1].used_bytes
    assert "24.0h, set" in admin("quota", *either.options).out
    status = AskedStatus.model_validate_json(admin("status", "--json", *either.options).out)
    assert {one.id: one.ttl_s for one in status.namespaces} == {either.kv_id: DAY_S, either.ec_id: None}
    assert "24.0h" in row(admin("status", *either.options).out, either.kv_id)
    cleared = ttl(admin, either, f"namespace/{either.kv_id}", "none", "--apply")
    assert (cleared.before_ttl_s, cleared.after_ttl_s, cleared.older.segments) == (DAY_S, None, 0)
    assert "to live" not in admin("quota", *either.options).out
    # Whoever goes by the settings' time says so.
    assert held(either) == {DAY_S, 0}
    round_of(either)
    assert held(either) == {0}


def held(filled: Filled) -> set[int]:
    """The times that the index holds to."""
    with opened(filled) as index:
        return {one.ttl_s for one in index.accounts()}


def round_of(filled: Filled, **eviction: int) -> int:
    """A janitor's, with these settings; returns how many segments it evicted."""
    settings = load_settings({**filled.settings, "eviction": eviction}, {})
    with opened(filled) as index:
        return Housekeeping(index, None, settings, Counters(), time.time).age_out()  # type: ignore[arg-type]


def test_a_verb_without_the_settings_time_lifts_none(admin: Admin, either: Filled) -> None:
    round_of(either, ttl_s=HOUR_S)
    ttl(admin, either, "store", "2h", "--apply")
    assert held(either) == {HOUR_S}
    ttl(admin, either, "store", "none", "--apply")
    assert held(either) == {HOUR_S}
    ttl(admin, either, "tenant/default", "30m", "--apply")
    assert held(either) == {HOUR_S // 2}
    round_of(either, ttl_s=HOUR_S)
    assert held(either) == {HOUR_S // 2}


def test_a_tenants_holds_in_all_that_it_has_and_will_have(admin: Admin, either: Filled) -> None:
    assert ttl(admin, either, "tenant/default", "12h", "--apply").known
    other = kv_space(model="later")
    either.save(other, kv_slots(1))
    with opened(either) as index:
        settings = load_settings(either.settings, {})
        Housekeeping(index, None, settings, Counters(), time.time).age_out()  # type: ignore[arg-type]
        assert {one.ttl_s for one in index.accounts()} == {12 * HOUR_S}
    # The shorter of two holds, whichever scope is the larger.
    assert ttl(admin, either, "store", "1h", "--apply").known
    ttl(admin, either, f"namespace/{either.kv_id}", "20h", "--apply")
    with opened(either) as index:
        assert {one.ttl_s for one in index.accounts()} == {HOUR_S}


def test_explain_names_it_before_and_after_its_eviction(admin: Admin, either: Filled) -> None:
    old = age(either, DAY_S - 2)
    ttl(admin, either, "store", "1d", "--apply")
    # It becomes too old now.
    with opened(either) as index:
        until(lambda: index.find(namespace_id(either.kv), bytes.fromhex(old)) == [None])
    [block] = admin("explain", "--digest", old, "--json", *either.options).json["blocks"]
    found = block["findings"][0]
    assert (found["cause"], found["rule"]) == ("expired", "ttl")
    assert found["at_s"] == pytest.approx(time.time(), abs=60)
    assert "older than its time to live (86,400 s)" in found["text"]
    assert "older than its time to live" in admin("explain", "--digest", old, *either.options).out
    with opened(either) as index:
        settings = load_settings(either.settings, {})
        assert Housekeeping(index, None, settings, Counters(), time.time).age_out() == 1  # type: ignore[arg-type]
    [block] = admin("explain", "--digest", old, "--json", *either.options).json["blocks"]
    found = block["findings"][0]
    assert (found["cause"], found["rule"]) == ("evicted", "ttl")
    assert "older than its time to live" in found["text"]
    # What is young enough is not said to be old.
    young = digest(block_key(kv_slots(1)[0].key[:-2])).hex()
    [block] = admin("explain", "--digest", young, "--json", *either.options).json["blocks"]
    assert block["findings"][0]["cause"] == "stored"


def test_the_shorter_of_the_settings_and_what_is_set_is_listed(admin: Admin, filled: Filled) -> None:
    ttl(admin, filled, "store", "2h", "--apply")
    for seconds, holds in ((HOUR_S, (HOUR_S, "settings")), (3 * HOUR_S, (2 * HOUR_S, "set"))):
        env = {"KVSTORE_EVICTION__TTL_S": str(seconds)}
        [store] = admin("quota", "--json", *filled.options, env=env).json["quotas"]
        assert (store["ttl_s"], store["ttl_source"]) == holds


def test_a_size_and_a_time_are_set_at_once_and_cleared_one_by_one(admin: Admin, either: Filled) -> None:
    both = ttl(admin, either, "tenant/default", "12h", "--size", "1GiB", "--apply")
    assert (both.after_bytes, both.after_ttl_s) == (1 << 30, 12 * HOUR_S)
    assert ttl(admin, either, "tenant/default", "none", "--apply").after_bytes == 1 << 30
    ttl(admin, either, "tenant/default", "1h", "--size", "none", "--apply")
    found = admin("quota", "--json", *either.options).json["quotas"]
    assert [(one["scope"], one["quota_bytes"], one["ttl_s"]) for one in found] == [
        ("tenant/default", None, HOUR_S),
        ("store", 100 << 30, None),
    ]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["salt/" + "0" * 32, "--ttl", "1d"], 1, "a salt has no time to live"),
        (["everything", "--ttl", "1d"], 1, "is no scope"),
        (["store", "--ttl", "599s"], 2, "ten minutes"),
        (["store", "--ttl", "tomorrow"], 2, "is no time"),
        (["store", "--ttl", "6000w"], 2, "a century"),
        (["store", "--ttl", "none"], 1, "no time to live was set"),
    ],
)
def test_what_can_not_be_is_refused_in_words(
    admin: Admin, filled: Filled, words: list[str], code: int, said: str
) -> None:
    ran = admin("quota", *words, *filled.options)
    assert (ran.code, said in ran.err) == (code, True), ran.err
