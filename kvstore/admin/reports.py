"""Models that the reports of several verbs are made of.

A report is what a verb found. There is one model per verb, in the verb's group: `--json` prints it as it is,
kvstore.cli.text renders it. Numbers are raw: sizes in bytes (`_bytes`), times in unix seconds (`_s`). No
report holds a credential: URLs are redacted before they come here. kvstore.cli.shown says what the text makes
of names, titles, descriptions and defaults.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schemas.base import StrictModel


class BackendState(StrictModel):
    """The state in which the index or the payload store was found."""

    url: str
    #: `absent`: a local file or folder that nobody has made yet; nothing is stored.
    state: Literal["ok", "absent", "unreachable"]
    problem: str = ""


class FastBackend(BackendState):
    """The fast tier on this node. What it holds is None where that is unknown."""

    capacity_bytes: int
    used_bytes: int | None = None
    payloads: int | None = None
    #: Bytes of payload that are not in the shared store yet.
    dirty_bytes: int | None = None


class Amount(StrictModel):
    """How much is stored and visible. A block is a slot: an encoder item counts as one."""

    segments: int = 0
    blocks: int = 0
    stored_bytes: int = 0


class NamespaceSummary(StrictModel):
    """One namespace in a line. Fields that its kind lacks are empty."""

    id: str
    kind: str
    model: str
    revision: str = ""
    tenant: str = "default"
    dtype: str
    kv_dtype: str = Field("", title="kv")
    block_tokens: int = Field(0, title="tokens")
    tp: int = 1
    pp: int = 1
    codec: str = "none"
    epoch: int = 0
    usage: Amount


class SegmentSummary(StrictModel):
    """One segment in a line."""

    namespace: str
    segment: str
    slots: int
    #: Size of all ranks' payloads, headers included.
    stored_bytes: int
    created_s: int = Field(title="made", description="{} ago")
    #: Time of the last use, to the minute: a minute after 1970 began if only a session used it that has
    #: ended, and a time to come as long as one retains it.
    last_use_s: float
    #: Position of the first slot in its chain, counted from 0.
    depth: int = Field(description="{:block} before its first slot")
    codec: str = "none"
    ranks: int = 1
    pinned: bool = False
    #: Time that computing it took, in microseconds; 0: unknown.
    cost_us: int = Field(0, description="{} to compute it again")


#: `ok`: below the mark at which eviction begins. `high`: above it. `over`: above the quota itself.
QuotaState = Literal["ok", "high", "over"]


class QuotaLine(StrictModel):
    """A quota and what is used of it."""

    #: `store`, `tenant/NAME`, `namespace/ID` or `salt/ID`, which holds in every namespace by itself.
    scope: str
    quota_bytes: int
    used_bytes: int
    pinned_bytes: int
    #: `settings`, or `set` by `cache-admin quota`, which outranks them.
    source: Literal["settings", "set"]
    state: QuotaState
    #: False if no tenant or namespace of this name is registered.
    known: bool = True


#: `cancelled`: Ctrl-C. `broken`: the rest of the archive can't be read. `failed`: a backend or a disk failed,
#: and `problem` says which. What was done until then stays done, except that a file that could not be
#: finished is removed.
Ended = Literal["complete", "cancelled", "broken", "failed"]

#: `cancelled`: Ctrl-C. `failed`: a backend failed, and `problem` says how. What was done until then stays
#: done.
EndedEarly = Literal["complete", "cancelled", "failed"]

#: The most segments that a report names; it has the number of all of them as well.
NAMED = 100


class Left(StrictModel):
    """A segment that was left out, and why."""

    namespace: str
    segment: str
    reason: str
