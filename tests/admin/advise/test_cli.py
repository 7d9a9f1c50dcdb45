"""advise: what it says of recordings, in all three forms, and that what it foretells comes true."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore.admin.advise.advise import rounded
from kvstore.admin.advise.reports import AdviceReport
from kvstore.admin.advise.worth import MONTH_S, Cost
from kvstore.admin.bench.reports import BenchReport, BenchSpeed
from kvstore.keys import digests, namespace_id
from kvstore.rules.segments import index_bytes, redis_memory
from kvstore.store.trace import TraceRecorder
from schemas.namespace import Namespace
from schemas.settings import Settings, TraceSettings, parse_bytes
from tests.admin.conftest import Admin
from tests.admin.simulate import workloads
from tests.admin.simulate.store_run import BLOCK_BYTES, hashes, namespace, run

#: A token takes so long, and one so much deeper so much longer.
TOKEN_US, DEPTH_US = 90.0, 0.01


def record(
    folder: Path,
    asked: list[workloads.Asked],
    *,
    costs: bool = True,
    own: float | None = 0.0,
    gpus: int | None = None,
    **names: str,
) -> Path:
    """A recording of these requests by an engine that had this share of each prompt itself."""
    space = namespace(names.get("model", "org/model")).model_copy(
        update={"tenant": names.get("tenant", "default")}
    )
    trace = TraceRecorder(TraceSettings(folder=str(folder)), lambda _, job: (job(), True)[1])
    name = namespace_id(space)
    trace.describe(name, space, BLOCK_BYTES, gpus=gpus)
    for at_s, chain in asked:
        local = None if own is None else int(own * len(chain))
        trace.record_hashes(name, hashes(chain), 0, at_s, local=local)
    if costs:
        trace.record_cost(name, asked[0][0], TOKEN_US, DEPTH_US)
    trace.close()
    return folder


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("recording"), workloads.requests(3, 400))


def advice(admin: Admin, path: Path, *words: str) -> AdviceReport:
    ran = admin("advise", str(path), "--points", "6", "--json", *words)
    assert ran.code == 0, ran.err
    return AdviceReport.model_validate_json(ran.out)


def test_it_pays_and_says_what_to_set(admin: Admin, recording: Path) -> None:
    report = advice(admin, recording, "--gpu-hour", "2", "--bandwidth", "10TiB")
    assert report.verdict == "yes" and "GPU time" in report.because[0]
    assert {curve.policy for curve in report.curves} == {"kvstore", "lru", "optimum", "endless"}
    # No order of eviction beats one that knows the future, and nothing the ceiling.
    points = {curve.policy: [one.hit_ratio for one in curve.points] for curve in report.curves}
    for ours, best, most in zip(points["kvstore"], points["optimum"], points["endless"], strict=True):
        assert ours <= best <= most == report.ceiling_ratio
    best = report.best
    assert best in report.capacities and best.net_month is not None and best.saved_month is not None
    assert best.net_month >= 0.98 * max(one.net_month or 0 for one in report.capacities)
    assert best.net_month == pytest.approx(
        best.saved_month - best.storage_month - best.requests_month - best.transfer_month
    )
    assert best.storage_month == pytest.approx(best.capacity_bytes / 2**30 * 0.023)
    [line] = report.by_model
    assert (line.model, line.tenant, line.kind, line.gpus) == ("org/model", "default", "kv", 1)
    assert line.hit_ratio == pytest.approx(best.hit_ratio)
    assert line.saved_month == pytest.approx(best.saved_month)
    settings = Settings.model_validate(yaml.safe_load(report.settings))
    assert best.capacity_bytes <= settings.capacity_bytes <= 1.1 * best.capacity_bytes + 2**20
    assert settings.admission.second_use is best.second_use
    assert report.prices.gpu_hour == 2 and "gpu_hour" not in report.prices.assumed
    shown = admin("advise", str(recording), "--points", "6").out
    for words in ("Yes:", "Settings to paste", "capacity_bytes:", "break-even", "maxmemory"):
        assert words in shown


@pytest.mark.parametrize("seed", [3, 4])
def test_what_it_foretells_comes_true(admin: Admin, tmp_path: Path, seed: int) -> None:
    asked = workloads.requests(seed, 400)
    report = advice(admin, record(tmp_path, asked), "--gpu-hour", "2")
    best, settings = report.best, Settings.model_validate(yaml.safe_load(report.settings))
    ran = run(settings.capacity_bytes, 64, asked, second_use=best.second_use)
    assert ran.hit_ratio == pytest.approx(best.hit_ratio, abs=0.02)
    cost = Cost(TOKEN_US / 1e6, DEPTH_US / 1e6)
    saved_s = sum(cost.seconds(0, 16 * found) for found in ran.hits)
    months = MONTH_S / (asked[-1][0] - asked[0][0])
    assert saved_s * months * 2 / 3600 == pytest.approx(best.saved_month, rel=0.05)


def test_what_engines_had_themselves_is_not_gained(admin: Admin, tmp_path: Path) -> None:
    asked = workloads.requests(3, 200)
    none = advice(admin, record(tmp_path / "none", asked))
    half = advice(admin, record(tmp_path / "half", asked, own=0.5))
    unknown = advice(admin, record(tmp_path / "unknown", asked, own=None))
    assert (none.local_ratio, unknown.local_ratio) == (0.0, None)
    assert half.local_ratio == pytest.approx(0.5, abs=0.05)
    assert none.ceiling_ratio == half.ceiling_ratio == unknown.ceiling_ratio
    largest = [report.capacities[-1] for report in (none, half, unknown)]
    assert largest[0].hit_ratio == largest[1].hit_ratio
    assert largest[0].gained_ratio == largest[0].hit_ratio == largest[2].gained_ratio
    assert largest[1].gained_ratio < 0.7 * largest[0].gained_ratio
    assert (largest[1].gpu_seconds_month or 0) < (largest[0].gpu_seconds_month or 0)
    assert any("own caches" in caveat for caveat in unknown.caveats)
    assert not any("own caches" in caveat for caveat in half.caveats)
    # An engine that has everything leaves nothing to gain.
    everything = advice(admin, record(tmp_path / "all", asked, own=1.0))
    assert everything.verdict == "no" and everything.settings == ""


def test_a_little_that_is_gained_is_judged_by_its_money(admin: Admin, tmp_path: Path) -> None:
    """Engines have nearly all of each prompt, and the rest, which is little of it, is all to be had."""
    asked = [(1e9 + 60 * number, list(range(1000))) for number in range(100)]
    asked += [(1e9 + 1, list(range(1000, 2000)))]  # room in the largest capacity
    report = advice(admin, record(tmp_path / "told", asked, own=0.995), "--gpu-hour", "100")
    assert 0 < report.best.gained_ratio < 0.01 and report.verdict == "yes"
    assert advice(admin, record(tmp_path / "untold", asked, own=0.995, costs=False)).verdict == "unclear"


def test_what_computing_costs_must_be_known(admin: Admin, tmp_path: Path) -> None:
    path = record(tmp_path, workloads.requests(3, 100), costs=False)
    report = advice(admin, path)
    assert report.verdict == "unclear" and "--prefill-tokens-s" in report.because[1]
    assert report.best.net_month is None and report.prompts == () and report.settings
    assert "Perhaps" in admin("advise", str(path), "--points", "2").out
    told = advice(admin, path, "--prefill-tokens-s", "10000")
    assert told.best.saved_month is not None
    [line] = told.by_model
    assert line.token_us == pytest.approx(100)
    assert line.break_even_bytes_s == pytest.approx(BLOCK_BYTES / 16 * 10_000)
    assert [one.tokens for one in told.prompts] == [1024, 4096, 16384, 65536]
    assert told.prompts[0].compute_s == pytest.approx(0.1024)


def test_a_model_of_unknown_costs_keeps_it_from_saying_no(admin: Admin, tmp_path: Path) -> None:
    record(tmp_path, workloads.requests(3, 100))
    dear = ("--gb-month", "100000")
    assert advice(admin, tmp_path, *dear).verdict == "no"
    record(tmp_path, workloads.requests(4, 100), model="other", costs=False)
    report = advice(admin, tmp_path, *dear)
    assert report.verdict == "unclear" and report.best.net_month is not None
    assert "--prefill-tokens-s" in report.because[0] and "with other;" in report.because[0]
    assert any("with other is unknown" in caveat for caveat in report.caveats)
    assert advice(admin, tmp_path, *dear, "--prefill-tokens-s", "10000").verdict == "no"


def test_recordings_of_different_times_keep_it_from_saying_no(admin: Admin, tmp_path: Path) -> None:
    dear = ("--gb-month", "100000")

    def at(folder: str, *begins_and_pauses: tuple[float, float]) -> AdviceReport:
        for begins, pause in begins_and_pauses:
            asked = [(begins + pause * number, [number * (number % 2)]) for number in range(60)]
            record(tmp_path / folder, asked)
        return advice(admin, tmp_path / folder, *dear)

    even = at("even", (1e9, 60), (1e9 + 100, 40))
    assert even.verdict == "no" and not any("different times" in caveat for caveat in even.caveats)
    for uneven in (at("apart", (1e9, 60), (1e9 + 4000, 60)), at("short", (1e9, 60), (1e9, 20))):
        assert uneven.verdict == "unclear" and "different times" in uneven.because[0]
        assert any("different times" in caveat for caveat in uneven.caveats)


def test_files_of_one_process_are_one_recording(admin: Admin, tmp_path: Path) -> None:
    record(tmp_path, [(1e9 + 60 * number, [number * (number % 2)]) for number in range(60)])
    [first] = tmp_path.iterdir()
    record(tmp_path / "next", [(1e9 + 4000 + 60 * number, [number * (number % 2)]) for number in range(10)])
    [second] = (tmp_path / "next").iterdir()
    second.rename(first.with_name(first.name.replace(".1.jsonl", ".2.jsonl")))
    assert advice(admin, tmp_path, "--gb-month", "100000").verdict == "no"


def test_items_are_priced_by_what_encoding_takes(admin: Admin, tmp_path: Path) -> None:
    eyes = Namespace(kind="ec", model="org/model", weights="w", dtype="bfloat16")
    trace = TraceRecorder(TraceSettings(folder=str(tmp_path)), lambda _, job: (job(), True)[1])
    trace.describe(namespace_id(eyes), eyes, 1 << 20)
    for number in range(200):
        name = number if number % 4 == 0 else 1000 + number % 3
        trace.record(namespace_id(eyes), digests(hashes([name])), 1e9 + number * 60, local=0)
    trace.close()
    report = advice(admin, tmp_path)
    assert report.verdict == "unclear" and "--encode-ms" in report.because[1]
    assert not any("prefill" in why for why in report.because)
    assert not any("own caches" in caveat for caveat in report.caveats)
    assert advice(admin, tmp_path, "--encode-ms", "500").verdict == "yes"
    # What engines have themselves is told of KV.
    record(tmp_path, workloads.requests(3, 200), own=0.5)
    both = advice(admin, tmp_path)
    assert both.local_ratio == pytest.approx(0.5, abs=0.05)
    assert [line.local_ratio is None for line in both.by_model if line.kind == "ec"] == [True]


def test_dont_because(admin: Admin, tmp_path: Path, recording: Path) -> None:
    once = [(1e9 + number, [2 * number, 2 * number + 1]) for number in range(50)]
    report = advice(admin, record(tmp_path, once))
    assert report.verdict == "no" and "asked for once" in report.because[0]
    report = advice(admin, recording, "--gb-month", "100000")
    assert report.verdict == "no" and "no capacity pays" in report.because[0]
    shown = admin("advise", str(recording), "--points", "2", "--gb-month", "100000").out
    assert shown.startswith("Don't, because:") and "Settings" not in shown


def test_loading_must_be_faster_than_computing(admin: Admin, recording: Path) -> None:
    [line] = advice(admin, recording).by_model
    need = line.break_even_bytes_s
    assert need is not None

    def at(factor: float) -> AdviceReport:
        return advice(admin, recording, "--bandwidth", str(round(factor * need)))

    assert (at(1.1).verdict, "objective" in at(1.1).settings) == ("yes", False)
    between = at(0.5)
    assert between.verdict == "yes"
    assert Settings.model_validate(yaml.safe_load(between.settings)).kv.objective == "throughput"
    assert at(0.1).verdict == "no" and "slower than computing" in at(0.1).because[0]


def test_what_bench_has_measured_counts(admin: Admin, tmp_path: Path, recording: Path) -> None:
    def speed(operation: Any, tier: Any, bytes_s: float) -> BenchSpeed:
        return BenchSpeed(
            operation=operation, tier=tier, at_a_time=1, calls=1, blocks=1, p50_s=1, p99_s=1, bytes_s=bytes_s
        )

    made = BenchReport(
        version="1", ended="complete", problem="", index="", payloads="", fast=None, seconds=1.0,
        kv_bytes_per_token=1, kv_source="", block_tokens=16, segment_blocks=1, segment_bytes=1, codec="none",
        speeds=(speed("put", "shared", 1e3), speed("get", "shared", 1e12), speed("get", "fast", 2e12)),
        left_behind="",
    )  # fmt: skip
    file = tmp_path / "bench.json"
    file.write_text(made.model_dump_json())
    report = advice(admin, recording, "--bench", str(file))
    assert {read.tier: read.bytes_s for read in report.reads} == {"shared": 1e12, "fast": 2e12}
    assert report.verdict == "yes" and not any("--bench" in caveat for caveat in report.caveats)
    # A fast tier that nobody is told to set doesn't help.
    file.write_text(
        made.model_copy(
            update={"speeds": (speed("get", "fast", 1e12), speed("get", "shared", 1e3))}
        ).model_dump_json()
    )
    report = advice(admin, recording, "--bench", str(file))
    assert report.verdict == "no" and "slower than computing" in report.because[0]
    file.write_text("{}")
    ran = admin("advise", str(recording), "--bench", str(file))
    assert ran.code == 2 and "no report of" in ran.err
    assert admin("advise", str(recording), "--bench", str(tmp_path / "none")).code == 2


def test_models_and_tenants_have_bills_of_their_own(admin: Admin, tmp_path: Path) -> None:
    record(tmp_path, workloads.requests(3, 200), tenant="one")
    record(tmp_path, workloads.requests(4, 100), tenant="two")
    record(tmp_path, workloads.requests(5, 50), model="other", costs=False)
    report = advice(admin, tmp_path, "--gpus", "4")
    assert [(line.model, line.tenant) for line in report.by_model] == [
        ("org/model", "one"),
        ("org/model", "two"),
        ("other", "default"),
    ]
    assert report.by_model[2].saved_month is None  # nobody has said what its tokens cost
    saved = sum(line.saved_month or 0 for line in report.by_model)
    assert saved == pytest.approx(report.best.saved_month)
    bill = report.best.storage_month + report.best.requests_month + report.best.transfer_month
    assert sum(line.cost_month for line in report.by_model) == pytest.approx(bill)
    free = ("--gb-month", "0", "--put-1000", "0", "--get-1000", "0")
    one, four = (advice(admin, tmp_path, "--gpus", gpus, *free).best.saved_month for gpus in ("1", "4"))
    assert four == pytest.approx(4 * (one or 0))


def test_all_gpus_of_an_engine_count_though_they_hold_copies(admin: Admin, tmp_path: Path) -> None:
    asked = workloads.requests(3, 100)
    free = ("--gb-month", "0", "--put-1000", "0", "--get-1000", "0")
    parts = advice(admin, record(tmp_path / "parts", asked), *free)
    gpus = advice(admin, record(tmp_path / "gpus", asked, gpus=8), *free)
    assert [line.gpus for line in (*parts.by_model, *gpus.by_model)] == [1, 8]
    most = [report.capacities[-1].gpu_seconds_month or 0 for report in (parts, gpus)]
    assert most[1] == pytest.approx(8 * most[0])
    assert any("--gpus" in caveat for caveat in parts.caveats)
    assert not any("--gpus" in caveat for caveat in gpus.caveats)
    assert advice(admin, tmp_path / "gpus", "--gpus", "4").by_model[0].gpus == 4


def test_a_trace_of_mooncakes_form_will_do(admin: Admin, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    workloads.write(path, workloads.requests(3, 100))
    report = advice(admin, path, "--block-tokens", "16", "--prefill-tokens-s", "5000")
    assert report.by_model[0].model == "" and report.trace.requests == 100
    assert (
        "redis://mine"
        in advice(admin, path, "--block-tokens", "16", "--index", "redis://mine:6379/1").settings
    )


class _Seen(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_and_loads_nothing(admin: Admin, tmp_path: Path) -> None:
    path = record(tmp_path / "r", workloads.requests(3, 100), model="<script>alert(1)</script>\x1b[31m")
    page = tmp_path / "advice.html"
    ran = admin("advise", str(path), "--points", "3", "--html", str(page))
    assert ran.code == 0 and "page written" in ran.err and "\x1b" not in ran.out
    text = page.read_text(encoding="utf-8")
    seen = _Seen()
    seen.feed(text)
    names = {tag for tag, _ in seen.tags}
    assert {"svg", "table", "pre", "h1"} <= names
    assert not names & {"script", "link", "img", "iframe", "object", "form"}
    for tag, attributes in seen.tags:
        assert not {"src", "href", "onload"} & attributes.keys(), tag
    assert not re.search(r"url\(|@import", text)
    assert "<script>alert(1)</script>" in seen.text and "\x1b" not in text
    assert "capacity_bytes" in seen.text
    ran = admin("advise", str(path), "--html", str(tmp_path / "none" / "x.html"))
    assert ran.code == 2 and "No such file" in ran.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpu-hour", "-1"], "gpu-hour"),
        (["--prefill-tokens-s", "0"], "prefill-tokens-s"),
        (["--bandwidth", "fast"], "'fast'"),
        (["--points", "1"], "points"),
    ],
)
def test_bad_options_are_refused_in_words(admin: Admin, recording: Path, words: list[str], says: str) -> None:
    ran = admin("advise", str(recording), *words)
    assert (ran.code, ran.out) == (2, "") and says in ran.err and "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--index", "redis://me:hush@host:port/0"], "the port of a redis URL"),
        (["--payloads", "s3:/bucket"], "not a URL"),
        (["--payloads", "memory://x"], "must be used for both"),
    ],
)
def test_urls_that_settings_refuse_are_refused_before_anything_is_read(
    admin: Admin, tmp_path: Path, words: list[str], says: str
) -> None:
    ran = admin("advise", str(tmp_path / "none"), *words)
    assert (ran.code, ran.out) == (2, "") and "--index, --payloads" in ran.err
    assert says in " ".join(ran.err.split()) and "hush" not in ran.err and "Traceback" not in ran.err


def test_valid_urls_are_pasted_without_who_logs_in(admin: Admin, recording: Path) -> None:
    for index, payloads, shown in (
        ("unix:///run/redis.sock?db=3", "file:///srv/kv", "unix:///run/redis.sock?db=3"),
        (
            "redis://me:hush@host:6379/1",
            "s3://bucket/p?endpoint=http://minio:9000",
            "redis://***@host:6379/1",
        ),
    ):
        report = advice(admin, recording, "--index", index, "--payloads", payloads)
        pasted = yaml.safe_load(report.settings)
        assert (pasted["index"], pasted["payloads"]) == (shown, payloads)


def test_what_is_no_recording_is_refused(admin: Admin, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"what": "ever"}))
    assert admin("advise", str(tmp_path)).code == 2


def test_sizes_are_rounded_up_to_what_a_person_would_write() -> None:
    for nbytes in (1, 2**20, 437 * 2**30, 2**40 + 1, 123_456_789, 99 * 2**30 + 5):
        written = parse_bytes(rounded(nbytes))
        assert nbytes <= written <= 1.12 * nbytes + 2**20
    assert rounded(437 * 2**30) == "440GiB"


def test_redis_is_as_large_as_the_page_says() -> None:
    assert index_bytes(524_288, 32_768) == pytest.approx(26e6 + 1.9e6, rel=0.02)
    assert index_bytes(100, 10, 4) - index_bytes(100, 10, 1) == 8 * 10 * 3
    assert index_bytes(0, 0, second_use=True) - index_bytes(0, 0) == 5 << 19
    assert (redis_memory(0), redis_memory(10**9)) == (512_000_000, 2_256_000_000)
