"""Verdicts: what engines have found out about writers by comparing what they wrote with their own computing.

A writer is one start of one engine (kvstore.keys.writer_id). An engine loads from one that
nobody has judged only after it has compared. A verdict is one small record per namespace and writer:

    proven     somebody else computes the same: what the writer wrote is loaded
    disputed   one place computes something else, and it may be the one that is wrong
    failed     two places compute something else, or one that others agree with: its segments are absent,
               and it can commit no more

A place is the accelerators that an engine computes on, or a host without any (kvstore.keys.place_of). All
that starts there is one judge: a broken accelerator agrees with itself.

A verdict that is forgotten costs one more comparison, so verdicts are bounded in number and in age.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from kvstore.keys import NamespaceId, PlaceId, WriterId

#: Whether what a writer wrote is what an engine computes.
Opinion = Literal["alike", "differs"]
VerdictState = Literal["proven", "disputed", "failed"]
#: A state's number in an index is its place here.
STATES: Final[tuple[VerdictState, ...]] = get_args(VerdictState)
#: Verdicts that a namespace keeps; of more the oldest goes.
VERDICTS_KEPT = 1024
#: Seconds after which a verdict is forgotten.
VERDICT_S = 90 * 86_400
#: Most characters of a writer's name that are kept.
NAME_CHARS = 128


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of one writer."""

    state: VerdictState
    #: When that was found out, unix seconds by the index's clock.
    at_s: float
    #: Where it was found out.
    by: PlaceId
    #: The writer's name, as its headers have it; "" if whoever judged did not know it.
    name: str


class Verdicts(ABC):
    """Keeps verdicts about the writers of a namespace, of all of its shards in one place."""

    @abstractmethod
    def verdicts(
        self, namespace: NamespaceId, writers: Sequence[WriterId] | None = None
    ) -> Mapping[WriterId, Verdict]:
        """Returns what is known of these writers; None: of all that were judged. In one round trip.

        The answer may be some seconds old. An unknown namespace has no verdicts.
        """

    @abstractmethod
    def judge(
        self,
        namespace: NamespaceId,
        writer: WriterId,
        opinion: Opinion,
        *,
        by: PlaceId,
        stands: bool,
        name: str = "",
    ) -> VerdictState:
        """Records the opinion of an engine at the place `by`; returns what holds of the writer from now on.

        "alike" proves a writer, unless it has failed: to be told only of one that writes at another place.
        "differs" fails it if the engine `stands`, which means that some writer at another place agrees with
        it, or if another place has disputed it; else it disputes it. A writer that is proven stays proven,
        and one that has failed stays failed: its commits are refused from now on. One step: of two opinions
        at the same moment one comes first.
        """


def judged(before: Verdict | None, opinion: Opinion, by: PlaceId, *, stands: bool) -> VerdictState:
    """Returns what holds of a writer after an opinion: the rule of `Verdicts.judge`."""
    if before is not None and before.state != "disputed":
        return before.state
    if opinion == "alike":
        return "proven"
    return "failed" if stands or (before is not None and before.by != by) else "disputed"
