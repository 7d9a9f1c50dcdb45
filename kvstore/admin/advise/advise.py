"""advise of a recording: says whether a cache pays, how large it should be, and what to set."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import yaml

from kvstore import __version__
from kvstore.admin.advise.optimum import optimum
from kvstore.admin.advise.replay import ReplayTotals, by_block
from kvstore.admin.advise.reports import (
    AdviceReport,
    CapacityAdvice,
    CapacityPoint,
    Curve,
    NamespaceAdvice,
    Policy,
    PromptLoad,
    Recorded,
    RedisSize,
    Verdict,
)
from kvstore.admin.advise.store import Replayed
from kvstore.admin.advise.traces import Assumed, BadTrace, Trace, read_traces
from kvstore.admin.advise.worth import Question, Worth
from kvstore.admin.progress import ProgressListener
from kvstore.rules.segments import index_bytes, redis_memory
from kvstore.rules.units import size
from kvstore.rules.weighed import PATIENCE
from schemas.settings import Settings

#: Lengths of prompts for which loading is compared with computing, in tokens.
LENGTHS = (1024, 4096, 16384, 65536)
#: Hits of blocks that no engine has itself, below which there is nothing to be had if their worth is unknown.
NOTHING = 0.01
#: The share of what the best capacity brings that a smaller one may lack.
_NEARLY = 0.02
_HOUR_S = 3600.0
_UNEVEN = (
    "engines were recorded at different times, or some for more than twice as long as others, as where a "
    "busy one's files were full earlier: all are counted as if recorded for the whole time. Give files of "
    "one time (a larger trace.most_bytes keeps more of it)"
)


#: How many capacities are tried, and the share of all blocks' bytes at which they begin.
_POINTS, _LEAST = 12, 0.01


def advise(
    paths: Sequence[Path],
    assumed: Assumed,
    question: Question,
    progress: ProgressListener,
    *,
    since_s: float | None = None,
) -> AdviceReport:
    """Reads recordings, from `since_s` on if that is given, and weighs what a store would bring. Raises
    ConfigError if a file is no recording, or doesn't have what is asked of it."""
    trace = read_traces(paths, assumed, progress)
    if since_s is not None:
        trace = trace.since(since_s)
    if "told" in question.compare and not trace.said:
        raise BadTrace("nothing is said of sessions in this trace, so there is nothing to be told")
    worth = Worth(trace, question)
    capacities = sorted(set(question.capacities)) or sweep(trace.distinct_bytes)
    curves, replays = _replayed(worth, capacities, progress)
    pairs = [
        max(
            ((worth.advice(capacity, one, second_use=bool(at)), one) for at, one in enumerate(both)),
            key=lambda pair: _value(pair[0]),
        )
        for capacity, both in zip(capacities, replays, strict=True)
    ]
    best, replayed = _best(pairs)
    local = _local(trace, range(len(trace.requests)))
    gains = max(advice.gained_ratio for advice, _ in pairs)
    if best.net_month is None and gains < NOTHING * (1 - (local or 0.0)):
        gains = 0.0
    ceiling = _ceiling(trace)
    by_model = sorted(_by_model(worth, best, replayed, ceiling), key=lambda line: -line.asked_blocks)
    verdict, because, objective = _verdict(worth, best, by_model, gains=gains > 0)
    return AdviceReport(
        version=__version__,
        sources=tuple(str(path) for path in paths),
        verdict=verdict,
        because=tuple(because),
        asked_blocks=trace.references,
        curves=tuple(curves),
        caveats=tuple(_caveats(worth)),
        recorded=Recorded(
            requests=len(trace.requests),
            seconds=trace.requests[-1].at_s - trace.requests[0].at_s,
            asked_tokens=sum(line.asked_blocks * line.block_tokens for line in by_model),
            distinct_blocks=trace.blocks,
            distinct_bytes=trace.distinct_bytes,
            skipped_lines=trace.skipped,
        ),
        prices=question.prices,
        ceiling_ratio=sum(ceiling) / trace.references,
        local_ratio=local,
        capacities=tuple(advice for advice, _ in pairs),
        best=best,
        by_model=tuple(by_model),
        prompts=tuple(_prompts(worth)),
        bandwidth_bytes_s=question.bandwidth,
        redis=_redis(worth, best, replayed),
        settings="" if verdict == "no" else settings_to_paste(question, best, objective),
    )


def sweep(distinct_bytes: int) -> list[int]:
    """Returns capacities from a hundredth of `distinct_bytes` to all of it, in equal ratios."""
    return [max(1, round(at)) for at in np.geomspace(_LEAST * distinct_bytes, distinct_bytes, _POINTS)]


def _replayed(
    worth: Worth, capacities: Sequence[int], progress: ProgressListener
) -> tuple[list[Curve], list[tuple[Replayed, Replayed]]]:
    """Returns the curves, and for each capacity the replays that save all, and what is asked for twice."""
    trace, compare = worth.trace, list(dict.fromkeys(worth.question.compare))
    found: dict[Policy, list[ReplayTotals]] = {"kvstore": [], "second-use": []}
    found |= {policy: [] for policy in compare}
    replays = []
    for number, capacity in enumerate(capacities, start=1):
        progress.begin(f"a store of {size(capacity)} ({number} of {len(capacities)})")
        both = worth.replay(capacity, "kvstore"), worth.replay(capacity, "second-use")
        replays.append(both)
        found["kvstore"].append(both[0].totals)
        found["second-use"].append(both[1].totals)
        for policy in compare:
            if policy in ("lru", "fifo"):
                found[policy].append(by_block(trace, capacity, by_use=policy == "lru"))
            elif policy in ("told", "told-ends"):
                found[policy].append(worth.replay(capacity, policy).totals)
    if "optimum" in compare:
        progress.begin("the optimum with all capacities")
        found["optimum"] = optimum(trace, capacities)
    curves = [
        Curve(
            policy=policy,
            points=tuple(
                CapacityPoint(
                    capacity_bytes=capacity,
                    hit_ratio=tally.hit_blocks / trace.references,
                    hit_blocks=tally.hit_blocks,
                    hit_tokens=tally.hit_tokens,
                    stored_bytes=tally.stored_bytes,
                    evictions=tally.evictions,
                    evicted_bytes=tally.evicted_bytes,
                )
                for capacity, tally in zip(capacities, tallies, strict=True)
            ),
        )
        for policy, tallies in found.items()
    ]
    return curves, replays


def _best(pairs: Sequence[tuple[CapacityAdvice, Replayed]]) -> tuple[CapacityAdvice, Replayed]:
    """Returns the smallest capacity that is as good as the best one, nearly."""
    most = max(_value(advice) for advice, _ in pairs)
    return next(pair for pair in pairs if _value(pair[0]) >= most - _NEARLY * abs(most))


def _value(advice: CapacityAdvice) -> float:
    """Returns by what capacities are compared: money or, while that isn't known, what is gained."""
    return advice.gained_ratio if advice.net_month is None else advice.net_month


def _verdict(
    worth: Worth, best: CapacityAdvice, by_model: Sequence[NamespaceAdvice], *, gains: bool
) -> tuple[Verdict, list[str], str | None]:
    """Returns whether it pays, why, and the `kv.objective` that it takes if that isn't the default. `gains`
    says whether any capacity brings hits worth a word."""
    gained = f"{best.gained_ratio:.1%} of the blocks asked for would come from the store"
    if not gains:
        why = f"only {gained}: the rest is asked for once, or engines have it themselves"
        return "no", [why], None
    if best.net_month is None or best.saved_month is None:
        return "unclear", [f"{gained} with {size(best.capacity_bytes)}", *_doubts(worth)], None
    saved = (
        f"{_money(best.saved_month)} of GPU time a month are saved, and the store costs "
        f"{_money(best.cost_month)}"
    )
    if best.net_month <= 0:
        loses = f"no capacity pays: with {size(best.capacity_bytes)}, {saved}"
        if doubts := list(_doubts(worth)):
            return "unclear", [*doubts, loses, gained], None
        return "no", [loses, gained], None
    # Below it computing the usual prompt of the usual model is faster than loading it.
    need = next((line.break_even_bytes_s for line in by_model if line.break_even_bytes_s is not None), None)
    speed = worth.question.bandwidth
    if speed is None or need is None:
        return "yes", [saved, gained], None
    speeds = f"reads bring {size(speed)}/s here, and computing is as fast as {size(need)}/s"
    if speed >= need:
        return "yes", [saved, gained, speeds], None
    if speed * PATIENCE >= need:
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


def _by_model(
    worth: Worth, best: CapacityAdvice, replayed: Replayed, ceiling: Sequence[int]
) -> Iterator[NamespaceAdvice]:
    """Yields what each model and tenant gets of a capacity."""
    trace, months, hits = worth.trace, worth.months, replayed.hits
    seconds = worth.seconds_of(hits)
    missed = [
        (len(request.chain) - found) * trace.spaces[request.space].block_bytes
        for found, request in zip(hits, trace.requests, strict=True)
    ]
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, space in enumerate(trace.spaces):
        alike = (
            space.model or space.namespace,
            space.tenant,
            space.kind,
            space.block_tokens,
            space.block_bytes,
        )
        groups.setdefault(alike, []).append(number)
    for spaces in groups.values():
        own = [number for number, request in enumerate(trace.requests) if request.space in spaces]
        blocks = sum(len(trace.requests[number].chain) for number in own)
        if not blocks:
            continue
        space, cost = trace.spaces[spaces[0]], worth.costs[spaces[0]]
        each = space.block_tokens or 1
        tokens = max(1, round(each * blocks / len(own)))
        token_s = cost.seconds(0, tokens) / tokens if cost is not None else None
        gpu = months * sum(seconds[number] for number in own) if cost is not None else None
        saved = None if gpu is None else worth.money(gpu)
        # Who has more stored pays more of it.
        share = best.cost_month * sum(missed[number] for number in own) / max(1, sum(missed))
        yield NamespaceAdvice(
            model=space.model or space.namespace,
            tenant=space.tenant,
            kind=space.kind,
            namespaces=tuple(trace.spaces[number].namespace for number in spaces),
            block_tokens=space.block_tokens,
            block_bytes=space.block_bytes,
            segment_blocks=worth.segment_blocks[spaces[0]],
            gpus=worth.gpus(spaces[0]),
            requests=len(own),
            asked_blocks=blocks,
            distinct_blocks=sum(number in spaces for number in trace.space_of),
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
    trace, asked = worth.trace, Counter[int]()
    for request in trace.requests:
        asked[request.space] += len(request.chain)
    for number, _ in asked.most_common():
        space, cost = trace.spaces[number], worth.costs[number]
        if not space.block_tokens or cost is None:
            continue
        for tokens in LENGTHS:
            nbytes, takes = tokens * space.block_bytes // space.block_tokens, cost.seconds(0, tokens)
            yield PromptLoad(tokens=tokens, nbytes=nbytes, compute_s=takes, break_even_bytes_s=nbytes / takes)
        return


def _redis(worth: Worth, best: CapacityAdvice, replayed: Replayed) -> RedisSize:
    trace = worth.trace
    blocks = round(best.capacity_bytes / (trace.distinct_bytes / trace.blocks))
    saved = max(1, trace.references - replayed.totals.hit_blocks)
    segments = max(1, round(blocks * min(1.0, replayed.segments / saved)))
    nbytes = index_bytes(
        blocks,
        segments,
        max(space.parts for space in trace.spaces),
        namespaces=len(trace.spaces),
        second_use=best.second_use,
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


def _caveats(worth: Worth) -> Iterator[str]:
    trace, question = worth.trace, worth.question
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
    if question.prices.assumed:
        yield f"prices that nobody gave are assumed: {', '.join(question.prices.assumed)}"
    if worth.known and "kv" in worth.unpriced:
        yield f"what computing a token costs{_of_which(worth)} is unknown: that counts as saving nothing"
    if any(space.kind == "ec" for space in trace.spaces) and question.encode_s is None:
        yield "what encoding an item takes is unknown (--encode-ms): encoder outputs count as saving nothing"
    if question.gpus is None and any(space.gpus is None for space in trace.spaces):
        yield "an engine is taken to have as many GPUs as hold parts of a block; --gpus says how many it has"
    if question.bandwidth is None:
        yield (
            "whether reads here are fast enough is not known: say what `cache-admin bench` measures of gets "
            "(--bandwidth)"
        )
    yield (
        "a GPU that would stand idle costs nothing to use; a hit is also a shorter time to the first token, "
        "which is not in the bill, and neither are Redis and the engines that weren't recorded"
    )


def _money(amount: float) -> str:
    return f"${amount:,.2f}" if abs(amount) < 100 else f"${amount:,.0f}"
