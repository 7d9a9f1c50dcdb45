"""status, ls, namespaces and diff: the same data as text and as JSON, on both indexes."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.admin.inspect import namespaces, status
from kvstore.admin.inspect.reports import AskedStatus, DiffReport, ListReport, NamespacesReport
from kvstore.build import load_settings, open_index, open_store
from kvstore.index.sessions import Hint
from kvstore.index.sqlite.index import SqliteIndex
from kvstore.keys import NO_SALT, NamespaceId, namespace_id, new_segment_id, session_id
from kvstore.rules.units import size
from kvstore.store.rounds import AT_WORK
from tests.admin.conftest import Admin, Filled, ec_slot, ec_space, kv_slots, kv_space, tensor_parallel
from tests.index.contract.chains import chain, record
from tests.servers.redis import RedisServer


def row(text: str, name: str) -> list[str]:
    """The cells of the line that has `name` in it."""
    return next(line.split() for line in text.splitlines() if name in line)


def test_status_counts_what_was_saved(admin: Admin, either: Filled) -> None:
    ran = admin("status", "--json", *either.options)
    assert ran.code == 0
    report = AskedStatus.model_validate_json(ran.out)
    assert report.index.state == report.payloads.state == "ok"
    assert report.total is not None
    assert (report.total.segments, report.total.blocks) == (5, 14)
    assert report.total.stored_bytes == sum(path.stat().st_size for path in either.payload_files())
    assert {line.id: line.kind for line in report.namespaces} == {either.kv_id: "kv", either.ec_id: "ec"}
    for line in report.namespaces:
        assert line.oldest_use_s is not None
        assert abs(time.time() - line.oldest_use_s) < 120
    text = admin("status", *either.options)
    assert text.code == 0
    for line in report.namespaces:
        cells = row(text.out, line.id)
        assert cells[1:5] == [line.kind, line.model, str(line.usage.segments), str(line.usage.blocks)]
        assert size(line.usage.stored_bytes) in text.out
    assert f"{size(report.total.stored_bytes)} in 5 segments, 14 blocks, 2 namespaces" in text.out


def test_status_of_nothing_yet_makes_nothing(admin: Admin, tmp_path: Path) -> None:
    folder = tmp_path / "none"
    ran = admin("status", "--json", "--payloads", f"file://{folder}")
    assert ran.code == 0
    assert ran.json["index"]["state"] == ran.json["payloads"]["state"] == "absent"
    assert ran.json["total"] == {"segments": 0, "blocks": 0, "stored_bytes": 0}
    for verb in (["ls"], ["namespaces"], ["doctor"]):
        assert admin(*verb, "--payloads", f"file://{folder}").code == 0
    assert not folder.exists()


@pytest.mark.parametrize("how", ["refused", "hangs"])
def test_status_without_its_index_says_so(
    admin: Admin, filled: Filled, private_redis: RedisServer, how: str
) -> None:
    if how == "refused":
        private_redis.kill()
    else:
        private_redis.pause()
    options = ["--payloads", f"file://{filled.folder}", "--index", private_redis.url]
    ran = admin("status", "--json", *options)
    assert ran.code == 5
    assert ran.json["index"]["state"] == "unreachable"
    assert ran.json["index"]["problem"]
    assert ran.json["total"] is None
    assert ran.json["payloads"]["state"] == "ok"
    text = admin("status", *options)
    assert text.code == 5
    assert "unreachable" in text.out
    assert "cache-admin doctor" in text.err
    for verb in (["ls"], ["namespaces"], ["show", "ab"]):
        failed = admin(*verb, *options)
        assert (failed.code, failed.out) == (5, "")
        assert "cache-admin doctor" in failed.err
        assert "Traceback" not in failed.err
    if how == "hangs":
        private_redis.resume()


def test_status_costs_the_same_however_much_is_stored(
    admin: Admin, filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_through(*args: object, **options: object) -> None:
        raise AssertionError("status reads through a namespace")

    for name in ("segments", "entries", "sample", "reapable", "usage"):
        monkeypatch.setattr(SqliteIndex, name, read_through)
    monkeypatch.setattr(status, "ASKED_NAMESPACES", 1)
    ran = admin("status", "--json", *filled.options)
    assert ran.code == 0, ran.err
    # The larger one is asked what would go first, the other one isn't.
    uses = {line["id"]: line["oldest_use_s"] for line in ran.json["namespaces"]}
    assert uses[filled.kv_id] is not None
    assert uses[filled.ec_id] is None
    assert row(admin("status", *filled.options).out, filled.ec_id)[-2] == "-"
    assert admin("namespaces", *filled.options).code == 0


def test_status_tells_the_whole_store_s_quota_its_tenants_and_what_waits(
    admin: Admin, either: Filled
) -> None:
    blue = kv_space(tenant="blue")
    either.save(blue, kv_slots(2, seed=5), depth=0)
    with closing(open_index(load_settings(either.settings, {}))) as index:
        segments = sorted(index.segments(namespace_id(either.kv)), key=lambda each: each.record.depth)
        index.pin(namespace_id(either.kv), [segments[0].segment], most_bytes=1 << 30)
        index.evict(namespace_id(either.kv), [segments[2].segment], delete_after_s=4e9, rule="admin")
        index.invalidate(namespace_id(either.ec))
        index.set_quota("tenant/blue", 2 * segments[0].record.nbytes)
        index.set_quota(f"namespace/{either.kv_id}", segments[0].record.nbytes)
        index.set_quota("tenant/gone", 1 << 20)
        index.set_quota(AT_WORK, int(time.time()))
        one, blues = segments[0].record.nbytes, index.usage(namespace_id(blue)).nbytes
    ran = admin("status", "--json", *either.options, env={"KVSTORE_CAPACITY_BYTES": str(4 * one)})
    report = AskedStatus.model_validate_json(ran.out)
    assert report.total is not None
    assert report.total.stored_bytes == 2 * one + blues
    assert (report.capacity_bytes, report.janitor) == (4 * one, True)
    assert (report.upkeep.pinned_bytes, report.upkeep.trashed, report.upkeep.bygone) == (one, 1, 2)
    quotas = {line.scope: line for line in report.quotas}
    assert list(quotas)[-1] == "store"
    assert (quotas["store"].used_bytes, quotas["store"].source) == (2 * one + blues, "settings")
    own = quotas[f"namespace/{either.kv_id}"]
    assert (own.used_bytes, own.pinned_bytes, own.state, own.source) == (2 * one, one, "over", "set")
    assert (quotas["tenant/blue"].used_bytes, quotas["tenant/blue"].state) == (blues, "ok")
    assert not quotas["tenant/gone"].known
    tenants = {line.tenant: line for line in report.tenants}
    assert tenants["default"].namespaces == 2
    assert (tenants["blue"].quota_bytes, tenants["default"].quota_bytes) == (2 * one, None)
    text = admin("status", *either.options, env={"KVSTORE_CAPACITY_BYTES": str(4 * one)}).out
    assert (
        f"{size(one)} pinned, 1 evicted segment to be deleted, 2 invalidated segments to be evicted" in text
    )
    assert f"{size(4 * one)}, {(2 * one + blues) / (4 * one):.0%} used" in text
    assert "at work" in text
    cells = row(text, f"namespace/{either.kv_id}")
    assert cells[-2:] == ["set", "over"]
    assert "200%" in cells


def test_ls_lists_and_sorts(admin: Admin, either: Filled) -> None:
    ran = admin("ls", "--json", *either.options)
    report = ListReport.model_validate_json(ran.out)
    assert report.found == len(report.segments) == 5
    by_segment = {path.name.split(".")[0]: path for path in either.payload_files()}
    for line in report.segments:
        assert line.stored_bytes == by_segment[line.segment].stat().st_size
        assert line.namespace == by_segment[line.segment].parts[-3]
    only = admin("ls", either.kv_id[:6], "--json", *either.options).json
    assert only["namespace"] == either.kv_id
    assert sorted(line["depth"] for line in only["segments"]) == [0, 4, 8]
    sizes = [
        s["stored_bytes"] for s in admin("ls", "--sort", "bytes", "--json", *either.options).json["segments"]
    ]
    assert sizes == sorted(sizes, reverse=True)
    made = [
        s["created_s"] for s in admin("ls", "--sort", "created", "--json", *either.options).json["segments"]
    ]
    assert made == sorted(made, reverse=True)


def test_ls_is_limited_and_says_so(admin: Admin, filled: Filled) -> None:
    ran = admin("ls", "--limit", "2", *filled.options)
    assert ran.code == 0
    assert len(ran.out.splitlines()) == 3
    assert "2 of 5 segments" in ran.err
    every = admin("ls", "--limit", "0", *filled.options)
    assert len(every.out.splitlines()) == 6
    assert every.err == ""


def test_namespaces_lists_identities(admin: Admin, either: Filled) -> None:
    either.save(tensor_parallel(tenant="blue", epoch=3), kv_slots(1, seed=7))
    ran = admin("namespaces", "--json", *either.options)
    report = NamespacesReport.model_validate_json(ran.out)
    third = next(line for line in report.namespaces if line.tp == 2)
    assert (third.tenant, third.epoch, third.block_tokens, third.kv_dtype) == ("blue", 3, 16, "auto")
    assert third.usage.segments == 1
    assert row(admin("namespaces", *either.options).out, third.id)[1:4] == ["kv", third.model, "blue"]


def test_diff_explains_field_by_field(admin: Admin, either: Filled) -> None:
    other = kv_space(hash_root="f" * 16, epoch=2, groups=(kv_space().groups[0], kv_space().groups[0]))
    either.save(other, kv_slots(1, seed=3))
    ids = [n["id"] for n in admin("namespaces", "--json", *either.options).json["namespaces"]]
    third = next(name for name in ids if name not in (either.kv_id, either.ec_id))
    ran = admin("namespaces", "diff", either.kv_id, third, "--json", *either.options)
    assert ran.code == 0
    report = DiffReport.model_validate_json(ran.out)
    assert not report.same
    assert [difference.path for difference in report.differences] == ["epoch", "groups.1", "hash_root"]
    assert "PYTHONHASHSEED" in report.differences[2].meaning
    text = admin("namespaces", "diff", either.kv_id, third, *either.options).out
    for difference in report.differences:
        assert difference.path in text
    assert "f" * 16 in text
    same = admin("namespaces", "diff", either.kv_id[:8], either.kv_id, *either.options)
    assert (same.code, same.out) == (0, "same\n")


def test_every_field_of_a_namespace_has_a_meaning() -> None:
    fields = kv_space().model_dump(mode="json")
    assert set(namespaces._MEANINGS) == set(fields)


def test_diff_goes_into_shapes_and_parallel_sizes() -> None:
    group = kv_space().groups[0].model_copy(update={"shape": (2, 1, 16, 8)})
    differences = list(
        namespaces._differences(
            "", kv_space().model_dump(mode="json"), tensor_parallel(groups=(group,)).model_dump(mode="json")
        )
    )
    assert [(d.path, d.a, d.b) for d in differences] == [
        ("groups.0.shape", [2, 2, 16, 8], [2, 1, 16, 8]),
        ("parallel.tp", 1, 2),
    ]


def test_a_name_from_the_store_cannot_drive_the_terminal(admin: Admin, filled: Filled) -> None:
    filled.save(ec_space(model="evil\x1b[31m[bold]x\r"), [ec_slot("i", 2)])
    for verb in (["status"], ["namespaces"]):
        out = admin(*verb, *filled.options).out
        assert "\x1b" not in out
        assert "\r" not in out
        assert "evil\\x1b[31m[bold]x\\r" in out


@pytest.mark.parametrize("verb", [["ls", "ffff"], ["namespaces", "diff", "ffff", "ffff"]])
def test_an_unknown_namespace_names_the_next_command(admin: Admin, filled: Filled, verb: list[str]) -> None:
    ran = admin(*verb, *filled.options)
    assert (ran.code, ran.out) == (1, "")
    assert "`cache-admin namespaces`" in ran.err


@pytest.mark.parametrize("columns", ["40", "80", "120"])
def test_nothing_is_cut_on_a_narrow_terminal(admin: Admin, filled: Filled, columns: str) -> None:
    filled.save(kv_space(model="an-organisation/a-model-with-a-long-name"), kv_slots(1, seed=2))
    for verb in (["status"], ["ls"], ["namespaces"], ["doctor"]):
        ran = admin(*verb, *filled.options, env={"COLUMNS": columns})
        assert ran.code == 0
        assert "…" not in ran.out
        assert max(map(len, ran.out.splitlines())) <= int(columns)
    for line in admin("namespaces", "--json", *filled.options).json["namespaces"]:
        assert line["id"] in admin("status", *filled.options, env={"COLUMNS": columns}).out


def test_what_only_an_ended_session_used_is_the_oldest(admin: Admin, either: Filled) -> None:
    session, segment = session_id(NO_SALT, "chat"), new_segment_id()
    name = NamespaceId(either.kv_id)
    with open_index(load_settings(either.settings, {})) as index:
        made = record(1, created_s=int(time.time()))
        index.commit(name, segment, chain(1), made, rank=0, ranks=1, session=session)
        index.session(name, session, [], time.time(), Hint(end=True))
    status, shown = admin("status", *either.options), admin("show", segment.hex(), *either.options)
    assert row(status.out, name)[-2] == "ended"
    assert "ended" in shown.out
    assert admin("status", "--json", *either.options).code == 0


@pytest.mark.servers
def test_in_how_many_shards_a_namespace_lies(admin: Admin, tmp_path: Path, redis_url: str) -> None:
    folder = f"file://{tmp_path}"
    with closing(open_store({"payloads": folder, "index": redis_url, "redis": {"shards": 8}})) as store:
        space = store.open(kv_space(), block_bytes=4096)
        for seed in range(9):
            space.save(kv_slots(2, seed=seed))
    options = ["--payloads", folder, "--index", redis_url]
    (line,) = admin("status", "--json", *options).json["namespaces"]
    assert (line["shards"], line["usage"]["segments"]) == (8, 9)
    assert "shards" in admin("status", *options).out
    assert admin("show", line["id"], "--json", *options).json["shards"] == 8
    assert "shards" in admin("show", line["id"], *options).out
