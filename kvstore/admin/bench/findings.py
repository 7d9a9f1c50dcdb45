"""What the numbers mean, in sentences: what bounds loading, and what may be done about it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kvstore.admin.bench.reports import BenchReport, LoadTime, TransferSpeed
from kvstore.rules.units import size

#: A load with at least this share of the store's own speed is bounded by the store.
_CLOSE = 0.7
#: Gains from which more parallel reads, or another codec, are recommended.
_GAIN, _CODEC_GAIN = 1.3, 1.2


def findings(report: BenchReport) -> Iterator[str]:
    """Yields sentences, the most important first."""
    loads = [load for load in report.loads if load.tier == "shared"]
    gets = [t for t in report.transfers if (t.tier, t.operation) == ("shared", "get") and t.latency]
    if loads and gets:
        yield _bound(report, max(loads, key=lambda load: load.bytes_s), gets)
    yield from (_load(report, load) for load in report.loads)
    if gets and loads:
        yield from _more_parallel(report, gets)
        yield from _codec(report, gets)
    if report.index_speed is not None:
        times = [match.latency for match in report.index_speed.matches]
        yield (
            f"the index answers in {_ms(report.index_speed.round_trip.p50_s)}; a match of "
            f"{report.index_speed.matches[-1].blocks:,} blocks takes {_ms(times[-1].p50_s)}"
        )
    for transfer in report.transfers:
        if transfer.errors:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(transfer.errors.items()))
            yield f"{transfer.operation.upper()} {transfer.concurrency} at a time: errors ({kinds})"
    if report.payloads.startswith("file:") and gets:
        yield (
            "files were read from the disk (dropped from memory before); those that are in memory still, a "
            "short time after they were written or read, come faster"
        )


def _bound(report: BenchReport, load: LoadTime, gets: list[TransferSpeed]) -> str:
    near = _near(report, gets)
    reads = "1 read" if near.concurrency == 1 else f"{near.concurrency} reads"
    store = f"the payload store ({reads} at a time: {_mb(near.bytes_s)})"
    if load.match_s > load.load_s:
        return f"loading is bounded by the index: a match takes longer than reading {size(load.nbytes)}"
    if load.bytes_s >= _CLOSE * near.bytes_s:
        return f"loading is bounded by {store}"
    parts = "ranges (s3.range_bytes), " if report.payloads.startswith("s3:") else ""
    return (
        f"loading ({_mb(load.bytes_s)}) is slower than {store}: {parts}checksums and the codec share this "
        f"machine's cores with reading, by transfers.read_threads = {report.read_threads}"
    )


def _near(report: BenchReport, gets: list[TransferSpeed]) -> TransferSpeed:
    """Returns the measurement that is most like what engines do with these settings."""
    return min(gets, key=lambda get: abs(math.log(get.concurrency / report.read_threads)))


def _load(report: BenchReport, load: LoadTime) -> str:
    total = load.match_s + load.load_s
    tier = " from the fast tier" if load.tier == "fast" else ""
    rest = "" if load.measured else " (worked out from a shorter load)"
    return (
        f"{load.tokens:,} tokens of {report.kv_bytes_per_token:,} bytes each = {size(load.nbytes)}: "
        f"{_seconds(total)} to load{tier}{rest}, and a step later there is a first token; that pays where "
        f"prefill is slower than {load.break_even_tokens_s:,.0f} tokens/s"
    )


def _more_parallel(report: BenchReport, gets: list[TransferSpeed]) -> Iterator[str]:
    near = _near(report, gets)
    best = max(gets, key=lambda get: get.bytes_s)
    if best.concurrency > near.concurrency and best.bytes_s > _GAIN * near.bytes_s:
        yield (
            f"{best.concurrency} reads at a time get {_mb(best.bytes_s)}: raise transfers.read_threads "
            f"(now {report.read_threads})"
        )


def _codec(report: BenchReport, gets: list[TransferSpeed]) -> Iterator[str]:
    if report.codec != "none":
        return
    link = max(get.bytes_s for get in gets)
    for speed in report.codecs:
        # On every thread a read and the decoding follow each other, so their times add up.
        decoding = speed.decode_bytes_s * report.read_threads
        if 1 / (1 / (link * speed.ratio) + 1 / decoding) > _CODEC_GAIN * link:
            saved = f"{1 - 1 / speed.ratio:.0%} fewer bytes to keep and to read"
            cost = f"{_mb(speed.encode_bytes_s)} a core when saving"
            yield f"of bf16, segment.codec = {speed.codec} makes {saved}, for {cost}"


def _mb(bytes_s: float) -> str:
    return f"{bytes_s / 1e6:,.0f} MB/s" if bytes_s < 1e10 else f"{bytes_s / 1e9:.1f} GB/s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
