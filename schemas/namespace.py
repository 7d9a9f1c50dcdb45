"""The namespace: everything that changes the bytes of a payload (docs/format.md, "Namespace")."""

from __future__ import annotations

from math import prod
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from schemas.base import MAX_NUMBER, StrictModel
from schemas.records import Codec

#: Bytes per element of the safetensors dtypes that slots may have.
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip

Count = Annotated[int, Field(ge=0, lt=MAX_NUMBER)]
Size = Annotated[int, Field(ge=1, lt=MAX_NUMBER)]
GroupKind = Literal["full", "mla", "sliding_window", "chunked_local", "mamba"]


class GroupSpec(StrictModel):
    """A KV cache group: layers of one kind, block size and page shape, whose blocks live and die together.

    `shape` is [layers, heads, tokens, content], the canonical order of a slot, with content in elements
    of `dtype`. It is the shape of the whole block, of all pipeline stages and all tensor-parallel shards. A
    rank holds its stage's layers and its shard's heads; a state that can't be cut into heads counts its
    shards as heads. `window` is in tokens, for the kinds that need only the tail of a prefix.
    """

    kind: GroupKind
    block_tokens: Size
    dtype: str
    shape: tuple[Size, Size, Size, Size]
    #: Digest of the layers' names in slot order.
    layers: str = ""
    #: Number of different parts into which tensor parallelism cuts a block; further ranks hold copies.
    shards: Size = 1
    window: Size | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"unknown dtype {self.dtype!r}; allowed: {', '.join(sorted(DTYPE_BYTES))}")
        if (self.window is None) != (self.kind in ("full", "mla", "mamba")):
            raise ValueError(
                "window goes with the kinds sliding_window and chunked_local, and only with them"
            )
        if self.shape[1] % self.shards:
            raise ValueError(f"{self.shape[1]} heads can't be cut into {self.shards} equal shards")
        return self

    @property
    def slot_bytes(self) -> int:
        """Bytes of one whole block, all stages and shards together."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


class Parallel(StrictModel):
    """Sizes of the parallel layout; ranks are part of a payload's name, not of its namespace.

    `tp` = 0 means that engines of any tensor-parallel size share the namespace; a segment's number of parts
    says into how many shards it was cut.
    """

    tp: Count = 1
    pp: Size = 1
    dcp: Size = 1


class Namespace(StrictModel):
    """The canonical identity of a set of interchangeable payloads: equal JSON means equal bytes."""

    format: Literal[2] = 2
    kind: Literal["kv", "ec"]
    tenant: str = "default"
    model: str
    revision: str = ""
    #: Digest of the weights' files, or the operator's label for them.
    weights: str
    #: Digest of the model's configuration, so that a rope or head override is another namespace.
    config: str = ""
    #: The dtype the model computes in, and the quantisation of its weights.
    dtype: str
    quantization: str = ""
    #: Options of the engine that may change its payloads, where they differ from vLLM's defaults, by name.
    options: dict[str, str] = Field(default_factory=dict)
    #: kv only: tokens per block hash, hash algorithm and the digest of the chain's root.
    block_tokens: Count = 0
    hash_algo: str = ""
    hash_root: str = ""
    #: kv only: the KV cache's dtype as vLLM names it, and the order of a slot's dimensions.
    kv_dtype: str = ""
    page_order: str = ""
    #: kv only: what fills a page: device type, attention backends, and on the CPU the instruction set.
    page_format: str = ""
    groups: tuple[GroupSpec, ...] = ()
    parallel: Parallel = Parallel()
    codec: Codec = "none"
    epoch: int = Field(default=0, ge=0, lt=1 << 63)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "kv":
            if not self.groups or not self.block_tokens or not self.hash_algo:
                raise ValueError("a kv namespace needs groups, block_tokens and hash_algo")
        elif self.groups or self.block_tokens:
            raise ValueError("groups and block_tokens belong to kv namespaces only")
        return self

    def parts(self, group: int = 0) -> int:
        """Returns into how many payloads engines cut a segment of a group (kv) or an item (ec: one)."""
        return self.groups[group].shards * self.parallel.pp if self.kind == "kv" else 1
