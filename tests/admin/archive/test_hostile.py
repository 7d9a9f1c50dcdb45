"""Archives that are damaged, or made to do harm: nothing wrong is ever committed, nothing ever crashes."""

from __future__ import annotations

import io
import itertools
import tarfile
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lz4.block
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.admin.archive.export import export
from kvstore.admin.archive.import_ import import_archive
from kvstore.admin.archive.reports import ImportReport
from kvstore.admin.archive.wanted import EVERYTHING
from kvstore.admin.backends import Cache
from kvstore.admin.curate.plan import plan
from kvstore.build import load_settings
from kvstore.errors import TransientError
from kvstore.format import segment as codec
from kvstore.keys import (
    NamespaceId,
    SegmentId,
    canonical_json,
    namespace_id,
    new_segment_id,
    parse_payload_name,
    payload_name,
)
from schemas.archive import MANIFEST, Manifest
from schemas.namespace import GroupSpec
from tests.admin.conftest import Filled, ec_slot, ec_space, kv_slots, kv_space, tensor_parallel
from tests.format import hostile

_NUMBERS = itertools.count()


class Members(dict[str, bytes]):
    """Names and contents, in the order of the archive."""

    def __repr__(self) -> str:
        return f"{len(self)} members"  # a failing example is to be readable


def small(folder: Path) -> Members:
    """The members of an archive: a segment of two ranks, one of one, and a compressed item."""
    filled = Filled(folder, [], {"payloads": f"file://{folder}"})
    filled.save(filled.kv, kv_slots(2))
    filled.save(tensor_parallel(), kv_slots(1, seed=3))
    filled.save(filled.ec, [ec_slot("a cat", 8)])
    out = io.BytesIO()
    with Cache(load_settings(filled.settings, {})) as cache:
        assert export(cache, plan(cache, []), out).exported.segments == 3
    out.seek(0)
    with tarfile.open(fileobj=out) as tar:
        return Members((m.name, tar.extractfile(m).read()) for m in tar.getmembers())  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Members:
    return small(tmp_path_factory.mktemp("small") / "cache")


def packed(members: Iterable[tuple[str, bytes]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


class Imported:
    """One archive imported into an empty cache, looked at around the code under test."""

    def __init__(self, archive: bytes, *, dry_run: bool = False, **changes: Any) -> None:
        name = f"hostile-{next(_NUMBERS)}"
        tree = {"payloads": f"memory://{name}", "index": f"memory://{name}", **changes}
        with Cache(load_settings(tree, {})) as cache:
            self.report: ImportReport = import_archive(
                io.BytesIO(archive), None if dry_run else cache.saving(), source="-", wanted=EVERYTHING
            )
            assert cache.index is not None
            visible = {
                payload_name(space, listing.segment, rank)
                for space in cache.index.namespaces()
                for listing in cache.index.segments(space)
                for rank in range(len(listing.record.parts))
            }
            self.payloads = {listed.name: self._read(cache, listed.name) for listed in cache.payloads.list()}
            self.visible = {name: self.payloads[name] for name in visible}

    @staticmethod
    def _read(cache: Cache, name: str) -> bytes:
        into = bytearray(1 << 20)
        return bytes(into[: cache.payloads.read(name, 0, [memoryview(into)])])


def test_the_archive_itself_is_good(members: Members) -> None:
    good = Imported(packed(members.items()))
    assert good.report.ended == "complete"
    assert good.visible == {name: data for name, data in members.items() if name != MANIFEST}
    assert len(good.visible) == 4


def changed(archive: bytes, how: str, at: int, length: int) -> bytes:
    """The archive with one thing wrong with it."""
    at %= len(archive)
    block, end = at // 512 * 512, at // 512 * 512 + length * 512
    return {
        "flip": lambda: archive[:at] + bytes([archive[at] ^ (1 << length % 8)]) + archive[at + 1 :],
        "truncate": lambda: archive[:at],
        "cut": lambda: archive[:at] + archive[at + length * 100 :],
        "zero": lambda: archive[:at] + bytes(length * 100) + archive[at + length * 100 :],
        "cut blocks": lambda: archive[:block] + archive[end:],
        "repeat blocks": lambda: archive[:end] + archive[block:end] + archive[end:],
    }[how]()


@pytest.mark.slow
@settings(max_examples=250)
@given(
    how=st.sampled_from(["flip", "truncate", "cut", "zero", "cut blocks", "repeat blocks"]),
    at=st.integers(0, 1 << 20),
    length=st.integers(1, 20),
)
def test_no_damage_is_ever_committed(members: Members, how: str, at: int, length: int) -> None:
    bad = Imported(changed(packed(members.items()), how, at, length))
    # What became visible is what was exported, to the last byte; the rest was left out.
    for name, content in bad.visible.items():
        assert content == members[name]
    # Nothing else stays: neither half a segment nor a payload without one.
    assert bad.payloads == bad.visible
    if len(bad.visible) < 4:
        cut_out = bad.report.found_segments < bad.report.announced_segments
        assert bad.report.ended == "broken" or bad.report.left_out or cut_out


@settings(max_examples=50)
@given(order=st.permutations(range(5)))
def test_members_in_any_order(members: Members, order: list[int]) -> None:
    listed = list(members.items())
    mixed = Imported(packed(listed[i] for i in order))
    for name, content in mixed.visible.items():
        assert content == members[name]
    assert mixed.payloads == mixed.visible
    if order[0] != 0:
        assert mixed.report.ended == "broken"


def member(kind: bytes, name: str = "0123456789abcdef/ab/abcdefabcdefabcd.0", **fields: Any) -> bytes:
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(fields.get("format", tarfile.GNU_FORMAT))


HOSTILE: dict[str, Callable[[], bytes]] = {
    "absolute name": lambda: member(tarfile.REGTYPE, "/etc/passwd"),
    "name that climbs": lambda: member(tarfile.REGTYPE, "../../x"),
    "climbs inside a payload's": lambda: member(tarfile.REGTYPE, "0123456789abcdef/../abcdefabcdefabcd.0"),
    "another file": lambda: member(tarfile.REGTYPE, "README"),
    "symbolic link": lambda: member(tarfile.SYMTYPE, linkname="/etc/passwd"),
    "hard link": lambda: member(tarfile.LNKTYPE, linkname="/etc/passwd"),
    "device": lambda: member(tarfile.CHRTYPE, devmajor=1, devminor=5),
    "block device": lambda: member(tarfile.BLKTYPE, devmajor=8, devminor=0),
    "fifo": lambda: member(tarfile.FIFOTYPE),
    "folder": lambda: member(tarfile.DIRTYPE, "0123456789abcdef/"),
    "long name": lambda: member(tarfile.GNUTYPE_LONGNAME, "././@LongLink", size=1 << 40),
    "pax header": lambda: member(tarfile.XHDTYPE, "x", size=1 << 40),
    "sparse": lambda: member(tarfile.GNUTYPE_SPARSE),
    "enormous": lambda: member(tarfile.REGTYPE, size=1 << 60),
    "negative size": lambda: member(tarfile.REGTYPE, size=-512),
    "larger than the archive": lambda: member(tarfile.REGTYPE, size=3 << 30),
    "not tar": lambda: b"\x7fELF" + bytes(range(256)) * 4,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_member_ends_the_import(members: Members, what: str) -> None:
    good = packed(members.items())
    end = len(good.rstrip(b"\0")) // 512 * 512 + 512
    bad = Imported(good[:end] + HOSTILE[what]() + bytes(10240))
    # The segments before it are good and stay.
    assert bad.report.ended == "broken" or bad.report.left_out == 1
    assert bad.report.imported.segments == 3
    assert bad.payloads == bad.visible
    first = Imported(packed([(MANIFEST, members[MANIFEST])])[:1536] + HOSTILE[what]() + good)
    assert first.report.ended == "broken" or first.report.left_out
    assert first.payloads == first.visible == {}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (b"{}", "not one that this version reads"),
        (b"\xff", "not one that this version reads"),
        (b'{"format": 2}', "not one that this version reads"),
        (
            b'{"version":"1","created_s":0,"namespaces":{"0123456789abcdef":"{}"},"segments":0,"payloads":0,'
            b'"payload_bytes":0}',
            "is not the one that it describes",
        ),
        (b"[]", "not one that this version reads"),
        (b"{" + b",".join(b'"%x":0' % i for i in range(300_000)) + b',"namespaces":{}}', "more members"),
        (b'{"namespaces":{' + b",".join(b'"%x":0' % i for i in range(300_000)) + b"}}", "more members"),
        (b" " * (5 << 20), "larger than any"),
    ],
)
def test_a_manifest_that_lies(members: Members, text: bytes, word: str) -> None:
    bad = Imported(packed([*{**members, MANIFEST: text}.items()]))
    assert bad.report.ended == "broken"
    assert word in bad.report.problem
    assert bad.payloads == {}


def test_duplicates_and_missing_ranks(members: Members) -> None:
    listed = list(members.items())
    for again, word in ((listed[-1], "one more than"), (listed[1], "twice")):
        twice = Imported(packed([*listed, again]))
        assert (twice.report.ended, twice.report.imported.segments) == ("broken", 3)
        assert word in twice.report.problem
    for rank in (0, 1):
        kept = [(name, data) for name, data in listed if not _is_rank(members, name, rank)]
        assert len(kept) == 4
        short = Imported(packed(kept))
        assert (short.report.ended, short.report.imported.segments, short.report.left_out) == (
            "complete",
            2,
            1,
        )
        assert "rank" in short.report.left[0].reason
        assert short.payloads == short.visible


def _is_rank(members: Members, name: str, rank: int) -> bool:
    other = name[:-1] + str(1 - rank)
    return name.endswith(f".{rank}") and other in members


def forged(**changes: Any) -> tuple[str, bytes]:
    """A segment with good checksums by whoever can compute them, and something wrong with it."""
    segment = new_segment_id()
    namespace = changes.pop("namespace", kv_space())
    options: dict[str, Any] = {
        "namespace_json": changes.pop("namespace_json", canonical_json(namespace)),
        "kind": "kv",
        "segment": segment,
        "rank": 0,
        "ranks": 1,
        "codec": "none",
        "depth": 0,
        "created_s": 1,
        "writer": "forger",
    }
    name = changes.pop("name", None)
    encoded = codec.encode(changes.pop("slots", kv_slots(1, seed=9)), **options | changes)
    space = codec.parse_header(encoded.buffers[0]).meta.namespace_id
    rank = (options | changes)["rank"]
    return name or payload_name(NamespaceId(space), segment, rank), b"".join(encoded.buffers)


NEWER = canonical_json(kv_space())[:-1] + ',"zeal":1}'

FORGED: dict[str, tuple[dict[str, Any], str]] = {
    "another's name": ({"name": "0123456789abcdef/ab/abcdefabcdefabcd.0"}, "namespace"),
    "kind": ({"kind": "ec"}, "not one of this version's"),
    "a newer namespace": ({"namespace_json": NEWER}, "doesn't know"),
    "no namespace": ({"namespace_json": "[]"}, "doesn't know"),
    "spelled otherwise": ({"namespace_json": canonical_json(kv_space()).replace(":", ": ", 1)}, "not one of"),
    "too many ranks": ({"ranks": 256}, "not ours"),
    "another rank": ({"rank": 1, "ranks": 2}, "rank 1 stands where"),
    "half of it": ({"ranks": 2}, "rank 1 is not in"),
    "out of range": ({"created_s": 1 << 33}, "don't fit"),
    "depth": ({"depth": 1 << 33}, "don't fit"),
}


@pytest.mark.parametrize("what", FORGED)
def test_forged_segments_are_refused(members: Members, what: str) -> None:
    changes, word = FORGED[what]
    bad = Imported(packed([(MANIFEST, members[MANIFEST]), forged(**changes), *list(members.items())[1:]]))
    assert (bad.report.ended, bad.report.imported.segments, bad.report.left_out) == ("complete", 3, 1)
    assert word in bad.report.left[0].reason
    assert bad.payloads == bad.visible


def test_a_bomb_is_not_decompressed(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header may say any size; memory is only given for what the bytes can hold."""
    slot = codec.Slot(kv_slots(1)[0].key, memoryview(bytes(1 << 16)), "U8", (1 << 16,))
    name, data = forged(slots=[slot], codec="lz4", namespace=kv_space(codec="lz4"))
    honest = codec.slot_checksum
    header = codec.parse_header(data)
    size = header.part.slot_sizes[0]
    claimed = size * 1000
    text = data[: len(data) - size].replace(b"65536", str(claimed).encode())
    meta = header.meta.slots[0]
    sealed = honest(data[-size:], meta.key, "lz4", "U8", (claimed,)).encode()
    text = text.replace(meta.xxh3.encode(), sealed).rstrip(b" ").ljust(header.part.data_start)
    text = text[: codec._SEAL] + codec._header_checksum(text) + text[codec._SEAL + 16 :]
    bad = Imported(packed([(MANIFEST, members[MANIFEST]), (name, text + data[-size:])]))
    assert (bad.report.imported.segments, bad.report.left_out) == (0, 1)
    assert "and its tensor differ" in bad.report.left[0].reason


@pytest.mark.slow
@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("kind", ["kv", "ec"])
def test_a_slot_of_a_gigabyte_takes_no_memory(members: Members, kind: str, dry_run: bool) -> None:
    """In 4 MiB, with right checksums, and right in all it says."""
    space = kv_space(codec="lz4") if kind == "kv" else ec_space()
    block = lz4.block.compress(bytes(1 << 30), store_size=False)
    small = codec.Slot(kv_slots(1)[0].key, memoryview(bytes(1 << 16)), "U8", (1 << 16,))
    name, data = forged(slots=[small], codec="lz4", namespace=space, kind=kind)
    header = codec.parse_header(data)
    (meta,) = header.meta.slots
    sealed = codec.slot_checksum(block, meta.key, "lz4", "U8", (1 << 30,)).encode()
    text = data[8 : header.part.data_start].replace(b"65536", str(1 << 30).encode())
    text = text.replace(meta.xxh3.encode(), sealed)
    (size,) = header.part.slot_sizes
    text = text.replace(f"[{size}]".encode(), f"[{len(block)}]".encode())
    text = text.replace(f"[0,{size}]".encode(), f"[0,{len(block)}]".encode())
    archive = packed([(MANIFEST, members[MANIFEST]), (name, hostile.sealed(text.rstrip()) + block)])
    assert len(archive) < 5 << 20
    tracemalloc.start()
    try:
        bad = Imported(archive, dry_run=dry_run)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert (bad.report.verified.segments, bad.report.left_out) == (0, 1)
    assert "a slot of 1073741824 bytes" in bad.report.left[0].reason


def test_memory_for_a_payload_is_taken_as_it_arrives(members: Members) -> None:
    """A pipe that says 3 GiB and ends: the header's numbers are right, the bytes never come."""
    tokens = 1 << 30
    group = GroupSpec(kind="full", block_tokens=tokens, dtype="U8", shape=(1, 1, tokens, 3))
    space = kv_space(groups=(group,), block_tokens=tokens)
    key = kv_slots(1)[0].key.hex()
    slots = hostile.slot(f"[{3 << 30}]").replace("0" * 36, key).replace(':0,"xxh3"', f':{3 << 30},"xxh3"')
    entry = hostile.tensor(f"[{3 << 30}]").replace("0" * 36, key).replace("[0,0]", f"[0,{3 << 30}]")
    header = hostile.header(canonical_json(space), namespace_id(space), f"[{slots}]", entry, {})
    assert codec.parse_header(header).part.nbytes == len(header) + (3 << 30)
    start = packed([(MANIFEST, members[MANIFEST])]).rstrip(b"\0")
    info = tarfile.TarInfo(payload_name(namespace_id(space), SegmentId(bytes(8)), 0))
    info.size = len(header) + (3 << 30)
    archive = start + bytes(-len(start) % 512) + info.tobuf() + header + bytes(1 << 20)
    tracemalloc.start()
    try:
        bad = Imported(archive, kv={"staging_bytes": "8GiB"})
        assert tracemalloc.get_traced_memory()[1] < 128 << 20
    finally:
        tracemalloc.stop()
    assert (bad.report.ended, bad.report.imported.segments) == ("broken", 0)
    assert "truncated" in bad.report.problem


def test_a_payload_deleted_under_the_import_is_not_left_visible(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its id was in the trash, and the reaper came between the put and the commit."""
    tree = {"payloads": "memory://reaped", "index": "memory://reaped"}
    with Cache(load_settings(tree, {})) as cache:
        store = cache.saving()
        put = store.payloads.put

        def reaped(name: str, buffers: Any) -> None:
            put(name, buffers)
            store.payloads.delete([name])

        monkeypatch.setattr(store.payloads, "put", reaped)
        report = import_archive(io.BytesIO(packed(members.items())), store, source="-", wanted=EVERYTHING)
        assert (report.imported.segments, report.left_out) == (0, 3)
        assert "import again" in report.left[0].reason
        for space in store.maintenance.namespaces():
            assert list(store.maintenance.segments(space)) == []


def test_an_index_that_forgets_in_the_middle(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"payloads": "memory://forgets", "index": "memory://forgets"}
    with Cache(load_settings(tree, {})) as cache:
        store = cache.saving()

        def down(*args: object, **options: object) -> None:
            raise TransientError("index gone")

        monkeypatch.setattr(store.index, "commit", down)
        report = import_archive(io.BytesIO(packed(members.items())), store, source="-", wanted=EVERYTHING)
        assert (report.ended, report.problem) == ("failed", "index gone")
        assert report.imported.segments == 0


def test_the_manifest_is_what_the_schema_says(members: Members) -> None:
    manifest = Manifest.model_validate_json(members[MANIFEST])
    assert (manifest.format, manifest.segments, manifest.payloads) == (1, 3, 4)
    assert manifest.payload_bytes == sum(len(data) for name, data in members.items() if name != MANIFEST)
    assert all(parse_payload_name(name) for name in members if name != MANIFEST)
