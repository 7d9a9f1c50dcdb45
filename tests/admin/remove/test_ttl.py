"""ttl: what is set holds at once, is shown, and is a reason that explain names."""

from __future__ import annotations

import time
from contextlib import closing

import pytest

from kvstore.admin.inspect.reports import StatusReport
from kvstore.admin.remove.reports import TtlReport, TtlsReport
from kvstore.build import load_settings, open_store
from kvstore.keys import block_key, digest, digests, namespace_id
from kvstore.metrics import Counters
from kvstore.store.housekeeping import Housekeeping
from tests.admin.conftest import Admin, Filled, kv_slots, kv_space, opened, snapshot
from tests.admin.inspect.test_status import row
from tests.waiting import until

HOUR_S, DAY_S = 3600, 86_400


def ttl(admin: Admin, filled: Filled, *words: str) -> TtlReport:
    ran = admin("ttl", *words, "--json", *filled.options)
    assert ran.code == 0, ran.err
    report = TtlReport.model_validate_json(ran.out)
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
    planned = ttl(admin, either, "set", f"namespace/{either.kv_id[:6]}", "1d")
    assert (planned.applied, planned.scope) == (False, f"namespace/{either.kv_id}")
    assert (planned.before_s, planned.after_s, planned.namespaces) == (None, DAY_S, 1)
    assert (planned.older.segments, planned.older.blocks) == (1, 1)
    assert snapshot(either) == before
    with opened(either) as index:
        assert index.find(namespace_id(either.kv), old)[0] is not None
    done = ttl(admin, either, "set", f"namespace/{either.kv_id[:6]}", "1d", "--apply")
    assert (done.applied, done.older.segments) == (True, 1)
    with opened(either) as index:
        assert index.find(namespace_id(either.kv), old) == [None]
        young = digests([slot.key[:-2] for slot in kv_slots(1)])
        assert index.find(namespace_id(either.kv), young) != [None]
    listed = TtlsReport.model_validate_json(admin("ttl", "--json", *either.options).out)
    assert [(one.scope, one.ttl_s, one.source) for one in listed.ttls] == [
        (f"namespace/{either.kv_id}", DAY_S, "set")
    ]
    status = StatusReport.model_validate_json(admin("status", "--json", *either.options).out)
    assert {one.id: one.ttl_s for one in status.namespaces} == {either.kv_id: DAY_S, either.ec_id: None}
    assert "24.0h" in row(admin("status", *either.options).out, either.kv_id)
    # It is no quota.
    assert [one["scope"] for one in admin("quota", "--json", *either.options).json["quotas"]] == ["store"]
    cleared = ttl(admin, either, "clear", f"namespace/{either.kv_id}", "--apply")
    assert (cleared.before_s, cleared.after_s, cleared.older.segments) == (DAY_S, None, 0)
    assert "No time to live is set" in admin("ttl", *either.options).out
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
    ttl(admin, either, "set", "store", "2h", "--apply")
    assert held(either) == {HOUR_S}
    ttl(admin, either, "clear", "store", "--apply")
    assert held(either) == {HOUR_S}
    ttl(admin, either, "set", "tenant/default", "30m", "--apply")
    assert held(either) == {HOUR_S // 2}
    round_of(either, ttl_s=HOUR_S)
    assert held(either) == {HOUR_S // 2}


def test_a_tenants_holds_in_all_that_it_has_and_will_have(admin: Admin, either: Filled) -> None:
    assert ttl(admin, either, "set", "tenant/default", "12h", "--apply").namespaces == 2
    other = kv_space(model="later")
    either.save(other, kv_slots(1))
    with opened(either) as index:
        settings = load_settings(either.settings, {})
        Housekeeping(index, None, settings, Counters(), time.time).age_out()  # type: ignore[arg-type]
        assert {one.ttl_s for one in index.accounts()} == {12 * HOUR_S}
    # The shorter of two holds, whichever scope is the larger.
    assert ttl(admin, either, "set", "store", "1h", "--apply").namespaces == 3
    ttl(admin, either, "set", f"namespace/{either.kv_id}", "20h", "--apply")
    with opened(either) as index:
        assert {one.ttl_s for one in index.accounts()} == {HOUR_S}


def test_explain_names_it_before_and_after_its_eviction(admin: Admin, either: Filled) -> None:
    old = age(either, DAY_S - 2)
    ttl(admin, either, "set", "store", "1d", "--apply")
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


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["set", "salt/" + "0" * 32, "1d"], 1, "a salt has no time to live"),
        (["set", "everything", "1d"], 1, "is no scope"),
        (["set", "store", "599s"], 2, "ten minutes"),
        (["set", "store", "tomorrow"], 2, "is no time"),
        (["set", "store", "6000w"], 2, "a century"),
        (["clear", "store"], 1, "no time to live was set"),
    ],
)
def test_what_can_not_be_is_refused_in_words(
    admin: Admin, filled: Filled, words: list[str], code: int, said: str
) -> None:
    ran = admin("ttl", *words, *filled.options)
    assert (ran.code, said in ran.err) == (code, True), ran.err
