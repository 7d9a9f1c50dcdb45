"""Segment files, read and written."""

from __future__ import annotations

import json
import os
import re
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tests.format.second.basics import CODECS, OPENING, WIDTHS, need
from tests.format.second.names import digest, namespace_id
from tests.format.second.planes import LAYOUTS, compress, unlz4, unplanes


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
