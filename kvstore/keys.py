"""Identity: namespace ids, content keys, digests, segment ids and payload names. Pure code.

content key   what a slot is called inside a segment: vLLM's chained block hash followed by the
              2-byte big-endian group, or SHA-256 of an item's identifier followed by two zeros.
digest        16 bytes, what the index is keyed on: the first 16 bytes of the content hash, with the
              group exclusive-ored into the last two. For a fixed group that is a bijection of the
              hash's first 128 bits, so groups can't alias more easily than hashes collide.
segment id    8 fresh random bytes per save, so deleting an old copy can never hit a newer one.
payload name  `<namespace id>/<2 hex>/<segment id>.<rank>`

The golden test tests/test_keys.py pins all of this; a change is a new format version.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Sequence
from typing import NewType

import numpy as np

from schemas.namespace import Namespace

NamespaceId = NewType("NamespaceId", str)  # 16 hex digits
ContentKey = NewType("ContentKey", bytes)  # content hash + 2-byte group
Digest = NewType("Digest", bytes)  # DIGEST_BYTES bytes
SegmentId = NewType("SegmentId", bytes)  # SEGMENT_ID_BYTES bytes

DIGEST_BYTES = 16
SEGMENT_ID_BYTES = 8
GROUP_BYTES = 2
MAX_GROUPS = 1 << 16

_NAME = re.compile(r"([0-9a-f]{16})/([0-9a-f]{2})/([0-9a-f]{16})\.(\d{1,5})")


def canonical_json(namespace: Namespace) -> str:
    """The one spelling of a namespace: sorted keys, no spaces, ASCII."""
    return json.dumps(
        namespace.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=True
    )


def namespace_id(namespace: Namespace) -> NamespaceId:
    """First 8 bytes of SHA-256 of the canonical JSON, in hex."""
    return namespace_id_of_json(canonical_json(namespace))


def namespace_id_of_json(text: str) -> NamespaceId:
    """The id that belongs to a canonical JSON text, as found in a segment's header."""
    return NamespaceId(hashlib.sha256(text.encode("ascii")).digest()[:8].hex())


def block_key(block_hash: bytes, group: int = 0) -> ContentKey:
    """Content key of one KV block. `block_hash` is at least 16 bytes (vLLM's are 16 or 32)."""
    if len(block_hash) < DIGEST_BYTES:
        raise ValueError(f"block hash of {len(block_hash)} bytes; at least {DIGEST_BYTES} are needed")
    return ContentKey(block_hash + group.to_bytes(GROUP_BYTES, "big"))


def item_key(identifier: str) -> ContentKey:
    """Content key of one encoder item.

    The identifier may be any string a client sent, lone surrogates included, so it is hashed and
    never used as a name. The prefix keeps it apart from any other use of SHA-256 on that string.
    """
    text = identifier.encode("utf-8", "surrogatepass")
    return ContentKey(hashlib.sha256(b"kvstore item\x00" + text).digest() + bytes(GROUP_BYTES))


def digest(key: ContentKey) -> Digest:
    """The index's 16 bytes for one content key."""
    return Digest(key[:14] + bytes((key[14] ^ key[-2], key[15] ^ key[-1])))


def digests(block_hashes: Sequence[bytes], group: int = 0) -> bytes:
    """Digests of a chain of block hashes of one length, packed: `len(block_hashes) * 16` bytes."""
    if not block_hashes:
        return b""
    if not 0 <= group < MAX_GROUPS:
        raise OverflowError(f"group {group}; at most {MAX_GROUPS} are told apart")
    # Of all of them: a long and a short one would add up, and shift what lies between.
    widths = set(map(len, block_hashes))
    width = widths.pop()
    if widths or width < DIGEST_BYTES:
        raise ValueError("block hashes must have one length of at least 16 bytes")
    packed = np.frombuffer(b"".join(block_hashes), dtype=np.uint8)
    # A copy also for group 0: tobytes() of a strided view takes four times as long.
    out = packed.reshape(-1, width)[:, :DIGEST_BYTES].copy()
    out[:, 14] ^= group >> 8
    out[:, 15] ^= group & 0xFF
    return out.tobytes()


def split_digests(packed: bytes) -> list[Digest]:
    """A packed blob of digests as a list."""
    return [Digest(packed[i : i + DIGEST_BYTES]) for i in range(0, len(packed), DIGEST_BYTES)]


def new_segment_id() -> SegmentId:
    """Eight random bytes."""
    return SegmentId(secrets.token_bytes(SEGMENT_ID_BYTES))


def payload_name(namespace: NamespaceId, segment: SegmentId, rank: int) -> str:
    """Where one rank's part of a segment lives in the payload store."""
    text = segment.hex()
    return f"{namespace}/{text[:2]}/{text}.{rank}"


def parse_payload_name(name: str) -> tuple[NamespaceId, SegmentId, int] | None:
    """The parts of a payload name, or None if `name` isn't one (a stranger's file)."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    namespace, fan, segment, rank = match.groups()
    if fan != segment[:2] or rank != str(int(rank)):
        return None
    return NamespaceId(namespace), SegmentId(bytes.fromhex(segment)), int(rank)
