"""What a token of a prompt costs to compute, as the scheduler sees it: an estimate, for what is saved.

A step is served like a customer of a queue: it takes from when it was sent, or from when the one before it
ended, whichever is later, to when it ends. So neither an idle engine nor steps that are sent ahead
(asynchronous scheduling, pipeline stages) are taken for computing. Steps that hardly compute prompts say
nothing about them and are left out: decoding reads all weights for one token per request.

    a step's cost per token = its time / all of its tokens
    estimate                = their mean, older steps counting less: half after about `_HORIZON` tokens

What it is off by: the tokens of answers that run along count as if they were of a prompt, and attention
over a long prefix is spread over all of its tokens, so a head looks dearer and a tail cheaper than it is.
Encoding, sampling and a connector's own copies are inside, and so is whatever else the machine was busy with.
Small steps cost more per token than full ones. Good enough for what it is for: weighing bytes against
seconds, and telling how much computing a cache has saved.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

#: A step counts if it computes at least so many tokens more than one per request, and so many per request on
#: average: also with drafts to verify it is then mostly prompts.
_LEAST_TOKENS: Final = 48
_LEAST_PER_REQUEST: Final = 8
_HORIZON: Final = 8192
#: One step moves the estimate no further than this factor: a first one compiles, a late one may have waited.
_STEEPEST: Final = 4.0
#: Steps under way, more than any engine has.
_DEPTH: Final = 64


class Pace:
    """Of one engine. The scheduler's thread calls."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        #: Steps sent and not ended: (when, tokens or 0 if it doesn't count).
        self._sent: deque[tuple[float, int]] = deque(maxlen=_DEPTH)
        self._ended = 0.0
        #: Microseconds per token; 0: not known yet.
        self.token_us = 0.0

    def sent(self, tokens: int, requests: int) -> None:
        """A step of so many tokens is on its way to the workers."""
        counts = tokens >= requests + _LEAST_TOKENS and tokens >= _LEAST_PER_REQUEST * requests
        self._sent.append((self._clock(), tokens if counts else 0))

    def ended(self) -> None:
        """The oldest step that was sent has ended."""
        if not self._sent:
            return
        sent, tokens = self._sent.popleft()
        began, self._ended = max(sent, self._ended), self._clock()
        if tokens:
            self._learn((self._ended - began) * 1e6 / tokens, tokens)

    def _learn(self, token_us: float, tokens: int) -> None:
        if not self.token_us:
            self.token_us = token_us
            return
        bounded = min(max(token_us, self.token_us / _STEEPEST), self.token_us * _STEEPEST)
        self.token_us += (bounded - self.token_us) * (1 - 0.5 ** (tokens / _HORIZON))
