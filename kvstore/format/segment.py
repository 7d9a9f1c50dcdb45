"""A segment's file: standard safetensors, padded, checksummed, optionally compressed.

    u64 little endian   length of the JSON header, padding included
    JSON header         {"__metadata__": {"xxh3", ...},
                         "<content key hex>": {"dtype", "shape", "data_offsets"}, ...}
                        padded with spaces so that the data starts on a 4096-byte boundary
    data                the slots back to back, in the order of `__metadata__`

Source of the container: the safetensors format (github.com/huggingface/safetensors, "Format"),
which allows trailing spaces in the header and forbids holes in the data.

Two kinds of checksum, so that no byte of a payload can change unnoticed:
    header   `xxh3`, the first member of `__metadata__`: xxh3-64 of everything before the data, with
             these 16 digits as zeros. An index is thus rebuilt from bytes as safe as those loaded.
    slot     xxh3-64 of the stored bytes, seeded with xxh3-64 of the slot's description (key, codec,
             dtype, shape), so a slot is good under its own description only. It covers the stored bytes,
             not the raw ones, so that damage is found before a decompressor sees it.

A signed segment also has a MAC of its header, and a digest of each slot or, if it is encrypted, the slot's
tag: kvstore/format/keyring.py. A salted segment names its salt's id. Both are of format 2, all other segments
of format 1.

A slot's codec (kvstore/format/codecs.py) says how its bytes are stored.

`encode` does not copy slots of codec `none`: their buffers are handed to the payload store as they
are and must not change until it returns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

import xxhash
from pydantic import ValidationError
from pydantic_core import from_json

from kvstore.errors import CorruptPayload, NamespaceMismatch, NewerFormat, UnknownKey
from kvstore.format import codecs
from kvstore.format.keyring import NO_KEYS, Keyring, PayloadCipher, slot_digest
from kvstore.keys import NO_SALT, ContentKey, NamespaceId, SaltId, SegmentId, namespace_id_of_json
from schemas.namespace import DTYPE_BYTES
from schemas.records import Codec, PartRecord
from schemas.segment import MAX_SLOTS, SegmentMeta, SlotMeta

ALIGN = 4096
#: Largest header that is believed: 1024 slots, the most of a segment, need about 600 KiB.
MAX_HEADER = 1 << 20
#: Most values of a header, of which a slot needs up to 30, and most members of its metadata. Parsing and
#: checking many takes long, and it holds the interpreter's lock.
_MOST_VALUES = 64 * MAX_SLOTS
_MOST_FIELDS = 32
#: Bytes that a reader fetches when it doesn't know the header's length: 64 slots need about 24 KiB.
HEADER_GUESS = 32768

#: Beginning of every header, and the offset in it of the 16 digits of its checksum.
_OPENING = b'{"__metadata__":{"xxh3":"'
_SEAL = 8 + len(_OPENING)
_ZEROS = b"0" * 16
#: Newest format that is read.
_FORMAT = 2


@dataclass(frozen=True, slots=True)
class Slot:
    """One block or item to store: its raw bytes (contiguous, any buffer), dtype and shape."""

    key: ContentKey
    data: memoryview
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A payload ready to be put: the header first, then one buffer per slot."""

    buffers: list[memoryview]
    part: PartRecord


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed and checked header. Its length is the number of slots."""

    meta: SegmentMeta
    part: PartRecord
    #: Decrypts the slots of an encrypted segment.
    cipher: PayloadCipher | None = None

    def __len__(self) -> int:
        return len(self.meta.slots)

    @property
    def salt(self) -> SaltId:
        """The id of the salt that its requests came with; empty without one."""
        return SaltId(bytes.fromhex(self.meta.salt or ""))

    def opener(self, number: int) -> Opener | None:
        """Returns the opener with which `decode_slot` decrypts slot `number`, or None if it is not
        encrypted."""
        return None if self.cipher is None else partial(_decrypt, self.cipher, number)


#: (stored bytes of a slot, the slot) -> None, with the bytes decrypted where they are. Raises CorruptPayload.
Opener = Callable[[memoryview, SlotMeta], None]


def slot_checksum(stored: Any, key: str, codec: str, dtype: str, shape: Sequence[int]) -> str:
    """Returns the checksum of one slot, 16 hex digits. `stored` is any buffer."""
    seed = xxhash.xxh3_64_intdigest(_description(key, codec, dtype, shape).encode())
    return f"{xxhash.xxh3_64_intdigest(stored, seed=seed):016x}"


def _description(key: str, codec: str, dtype: str, shape: Sequence[int]) -> str:
    return f"{key}|{codec}|{dtype}|{','.join(map(str, shape))}"


def _bound(namespace_id: str, segment: str, rank: int) -> str:
    """Returns what ciphers of a payload are bound to, besides the slots' descriptions."""
    return f"{namespace_id}|{segment}|{rank}|"


def _decrypt(cipher: PayloadCipher, number: int, data: memoryview, slot: SlotMeta) -> None:
    described = _description(slot.key, slot.codec, slot.dtype, slot.shape)
    cipher.decrypt(number, described, bytes.fromhex(slot.tag or ""), data)


def encode(
    slots: Sequence[Slot],
    *,
    namespace_json: str,
    kind: Literal["kv", "ec"],
    segment: SegmentId,
    writer: str,
    rank: int = 0,
    ranks: int = 1,
    codec: Codec = "none",
    depth: int = 0,
    created_s: int = 0,
    cost_us: int = 0,
    salt: SaltId = NO_SALT,
    keyring: Keyring = NO_KEYS,
) -> Encoded:
    """Lays out one rank's part of a segment, signed and encrypted as the keyring says.

    Raises ValueError if a slot's bytes don't fit its dtype and shape, or a content key comes twice.
    """
    stored: list[memoryview] = []
    metas: list[SlotMeta] = []
    tensors: dict[str, dict[str, Any]] = {}
    offset = 0
    name = namespace_id_of_json(namespace_json)
    cipher, data_key = None, None
    if keyring.encrypts:
        cipher, data_key = keyring.new_cipher(_bound(name, segment.hex(), rank))
    for number, slot in enumerate(slots):
        raw = slot.data.cast("B") if slot.data.format != "B" or slot.data.ndim != 1 else slot.data
        if raw.nbytes != prod(slot.shape) * DTYPE_BYTES[slot.dtype]:
            raise ValueError(f"slot of {raw.nbytes} bytes does not fit {slot.dtype}{list(slot.shape)}")
        data, used = codecs.encode(raw, codec, slot.dtype)
        key = slot.key.hex()
        if key in tensors:
            raise ValueError(f"content key {key[:16]}... twice in one segment")
        tag, text = None, _description(key, used, slot.dtype, slot.shape)
        if cipher is not None:
            data, tag = cipher.encrypt(number, text, data)
        described = SlotMeta(
            key=key,
            codec=used,
            dtype=slot.dtype,
            shape=slot.shape,
            raw_bytes=raw.nbytes,
            xxh3=slot_checksum(data, key, used, slot.dtype, slot.shape),
            blake3=slot_digest(data, text) if keyring.key is not None and tag is None else None,
            tag=None if tag is None else tag.hex(),
        )
        metas.append(described)
        tensors[key] = _entry(described, offset, offset + data.nbytes)
        stored.append(data)
        offset += data.nbytes
    meta = SegmentMeta(
        mac=None if keyring.key is None else "0" * 64,
        key=keyring.key,
        format=2 if keyring.key is not None or salt else 1,
        segment=segment.hex(),
        namespace_id=name,
        namespace=namespace_json,
        kind=kind,
        rank=rank,
        ranks=ranks,
        codec=codec,
        depth=depth,
        created_s=created_s,
        cost_us=cost_us,
        salt=salt.hex() or None,
        data_key=data_key,
        writer=writer,
        slots=tuple(metas),
    )
    head = _header_bytes(meta, tensors, keyring)
    part = PartRecord(len(head), tuple(data.nbytes for data in stored))
    return Encoded([memoryview(head), *stored], part)


def _header_bytes(meta: SegmentMeta, tensors: dict[str, dict[str, Any]], keyring: Keyring) -> bytes:
    fields = meta.model_dump(mode="json", exclude_none=True)
    if not meta.cost_us:
        del fields["cost_us"]  # segments were written without it before there was a cost
    metadata = {
        name: value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        for name, value in fields.items()
    }
    document = {"__metadata__": {"xxh3": _ZEROS.decode(), **metadata}, **tensors}
    text = json.dumps(document, separators=(",", ":")).encode()
    padded = -(-(8 + len(text)) // ALIGN) * ALIGN
    head = (padded - 8).to_bytes(8, "little") + text.ljust(padded - 8)
    if meta.mac is not None:
        head = keyring.sign(head)
    return head[:_SEAL] + _header_checksum(head) + head[_SEAL + 16 :]


def _header_checksum(head: memoryview | bytes) -> bytes:
    """Returns the 16 digits of a whole header's checksum, whatever stands in their place now."""
    hasher = xxhash.xxh3_64()
    hasher.update(head[:_SEAL])
    hasher.update(_ZEROS)
    hasher.update(head[_SEAL + 16 :])
    return hasher.hexdigest().encode()


def header_length(start: memoryview | bytes) -> int:
    """Returns a header's size in bytes, length field included, which the first 8 bytes of a payload say.

    Raises CorruptPayload if there can be no such header.
    """
    if len(start) < 8:
        raise CorruptPayload("payload shorter than a segment's length field")
    length = 8 + int.from_bytes(start[:8], "little")
    if length > MAX_HEADER or length % ALIGN:
        raise CorruptPayload(f"impossible header length {length}")
    return length


def parse_header(
    data: memoryview | bytes, *, namespace: NamespaceId | None = None, keyring: Keyring = NO_KEYS
) -> Header:
    """Checks who wrote a whole header (`header_length` bytes), then parses and cross-checks it.

    Raises NamespaceMismatch if it belongs to another namespace than `namespace`. Raises CorruptPayload
    (UnsignedPayload) if it is damaged or not to be believed. Raises UnreadablePayload if this keyring or this
    version can't judge it. The slots' bytes are not read.
    """
    length = header_length(data)
    if len(data) < length:
        raise CorruptPayload(f"header truncated at {len(data)} of {length} bytes")
    data = data[:length]
    if data[8:_SEAL] != _OPENING:
        raise CorruptPayload("header is not a segment's")
    if data[_SEAL : _SEAL + 16] != _header_checksum(data):
        raise CorruptPayload("checksum of the header differs")
    signer = keyring.check(data)
    try:
        text = bytes(data[8:])
        if text.count(b",") + text.count(b"[") + text.count(b"{") > _MOST_VALUES:
            raise ValueError("the header has too many values")
        document = from_json(text)
        metadata = document.pop("__metadata__")
        del metadata["xxh3"]
        if len(metadata) > _MOST_FIELDS:
            raise ValueError("the header has too many members")
        _check_format(from_json(metadata.get("format", "1")))
        texts = (
            "mac",
            "key",
            "data_key",
            "segment",
            "namespace_id",
            "namespace",
            "kind",
            "codec",
            "salt",
            "writer",
        )
        fields = {name: value if name in texts else from_json(value) for name, value in metadata.items()}
        meta = SegmentMeta.model_validate(fields)
    except (ValueError, ValidationError, KeyError, AttributeError, TypeError, RecursionError) as exc:
        raise CorruptPayload("header makes no sense") from exc
    if meta.key != signer:
        raise CorruptPayload("header names another key than the one that signed it")
    _check_namespace(meta, namespace)
    if list(document) != [slot.key for slot in meta.slots]:
        raise CorruptPayload("tensors and slots of the header differ")
    sizes = []
    offset = 0
    for slot in meta.slots:
        end = _end(document[slot.key])
        # The whole entry is compared: other readers of the file go by it alone.
        if not _plausible(slot, end - offset) or document[slot.key] != _entry(slot, offset, end):
            raise CorruptPayload(f"slot {slot.key[:16]}... and its tensor differ")
        sizes.append(end - offset)
        offset = end
    cipher = None
    if meta.key is not None and meta.data_key is not None:
        bound = _bound(meta.namespace_id, meta.segment, meta.rank)
        cipher = keyring.cipher(meta.key, meta.data_key, bound)
    return Header(meta, PartRecord(length, tuple(sizes)), cipher)


def _check_format(number: Any) -> None:
    if type(number) is int and number > _FORMAT:
        raise NewerFormat(f"it is of format {number}, and this version reads up to {_FORMAT}: upgrade")


def _end(entry: Any) -> int:
    try:
        end = entry["data_offsets"][1]
    except (TypeError, KeyError, IndexError) as exc:
        raise CorruptPayload("tensor without offsets") from exc
    if type(end) is not int:
        raise CorruptPayload("tensor without offsets")
    return end


def _entry(slot: SlotMeta, start: int, end: int) -> dict[str, Any]:
    """Returns the safetensors entry of one slot."""
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
    if not codecs.CODECS[slot.codec].takes(slot.dtype):
        return False
    if slot.codec == "none":
        return stored == slot.raw_bytes
    return 0 < stored < slot.raw_bytes <= codecs.MOST_RATIO * stored


def decode_slot(
    stored: memoryview, slot: SlotMeta, into: memoryview | None, opener: Opener | None = None
) -> None:
    """Verifies one slot's stored bytes and, if `into` is given, decompresses them there.

    For codec `none` the caller has read straight into its own buffer and passes `into=None`. An encrypted
    slot needs the header's `opener` and is decrypted where it is: `stored` then holds the plain bytes.
    Raises CorruptPayload, or UnknownKey without an opener; `into` and `stored` may then hold anything.
    """
    if slot.tag is not None:
        if opener is None:
            raise UnknownKey(f"slot {slot.key[:16]}... is encrypted")
        opener(stored, slot)
    elif slot.blake3 is not None:
        if slot_digest(stored, _description(slot.key, slot.codec, slot.dtype, slot.shape)) != slot.blake3:
            raise CorruptPayload(f"digest of slot {slot.key[:16]}... differs")
    elif slot_checksum(stored, slot.key, slot.codec, slot.dtype, slot.shape) != slot.xxh3:
        raise CorruptPayload(f"checksum of slot {slot.key[:16]}... differs")
    if into is not None:
        decompress_slot(stored, slot, into)


def decompress_slot(stored: memoryview, slot: SlotMeta, into: memoryview) -> None:
    """Decompresses the verified bytes of a slot. Raises CorruptPayload; `into` may then hold anything."""
    if into.nbytes != slot.raw_bytes:
        raise CorruptPayload(f"slot {slot.key[:16]}... is {slot.raw_bytes} bytes, expected {into.nbytes}")
    try:
        codecs.CODECS[slot.codec].decode(stored, slot.dtype, into)
    except CorruptPayload as exc:
        raise CorruptPayload(f"slot {slot.key[:16]}...: {exc}") from exc
