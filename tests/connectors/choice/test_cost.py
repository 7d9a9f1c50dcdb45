"""The line through steps' costs: what a token takes, and how much more for each token before it."""

from __future__ import annotations

import random

import pytest

from connectors.choice.cost import Prefill, TokenCost


class Steps:
    """Steps of an engine whose tokens take `token_us` and `depth_us` more for each before them."""

    def __init__(self, token_us: float, depth_us: float) -> None:
        self.now, self.truth = 0.0, Prefill(token_us, depth_us)
        self.cost = TokenCost(lambda: self.now)

    def run(self, first: int, tokens: int, *, factor: float = 1.0) -> None:
        self.cost.sent(tokens, 1, lambda: first + tokens / 2)
        self.now += self.truth.seconds(first, first + tokens) * factor
        self.cost.ended()

    def prompt(self, tokens: int, chunk: int = 2048, noise: float = 0.0, seed: int = 0) -> None:
        rng = random.Random(seed)
        for first in range(0, tokens, chunk):
            self.run(first, min(chunk, tokens - first), factor=1 + rng.uniform(-noise, noise))


def test_nothing_is_known_before_the_first_step_and_its_mean_after_it() -> None:
    steps = Steps(100.0, 0.0)
    assert steps.cost.prefill() is None
    steps.run(0, 512)
    line = steps.cost.prefill()
    assert line is not None and line.seconds(0, 512) == pytest.approx(0.0512, rel=0.05)


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_attention_makes_deep_tokens_dearer(noise: float) -> None:
    steps = Steps(100.0, 0.02)
    for seed in range(3):
        steps.prompt(32_768, noise=noise, seed=seed)
    line = steps.cost.prefill()
    assert line is not None
    for first, stop in ((0, 4096), (0, 32_768), (24_576, 32_768)):
        assert line.seconds(first, stop) == pytest.approx(steps.truth.seconds(first, stop), rel=0.1 + noise)


def test_prompts_of_one_depth_tell_no_slope() -> None:
    steps = Steps(100.0, 0.0)
    for _ in range(50):
        steps.run(0, 300, factor=random.Random(1).uniform(0.7, 1.3))
    line = steps.cost.prefill()
    assert line is not None and line.depth_us < 0.01


def test_a_step_that_compiles_or_waits_is_forgotten() -> None:
    steps = Steps(100.0, 0.0)
    steps.run(0, 512)
    steps.run(0, 512, factor=1000.0)
    for _ in range(60):
        steps.run(0, 2048)
    line = steps.cost.prefill()
    assert line is not None and line.seconds(0, 2048) == pytest.approx(0.2048, rel=0.2)


def test_no_token_costs_nothing_whatever_the_steps_say() -> None:
    """Machines get slower and faster; the line must not cross zero."""
    steps = Steps(100.0, 0.0)
    for first in range(0, 60_000, 2000):
        steps.run(first, 2000, factor=0.01 + first / 10_000)
    line = steps.cost.prefill()
    assert line is not None and line.token_us > 0 and line.depth_us >= 0


def test_steps_that_hardly_compute_prompts_are_not_asked_for_their_depth() -> None:
    cost = TokenCost()

    def depth() -> float:
        raise AssertionError("a step of decodes pays nothing")

    cost.sent(8, 8, depth)
    cost.ended()
    assert cost.prefill() is None
