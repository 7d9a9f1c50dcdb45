"""Faults that kvstore, vLLM's own tiers and LMCache can all be put through, beside each other.

    python -m trials.faults.peers [--systems kvstore vllm lmcache] [--faults WORD ...] [--out FILE]

Run by hand, as root (some rows mount), with a Python that has LMCache beside this vLLM.

Each cell: an engine stores eight prompts and is dropped; a fresh one is asked for the same prompts with the
fault there, and for two that nobody has stored. Its greedy tokens in float32 are held against those of an
engine without any store, each request's time against the same computed cold. What is not right, or slow, is
run twice more.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.engine import Engine, EngineDied, EngineError
from tests.e2e.sharing import prompt
from tests.servers.redis import RedisServer
from trials.faults.peer_faults import FAULTS, Fault, World
from trials.faults.peer_systems import SYSTEMS, VARIANTS, LMCache, System, missing, versions

#: Seven of LMCache's chunks of 256 tokens: nothing of a prompt is left out by any of the three.
TOKENS = 1792
STORED = [prompt(TOKENS, 700 + i) for i in range(8)]
FRESH = [prompt(TOKENS, 720 + i) for i in range(2)]
CONTROL, AFTER = prompt(TOKENS, 730), prompt(TOKENS, 731)
HANG_S = 60.0
HANG = f"hang > {HANG_S:.0f} s"
#: More than this on top of a cold request is run again before it is reported.
SLOW_S = 1.0

#: What a reader of the table must know.
NOTES = [
    "A cell is the worst of its requests. What is not right, or more than 1 s slower, was run three times; "
    "what is slow is the median of the three. The machine was shared: below 1 s is noise.",
    "LMCache's wheel stood beside vLLM's environment, with newer numpy, protobuf, prometheus_client and "
    "OpenTelemetry than it asks for, and without its CUDA packages.",
    "For LMCache to start beside vLLM 0.32's CPU build, one method of llvmlite, which it imports, was "
    "changed (trials/faults/lmcache_connector.py).",
    "From the store: of how many prompts the engine counts some as loaded.",
    "LMCache's hang is known upstream (LMCache#4945, pull request 5255, open in September 2026): a look-up "
    "waits for its slowest L2 adapter. Its adapter for Valkey has a timeout of 5 s and does not hang; its "
    "aesgcm serde finds flipped bytes (variants).",
]

Prompt = dict[str, Any]


@dataclass
class Cold:
    """What an engine without a store answers, and in how many seconds."""

    tokens: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    seconds: dict[tuple[int, ...], float] = field(default_factory=dict)


@dataclass
class Seen:
    """What became of one run."""

    asked: int = 0
    #: Prompts with wrong tokens: of those that were stored, and of the two new ones.
    wrong: int = 0
    wrong_new: int = 0
    failed: int = 0
    #: Prompts of which the engine promised itself something from the store; the control is not counted.
    hits: int = 0
    #: Whether the control prompt came from the store before the fault: whether the system worked at all.
    control: bool = False
    added_s: float = -1e9
    #: How the engine ended, or that it hung; empty if neither.
    end: str = ""
    #: Whether it answered a new prompt rightly when the fault was over.
    after: bool = False
    server_dead: bool = False
    multiprocess: bool = False

    @property
    def verdict(self) -> str:
        parts = []
        if self.end:
            parts.append(self.end)
        if self.failed:
            parts.append(f"{self.failed} of {self.asked} requests failed")
        if self.wrong:
            parts.append(f"WRONG TOKENS ({self.wrong} of {len(STORED)})")
        if self.wrong_new:
            parts.append(f"WRONG TOKENS for {self.wrong_new} of {len(FRESH)} prompts that were not stored")
        if self.server_dead:
            parts.append("its server dead")
        if not self.end and not self.after:
            parts.append("no right answer when the fault is over")
        if not parts:
            parts.append("right tokens")
            parts.append(f"{self.hits} of {len(STORED)} from the store" if self.hits else "all computed")
        if not self.end:
            parts.append(f"+{max(0.0, self.added_s):.1f} s")
        return ", ".join(parts)

    @property
    def right(self) -> bool:
        return self.verdict.startswith("right tokens")


class Ended(Exception):
    """The engine is dead, or hangs."""


def ask(engine: Engine, one: Prompt, cold: Cold, seen: Seen) -> None:
    key = tuple(one["prompt_token_ids"])
    began = time.monotonic()
    try:
        [result] = engine.generate([one], timeout_s=HANG_S)
    except EngineError as exc:
        # In `vllm serve` what escapes a step ends the engine core.
        raise Ended(HANG if exc.kind == "TimeoutError" else f"engine dead: {exc.kind}") from exc
    except EngineDied as exc:
        hung = "gave no answer" in str(exc)
        raise Ended(f"{HANG} inside a step" if hung else "engine dead: its process ended") from exc
    seen.asked += 1
    seen.added_s = max(seen.added_s, time.monotonic() - began - cold.seconds[key])
    if result.finish_reason != "length":
        seen.failed += 1
    elif result.token_ids != cold.tokens[key]:
        seen.wrong_new += one in FRESH
        seen.wrong += one not in FRESH
    seen.hits += result.external_tokens > 0


def answers(engine: Engine, cold: Cold) -> bool:
    """Whether a prompt that nobody has asked for gets its right answer, now that the fault is over."""
    seen = Seen()
    try:
        ask(engine, AFTER, cold, seen)
    except Ended:
        return False
    return not seen.wrong and not seen.failed


def quiet(engine: Engine, system: System, multiprocess: bool) -> None:
    """Returns when nothing has been stored for 0.6 s."""
    end, since, last = time.monotonic() + 20, time.monotonic(), system.signature()
    while time.monotonic() - since < 0.6 and time.monotonic() < end:
        time.sleep(0.1) if multiprocess else engine.idle(0.1)
        now = system.signature()
        if now != last:
            since, last = time.monotonic(), now


def run_once(kind: type[System], fault: Fault, cold: Cold, scratch: Path, *, multiprocess: bool) -> Seen:
    seen = Seen(multiprocess=multiprocess)
    folder = scratch / "store"
    folder.mkdir()
    redis = RedisServer(scratch / "redis").start() if fault.redis else None
    system = kind(folder, scratch / "logs", redis)
    world = World(system, folder, redis)
    try:
        fault.first(world)
        engine = system.start(multiprocess=multiprocess)
        known: set[Path] = set()
        for one in [CONTROL, *STORED]:
            ask(engine, one, cold, seen)
            quiet(engine, system, multiprocess)
            made = sorted(set(system.files()) - known, key=lambda path: path.stat().st_mtime_ns)
            known |= set(made)
            world.files.append(made)
        del world.files[0]
        system.stop()
        seen.asked, seen.added_s, seen.hits = 0, -1e9, 0
        fault.rest(world)
        try:
            engine = system.start(multiprocess=multiprocess)
        except (EngineError, EngineDied, RuntimeError) as exc:
            raise Ended(f"does not start: {getattr(exc, 'kind', type(exc).__name__)}") from exc
        ask(engine, CONTROL, cold, seen)
        seen.control = seen.hits == 1
        seen.asked, seen.added_s, seen.hits = 0, -1e9, 0
        fault.live(world)
        for one in [*STORED, *FRESH]:
            ask(engine, one, cold, seen)
        world.put_back(world.undo)
        seen.server_dead = isinstance(system, LMCache) and not system.server_alive
        seen.after = answers(engine, cold)
    except Ended as exc:
        seen.end = str(exc)
        if seen.end == HANG:
            world.put_back(world.undo)
            seen.after = answers(engine, cold)
            seen.end += (
                ", answers again when the fault is over"
                if seen.after
                else ", and no answer when the fault is over"
            )
        seen.server_dead = isinstance(system, LMCache) and "start" not in seen.end and not system.server_alive
    finally:
        world.put_back(world.undo)
        system.stop()
        world.put_back(world.clear)
        if redis is not None:
            redis.kill()
    return seen


def cold_answers(logs: Path) -> Cold:
    cold = Cold()
    with System(logs, logs).start() as engine:
        for one in [CONTROL, *STORED, *FRESH, AFTER]:
            times = []
            for _ in range(3):
                engine.reset_prefix_cache()
                began = time.monotonic()
                [result] = engine.generate([one])
                times.append(time.monotonic() - began)
            key = tuple(one["prompt_token_ids"])
            cold.tokens[key], cold.seconds[key] = result.token_ids, statistics.median(times)
    return cold


def cell(kind: type[System], fault: Fault, cold: Cold, keep: Path) -> tuple[str, list[Seen]]:
    """The words for the table, and every run behind them."""
    runs: list[Seen] = []
    while not runs or (len(runs) < 3 and not (runs[0].right and runs[0].added_s <= SLOW_S)):
        # The last of three as `vllm serve` runs it: the engine core in a process of its own.
        dead = len(runs) == 2 and any("dead" in run.end for run in runs)
        with tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True) as name:
            scratch = Path(name)
            runs.append(run_once(kind, fault, cold, scratch, multiprocess=dead))
            shutil.copytree(
                scratch / "logs", keep / f"{kind.__name__}-{fault.name.replace(' ', '-')}-{len(runs)}"
            )
        print(f"    {runs[-1].verdict}   {asdict(runs[-1])}", flush=True)
    if not fault.early and not all(run.control for run in runs if not run.end):
        return f"not comparable: nothing came from the store before the fault ({runs[-1].verdict})", runs
    right = [run for run in runs if run.right]
    if len(right) == len(runs):
        # Others use the machine too: what is slow once in three is theirs.
        return sorted(runs, key=lambda run: run.added_s)[len(runs) // 2].verdict, runs
    words = max(runs, key=lambda run: (bool(run.end), run.failed, run.wrong, run.wrong_new)).verdict
    return words + (f"; {len(right)} of 3 runs right" if right else "; 3 runs of 3"), runs


def chosen(words: list[str]) -> list[Fault]:
    return [fault for fault in FAULTS if any(word in fault.name for word in words)]


def variant(options: argparse.Namespace) -> int:
    """Some rows for LMCache configured otherwise: whether a result is the configuration's."""
    cold = cold_answers(options.logs)
    table = json.loads(options.out.read_text())
    cells = table.setdefault("variants", {}).setdefault(f"lmcache, {options.variant}", {})
    for fault in chosen(options.faults):
        print(f"{fault.name} / {options.variant}", flush=True)
        cells[fault.name], _ = cell(VARIANTS[options.variant], fault, cold, options.logs)
        options.out.write_text(json.dumps(table, indent=1) + "\n")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trials.faults.peers")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--faults", nargs="+", default=[""], help="words of the names of the rows to run")
    parser.add_argument("--variant", choices=list(VARIANTS), help="LMCache configured otherwise, kept apart")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()) / "peers-logs")
    options = parser.parse_args()
    if os.geteuid() == 0 and "PEERS_MOUNTS" not in os.environ:
        # Mounts of our own, which end with us.
        os.environ["PEERS_MOUNTS"] = "own"
        os.execvp(
            "unshare", ["unshare", "--mount", sys.executable, "-m", "trials.faults.peers", *sys.argv[1:]]
        )
    options.logs.mkdir(parents=True, exist_ok=True)
    if options.variant:
        return variant(options)
    cold = cold_answers(options.logs)
    print(f"cold: {min(cold.seconds.values()):.2f} to {max(cold.seconds.values()):.2f} s", flush=True)
    table = json.loads(options.out.read_text()) if options.out.exists() else {"rows": []}
    rows = {row["fault"]: row for row in table["rows"]}
    for fault in chosen(options.faults):
        row = rows.setdefault(fault.name, {"fault": fault.name, **dict.fromkeys(SYSTEMS, "not run")})
        for name in options.systems:
            print(f"{fault.name} / {name}", flush=True)
            if reason := missing(name):
                row[name] = f"not run: {reason}"
            elif fault.redis and name == "vllm":
                row[name] = "has no Redis tier"
            elif fault.root and os.geteuid() != 0:
                row[name] = "not run: needs root to mount"
            else:
                row[name], _ = cell(SYSTEMS[name], fault, cold, options.logs)
            table = {
                **table,
                "rows": [rows[one.name] for one in FAULTS if one.name in rows],
                "versions": versions(),
                "notes": NOTES,
                "configuration": {name: kind.configuration for name, kind in SYSTEMS.items()},
                "machine": f"{os.cpu_count()} shared cores, no GPU, vLLM's CPU build, float32; prompts of "
                f"{TOKENS} tokens, cold {statistics.median(cold.seconds.values()):.1f} s; below 1 s is noise",
                "date": time.strftime("%Y-%m-%d"),
            }
            options.out.write_text(json.dumps(table, indent=1) + "\n")
            print(f"  -> {row[name]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
