"""advise on the live store: what it has been worth since a time, and whether its capacity is right.

Only what the index knows is said, and each number's source is named:

    demand    blocks asked for, served, and different ones, of the last 15 minutes, hour and day
              (kvstore.index.demand): hit ratio and ceiling
    costs     what computing the stored blocks took, as the engines that saved them measured
    events    what was written and evicted since, as far back as the ring goes: PUTs and uploads
    outcomes  why blocks were missed since, as far back as that ring goes
    ghosts    what more capacity would have brought, since each namespace was made (simulate.whatif)

Where engines record (`trace.folder`) and the folder is on this machine, its recordings since then are weighed
as every recording is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import ValidationError

from kvstore import __version__
from kvstore.admin.advise.advise import Question, advise, rounded
from kvstore.admin.advise.reports import (
    AdviceReport,
    LiveAdviceReport,
    LiveCapacity,
    LiveNamespace,
    LivePeriod,
    MissedFor,
    Verdict,
)
from kvstore.admin.advise.worth import GB, MONTH_S, Given
from kvstore.admin.backends import Cache
from kvstore.admin.described import described
from kvstore.admin.progress import ProgressListener
from kvstore.admin.simulate.reports import WhatIfReport
from kvstore.admin.simulate.traces import Assumed, BadTrace
from kvstore.admin.simulate.whatif import whatif
from kvstore.errors import ConfigError
from kvstore.index.demand import WINDOWS, Demand, together
from kvstore.index.maintenance import Account, Event, FullIndex
from kvstore.rules.units import size
from schemas.base import redact
from schemas.namespace import Namespace
from schemas.settings import Settings

#: Namespaces, the largest, that are looked at: some round trips and up to half a MB each.
MOST_NAMESPACES = 50
#: Shares of the present capacity by which it might be larger.
_MORE = (0.1, 0.25, 0.5, 1.0, 2.0)
#: What a larger capacity must add to what the store is worth, to be recommended.
_WORTH_IT = 0.02


@dataclass(frozen=True, slots=True)
class _Space:
    """One namespace: what the index says of it."""

    account: Account
    model: str
    block_tokens: int
    gpus: int
    parts: int
    demand: tuple[Demand, ...]
    #: Commits and evictions since then, and from when on they are all known.
    events: Sequence[Event]
    events_from_s: float
    missed: Mapping[str, int]
    #: GPU seconds that computing a block takes; None: unknown.
    block_s: float | None

    @property
    def block_bytes(self) -> float:
        usage = self.account.usage
        return usage.nbytes / usage.blocks if usage.blocks else 0.0

    @property
    def segment_blocks(self) -> float:
        usage = self.account.usage
        return usage.blocks / usage.segments if usage.segments else 1.0

    def of(self, window_s: int) -> Demand:
        """Returns the demand of a window."""
        return next(one for one in self.demand if one.window_s == window_s)


def live(
    cache: Cache, since_s: float, question: Question, progress: ProgressListener, now_s: float
) -> LiveAdviceReport:
    """Weighs what the store has been worth since `since_s`. Raises ConfigError if nothing can be asked, and
    what the index raises."""
    index = cache.index
    if index is None:
        raise ConfigError(f"there is no index at {redact(cache.settings.index_url)} yet: nothing was stored")
    progress.begin("what the index knows")
    texts = index.namespaces()
    accounts = sorted(cache.accounts(), key=lambda account: -account.usage.nbytes)
    kept = cache.settings.journal.events
    spaces = [
        _look(index, account, texts.get(account.namespace), question.given, since_s, now_s, kept)
        for account in accounts[:MOST_NAMESPACES]
    ]
    more = whatif(cache, [round(share * cache.settings.capacity_bytes) for share in _MORE])
    window = next((one for one in WINDOWS if one >= now_s - since_s), max(WINDOWS))
    periods = tuple(_period(spaces, one, question.given, cache.settings, now_s) for one in WINDOWS)
    period = next(one for one in periods if one.window_s == window)
    capacities = tuple(_capacities(spaces, more, period, question.given))
    best = max(capacities, key=lambda one: one.net_month or 0.0)
    if best.net_month is None or best.net_month <= _WORTH_IT * abs(period.net_month or 0.0):
        best = capacities[0]
    verdict, because = _verdict(period, best, capacities[0], more)
    recorded = _recorded(cache.settings, since_s, question, progress)
    grows = best is not capacities[0]
    return LiveAdviceReport(
        version=__version__,
        at_s=now_s,
        since_s=since_s,
        index=redact(cache.settings.index_url),
        verdict=verdict,
        because=tuple(because),
        prices=question.given.prices,
        capacity_bytes=more.capacity_bytes,
        used_bytes=more.used_bytes,
        period=period,
        periods=periods,
        capacities=capacities,
        best=best,
        by_model=tuple(_by_model(spaces, window, period, question.given)),
        missed=tuple(_missed(spaces)),
        settings=yaml.safe_dump({"capacity_bytes": rounded(best.capacity_bytes)}) if grows else "",
        recorded=recorded,
        basis=tuple(_basis(spaces, since_s, now_s, recorded, cache.settings)),
        caveats=(*_caveats(spaces, len(accounts), period, question.given), *more.caveats),
    )


def _look(
    index: FullIndex,
    account: Account,
    text: str | None,
    given: Given,
    since_s: float,
    now_s: float,
    kept: int,
) -> _Space:
    """Asks for one namespace. `kept` is how many events are kept at least, before any is forgotten."""
    name, usage = account.namespace, account.usage
    try:
        namespace = Namespace.model_validate_json(text or "")
        tokens, parts = namespace.block_tokens, namespace.parts()
    except ValidationError:
        tokens, parts = 0, 1  # of another release
    gpus = given.gpus or parts
    block_s = usage.cost_us / usage.blocks / 1e6 if usage.blocks and usage.cost_us else None
    if account.kind == "ec":
        block_s = given.encode_s or block_s
    elif given.prefill_tokens_s is not None and tokens:
        block_s = tokens / given.prefill_tokens_s
    events = index.events(name, limit=1 << 16)
    outcomes = index.outcomes(name, 1 << 16)
    missed = Counter[str]()
    for one in outcomes:
        if one.at_s >= since_s and one.reason and one.op != "save":
            missed[one.reason] += one.asked - one.served
    return _Space(
        account=account,
        model=described(text)[1],
        block_tokens=tokens,
        gpus=gpus,
        parts=parts,
        demand=index.demand(name, now_s),
        events=[event for event in events if event.at_s >= since_s],
        events_from_s=max(since_s, events[0].at_s) if len(events) >= kept > 0 else since_s,
        missed=missed,
        block_s=None if block_s is None else block_s * gpus,
    )


def _months(demand: Demand) -> float:
    """Returns how many such windows a month has."""
    return MONTH_S / demand.seconds if demand.seconds else 0.0


def _saved(space: _Space, blocks: float, months: float, given: Given) -> float:
    """Returns what so many blocks are worth in a month, as far as that is known."""
    return blocks * months * (space.block_s or 0.0) * given.prices.gpu_hour / 3600


def _period(
    spaces: Sequence[_Space], window: int, given: Given, settings: Settings, now_s: float
) -> LivePeriod:
    """Returns what a window was worth and has cost, as if a month were like it."""
    demands = [space.of(window) for space in spaces]
    [total] = [one for one in together([[one] for one in demands]) if one.window_s == window]
    months, prices = _months(total), given.prices
    known = any(space.block_s is not None for space in spaces)
    gpu = saved = gets = download = puts = upload = 0.0
    for space, own in zip(spaces, demands, strict=True):
        gpu += own.served * months * (space.block_s or 0.0)
        saved += _saved(space, own.served, months, given)
        segments = own.served / space.segment_blocks
        nbytes = space.segment_blocks * space.block_bytes / space.parts
        gets += segments * space.parts * max(1, round(nbytes / settings.s3.range_bytes)) * months
        download += own.served * space.block_bytes * months
        rate = _written(space, total, now_s)
        puts += rate[0] * space.parts * MONTH_S
        upload += rate[1] * MONTH_S
    storage = sum(space.account.usage.nbytes for space in spaces) / GB * prices.gb_month
    requests = (puts * prices.put_1000 + gets * prices.get_1000) / 1000
    transfer = (upload * prices.upload_gb + download * prices.download_gb) / GB
    return LivePeriod(
        window_s=window,
        seconds=total.seconds,
        asked_blocks=total.asked,
        served_blocks=total.served,
        distinct_blocks=total.distinct,
        hit_ratio=total.hit_ratio,
        ceiling_ratio=total.ceiling_ratio,
        gpu_seconds_month=gpu if known else None,
        saved_month=saved if known else None,
        storage_month=storage,
        requests_month=requests,
        transfer_month=transfer,
        net_month=saved - storage - requests - transfer if known else None,
    )


def _written(space: _Space, total: Demand, now_s: float) -> tuple[float, float]:
    """Returns segments and bytes written in a second, as far as the ring of events holds the window."""
    if not space.events or not total.seconds:
        return 0.0, 0.0
    from_s = max(now_s - total.seconds, space.events_from_s)
    commits = [event for event in space.events if event.op == "commit" and event.at_s >= from_s]
    seconds = max(1.0, now_s - from_s)
    return len(commits) / seconds, sum(event.nbytes for event in commits) / seconds


def _capacities(
    spaces: Sequence[_Space], more: WhatIfReport, period: LivePeriod, given: Given
) -> Iterator[LiveCapacity]:
    """Yields the present capacity, and what larger ones would add."""
    known = period.saved_month is not None
    yield LiveCapacity(
        capacity_bytes=more.capacity_bytes, added_ratio=0.0, hit_ratio=period.hit_ratio,
        saved_month=0.0 if known else None, storage_month=0.0, net_month=0.0 if known else None,
    )  # fmt: skip
    by_name = {line.namespace: line for line in more.namespaces}
    for number, gain in enumerate(more.gains):
        blocks = saved = 0.0
        for space in spaces:
            line, own = by_name[space.account.namespace], space.of(period.window_s)
            share = line.gains[number].blocks / line.asked_blocks if line.asked_blocks else 0.0
            # More than the window's own ceiling leaves is of what was known before it.
            room = max(0, own.asked - own.served)
            added = min(share * own.asked, room)
            blocks += added
            saved += _saved(space, added, _months(own), given)
        storage = gain.more_bytes / GB * given.prices.gb_month
        ratio = blocks / period.asked_blocks if period.asked_blocks else 0.0
        yield LiveCapacity(
            capacity_bytes=more.capacity_bytes + gain.more_bytes,
            added_ratio=ratio,
            hit_ratio=period.hit_ratio + ratio,
            saved_month=saved if known else None,
            storage_month=storage,
            net_month=saved - storage if known else None,
        )


def _verdict(
    period: LivePeriod, best: LiveCapacity, now: LiveCapacity, more: WhatIfReport
) -> tuple[Verdict, list[str]]:
    """Returns whether the store pays, and why."""
    if not period.asked_blocks:
        return "unclear", ["no engine has asked this store for anything, or none that tells of its demand"]
    hits = (
        f"{period.hit_ratio:.1%} of the blocks asked for came from the store; one that keeps what was "
        f"asked for in that time, and nothing older, could serve {period.ceiling_ratio:.1%}"
    )
    if best is not now:
        fits = (
            f"more room pays: {size(best.capacity_bytes)} would add {best.added_ratio:.1%} hits and "
            f"${best.net_month or 0:,.2f} a month"
        )
    elif more.used_bytes < 0.9 * more.capacity_bytes:
        fits = f"the capacity is not filled: {size(more.used_bytes)} of {size(more.capacity_bytes)} are used"
    elif all(one.added_ratio == 0 for one in more.gains):
        fits = "more room would have brought nothing so far: what was evicted was not asked for again"
    else:
        fits = "more room would cost more than it brings"
    if period.net_month is None or period.saved_month is None:
        unknown = (
            "what computing a block costs is unknown: engines tell it when they save, or --prefill-tokens-s"
        )
        return "unclear", [hits, fits, unknown]
    bill = period.saved_month - period.net_month
    money = f"${period.saved_month:,.2f} of GPU time a month are saved, and the store costs ${bill:,.2f}"
    return ("yes" if period.net_month > 0 else "no"), [money, hits, fits]


def _by_model(
    spaces: Sequence[_Space], window: int, period: LivePeriod, given: Given
) -> Iterator[LiveNamespace]:
    groups: dict[tuple[str, str, str], list[_Space]] = {}
    for space in spaces:
        key = (space.model or space.account.namespace, space.account.tenant, space.account.kind)
        groups.setdefault(key, []).append(space)
    months = MONTH_S / period.seconds if period.seconds else 0.0
    lines = []
    for (model, tenant, kind), own in groups.items():
        [total] = [one for one in together([[space.of(window)] for space in own]) if one.window_s == window]
        known = any(space.block_s is not None for space in own)
        saved = sum(_saved(space, space.of(window).served, months, given) for space in own)
        lines.append(
            LiveNamespace(
                model=model,
                tenant=tenant,
                kind=kind,
                namespaces=len(own),
                asked_blocks=total.asked,
                hit_ratio=total.hit_ratio,
                ceiling_ratio=total.ceiling_ratio,
                stored_bytes=sum(space.account.usage.nbytes for space in own),
                saved_month=saved if known else None,
            )
        )
    yield from sorted(lines, key=lambda line: (-line.asked_blocks, -line.stored_bytes))


def _missed(spaces: Sequence[_Space]) -> Iterator[MissedFor]:
    sums = Counter[str]()
    for space in spaces:
        sums.update(space.missed)
    for reason, blocks in sums.most_common():
        yield MissedFor(reason=reason, blocks=blocks)


def _recorded(
    settings: Settings, since_s: float, question: Question, progress: ProgressListener
) -> AdviceReport | None:
    folder = settings.trace.folder
    if folder is None or not any(Path(folder).glob("*.jsonl")):
        return None
    try:
        return advise([Path(folder)], Assumed(), question, progress, since_s=since_s)
    except BadTrace:
        return None


def _basis(
    spaces: Sequence[_Space], since_s: float, now_s: float, recorded: AdviceReport | None, settings: Settings
) -> Iterator[str]:
    longest = max(WINDOWS)
    if now_s - since_s > longest:
        yield "the index counts what is asked for by the last 24 hours: money and hits are that day's"
    covered = max((space.of(longest).seconds for space in spaces), default=0.0)
    yield f"blocks asked for, served, and different ones: the engines' counts of {_ago(covered)}"
    at_s = max((space.events_from_s for space in spaces if space.events), default=since_s)
    yield f"what was written: the index's ring of events, which goes back {_ago(now_s - at_s)}"
    yield "what more room would bring: segments that quotas evicted, since each namespace was made"
    if recorded is not None:
        yield f"recordings in {settings.trace.folder}: {recorded.trace.requests:,} requests since then"
    else:
        yield "no recording of that time is on this machine (trace.folder): with one, any capacity is weighed"


def _ago(seconds: float) -> str:
    if seconds < 5400:
        return f"{seconds / 60:,.0f} minutes"
    return f"{seconds / 3600:,.1f} hours" if seconds < 48 * 3600 else f"{seconds / 86400:,.1f} days"


def _caveats(spaces: Sequence[_Space], found: int, period: LivePeriod, given: Given) -> Iterator[str]:
    if found > MOST_NAMESPACES:
        yield f"of {found:,} namespaces the {MOST_NAMESPACES} largest are looked at"
    if period.seconds:
        yield f"counted as if a month were like these {_ago(period.seconds)}"
    if any(space.block_s is None and space.of(period.window_s).asked for space in spaces):
        yield "namespaces of which no engine has told what computing costs count as saving nothing"
    if given.gpus is None:
        yield "an engine is taken to have as many GPUs as hold parts of a block; --gpus says how many it has"
    if given.prices.assumed:
        yield f"prices that nobody gave are assumed: {', '.join(given.prices.assumed)}"
    yield (
        "a hit is worth what computing a mean stored block takes; engines of releases that don't tell of "
        "their demand are missing, and a GPU that would stand idle costs nothing to use"
    )
