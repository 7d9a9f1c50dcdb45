"""show: what a namespace, a segment and a payload are, and damage of every kind."""

from __future__ import annotations

import os
import time
import tracemalloc
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from kvstore.admin.inspect.reports import NamespaceReport, SegmentReport
from kvstore.build import load_settings, open_index, open_store
from kvstore.keys import NamespaceId, SegmentId, canonical_json, digest, new_segment_id, salt_id
from schemas.records import PartRecord, SegmentRecord, rounded_cost
from tests.admin.conftest import Admin, Filled, kv_slots, tensor_parallel
from tests.format import hostile
from tests.servers.redis import RedisServer


def chain(filled: Filled) -> list[Path]:
    """Payloads of the KV namespace."""
    return [path for path in filled.payload_files() if filled.kv_id in path.parts]


def segment_of(path: Path) -> str:
    return path.name.split(".")[0]


def report(admin: Admin, filled: Filled, *words: str, code: int = 0) -> SegmentReport:
    ran = admin("show", *words, "--json", *filled.options)
    assert ran.code == code, ran.err
    return SegmentReport.model_validate_json(ran.out)


def test_namespace_by_id_and_by_prefix(admin: Admin, either: Filled) -> None:
    for name in (either.kv_id, either.kv_id[:7], either.kv_id.upper()):
        ran = admin("show", name, "--json", *either.options)
        shown = NamespaceReport.model_validate_json(ran.out)
        assert (shown.id, shown.usage.segments, shown.usage.blocks) == (either.kv_id, 3, 12)
        assert shown.namespace == either.kv.model_dump(mode="json")
    text = admin("show", either.kv_id, *either.options).out
    assert '"hash_root": "8899aabbccddeeff"' in text
    assert "3 segments, 12 blocks" in text


def test_a_namespace_s_quotas_and_what_waits_in_it(admin: Admin, either: Filled) -> None:
    name = NamespaceId(either.kv_id)
    with closing(open_index(load_settings(either.settings, {}))) as index:
        [first, second, *_] = [each.segment for each in index.segments(name)]
        index.pin(name, [first], most_bytes=1 << 30)
        index.evict(name, [second], delete_after_s=4e9, rule="admin")
        index.set_quota("tenant/default", 1 << 20)
        index.set_quota("tenant/other", 1 << 20)
        index.set_quota(f"namespace/{either.ec_id}", 1 << 20)
    shown = NamespaceReport.model_validate_json(admin("show", either.kv_id, "--json", *either.options).out)
    assert [line.scope for line in shown.quotas] == ["tenant/default", "store"]
    assert (shown.upkeep.trashed, shown.usage.segments) == (1, 2)
    assert shown.upkeep.pinned_bytes * 2 == shown.usage.stored_bytes
    assert shown.seen_s == pytest.approx(time.time(), abs=60)
    text = admin("show", either.kv_id, *either.options).out
    assert "1 evicted segment to be deleted" in text
    assert "1.0 MiB" in text


def test_what_a_segment_cost_is_shown(admin: Admin, either: Filled) -> None:
    record = SegmentRecord((PartRecord(8, (8,)),), 1, "none", int(time.time()), cost_us=1_500_000)
    with closing(open_index(load_settings(either.settings, {}))) as index:
        segment = SegmentId(b"costly!!")
        index.commit(NamespaceId(either.kv_id), segment, bytes(16), record, rank=0, ranks=1)
    line = next(
        line
        for line in admin("ls", "--json", *either.options).json["segments"]
        if line["segment"] == segment.hex()
    )
    assert (line["cost_us"], line["pinned"]) == (rounded_cost(1_500_000), False)
    text = next(line for line in admin("ls", *either.options).out.splitlines() if segment.hex() in line)
    assert "1.5s" in text
    status = admin("status", "--json", *either.options).json["namespaces"]
    assert sum(each["cost_s"] for each in status) == pytest.approx(1.5, rel=1e-3)


def test_the_id_of_a_salt_is_shown(admin: Admin, either: Filled) -> None:
    """The index tells it, or the header where the index doesn't; `show` says where the two differ."""
    salt, segment = salt_id("hers"), new_segment_id()
    made = kv_slots(4, seed=9)
    with closing(open_store(either.settings)) as store:
        space = store.open(either.kv, block_bytes=4096)
        assert space.save(made, segment=segment, salt=salt).stored

    def shown() -> tuple[SegmentReport, str]:
        said = SegmentReport.model_validate_json(admin("show", segment.hex(), "--json", *either.options).out)
        return said, admin("show", segment.hex(), *either.options).out

    said, text = shown()
    assert (said.salt, said.damaged) == (salt.hex(), False)
    assert salt.hex() in text
    with closing(open_index(load_settings(either.settings, {}))) as index:
        [listing] = index.get(NamespaceId(either.kv_id), [segment])
        assert listing is not None
        index.unlist(NamespaceId(either.kv_id), [segment])
        assert shown()[0].salt == salt.hex()
        packed = b"".join(digest(slot.key) for slot in made)
        moved = replace(listing.record, salt=b"")
        index.commit(NamespaceId(either.kv_id), segment, packed, moved, rank=0, ranks=1)
    said, text = shown()
    assert (said.salt, said.damaged) == ("", True)
    assert f"salt id: none by the index, {salt.hex()} by its header" in text
    path = next(one for one in map(segment_of, chain(either)) if one != segment.hex())
    assert "salt id" not in admin("show", path, *either.options).out


def test_segment_by_id_prefix_name_and_path(admin: Admin, either: Filled) -> None:
    path = chain(either)[0]
    name = "/".join(path.parts[-3:])
    reports = [
        report(admin, either, word, "--verify")
        for word in (segment_of(path), segment_of(path)[:8], name, str(path), os.path.relpath(path))
    ]
    for shown in reports:
        assert (shown.segment, shown.namespace) == (segment_of(path), either.kv_id)
        assert (shown.model, shown.kind, shown.verified) == ("tiny-random", "kv", True)
        assert shown.record is not None
        assert shown.record.stored_bytes == path.stat().st_size
        [part] = shown.parts
        assert (part.state, part.problems, part.location) == ("ok", (), str(path))
        assert [slot.check for slot in part.slots] == ["ok"] * 4


def test_slots_are_what_safetensors_reads(admin: Admin, filled: Filled) -> None:
    for path in filled.payload_files():
        [part] = report(admin, filled, segment_of(path)).parts
        with safe_open(path, framework="numpy") as opened:
            assert sorted(slot.key for slot in part.slots) == sorted(opened.keys())
        text = admin("show", segment_of(path), *filled.options).out
        for slot in part.slots:
            assert slot.check == "unchecked"
            for shown in (slot.key[:12], slot.checksum, slot.dtype, str(slot.stored_bytes)):
                assert shown in text


def test_compressed_slots_are_verified_decompressed(admin: Admin, filled: Filled) -> None:
    codecs = set()
    for path in filled.payload_files():
        if filled.ec_id in path.parts:
            [part] = report(admin, filled, segment_of(path), "--verify").parts
            codecs |= {slot.codec for slot in part.slots}
            assert all(slot.check == "ok" for slot in part.slots)
    assert codecs == {"lz4", "none"}


def test_every_rank_is_shown(admin: Admin, either: Filled) -> None:
    either.save(tensor_parallel(), kv_slots(2, seed=4))
    [first, second] = [
        path for path in either.payload_files() if path.suffix == ".1" or sibling(path).exists()
    ]
    shown = report(admin, either, segment_of(first), "--verify")
    assert [part.rank for part in shown.parts] == [0, 1]
    only = report(admin, either, str(second))
    assert [part.rank for part in only.parts] == [1]
    second.unlink()
    assert [p.state for p in report(admin, either, segment_of(first), code=3).parts] == ["ok", "missing"]


def sibling(path: Path) -> Path:
    return path.with_suffix(".1")


@pytest.mark.parametrize("at", [0, 20, 300, -1])
def test_a_flipped_byte_is_found(admin: Admin, either: Filled, at: int) -> None:
    path = chain(either)[1]
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)
    shown = report(admin, either, segment_of(path), "--verify", code=3)
    [part] = shown.parts
    assert part.state == "damaged"
    if at == -1:
        assert [slot.check for slot in part.slots] == ["ok", "ok", "ok", "bad"]
        # Without --verify nobody looks at the bytes.
        assert report(admin, either, segment_of(path)).parts[0].state == "ok"
    text = admin("show", segment_of(path), "--verify", *either.options)
    assert text.code == 3
    assert all(problem.split()[0] in text.out for problem in part.problems)
    assert "Traceback" not in text.out + text.err


@pytest.mark.parametrize("left", [0, 5, 4000, 4096 + 1024 * 2 + 7])
def test_a_truncated_payload_is_found(admin: Admin, filled: Filled, left: int) -> None:
    path = chain(filled)[0]
    os.truncate(path, left)
    [part] = report(admin, filled, segment_of(path), "--verify", code=3).parts
    assert (part.state, part.stored_bytes) == ("damaged", left)
    if left > 4096:
        assert [slot.check for slot in part.slots] == ["ok", "ok", "missing", "missing"]
    assert report(admin, filled, segment_of(path), code=3).parts[0].state == "damaged"


def test_a_lost_payload_is_found(admin: Admin, either: Filled) -> None:
    path = chain(either)[0]
    path.unlink()
    shown = report(admin, either, segment_of(path), code=3)
    assert [part.state for part in shown.parts] == ["missing"]
    assert shown.model == "tiny-random"


def test_a_payload_under_another_name_is_found(admin: Admin, filled: Filled) -> None:
    first, second, _ = chain(filled)
    first.write_bytes(second.read_bytes())
    [part] = report(admin, filled, segment_of(first), code=3).parts
    assert any(problem.startswith("segment id: ") for problem in part.problems)
    [other] = [path for path in filled.payload_files() if filled.ec_id in path.parts][:1]
    first.write_bytes(other.read_bytes())
    [part] = report(admin, filled, segment_of(first), code=3).parts
    assert filled.ec_id in part.problems[0]


def test_a_header_that_promises_the_moon_costs_nothing(admin: Admin, filled: Filled) -> None:
    path = chain(filled)[0]
    path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    [part] = report(admin, filled, segment_of(path), "--verify", code=3).parts
    assert "header length" in part.problems[0]


def test_an_evicted_segment_is_still_explained(admin: Admin, either: Filled) -> None:
    path = chain(either)[0]
    with closing(open_store(either.settings)) as store:
        store.index.evict(
            NamespaceId(either.kv_id),
            [SegmentId(bytes.fromhex(segment_of(path)))],
            delete_after_s=9e9,
            rule="admin",
        )
    for word in (segment_of(path), str(path)):
        shown = report(admin, either, word)
        assert shown.record is None
        assert shown.parts[0].state == "ok"
    assert "does not name it" in admin("show", segment_of(path), *either.options).out


def test_a_payload_explains_itself_without_an_index(
    admin: Admin, filled: Filled, private_redis: RedisServer
) -> None:
    private_redis.kill()
    path = chain(filled)[0]
    options = ["--payloads", f"file://{filled.folder}", "--index", private_redis.url]
    ran = admin("show", str(path), "--verify", "--json", *options)
    assert ran.code == 5
    shown = SegmentReport.model_validate_json(ran.out)
    assert (shown.record, shown.index.state, shown.model) == (None, "unreachable", "tiny-random")
    assert [slot.check for slot in shown.parts[0].slots] == ["ok"] * 4
    assert admin("show", str(path), *options).code == 5


@pytest.mark.parametrize(
    "name", ["ffffffff", "f" * 16, "not hex", "0123456789abcdef01", "../../etc/passwd", ""]
)
def test_an_unknown_id_names_the_next_command(admin: Admin, filled: Filled, name: str) -> None:
    ran = admin("show", name, *filled.options)
    assert (ran.code, ran.out) == (1, "")
    assert "`cache-admin ls`" in ran.err
    assert "Traceback" not in ran.err


def test_an_unknown_payload_names_the_next_command(admin: Admin, filled: Filled, tmp_path: Path) -> None:
    ran = admin("show", f"{filled.kv_id}/ab/ab00000000000000.0", *filled.options)
    assert ran.code == 1
    assert "`cache-admin ls`" in ran.err
    elsewhere = admin(
        "show", str(tmp_path / "other" / f"{filled.kv_id}/ab/ab00000000000000.0"), *filled.options
    )
    assert elsewhere.code == 1
    assert f"--payloads file://{tmp_path}/other" in elsewhere.err


def test_an_ambiguous_id_lists_the_candidates(admin: Admin, filled: Filled) -> None:
    for i in range(40):
        filled.save(filled.kv, kv_slots(1, first=100 + i))
    names = [s["segment"] for s in admin("ls", "--json", "--limit", "0", *filled.options).json["segments"]]
    digit = max("0123456789abcdef", key=lambda d: sum(name.startswith(d) for name in names))
    ran = admin("show", digit, *filled.options)
    assert ran.code == 1
    assert "ambiguous" in ran.err
    assert "more digits" in ran.err


def test_no_memory_is_taken_on_a_header_s_word(admin: Admin, filled: Filled) -> None:
    path = chain(filled)[0]
    size = 3 << 30
    slots = hostile.slot(f"[{size}]").replace(':0,"xxh3"', f':{size},"xxh3"')
    entry = hostile.tensor(f"[{size}]").replace("[0,0]", f"[0,{size}]")
    header = hostile.header(canonical_json(filled.kv), filled.kv_id, f"[{slots}]", entry, {})
    path.write_bytes(header + b"some")
    tracemalloc.start()
    try:
        [part] = report(admin, filled, segment_of(path), "--verify", code=3).parts
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert [slot.check for slot in part.slots] == ["missing"]
