"""A second implementation of the format, made from docs/format.md alone.

Reads and writes segments, names and records; reads an index in Redis or SQLite; commits into both. It knows
nothing of kvstore's code: what it needs and the document does not say is a fault of the document.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lz4.block
import numpy as np
import redis
import xxhash

CODECS = ("none", "lz4", "planes-lz4")
WIDTHS = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
OPENING = b'{"__metadata__":{"xxh3":"'


class Miss(Exception):
    """What was read is not what it must be."""


def need(condition: object, what: str) -> None:
    if not condition:
        raise Miss(what)


# Identity


def canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def namespace_id(text: str) -> str:
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


def cbor(value: Any) -> bytes:
    def head(major: int, n: int) -> bytes:
        if n < 24:
            return bytes([major << 5 | n])
        for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
            if n < 1 << 8 * size:
                return bytes([major << 5 | code]) + n.to_bytes(size, "big")
        raise OverflowError(n)

    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return head(0, value)
    if isinstance(value, bytes):
        return head(2, len(value)) + value
    if isinstance(value, str):
        return head(3, len(value.encode())) + value.encode()
    return head(4, len(value)) + b"".join(cbor(one) for one in value)


def chain(tokens: Sequence[int], per_hash: int, seed: str = "vllm-none-hash", salt: str = "") -> list[bytes]:
    """Block hashes of full blocks, for sha256_cbor."""
    parent, hashes = hashlib.sha256(cbor(seed)).digest(), []
    for at in range(0, len(tokens) - per_hash + 1, per_hash):
        extra = (("cache_salt", salt),) if salt and not at else None
        parent = hashlib.sha256(cbor((parent, tuple(tokens[at : at + per_hash]), extra))).digest()
        hashes.append(parent)
    return hashes


def hash_root(seed: str = "vllm-none-hash") -> str:
    return hashlib.sha256(seed.encode()).hexdigest()[:16]


def block_key(block_hash: bytes, group: int = 0) -> bytes:
    return block_hash + group.to_bytes(2, "big")


def item_key(identifier: str) -> bytes:
    text = identifier.encode("utf-8", "surrogatepass")
    return hashlib.sha256(b"kvstore item\x00" + text).digest() + b"\x00\x00"


def digest(key: bytes) -> bytes:
    h, g = key[:-2], key[-2:]
    return h[:14] + bytes([h[14] ^ g[0], h[15] ^ g[1]])


def payload_name(namespace: str, segment: bytes, rank: int) -> str:
    return f"{namespace}/{segment.hex()[:2]}/{segment.hex()}.{rank}"


def weights_digest(folder: Path) -> str:
    ends = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
    whole = hashlib.sha256()
    for file in sorted(one for one in folder.iterdir() if one.suffix in ends):
        data = file.read_bytes()
        size = len(data)
        whole.update(file.name.encode() + b"\x00" + str(size).encode() + b"\x00")
        points = [size * i // 64 for i in range(64)] + [size - 64]
        if file.suffix == ".safetensors":
            length = struct.unpack_from("<Q", data)[0]
            text = data[8 : 8 + length]
            whole.update(text)
            tensors = json.loads(text)
            tensors.pop("__metadata__", None)
            spans = sorted(tuple(8 + length + at for at in one["data_offsets"]) for one in tensors.values())
            points = [
                at for start, end in spans if start < end for at in (start, (start + end) // 2, end - 64)
            ]
        for at in points:
            whole.update(data[max(0, at) : max(0, at) + 64])
    return whole.hexdigest()[:32]


# Segments


@dataclass(frozen=True)
class Slot:
    """What a segment's header says of one slot; `start` and `end` are places in the file."""

    key: bytes
    codec: str
    dtype: str
    shape: tuple[int, ...]
    raw_bytes: int
    xxh3: str
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    data_start: int
    meta: dict[str, Any]
    slots: tuple[Slot, ...]

    @property
    def nbytes(self) -> int:
        return self.slots[-1].end

    @property
    def digests(self) -> bytes:
        return b"".join(digest(slot.key) for slot in self.slots)


_INTEGERS = {"format": 1, "rank": 0, "ranks": 1, "depth": 0, "created_s": 0, "cost_us": 0}
_TEXTS = ("segment", "namespace_id", "namespace", "kind", "codec", "writer")
_HEX16 = re.compile("[0-9a-f]{16}")


def header_checksum(head: bytes) -> str:
    return f"{xxhash.xxh3_64_intdigest(head[:33] + b'0' * 16 + head[49:]):016x}"


def slot_checksum(stored: bytes, key: str, codec: str, dtype: str, shape: Sequence[int]) -> str:
    described = f"{key}|{codec}|{dtype}|{','.join(str(one) for one in shape)}"
    return f"{xxhash.xxh3_64_intdigest(stored, seed=xxhash.xxh3_64_intdigest(described.encode())):016x}"


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    need(len({name for name, _ in pairs}) == len(pairs), "a member named twice")
    return dict(pairs)


def read_header(data: bytes, *, namespace: str | None = None) -> Header:
    """The header of a payload, verified: steps 2 to 5 of the document's list."""
    need(len(data) >= 4096, "shorter than a header")
    length = 8 + struct.unpack_from("<Q", data)[0]
    need(length % 4096 == 0 and length <= 4 << 20 and length <= len(data), "impossible header length")
    head = bytes(data[:length])
    need(head[8:33] == OPENING, "not a segment")
    need(head[33:49].decode("ascii", "replace") == header_checksum(head), "checksum of the header")
    document = json.loads(head[8:].decode(), object_pairs_hook=once)
    (first, strings), *tensors = document.items()
    need(first == "__metadata__" and next(iter(strings)) == "xxh3", "order of the metadata")
    del strings["xxh3"]
    names = {*_INTEGERS, *_TEXTS, "slots"}
    need({*strings, "cost_us"} == names, "names of the metadata")
    meta = {name: text if name in _TEXTS else json.loads(text) for name, text in strings.items()}
    meta.setdefault("cost_us", 0)
    for name, least in _INTEGERS.items():
        need(type(meta[name]) is int and meta[name] >= least, name)
    need(meta["format"] == 1 and meta["rank"] < meta["ranks"] <= 255, "format or ranks")
    need(meta["kind"] in ("kv", "ec") and meta["codec"] in CODECS, "kind or codec")
    need(_HEX16.fullmatch(meta["segment"]) and max(meta["depth"], meta["created_s"]) < 1 << 32, "segment")
    need(meta["namespace"].isascii() and namespace_id(meta["namespace"]) == meta["namespace_id"], "namespace")
    need(namespace in (None, meta["namespace_id"]), "another namespace")
    need(1 <= len(meta["slots"]) == len(tensors) <= 65535, "slots")
    slots, offset = [], 0
    for said, (name, tensor) in zip(meta.pop("slots"), tensors, strict=True):
        slots.append(_slot(said, name, tensor, length, offset))
        offset = tensor["data_offsets"][1]
    need(len({slot.key for slot in slots}) == len(slots), "a key twice")
    return Header(length, meta, tuple(slots))


def _slot(said: dict[str, Any], name: str, tensor: dict[str, Any], data_start: int, offset: int) -> Slot:
    need(set(said) == {"key", "codec", "dtype", "shape", "raw_bytes", "xxh3"}, "members of a slot")
    need(set(tensor) == {"dtype", "shape", "data_offsets"} and name == said["key"], "tensor")
    need(re.fullmatch("([0-9a-f]{2}){18,66}", name) and _HEX16.fullmatch(said["xxh3"]), "key or checksum")
    start, end = tensor["data_offsets"]
    stored, raw, dtype = end - start, said["raw_bytes"], said["dtype"]
    need(start == offset, "a gap between slots")
    need(dtype in WIDTHS and raw == int(np.prod(said["shape"], dtype=object)) * WIDTHS[dtype], "raw_bytes")
    if said["codec"] == "none":
        need(stored == raw and (tensor["dtype"], tensor["shape"]) == (dtype, said["shape"]), "plain slot")
    else:
        need(said["codec"] in CODECS and 0 < stored < raw, "compressed slot")
        need((tensor["dtype"], tensor["shape"]) == ("U8", [stored]), "compressed tensor")
        need(said["codec"] == "lz4" or dtype in LAYOUTS, "planes of this dtype")
    return Slot(
        bytes.fromhex(name),
        said["codec"],
        dtype,
        tuple(said["shape"]),
        raw,
        said["xxh3"],
        data_start + start,
        data_start + end,
    )


def decode(stored: bytes, slot: Slot) -> bytes:
    """The raw bytes of one slot, verified."""
    need(
        slot_checksum(stored, slot.key.hex(), slot.codec, slot.dtype, slot.shape) == slot.xxh3,
        "checksum of a slot",
    )
    if slot.codec == "none":
        return stored
    if slot.codec == "lz4":
        return unlz4(stored, slot.raw_bytes)
    return unplanes(stored, slot.dtype, slot.raw_bytes)


def unlz4(stored: bytes, nbytes: int) -> bytes:
    raw: bytes = lz4.block.decompress(stored, uncompressed_size=nbytes)
    need(len(raw) == nbytes, "length of an LZ4 block")
    return raw


#: Bytes of an element; (width, lowest bit) of every field.
LAYOUTS = {"BF16": (2, [(4, 0)]), "F32": (4, [(4, 0)]), "F16": (2, [(4, 0), (2, 4), (1, 6)])}


def full_sizes(dtype: str, n: int) -> list[int]:
    width, fields = LAYOUTS[dtype]
    return [n] * width + [-(-n // (8 // bits)) for bits, _ in fields]


def unplanes(stored: bytes, dtype: str, nbytes: int) -> bytes:
    width, fields = LAYOUTS[dtype]
    n, rest = divmod(nbytes, width)
    full = full_sizes(dtype, n)
    need(not rest and len(stored) >= 4 * len(full), "planes")
    sizes = struct.unpack_from(f"<{len(full)}I", stored)
    need(4 * len(full) + sum(sizes) == len(stored), "sizes of planes")
    parts, at = [], 4 * len(full)
    for size, whole in zip(sizes, full, strict=True):
        need(size <= whole, "a part larger than it can be")
        piece = stored[at : at + size]
        parts.append(np.frombuffer(piece if size == whole else unlz4(piece, whole), np.uint8))
        at += size
    u = parts[width - 1].astype(np.uint16)
    for (bits, lowest), field in zip(fields, parts[width:], strict=True):
        numbers = np.concatenate([field >> shift & ((1 << bits) - 1) for shift in range(0, 8, bits)])[:n]
        u = u + (numbers.astype(np.uint16) << lowest)
    u &= 0xFF
    top = ((u >> 1) | (u << 7)) & 0xFF
    planes = [*parts[: width - 1], top.astype(np.uint8)]
    return np.stack(planes, axis=1).tobytes()


def planes(raw: bytes, dtype: str, c: int) -> bytes:
    """A stored form, with any number `c` that the fields are relative to."""
    width, fields = LAYOUTS[dtype]
    columns = np.frombuffer(raw, np.uint8).reshape(-1, width)
    n = len(columns)
    top = columns[:, width - 1].astype(np.uint16)
    u = ((top << 1) | (top >> 7)) & 0xFF
    low = (u - c) & ((1 << sum(bits for bits, _ in fields)) - 1)
    parts = [columns[:, k].tobytes() for k in range(width - 1)] + [
        ((u - low) & 0xFF).astype(np.uint8).tobytes()
    ]
    for bits, lowest in fields:
        h = -(-n // (8 // bits))
        numbers = np.zeros(h * (8 // bits), np.uint16)
        numbers[:n] = low >> lowest & ((1 << bits) - 1)
        field = np.zeros(h, np.uint16)
        for number, shift in enumerate(range(0, 8, bits)):
            field |= numbers[number * h : (number + 1) * h] << shift
        parts.append(field.astype(np.uint8).tobytes())
    packed = [lz4.block.compress(part, store_size=False) for part in parts]
    stored = [small if len(small) < len(part) else part for small, part in zip(packed, parts, strict=True)]
    return struct.pack(f"<{len(stored)}I", *map(len, stored)) + b"".join(stored)


def compress(raw: bytes, codec: str, dtype: str) -> tuple[bytes, str]:
    forms = [(raw, "none")]
    if raw and codec != "none":
        forms.append((lz4.block.compress(raw, store_size=False), "lz4"))
        if codec == "planes-lz4" and dtype in LAYOUTS:
            forms += [(planes(raw, dtype, c), "planes-lz4") for c in range(0, 256, 16)]
    return min(
        (one for one in forms if one[1] == "none" or len(one[0]) < len(raw)), key=lambda one: len(one[0])
    )


@dataclass(frozen=True)
class Tensor:
    key: bytes
    dtype: str
    shape: tuple[int, ...]
    raw: bytes


def write_segment(
    tensors: Sequence[Tensor],
    *,
    namespace: str,
    segment: bytes,
    created_s: int,
    rank: int = 0,
    ranks: int = 1,
    depth: int = 0,
    cost_us: int = 0,
) -> bytes:
    """A payload. `namespace` is its canonical JSON; `cost_us` is a rounded cost."""
    described = json.loads(namespace)
    slots, entries, stored, offset = [], {}, [], 0
    for one in tensors:
        data, used = compress(one.raw, described["codec"], one.dtype)
        key, shape = one.key.hex(), list(one.shape)
        xxh3 = slot_checksum(data, key, used, one.dtype, shape)
        slots.append(
            {
                "key": key, "codec": used, "dtype": one.dtype, "shape": shape, "raw_bytes": len(one.raw),
                "xxh3": xxh3,
            }
        )  # fmt: skip
        plain = used == "none"
        entries[key] = {
            "dtype": one.dtype if plain else "U8",
            "shape": shape if plain else [len(data)],
            "data_offsets": [offset, offset + len(data)],
        }
        stored.append(data)
        offset += len(data)
    meta = {
        "xxh3": "0" * 16, "format": "1", "segment": segment.hex(), "namespace_id": namespace_id(namespace),
        "namespace": namespace, "kind": described["kind"], "rank": str(rank), "ranks": str(ranks),
        "codec": described["codec"], "depth": str(depth), "created_s": str(created_s),
        "writer": "second/1", "slots": json.dumps(slots, separators=(",", ":")),
    }  # fmt: skip
    if cost_us:
        meta["cost_us"] = str(cost_us)
    text = json.dumps({"__metadata__": meta, **entries}, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // 4096) * 4096
    head = struct.pack("<Q", length - 8) + text.ljust(length - 8, b" ")
    return head[:33] + header_checksum(head).encode() + head[49:] + b"".join(stored)


def put(root: Path, name: str, payload: bytes) -> None:
    """Into a folder: written beside its place, then renamed."""
    place, temporary = root / name, root / ".tmp" / secrets.token_hex(16)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_bytes(payload)
    os.rename(temporary, place)


# Records


@dataclass(frozen=True)
class Record:
    slots: int
    codec: str
    cost_us: int
    created_s: int
    depth: int
    raw_bytes: int
    #: Per rank: data start and the slots' stored sizes.
    parts: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def nbytes(self) -> int:
        return sum(start + sum(sizes) for start, sizes in self.parts)


def pack_cost(cost_us: int) -> int:
    shift = max(0, cost_us.bit_length() - 11)
    return 0xFFFF if shift > 31 else shift << 11 | cost_us >> shift


def unpack_cost(packed: int) -> int:
    return (packed & 0x7FF) << (packed >> 11)


def is_uniform(record: Record) -> bool:
    sizes = [set(one) for _, one in record.parts]
    return record.slots == 1 or (record.codec == "none" and all(len(one) == 1 for one in sizes))


def pack_head(record: Record, ranks: int) -> bytes:
    return struct.pack(
        "<BBHBBHIIQ",
        1,
        int(is_uniform(record)),
        record.slots,
        ranks,
        CODECS.index(record.codec),
        pack_cost(record.cost_us),
        record.created_s,
        record.depth,
        record.raw_bytes,
    )


def pack_parts(record: Record) -> bytes:
    out = b""
    for start, sizes in record.parts:
        shown = sizes[:1] if is_uniform(record) else sizes
        out += struct.pack(f"<{1 + len(shown)}I", start, *shown)
    return out


def unpack_record(data: bytes) -> Record:
    need(len(data) >= 24, "a short record")
    version, flags, slots, ranks, codec, cost, created, depth, raw = struct.unpack_from("<BBHBBHIIQ", data)
    need(version == 1 and slots and ranks and codec < len(CODECS), "a record of another version")
    count = 1 if flags & 1 else slots
    need(len(data) == 24 + ranks * 4 * (1 + count), "length of a record")
    parts = []
    for rank in range(ranks):
        start, *sizes = struct.unpack_from(f"<{1 + count}I", data, 24 + rank * 4 * (1 + count))
        parts.append((start, tuple(sizes) * (slots if flags & 1 else 1)))
    return Record(slots, CODECS[codec], unpack_cost(cost), created, depth, raw, tuple(parts))


def record_of(headers: Sequence[Header]) -> Record:
    """The record of a segment, or of one rank's part, by the headers."""
    meta = headers[0].meta
    return Record(
        len(headers[0].slots),
        meta["codec"],
        unpack_cost(pack_cost(meta["cost_us"])),
        meta["created_s"],
        meta["depth"],
        sum(slot.raw_bytes for slot in headers[0].slots) if meta["ranks"] == 1 else 0,
        tuple((one.data_start, tuple(slot.end - slot.start for slot in one.slots)) for one in headers),
    )


def agreement(digests: bytes, record: Record, ranks: int) -> bytes:
    return xxhash.xxh3_64_intdigest(digests).to_bytes(8, "big") + pack_head(record, ranks)


def worth(kind: str, record: Record) -> int:
    if kind != "ec" or not record.nbytes:
        return 0
    return min(15, int(np.log2(1 + record.cost_us * 1024 / record.nbytes)))


def score(minute: int, depth: int, worth: int) -> float:
    return minute + 10 * worth - (min(depth, (1 << 22) - 1) * 16 + worth) / (1 << 26)


def unscore(value: float) -> tuple[int, int, int]:
    """Minute of the last use, depth, worth."""
    keep = -int(-value // 1)
    x = round((keep - value) * (1 << 26))
    return keep - 10 * (x % 16), x // 16, x % 16


# The index


@dataclass(frozen=True)
class Run:
    start: int
    segment: bytes
    slot: int
    count: int
    record: Record


def simple_match(
    digests: bytes,
    entry: Callable[[bytes], tuple[bytes, int] | None],
    record: Callable[[bytes], Record | None],
) -> list[Run]:
    """The document's first way: block by block until one is not present."""
    runs: list[Run] = []
    for position in range(len(digests) // 16):
        found = entry(digests[16 * position : 16 * position + 16])
        known = record(found[0]) if found else None
        if found is None or known is None or found[1] >= known.slots:
            break
        last = runs[-1] if runs else None
        if last and (last.segment, last.slot + last.count) == found:
            runs[-1] = Run(last.start, last.segment, last.slot, last.count + 1, last.record)
        else:
            runs.append(Run(position, found[0], found[1], 1, known))
    return runs


def split_value(value: bytes) -> tuple[int, int, bytes, bytes, Record]:
    """Bytes, slots, first digest, agreement and record of a value of `segs`."""
    nbytes, slots, rest = value.split(b":", 2)
    return int(nbytes), int(slots), rest[:16], rest[16:48], unpack_record(rest[24:])


def bucket_bits(expected: int) -> int:
    return min(24, (max(1, -(-expected // 64)) - 1).bit_length())


#: The chunks of the scripts that are used here, as the document lists them.
SCRIPTS = {
    "register": (),
    "claim": ("walk",),
    "commit": ("changes", "score", "generations"),
    "touch": ("score",),
    "evict": ("changes", "grace", "drop"),
    "note": (),
}


def mark(one: bytes) -> tuple[int, set[int]]:
    """Of a digest: the number that its own line is made of, and the bits of its mark."""
    m = int.from_bytes(one[4:8], "big")
    return int.from_bytes(one[:4], "big"), {m % 512, m // 512 % 512, m // 512**2 % 512}


def window_name(now_s: float, window_s: float, sketch_bytes: int, back: int = 0) -> str:
    return f"{sketch_bytes}:{window_s:.12g}:{int(now_s // window_s) - back}"


class RedisStore:
    """An index in Redis."""

    def __init__(self, client: redis.Redis, scripts: Path) -> None:
        """`client` answers with bytes, by RESP2; `scripts` is the folder with the .lua files."""
        self.client = client
        self._scripts = scripts

    def run(self, name: str, namespace: str, *args: bytes | str | int | float) -> Any:
        files = [self._scripts / f"{chunk}.lua" for chunk in ("keys", *SCRIPTS[name], name)]
        text = "\n".join(file.read_text() for file in files)
        return self.client.eval(text, 1, f"kvs:{{{namespace}}}:meta", *args)

    def key(self, namespace: str, rest: str) -> str:
        return f"kvs:{{{namespace}}}:{rest}"

    def namespaces(self) -> dict[str, str]:
        found = {}
        for name in self.client.smembers("kvs:ns"):
            meta = self.client.hgetall(self.key(name.decode(), "meta"))
            if b"bucket_bits" in meta and meta[b"schema"] == b"2":
                text = meta[b"json"].decode()
                need(namespace_id(text) == name.decode(), "namespace under another id")
                found[name.decode()] = text
        return found

    def account(self, namespace: str) -> dict[str, int]:
        meta = self.client.hgetall(self.key(namespace, "meta"))
        return {
            name: int(meta.get(name.encode(), 0))
            for name in ("bytes", "segments", "blocks", "pinned", "cost")
        }

    def records(self, namespace: str) -> dict[bytes, Record]:
        values = self.client.hgetall(self.key(namespace, "segs"))
        return {segment: split_value(value)[4] for segment, value in values.items()}

    def trash(self, namespace: str) -> dict[bytes, tuple[int, int]]:
        """Segment -> second of deletion, ranks."""
        found = self.client.zrange(self.key(namespace, "trash"), 0, -1, withscores=True)
        return {segment: (int(due), round(due % 1 * 256)) for segment, due in found}

    def order(self, namespace: str, key: str = "lru") -> list[tuple[bytes, tuple[int, int, int]]]:
        found = self.client.zrange(self.key(namespace, key), 0, -1, withscores=True)
        return [(segment, unscore(one)) for segment, one in found]

    def events(self, namespace: str) -> list[dict[str, bytes]]:
        found = self.client.xrange(self.key(namespace, "events"))
        return [{name.decode(): value for name, value in fields.items()} for _, fields in found]

    def bucket(self, namespace: str, one: bytes, bits: int) -> tuple[str, bytes]:
        number = int.from_bytes(one[:4], "big") >> (32 - bits)
        return self.key(namespace, f"b:{number:x}"), one[bits // 8 :]

    def bits(self, namespace: str) -> int:
        return int(self.client.hget(self.key(namespace, "meta"), "bucket_bits"))

    def entries(self, namespace: str) -> dict[bytes, tuple[bytes, int]]:
        """Every entry, dangling ones included."""
        bits, found = self.bits(namespace), {}
        for number in range(1 << bits):
            for field, value in self.client.hgetall(self.key(namespace, f"b:{number:x}")).items():
                first = (number >> bits % 8).to_bytes(bits // 8, "big")
                found[first + field] = value[:8], int.from_bytes(value[8:], "big")
        return found

    def match(self, namespace: str, digests: bytes) -> list[Run]:
        bits = self.bits(namespace)

        def entry(one: bytes) -> tuple[bytes, int] | None:
            value = self.client.hget(*self.bucket(namespace, one, bits))
            return (value[:8], int.from_bytes(value[8:], "big")) if value and len(value) == 10 else None

        def record(segment: bytes) -> Record | None:
            value = self.client.hget(self.key(namespace, "segs"), segment)
            return split_value(value)[4] if value else None

        return simple_match(digests, entry, record)

    def register(self, text: str, expected: int) -> str:
        name, described = namespace_id(text), json.loads(text)
        self.client.sadd("kvs:ns", name)
        now = round(time.time(), 3)
        answer = self.run(
            "register", name, text, described["kind"], described["tenant"], bucket_bits(expected), now
        )
        need(answer != 2, "a newer schema")
        if answer == 1:
            self.client.sadd("kvs:ns", name)
        return name

    def claim(self, namespace: str, digests: bytes, segment: bytes) -> tuple[int, bool]:
        present, granted = self.run("claim", namespace, digests, segment, 30_000)
        return present, bool(granted)

    def commit(self, namespace: str, header: Header) -> int:
        """By the script; one rank."""
        meta, record = header.meta, record_of([header])
        digests, ranks = header.digests, meta["ranks"]
        return int(
            self.run(
                "commit",
                namespace,
                bytes.fromhex(meta["segment"]),
                digests,
                digests[:16] + agreement(digests, record, ranks),
                pack_parts(record),
                record.nbytes,
                meta["rank"],
                ranks,
                3600,
                meta["created_s"] // 60,
                worth(meta["kind"], record),
                4096,
            )
        )

    def commit_by_hand(self, namespace: str, header: Header) -> bool:
        """A segment of one rank, without the script: the effects that the document lists, in one step."""
        meta, record, digests = header.meta, record_of([header]), header.digests
        need(meta["ranks"] == 1, "one rank only")
        segment, first = bytes.fromhex(meta["segment"]), digests[:16]
        place = lambda rest: self.key(namespace, rest)  # noqa: E731
        claim = place(f"claim:{first.hex()}")
        with self.client.pipeline() as pipe:
            pipe.watch(place("meta"), place("segs"), place("trash"), place(f"part:{segment.hex()}"), claim)
            fields = pipe.hmget(place("meta"), "bucket_bits", "epoch", "drained")
            need(fields[0] is not None, "unknown namespace")
            bits, epoch, drained = (int(field or 0) for field in fields)
            olds = [place(f"old:{number}") for number in range(drained, epoch)]
            gone = pipe.zscore(place("trash"), segment) is not None
            if (
                gone
                or any(pipe.hexists(old, segment) for old in olds)
                or pipe.hexists(place("segs"), segment)
            ):
                return False
            held = pipe.get(claim) == segment
            pipe.multi()
            for slot in range(len(digests) // 16):
                bucket, field = self.bucket(namespace, digests[16 * slot : 16 * slot + 16], bits)
                pipe.hset(bucket, field, segment + slot.to_bytes(2, "big"))
            value = b"%d:%d:" % (record.nbytes, record.slots) + first
            pipe.hset(place("segs"), segment, value + agreement(digests, record, 1) + pack_parts(record))
            minute, extra = meta["created_s"] // 60, worth(meta["kind"], record)
            pipe.execute_command("ZADD", place("lru"), f"{score(minute, record.depth, extra):.17g}", segment)
            sums = {"bytes": record.nbytes, "segments": 1, "blocks": record.slots, "cost": record.cost_us}
            for name, amount in {**sums, "changes": 1}.items():
                pipe.hincrby(place("meta"), name, amount)
            event = {
                "op": "commit", "segment": segment, "first": first, "last": digests[-16:],
                "depth": record.depth, "slots": record.slots, "bytes": record.nbytes, "rule": "",
            }  # fmt: skip
            pipe.xadd(place("events"), event, maxlen=4096)
            pipe.zrem(place("ghosts"), first)
            if held:
                pipe.delete(claim)
            pipe.execute()
        return True

    def note(self, namespace: str, digests: bytes, now_s: float, window_s: float, sketch_bytes: int) -> int:
        blocks = [digests[at : at + 16] for at in range(0, len(digests), 16)]
        masks = b""
        for first in range(0, len(blocks), 32):
            bits = set().union(*(mark(one)[1] for one in blocks[first : first + 32]))
            masks += sum(1 << 511 - bit for bit in bits).to_bytes(64, "big")
        marks = b"".join(one[:8] for one in blocks)
        windows = [f"use:{window_name(now_s, window_s, sketch_bytes, back)}" for back in (0, 1)]
        return int(self.run("note", namespace, marks, masks, *windows, sketch_bytes // 64, 1000))

    def noted(self, namespace: str, digests: bytes, window: str) -> int:
        """Leading blocks that a window's sketch has, by its bytes."""
        sketch, size = self.client.get(self.key(namespace, f"use:{window}")), int(window.split(":")[0])
        if sketch is None:
            return 0

        def has(line: int, bits: set[int]) -> bool:
            at = line % (size // 64) * 64
            return all(sketch[at + bit // 8] >> 7 - bit % 8 & 1 for bit in bits)

        for position in range(len(digests) // 16):
            own, bits = mark(digests[16 * position : 16 * position + 16])
            home = position // 32 * 32 * 16
            if not has(mark(digests[home : home + 16])[0], bits) and not has(own, bits):
                return position
        return len(digests) // 16

    def evict(self, namespace: str, segments: Sequence[bytes], *, at_s: int, grace_s: int) -> int:
        deletion = f"{at_s}:{grace_s}"
        return int(self.run("evict", namespace, b"".join(segments), deletion, "admin", 4096, -1))


class SqliteStore:
    """An index in a file."""

    def __init__(self, path: Path) -> None:
        self.db = sqlite3.connect(path, isolation_level=None, timeout=2)
        need(
            self._pragma("application_id") == 0x6B767369 and self._pragma("user_version") == 3, "not an index"
        )

    def _pragma(self, name: str) -> int:
        return int(self.db.execute(f"PRAGMA {name}").fetchone()[0])

    def _place(self, namespace: str) -> tuple[int, int]:
        """The namespace's key and the number of its visible generation."""
        row = self.db.execute("SELECT key, generation FROM namespaces WHERE id = ?", (namespace,)).fetchone()
        need(row, "unknown namespace")
        return int(row[0]), int(row[1])

    def namespaces(self) -> dict[str, str]:
        return dict(self.db.execute("SELECT id, json FROM namespaces").fetchall())

    def account(self, namespace: str) -> dict[str, int]:
        row = self.db.execute(
            "SELECT nbytes, segments, blocks, pinned, cost FROM namespaces WHERE id = ?", (namespace,)
        ).fetchone()
        return dict(zip(("bytes", "segments", "blocks", "pinned", "cost"), row, strict=True))

    def records(self, namespace: str) -> dict[bytes, Record]:
        number = self._place(namespace)[1]
        rows = self.db.execute("SELECT id, record FROM segments WHERE namespace = ?", (number,))
        return {segment: unpack_record(record) for segment, record in rows}

    def trash(self, namespace: str) -> dict[bytes, tuple[int, int]]:
        key = self._place(namespace)[0]
        rows = self.db.execute("SELECT id, due, ranks FROM trash WHERE namespace = ?", (key,))
        return {segment: (due, ranks) for segment, due, ranks in rows}

    def pinned(self, namespace: str) -> set[bytes]:
        number = self._place(namespace)[1]
        rows = self.db.execute("SELECT id FROM segments WHERE namespace = ? AND pinned = 1", (number,))
        return {segment for (segment,) in rows}

    def entries(self, namespace: str) -> dict[bytes, tuple[bytes, int]]:
        key = self._place(namespace)[0]
        rows = self.db.execute("SELECT digest, segment, slot FROM blocks WHERE namespace = ?", (key,))
        return {one: (segment, slot) for one, segment, slot in rows}

    def match(self, namespace: str, digests: bytes) -> list[Run]:
        self.db.execute("BEGIN")
        try:
            entries, records = self.entries(namespace), self.records(namespace)
            return simple_match(digests, entries.get, records.get)
        finally:
            self.db.execute("ROLLBACK")

    def commit(self, namespace: str, header: Header) -> bool:
        """A segment of one rank."""
        meta, record, digests = header.meta, record_of([header]), header.digests
        segment, first = bytes.fromhex(meta["segment"]), digests[:16]
        need(meta["ranks"] == 1, "one rank only")
        self.db.execute("BEGIN IMMEDIATE")
        try:
            key, number = self._place(namespace)
            if self._is_taken(key, segment):
                self.db.execute("ROLLBACK")
                return False
            agreed = agreement(digests, record, 1)
            used, extra = meta["created_s"] // 60, worth(meta["kind"], record)
            row = {
                "namespace": number, "id": segment, "checksum": agreed[:8],
                "record": agreed[8:] + pack_parts(record), "nbytes": record.nbytes, "slots": record.slots,
                "ranks": 1, "used": used, "depth": record.depth, "cost": record.cost_us, "worth": extra,
                "keep": used + 10 * extra, "first": first,
            }  # fmt: skip
            self._insert("segments", row)
            for slot in range(record.slots):
                one = digests[16 * slot : 16 * slot + 16]
                self.db.execute(
                    "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?)", (key, one, segment, slot)
                )
            self.db.execute(
                "UPDATE namespaces SET nbytes = nbytes + ?, segments = segments + 1, blocks = blocks + ?, "
                "cost = cost + ? WHERE key = ?",
                (record.nbytes, record.slots, record.cost_us, key),
            )
            self._event(key, segment, digests, record)
            self.db.execute("DELETE FROM ghosts WHERE namespace = ? AND digest = ?", (key, first))
            self.db.execute(
                "DELETE FROM claims WHERE namespace = ? AND digest = ? AND segment = ?", (key, first, segment)
            )
            self.db.execute("COMMIT")
        except BaseException:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
            raise
        return True

    def _is_taken(self, key: int, segment: bytes) -> bool:
        """Whether the segment is in the trash, visible, invalidated or incomplete."""
        own = "namespace IN (SELECT number FROM generations WHERE namespace = ?)"
        return any(
            self.db.execute(f"SELECT 1 FROM {table} WHERE {where} AND id = ?", (key, segment)).fetchone()
            for table, where in (("trash", "namespace = ?"), ("segments", own), ("parts", own))
        )

    def _event(self, key: int, segment: bytes, digests: bytes, record: Record) -> None:
        now = time.time()
        newest = self.db.execute("SELECT max(number) FROM events WHERE namespace = ?", (key,)).fetchone()[0]
        row = {
            "namespace": key, "number": int(now * 1000) if newest is None else newest + 1, "at": now,
            "op": "commit", "segment": segment, "first": digests[:16], "last": digests[-16:],
            "depth": record.depth, "slots": record.slots, "nbytes": record.nbytes, "rule": None,
        }  # fmt: skip
        self._insert("events", row)

    def _insert(self, table: str, row: dict[str, Any]) -> None:
        marks = ", ".join("?" * len(row))
        self.db.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values()))


# Reading through an index


def load(root: Path, namespace: str, run: Run, keys: Sequence[bytes], rank: int = 0) -> Iterator[bytes]:
    """The raw bytes of a run's slots, one rank's part of each, verified in the document's order."""
    need(rank < len(run.record.parts), "no such rank")
    need(run.slot + run.count <= run.record.slots, "slots beyond the record")
    data = (root / payload_name(namespace, run.segment, rank)).read_bytes()
    header = read_header(data, namespace=namespace)
    meta = header.meta
    need((meta["segment"], meta["rank"]) == (run.segment.hex(), rank), "another payload's name")
    need(meta["ranks"] == len(run.record.parts), "ranks of record and header")
    need(record_of([header]).parts[0] == run.record.parts[rank], "layout of record and header")
    slots = header.slots[run.slot : run.slot + run.count]
    need([slot.key for slot in slots] == list(keys), "other blocks than asked for")
    for slot in slots:
        yield decode(data[slot.start : slot.end], slot)
