"""Advice on a trace, held against what happens when the store runs with what was advised.

    python -m trials.benchmarks.bench_advice TRACE... [--index sqlite,redis] [--also 3,6] [--json FILE]

TRACE is a recording or a trace of Mooncake's form, such as the two that docs/advise.md names. For each,
`advise` is asked, and the real store is opened with the settings that it pastes: the index with its scripts
or its SQL, claims, commits, eviction in rounds, admission, segments encoded and headers parsed and verified,
reads cut into ranges. It runs on the trace's clock: a request matches and loads, and what it lacks is saved
once an engine could have computed it, so that one that comes before that finds nothing. Then hits are
counted, and the bill is made of the GETs and PUTs that reached the payloads.

Two things are not as in production. All blocks have the same bytes, which are neither kept nor checksummed
(the other bytes of a segment are): there are terabytes of them. And a round of eviction is not followed by a
rest, which goes by the machine's clock and would last for minutes of the trace.

`--also` runs capacities of the report's table too, by their number from 1: the recommended one often has room
for nearly all."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf
from pathlib import Path
from unittest.mock import patch

import xxhash
import yaml

from kvstore.admin.advise.advise import advise, settings_to_paste
from kvstore.admin.advise.reports import AdviceReport, CapacityAdvice, PriceList
from kvstore.admin.advise.traces import Assumed, Request, Trace, read_traces
from kvstore.admin.advise.worth import GB, Question, Worth
from kvstore.admin.progress import Silent
from kvstore.build import open_evidence
from kvstore.format import segment as segments
from kvstore.format.segment import Slot
from kvstore.index.maintenance import FullIndex
from kvstore.index.port import MISSING_DIGESTS, Outcome
from kvstore.index.redis.index import RedisIndex
from kvstore.index.sqlite.index import SqliteIndex
from kvstore.keys import SegmentId, block_key, chain_like, digests
from kvstore.metrics import Counters
from kvstore.payloads.memory import MemoryPayloads
from kvstore.payloads.ranged import RangedPayloads
from kvstore.rules.segments import segment_blocks
from kvstore.store import rounds
from kvstore.store.backends import Backends
from kvstore.store.space import Space
from kvstore.store.store import Store
from kvstore.threads.transfers import Crew, Transfers
from schemas.namespace import GroupSpec, Namespace
from schemas.settings import Settings
from tests.admin.advise.store_run import hashes
from tests.servers.redis import PATIENT, RedisServer

#: 2026-09-21: a trace that counts from 0 begins here.
_BEGAN_S = 1_790_000_000.0
#: Bytes of a token on each layer; layers and heads make up the rest.
_CONTENT = 64


@dataclass(frozen=True)
class Row:
    """What was foretold of one capacity, and what came."""

    trace: str
    index: str
    settings: str
    recommended: bool
    foretold: dict[str, float]
    came: dict[str, float]
    #: Hit ratio: points; money: shares of what came.
    off: dict[str, float]
    evicted_segments: int
    held_share: float
    seconds: float


class Weightless(MemoryPayloads):
    """Payloads of which the header is kept and what follows it is zeros; counts what a bill counts."""

    puts = gets = put_bytes = got_bytes = 0

    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        super().put(name, buffers[:1])
        self.puts += 1
        self.put_bytes += sum(view.nbytes for view in buffers)

    def read(
        self, name: str, offset: int, into: Sequence[memoryview], *, size: int | None = None
    ) -> int | None:
        if super().read(name, offset, into, size=size) is None:
            return None
        got = sum(view.nbytes for view in into)
        self.gets += 1
        self.got_bytes += got
        return got


def _checksum(stored: object, key: str, codec: str, dtype: str, shape: Sequence[int]) -> str:
    """In place of slot_checksum: of what a slot is said to be, and not of its zeros."""
    return xxhash.xxh3_64_hexdigest(f"{key}|{codec}|{dtype}|{list(shape)}".encode())


class Run:
    """A store under some settings, and the requests of a trace."""

    def __init__(self, trace: Trace, worth: Worth, settings: Settings, index: FullIndex, clock: list[float]):
        self.trace, self.worth, self.settings, self.clock = trace, worth, settings, clock
        self.payloads = Weightless(settings.payloads.removeprefix("memory://"), clock=lambda: clock[0])
        crew = Crew(1)
        self.store = Store(
            Backends(
                settings=settings,
                payloads=RangedPayloads(
                    self.payloads, range_bytes=settings.s3.range_bytes, concurrency=1,
                    together=lambda parts: [part() for part in parts],
                ),
                index=index,
                maintenance=index,
                transfers=Transfers(settings.transfers),
                counters=Counters(),
                evidence=open_evidence(settings),
                clock=lambda: clock[0],
                gap_bytes=settings.s3.gap_bytes,
                crew=crew,
            )
        )  # fmt: skip
        self.began_s = trace.requests[0].at_s
        self.spaces = [self._open(number) for number in range(len(trace.spaces))]
        #: What is computed and not saved yet, by when it is.
        self.computing: list[tuple[float, int, int, int]] = []
        self.hits = [0] * len(trace.requests)
        self.held: list[int] = []
        self._segments = count()

    def _open(self, number: int) -> tuple[Space, GroupSpec, memoryview, int]:
        about = self.trace.spaces[number]
        tokens = max(1, about.block_tokens)
        layers = about.block_bytes // (tokens * _CONTENT * 2)
        group = GroupSpec(kind="full", block_tokens=tokens, dtype="BF16", shape=(layers, 1, tokens, _CONTENT))
        assert group.slot_bytes == about.block_bytes and about.parts == 1 and about.kind == "kv"
        made = Namespace(
            kind="kv", model=about.model or "traced", weights=str(number), dtype="bfloat16",
            block_tokens=tokens, hash_algo="sha256", hash_root="r", kv_dtype="auto", page_order="LHNC",
            groups=(group,), tenant=about.tenant or "default",
        )  # fmt: skip
        space = self.store.open(made)
        space.register()
        cut = segment_blocks(self.settings, about.block_bytes)
        return space, group, memoryview(bytearray(about.block_bytes)), cut

    def all(self) -> None:
        """Serves all requests, and saves what is left to save."""
        for number, request in enumerate(self.trace.requests):
            self._save_until(request.at_s)
            self.clock[0] = _BEGAN_S + request.at_s - self.began_s
            self._serve(number, request)
        self._save_until(inf)

    def _serve(self, number: int, request: Request) -> None:
        space, _, zeros, _ = self.spaces[request.space]
        own = hashes(request.chain)
        packed = digests(own)
        upto = space.note(packed) if self.settings.admission.second_use else len(own)
        found = space.match(packed)
        local = request.local or 0
        for run in found.runs:
            if run.start + run.count > local:
                keys = [block_key(one) for one in own[run.start : run.start + run.count]]
                space.load(run, keys, [zeros] * run.count)
        space.touch([run.segment for run in found.runs])
        missing = packed[16 * found.blocks :][: 16 * MISSING_DIGESTS]
        reason = "absent" if missing else ""
        told = Outcome(self.clock[0], "r", "match", len(own), found.blocks, reason, found.blocks, missing)
        space.tell([told])
        self.hits[number] = found.blocks
        each, cost = self.trace.spaces[request.space].block_tokens, self.worth.costs[request.space]
        takes = cost.seconds(found.blocks * each, len(own) * each) if cost is not None else 0.0
        heappush(self.computing, (request.at_s + takes, number, found.blocks, upto))

    def _save_until(self, at_s: float) -> None:
        while self.computing and self.computing[0][0] <= at_s:
            done_s, number, begin, upto = heappop(self.computing)
            request = self.trace.requests[number]
            self.clock[0] = _BEGAN_S + done_s - self.began_s
            space, group, zeros, cut = self.spaces[request.space]
            own = hashes(request.chain)
            for at in range(begin, upto, cut):
                piece = own[at : min(at + cut, upto)]
                slots = [Slot(block_key(one), zeros, "BF16", group.shape) for one in piece]
                # Ids that rise: what is equal in all else goes in the order in which it was saved.
                segment = SegmentId(next(self._segments).to_bytes(8, "big"))
                space.save(slots, depth=at, chain=chain_like(segment), segment=segment)
            if number % 100 == 0:
                self.held.append(sum(one.usage.nbytes for one in self.store.maintenance.accounts()))

    def bill(self, prices: PriceList) -> dict[str, float]:
        """Returns what came of it, in a month."""
        months, paid = self.worth.months, self.payloads
        saved = self.worth.money(months * sum(self.worth.seconds_of(self.hits)))
        requests = months * (paid.puts * prices.put_1000 + paid.gets * prices.get_1000) / 1000
        moved = paid.put_bytes * prices.upload_gb + paid.got_bytes * prices.download_gb
        storage = self.settings.capacity_bytes / GB * prices.gb_month
        costs = storage + requests + months * moved / GB
        hits = sum(self.hits) / self.trace.references
        return _figures(hits, saved, costs, requests)


def _figures(hits: float, saved: float, costs: float, requests: float) -> dict[str, float]:
    return {"hit_ratio": hits, "saved": saved, "costs": costs, "requests": requests, "net": saved - costs}


@contextmanager
def opened(kind: str, settings: Settings, clock: list[float]) -> Iterator[FullIndex]:
    """An index of its own, on this clock."""
    options = {"journal": settings.journal, "clock": lambda: clock[0], "grace_s": settings.grace_s}
    with ExitStack() as stack:
        if kind == "sqlite":
            name = settings.payloads.removeprefix("memory://")
            yield stack.enter_context(SqliteIndex.in_memory(name, **options))  # type: ignore[arg-type]
            return
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = RedisServer(folder).start()
        stack.callback(server.kill)
        yield stack.enter_context(RedisIndex.from_settings(server.url, PATIENT, **options))  # type: ignore[arg-type]


def compare(report: AdviceReport, trace: Trace, worth: Worth, one: CapacityAdvice, kind: str) -> Row:
    """Runs the store with the settings of one capacity."""
    recommended = one == report.best
    pasted = report.settings if recommended else settings_to_paste(worth.question, one)
    here = {"index": "memory://x", "payloads": f"memory://advice-{time.monotonic_ns()}"}
    settings = Settings.model_validate(yaml.safe_load(pasted) | here)
    clock, began = [_BEGAN_S], time.monotonic()
    with (
        opened(kind, settings, clock) as index,
        patch.object(segments, "slot_checksum", _checksum),
        patch.object(rounds, "_SHORT_S", inf),
    ):
        run = Run(trace, worth, settings, index, clock)
        with run.store:
            run.all()
            evicted = run.store.counters.snapshot()["evicted_segments"]
    came = run.bill(worth.question.prices)
    assert one.saved_month is not None
    foretold = _figures(one.hit_ratio, one.saved_month, one.cost_month, one.requests_month)
    off = {
        name: foretold[name] - came[name] if name == "hit_ratio" else foretold[name] / came[name] - 1
        for name in came
    }
    off["hit_ratio"] *= 100
    held = sum(run.held) / max(1, len(run.held)) / settings.capacity_bytes
    return Row(
        trace=Path(report.sources[0]).name, index=kind, settings=pasted, recommended=recommended,
        foretold=foretold, came=came, off=off, evicted_segments=evicted, held_share=held,
        seconds=time.monotonic() - began,
    )  # fmt: skip


def _line(row: Row) -> str:
    settings = yaml.safe_load(row.settings)
    saves = "second use" if "admission" in settings else "all"
    star = " *" if row.recommended else "  "
    return (
        f"{row.trace[:26]:26} {row.index:7} {settings['capacity_bytes']:>8}{star} {saves:10} "
        f"{row.foretold['hit_ratio']:6.2%} {row.came['hit_ratio']:6.2%} {row.off['hit_ratio']:+6.2f} "
        f"{row.foretold['saved']:9,.0f} {row.came['saved']:9,.0f} {row.off['saved']:+6.1%} "
        f"{row.foretold['costs']:7,.0f} {row.came['costs']:7,.0f} {row.off['costs']:+6.1%} "
        f"{row.off['net']:+6.1%} {row.evicted_segments:9,} {row.seconds:5.0f}s"
    )


_HEADS = (
    "trace                      index   capacity   saves      foretold came   points "
    "   saved $      came    off  cost $    came    off    net   evicted"
)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE")
    parser.add_argument("--index", default="sqlite,redis")
    parser.add_argument("--also", default="", help="numbers of capacities in the report's table, from 1")
    parser.add_argument("--block-bytes", type=int)
    parser.add_argument("--block-tokens", type=int, default=512)
    parser.add_argument("--prefill-tokens-s", type=float, default=10_000)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    if not options.traces:
        print("no trace is named; docs/advise.md says where two real ones are")
        return 0
    question = Question(
        Settings(index="memory://x", payloads="memory://x"), PriceList(), "redis://redis:6379/0",
        "s3://my-bucket/kvstore", gpus=options.gpus, prefill_tokens_s=options.prefill_tokens_s,
    )  # fmt: skip
    assumed = Assumed(options.block_bytes, options.block_tokens)
    rows = []
    print(_HEADS)
    for path in options.traces:
        report = advise([path], assumed, question, Silent())
        trace = read_traces([path], assumed, Silent())
        worth = Worth(trace, question)
        assert report.best is not None
        asked = [report.best, *(report.capacities[int(at) - 1] for at in options.also.split(",") if at)]
        for one in asked:
            for kind in options.index.split(","):
                rows.append(compare(report, trace, worth, one, kind))
                print(_line(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
