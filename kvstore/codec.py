"""Segment codec: a standard safetensors file, padded, checksummed, optionally compressed.

    u64 little endian   length of the JSON header, padding included
    JSON header         {"__metadata__": {"xxh3", ...},
                         "<content key hex>": {"dtype", "shape", "data_offsets"}, ...}
                        padded with spaces so that the data starts on a 4096-byte boundary
    data                the slots back to back, in the order of `__metadata__`

Source of the container: the safetensors format (github.com/huggingface/safetensors, "Format"),
which allows trailing spaces in the header and forbids holes in the data.

Two kinds of checksum, so that no byte of a payload can change unnoticed:
    header   `xxh3`, the first member of `__metadata__`: xxh3-64 of everything before the data, with
             these 16 digits as zeros. What rebuilds an index is thus as safe as what is loaded.
    slot     xxh3-64 of the stored bytes, seeded with xxh3-64 of the slot's description (key, codec,
             dtype, shape), so a slot is good under its own description only. Of the stored bytes, so
             that damage is found before a decompressor sees it.

Codecs of a slot, chosen when it is written:
    none        the tensor's bytes as they are
    lz4         one lz4 block, without a size of its own
    planes-lz4  exponents and mantissas apart, then lz4: layout in kvstore/planes.py
A namespace's codec says what is tried: under `lz4` a slot that doesn't shrink by a 32nd is `none`; under
`planes-lz4` a slot takes the smallest of the three, and the dtypes without a split as under `lz4`.

`encode` does not copy slots of codec `none`: their buffers are handed to the payload store as they
are and must not change until it returns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
import xxhash
from pydantic import ValidationError

from kvstore import planes
from kvstore.errors import CorruptPayload, NamespaceMismatch
from kvstore.keys import ContentKey, NamespaceId, SegmentId, namespace_id_of_json
from schemas.namespace import DTYPE_BYTES
from schemas.records import Codec, PartRecord
from schemas.segment import SegmentMeta, SlotMeta

ALIGN = 4096
#: A header larger than this is not ours: 1024 slots need about 400 KiB.
MAX_HEADER = 4 << 20
#: Bytes a reader fetches when it doesn't know the header's length: 64 slots need about 24 KiB.
HEADER_GUESS = 32768

#: How every header begins, and where in it the 16 digits of its checksum stand.
_OPENING = b'{"__metadata__":{"xxh3":"'
_SEAL = 8 + len(_OPENING)
_ZEROS = b"0" * 16


@dataclass(frozen=True, slots=True)
class Slot:
    """One block or item to store: its raw bytes (contiguous, any buffer), dtype and shape."""

    key: ContentKey
    data: memoryview
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A segment ready to be put: header first, then one buffer per slot."""

    buffers: list[memoryview]
    part: PartRecord


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed and checked header."""

    meta: SegmentMeta
    part: PartRecord

    def __len__(self) -> int:
        return len(self.meta.slots)


def slot_checksum(stored: Any, key: str, codec: str, dtype: str, shape: Sequence[int]) -> str:
    """The checksum of one slot, 16 hex digits. `stored` is any buffer."""
    seed = xxhash.xxh3_64_intdigest(f"{key}|{codec}|{dtype}|{','.join(map(str, shape))}".encode())
    return f"{xxhash.xxh3_64_intdigest(stored, seed=seed):016x}"


def encode(
    slots: Sequence[Slot],
    *,
    namespace_json: str,
    kind: Literal["kv", "ec"],
    segment: SegmentId,
    rank: int,
    ranks: int,
    codec: Codec,
    depth: int,
    created_s: int,
    writer: str,
    cost_us: int = 0,
) -> Encoded:
    """Lay out one rank's part of a segment."""
    stored: list[memoryview] = []
    metas: list[SlotMeta] = []
    tensors: dict[str, dict[str, Any]] = {}
    offset = 0
    for slot in slots:
        raw = slot.data.cast("B") if slot.data.format != "B" or slot.data.ndim != 1 else slot.data
        if raw.nbytes != prod(slot.shape) * DTYPE_BYTES[slot.dtype]:
            raise ValueError(f"slot of {raw.nbytes} bytes does not fit {slot.dtype}{list(slot.shape)}")
        data, used = _compress(raw, codec, slot.dtype)
        key = slot.key.hex()
        if key in tensors:
            raise ValueError(f"content key {key[:16]}... twice in one segment")
        described = SlotMeta(
            key=key,
            codec=used,
            dtype=slot.dtype,
            shape=slot.shape,
            raw_bytes=raw.nbytes,
            xxh3=slot_checksum(data, key, used, slot.dtype, slot.shape),
        )
        metas.append(described)
        tensors[key] = _entry(described, offset, offset + data.nbytes)
        stored.append(data)
        offset += data.nbytes
    meta = SegmentMeta(
        segment=segment.hex(),
        namespace_id=namespace_id_of_json(namespace_json),
        namespace=namespace_json,
        kind=kind,
        rank=rank,
        ranks=ranks,
        codec=codec,
        depth=depth,
        created_s=created_s,
        cost_us=cost_us,
        writer=writer,
        slots=tuple(metas),
    )
    head = _header_bytes(meta, tensors)
    part = PartRecord(len(head), tuple(data.nbytes for data in stored))
    return Encoded([memoryview(head), *stored], part)


def _compress(raw: memoryview, codec: Codec, dtype: str) -> tuple[memoryview, Codec]:
    if codec == "none" or not raw.nbytes:
        return raw, "none"
    packed = planes.shrink(raw)
    best: tuple[memoryview, Codec] = (raw, "none") if packed is None else (memoryview(packed), "lz4")
    if codec == "planes-lz4" and dtype in planes.DTYPES:
        # Plain lz4 stays the better one where whole elements repeat.
        split = planes.split(raw, dtype)
        if split.nbytes < best[0].nbytes and planes.saves(split.nbytes, raw.nbytes):
            return split, "planes-lz4"
    return best


def _header_bytes(meta: SegmentMeta, tensors: dict[str, dict[str, Any]]) -> bytes:
    fields = meta.model_dump(mode="json")
    if not meta.cost_us:
        del fields["cost_us"]  # as segments were written before there was one
    metadata = {
        name: value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        for name, value in fields.items()
    }
    document = {"__metadata__": {"xxh3": _ZEROS.decode(), **metadata}, **tensors}
    text = json.dumps(document, separators=(",", ":")).encode()
    padded = -(-(8 + len(text)) // ALIGN) * ALIGN
    head = (padded - 8).to_bytes(8, "little") + text.ljust(padded - 8)
    return head[:_SEAL] + _header_checksum(head) + head[_SEAL + 16 :]


def _header_checksum(head: memoryview | bytes) -> bytes:
    """The 16 digits that belong into a whole header, whatever stands there now."""
    hasher = xxhash.xxh3_64()
    hasher.update(head[:_SEAL])
    hasher.update(_ZEROS)
    hasher.update(head[_SEAL + 16 :])
    return hasher.hexdigest().encode()


def header_length(start: memoryview | bytes) -> int:
    """Total header bytes (prefix included) announced by the first 8 bytes of a payload."""
    if len(start) < 8:
        raise CorruptPayload("payload shorter than a segment's length field")
    length = 8 + int.from_bytes(start[:8], "little")
    if length > MAX_HEADER or length % ALIGN:
        raise CorruptPayload(f"impossible header length {length}")
    return length


def parse_header(data: memoryview | bytes, *, namespace: NamespaceId | None = None) -> Header:
    """Parse and cross-check a whole header (`header_length` bytes).

    Raises NamespaceMismatch if it belongs to another namespace than `namespace`, CorruptPayload if
    it is damaged. The slots' bytes are not looked at.
    """
    length = header_length(data)
    if len(data) < length:
        raise CorruptPayload(f"header truncated at {len(data)} of {length} bytes")
    data = data[:length]
    if data[8:_SEAL] != _OPENING:
        raise CorruptPayload("header is not a segment's")
    if data[_SEAL : _SEAL + 16] != _header_checksum(data):
        raise CorruptPayload("checksum of the header differs")
    try:
        document = json.loads(str(data[8:], "utf-8"))
        metadata = document.pop("__metadata__")
        del metadata["xxh3"]
        texts = ("segment", "namespace_id", "namespace", "kind", "codec", "writer")
        fields = {name: value if name in texts else json.loads(value) for name, value in metadata.items()}
        meta = SegmentMeta.model_validate(fields)
    except (ValueError, ValidationError, KeyError, AttributeError, TypeError, RecursionError) as exc:
        raise CorruptPayload("header makes no sense") from exc
    _check_namespace(meta, namespace)
    if list(document) != [slot.key for slot in meta.slots]:
        raise CorruptPayload("tensors and slots of the header differ")
    sizes = []
    offset = 0
    for slot in meta.slots:
        end = _end(document[slot.key])
        # The whole entry: another reader of the file goes by it alone.
        if not _plausible(slot, end - offset) or document[slot.key] != _entry(slot, offset, end):
            raise CorruptPayload(f"slot {slot.key[:16]}... and its tensor differ")
        sizes.append(end - offset)
        offset = end
    return Header(meta, PartRecord(length, tuple(sizes)))


def _end(entry: Any) -> int:
    try:
        end = entry["data_offsets"][1]
    except (TypeError, KeyError, IndexError) as exc:
        raise CorruptPayload("tensor without offsets") from exc
    if type(end) is not int:
        raise CorruptPayload("tensor without offsets")
    return end


def _entry(slot: SlotMeta, start: int, end: int) -> dict[str, Any]:
    """The safetensors entry of one slot."""
    plain = slot.codec == "none"
    return {
        "dtype": slot.dtype if plain else "U8",
        "shape": list(slot.shape) if plain else [end - start],
        "data_offsets": [start, end],
    }


def _check_namespace(meta: SegmentMeta, expected: NamespaceId | None) -> None:
    if not meta.namespace.isascii() or namespace_id_of_json(meta.namespace) != meta.namespace_id:
        raise CorruptPayload("namespace id and namespace of the header differ")
    if expected is not None and meta.namespace_id != expected:
        raise NamespaceMismatch(f"segment of namespace {meta.namespace_id}, expected {expected}")


def _plausible(slot: SlotMeta, stored: int) -> bool:
    width = DTYPE_BYTES.get(slot.dtype)
    if width is None or prod(slot.shape) * width != slot.raw_bytes:
        return False
    if slot.codec == "planes-lz4" and slot.dtype not in planes.DTYPES:
        return False
    return stored == slot.raw_bytes if slot.codec == "none" else 0 < stored < slot.raw_bytes


def decode_slot(stored: memoryview, slot: SlotMeta, into: memoryview | None) -> None:
    """Verify one slot's stored bytes and, if `into` is given, decompress them there.

    With codec `none` the caller has read straight into its own buffer and passes `into=None`.
    Raises CorruptPayload; `into` may then hold anything.
    """
    if slot_checksum(stored, slot.key, slot.codec, slot.dtype, slot.shape) != slot.xxh3:
        raise CorruptPayload(f"checksum of slot {slot.key[:16]}... differs")
    if into is None:
        return
    if into.nbytes != slot.raw_bytes:
        raise CorruptPayload(f"slot {slot.key[:16]}... is {slot.raw_bytes} bytes, expected {into.nbytes}")
    if slot.codec == "none":
        _copy(stored, into)
        return
    try:
        if slot.codec == "lz4":
            _copy(planes.expand(stored, slot.raw_bytes), into)
        else:
            planes.join(stored, slot.dtype, into)
    except CorruptPayload as exc:
        raise CorruptPayload(f"slot {slot.key[:16]}...: {exc}") from exc


def _copy(source: memoryview | bytes, into: memoryview) -> None:
    # numpy lets other threads run meanwhile; assigning to a slice of a memoryview does not.
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))
