"""Identity: namespaces, block hashes, keys, digests, names; the digest of weights."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any


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


def bound_name(block_hash: bytes, contents: list[bytes]) -> bytes:
    chain = b""
    for one in contents:
        chain = hashlib.sha256(b"kvstore items\x00" + chain + one).digest()
    return hashlib.sha256(b"kvstore block\x00" + chain + block_hash).digest()[: len(block_hash)]


def item_key(content: bytes, salt: str = "") -> bytes:
    text = content + salt.encode("utf-8", "surrogatepass")
    return hashlib.sha256(b"kvstore item 2\x00" + text).digest() + b"\x00\x00"


def salt_id(salt: str) -> bytes:
    if not salt:
        return b""
    return hashlib.sha256(b"kvstore salt\x00" + salt.encode("utf-8", "surrogatepass")).digest()[:16]


def session_id(salt: bytes, name: str) -> bytes:
    text = bytes([len(salt)]) + salt + name.encode("utf-8", "surrogatepass")
    of_salt = hashlib.sha256(b"kvstore sessions\x00" + salt).digest()[:4]
    return of_salt + hashlib.sha256(b"kvstore session\x00" + text).digest()[:12]


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
