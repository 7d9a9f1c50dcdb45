"""export and import: what goes in comes out, byte for byte, and nothing else ever does."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tracemalloc
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvstore.admin.archive.export import ArchiveFile
from kvstore.admin.archive.export import export as export_verb
from kvstore.admin.archive.import_ import import_archive
from kvstore.admin.archive.reports import ExportReport, ImportReport
from kvstore.admin.archive.wanted import EVERYTHING
from kvstore.admin.backends import Cache, Refused, Sources
from kvstore.admin.curate.plan import plan
from kvstore.build import load_settings, open_store
from kvstore.errors import TransientError
from kvstore.format.segment import Slot
from kvstore.keys import SegmentId, digest, namespace_id, new_segment_id
from schemas.namespace import Namespace
from schemas.records import PartRecord, SegmentRecord
from tests.admin.conftest import (
    BLOCKS_PER_SEGMENT,
    Admin,
    Filled,
    ec_slot,
    fill,
    kv_slots,
    kv_space,
    tensor_parallel,
)
from tests.waiting import PATIENCE_S


def loaded(settings: dict[str, Any], namespace: Namespace, slots: list[Slot], rank: int = 0) -> list[bytes]:
    """The leading blocks of a chain that a cache serves, through the store as an engine uses it."""
    with closing(open_store(settings)) as store:
        space = store.open(namespace, block_bytes=4096)
        found = space.match(b"".join(digest(slot.key) for slot in slots))
        into = [memoryview(bytearray(slot.data.nbytes)) for slot in slots[: found.blocks]]
        for run in found.runs:
            here = slice(run.start, run.start + run.count)
            space.load(run, [slot.key for slot in slots[here]], into[here], rank=rank)
        assert store.counters.snapshot()["quarantined_segments"] == 0
    return [bytes(view) for view in into]


def contents(slots: list[Slot]) -> list[bytes]:
    return [bytes(slot.data) for slot in slots]


def archive_of(admin: Admin, filled: Filled, path: Path, *words: str) -> Path:
    ran = admin("export", *words, "--to", str(path), *filled.options)
    assert ran.code == 0, ran.err
    return path


CHAIN = kv_slots(3 * BLOCKS_PER_SEGMENT)


@pytest.mark.parametrize("to", ["sqlite", pytest.param("redis", marks=pytest.mark.servers)])
def test_a_round_trip_is_exact(
    admin: Admin, filled: Filled, tmp_path: Path, to: str, request: pytest.FixtureRequest
) -> None:
    filled.save(tensor_parallel(), kv_slots(4, seed=2))
    archive = archive_of(admin, filled, tmp_path / "all.tar")
    there: dict[str, Any] = {"payloads": f"file://{tmp_path / 'there'}"}
    options = ["--payloads", there["payloads"]]
    if to == "redis":
        there["index"] = request.getfixturevalue("redis_url")
        options += ["--index", there["index"]]
    ran = admin("import", str(archive), "--json", "--new-namespaces", *options)
    assert ran.code == 0, ran.err
    report = ImportReport.model_validate_json(ran.out)
    assert report.ended == "complete"
    assert (report.imported.segments, report.imported.blocks) == (6, 18)
    assert report.imported == report.verified
    assert report.imported.stored_bytes == sum(path.stat().st_size for path in filled.payload_files())
    for path in filled.payload_files():
        assert (tmp_path / "there" / path.relative_to(filled.folder)).read_bytes() == path.read_bytes()
    assert loaded(there, filled.kv, CHAIN) == contents(CHAIN)
    for item in (ec_slot("a cat", 8), ec_slot("a dog", 64, noisy=True)):
        assert loaded(there, filled.ec, [item]) == contents([item])
    parallel = kv_slots(4, seed=2)
    for rank in (0, 1):
        assert loaded(there, tensor_parallel(), parallel, rank) == contents(parallel)
    assert admin("doctor", *options, env={"KVSTORE_CAPACITY_BYTES": "64MiB"}).code == 0

    again = ImportReport.model_validate_json(admin("import", str(archive), "--json", *options).out)
    assert (again.imported.segments, again.present) == (0, report.imported)
    assert again.left_out == 0
    segments = admin("ls", "--json", *options).json["segments"]
    assert len(segments) == 6
    # Used now, not when it was made: what has just been imported is not the first to be evicted.
    assert all(line["last_use_s"] >= line["created_s"] - 60 for line in segments)


@pytest.mark.slow
def test_through_a_pipe(filled: Filled, tmp_path: Path) -> None:
    there = f"file://{tmp_path / 'there'}"
    run = f"{sys.executable} -m kvstore.cli"
    source = " ".join(filled.options)
    ran = subprocess.run(
        f"{run} export --to - --json {source} | {run} import - --new-namespaces --json --payloads {there}",
        shell=True,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert ImportReport.model_validate_json(ran.stdout).imported.segments == 5
    assert ExportReport.model_validate_json(ran.stderr).exported.segments == 5
    assert loaded({"payloads": there}, filled.kv, CHAIN) == contents(CHAIN)


def test_the_archive_is_a_plain_tar_of_safetensors_files(
    admin: Admin, filled: Filled, tmp_path: Path
) -> None:
    archive = archive_of(admin, filled, tmp_path / "a.tar")
    assert archive.stat().st_mode & 0o777 == 0o600
    assert archive.stat().st_size % 10240 == 0
    with tarfile.open(archive) as tar:
        members = tar.getmembers()
        assert members[0].name == "kvstore-export.json"
        manifest = json.loads(tar.extractfile(members[0]).read())  # type: ignore[union-attr]
        assert all(member.isfile() for member in members)
        stored = {str(path.relative_to(filled.folder)): path.read_bytes() for path in filled.payload_files()}
        got = {m.name: tar.extractfile(m).read() for m in members[1:]}  # type: ignore[union-attr]
    assert got == stored
    assert (manifest["format"], manifest["segments"], manifest["payloads"]) == (1, 5, 5)
    assert "pack" not in manifest
    assert manifest["payload_bytes"] == sum(map(len, stored.values()))
    assert {namespace_id(Namespace.model_validate_json(t)) for t in manifest["namespaces"].values()} == set(
        manifest["namespaces"]
    )
    assert (
        subprocess.run(["tar", "tf", str(archive)], check=True, capture_output=True).stdout.count(b"\n") == 6
    )


def test_what_is_chosen_and_in_which_order(admin: Admin, filled: Filled, tmp_path: Path) -> None:
    def names(*words: str) -> list[str]:
        path = tmp_path / "chosen.tar"
        report = ExportReport.model_validate_json(
            admin("export", *words, "--force", "--to", str(path), "--json", *filled.options).out
        )
        dry = ExportReport.model_validate_json(
            admin("export", *words, "--dry-run", "--json", *filled.options).out
        )
        assert dry.planned == report.planned == report.exported
        assert (dry.dry_run, dry.exported.segments) == (True, 0)
        with tarfile.open(path) as tar:
            return tar.getnames()[1:]

    lines = admin("ls", filled.kv_id, "--json", *filled.options).json["segments"]
    by_depth = [line["segment"] for line in sorted(lines, key=lambda line: line["depth"])]
    kv = names(filled.kv_id[:6])
    assert [name.split("/")[2].split(".")[0] for name in kv] == by_depth, "heads before tails"
    assert names("--depth", "5") == [name for name in names() if name not in kv[2:]]
    assert names(filled.kv_id, "--depth", "1") == kv[:1]
    assert len(names(filled.kv_id, filled.ec_id)) == len(names()) == 5
    assert names("--segment", by_depth[1][:12]) == kv[1:2]
    size = lines[0]["stored_bytes"]
    assert names(filled.kv_id, "--max-bytes", str(2 * size)) == kv[:2]
    assert names(filled.kv_id, "--max-bytes", str(2 * size - 1)) == kv[:1]
    # The tail, used a minute from now, goes before the heads.
    with Cache(Sources(payloads=f"file://{filled.folder}", environ={}).settings()) as cache:
        assert cache.index is not None
        later = max(line["last_use_s"] for line in lines) + 120
        cache.index.touch(namespace_id(filled.kv), [bytes.fromhex(by_depth[2])], later)  # type: ignore[list-item]
    assert names(filled.kv_id, "--max-bytes", str(size)) == kv[2:]


@pytest.mark.parametrize(
    ("words", "code", "word"),
    [
        (["export"], 2, "--to"),
        (["export", "ffff", "--to", "x.tar"], 1, "no namespace"),
        (["export", "--segment", "zz", "--to", "x.tar"], 1, "no segment"),
        (["export", "--segment", "ffffffffffffffff", "--to", "x.tar"], 1, "no segment"),
        (["export", "--max-bytes", "lots", "--to", "x.tar"], 2, "--max-bytes"),
        (["export", "--to", "no/such/folder/x.tar"], 1, "can't write"),
        (["import", "not-there.tar"], 2, "not-there.tar"),
    ],
)
def test_wrong_words(
    admin: Admin,
    filled: Filled,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    code: int,
    word: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = admin(*words, *filled.options)
    assert (ran.code, ran.out) == (code, "")
    assert word in ran.err
    assert "Traceback" not in ran.err
    assert list(tmp_path.glob("*.tar*")) == []


def test_an_archive_is_not_overwritten(admin: Admin, filled: Filled, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_text("precious")
    ran = admin("export", "--to", str(path), *filled.options)
    assert (ran.code, ran.out) == (1, "")
    assert "--force" in ran.err
    assert path.read_text() == "precious"
    archive_of(admin, filled, path, "--force")
    assert tarfile.is_tarfile(path)
    (tmp_path / "folder").mkdir()
    assert admin("export", "--force", "--to", str(tmp_path / "folder"), *filled.options).code == 1
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.tar", "cache", "folder"]


def test_two_exports_don_t_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with ArchiveFile(path, overwrite=False) as first:
        with pytest.raises(Refused, match="another export"):
            ArchiveFile(path, overwrite=False)
        first.file.write(b"one")
        first.finish()
    assert path.read_bytes() == b"one"
    with ArchiveFile(path, overwrite=True) as second:
        second.file.write(b"two, not finished")
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("a.tar", b"one")]
    # What a killed export has left is nobody's.
    (tmp_path / "a.tar.partial").write_bytes(b"x" * 100)
    with ArchiveFile(path, overwrite=True) as third:
        third.file.write(b"3")
        third.finish()
    assert path.read_bytes() == b"3"


def damage(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("pipe", [False, True])
def test_damaged_and_vanished_segments_are_left_out(
    admin: Admin, filled: Filled, tmp_path: Path, pipe: bool
) -> None:
    filled.save(tensor_parallel(), kv_slots(4, seed=2))
    # By name, because two of them have the same folder now and then.
    by_rank = [path for path in filled.payload_files() if path.suffix == ".1"]
    damage(by_rank[0])
    first, second = [path for path in filled.payload_files() if path.parts[-3] == filled.kv_id][:2]
    damage(first, at=100)
    second.unlink()
    path = tmp_path / "a.tar"
    out = io.BytesIO()
    with Cache(Sources(payloads=f"file://{filled.folder}", environ={}).settings()) as cache:
        if pipe:
            out.seekable = lambda: False  # type: ignore[method-assign]
            report = export_verb(cache, plan(cache, []), out)
            path.write_bytes(out.getvalue())
        else:
            report = export_verb(cache, plan(cache, []), path)
    assert report.ended == "complete"
    assert (report.exported.segments, report.left_out) == (3, 3)
    reasons = " ".join(each.reason for each in report.left)
    for word in ("checksum of slot", "checksum of the header", "missing"):
        assert word in reasons
    ran = admin(
        "import", str(path), "--json", "--new-namespaces", "--payloads", f"file://{tmp_path / 'there'}"
    )
    imported = ImportReport.model_validate_json(ran.out)
    assert imported.imported == report.exported
    # A pipe can't be cut back: the first rank of the damaged segment is in it, and is not imported.
    assert (ran.code, imported.left_out) == ((4, 1) if pipe else (0, 0))
    stored = [each for each in (tmp_path / "there").glob("*/??/*") if each.is_file()]
    assert len(stored) == 3
    assert admin("export", "--to", str(tmp_path / "b.tar"), *filled.options).code == 4


def test_a_store_that_fails_ends_an_export_without_a_file(
    filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(8):
        filled.save(filled.kv, kv_slots(1, seed=10 + i))
    with Cache(Sources(payloads=f"file://{filled.folder}", environ={}).settings()) as cache:

        def down(*args: object, **options: object) -> None:
            raise TransientError("the disk is gone")

        monkeypatch.setattr(cache.payloads, "read", down)
        report = export_verb(cache, plan(cache, []), tmp_path / "a.tar")
    assert (report.ended, report.exported.segments) == ("failed", 0)
    assert "the disk is gone" in report.problem
    assert list(tmp_path.glob("a.tar*")) == []


def test_ctrl_c_leaves_no_file(
    admin: Admin, filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvstore.admin.archive.export.read_part", interrupted)
    ran = admin("export", "--to", str(tmp_path / "a.tar"), "--json", *filled.options)
    assert ran.code == 130
    assert ExportReport.model_validate_json(ran.out).ended == "cancelled"
    assert list(tmp_path.glob("a.tar*")) == []


def test_a_namespace_that_is_full_takes_no_more(admin: Admin, filled: Filled, tmp_path: Path) -> None:
    archive = archive_of(admin, filled, tmp_path / "a.tar", filled.kv_id)
    size = filled.payload_files()[0].stat().st_size
    there = f"file://{tmp_path / 'there'}"
    ran = admin(
        "import",
        str(archive),
        "--json",
        "--new-namespaces",
        "--payloads",
        there,
        env={"KVSTORE_CAPACITY_BYTES": str(size * 3)},
    )
    report = ImportReport.model_validate_json(ran.out)
    assert (ran.code, report.imported.segments, report.left_out) == (4, 2, 1)
    assert "capacity_bytes" in report.left[0].reason
    # The heads of the chain are there.
    assert loaded({"payloads": there}, filled.kv, CHAIN) == contents(CHAIN)[: 2 * BLOCKS_PER_SEGMENT]


def test_blocks_that_are_stored_in_other_segments_are_present(
    admin: Admin, filled: Filled, tmp_path: Path
) -> None:
    archive = archive_of(admin, filled, tmp_path / "a.tar", filled.kv_id)
    other = fill(tmp_path / "other")
    report = ImportReport.model_validate_json(admin("import", str(archive), "--json", *other.options).out)
    assert (report.imported.segments, report.present.segments) == (0, 3)
    assert len(other.payload_files()) == 5


def test_a_chain_of_which_the_head_is_stored_gets_the_rest(
    admin: Admin, filled: Filled, tmp_path: Path
) -> None:
    archive = archive_of(admin, filled, tmp_path / "a.tar", filled.kv_id)
    folder = tmp_path / "other"
    other = Filled(folder, ["--payloads", f"file://{folder}"], {"payloads": f"file://{folder}"})
    other.save(other.kv, kv_slots(6))
    report = ImportReport.model_validate_json(admin("import", str(archive), "--json", *other.options).out)
    assert (report.imported.segments, report.present.segments) == (2, 1)
    assert loaded(other.settings, other.kv, CHAIN) == contents(CHAIN)


def test_what_was_evicted_here_a_moment_ago_waits_for_its_grace(
    admin: Admin, filled: Filled, tmp_path: Path
) -> None:
    archive = archive_of(admin, filled, tmp_path / "a.tar")
    lines = admin("ls", filled.kv_id, "--json", *filled.options).json["segments"]
    gone = [bytes.fromhex(line["segment"]) for line in lines]
    settings = load_settings(filled.settings, {})
    with Cache(settings) as cache:
        assert cache.index is not None
        cache.index.evict(namespace_id(filled.kv), gone, delete_after_s=4e9, rule="admin")  # type: ignore[arg-type]
    before = filled.payload_files()
    ran = admin("import", str(archive), "--json", *filled.options)
    report = ImportReport.model_validate_json(ran.out)
    assert (ran.code, report.imported.segments, report.left_out) == (4, 0, 3)
    assert "grace_s" in report.left[0].reason
    assert filled.payload_files() == before
    with Cache(settings) as cache:
        assert cache.index is not None
        cache.index.reaped(namespace_id(filled.kv), gone)  # type: ignore[arg-type]
    assert admin("import", str(archive), *filled.options).code == 0
    assert loaded(filled.settings, filled.kv, CHAIN) == contents(CHAIN)


def test_a_dry_run_needs_no_cache(admin: Admin, filled: Filled, tmp_path: Path) -> None:
    archive = archive_of(admin, filled, tmp_path / "a.tar")
    report = ImportReport.model_validate_json(admin("import", str(archive), "--dry-run", "--json").out)
    assert (report.dry_run, report.verified.segments, report.imported.segments) == (True, 5, 0)
    damage(archive, at=archive.read_bytes().index(b"DATA") if b"DATA" in archive.read_bytes() else 20000)
    assert admin("import", str(archive), "--dry-run").code == 3


def test_an_import_that_loses_its_store_says_so(
    filled: Filled, admin: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = archive_of(admin, filled, tmp_path / "a.tar")
    settings = load_settings({"payloads": f"file://{tmp_path / 'there'}"}, {})
    with Cache(settings) as cache, archive.open("rb") as stream:
        store, puts = cache.saving(), []
        put = store.payloads.put

        def failing(name: str, buffers: Any) -> None:
            puts.append(name)
            if len(puts) == 3:
                raise TransientError("the bucket is gone")
            put(name, buffers)

        monkeypatch.setattr(store.payloads, "put", failing)
        report = import_archive(stream, store, source="a.tar", wanted=EVERYTHING)
        assert (report.ended, report.imported.segments) == ("failed", 2)
        assert "the bucket is gone" in report.problem
        monkeypatch.setattr(store.payloads, "put", put)
        stream.seek(0)
        again = import_archive(stream, store, source="a.tar", wanted=EVERYTHING)
        assert (again.ended, again.imported.segments, again.present.segments) == ("complete", 3, 2)


@pytest.mark.slow
def test_only_one_payload_is_in_memory(filled: Filled, tmp_path: Path) -> None:
    """Peak memory doesn't grow with the archive."""
    code = """
import resource, sys, time
from pathlib import Path
from kvstore.admin.archive.export import export
from kvstore.admin.archive.import_ import import_archive
from kvstore.admin.archive.wanted import EVERYTHING
from kvstore.admin.backends import Cache
from kvstore.admin.curate.plan import plan
from kvstore.build import load_settings
source, target, archive = map(Path, sys.argv[1:])
with Cache(load_settings({"payloads": f"file://{source}"}, {})) as cache:
    export(cache, plan(cache, []), archive)
with Cache(load_settings({"payloads": f"file://{target}"}, {})) as cache, archive.open("rb") as stream:
    report = import_archive(stream, cache.saving(), source="", wanted=EVERYTHING)
assert report.ended == "complete" and not report.left_out, report
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""

    def peak(count: int) -> int:
        folder = tmp_path / f"of-{count}"
        settings = {"payloads": f"file://{folder}"}
        big = Filled(folder, [], settings, kv=kv_space(model="big"))
        for i in range(count):
            key = kv_slots(1, seed=100 + i)[0].key
            big.save(big.kv, [Slot(key, memoryview(os.urandom(2 << 20)), "BF16", (1 << 20,))])
        ran = subprocess.run(
            [sys.executable, "-c", code, str(folder), str(folder) + ".to", str(folder) + ".tar"],
            check=True,
            capture_output=True,
            text=True,
        )
        return int(ran.stdout)

    assert peak(16) - peak(2) < 6 << 10


def test_an_export_takes_no_memory_on_the_index_s_word(filled: Filled, tmp_path: Path) -> None:
    with Cache(load_settings(filled.settings, {})) as cache:
        space = cache.saving().open(filled.kv)
        record = SegmentRecord((PartRecord(4096, (3 << 30,)),), 1, "none", 0, raw_bytes=3 << 30)
        assert cache.index is not None
        cache.index.commit(space.id, new_segment_id(), bytes(16), record, rank=0, ranks=1)
        tracemalloc.start()
        try:
            exported = export_verb(cache, plan(cache, []), tmp_path / "all.tar")
            assert tracemalloc.get_traced_memory()[1] < 64 << 20
        finally:
            tracemalloc.stop()
        assert (exported.exported.segments, exported.left_out) == (5, 1)


def tenants_archive(folder: Path, spaces: list[Namespace]) -> Path:
    """An archive of one block of each namespace, by whoever names the tenants."""
    others = Filled(folder / "theirs", [], {"payloads": f"file://{folder / 'theirs'}"})
    with closing(open_store(others.settings)) as store:
        for seed, space in enumerate(spaces, 100):
            store.open(space).save(kv_slots(1, seed=seed))
    with Cache(load_settings(others.settings, {})) as cache:
        export_verb(cache, plan(cache, []), folder / "theirs.tar")
    return folder / "theirs.tar"


def test_an_archive_brings_no_tenant_that_nobody_has_let_in(
    admin: Admin, filled: Filled, tmp_path: Path
) -> None:
    bank, ours = kv_space(tenant="bank"), kv_space()
    archive = tenants_archive(tmp_path, [bank, ours])

    def imported(*words: str) -> tuple[int, ImportReport]:
        ran = admin("import", str(archive), *words, "--json", *filled.options)
        return ran.code, ImportReport.model_validate_json(ran.out)

    code, report = imported()
    assert (code, report.imported.segments, report.left_out, report.unwanted) == (4, 1, 1, 0)
    [left] = report.left
    assert left.namespace == namespace_id(bank)
    for word in ("'bank'", "--new-namespaces", "--tenant"):
        assert word in left.reason
    assert admin("ls", namespace_id(bank), *filled.options).code == 1
    assert not list(filled.folder.glob(f"{namespace_id(bank)}/*/*"))
    # What is named comes, and nothing else; what was not asked for is no failure.
    code, report = imported("--tenant", "search")
    assert (code, report.present.segments, report.left_out, report.unwanted) == (0, 1, 0, 1)
    code, report = imported(namespace_id(ours)[:8], "--tenant", "bank")
    assert (code, report.imported.segments, report.unwanted) == (0, 0, 1)
    code, report = imported("--tenant", "bank")
    assert (code, report.imported.segments, report.unwanted) == (0, 1, 0)
    assert loaded(filled.settings, bank, kv_slots(1, seed=100)) == contents(kv_slots(1, seed=100))
    # A dry run knows no store, and says of what is named how much of it there is.
    report = ImportReport.model_validate_json(
        admin("import", str(archive), namespace_id(bank).upper()[:8], "--dry-run", "--json").out
    )
    assert (report.verified.segments, report.unwanted, report.left_out) == (1, 1, 0)


def test_an_archive_of_300_namespaces_brings_none(admin: Admin, filled: Filled, tmp_path: Path) -> None:
    archive = tenants_archive(tmp_path, [kv_space(model=f"model-{i}") for i in range(300)])
    before = admin("namespaces", "--json", *filled.options).json
    ran = admin("import", str(archive), "--json", *filled.options)
    report = ImportReport.model_validate_json(ran.out)
    assert (ran.code, report.imported.segments, report.left_out, report.ended) == (3, 0, 300, "complete")
    assert len(report.left) <= 100
    after = admin("namespaces", "--json", *filled.options).json
    assert [line["id"] for line in after["namespaces"]] == [line["id"] for line in before["namespaces"]]
    # Restoring into an empty store is one command.
    there = ["--payloads", f"file://{tmp_path / 'there'}"]
    ran = admin("import", str(archive), "--new-namespaces", "--json", *there)
    assert (ran.code, ran.json["imported"]["segments"]) == (0, 300)


@pytest.mark.servers
def test_what_nobody_would_find_in_its_shard_is_left_out_before_it_is_put(
    admin: Admin, filled: Filled, tmp_path: Path, redis_url: str
) -> None:
    """Releases that knew no shards gave ids that don't tell one."""
    another, untagged = kv_space(model="another"), bytearray(new_segment_id(digest(CHAIN[0].key)))
    untagged[-1] ^= 0x80
    with closing(open_store(filled.settings)) as store:
        space = store.open(another, block_bytes=4096)
        space.save(CHAIN[:4], segment=SegmentId(bytes(untagged)))
        space.save(kv_slots(4, seed=9))
    archive = archive_of(admin, filled, tmp_path / "all.tar", namespace_id(another))
    folder = tmp_path / "there"
    settings = {"payloads": f"file://{folder}", "index": redis_url, "redis": {"shards": 8}}
    with closing(open_store(settings)) as store:
        store.open(another, block_bytes=4096).register()
    ran = admin("import", str(archive), "--json", "--payloads", f"file://{folder}", "--index", redis_url)
    report = ImportReport.model_validate_json(ran.out)
    assert (report.imported.segments, report.left_out) == (1, 1)
    assert "redis.shards" in str(ran.json)
    assert len(list(folder.glob("*/??/*.*"))) == 1
