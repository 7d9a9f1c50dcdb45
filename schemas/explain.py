"""What `cache-admin explain` found: where a chain stops, and why.

Numbers are raw: times in unix seconds (`_s`), digests in hex. Never a token id, and never a credential.
"""

from __future__ import annotations

from typing import Literal

from schemas.base import Closed
from schemas.reports import Difference

Subject = Literal["tokens", "request", "image", "digest"]

#: Why a block or an item is not served, or that it is.
Cause = Literal[
    "stored",  # it is there
    "never_stored",  # as far back as the journal reaches
    "evicted",  # `rule` says by which rule
    "invalidated",  # with all that the namespace held
    "elsewhere",  # another namespace has it
    # A request asked for it, and:
    "below_threshold",
    "breaker_open",
    "deadline",
    "unavailable",
    "throttled",
    "permission",
    "capacity",
    "closed",
    "error",
    "corrupt",
    "missing",
    "mismatch",
    "namespace_mismatch",
    "quarantined",
    "window",
    # An engine had it, and:
    "not_admitted",  # `rule` says by which setting, if that can be told
    "held",
    "dropped",
    "failed",
    "refused",
]


class Finding(Closed):
    """One thing that explains it."""

    cause: Cause
    #: A sentence for people.
    text: str
    #: When it happened; None: it is so now.
    at_s: float | None = None
    rule: str = ""
    segment: str = ""
    request: str = ""
    namespace: str = ""
    #: (elsewhere) What differs between the namespaces: `a` is of the one asked, `b` of the other.
    differences: tuple[Difference, ...] = ()


class Block(Closed):
    """A block or an item, and all that is known of why it is served or not: the newest first, what is so now
    before that."""

    namespace: str
    group: int
    #: Its number in its chain and its first token; None where only its name is known.
    block: int | None
    token: int | None
    digest: str
    findings: tuple[Finding, ...]


class GroupChain(Closed):
    """A prompt in one KV cache group."""

    group: int
    kind: str
    window: int | None
    block_tokens: int
    #: Full blocks of the prompt, how many leading ones are stored, and how many in all.
    blocks: int
    leading: int
    stored: int
    #: The first block that keeps the chain from going on in this group; None: nothing does.
    stop: Block | None


class Chain(Closed):
    """A prompt in one namespace."""

    namespace: str
    model: str
    tokens: int
    #: Leading tokens that an engine would load, if it has none of them itself.
    resumable_tokens: int
    groups: tuple[GroupChain, ...]


class Told(Closed):
    """What an engine told of a request."""

    namespace: str
    at_s: float
    request: str
    op: Literal["match", "load", "save"]
    asked: int
    served: int
    reason: str
    #: Number in its chain of the first block that was not served.
    position: int
    text: str
    #: (absent) What had become of that block by then, if it is known.
    because: Finding | None = None
    #: That block, as it is now; None if it has no name.
    block: Block | None = None


class Reach(Closed):
    """How far back a namespace's journal goes. None: it has nothing."""

    namespace: str
    events: int
    events_since_s: float | None
    #: Nothing has been forgotten yet.
    events_complete: bool
    outcomes: int
    outcomes_since_s: float | None


class ExplainReport(Closed):
    """`cache-admin explain`."""

    at_s: float
    subject: Subject
    #: What was asked for; of tokens, how many.
    name: str
    #: (tokens)
    chain: Chain | None = None
    #: (image, digest) In each namespace that was looked at, those that have it first.
    blocks: tuple[Block, ...] = ()
    #: What engines have told of it, the newest first.
    told: tuple[Told, ...] = ()
    reach: tuple[Reach, ...] = ()
    #: Payloads were read and verified.
    verified: bool = False
    #: How many of them are missing or damaged.
    damaged: int = 0
    remarks: tuple[str, ...] = ()
