"""docs/production.md: every number of its tables follows from the formulas beside them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

# Measured: trials/benchmarks/bench_match.py and bench_million.py; the page says how they were fitted.
from kvstore.keys import NamespaceId, new_segment_id, payload_name
from kvstore.rules.segments import ENTRY_BYTES, SEGMENT_BYTES
from schemas.settings import S3Settings, SegmentSettings

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "production.md").read_text(encoding="utf-8")

MIB, GIB, TIB = 1 << 20, 1 << 30, 1 << 40
BLOCK_TOKENS = 16
MONTH_H = 730


@dataclass(frozen=True)
class Prices:
    """Dollars: a GB (2**30 bytes) and month, a request, a GB moved."""

    storage: float
    put: float
    get: float
    upload: float = 0.0
    retrieval: float = 0.0


STANDARD = Prices(storage=0.023, put=0.005 / 1000, get=0.0004 / 1000)
EXPRESS = Prices(storage=0.11, put=0.00113 / 1000, get=0.00003 / 1000, upload=0.0032, retrieval=0.0006)


@dataclass(frozen=True)
class Model:
    bytes_per_token: int

    @property
    def block_bytes(self) -> int:
        return BLOCK_TOKENS * self.bytes_per_token

    @property
    def blocks_per_segment(self) -> int:
        settings = SegmentSettings()
        return max(1, min(settings.max_blocks, settings.target_bytes // self.block_bytes))

    @property
    def segment_bytes(self) -> int:
        return self.blocks_per_segment * self.block_bytes

    @property
    def ranges(self) -> int:
        """GETs of a whole segment."""
        return max(1, round(self.segment_bytes / S3Settings().range_bytes))

    #: Of a million tokens:
    @property
    def gb(self) -> float:
        return 1e6 * self.bytes_per_token / GIB

    @property
    def segments(self) -> float:
        return 1e6 * self.bytes_per_token / self.segment_bytes

    def store_once(self, prices: Prices) -> float:
        return self.gb * prices.upload + self.segments * prices.put

    def load_once(self, prices: Prices) -> float:
        return self.gb * prices.retrieval + self.segments * self.ranges * prices.get

    def keep(self, prices: Prices, hours: float) -> float:
        return self.gb * prices.storage * hours / MONTH_H


def rows(name: str, page: str = PAGE) -> Iterator[list[str]]:
    """The cells of the table that follows `<!-- table: name -->`, without its heading."""
    _, found, rest = page.partition(f"<!-- table: {name} -->\n\n")
    assert found, name
    for line in rest.split("\n\n")[0].splitlines()[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def number(cell: str) -> float:
    return float(re.sub(r"[$,]|MB|h$", "", cell))


def written(cell: str, value: float) -> bool:
    """Whether `cell` is `value`, rounded to the digits that it has."""
    digits = re.sub(r"[$,]| *(MB|h)$", "", cell)
    places = len(digits.partition(".")[2])
    return f"{value:.{places}f}" == digits


MODELS = {
    row[0]: Model(int(number(row[1])) * (576 * 2 if row[2] == "MLA" else 4 * int(row[2]) * int(row[3])))
    for row in rows("models")
}


def test_the_models() -> None:
    assert len(MODELS) >= 6
    for name, _, _, _, per_token, mib, per_segment, per_tib in rows("models"):
        model = MODELS[name]
        assert written(per_token, model.bytes_per_token), name
        assert written(mib, model.block_bytes / MIB), name
        assert written(per_segment, model.blocks_per_segment), name
        assert written(per_tib, TIB / model.bytes_per_token / 1e6), name


def test_the_bandwidth() -> None:
    seen = [row[0] for row in rows("bandwidth")]
    for name, thousand, five, ten in rows("bandwidth"):
        each = MODELS[name].bytes_per_token * 8 / 1e9
        assert written(thousand, 1000 * each), name
        assert written(five, 5000 * each) and written(ten, 10_000 * each), name
    assert seen == list(MODELS)


def test_redis() -> None:
    for name, blocks, segments, size in rows("redis"):
        model = MODELS[name]
        expected_blocks = TIB / model.block_bytes
        expected_segments = TIB / model.segment_bytes
        assert written(blocks, expected_blocks) and written(segments, expected_segments), name
        assert written(size, (ENTRY_BYTES * expected_blocks + SEGMENT_BYTES * expected_segments) / 1e6), name


def test_the_fit_to_what_was_measured() -> None:
    heads, measured = re.findall(r"\| (?:blocks per segment|bytes per block) \| ([\d. |]+) \|\n", PAGE)
    assert len(heads.split("|")) == 5
    for per_segment, each in zip(heads.split("|"), measured.split("|"), strict=True):
        fitted = ENTRY_BYTES + SEGMENT_BYTES / float(per_segment)
        assert fitted == pytest.approx(float(each), rel=0.05)


def test_the_bill_on_s3_standard() -> None:
    for name, gb, puts, store, gets, load, day, month in rows("standard"):
        model = MODELS[name]
        assert written(gb, model.gb) and written(puts, model.segments), name
        assert written(gets, model.segments * model.ranges), name
        assert written(store, model.store_once(STANDARD)), name
        assert written(load, model.load_once(STANDARD)), name
        assert written(day, model.keep(STANDARD, 24)), name
        assert written(month, model.keep(STANDARD, MONTH_H)), name


def test_the_bill_on_express_one_zone() -> None:
    for name, store, load, day, month in rows("express"):
        model = MODELS[name]
        assert written(store, model.store_once(EXPRESS)), name
        assert written(load, model.load_once(EXPRESS)), name
        assert written(day, model.keep(EXPRESS, 24)), name
        assert written(month, model.keep(EXPRESS, MONTH_H)), name


def test_against_computing() -> None:
    for name, assumed, computing, load, hours in rows("breakeven"):
        model = MODELS[name]
        found = re.fullmatch(r"(\d+) GPUs? at \$(\d+)/h, ([\d,]+) tokens/s", assumed)
        assert found, assumed
        expected = int(found[1]) * int(found[2]) / 3600 / number(found[3]) * 1e6
        assert written(computing, expected) and written(load, model.load_once(STANDARD)), name
        assert written(hours, (expected - model.load_once(STANDARD)) / model.keep(STANDARD, 1)), name


def test_a_wrong_number_is_noticed() -> None:
    assert written("$0.020", 0.0196) and not written("$0.019", 0.0196)
    assert written("3,906", 3906.25) and not written("3,907", 3906.25)


#: What AWS documents for one partition, per second: GETs, and PUTs and deletes.
PARTITION = (5_500, 3_500)


def test_request_rates_are_those_of_the_partitions() -> None:
    section = PAGE.split("### Request rates")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+)[^|]* \| ([\d,]+) \| ([\d,]+) \|$", section, re.MULTILINE)
    told = [[int(word.replace(",", "")) for word in row] for row in rows]
    assert told == [[parts, parts * PARTITION[0], parts * PARTITION[1]] for parts in (1, 16, 256)]


def test_names_of_a_namespace_are_spread_by_their_first_characters() -> None:
    """As many partitions as the page says take the same share of requests, also of one chain's segments,
    which lie in one shard of the index."""
    chain = bytes(16)
    names = [payload_name(NamespaceId("0" * 16), new_segment_id(chain), 0) for _ in range(25_600)]
    below = [name.removeprefix("0" * 16 + "/") for name in names]
    for characters, partitions in ((1, 16), (2, 256)):
        shares = Counter(name[:characters] for name in below)
        assert len(shares) == partitions
        mean = len(names) / partitions
        assert 0.4 * mean < min(shares.values()) <= max(shares.values()) < 1.6 * mean
