"""Keeps processes that began something together from going on together."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

#: A pause is up to so much shorter or longer than it is meant to be, as a share of it.
_SHARE: Final = 0.25


def jittered(seconds: float, draw: Callable[[], float] = random.random) -> float:
    """Returns a time between three and five quarters of `seconds`, another one with each call.

    For whatever every process of a fleet does once in a period: a failover or a rollout lets all of them
    begin at one moment, and without this they would come at one moment ever after. The mean stays what it is,
    and after a dozen periods they are spread over all of one.
    """
    return seconds * (1 + _SHARE * (2 * draw() - 1))


def sooner(seconds: float, draw: Callable[[], float] = random.random) -> float:
    """Returns a time between half of `seconds` and all of it, where that is promised as the longest."""
    return seconds * (1 - 2 * _SHARE * draw())
