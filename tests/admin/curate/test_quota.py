"""quota: what the store, tenants, namespaces and salts may hold."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.admin.curate.reports import QuotaReport, QuotasReport
from kvstore.admin.inspect.reports import AskedStatus
from kvstore.keys import namespace_id, new_segment_id, salt_id
from tests.admin.conftest import Admin, Filled, chain, opened, snapshot
from tests.admin.inspect.test_status import row
from tests.index.contract.chains import record


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
    plan = quota(admin, either, "store", "--size", "30KiB")
    assert (plan.applied, plan.before_bytes, plan.after_bytes) == (False, 100 << 30, 30 << 10)
    assert plan.used_bytes == sum(path.stat().st_size for path in either.payload_files())
    assert plan.excess_bytes == plan.used_bytes - ((30 << 10) - 2 * 307)
    assert snapshot(either) == before
    quota(admin, either, "store", "--size", "30KiB", "--apply")
    quota(admin, either, f"namespace/{either.kv_id[:5]}", "--size", "1GiB", "--apply")
    new = quota(admin, either, "tenant/still to come", "--size", "2GiB", "--apply")
    assert (new.known, new.before_bytes) == (False, None)
    found = quotas(admin, either)
    assert [*found] == ["tenant/still to come", f"namespace/{either.kv_id}", "store"]
    assert (found["store"].source, found["store"].state) == ("set", "over")
    text = admin("quota", *either.options).out
    assert row(text, "store")[-2:] == ["set", "over"]
    assert "where a hundredth of a quota, at most 1.0 GiB, is left" in text
    cleared = quota(admin, either, "store", "--size", "none", "--apply")
    assert (cleared.before_bytes, cleared.after_bytes) == (30 << 10, 100 << 30)
    assert quota(admin, either, f"namespace/{either.kv_id}", "--size", "none", "--apply").after_bytes is None
    assert [*quotas(admin, either)] == ["tenant/still to come", "store"]
    status = AskedStatus.model_validate_json(admin("status", "--json", *either.options).out)
    assert status.capacity_bytes == 100 << 30


def test_settings_quotas_are_shown_as_such(admin: Admin, filled: Filled) -> None:
    env = {"KVSTORE_EVICTION__TENANT_BYTES": "1GiB", "KVSTORE_EVICTION__NAMESPACE_BYTES": "25KiB"}
    used = quotas(admin, filled, **env)[f"namespace/{filled.kv_id}"].used_bytes
    found = quotas(admin, filled, **{**env, "KVSTORE_EVICTION__NAMESPACE_BYTES": str(used)})
    assert {scope: line.source for scope, line in found.items()} == {
        f"namespace/{filled.kv_id}": "settings",
        f"namespace/{filled.ec_id}": "settings",
        "tenant/default": "settings",
        "store": "settings",
    }
    assert found[f"namespace/{filled.kv_id}"].state == "high", "nothing is left"
    assert found[f"namespace/{filled.ec_id}"].state == "ok"


def test_the_quota_of_a_salt(admin: Admin, either: Filled) -> None:
    salt, digests, made = salt_id("alice"), b"d" * 32, record(2, salt=salt_id("alice"))
    with opened(either) as index:
        index.commit(namespace_id(either.kv), new_segment_id(), digests, made, rank=0, ranks=1)
    scope = f"salt/{salt.hex()}"
    plan = quota(admin, either, scope.upper().replace("SALT", "salt"), "--size", "4KiB", "--apply")
    assert (plan.known, plan.before_bytes, plan.after_bytes) == (True, None, 4 << 10)
    assert plan.used_bytes == made.nbytes
    found = quotas(admin, either)
    assert [*found] == [scope, "store"]
    assert (found[scope].used_bytes, found[scope].state) == (made.nbytes, "over")
    quota(admin, either, scope, "--size", "none", "--apply")
    assert [*quotas(admin, either)] == ["store"]


def test_a_quota_that_pins_stand_against_says_so(admin: Admin, filled: Filled) -> None:
    with opened(filled) as index:
        index.pin(namespace_id(filled.kv), [each.segment for each in chain(filled)], most_bytes=1 << 30)
    plan = quota(admin, filled, "store", "--size", "10KiB")
    assert (plan.pinned_bytes, plan.excess_bytes) == (24 << 10, plan.used_bytes - (24 << 10))
    assert "pin --remove" in plan.problem


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["everything", "--size", "1GiB"], 1, "is no scope"),
        (["tenant/", "--size", "1GiB"], 1, "is no scope"),
        (["namespace/", "--size", "1GiB"], 1, "is no scope"),
        (["salt/alice", "--size", "1GiB"], 1, "is no scope"),
        (["namespace/zz", "--size", "1GiB"], 1, "no namespace starts with"),
        (["store", "--size", "much"], 2, "--size"),
        (["store", "--size", "0"], 2, "less than one byte"),
        (["store", "--size", "none"], 1, "no size was set"),
        (["tenant/default", "--size", "none"], 1, "no size was set"),
        (["store"], 2, "give SCOPE with"),
        (["--size", "1GiB"], 2, "give SCOPE with"),
        ([], 2, "give SCOPE with"),
    ],
)
def test_what_can_t_be_a_quota(admin: Admin, filled: Filled, words: list[str], code: int, said: str) -> None:
    ran = admin("quota", *words, "--apply", *filled.options)
    assert (ran.code, ran.out) == (code, "")
    assert said in ran.err
    assert [*quotas(admin, filled)] == ["store"]
