"""What `cache-admin explain` found: where a chain stops, and why.

Numbers are raw: times in unix seconds (`_s`), digests in hex. No report holds a token id or a credential.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvstore.admin.inspect.reports import Difference
from schemas.base import StrictModel

Subject = Literal["tokens", "request", "digest"]

#: The cause for which a block or an item is not served, or `stored`.
Cause = Literal[
    "stored",  # it is there
    "never_stored",  # as far back as the journal reaches
    "evicted",  # `rule` says by which rule
    "invalidated",  # with all that the namespace held
    "expired",  # it is older than its time to live, and not evicted yet
    "elsewhere",  # another namespace has it
    # A request asked for it, and:
    "audited",
    "writer_failed",
    "unproven",
    "below_threshold",
    "computing_is_faster",
    "switched_off",
    "in_pieces",
    "breaker_open",
    "deadline",
    "unavailable",
    "throttled",
    "permission",
    "other_region",
    "capacity",
    "closed",
    "error",
    "corrupt",
    "missing",
    "mismatch",
    "namespace_mismatch",
    "unsigned",
    "unknown_key",
    "newer_format",
    "quarantined",
    "unnamed",
    "window",
    # An engine had it, and:
    "not_admitted",  # `rule` says by which setting, if that can be told
    "held",
    "dropped",
    "failed",
    "refused",
    "wrong",
]


class Finding(StrictModel):
    """One fact that explains why a block is served or not."""

    cause: Cause
    #: A sentence for people.
    text: str
    #: When it happened; None: it is the present state, or the time is not known.
    at_s: float | None = None
    rule: str = ""
    segment: str = ""
    request: str = ""
    namespace: str = ""
    #: (stored) The session that alone has used it; (evicted) the one the text tells of; "": none is known.
    session: str = ""
    #: (elsewhere) In what the namespaces differ: `a` is the value of the one asked, `b` that of the other.
    differences: tuple[Difference, ...] = ()


class Block(StrictModel):
    """A block or an item, and all that is known of why it is served or not.

    The present state comes first, then what happened, the newest first.
    """

    namespace: str
    group: int
    #: Its number in its chain and the position of its first token; None if only its digest is known.
    block: int | None
    token: int | None
    digest: str
    findings: tuple[Finding, ...]


class GroupChain(StrictModel):
    """A prompt in one KV cache group."""

    group: int
    kind: str
    window: int | None = None
    block_tokens: int = Field(title="block tokens")
    #: The number of full blocks of the prompt, how many leading ones are stored, and how many in all.
    blocks: int = Field(title="asked")
    leading: int
    stored: int
    #: The first block that keeps the chain from going on in this group; None: nothing does.
    stop: Block | None


class Chain(StrictModel):
    """A prompt in one namespace."""

    namespace: str
    model: str
    tokens: int
    #: The number of leading tokens that an engine would load if it has none of them itself.
    resumable_tokens: int
    groups: tuple[GroupChain, ...]


class Told(StrictModel):
    """An outcome that an engine reported of a request."""

    namespace: str
    at_s: float = Field(title="told")
    request: str
    op: Literal["match", "load", "save"]
    asked: int
    served: int
    reason: str
    #: Number in its chain of the first block that was not served.
    position: int = Field(title="from block")
    text: str
    #: (absent) Why that block was absent by then, if it is known.
    because: Finding | None = None
    #: The present state of that block; None if its digest is not known.
    block: Block | None = None


class Reach(StrictModel):
    """How far back a namespace's journal goes. A time is None if there is nothing."""

    namespace: str
    events: int
    events_since_s: float | None
    #: Whether the journal has overwritten no event yet.
    events_complete: bool
    outcomes: int
    outcomes_since_s: float | None


class ExplainReport(StrictModel):
    """`cache-admin explain`."""

    at_s: float
    subject: Subject
    #: The name that was asked for; for tokens, their number.
    name: str
    #: (tokens) The prompt's chain.
    chain: Chain | None = None
    #: (digest) The block in each namespace that was looked at; first those that have it.
    blocks: tuple[Block, ...] = ()
    #: The outcomes that engines have reported, the newest first.
    told: tuple[Told, ...] = ()
    reach: tuple[Reach, ...] = ()
    #: Whether payloads were read and verified.
    verified: bool = False
    #: How many segments have a payload that is missing or damaged.
    damaged: int = 0
    remarks: tuple[str, ...] = ()
