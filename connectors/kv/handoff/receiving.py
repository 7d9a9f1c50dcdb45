"""The decode engine's side: waits until the whole of a prompt that was handed over is in the index."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from connectors.engine.names import BlockNames
from connectors.engine.step import RequestView
from connectors.kv.handoff.prompts import PromptNames
from connectors.kv.match import Found
from connectors.planning import joined
from kvstore.index.port import Run
from kvstore.keys import tag_of
from kvstore.rules.prefix import PrefixRule
from kvstore.rules.text import readable
from kvstore.store.space import Space

log = logging.getLogger(__name__)

#: Prefix of the engine id in a handle: the prompt is in a store, in the namespace whose id follows.
ENGINE: Final = "kvstore:"
#: Shortest and longest pause between two questions to the index, in seconds.
_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.05
#: Number of failures in a row after which waiting on is of no use.
_MOST_FAILURES = 3


@dataclass(slots=True, eq=False)
class Receiving:
    """A prompt that this engine waits for. Belongs to the scheduler's thread, except for `answered`.

    `found` has the whole prompt, once it is there.
    """

    #: How many tokens are loaded.
    tokens: int
    #: See `PromptNames.of`.
    names: list[bytes]
    #: `time.monotonic` time at which the wait ends.
    end: float
    found: Found | None = None
    _found_at: float = 0.0
    _next: float = 0.0
    _pause: float = _PAUSE_S
    _asking: bool = False
    _failures: int = 0
    #: Set on a call thread, once per question.
    _answer: Found | str | None = None

    def ask(self, now: float) -> bool:
        """Returns whether to ask the index now; the caller then asks it and calls `answered`."""
        if self._asking or now < self._next or self.over():
            return False
        self._asking = True
        return True

    def answered(self, answer: Found | str) -> None:
        """Take the answer: see `Receiver.look`. Any thread may call."""
        self._answer = answer

    def take(self, now: float, *, ttl_s: float, again_s: float) -> Found | None:
        """Returns the match, if there is one. A match older than `ttl_s` is asked for again, for `again_s` at
        least."""
        if self.found is not None and now - self._found_at > ttl_s:
            # The request has been waiting for free blocks of the engine meanwhile.
            self.forget()
            self.end = max(self.end, now + again_s)
        if self.found is None and (answer := self._answer) is not None:
            self._answer, self._asking = None, False
            if isinstance(answer, Found):
                self.found, self._found_at = answer, now
            else:
                self._failures = self._failures + 1 if answer == "failed" else 0
                if answer == "refused":
                    self._failures = _MOST_FAILURES
                self._next = now + self._pause
                self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)
        return self.found

    def over(self) -> bool:
        """Returns whether waiting on is of no use."""
        return time.monotonic() >= self.end or self._failures >= _MOST_FAILURES

    def forget(self) -> None:
        """Forget the match, because it may be gone or bad by now; the index is then asked again."""
        self.found = None
        self._next = 0.0


class Receiver:
    """Takes the prompts that were handed over to one engine. For the scheduler's thread, except `look`."""

    def __init__(
        self,
        space: Space,
        rules: Sequence[PrefixRule],
        names: PromptNames,
        fits: Callable[[int, int], bool],
        *,
        backoff: int,
        left_out: int,
    ) -> None:
        """`fits` is KVEngine's. The prefill engine has not computed the last `backoff` tokens of a prompt,
        and this engine must not load the last `left_out`."""
        self.use(space)
        self._rules = rules
        self._names = names
        self._fits = fits
        self._backoff = backoff
        self._left_out = left_out
        self._settings = space.backends.settings.kv

    def use(self, space: Space) -> None:
        """Use this namespace from now on."""
        self._space = space
        self._engine = ENGINE + space.id

    def begin(self, request: RequestView, names: BlockNames) -> Receiving | None:
        """Returns the hand-off that a new request waits for, or None if nothing was handed over to it."""
        params = request.kv_transfer_params
        if not params.get("do_remote_prefill"):
            return None
        engine = params.get("remote_engine_id")
        if isinstance(engine, str) and engine != self._engine:
            log.warning(
                "request %s was prefilled by %.64r; this engine can only load from %r and computes it",
                readable(request.request_id), engine, self._engine,
            )  # fmt: skip
            return None
        prompt = request.num_prompt_tokens
        tokens = prompt - self._backoff
        told = params.get("remote_num_tokens")
        if tokens <= 0 or (isinstance(told, int) and told != tokens):
            return None
        made = self._names.of(names, tokens)
        if made is None:
            return None
        end = time.monotonic() + self._settings.handoff_wait_s
        return Receiving(min(tokens, prompt - self._left_out), made, end)

    def poll(self, receiving: Receiving) -> Found | None:
        """Returns all that was handed over, or None as long as something is missing."""
        now, settings = time.monotonic(), self._settings
        found = receiving.take(now, ttl_s=settings.match_ttl_s, again_s=settings.match_deadline_s)
        asking = found is None and receiving.ask(now)
        if asking and not self._space.backends.transfers.call(lambda: self._ask(receiving)):
            receiving.answered("failed")
        return found

    def _ask(self, receiving: Receiving) -> None:
        """Ask the index, on a call thread. Whatever happens, `receiving` gets an answer."""
        answer: Found | str = "failed"
        try:
            answer = self.look(receiving.names, receiving.tokens)
        except Exception:
            log.exception("looking for a prompt that was handed over failed unexpectedly")
        finally:
            receiving.answered(answer)

    def look(self, names: Sequence[bytes], tokens: int) -> Found | str:
        """Returns all that `tokens` leading tokens need, or "missing", or "failed", or "refused": nothing of
        its writer's is loaded here (kvstore.store.writers). Runs on a call thread."""
        failed = self._space.writers.failed()
        if failed and self._refused(names, tokens):
            return "refused"
        found = self._look(names, tokens)
        # A segment that was just hidden and evicted would not be met again.
        return "refused" if found == "missing" and self._space.writers.failed() - failed else found

    def _refused(self, names: Sequence[bytes], tokens: int) -> bool:
        """Returns whether something of the prompt is there, and hidden because of who wrote it."""
        for number, rule in enumerate(self._rules):
            if rule.reach == "prefix":
                packed = self._names.packed(names, number, rule.needed(tokens))
                if self._space.match(packed).reason in ("writer_failed", "quarantined"):
                    return True
        return False

    def _look(self, names: Sequence[bytes], tokens: int) -> Found | str:
        last = [
            self._names.packed(names, number, rule.needed(tokens)[-1:])
            for number, rule in enumerate(self._rules)
        ]
        firsts = [self._names.packed(names, number, range(1)) for number in range(len(self._rules))]
        # Chains of groups whose blocks end alike lie together. Last blocks of other chains are looked for
        # everywhere.
        together = firsts[0] if len(set(map(tag_of, firsts))) == 1 else b""
        found = self._space.find(b"".join(last), together)
        if found is None:
            return "failed"
        if None in found:
            # The last blocks usually come last, so this one call is enough while they are missing.
            return "missing"
        runs: list[list[Run]] = []
        for number, rule in enumerate(self._rules):
            blocks = rule.needed(tokens)
            got = self._runs(number, blocks, self._names.packed(names, number, blocks), firsts[number])
            if got is None or not all(self._fits(number, len(run.record.parts)) for run in got):
                return "missing"
            runs.append(got)
        stored = tuple(tokens // rule.block_tokens for rule in self._rules)
        return Found(tokens, tuple(runs), stored, "complete", tiers=self._space.tiers(chain(*runs)))

    def _runs(self, number: int, blocks: range, packed: bytes, first: bytes) -> list[Run] | None:
        """Returns runs that cover `blocks`, or None if some are missing."""
        if self._rules[number].reach == "prefix":
            match = self._space.match(packed)
            return match.runs if match.blocks == len(blocks) else None
        found = self._space.find(packed, first)
        if found is None:
            return None
        runs = []
        for block, run in zip(blocks, found, strict=True):
            if run is None:
                return None
            runs.append(Run(block, run.segment, run.slot, 1, run.record))
        return joined(runs)
