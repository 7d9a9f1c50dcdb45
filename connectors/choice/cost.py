"""An estimate of what computing a token of a prompt costs, as the scheduler sees it; saved with the blocks.

A step is served like a customer of a queue: it takes from when it was sent, or from when the one before it
ended, whichever is later, to when it ends. So neither an idle engine nor steps that are sent ahead
(asynchronous scheduling, pipeline stages) are taken for computing. Steps that hardly compute prompts say
nothing about them and are left out: decoding reads all weights for one token per request.

    a step's cost per token = its time / all of its tokens
    estimate                = their mean, older steps counting less: half after about `_HORIZON` tokens

Attention makes a token dearer the more tokens precede it, and the worth of loading a part of a prompt depends
on that. So a second estimate is a line through the same steps: token = a + b x depth, where a step's depth is
the mean depth of its tokens. Steps of different depths determine the slope. Where depths hardly differ, the
slope is 0 and the line is the mean again.

Both have known errors: decoded tokens in the same step count as if they belonged to a prompt. Encoding,
sampling and a connector's own copies are included, and so is whatever else the machine was busy with. Small
steps cost more per token than full ones. They are good enough for their purpose: weighing bytes against
seconds, and telling how much computing a cache has saved.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from connectors.engine.guard import otherwise

#: A step counts if it computes at least this many tokens more than one per request, and on average at least
#: `_LEAST_PER_REQUEST` per request: it then consists mostly of prompts, even if drafts are verified in it.
_LEAST_TOKENS: Final = 48
_LEAST_PER_REQUEST: Final = 8
#: Tokens after which a step's weight in the estimate has halved.
_HORIZON: Final = 8192
#: Largest factor by which one step moves the estimate: an early step may include compilation, a late one may
#: have waited.
_STEEPEST: Final = 4.0
#: Most steps under way that are remembered; no engine has more.
_DEPTH: Final = 64
#: Tokens after which a step's weight in the line has halved: prompts of different depths are rarer.
_LINE_HORIZON: Final = 32768
#: Depths that differ by much less than this, in tokens, tell no slope.
_SPREAD: Final = 512.0


@dataclass(frozen=True, slots=True)
class Prefill:
    """The cost of computing prompts: of a token, and how much more for each token before it, in
    microseconds."""

    token_us: float
    depth_us: float = 0.0

    def seconds(self, first: int, stop: int) -> float:
        """Returns what computing the tokens from `first` up to `stop` takes."""
        return (stop - first) * (self.token_us + self.depth_us * (first + stop) / 2) / 1e6


class TokenCost:
    """Estimates one engine's cost per prompt token from its steps. Belongs to the scheduler's thread."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        #: Steps that were sent and have not ended: (when sent, number of tokens, or 0 if it doesn't count,
        #: and their mean depth).
        self._sent: deque[tuple[float, int, float]] = deque(maxlen=_DEPTH)
        self._ended = 0.0
        #: The estimate, in microseconds per token; 0 while it isn't known.
        self.token_us = 0.0
        #: Weighted sums for the line: of weights, depths, costs, and their products.
        self._w = self._x = self._y = self._xx = self._xy = 0.0

    @property
    @otherwise(int)
    def under_way(self) -> int:
        """Returns how many steps were sent and have not ended."""
        return len(self._sent)

    def restart(self) -> None:
        """Forget the steps under way."""
        self._sent.clear()

    def prefill(self) -> Prefill | None:
        """Returns the line, or None before the first measured step."""
        if not self._w:
            return None
        x, y = self._x / self._w, self._y / self._w
        variance = max(0.0, self._xx / self._w - x * x)
        slope = (self._xy / self._w - x * y) / (variance + _SPREAD**2)
        # A token at depth 0 costs something, and a deeper token costs no less.
        slope = min(max(slope, 0.0), y / x / 1.02 if x > 0 else 0.0)
        return Prefill(y - slope * x, slope)

    def sent(self, tokens: int, requests: int, depth: Callable[[], float] = lambda: 0.0) -> None:
        """Records that a step with `tokens` tokens of `requests` requests is on its way to the workers.
        `depth` returns how many tokens precede one of them on average; it is called if the step counts."""
        counts = tokens >= requests + _LEAST_TOKENS and tokens >= _LEAST_PER_REQUEST * requests
        self._sent.append((self._clock(), tokens if counts else 0, depth() if counts else 0.0))

    def ended(self) -> None:
        """Records that the oldest step under way has ended. Does nothing if none is."""
        if not self._sent:
            return
        sent, tokens, depth = self._sent.popleft()
        began, self._ended = max(sent, self._ended), self._clock()
        if tokens:
            token_us = (self._ended - began) * 1e6 / tokens
            self._learn_line(token_us, tokens, depth)
            self._learn(token_us, tokens)

    def _learn_line(self, token_us: float, tokens: int, depth: float) -> None:
        if (line := self.prefill()) is not None:
            expected = line.token_us + line.depth_us * depth
            token_us = min(max(token_us, expected / _STEEPEST), expected * _STEEPEST)
        keep = 0.5 ** (tokens / _LINE_HORIZON)
        self._w = self._w * keep + tokens
        self._x = self._x * keep + tokens * depth
        self._y = self._y * keep + tokens * token_us
        self._xx = self._xx * keep + tokens * depth * depth
        self._xy = self._xy * keep + tokens * depth * token_us

    def _learn(self, token_us: float, tokens: int) -> None:
        if not self.token_us:
            self.token_us = token_us
            return
        bounded = min(max(token_us, self.token_us / _STEEPEST), self.token_us * _STEEPEST)
        self.token_us += (bounded - self.token_us) * (1 - 0.5 ** (tokens / _HORIZON))


def mean_depth(scheduled: Mapping[str, int], computed: Callable[[str], int | None]) -> float:
    """Returns how many tokens precede one of a step's on average. `computed` returns how many of a request
    are computed before the step; None: it isn't known, and doesn't count."""
    total = tokens = 0
    for request_id, count in scheduled.items():
        if (before := computed(request_id)) is not None:
            total += count * (before + count // 2)
            tokens += count
    return total / tokens if tokens else 0.0
