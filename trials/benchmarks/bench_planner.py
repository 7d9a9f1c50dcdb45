"""What the planner is worth: time to the first token, by how fast the network to the payloads is.

    python -m trials.benchmarks.bench_planner [--paced] [--rounds N] [--tokens N] [--json FILE] [--svg FILE]

Three real engines on the CPU, of which one works at a time, share a bucket behind a network whose speed and
latency change while requests run, and which can stall (trials.benchmarks.link). Their `kv.load` differs:

    never      computes every prompt
    always     loads every prompt
    adaptive   does what the planner says

Every request is for a prompt that the bucket has and the engine has not. Each round asks all three, another
one first each time, so that whatever else the machine does happens to all. A ratio is

    TTFT of adaptive / min(TTFT of never, TTFT of always)

of medians over the rounds next to it; 1 is as good as the better one. What a busy machine does to such a
ratio is the noise: the better one's own ratio. "right" is free of that, the share of requests that did as
the better one does. With `--paced` the engines compute as on an accelerator (paced.py), which
takes its time whatever the processor does: no noise of computing, and loads have the processor for
themselves. `--quick` takes seconds and says nothing.

    steady     after a few requests at this speed
    change     of the first requests after a change: the one under way, and those begun within five seconds
    stall      nothing passes for ten seconds; then, after how long a prompt is loaded again
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from tests.e2e.engine import ROOT, Engine
from tests.e2e.sharing import BLOCK, check_store, full_blocks, prompt
from tests.servers.redis import RedisServer
from tests.servers.s3.nginx import NginxServer
from tests.waiting import PATIENCE_S, until
from tools.models import build
from trials.benchmarks.bench_disk import machine
from trials.benchmarks.link import Link
from trials.benchmarks.plot import Curve, log_plot

MODES: Final = ("never", "always", "adaptive")
#: Counters of an engine that tell what a request loaded.
_COUNTED: Final = ("vllm:kvstore_kv_loaded_tokens_total", "vllm:kvstore_kv_loads_total")
#: KV of one token of the model.
_TOKEN_BYTES: Final = 4096
#: What a token takes with --paced, in microseconds, and each token before it.
_TOKEN_US, _DEPTH_US = 250.0, 0.03
#: Seconds after a change in which the planner may still be learning.
LEARNING_S: Final = 5.0
#: Longest time that one speed may cost `always`, which may be slow beyond measure, in seconds.
_MOST_S: Final = 60.0
#: Speed at which latencies are measured, in MB/s: that of the network hardly counts.
_FAST: Final = 400.0


@dataclass(frozen=True)
class Network:
    """A speed of the link in MB/s, and a latency in milliseconds."""

    mb_s: float
    latency_ms: float = 0.0

    def __str__(self) -> str:
        return f"{self.mb_s:g} MB/s" + (f" + {self.latency_ms:g} ms" if self.latency_ms else "")


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    tokens: int = 8192
    paced: bool = False
    prompts: int = 4
    rounds: int = 10
    settle: int = 4
    repeats: int = 3
    stall_s: float = 10.0
    #: What stalls: slow enough that a load is under way then.
    stalled: Network = Network(40)
    networks: Sequence[Network] = (
        *(Network(mb_s) for mb_s in (2, 5, 10, 20, 40, 100, _FAST)),
        *(Network(_FAST, ms) for ms in (100, 300, 1000, 1500, 3000)),
    )
    changes: Sequence[tuple[Network, Network]] = (
        (Network(100), Network(5)),
        (Network(5), Network(100)),
        (Network(_FAST), Network(_FAST, 1500)),
        (Network(_FAST, 1500), Network(_FAST)),
    )


QUICK: Final = Plan(
    tokens=512,
    prompts=2,
    rounds=1,
    settle=1,
    repeats=1,
    stall_s=0.2,
    stalled=Network(_FAST),
    networks=(Network(5), Network(_FAST, 10)),
    changes=((Network(_FAST), Network(5)),),
)


@dataclass(frozen=True)
class Answer:
    """What became of a request: seconds to its first token, the share of its blocks that a load brought, and
    whether there was a load, complete or not."""

    ttft: float
    loaded: float
    tried: bool


class Bed:
    """Three engines, their bucket, and the network between. A context manager's `bed` makes it."""

    def __init__(self, plan: Plan, engines: dict[str, Engine], link: Link) -> None:
        self.plan, self.engines, self.link = plan, engines, link
        self.prompts = [prompt(plan.tokens, seed) for seed in range(plan.prompts)]
        self._turns = {mode: itertools.cycle(self.prompts) for mode in engines}

    def set(self, network: Network) -> None:
        self.link.bytes_per_s, self.link.latency_s = network.mb_s * 1e6, network.latency_ms / 1e3

    def ask(self, mode: str, meanwhile: Callable[[], object] | None = None) -> Answer:
        """A request for a prompt that this engine has forgotten; `meanwhile` is called while it is under
        way, after a tenth of a second."""
        engine = self.engines[mode]
        # Blocks of a load that was given up are held until its last copy has ended, which steps notice.
        until(lambda: engine.reset_prefix_cache() or engine.evaluate("served._step({})"))
        before = engine.metrics()
        engine.start_generate([next(self._turns[mode])], max_tokens=1)
        if meanwhile is not None:
            time.sleep(0.1)
            meanwhile()
        [result] = engine.finish_generate()
        assert result.ttft_s is not None
        after = engine.metrics()
        tokens, loads = (after.get(name, 0) - before.get(name, 0) for name in _COUNTED)
        blocks = result.prompt_tokens // BLOCK * BLOCK
        return Answer(result.ttft_s, tokens / blocks, loads > 0)

    def settle(self, network: Network) -> None:
        """Lets all know this network."""
        self.set(network)
        for _ in range(self.plan.settle):
            self.ask("adaptive")
        self.ask("always")


@contextmanager
def bed(plan: Plan) -> Iterator[Bed]:
    """The engines, with all prompts in the bucket."""
    model = build(ROOT / ".cache" / "models", "text")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-planner-")))
        redis = stack.enter_context(RedisServer(folder))
        nginx = stack.enter_context(NginxServer())
        (nginx.root / "bucket").mkdir()
        link = stack.enter_context(Link(nginx.port))
        store = {
            "index": redis.url,
            "redis": {"timeout_s": PATIENCE_S, "connect_timeout_s": PATIENCE_S},
            "payloads": f"s3://bucket/bench?endpoint=http://127.0.0.1:{link.port}&region=us-east-1",
            "s3": {"access_key_id": "nobody", "secret_access_key": "checks"},
        }
        engines = {
            mode: stack.enter_context(
                Engine(
                    model,
                    kv={**store, "kv": {"load": mode, "match_deadline_s": 20.0}},
                    log_path=folder / f"{mode}.log",
                    max_model_len=plan.tokens + BLOCK,
                    max_num_batched_tokens=512,
                    kv_cache_memory_bytes=4 * plan.tokens * _TOKEN_BYTES + (16 << 20),
                )
            )
            for mode in MODES
        }
        if plan.paced:
            paces = (
                f"__import__('trials.benchmarks.paced').benchmarks.paced.pace(llm, {_TOKEN_US}, {_DEPTH_US})"
            )
            for engine in engines.values():
                engine.evaluate(paces)
        made = Bed(plan, engines, link)
        # Whoever stores them has computed them: so the planner knows what computing takes, as every engine
        # does that serves.
        for one in made.prompts:
            engines["adaptive"].generate([one], max_tokens=1)
            engines["adaptive"].idle(0.0)
        blocks = sum(full_blocks(one) for one in made.prompts) // BLOCK
        until(lambda: check_store(store)["blocks"] == blocks)
        for mode in ("never", "always"):
            engines[mode].generate([prompt(plan.tokens, plan.prompts)], max_tokens=1)
            engines[mode].idle(0.0)
        yield made


def near(samples: Sequence[float], at: int) -> float:
    """The median of the samples around one."""
    return statistics.median(samples[max(0, at - 2) : at + 3] or samples[-5:])


def percentile(samples: Sequence[float], percent: int) -> float:
    """The smallest sample that so many percent of them don't exceed."""
    return sorted(samples)[max(0, -(-len(samples) * percent // 100) - 1)]


def spread(samples: Sequence[float]) -> dict[str, float]:
    return {
        "p50": statistics.median(samples),
        "p99": percentile(samples, 99),
        "mean": statistics.mean(samples),
    }


@dataclass(frozen=True)
class Steady:
    """One network, in steady state: seconds by mode, and ratios to the better of both others."""

    network: Network
    seconds: dict[str, list[float]]
    #: Answers to the requests of `adaptive`.
    answers: list[Answer]

    @property
    def right(self) -> float:
        """The share of requests of `adaptive` that did as the better mode."""
        median = {mode: statistics.median(found) for mode, found in self.seconds.items()}
        loads = median["always"] < median["never"]
        return statistics.mean(one.loaded > 0.9 if loads else not one.tried for one in self.answers)

    @property
    def loaded(self) -> float:
        """The share of its prompts that `adaptive` loaded."""
        return statistics.mean(one.loaded for one in self.answers)

    @property
    def best(self) -> float:
        """Median seconds of the better one."""
        return min(statistics.median(self.seconds[mode]) for mode in ("never", "always"))

    @property
    def ratios(self) -> dict[str, list[float]]:
        """Returns by mode the ratios to the better of `never` and `always` in the rounds around; and as
        "noise" those of the better one itself."""
        found: dict[str, list[float]] = {
            mode: [
                sample / min(near(self.seconds[other], at) for other in ("never", "always"))
                for at, sample in enumerate(self.seconds[mode])
            ]
            for mode in MODES
        }
        better = min(("never", "always"), key=lambda mode: statistics.median(self.seconds[mode]))
        return found | {"noise": found[better]}


def steady(bed: Bed, network: Network) -> Steady:
    """Measures one network."""
    bed.settle(network)
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    answers = []
    for turn in range(bed.plan.rounds):
        first = turn % len(MODES)
        for mode in (*MODES[first:], *MODES[:first]):
            if mode == "always" and sum(seconds[mode]) > _MOST_S and len(seconds[mode]) > 2:
                continue
            answer = bed.ask(mode)
            seconds[mode].append(answer.ttft)
            if mode == "adaptive":
                answers.append(answer)
    return Steady(network, seconds, answers)


@dataclass(frozen=True)
class Change:
    """Ratios of `adaptive` around changes of the network: of requests under way, and begun soon after."""

    before: Network
    after: Network
    under_way: list[float]
    soon: list[float]


def change(bed: Bed, before: Network, after: Network, steady_best: float) -> Change:
    """Changes the network a few times while a request runs. `steady_best` is what the better mode takes at
    the network that it changes to."""
    under_way, soon = [], []
    for _ in range(bed.plan.repeats):
        bed.settle(before)
        always = bed.ask("always", lambda: bed.set(after)).ttft
        never = bed.ask("never").ttft
        bed.settle(before)
        changed: list[float] = []

        def now(changed: list[float] = changed) -> None:
            bed.set(after)
            changed.append(time.monotonic())

        under_way.append(bed.ask("adaptive", now).ttft / min(always, never))
        while time.monotonic() < changed[0] + LEARNING_S:
            soon.append(bed.ask("adaptive").ttft / steady_best)
            if bed.plan.tokens == QUICK.tokens:
                break
    return Change(before, after, under_way, soon or under_way)


@dataclass(frozen=True)
class Stall:
    """A store that stalls: ratios to computing, and seconds from its end to the first prompt loaded."""

    under_way: list[float]
    soon: list[float]
    loads_again_s: list[float]


def stall(bed: Bed, network: Network) -> Stall:
    """Stalls the network while a request runs."""
    under_way, soon, again = [], [], []
    for _ in range(bed.plan.repeats):
        bed.settle(network)
        never = bed.ask("never").ttft
        began = time.monotonic()
        under_way.append(bed.ask("adaptive", bed.link.cut).ttft / never)
        while time.monotonic() < began + bed.plan.stall_s:
            soon.append(bed.ask("adaptive").ttft / never)
        bed.link.mend()
        began = time.monotonic()
        until(lambda: bed.ask("adaptive").loaded > 0.5 or bed.plan.tokens == QUICK.tokens)
        again.append(time.monotonic() - began)
    return Stall(under_way, soon or under_way, again)


def run(plan: Plan, say: Callable[[str], object]) -> dict[str, Any]:
    """Measures all, and tells `say` of each part when it is there. Returns the report."""
    with bed(plan) as made:
        nbytes = plan.tokens * _TOKEN_BYTES
        say(f"prompts of {plan.tokens} tokens, {nbytes / 1e6:.0f} MB each")
        say(_HEAD)
        rows = []
        for network in plan.networks:
            rows.append(steady(made, network))
            say(_line(rows[-1]))
        bests = {row.network: row.best for row in rows}
        pooled = spread([ratio for row in rows for ratio in row.ratios["adaptive"]])
        noise = spread([ratio for row in rows for ratio in row.ratios["noise"]])
        say(f"adaptive, all of them: p50 {pooled['p50']:.2f}, p99 {pooled['p99']:.2f}")
        say(f"the better, to itself: p50 {noise['p50']:.2f}, p99 {noise['p99']:.2f}")
        changes = []
        for before, after in plan.changes:
            best = bests[after] if after in bests else steady(made, after).best
            changes.append(change(made, before, after, best))
            say(_change_line(changes[-1]))
        stalled = stall(made, plan.stalled)
        say(_stall_line(stalled))
    return {
        "machine": machine(Path("/tmp")),
        "tokens": plan.tokens,
        "paced": plan.paced,
        "prompt_bytes": nbytes,
        "rounds": plan.rounds,
        "steady": [
            {
                **asdict(row.network),
                "seconds": {mode: spread(found) for mode, found in row.seconds.items()},
                "ratios": {mode: spread(found) for mode, found in row.ratios.items()},
                "loaded": row.loaded,
                "right": row.right,
            }
            for row in rows
        ],
        "all": {"adaptive": pooled, "noise": noise},
        "changes": [asdict(one) for one in changes],
        "stall": asdict(stalled),
    }


_HEAD = (
    f"{'network':22}{'never s':>9}{'always s':>10}{'adaptive s':>12}{'loaded':>8}{'right':>7}"
    f"{'ratio p50':>11}{'p99':>7}{'always p50':>12}{'noise p99':>11}"
)


def _line(row: Steady) -> str:
    median = {mode: statistics.median(found) for mode, found in row.seconds.items()}
    ratios = {name: spread(found) for name, found in row.ratios.items()}
    return (
        f"{row.network!s:22}{median['never']:>9.2f}{median['always']:>10.2f}{median['adaptive']:>12.2f}"
        f"{row.loaded:>8.0%}{row.right:>7.0%}{ratios['adaptive']['p50']:>11.2f}{ratios['adaptive']['p99']:>7.2f}"
        f"{ratios['always']['p50']:>12.2f}{ratios['noise']['p99']:>11.2f}"
    )


def _change_line(one: Change) -> str:
    return (
        f"{one.before} to {one.after}: under way p50 {statistics.median(one.under_way):.2f}, "
        f"most {max(one.under_way):.2f}; within five seconds p50 {statistics.median(one.soon):.2f}, "
        f"most {max(one.soon):.2f}"
    )


def _stall_line(one: Stall) -> str:
    return (
        f"stalled: under way p50 {statistics.median(one.under_way):.2f}, most {max(one.under_way):.2f}; "
        f"meanwhile p50 {statistics.median(one.soon):.2f}, most {max(one.soon):.2f}; "
        f"loads again after {statistics.median(one.loads_again_s):.1f} s"
    )


def drawn(report: dict[str, Any]) -> str:
    """The ratios by speed, as SVG."""
    rows = [row for row in report["steady"] if not row["latency_ms"]]
    curves = [
        Curve(f"{mode}, p50", [(row["mb_s"], row["ratios"][mode]["p50"]) for row in rows]) for mode in MODES
    ]
    curves.append(Curve("adaptive, p99", [(row["mb_s"], row["ratios"]["adaptive"]["p99"]) for row in rows]))
    return log_plot(
        "Time to first token, to the better of computing and loading all",
        f"prompts of {report['tokens']} tokens, {report['prompt_bytes'] / 1e6:.0f} MB; "
        f"{report['machine']['cpu']}",
        "network to the payloads, MB/s",
        curves,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=Plan.rounds)
    parser.add_argument("--tokens", type=int, default=Plan.tokens, help="of each prompt")
    parser.add_argument("--paced", action="store_true", help="compute as an accelerator does")
    parser.add_argument("--quick", action="store_true", help="little of everything; says nothing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--svg", type=Path)
    given = parser.parse_args(arguments)
    plan = replace(
        QUICK if given.quick else Plan(tokens=given.tokens, rounds=given.rounds), paced=given.paced
    )
    report = run(plan, lambda line: print(line, flush=True))
    if given.json:
        given.json.write_text(json.dumps(report, indent=2))
    if given.svg:
        given.svg.write_text(drawn(report), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
