"""Settings of engines: what they save and load, and under which identity."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schemas.base import StrictModel
from schemas.records import Codec
from schemas.settings.quantities import Bytes, Seconds


class IdentitySettings(StrictModel):
    """Overrides of what the connectors find out by themselves."""

    #: Owner of the cache: tenants never share, and each can have a quota.
    tenant: str = Field(default="default", min_length=1, max_length=128)
    #: Raising it forgets everything stored before under this name, in O(1).
    epoch: int = Field(default=0, ge=0, lt=1 << 63)
    #: Name of the model in the namespace; default: what vLLM was given (the folder's name if local).
    model: str | None = None
    #: A label for the weights, for engines that load them from where no file can be sampled. It must change
    #: whenever they do. It names no random numbers (--load-format dummy).
    weights: str | None = None
    #: After a reset the KV connector can't know what the engine's weights are, until somebody names them
    #: (connectors/weights.py). `unnamed`: until then it goes on with a namespace of this engine's own, which
    #: is emptied when the engine leaves it. `nothing`: until then it leaves the store alone.
    after_reset: Literal["unnamed", "nothing"] = "unnamed"
    #: vLLM's hashes of blocks behind an image, video or clip hold what a client calls that (`uuid`).
    #: `refuse`: such blocks are bound to what the items are as well, so no name leads to another item's
    #: blocks; it costs a digest of each item, 0.2 ms per MB. `trust`: the hashes are used as they are,
    #: where only a gateway names items. Encoder outputs go by what the items are in either case.
    client_uuids: Literal["trust", "refuse"] = "refuse"
    #: `skip`: requests with a LoRA adapter are not cached, because vLLM's block hash names an adapter and
    #: its path, not its weights. `trust`: an adapter's name and path never get other weights.
    lora: Literal["skip", "trust"] = "skip"
    #: Engines of different tensor-parallel sizes share KV blocks, and each reads only the heads that it
    #: needs. Their sums are rounded differently, as on different hardware, so tokens may differ where they
    #: are nearly tied.
    any_tp: bool = False
    #: Engines of different minor releases of vLLM share KV blocks. A release may fill a page of the same
    #: shape in another way, unnoticed, so make sure first that yours don't.
    any_vllm: bool = False


class AdmissionSettings(StrictModel):
    """Which prompts are worth saving."""

    #: Prompts with fewer full blocks are not saved.
    min_blocks: int = Field(default=1, ge=1)
    #: Save only blocks that a request has asked for before, on any engine, within `window_s`: one-off
    #: prompts then cost nothing but a few bits in the index. Encoder items likewise.
    second_use: bool = False
    #: How long a first use is remembered, at least; it is forgotten after twice as long.
    window_s: Seconds = 86400.0
    #: Size of the sketch that remembers uses, per namespace and window; in one that is too small some first
    #: uses pass for second ones.
    sketch_bytes: Bytes = Field(default=1 << 20, ge=1 << 10, le=64 << 20)


class SegmentSettings(StrictModel):
    """When a segment closes, whichever comes first, and how its blocks are stored."""

    #: Largest size of one rank's part of a segment; a block that is larger is a segment of its own.
    target_bytes: Bytes = Field(default=32 << 20, ge=4096, le=1 << 30)
    #: Most blocks of one segment.
    max_blocks: int = Field(default=64, ge=1, le=1024)
    #: How slots are compressed. `planes-lz4` packs the exponents of floats apart from their mantissas. Off:
    #: docs/adr/0015 measures why.
    codec: Codec = "none"


class KVSettings(StrictModel):
    """The KV connector."""

    #: Record what requests ask for (`trace.folder`), and store and load nothing: no index and no payloads are
    #: needed. `cache-admin advise` says by the recording what a store would bring.
    observe: bool = False
    #: Save blocks that decoding fills, not only those of prompts.
    save_decode: bool = False
    #: Longest time from a request's arrival to the index's answer; past it the request is a miss.
    match_deadline_s: Seconds = 0.5
    #: For a match older than this the index is asked again before the match is promised.
    match_ttl_s: Seconds = 10.0
    #: Longest time from a load's submission to its last byte; past it the rest is recomputed.
    load_deadline_s: Seconds = 30.0
    #: For layers with a sliding window or chunks, save only the blocks needed to resume at every so many
    #: tokens and at the ends of prompts. That is fewer bytes, but a prompt that departs in between is resumed
    #: further back. 0: save all blocks, so that it is resumed where it departs.
    window_interval_tokens: int = Field(default=0, ge=0)
    #: How much of a match is loaded. `adaptive`: the part that loads faster than the engine computes it, by
    #: recent times of reads from each tier and of this engine's steps. A load that falls behind is cut, and
    #: the rest is computed. `always`: all of it. `never`: hand-offs only. Hand-offs are always loaded, and
    #: the other connectors always load (docs/adr/0038).
    load: Literal["adaptive", "always", "never"] = "adaptive"
    #: Time that `adaptive` saves. `ttft`: the request's. `throughput`: the accelerator's; a request then
    #: waits for a load up to four times as long as computing would take, while the engine computes other
    #: requests.
    objective: Literal["ttft", "throughput"] = "ttft"
    #: Loading fewer blocks than this is not worth a request's detour, whatever the estimates say.
    min_load_blocks: int = Field(default=1, ge=1)
    #: One load in so many is declined: the engine computes the blocks, and compares the stored blocks with
    #: them. A segment that differs is evicted; after a second one the engine leaves the namespace alone. One
    #: in as many loads that don't seem to pay is made, to measure what they take. 0: neither.
    audit_every: int = Field(default=1000, ge=0)
    #: Host memory of a rank through which loads pass and, the same again, saves; pinned where there is a GPU.
    #: Left out, the KV connector follows its engine: room for what the steps under way compute, but for
    #: 16,384 tokens at least, within an eighth of the node's memory; other connectors and tools take 256 MiB.
    staging_bytes: Bytes | None = Field(default=None, ge=1)
    #: Whether this engine hands prompts over or takes them: disaggregated prefill. Let only a proxy reach it:
    #: any client that sends the parameters has any prompt stored, whatever `admission` says. If an engine has
    #: several connectors (MultiConnector), only one may hand over.
    handoff: bool = False
    #: How long a decode engine waits for a prompt that was handed over, from its request's arrival; past it
    #: what is missing is computed. A prefill engine keeps blocks that wait to be saved no longer than that.
    handoff_wait_s: Seconds = 5.0


class ECSettings(StrictModel):
    """The EC connector."""

    #: As `kv.observe`, for encoder outputs: record the encoded items by their clients' names.
    observe: bool = False
    #: Longest time from the first look at an item to its verified bytes on this node; past it the item is
    #: encoded.
    fetch_deadline_s: Seconds = 2.0
    #: Time after which the index is asked again for an absent item.
    absent_ttl_s: Seconds = 1.0
    #: Folder for fetched items, on this node; default: a fresh one in the system's temporary folder.
    staging_dir: str | None = None
    #: Most bytes in that folder. With a GPU each rank locks memory for four steps of encoder outputs, no more
    #: than this, and the same again for saves.
    staging_bytes: Bytes = Field(default=256 << 20, ge=1)
