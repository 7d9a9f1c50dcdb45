"""One variant at a time: what its requests take, and what becomes of them under faults."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tests.e2e.engine import Engine, EngineDied, EngineError, Result, group_members
from tests.e2e.sharing import prompt
from tests.servers.s3.servers import S3Server
from trials.benchmarks.peers.report import Outcome, verdict
from trials.benchmarks.peers.variants import Nothing, Variant
from trials.faults.peers import quiet

#: Longest time for one request, and for one variant in one round.
HANG_S, DEADLINE_S = 60.0, 400
OUTPUT = 8
#: KV of one token of the model.
TOKEN_BYTES = 4096
_LOOKUPS = "__import__('trials.benchmarks.peers.lookups', fromlist=['x'])"


@dataclass
class Phase:
    """Requests of one kind, one number for each."""

    ttft_s: list[float] = field(default_factory=list)
    #: CPU seconds of the engine, and of what runs beside it.
    engine_cpu_s: list[float] = field(default_factory=list)
    servers_cpu_s: list[float] = field(default_factory=list)
    #: Over loopback, where it is this benchmark's alone.
    network_bytes: list[int] = field(default_factory=list)
    lookup_s: list[float] = field(default_factory=list)
    #: The share of its tokens that the engine counts as loaded or its own.
    cached: list[float] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)


@dataclass
class Plan:
    """How much is measured: prompts of so many tokens, the same for every variant of a round."""

    tokens: int = 4096
    prompts: int = 3
    rounds: int = 3
    own_network: bool = False

    def of_round(self, number: int) -> list[dict[str, Any]]:
        return [prompt(self.tokens, 10_000 + 100 * number + i) for i in range(self.prompts)]

    @property
    def first(self) -> dict[str, Any]:
        """What each engine is asked for first, which doesn't count."""
        return prompt(self.tokens, 9_999)

    @property
    def arguments(self) -> dict[str, Any]:
        return {"max_model_len": self.tokens + 256, "max_num_batched_tokens": 2048}


class Reference:
    """The tokens of an engine without a cache."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[int, ...], list[int]] = {}
        #: How long it takes for its first ones.
        self.cold_s: list[float] = []

    def right(self, one: dict[str, Any], result: Result) -> bool:
        """Whether these are its tokens. The first answer for a prompt, which is that engine's, is."""
        return self._tokens.setdefault(tuple(one["prompt_token_ids"]), result.token_ids) == result.token_ids


@contextmanager
def opened(kind: type[Variant], s3: S3Server | None) -> Iterator[Variant]:
    """A variant in a folder of its own, with a deadline, that is gone afterwards."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"not within {DEADLINE_S} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(DEADLINE_S)
    try:
        with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as scratch:
            variant = kind(Path(scratch), s3)
            try:
                yield variant
            finally:
                signal.alarm(0)
                variant.close()
    finally:
        signal.alarm(0)


def measure(kind: type[Variant], plan: Plan, number: int, s3: S3Server | None, reference: Reference) -> Any:
    """One variant in one round: phases by name, and the bytes that it stored for each prompt."""
    prompts, found = plan.of_round(number), {}
    with opened(kind, s3) as variant:
        engine = _started(variant, plan)
        before = variant.stored_bytes()
        found["cold"] = _ask(engine, variant, plan, prompts, reference, stores=True)
        after = variant.stored_bytes()
        _forget(engine, variant)
        found["warm"] = _ask(engine, variant, plan, prompts, reference)
        if variant.keeps:
            variant.stop()
            engine = _started(variant, plan)
            found["restart"] = _ask(engine, variant, plan, prompts, reference)
        variant.stop()
    reference.cold_s += found["cold"].ttft_s if kind is Nothing else []
    stored = (after - before) / len(prompts) if after is not None and before is not None else None
    return {"phases": {name: asdict(phase) for name, phase in found.items()}, "stored_bytes": stored}


def _started(variant: Variant, plan: Plan) -> Engine:
    """An engine that has stored and loaded something."""
    engine = variant.start(**plan.arguments)
    for _ in range(2):
        engine.generate([plan.first], max_tokens=OUTPUT, timeout_s=HANG_S)
        quiet(engine, variant, False)
        _forget(engine, variant)
    engine.evaluate(f"{_LOOKUPS}.watch(llm)")
    return engine


def _forget(engine: Engine, variant: Variant) -> None:
    end = time.monotonic() + HANG_S
    while variant.forgets and not engine.reset_prefix_cache() and time.monotonic() < end:
        engine.idle(0.05)


def _ask(
    engine: Engine,
    variant: Variant,
    plan: Plan,
    prompts: Sequence[dict[str, Any]],
    reference: Reference,
    *,
    stores: bool = False,
) -> Phase:
    phase = Phase()
    for one in prompts:
        members, servers = group_members(engine.pid), variant.servers()
        before = _cpu_s(members), _cpu_s(servers), _loopback_bytes()
        engine.evaluate(f"{_LOOKUPS}.take()")
        [result] = engine.generate([one], max_tokens=OUTPUT, timeout_s=HANG_S)
        assert result.ttft_s is not None, f"ended as {result.finish_reason}"
        after = _cpu_s(members), _cpu_s(servers), _loopback_bytes()
        phase.lookup_s += engine.evaluate(f"{_LOOKUPS}.take()")[:1]
        if stores:
            quiet(engine, variant, False)
        phase.ttft_s.append(result.ttft_s)
        phase.engine_cpu_s.append(after[0] - before[0])
        phase.servers_cpu_s.append(after[1] - before[1])
        if plan.own_network:
            phase.network_bytes.append(after[2] - before[2])
        phase.cached.append((result.cached_tokens or 0) / result.prompt_tokens)
        phase.right.append(reference.right(one, result))
    return phase


def _cpu_s(pids: Sequence[int]) -> float:
    """CPU seconds of processes so far, all threads, those that ended too."""
    total = 0.0
    for pid in pids:
        try:
            # The clock of a process (clock_getcpuclockid).
            total += time.clock_gettime((~pid << 3) | 2)
        except OSError:
            continue
    return total


def _loopback_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    return 0


FAULTS = ("flipped bytes", "index killed", "full")


def suffer(kind: type[Variant], fault: str, plan: Plan, s3: S3Server | None, reference: Reference) -> str:
    """What becomes of the prompts of round 0 under a fault, in words."""
    prompts = plan.of_round(0)
    outcomes: list[Outcome] = []
    if fault in kind.cannot:
        return kind.cannot[fault]
    with opened(kind, s3) as variant:
        if fault == "full":
            variant.fill(plan.tokens * plan.prompts * TOKEN_BYTES * 3 // 4)
        try:
            engine = variant.start(**plan.arguments)
            for one in prompts:
                if not _outcome(engine, one, reference, 0.0).right:
                    return "request failed while storing"
                quiet(engine, variant, False)
            if fault == "index killed":
                _forget(engine, variant)
                variant.kill_index()
            else:
                variant.stop()
                if fault == "flipped bytes":
                    variant.flip()
                engine = variant.start(**plan.arguments)
            cold_s = median(reference.cold_s)
            outcomes += [_outcome(engine, one, reference, cold_s) for one in prompts]
        except EngineDied as exc:
            hung = "gave no answer" in str(exc)
            return verdict(outcomes, "hangs inside a step" if hung else "engine dead")
        except EngineError as exc:
            # In `vllm serve` what escapes a step ends the engine core.
            return verdict(outcomes, f"engine dead: {exc.kind}")
        return verdict(outcomes)


def _outcome(engine: Engine, one: dict[str, Any], reference: Reference, cold_s: float) -> Outcome:
    began = time.monotonic()
    try:
        [result] = engine.generate([one], max_tokens=OUTPUT, timeout_s=HANG_S)
    except EngineError as exc:
        if exc.kind != "TimeoutError":
            raise
        return Outcome(answered=False, right=False, loaded=False, hung=True)
    return Outcome(
        answered=result.finish_reason == "length",
        right=reference.right(one, result),
        loaded=result.external_tokens > 0 and (result.ttft_s or 0.0) < cold_s / 2,
        added_s=time.monotonic() - began - cold_s,
    )
