"""Keeps what the KV connector's scheduler half knows of its engine and of each of its requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING

from connectors.choice.decision import Decision
from connectors.engine.contents import Contents
from connectors.engine.layout import Group
from connectors.engine.media import Media
from connectors.engine.names import BlockNames, PromptItem
from connectors.engine.provenance import Origin
from connectors.engine.sessions.hints import NOTHING, Hints
from connectors.engine.step import RequestView
from connectors.kv.admission import Note
from connectors.kv.handoff.handoffs import Sending
from connectors.kv.handoff.receiving import Receiving
from connectors.kv.match import Found, PendingMatch
from connectors.kv.save import Progress
from connectors.telemetry.ways import Way
from kvstore.index.port import Run
from kvstore.keys import SaltId, SegmentId, SessionId, salt_id
from schemas.settings import Settings

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class KVEngine:
    """The properties of an engine that its KV blocks depend on. They stay the same while the engine runs."""

    groups: Sequence[Group]
    #: Number of tokens that a block hash stands for.
    hash_tokens: int
    #: Number of blocks that make a segment, by group.
    segment_blocks: Sequence[int]
    #: Whether loaded blocks are found again in the engine's own cache.
    prefix_caching: bool
    can_load: bool
    can_save: bool
    #: Returns whether the engine can read a segment of `group` that was cut into `parts` parts.
    fits: Callable[[int, int], bool] = lambda group, parts: True
    #: Whether all workers are on the scheduler's node.
    one_node: bool = True
    #: Number of workers that report.
    ranks: int = 1
    #: Returns whether any block is left in the engine's own cache. The field is None if that can't be known.
    holds_blocks: Callable[[], bool] | None = None
    #: Descriptions of items, for an engine that gets encoder outputs through a connector.
    media: Media = field(default_factory=lambda: Media({}))


@dataclass(slots=True)
class Tracked:
    """One request, with all that the scheduler half knows of it."""

    request: RequestView
    progress: Progress
    names: BlockNames
    #: Where its blocks come from, as far as that is known.
    origin: Origin = field(default_factory=Origin)
    #: Where the tokens of its prompt come from.
    way: Way = field(default_factory=Way)
    match: PendingMatch | None = None
    note: Note | None = None
    #: Whether the prompt is computed while its last blocks, which don't fill a segment, aren't saved yet.
    prompt_ended: bool = False
    #: Whether it wasn't known, when a step last looked, which blocks are worth saving.
    undecided: bool = False
    #: Tokens of the block-aligned local hit and of the load that was planned after it.
    local_tokens: int = 0
    #: Leading tokens that are surely computed, as seen in steps since blocks were last allocated; 0 before.
    seen_tokens: int = 0
    #: A step that computes less than so many leading tokens has nothing to save of it.
    idle_tokens: int = 0
    #: The request whose load brings the block that this one waits for.
    waits_for: str | None = None
    #: Tokens that its load brings, and the cost of computing them, in microseconds.
    load_tokens: int = 0
    load_cost_us: float = 0.0
    load_failed: bool = False
    #: How much of what was found is loaded, and why; when (`time.monotonic`) and of what that was decided.
    decision: Decision | None = None
    decided_at: float = 0.0
    decided_of: tuple[Found, int] | None = None
    #: Whether it is counted that its load was declined.
    declined: bool = False
    #: When its load was planned (`time.monotonic`).
    load_began: float = 0.0
    #: Seconds that its reads took on the slowest rank; 0: not reported yet.
    load_read_s: float = 0.0
    #: Whether some of its load was declined because a writer is unproven.
    doubted: bool = False
    #: Whether it is decided that its load is made, or declined for an audit.
    audit_decided: bool = False
    #: Whether the journal knows how much of it was found.
    told: bool = False
    #: Its hints on its session, and the segments of its match, if the index learns of them when it ends.
    hints: Hints = NOTHING
    uses: list[SegmentId] = field(default_factory=list)
    #: The runs of the match in the report of its session.
    uses_of: Sequence[Sequence[Run]] | None = None
    #: The hand-off of its prompt to another engine.
    sending: Sending | None = None
    #: The hand-off of its prompt by another engine.
    receiving: Receiving | None = None

    def promises(self) -> int | None:
        """Returns how many leading tokens the store has of it, or None while the answer is out."""
        if self.match is None:
            return 0
        found = self.match.poll(0.0)
        return None if found is None else found.tokens

    def matched(self) -> Iterable[Run] | None:
        """Returns the runs that it was matched with, of all groups, or None while the answer is out."""
        if self.uses_of is None and self.match is not None:
            found = self.match.poll(0.0)
            return None if found is None else chain.from_iterable(found.runs)
        return chain.from_iterable(self.uses_of or ())

    def savable_names(self, hash_tokens: int) -> Sequence[bytes]:
        """Returns the names of its leading full blocks that surely hold what their names say."""
        names, most = self.names.all(), self.origin.sound_tokens // hash_tokens
        return names if most >= len(names) else names[:most]


class Keeper(Enum):
    """The party whose report frees the blocks of a request that ends."""

    #: vLLM frees them at once.
    NOBODY = "nobody"
    #: The workers write to them, until they report that the load has ended.
    LOAD = "load"
    #: The workers save the unread blocks of a prompt that is handed over, and report that.
    HANDOFF = "hand-off"


class Keepers:
    """The keeper of each request's blocks, while the request runs and after its end.

    vLLM frees a request's blocks once: a second report for the same request would end the engine. So each
    request has one keeper, and changes it in these steps alone:

        nobody ── a load is planned ──> load ── the workers report its end ──> nobody
        nobody ── the request ends well and hands over its prompt ──> hand-off ── all is read ──> nobody

    A request that is aborted while it loads stays with the load, for which vLLM waits by itself.
    """

    def __init__(self) -> None:
        self._of: dict[str, Keeper] = {}

    def __len__(self) -> int:
        """Returns how many requests have blocks with a keeper."""
        return len(self._of)

    def of(self, request_id: str) -> Keeper:
        """Returns the keeper of a request's blocks."""
        return self._of.get(request_id, Keeper.NOBODY)

    def loads(self, request_id: str) -> bool:
        """Returns whether workers write to a request's blocks."""
        return self.of(request_id) is Keeper.LOAD

    def give(self, request_id: str, keeper: Keeper) -> None:
        """Let the load or the hand-off of a request keep its blocks. Raises AssertionError if they have a
        keeper."""
        before = self.of(request_id)
        assert before is Keeper.NOBODY, f"blocks of {request_id}: {before.value} -> {keeper.value}"
        self._of[request_id] = keeper

    def release(self, keeper: Keeper, requests: Iterable[str]) -> None:
        """Follow the workers' report of these requests. Those that another connector loads or hands over are
        reported alike, and have no such keeper here."""
        for request_id in requests:
            if self.of(request_id) is keeper:
                del self._of[request_id]


class Requests:
    """The table of an engine's requests."""

    def __init__(
        self,
        engine: KVEngine,
        settings: Settings,
        start: Callable[[str, SaltId, SessionId], Progress],
        contents: Contents | None = None,
    ) -> None:
        """`start` returns the progress of a new request, of this id, salt and session; `contents` is
        BlockNames'."""
        self._engine = engine
        self._settings = settings
        self._start = start
        self._contents = contents
        self._by_id: dict[str, Tracked] = {}
        #: The keepers of all requests' blocks, those of ended ones among them.
        self.keepers = Keepers()
        #: Requests that may have something to save.
        self.unsaved: dict[str, Tracked] = {}
        #: Whether blocks belong to no namespace: nothing is loaded or saved then.
        self.retired = False

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Tracked]:
        return iter(self._by_id.values())

    def get(self, request_id: str) -> Tracked | None:
        """Returns the state of a request, or None if it isn't tracked."""
        return self._by_id.get(request_id)

    def computed(self, request_id: str) -> int | None:
        """Returns how many tokens of a request vLLM has computed, or None if the request isn't tracked."""
        tracked = self._by_id.get(request_id)
        return None if tracked is None else tracked.request.num_computed_tokens

    def items(self, request_id: str) -> Sequence[PromptItem]:
        """Returns the items of a request's prompt; none if it isn't tracked."""
        tracked = self._by_id.get(request_id)
        return () if tracked is None else tracked.names.items

    def track(self, request: Request) -> Tracked:
        """Returns what is known of a request, which is tracked from now on if it is new."""
        view = RequestView(request)
        tracked = self._by_id.get(view.request_id)
        if tracked is None or not tracked.request.is_of(request):
            names = BlockNames(view, self._contents, self._engine.hash_tokens)
            hints = Hints.of(view)
            progress = self._start(view.request_id, salt_id(view.cache_salt), hints.session)
            tracked = Tracked(view, progress, names, hints=hints)
            self._by_id[view.request_id] = tracked
        return tracked

    def come_to(self, request: Request, computed: int) -> Tracked:
        """Returns the state of a request that the scheduler is about to start, or to start over after a
        preemption. It has a local hit of `computed` tokens."""
        tracked = self.track(request)
        self.unsaved[tracked.request.request_id] = tracked
        tracked.prompt_ended = tracked.undecided = False
        tracked.seen_tokens, tracked.local_tokens, tracked.idle_tokens = 0, computed, 0
        tracked.origin = Origin(computed)
        tracked.way.begin(computed)
        if tracked.sending is not None:
            tracked.sending.restart()
            tracked.progress = self._anew(tracked)
        tracked.progress.lost, tracked.progress.again = False, 0
        return tracked

    def start_over(self) -> None:
        """Forget what was matched and planned in the former namespace: it is void in the new one."""
        for tracked in self:
            # A load that is under way has used up its match already; its end is reported in any case.
            tracked.match = tracked.note = None
            # A prompt that was handed over belongs to the former weights, and so do the stored blocks of one
            # that is to be handed over.
            tracked.receiving = None
        self.forget_saves()

    def forget_saves(self) -> None:
        """Forget what was saved of all requests, or is on its way."""
        for tracked in self:
            tracked.idle_tokens = 0
            tracked.progress = self._anew(tracked)
            if tracked.sending is not None:
                tracked.sending.restart()

    def _anew(self, tracked: Tracked) -> Progress:
        return self._start(tracked.request.request_id, tracked.progress.salt, tracked.hints.session)

    def look_again(self, tracked: Tracked) -> None:
        """Record that blocks of a request are not saved that it was done with."""
        self.unsaved[tracked.request.request_id] = tracked
        tracked.idle_tokens = 0
        tracked.prompt_ended |= tracked.seen_tokens >= tracked.request.num_prompt_tokens

    def forget(self, request: Request) -> Tracked | None:
        """Forget a request. Returns its last state, or None if it wasn't tracked."""
        request_id = RequestView(request).request_id
        self.unsaved.pop(request_id, None)
        return self._by_id.pop(request_id, None)

    def cacheable(self, request: RequestView) -> bool:
        """Returns whether a request's block hashes name its blocks' content, as far as its adapter is
        concerned (settings: `identity`)."""
        return self._settings.identity.lora == "trust" or request.lora_request is None

    def wants_match(self, tracked: Tracked) -> bool:
        """Returns whether to ask the store for a request's blocks."""
        request = tracked.request
        return (
            self._engine.can_load
            and not self.retired
            and not tracked.load_failed
            and not request.skip_reading_prefix_cache
            and len(tracked.names.all()) > 0
            and self.cacheable(request)
        )

    def flushable(self, tracked: Tracked) -> bool:
        """Returns whether a request may have blocks left to save at its end: decoded or undecided ones."""
        return (
            self._engine.can_save
            and (self._settings.kv.save_decode or tracked.undecided)
            and not (self.keepers.loads(tracked.request.request_id) or self.retired)
            and self.cacheable(tracked.request)
        )
