"""advise: says from a recording of requests whether a cache pays, how large it should be, and what to set."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from kvstore import __version__
from kvstore.admin.advise.reports import (
    AdviceReport,
    CapacityAdvice,
    NamespaceAdvice,
    PromptLoad,
    ReadSpeed,
    RedisSize,
    Verdict,
)
from kvstore.admin.advise.since import since
from kvstore.admin.advise.worth import Given, Replayed, Worth
from kvstore.admin.progress import ProgressListener
from kvstore.admin.simulate.optimum import optimum
from kvstore.admin.simulate.replay import ReplayTotals, endless, lru
from kvstore.admin.simulate.reports import Curve, Policy
from kvstore.admin.simulate.simulate import Setup, point, sweep, totals
from kvstore.admin.simulate.traces import Assumed, Trace, read_traces
from kvstore.rules.segments import index_bytes, redis_memory
from kvstore.rules.units import size
from kvstore.rules.weighed import PATIENCE
from schemas.settings import Settings

#: Lengths of prompts for which loading is compared with computing, in tokens.
LENGTHS = (1024, 4096, 16384, 65536)
#: Hits of blocks that no engine has itself, below which there is nothing to be had if their worth is unknown.
_NOTHING = 0.01
#: The share of what the best capacity brings that a smaller one may lack.
_NEARLY = 0.02
_HOUR_S = 3600.0
_UNEVEN = (
    "engines were recorded at different times, or some for more than twice as long as others, as where a "
    "busy one's files were full earlier: all are counted as if recorded for the whole time. Give files of "
    "one time (a larger trace.most_bytes keeps more of it)"
)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked."""

    settings: Settings
    given: Given
    #: URLs for the settings to paste.
    index: str
    payloads: str
    reads: Sequence[ReadSpeed] = ()
    points: int = 12


def advise(
    paths: Sequence[Path],
    assumed: Assumed,
    question: Question,
    progress: ProgressListener,
    *,
    since_s: float | None = None,
) -> AdviceReport:
    """Reads recordings, from `since_s` on if that is given, and weighs what a store would bring. Raises
    ConfigError if a file is no recording, or nothing was recorded since then."""
    trace = read_traces(paths, assumed, progress)
    if since_s is not None:
        trace = since(trace, since_s)
    worth = Worth(trace, question.settings, question.given)
    capacities = sweep(trace.distinct_bytes, question.points)
    replays = {False: list[Replayed](), True: list[Replayed]()}
    for number, capacity in enumerate(capacities, start=1):
        progress.begin(f"a store of {size(capacity)} ({number} of {len(capacities)})")
        for second_use, found in replays.items():
            found.append(worth.replay(capacity, second_use=second_use))
    progress.begin("lru and optimum with all capacities")
    most = endless(trace)
    tallies: dict[Policy, Sequence[ReplayTotals]] = {
        "kvstore": [one.totals for one in replays[False]],
        "lru": lru(trace, capacities),
        "optimum": optimum(trace, capacities),
        "endless": [most] * len(capacities),
    }
    pairs = [
        max(((worth.advice(one), one) for one in both), key=lambda pair: _value(pair[0]))
        for both in zip(*replays.values(), strict=True)
    ]
    best, replayed = _best(pairs)
    local = _local(trace, range(len(trace.requests)))
    gains = max(advice.gained_ratio for advice, _ in pairs)
    if best.net_month is None and gains < _NOTHING * (1 - (local or 0.0)):
        gains = 0.0
    verdict, because, objective = _verdict(worth, best, question.reads, gains=gains > 0)
    return AdviceReport(
        version=__version__,
        verdict=verdict,
        because=tuple(because),
        trace=totals(trace, paths, Setup(question.settings)),
        prices=question.given.prices,
        ceiling_ratio=most.hit_blocks / trace.references,
        local_ratio=local,
        curves=tuple(
            Curve(
                policy=policy,
                segment_blocks=None,
                points=tuple(point(trace, at, one) for at, one in zip(capacities, found, strict=True)),
            )
            for policy, found in tallies.items()
        ),
        capacities=tuple(advice for advice, _ in pairs),
        best=best,
        by_model=tuple(_by_model(worth, replayed)),
        prompts=tuple(_prompts(worth)),
        reads=tuple(question.reads),
        redis=_redis(worth, replayed),
        settings="" if verdict == "no" else settings_to_paste(question, best, objective),
        caveats=tuple(_caveats(worth, question)),
    )


def _best(pairs: Sequence[tuple[CapacityAdvice, Replayed]]) -> tuple[CapacityAdvice, Replayed]:
    """Returns the smallest capacity that is as good as the best one, nearly."""
    most = max(_value(advice) for advice, _ in pairs)
    return next(pair for pair in pairs if _value(pair[0]) >= most - _NEARLY * abs(most))


def _value(advice: CapacityAdvice) -> float:
    """Returns by what capacities are compared: money or, while that isn't known, what is gained."""
    return advice.gained_ratio if advice.net_month is None else advice.net_month


def _verdict(
    worth: Worth, best: CapacityAdvice, reads: Sequence[ReadSpeed], *, gains: bool
) -> tuple[Verdict, list[str], str | None]:
    """Returns whether it pays, why, and the `kv.objective` that it takes if that isn't the default. `gains`
    says whether any capacity brings hits worth a word."""
    gained = f"{best.gained_ratio:.1%} of the blocks asked for would come from the store"
    if not gains:
        why = f"only {gained}: the rest is asked for once, or engines have it themselves"
        return "no", [why], None
    if best.net_month is None or best.saved_month is None:
        return "unclear", [f"{gained} with {size(best.capacity_bytes)}", *_doubts(worth)], None
    bill = best.saved_month - best.net_month
    saved = f"{_money(best.saved_month)} of GPU time a month are saved, and the store costs {_money(bill)}"
    if best.net_month <= 0:
        loses = f"no capacity pays: with {size(best.capacity_bytes)}, {saved}"
        if doubts := list(_doubts(worth)):
            return "unclear", [*doubts, loses, gained], None
        return "no", [loses, gained], None
    need = _break_even(worth)
    # The settings to paste have the shared tier alone.
    speed = min(reads, key=lambda read: read.tier != "shared", default=None)
    if speed is None or need is None:
        return "yes", [saved, gained], None
    speeds = f"reads bring {size(speed.bytes_s)}/s here, and computing is as fast as {size(need)}/s"
    if speed.bytes_s >= need:
        return "yes", [saved, gained, speeds], None
    if speed.bytes_s * PATIENCE >= need:
        slower = (
            "requests wait longer for a load than for computing, and the GPU is free for others meanwhile"
        )
        return "yes", [saved, gained, f"{speeds}: {slower}"], "throughput"
    return "no", [f"loading is slower than computing: {speeds}", saved], None


def _doubts(worth: Worth) -> Iterator[str]:
    """Yields what keeps the money from being known, and what to do about it."""
    if "kv" in worth.unpriced:
        yield (
            f"the recording does not say what computing a token costs{_of_which(worth)}; say how many tokens "
            "of prompts an engine computes in a second (--prefill-tokens-s), or record with kv.observe"
        )
    if "ec" in worth.unpriced:
        yield "no recording says what encoding an item takes; say it (--encode-ms)"
    if worth.uneven:
        yield _UNEVEN


def _of_which(worth: Worth) -> str:
    """Returns the models whose costs aren't known, if others' are."""
    models = {worth.trace.spaces[number].model for number in worth.unpriced.get("kv", ())} - {""}
    return f" with {', '.join(sorted(models))}" if models and worth.known else ""


def _break_even(worth: Worth) -> float | None:
    """Returns the bytes per second below which computing the usual prompt of the usual model is faster than
    loading it; None if that isn't known."""
    found = [line for line in _by_model(worth, None) if line.break_even_bytes_s is not None]
    return max(found, key=lambda line: line.asked_blocks).break_even_bytes_s if found else None


def _groups(trace: Trace) -> dict[tuple[str, str, str], list[int]]:
    """Returns the numbers of the spaces of each model, tenant and kind."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for number, space in enumerate(trace.spaces):
        groups.setdefault((space.model or space.namespace, space.tenant, space.kind), []).append(number)
    return groups


def _local(trace: Trace, numbers: Sequence[int]) -> float | None:
    """Returns the share of KV blocks that engines had themselves, of these requests; None if some don't say,
    or none is for KV. Items that an engine has itself are not recorded."""
    requests = [
        one for one in map(trace.requests.__getitem__, numbers) if trace.spaces[one.space].kind == "kv"
    ]
    if any(request.local is None for request in requests):
        return None
    asked = sum(len(request.chain) for request in requests)
    return sum(request.local or 0 for request in requests) / asked if asked else None


def _by_model(worth: Worth, replayed: Replayed | None) -> Iterator[NamespaceAdvice]:
    """Yields what each model and tenant gets of a capacity, those that ask for most first; None: nothing."""
    trace, months = worth.trace, worth.months
    hits = replayed.hits if replayed is not None else [0] * len(trace.requests)
    seconds, ceiling = worth.seconds_of(hits), _ceiling(trace)
    asked = [len(request.chain) * trace.spaces[request.space].block_bytes for request in trace.requests]
    missed = [
        nbytes - found * trace.spaces[request.space].block_bytes
        for nbytes, found, request in zip(asked, hits, trace.requests, strict=True)
    ]
    whole = worth.advice(replayed) if replayed is not None else None
    bill = whole.storage_month + whole.requests_month + whole.transfer_month if whole is not None else 0.0
    lines = []
    for (model, tenant, kind), spaces in _groups(trace).items():
        own = [number for number, request in enumerate(trace.requests) if request.space in spaces]
        blocks = sum(len(trace.requests[number].chain) for number in own)
        if not blocks:
            continue
        space, cost = trace.spaces[spaces[0]], worth.costs[spaces[0]]
        each = space.block_tokens or 1
        middle = each * blocks / len(own) / 2
        token_s = cost.seconds(0, round(2 * middle)) / max(1, round(2 * middle)) if cost is not None else None
        gpu = months * sum(seconds[number] for number in own) if cost is not None else None
        saved = None if gpu is None else worth.money(gpu)
        # Who has more stored pays more of it.
        share = bill * sum(missed[number] for number in own) / max(1, sum(missed))
        lines.append(
            NamespaceAdvice(
                model=model,
                tenant=tenant,
                kind=kind,
                namespaces=len(spaces),
                gpus=worth.gpus(spaces[0]),
                requests=len(own),
                asked_blocks=blocks,
                hit_ratio=sum(hits[number] for number in own) / blocks,
                ceiling_ratio=sum(ceiling[number] for number in own) / blocks,
                local_ratio=_local(trace, own),
                token_us=None if token_s is None else token_s * 1e6,
                gpu_seconds_month=gpu,
                saved_month=saved,
                cost_month=share,
                net_month=None if saved is None else saved - share,
                break_even_bytes_s=None if not token_s else space.block_bytes / each / token_s,
            )
        )
    yield from sorted(lines, key=lambda line: -line.asked_blocks)


def _ceiling(trace: Trace) -> list[int]:
    """Returns for each request how many blocks a store finds that forgets nothing."""
    seen = bytearray(trace.blocks)
    found = []
    for request in trace.requests:
        hits = next((at for at, block in enumerate(request.chain) if not seen[block]), len(request.chain))
        for block in request.chain[hits:]:
            seen[block] = 1
        found.append(hits)
    return found


def _prompts(worth: Worth) -> Iterator[PromptLoad]:
    asked = [0] * len(worth.trace.spaces)
    for request in worth.trace.requests:
        asked[request.space] += len(request.chain)
    known = [
        number
        for number, space in enumerate(worth.trace.spaces)
        if space.block_tokens and worth.costs[number] is not None
    ]
    if not known:
        return
    number = max(known, key=lambda number: asked[number])
    space, cost = worth.trace.spaces[number], worth.costs[number]
    assert cost is not None
    for tokens in LENGTHS:
        nbytes, takes = tokens * space.block_bytes // space.block_tokens, cost.seconds(0, tokens)
        yield PromptLoad(tokens=tokens, nbytes=nbytes, compute_s=takes, break_even_bytes_s=nbytes / takes)


def _redis(worth: Worth, replayed: Replayed) -> RedisSize:
    trace = worth.trace
    blocks = round(replayed.capacity / (trace.distinct_bytes / trace.blocks))
    saved = max(1, trace.references - replayed.totals.hit_blocks)
    segments = max(1, round(blocks * min(1.0, replayed.segments / saved)))
    nbytes = index_bytes(
        blocks,
        segments,
        max(space.parts for space in trace.spaces),
        namespaces=len(trace.spaces),
        second_use=replayed.second_use,
    )
    return RedisSize(
        blocks=blocks, segments=segments, index_bytes=nbytes, maxmemory_bytes=redis_memory(nbytes)
    )


def settings_to_paste(question: Question, best: CapacityAdvice, objective: str | None = None) -> str:
    """Returns the settings for a capacity, as YAML, which are valid. `objective` is `kv.objective`, None for
    the default."""
    tree: dict[str, object] = {
        "index": question.index,
        "payloads": question.payloads,
        "capacity_bytes": rounded(best.capacity_bytes),
    }
    if best.second_use:
        tree["admission"] = {"second_use": True}
    if objective is not None:
        tree["kv"] = {"objective": objective}
    text = yaml.safe_dump(tree, sort_keys=False)
    Settings.model_validate(yaml.safe_load(text))
    return text


def rounded(nbytes: int) -> str:
    """Returns a size as settings have it, rounded up to two digits: 437 GiB -> 440GiB."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB")):
        if nbytes >= 10 << power or power == 20:
            value = nbytes / (1 << power)
            step = 10 ** max(0, math.floor(math.log10(max(1.0, value))) - 1)
            return f"{math.ceil(value / step) * step}{unit}"
    raise AssertionError("the last unit is for all that is smaller")


def _caveats(worth: Worth, question: Question) -> Iterator[str]:
    trace = worth.trace
    span = trace.requests[-1].at_s - trace.requests[0].at_s
    if span < _HOUR_S:
        yield (
            f"recorded in {span / 60:,.0f} minutes, and counted as if a month were like that; what comes "
            "back later than that is not seen. A day says more"
        )
    kv = [number for number, space in enumerate(trace.spaces) if space.kind == "kv"]
    if worth.uneven:
        yield _UNEVEN
    if any(request.local is None for request in trace.requests if request.space in kv):
        yield (
            "the recording does not say what engines had in their own caches, so that is counted as the "
            "store's; with kv.observe it is recorded"
        )
    if question.given.prices.assumed:
        yield f"prices that nobody gave are assumed: {', '.join(question.given.prices.assumed)}"
    if worth.known and "kv" in worth.unpriced:
        yield f"what computing a token costs{_of_which(worth)} is unknown: that counts as saving nothing"
    if any(space.kind == "ec" for space in trace.spaces) and question.given.encode_s is None:
        yield "what encoding an item takes is unknown (--encode-ms): encoder outputs count as saving nothing"
    if question.given.gpus is None and any(space.gpus is None for space in trace.spaces):
        yield "an engine is taken to have as many GPUs as hold parts of a block; --gpus says how many it has"
    if not question.reads:
        yield (
            "whether reads here are fast enough is not known: compare the break-even bandwidth with what "
            "`cache-admin bench --json` measures (--bench)"
        )
    yield (
        "a GPU that would stand idle costs nothing to use; a hit is also a shorter time to the first token, "
        "which is not in the bill, and neither are Redis and the engines that weren't recorded"
    )


def _money(amount: float) -> str:
    return f"${amount:,.2f}" if abs(amount) < 100 else f"${amount:,.0f}"
