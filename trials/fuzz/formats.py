"""Targets over bytes of our own formats: payloads, records, archives, URLs. See trials.fuzz.targets."""

from __future__ import annotations

import io
import json
import struct
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvstore.admin.archive.import_ import import_archive
from kvstore.admin.archive.wanted import Wanted
from kvstore.errors import CorruptPayload, UnknownKey, UnreadablePayload
from kvstore.format import codecs, planes
from kvstore.format import segment as segments
from kvstore.format.keyring import Keyring
from kvstore.index.scripted.values import AGREED_BYTES, record_of
from kvstore.keys import canonical_json, namespace_id
from kvstore.verify import headers as headers_of
from schemas.namespace import DTYPE_BYTES
from schemas.records import CODECS, SALT_ID_BYTES, SegmentRecord, pack_record, unpack_record
from schemas.segment import SlotMeta
from schemas.urls import check_folder, check_index, check_payloads, local_path, redis_location, s3_location
from tests.format.second import planes as second_planes
from tests.format.second import records as second_records
from tests.format.second import segments as second_segments
from tests.format.second.archives import write_archive

_GOLDEN = Path(__file__).parents[2] / "tests" / "format" / "golden"


def _second(read: Callable[[], Any]) -> Any:
    """What the second implementation (tests/format/second), written from docs/format.md, reads; None if it
    refuses."""
    try:
        return read()
    except Exception:
        return None


# ---- headers ----------------------------------------------------------------------------------------

_OPENING = b'{"__metadata__":{"xxh3":"'
#: The key of the golden segments. A header that names it is signed with it before it is parsed: what is
#: behind the check is to be reached, and one of the fleet's own writers may have made any of it.
_KEYS = {"golden": bytes(range(32))}
_KEYRING = Keyring(_KEYS, key="golden", accept_unsigned=True)


def sealed(text: bytes) -> bytes:
    """A header whose JSON goes on with `text` after its checksum; length, padding, checksum and, with the
    golden key's id at its place, MAC are right."""
    body = _OPENING + b"0" * 16 + text
    length = -(-(8 + len(body)) // 4096) * 4096
    head = struct.pack("<Q", length - 8) + body.ljust(length - 8)
    with suppress(UnknownKey):
        head = _KEYRING.sign(head)
    return _resealed(head)


def _resealed(payload: bytes) -> bytes:
    """A payload whose header's checksum is right, if it begins with a header at all."""
    length = 8 + int.from_bytes(payload[:8], "little")
    if length > len(payload) or payload[8:33] != _OPENING:
        return payload
    checksum = second_segments.header_checksum(payload[:length]).encode()
    return payload[:33] + checksum + payload[49:]


def _unsealed(payload: bytes) -> bytes:
    length = 8 + int.from_bytes(payload[:8], "little")
    return payload[49:length].rstrip()


def headers(data: bytes) -> None:
    """A payload's header, then what an index, an archive and a rebuild make of it."""
    head = sealed(data)
    other = _second(lambda: second_segments.read_header(head, keys=_KEYS, unsigned=True))
    try:
        header = segments.parse_header(head, keyring=_KEYRING)
    except (CorruptPayload, UnreadablePayload):
        assert other is None, "refused, and as specified"
        raise
    end = header.part.data_start
    assert len(header) == len(header.part.slot_sizes) > 0
    assert header.part.nbytes == end + sum(header.part.slot_sizes) < 1 << 63
    # A reader may take some headers that no writer may write.
    if other is not None:
        assert other.digests == headers_of.digests_of(header)
        assert other.nbytes == header.part.nbytes and other.data_start == end
        assert [slot.raw_bytes for slot in other.slots] == [slot.raw_bytes for slot in header.meta.slots]
        assert other.meta["salt"] == (header.meta.salt or "")
    assert (header.meta.format == 2) == bool(header.meta.key or header.meta.salt)
    for number in range(len(header)):
        assert (header.opener(number) is not None) == (header.meta.data_key is not None)
    record = headers_of.record_of([header])
    assert unpack_record(pack_record(record)) == record
    headers_of.namespace_of(header)


def namespaces(data: bytes) -> None:
    """The namespace in a header, as a rebuild and an import register it."""
    text = data.decode("ascii", "replace")
    name = second_segments.namespace_id(text) if text.isascii() else "0" * 16
    fields = {
        "format": "1", "segment": "0" * 16, "namespace_id": name, "namespace": text,
        "kind": "ec" if b'"ec"' in data else "kv", "rank": "0", "ranks": "1", "codec": "none", "depth": "0",
        "created_s": "0", "writer": "", "slots": json.dumps([_SLOT]),
    }  # fmt: skip
    tensor = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    whole = json.dumps({"__metadata__": fields, _SLOT["key"]: tensor}, separators=(",", ":"))
    header = segments.parse_header(sealed(b'",' + whole.removeprefix('{"__metadata__":{').encode()))
    namespace = headers_of.namespace_of(header)
    assert canonical_json(namespace) == text
    assert namespace_id(namespace) == header.meta.namespace_id == name


_SLOT: dict[str, Any] = {
    "key": "00" * 18, "codec": "none", "dtype": "U8", "shape": [1], "raw_bytes": 1, "xxh3": "0" * 16,
}  # fmt: skip

# ---- slots and planes -------------------------------------------------------------------------------

_DTYPES = tuple(DTYPE_BYTES)
_PLANES = tuple(sorted(planes.DTYPES))
_GUARD = b"\xa5" * 64


def slots(data: bytes) -> None:
    """One stored slot with the right checksum: u8 codec, u8 dtype, u16 elements, the stored bytes."""
    if len(data) < 4:
        raise CorruptPayload("too short to be a slot")
    codec, dtype = CODECS[data[0] % len(CODECS)], _DTYPES[data[1] % len(_DTYPES)]
    count = int.from_bytes(data[2:4], "little")
    raw, stored, key = count * DTYPE_BYTES[dtype], data[4:], "00" * 18
    checksum = segments.slot_checksum(stored, key, codec, dtype, (count,))
    meta = SlotMeta(key=key, codec=codec, dtype=dtype, shape=(count,), raw_bytes=raw, xxh3=checksum)
    if codec == "none" and raw != len(stored):
        return  # such slots are read straight into a buffer of their size
    reader = second_planes.unplanes if codec == "planes-lz4" else _unlz4
    other = stored if codec == "none" else _second(lambda: reader(stored, dtype, raw))
    found = []
    for fill in (b"\x00", b"\xff"):
        room = bytearray(_GUARD + fill * raw + _GUARD)
        into = memoryview(room)[len(_GUARD) : len(_GUARD) + raw]
        try:
            segments.decode_slot(memoryview(stored), meta, into)
        except CorruptPayload:
            assert other is None, "refused, and as specified"
            raise
        assert room.startswith(_GUARD) and room.endswith(_GUARD), "written beside its buffer"
        found.append(bytes(into))
    assert found[0] == found[1] == other, "not the bytes that the form stands for"


def _unlz4(stored: bytes, _: str, nbytes: int) -> bytes:
    return second_planes.unlz4(stored, nbytes)


def split(data: bytes) -> None:
    """Raw elements, cut into planes by every codec and put together again: u8 dtype, the elements."""
    dtype = _PLANES[data[0] % len(_PLANES)] if data else "BF16"
    width = DTYPE_BYTES[dtype]
    raw = data[1 : 1 + (len(data) - 1) // width * width]
    if not raw:
        return
    parts = planes.split(memoryview(raw), dtype)
    into = memoryview(bytearray(len(raw)))
    planes.decode(parts, dtype, into)
    assert into == raw == _second(lambda: second_planes.unplanes(bytes(parts), dtype, len(raw)))
    for codec in CODECS:
        stored, used = codecs.encode(memoryview(raw), codec, dtype)
        assert stored.nbytes < len(raw) or used == "none"
        codecs.CODECS[used].decode(stored, dtype, into)
        assert into == raw


# ---- records ----------------------------------------------------------------------------------------


def records(data: bytes) -> None:
    """A packed record, as an index has it."""
    record = unpack_record(data)
    other = _second(lambda: second_records.unpack_record(data))
    assert record == record_of(b"1:1:" + bytes(AGREED_BYTES) + data)
    assert (record is None) == (other is None)
    if record is None:
        return
    sound(record)
    assert unpack_record(pack_record(record)) == record
    assert other.parts == tuple((part.data_start, part.slot_sizes) for part in record.parts)
    assert (other.slots, other.codec, other.nbytes) == (record.slots, record.codec, record.nbytes)
    assert other.salt == record.salt


def sound(record: SegmentRecord) -> None:
    assert 0 < record.slots < 1 << 16 and 0 < len(record.parts) < 1 << 8
    assert all(len(part.slot_sizes) == record.slots for part in record.parts)
    assert 0 < record.nbytes + 1 < 1 << 63
    assert len(record.salt) in (0, SALT_ID_BYTES)


def packed_record(slots_: int, salt: bytes = b"") -> bytes:
    flags = 3 if salt else 1
    head = struct.pack("<BBHBBHIIQ8s", 2, flags, slots_, 1, 0, 0, 1_763_000_000, 0, 64 * slots_, bytes(8))
    return head + salt + struct.pack("<II", 4096, 64)


# ---- archives ---------------------------------------------------------------------------------------


def archives(data: bytes) -> None:
    """An archive, verified as `import --dry-run` does; checksums of tar headers and payloads are right."""
    whole = _rechecked(data)
    report = import_archive(io.BytesIO(whole), None, source="-", wanted=Wanted(new=True))
    assert report.ended in ("complete", "broken", "failed")
    assert (report.ended == "complete") == (not report.problem)
    assert report.verified.segments + report.left_out <= report.found_segments
    assert report.verified.stored_bytes <= len(whole)
    assert not control(report.model_dump_json())


def _rechecked(data: bytes) -> bytes:
    """An archive whose tar headers, and payloads' headers, have the right checksums."""
    out, at = bytearray(data), 0
    while at + 512 <= len(out):
        header = out[at : at + 512]
        if any(header):
            summed = sum(header[:148]) + 8 * 32 + sum(header[156:])
            out[at + 148 : at + 156] = b"%06o\x00 " % summed
        try:
            size = tarfile.nti(bytes(out[at + 124 : at + 136]))  # type: ignore[attr-defined]
        except tarfile.TarError:
            return bytes(out)
        if size < 0:
            return bytes(out)
        start = at + 512
        out[start : start + size] = _resealed(bytes(out[start : start + size]))
        at = start + -(-size // 512) * 512
    return bytes(out)


def archive_seeds() -> Iterator[bytes]:
    for name in ("1-none", "2-salted", "2-signed"):
        payload = (_GOLDEN / f"segment-{name}.safetensors").read_bytes()
        meta = segments.parse_header(payload[: segments.header_length(payload)]).meta
        name = f"{meta.namespace_id}/{meta.segment[:2]}/{meta.segment}.0"
        whole = write_archive({meta.namespace_id: meta.namespace}, {name: payload}, 1_763_000_000)
        # tar pads an archive to 10 KiB, which says nothing.
        yield whole.rstrip(b"\x00")[: len(whole)] + bytes(1536)
    yield write_archive({}, {}, 0)[:3072]


# ---- URLs -------------------------------------------------------------------------------------------

_SECRET = "S3cr3tCanary"


def urls(data: bytes) -> None:
    """A URL of the settings, with a secret somewhere in it: u8 place of the secret, the rest is the URL."""
    text = data[1:].decode("utf-8", "surrogateescape")
    place = data[0] if data else 255
    url = text if place > len(text) else text[:place] + _SECRET + text[place:]
    refused = 0
    for check in (check_folder, check_payloads, check_index, s3_location, redis_location):
        try:
            found: Any = check(url)
        except ValueError as exc:
            assert _SECRET not in f"{exc} {exc.__cause__}" and exc.__cause__ is None, "an error quotes a URL"
            assert exc.__suppress_context__ or exc.__context__ is None or _SECRET not in str(exc.__context__)
            refused += 1
            continue
        if check is s3_location:
            assert not _odd(found.root) and ".." not in found.root.split("/") and len(found.bucket) < 64
        elif check is redis_location:
            assert all(host and 0 < port < 65536 and not _odd(host) for host, port in found.hosts)
            for secret in (found.username, found.password):
                shown = f"{found!r} {found.where}"
                assert not secret or _SECRET not in secret or shown.count(_SECRET) < url.count(_SECRET)
        elif check is not check_index:
            local_path(found)
    if refused == 5:
        raise ValueError("no URL of any setting")


def _odd(text: str) -> bool:
    return any(not "!" <= letter <= "~" for letter in text)


def control(text: str) -> bool:
    return any(ord(letter) < 32 or 127 <= ord(letter) < 160 for letter in text)


# ---- seeds ------------------------------------------------------------------------------------------


def _golden() -> list[bytes]:
    return [file.read_bytes() for file in sorted(_GOLDEN.glob("segment-1-*.safetensors"))]


def slot_seeds() -> Iterator[bytes]:
    for payload in _golden():
        header = segments.parse_header(payload[: segments.header_length(payload)])
        for number, slot in enumerate(header.meta.slots):
            start, size = header.part.slot_range(number, 1)
            count = slot.raw_bytes // DTYPE_BYTES[slot.dtype]
            place = bytes([CODECS.index(slot.codec), _DTYPES.index(slot.dtype)]) + count.to_bytes(2, "little")
            yield (place + payload[start : start + size])[:4096]


def namespace_seeds() -> Iterator[bytes]:
    for payload in _golden():
        yield segments.parse_header(payload[: segments.header_length(payload)]).meta.namespace.encode()


def record_seeds() -> Iterator[bytes]:
    yield packed_record(1)
    yield packed_record(4)
    yield packed_record(4, bytes(range(16)))
    yield struct.pack("<BBHBBHIIQ6I", 1, 0, 2, 2, 1, 0x1234, 1_763_000_000, 7, 0, 4096, 10, 20, 4096, 30, 40)


def header_seeds() -> Iterator[bytes]:
    yield from (_unsealed(file.read_bytes()) for file in sorted(_GOLDEN.glob("segment-*.safetensors")))


def element_seeds() -> Iterator[bytes]:
    yield from (bytes([dtype]) + bytes(range(256)) * 2 for dtype in range(len(_PLANES)))


_URLS = (
    "file:///var/lib/kvstore", "s3://bucket/prefix?endpoint=http://localhost:9000&region=us-east-1",
    "memory://name", "redis://user:password@host:6379/0", "rediss://:p%40ss@[::1]:6380/1",
    "redis://a:1,b:2,c:3", "redis+sentinel://u:p@a:26379,b/mymaster/2", "rediss+sentinel://a/m",
    "unix://u:p@/run/redis.sock?db=3", "sqlite:///var/lib/kvstore/index.db", "s3://a@b/c", "s3://bucket/..",
)  # fmt: skip


def url_seeds() -> Iterator[bytes]:
    yield from (b"\xff" + one.encode() for one in _URLS)
