"""status, ls, namespaces and diff: the same data as text and as JSON, on both indexes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvstore.admin import inventory
from kvstore.admin.machine import size
from schemas.reports import DiffReport, ListReport, NamespacesReport, StatusReport
from tests.admin.conftest import Admin, Filled, ec_slot, ec_space, kv_slots, kv_space, tensor_parallel
from tests.servers import RedisServer


def row(text: str, name: str) -> list[str]:
    """The cells of the line that has `name` in it."""
    return next(line.split() for line in text.splitlines() if name in line)


def test_status_counts_what_was_saved(admin: Admin, either: Filled) -> None:
    ran = admin("status", "--json", *either.options)
    assert ran.code == 0
    report = StatusReport.model_validate_json(ran.out)
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


def test_large_namespaces_are_not_read_through(
    admin: Admin, filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "SCAN_SEGMENTS", 2)
    uses = {
        line["id"]: line["newest_use_s"]
        for line in admin("status", "--json", *filled.options).json["namespaces"]
    }
    assert uses[filled.kv_id] is None
    assert uses[filled.ec_id] is not None
    assert row(admin("status", *filled.options).out, filled.kv_id)[-1] == "-"


def test_ls_lists_and_sorts(admin: Admin, either: Filled) -> None:
    ran = admin("ls", "--json", *either.options)
    report = ListReport.model_validate_json(ran.out)
    assert report.found == len(report.segments) == 5
    by_segment = {path.name.split(".")[0]: path for path in either.payload_files()}
    text = admin("ls", *either.options)
    for line in report.segments:
        assert line.stored_bytes == by_segment[line.segment].stat().st_size
        assert line.namespace == by_segment[line.segment].parts[-3]
        cells = row(text.out, line.segment)
        assert cells[0] == line.namespace[:8]
        assert cells[2] == str(line.slots)
        assert cells[5] == str(line.depth)
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
    text = admin("namespaces", *either.options)
    assert text.code == 0
    for line in report.namespaces:
        assert row(text.out, line.id)[1:4] == [line.kind, line.model, line.tenant]


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
    assert set(inventory._MEANINGS) == set(fields)


def test_diff_goes_into_shapes_and_parallel_sizes() -> None:
    group = kv_space().groups[0].model_copy(update={"shape": (2, 1, 16, 8)})
    differences = list(
        inventory._differences(
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
