"""Segment files, read and written."""

from __future__ import annotations

import json
import os
import re
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tests.format.second.basics import CODECS, OPENING, WIDTHS, need
from tests.format.second.names import digest, namespace_id
from tests.format.second.planes import LAYOUTS, compress, unlz4, unplanes
from tests.format.second.signatures import (
    Foreign,
    check,
    decrypt,
    encrypt,
    header_mac,
    slot_digest,
    unwrap,
    wrap,
)


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
    #: What a signed or encrypted segment adds: its digest; its tag, number, data key, associated data.
    blake3: str | None = None
    sealed: tuple[str, int, bytes, str] | None = None


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
_SIGNED = {"mac", "key"}
_TEXTS = ("segment", "namespace_id", "namespace", "kind", "codec", "salt", "writer")
#: Digits of what proves a slot, and of a wrapped data key.
_DIGITS = {"blake3": 64, "tag": 32, "data_key": 80}
_HEX16, _HEX32 = re.compile("[0-9a-f]{16}"), re.compile("[0-9a-f]{32}")


def header_checksum(head: bytes) -> str:
    return f"{xxhash.xxh3_64_intdigest(head[:33] + b'0' * 16 + head[49:]):016x}"


def slot_checksum(stored: bytes, key: str, codec: str, dtype: str, shape: Sequence[int]) -> str:
    text = described(key, codec, dtype, shape)
    return f"{xxhash.xxh3_64_intdigest(stored, seed=xxhash.xxh3_64_intdigest(text.encode())):016x}"


def described(key: str, codec: str, dtype: str, shape: Sequence[int]) -> str:
    return f"{key}|{codec}|{dtype}|{','.join(str(one) for one in shape)}"


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    need(len({name for name, _ in pairs}) == len(pairs), "a member named twice")
    return dict(pairs)


def read_header(
    data: bytes,
    *,
    namespace: str | None = None,
    keys: Mapping[str, bytes] | None = None,
    unsigned: bool = False,
) -> Header:
    """The header of a payload, verified: steps 2 to 5 of the document's list."""
    need(len(data) >= 4096, "shorter than a header")
    length = 8 + struct.unpack_from("<Q", data)[0]
    need(length % 4096 == 0 and length <= 1 << 20 and length <= len(data), "impossible header length")
    head = bytes(data[:length])
    need(head[8:33] == OPENING, "not a segment")
    need(head[33:49].decode("ascii", "replace") == header_checksum(head), "checksum of the header")
    by = check(head, keys or {}, unsigned=unsigned)
    document = json.loads(head[8:].decode(), object_pairs_hook=once)
    (first, strings), *tensors = document.items()
    need(first == "__metadata__" and next(iter(strings)) == "xxh3", "order of the metadata")
    del strings["xxh3"]
    if int(strings.get("format", "1")) > 2:
        raise Foreign("a newer format")
    names = {*_INTEGERS, *_TEXTS, "slots"}
    sealed = "data_key" in strings
    if by is not None:
        names |= _SIGNED | ({"data_key"} if sealed else set())
        need((strings.pop("mac"), strings.pop("key")) == (head[58:122].decode(), by), "signature")
        names -= _SIGNED
    need({*strings, "cost_us", "salt"} == names, "names of the metadata")
    need(all(type(text) is str for text in strings.values()), "metadata that is no text")
    wrapped = strings.pop("data_key", None)
    need(wrapped is None or re.fullmatch(f"[0-9a-f]{{{_DIGITS['data_key']}}}", wrapped), "data key")
    meta = {name: text if name in _TEXTS else json.loads(text) for name, text in strings.items()}
    need("salt" not in meta or _HEX32.fullmatch(meta["salt"]), "id of a salt")
    meta.setdefault("salt", "")
    meta.setdefault("cost_us", 0)
    for name, least in _INTEGERS.items():
        need(type(meta[name]) is int and meta[name] >= least, name)
    need(meta["format"] == (2 if by is not None or meta["salt"] else 1), "format")
    need(meta["rank"] < meta["ranks"] <= 255, "ranks")
    need(meta["kind"] in ("kv", "ec") and meta["codec"] in CODECS, "kind or codec")
    need(_HEX16.fullmatch(meta["segment"]) and max(meta["depth"], meta["created_s"]) < 1 << 32, "segment")
    need(meta["namespace"].isascii() and namespace_id(meta["namespace"]) == meta["namespace_id"], "namespace")
    need(namespace in (None, meta["namespace_id"]), "another namespace")
    need(1 <= len(meta["slots"]) == len(tensors) <= 1024, "slots")
    data_key = unwrap(wrapped, by, keys or {}) if wrapped is not None and by is not None else None
    mine = f"{meta['namespace_id']}|{meta['segment']}|{meta['rank']}|"
    more = set() if by is None else {"tag"} if sealed else {"blake3"}
    slots, offset = [], 0
    for said, (key, tensor) in zip(meta.pop("slots"), tensors, strict=True):
        need(set(said) == {"key", "codec", "dtype", "shape", "raw_bytes", "xxh3", *more}, "members of a slot")
        slot = _slot(said, key, tensor, length, offset)
        need(
            all(re.fullmatch(f"[0-9a-f]{{{_DIGITS[name]}}}", said[name]) for name in more), "proof of a slot"
        )
        if data_key is not None:
            associated = mine + described(key, slot.codec, slot.dtype, slot.shape)
            slot = replace(slot, sealed=(said["tag"], len(slots), data_key, associated))
        slots.append(replace(slot, blake3=said.get("blake3")))
        offset = tensor["data_offsets"][1]
    need(len({slot.key for slot in slots}) == len(slots), "a key twice")
    return Header(length, meta, tuple(slots))


def _slot(said: dict[str, Any], name: str, tensor: dict[str, Any], data_start: int, offset: int) -> Slot:
    need(set(tensor) == {"dtype", "shape", "data_offsets"} and name == said["key"], "tensor")
    need(re.fullmatch("([0-9a-f]{2}){18,66}", name) and _HEX16.fullmatch(said["xxh3"]), "key or checksum")
    start, end = tensor["data_offsets"]
    stored, raw, dtype = end - start, said["raw_bytes"], said["dtype"]
    need(start == offset, "a gap between slots")
    need(dtype in WIDTHS and raw == int(np.prod(said["shape"], dtype=object)) * WIDTHS[dtype], "raw_bytes")
    if said["codec"] == "none":
        need(stored == raw and (tensor["dtype"], tensor["shape"]) == (dtype, said["shape"]), "plain slot")
    else:
        need(said["codec"] in CODECS and 0 < stored < raw <= 256 * stored, "compressed slot")
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
    if slot.blake3 is not None:
        text = described(slot.key.hex(), slot.codec, slot.dtype, slot.shape)
        need(slot_digest(stored, text) == slot.blake3, "digest of a slot")
    if slot.sealed is not None:
        tag, number, data_key, associated = slot.sealed
        stored = decrypt(stored, tag, data_key, number, associated)
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
    salt: bytes = b"",
    signed: tuple[str, bytes] | None = None,
    data_key: bytes | None = None,
) -> bytes:
    """A payload, signed with the key of that id, and encrypted with a data key. `namespace` is its canonical
    JSON; `cost_us` is a rounded cost, `salt` the id of one.
    """
    about = json.loads(namespace)
    slots, entries, stored, offset = [], {}, [], 0
    for one in tensors:
        data, used = compress(one.raw, about["codec"], one.dtype)
        key, shape = one.key.hex(), list(one.shape)
        text, proof = described(key, used, one.dtype, shape), {}
        if data_key is not None:
            associated = f"{namespace_id(namespace)}|{segment.hex()}|{rank}|{text}"
            data, proof["tag"] = encrypt(data, data_key, len(slots), associated)
        elif signed is not None:
            proof["blake3"] = slot_digest(data, text)
        xxh3 = slot_checksum(data, key, used, one.dtype, shape)
        slots.append(
            {
                "key": key, "codec": used, "dtype": one.dtype, "shape": shape, "raw_bytes": len(one.raw),
                "xxh3": xxh3, **proof,
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
        "xxh3": "0" * 16, **({"mac": "0" * 64, "key": signed[0]} if signed else {}),
        "format": "2" if signed or salt else "1", "segment": segment.hex(),
        "namespace_id": namespace_id(namespace), "namespace": namespace,
        "kind": about["kind"], "rank": str(rank), "ranks": str(ranks),
        "codec": about["codec"], "depth": str(depth), "created_s": str(created_s),
        "writer": "second/1", "slots": json.dumps(slots, separators=(",", ":")),
    }  # fmt: skip
    if cost_us:
        meta["cost_us"] = str(cost_us)
    if salt:
        meta["salt"] = salt.hex()
    if signed and data_key is not None:
        meta["data_key"] = wrap(data_key, signed[1])
    text = json.dumps({"__metadata__": meta, **entries}, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // 4096) * 4096
    head = struct.pack("<Q", length - 8) + text.ljust(length - 8, b" ")
    if signed:
        head = head[:58] + header_mac(head, signed[1]).encode() + head[122:]
    return head[:33] + header_checksum(head).encode() + head[49:] + b"".join(stored)


def put(root: Path, name: str, payload: bytes) -> None:
    """Into a folder: written beside its place, then renamed."""
    place, temporary = root / name, root / ".tmp" / secrets.token_hex(16)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_bytes(payload)
    os.rename(temporary, place)
