"""The bench's material: data like KV blocks, a namespace of its own, and the segments in it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from pydantic import ValidationError

from kvstore import __version__
from kvstore.admin.backends import Cache
from kvstore.format import segment as codec
from kvstore.format.keyring import Keyring
from kvstore.keys import (
    ContentKey,
    NamespaceId,
    SegmentId,
    block_key,
    canonical_json,
    digest,
    namespace_id,
    new_segment_id,
    payload_name,
)
from kvstore.rules.segments import segment_blocks
from kvstore.verify.headers import digests_of, record_of
from schemas.namespace import GroupSpec, Namespace
from schemas.records import SegmentRecord
from schemas.settings import Settings

#: Llama-3-8B in bf16, a common size: 32 layers x 8 KV heads x 128 numbers x 2 (K and V) x 2 bytes.
DEFAULT_KV_BYTES = 32 * 8 * 128 * 2 * 2
DEFAULT_KV_SOURCE = (
    "the default, Llama-3-8B in bf16: 32 layers x 8 KV heads x 128 x 2 (K and V) x 2 bytes; give "
    "--kv-bytes-per-token for another model"
)
#: vLLM's usual block.
_BLOCK_TOKENS = 16
#: Bytes of noise that slots are cut from, each at another place, so that no two payloads are alike.
_POOL = 64 << 20
_WHOLE = ("full", "mla")


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the blocks and segments that an engine would save."""

    kv_bytes_per_token: int
    #: Where that number comes from, for people.
    source: str
    block_tokens: int
    segment_blocks: int

    @property
    def block_bytes(self) -> int:
        """Raw bytes of a block, all ranks together."""
        return self.kv_bytes_per_token * self.block_tokens

    @property
    def segment_bytes(self) -> int:
        """Raw bytes of a segment."""
        return self.block_bytes * self.segment_blocks


def shape_of(cache: Cache, kv_bytes_per_token: int | None) -> Shape:
    """Returns the shape to measure with: as given, or that of the fullest namespace of KV blocks, or the
    default. Raises what the index raises."""
    if kv_bytes_per_token is not None:
        return _shape(cache.settings, kv_bytes_per_token, "--kv-bytes-per-token", _BLOCK_TOKENS)
    names = cache.namespaces()
    if cache.index is not None:
        usage = {name: cache.index.usage(name).nbytes for name in names}
        for name in sorted(names, key=lambda name: -usage[name]):
            if usage[name] and (found := _of_namespace(cache, name)):
                return found
    return _shape(cache.settings, DEFAULT_KV_BYTES, DEFAULT_KV_SOURCE, _BLOCK_TOKENS)


def _of_namespace(cache: Cache, name: NamespaceId) -> Shape | None:
    try:
        space = Namespace.model_validate_json(cache.namespaces()[name])
    except (KeyError, ValidationError):
        return None
    if space.kind != "kv" or space.tenant == TENANT:
        return None
    # Only what every token of a prompt adds counts. A window or a state is one fixed amount for any prompt.
    groups = [group for group in space.groups if group.kind in _WHOLE] or list(space.groups)
    per_token = sum(group.slot_bytes / group.block_tokens for group in groups)
    return _shape(cache.settings, round(per_token), f"namespace {name} ({space.model})", space.block_tokens)


def _shape(settings: Settings, per_token: int, source: str, block_tokens: int) -> Shape:
    per_token += per_token % 2  # whole numbers of 2 bytes
    return Shape(per_token, source, block_tokens, segment_blocks(settings, per_token * block_tokens))


TENANT = "cache-admin-bench"


def bench_namespace(settings: Settings) -> Namespace:
    """Returns a namespace that no engine uses, the same for every run, so that they don't add up."""
    return Namespace(
        kind="kv",
        tenant=TENANT,
        model="bench",
        weights="0" * 16,
        dtype="bfloat16",
        block_tokens=_BLOCK_TOKENS,
        hash_algo="random",
        page_order="LHNC",
        groups=(GroupSpec(kind="full", block_tokens=_BLOCK_TOKENS, dtype="BF16", shape=(1, 1, 1, 1)),),
        codec=settings.segment.codec,
    )


def noise(nbytes: int, seed: int = 0) -> memoryview:
    """Returns normally distributed bf16 numbers, like KV: exponents compress, mantissas don't."""
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal(nbytes // 2, dtype=np.float32)
    return memoryview((numbers.view(np.uint32) >> 16).astype(np.uint16).data).cast("B")


@dataclass(frozen=True, slots=True)
class BenchSegment:
    """A segment of the bench's chain."""

    segment: SegmentId
    keys: list[ContentKey]
    record: SegmentRecord
    digests: bytes
    nbytes: int


@dataclass
class Material:
    """The namespace, the noise, and every segment that was made. Safe for many threads."""

    settings: Settings
    shape: Shape
    keyring: Keyring
    #: Payloads that may be in the store, whether or not their put succeeded.
    names: list[str] = field(default_factory=list)
    #: Segments whose payload is stored.
    stored: list[BenchSegment] = field(default_factory=list)
    _made: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @cached_property
    def namespace(self) -> Namespace:
        """The namespace that the bench writes to."""
        return bench_namespace(self.settings)

    @cached_property
    def id(self) -> NamespaceId:
        """The namespace's id."""
        return namespace_id(self.namespace)

    @cached_property
    def pool(self) -> memoryview:
        """The noise."""
        return noise(max(_POOL, 2 * self.shape.block_bytes))

    def segment(self) -> tuple[BenchSegment, Sequence[memoryview]]:
        """Makes a fresh segment as an engine would save it; returns it and its payload's buffers."""
        shape = self.shape
        with self._lock:
            number, self._made = self._made, self._made + 1
        slots = []
        for i in range(shape.segment_blocks):
            # With steps of an odd number of cache lines places don't repeat for a long time.
            at = (number * shape.segment_blocks + i) * 64 * 4099 % (self.pool.nbytes - shape.block_bytes)
            data = self.pool[at // 2 * 2 :][: shape.block_bytes]
            slots.append(codec.Slot(block_key(os.urandom(32)), data, "BF16", (shape.block_bytes // 2,)))
        segment = new_segment_id(digest(slots[0].key))
        encoded = codec.encode(
            slots,
            namespace_json=canonical_json(self.namespace),
            kind="kv",
            segment=segment,
            codec=self.settings.segment.codec,
            created_s=int(time.time()),
            writer=f"cache-admin {__version__} bench",
            keyring=self.keyring,
        )
        header = codec.parse_header(encoded.buffers[0], keyring=self.keyring)
        record = record_of([header])
        stored = BenchSegment(
            segment, [slot.key for slot in slots], record, digests_of(header), encoded.part.nbytes
        )
        with self._lock:
            self.names.append(self.name(stored))
        return stored, encoded.buffers

    def name(self, stored: BenchSegment) -> str:
        """Returns the name of the segment's payload."""
        return payload_name(self.id, stored.segment, 0)

    def keys(self) -> list[ContentKey]:
        """Returns the keys of the chain of the stored segments."""
        return [key for stored in self.stored for key in stored.keys]
