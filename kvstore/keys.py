"""Identity: namespace ids, content keys, digests, segment ids and payload names. Pure code.

content key   the name of a slot inside a segment: a block's name followed by the 2-byte big-endian group, or
              SHA-256 of an item's content and salt followed by two zeros. A block's name is vLLM's chained
              block hash; of one behind a multimodal item, a hash of that and of the items' contents.
digest        16 bytes, the key in the index: the first 16 bytes of the content hash, with the
              group exclusive-ored into the last two. For a fixed group that is a bijection of the
              hash's first 128 bits, so groups can't alias more easily than hashes collide.
salt id       16 bytes: the first of SHA-256 of a request's `cache_salt`; empty without one.
session id    16 bytes: 4 that all sessions of a salt share, then 12 of SHA-256 of the salt's id and the
              session's name. Names stay in the process that gets them.
segment id    7 fresh random bytes per save, so deleting an old copy can never hit a newer one, and a tag:
              byte TAG_AT of its chain's first digest, by which an index in shards knows where the segment is.
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
from schemas.records import SALT_ID_BYTES, WRITER_ID_BYTES

NamespaceId = NewType("NamespaceId", str)  # 16 hex digits
ContentKey = NewType("ContentKey", bytes)  # content hash + 2-byte group
Digest = NewType("Digest", bytes)  # DIGEST_BYTES bytes
SegmentId = NewType("SegmentId", bytes)  # SEGMENT_ID_BYTES bytes
SaltId = NewType("SaltId", bytes)  # SALT_ID_BYTES bytes, or none
WriterId = NewType("WriterId", bytes)  # WRITER_ID_BYTES bytes
PlaceId = NewType("PlaceId", bytes)  # WRITER_ID_BYTES bytes
SessionId = NewType("SessionId", bytes)  # SESSION_ID_BYTES bytes, or none

NO_SALT = SaltId(b"")
NO_SESSION = SessionId(b"")
SESSION_ID_BYTES = 16
#: Bytes at a session id's start that its salt decides alone.
SESSION_SALT_BYTES = 4
#: A session's name has at most so many characters.
SESSION_NAME_CHARS = 256
DIGEST_BYTES = 16
SEGMENT_ID_BYTES = 8
GROUP_BYTES = 2
#: The byte of a chain's first digest that is the tag. It is the last byte without a part of the group, so
#: that chains of a request's groups lie together. It is also none of the bytes that say in which bucket an
#: entry is.
TAG_AT = 13
CONTENT_BYTES = 32
MAX_GROUPS = 1 << 16

_NAME = re.compile(r"([0-9a-f]{16})/([0-9a-f]{2})/([0-9a-f]{16})\.(\d{1,5})")


def canonical_json(namespace: Namespace) -> str:
    """Returns the one spelling of a namespace: sorted keys, no spaces, ASCII."""
    return json.dumps(
        namespace.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=True
    )


def namespace_id(namespace: Namespace) -> NamespaceId:
    """Returns the first 8 bytes of SHA-256 of the canonical JSON, in hex."""
    return namespace_id_of_json(canonical_json(namespace))


def namespace_id_of_json(text: str) -> NamespaceId:
    """Returns the id that belongs to a canonical JSON text, as found in a segment's header."""
    return NamespaceId(hashlib.sha256(text.encode("ascii")).digest()[:8].hex())


def block_key(block_hash: bytes, group: int = 0) -> ContentKey:
    """Returns the content key of one KV block. `block_hash` has at least 16 bytes (vLLM's have 16 or 32).

    Raises ValueError if it is shorter.
    """
    if len(block_hash) < DIGEST_BYTES:
        raise ValueError(f"got a block hash of {len(block_hash)} bytes, expected at least {DIGEST_BYTES}")
    return ContentKey(block_hash + group.to_bytes(GROUP_BYTES, "big"))


def salt_id(salt: str) -> SaltId:
    """Returns the id of a request's `cache_salt` in headers and in the index; empty for an empty salt.

    A salt is any string, lone surrogates included. An attacker who guesses the salt can recognise it by its
    id.
    """
    if not salt:
        return NO_SALT
    text = salt.encode("utf-8", "surrogatepass")
    return SaltId(hashlib.sha256(b"kvstore salt\x00" + text).digest()[:SALT_ID_BYTES])


def writer_id(name: str) -> WriterId:
    """Returns what names a writer in the index, by the text in the headers of what it wrote."""
    return WriterId(hashlib.sha256(b"kvstore writer\x00" + name.encode()).digest()[:WRITER_ID_BYTES])


def place_of(writer: str) -> PlaceId:
    """Returns what names the place where a writer computes, by the writer's name.

    That is the word before the last of a name that kvstore.store.writers.own has made: all starts on the same
    accelerators share it. Another name says nothing of a place and is one by itself.
    """
    words = writer.split(" ")
    place = words[-2] if len(words) >= 3 and words[0].startswith("kvstore/") else writer
    return PlaceId(hashlib.sha256(b"kvstore place\x00" + place.encode()).digest()[:WRITER_ID_BYTES])


def sessions_of_salt(salt: SaltId) -> bytes:
    """Returns what the ids of all sessions under a salt begin with, and those of few others."""
    return hashlib.sha256(b"kvstore sessions\x00" + salt).digest()[:SESSION_SALT_BYTES]


def session_id(salt: SaltId, name: str) -> SessionId:
    """Returns the id of a session in the index: a client can't name a session of another salt.

    A name is any string of 1 to SESSION_NAME_CHARS characters, lone surrogates included. Raises ValueError
    for an empty or a longer one. An attacker who guesses salt and name can recognise them by the id.
    """
    if not 0 < len(name) <= SESSION_NAME_CHARS:
        raise ValueError(f"got a session name of {len(name)} characters, expected 1 to {SESSION_NAME_CHARS}")
    text = len(salt).to_bytes(1, "big") + salt + name.encode("utf-8", "surrogatepass")
    rest = SESSION_ID_BYTES - SESSION_SALT_BYTES
    return SessionId(sessions_of_salt(salt) + hashlib.sha256(b"kvstore session\x00" + text).digest()[:rest])


def item_key(content: bytes, salt: str = "") -> ContentKey:
    """Returns the content key of one encoder item: of the digest of its processed input, of `CONTENT_BYTES`,
    and of the `cache_salt` of the request that brings it, any string, lone surrogates included.

    A client's name for the item has no part in it. Raises ValueError for a digest of another length.
    """
    if len(content) != CONTENT_BYTES:
        raise ValueError(f"got a digest of {len(content)} bytes, expected {CONTENT_BYTES}")
    text = content + salt.encode("utf-8", "surrogatepass")
    return ContentKey(hashlib.sha256(b"kvstore item 2\x00" + text).digest() + bytes(GROUP_BYTES))


def chained_items(before: bytes, content: bytes) -> bytes:
    """Returns a digest of all items of a prompt up to one: `before` is that of those before it, b"" if it is
    the first; `content` is the digest of its processed input."""
    return hashlib.sha256(b"kvstore items\x00" + before + content).digest()


def bound_name(block_hash: bytes, items: bytes) -> bytes:
    """Returns the name of a block behind items: of vLLM's hash of it, which covers what clients call the
    items, and of `items` (`chained_items`), which is what they are. It is as long as the hash."""
    return hashlib.sha256(b"kvstore block\x00" + items + block_hash).digest()[: len(block_hash)]


def digest(key: ContentKey) -> Digest:
    """Returns the 16 bytes by which the index knows one content key."""
    return Digest(key[:14] + bytes((key[14] ^ key[-2], key[15] ^ key[-1])))


def digests(block_hashes: Sequence[bytes], group: int = 0) -> bytes:
    """Returns the digests of a chain of block hashes of one length, packed: `len(block_hashes) * 16` bytes.

    Raises ValueError if the hashes differ in length or are shorter than 16 bytes, and OverflowError if there
    can be no such group.
    """
    if not block_hashes:
        return b""
    if not 0 <= group < MAX_GROUPS:
        raise OverflowError(f"got group {group}, expected less than {MAX_GROUPS}")
    # Every length is checked: a long and a short hash would add up, and shift the hashes between them.
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
    """Returns packed digests as a list."""
    return [Digest(packed[i : i + DIGEST_BYTES]) for i in range(0, len(packed), DIGEST_BYTES)]


def new_segment_id(chain: bytes = b"") -> SegmentId:
    """Returns random bytes and a tag. `chain` begins with the first digest of the chain whose blocks are
    saved, be they its first ones or not, or is the item's digest.

    Without `chain` the tag is random as well: for segments that are not to be found by their chain.
    """
    tag = bytes([tag_of(chain)]) if chain else secrets.token_bytes(1)
    return SegmentId(secrets.token_bytes(SEGMENT_ID_BYTES - 1) + tag)


def chain_like(segment: SegmentId) -> bytes:
    """Returns a digest with the tag of a segment's chain, for callers that look in that chain and don't know
    its first digest. The segments of a release without tags have any tag."""
    return bytes(TAG_AT) + segment[-1:] + bytes(DIGEST_BYTES - TAG_AT - 1)


def tag_of(chain: bytes) -> int:
    """Returns the tag of a chain's segments, from packed digests that begin with its first; 0 of none."""
    return chain[TAG_AT] if chain else 0


def payload_name(namespace: NamespaceId, segment: SegmentId, rank: int) -> str:
    """Returns the name under which the payload store has one rank's part of a segment."""
    text = segment.hex()
    return f"{namespace}/{text[:2]}/{text}.{rank}"


def parse_payload_name(name: str) -> tuple[NamespaceId, SegmentId, int] | None:
    """Returns the parts of a payload name, or None if `name` is none (a stray)."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    namespace, fan, segment, rank = match.groups()
    if fan != segment[:2] or rank != str(int(rank)):
        return None
    return NamespaceId(namespace), SegmentId(bytes.fromhex(segment)), int(rank)
