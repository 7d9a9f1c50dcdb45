"""A fleet's bad day: the janitor is rolled over and Redis goes away, twice, while an engine serves.

The chart's pods run as rendered, with the engine on this machine: no request fails or gets another token,
none waits for a server that is away, and what was stored is served again. RESTARTS_SECONDS: how long the calm
phases are, and how long Redis is away; two seconds in the suite.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import Engine, Result
from tests.e2e.sharing import full_blocks, prompt, scheduler_counters
from tests.helm.kubelet import Pod
from tests.helm.release import Release
from tests.servers.s3.servers import S3Server
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.engine, pytest.mark.servers, pytest.mark.slow]

SECONDS = float(os.environ.get("RESTARTS_SECONDS", "2"))
MOST_TOKENS = 8
#: Requests that are answered before a Redis that hangs goes on: one that waited for it would wait for ever.
MEANWHILE = 8
#: Asked for over and over, and so served from the store; and those that come up in turn.
KNOWN = [prompt(320 + 32 * i, 100 + i) for i in range(6)]
FRESH = [prompt(256 + 32 * (i % 4), 500 + i) for i in range(48)]


@dataclass(frozen=True, slots=True)
class Answer:
    """One request of the stream: in which phase it was begun, how long it took, what was right about it."""

    phase: str
    seconds: float
    same: bool
    #: Tokens of the prompt that came from the store.
    served: int
    asked: int


class Stream:
    """Requests one after another, each from an empty engine cache, while something else is going on."""

    def __init__(self, engine: Engine, expected: dict[int, list[int]]) -> None:
        self.answers: list[Answer] = []
        self.failures: list[BaseException] = []
        self._engine, self._expected = engine, expected
        self._draw, self._fresh = random.Random(11), itertools.cycle(FRESH)

    def during(self, phase: str, action: Callable[[], Any]) -> Any:
        """Goes on until the action, in a thread of its own, is over. Its result."""
        done: list[Any] = []

        def act() -> None:
            try:
                done.append(action())
            except BaseException as exc:
                self.failures.append(exc)

        actor = threading.Thread(target=act, name=phase, daemon=True)
        actor.start()
        while actor.is_alive():
            self.ask(phase, self._draw.choice(KNOWN) if self._draw.random() < 0.7 else next(self._fresh))
        actor.join()
        if self.failures:
            raise self.failures[0]
        return done[0]

    def ask(self, phase: str, one: dict[str, Any]) -> Answer:
        self._engine.reset_prefix_cache()
        began = time.monotonic()
        [result] = self._engine.generate([one], max_tokens=MOST_TOKENS)
        answer = Answer(
            phase,
            time.monotonic() - began,
            result.token_ids == self._expected[id(one)] and result.finish_reason == "length",
            result.external_tokens,
            full_blocks(one),
        )
        self.answers.append(answer)
        return answer

    def table(self) -> str:
        """Per phase: requests, wrong ones, the share of tokens that came from the store, and latencies."""
        lines = [f"{'phase':34}{'requests':>9}{'wrong':>7}{'served':>8}{'median':>9}{'worst':>9}"]
        phases: dict[str, list[Answer]] = defaultdict(list)
        for answer in self.answers:
            phases[answer.phase].append(answer)
        for phase, found in phases.items():
            served = sum(one.served for one in found) / sum(one.asked for one in found)
            times = [one.seconds * 1e3 for one in found]
            wrong = sum(not one.same for one in found)
            latencies = f"{statistics.median(times):>6.0f} ms{max(times):>6.0f} ms"
            lines.append(f"{phase:34}{len(found):>9}{wrong:>7}{served:>8.0%}{latencies}")
        return "\n".join(lines)


@pytest.fixture
def release(pods: None, s3_server: S3Server, tmp_path: Path) -> Iterator[Release]:
    with Release(tmp_path / "cluster", s3_server) as made:
        yield made


def restarted(release: Release, *, down_s: float, lose: bool) -> Pod:
    """Redis is ended, stays away for a while and comes back: in order, or by SIGKILL and without its disk."""
    pod = release.redis
    if lose:
        pod.container.sandbox.signal(9)
    made = release.cluster.replace(pod, grace_s=0.1 if lose else None, down_s=down_s, wipe=lose)
    made.until_ready()
    return made


def until_closed(engine: Engine, stream: Stream, phase: str) -> None:
    """Until the engine asks the index again."""
    end = time.monotonic() + PATIENCE_S
    while engine.metrics()["vllm:kvstore_kv_index_down"]:
        assert time.monotonic() < end, "the breaker stays open"
        stream.ask(phase, KNOWN[0])


def until_served(stream: Stream, phase: str) -> None:
    """Until each of the known prompts comes from the store, in full."""
    end = time.monotonic() + PATIENCE_S
    for one in KNOWN:
        while (answer := stream.ask(phase, one)).served < answer.asked:
            assert time.monotonic() < end, f"not served again\n{stream.table()}"


def hung(pod: Pod, stream: Stream, phase: str) -> None:
    """Redis takes connections and answers none, until enough requests that came since are answered."""
    pod.container.sandbox.signal(signal.SIGSTOP)
    try:
        time.sleep(SECONDS + 1)
        until(lambda: sum(answer.phase == phase for answer in list(stream.answers)) > MEANWHILE)
    finally:
        pod.container.sandbox.signal(signal.SIGCONT)


def right_answers(text_model: Path, log_path: Path) -> dict[int, list[int]]:
    """By an engine without a store."""
    prompts = [*KNOWN, *FRESH]
    with Engine(text_model, log_path=log_path) as engine:
        answers: list[Result] = engine.generate(prompts, max_tokens=MOST_TOKENS)
    return {id(one): answer.token_ids for one, answer in zip(prompts, answers, strict=True)}


def a_bad_day(release: Release, engine: Engine, stream: Stream) -> list[float]:
    """Seconds that each janitor took to end."""
    for one in KNOWN:
        assert stream.ask("first", one).served == 0
    until_served(stream, "stored")
    stream.during("calm", lambda: time.sleep(SECONDS))

    lives = {pod.name for pod in release.janitors}
    took: list[float] = stream.during("janitors rolled over", lambda: release.cluster.rollout("kvstore"))
    assert lives.isdisjoint(pod.name for pod in release.janitors) and len(release.janitors) == 1

    # The first few wait for their deadline, half a second; nobody for Redis.
    stream.during("Redis hangs", lambda: hung(release.redis, stream, "Redis hangs"))
    until_closed(engine, stream, "breaker closes")

    stored = release.redis
    stream.during("Redis ends and comes back", lambda: restarted(release, down_s=SECONDS, lose=False))
    assert stored.container.exits == [0], stored.describe()
    until_closed(engine, stream, "breaker closes again")
    # Nothing of what was stored is computed again.
    for one in KNOWN:
        answer = stream.ask("after the restart", one)
        assert answer.served == answer.asked, stream.table()

    stream.during("Redis is killed, its disk lost", lambda: restarted(release, down_s=1, lose=True))
    until_closed(engine, stream, "breaker closes at last")
    until_served(stream, "stored again")
    stream.during("calm again", lambda: time.sleep(SECONDS))
    return took


@pytest.mark.timeout(int(900 + 20 * SECONDS))
def test_restarts_cost_hits_and_nothing_else(release: Release, text_model: Path, tmp_path: Path) -> None:
    release.cluster.start()
    expected = right_answers(text_model, tmp_path / "alone.log")
    release.cluster.until_ready()
    with Engine(text_model, kv=release.settings(), log_path=tmp_path / "engine.log") as engine:
        stream = Stream(engine, expected)
        took = a_bad_day(release, engine, stream)
        counters = scheduler_counters(engine)
    computed_s = statistics.median(answer.seconds for answer in stream.answers if not answer.served)
    worst_s = max(answer.seconds for answer in stream.answers)
    print(f"\n{stream.table()}")
    print(f"computed in {computed_s * 1e3:.0f} ms; the worst took {worst_s / computed_s:.1f} times that")
    print(f"janitors ended in {', '.join(f'{one:.1f} s' for one in took)}")
    assert all(answer.same for answer in stream.answers), stream.table()
    assert worst_s < PATIENCE_S / 2, stream.table()
    # It was a bad day.
    assert counters["miss_blocks{breaker_open}"] > 0, counters
    assert max(took) < release.janitors[0].grace_s, took
    for pod in release.janitors:
        pod.until_ready()
        assert pod.restarts == 0, pod.describe()
        pod.wait(lambda pod: release.metrics(pod)['kvstore_up{backend="index"}'] == 1)
