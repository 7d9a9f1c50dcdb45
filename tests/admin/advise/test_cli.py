"""advise of recordings and of the index, in all three forms; and that what it foretells comes true."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from kvstore.admin.advise.advise import rounded
from kvstore.admin.advise.page import plot
from kvstore.admin.advise.remembered import kept
from kvstore.admin.advise.reports import AdviceReport, CapacityPoint, Curve
from kvstore.admin.advise.worth import MONTH_S, Cost
from kvstore.index.eviction import GHOST_STEPS, ghost_bytes
from kvstore.index.maintenance import Ghosts
from kvstore.keys import digests, namespace_id
from kvstore.rules.segments import index_bytes, redis_memory
from kvstore.store.trace import TraceRecorder
from schemas.namespace import Namespace
from schemas.settings import Settings, TraceSettings, parse_bytes
from tests.admin.advise import workloads
from tests.admin.advise.store_run import BLOCK_BYTES, hashes, namespace, run, tell_megabytes_apart, world
from tests.admin.conftest import Admin, Filled

GIB = 1 << 30
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
    ran = admin("advise", str(path), "--json", *words)
    assert ran.code == 0, ran.err
    return AdviceReport.model_validate_json(ran.out)


def test_it_pays_and_says_what_to_set(admin: Admin, recording: Path) -> None:
    report = advice(admin, recording, "--price", "gpu-hour=2", "--bandwidth", "10TiB")
    assert report.verdict == "yes" and "GPU time" in report.because[0]
    assert [curve.policy for curve in report.curves] == ["kvstore", "second-use", "lru", "optimum"]
    # No order of eviction beats one that knows the future, and nothing the ceiling.
    points = {curve.policy: [one.hit_ratio for one in curve.points] for curve in report.curves}
    assert report.ceiling_ratio == points["lru"][-1]
    for ours, best, most in zip(points["kvstore"], points["optimum"], points["lru"][-1:] * 12, strict=True):
        assert ours <= best <= most
    for curve in report.curves:
        for point in curve.points:
            assert point.hit_ratio == point.hit_blocks / report.asked_blocks
            assert point.hit_tokens == 16 * point.hit_blocks
            assert (point.evicted_bytes or 0) <= (point.stored_bytes or 0)
    assert report.recorded is not None and report.recorded.requests == 400
    assert report.recorded.asked_tokens == 16 * report.asked_blocks
    capacities = [one.capacity_bytes for one in report.capacities]
    assert capacities == [point.capacity_bytes for point in report.curves[0].points]
    assert capacities[0] == pytest.approx(0.01 * report.recorded.distinct_bytes, rel=1e-4)
    assert capacities[-1] == report.recorded.distinct_bytes
    best = report.best
    assert best is not None and best in report.capacities
    assert best.net_month is not None and best.saved_month is not None
    assert best.net_month >= 0.98 * max(one.net_month or 0 for one in report.capacities)
    assert best.cost_month == pytest.approx(best.storage_month + best.requests_month + best.transfer_month)
    assert best.net_month == pytest.approx(best.saved_month - best.cost_month)
    assert best.storage_month == pytest.approx(best.capacity_bytes / 2**30 * 0.023)
    [line] = report.by_model
    assert (line.model, line.tenant, line.kind, line.gpus) == ("org/model", "default", "kv", 1)
    assert line.hit_ratio == pytest.approx(best.hit_ratio)
    assert line.saved_month == pytest.approx(best.saved_month)
    settings = Settings.model_validate(yaml.safe_load(report.settings))
    assert best.capacity_bytes <= settings.capacity_bytes <= 1.1 * best.capacity_bytes + 2**20
    assert settings.admission.second_use is best.second_use
    assert report.prices is not None
    assert report.prices.gpu_hour == 2 and "gpu_hour" not in report.prices.assumed
    shown = admin("advise", str(recording)).out
    for words in ("Yes:", "Settings to paste", "capacity_bytes:", "break-even", "maxmemory", "optimum"):
        assert words in shown
    for point in report.curves[0].points:
        assert f"{point.hit_ratio:.1%}" in shown and f"{point.hit_tokens:,}" in shown
    assert all(len(line) <= 200 for line in shown.splitlines())


def test_capacities_and_policies_can_be_asked_for(admin: Admin, tmp_path: Path) -> None:
    """Ends that a trace tells are worth as much as all ends that are known."""
    path = tmp_path / "chats.jsonl"
    workloads.write(path, workloads.requests(9, 400))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    last = {line["hash_ids"][0]: number for number, line in enumerate(lines)}
    for number, line in enumerate(lines):
        line["session_id"] = line["hash_ids"][0]
        line |= {"end": True} if last[line["session_id"]] == number else {}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    blocks = ("--block-tokens", "16", "--block-bytes", "1MiB")
    words = ("--capacity", "300MiB,100MiB", "--capacity", "1GiB", "--compare", "told,told-ends,fifo", *blocks)
    report = advice(admin, path, *words)
    points = {curve.policy: curve.points for curve in report.curves}
    assert list(points) == ["kvstore", "second-use", "told", "told-ends", "fifo"]
    assert [one.capacity_bytes for one in points["fifo"]] == [100 << 20, 300 << 20, 1 << 30]
    assert points["told"] == points["told-ends"]
    for at in range(2):
        assert points["told"][at].hit_ratio > points["kvstore"][at].hit_ratio + 0.01


def test_settings_that_engines_have_count(admin: Admin, tmp_path: Path, recording: Path) -> None:
    """They are a cache's, or those of none."""
    path = tmp_path / "settings.yaml"
    for settings in (
        "segment: {max_blocks: 8}\n",
        "segment: {max_blocks: 8}\npayloads: file:///nowhere\n",
        "segment: {max_blocks: 8}\nindex: rediss://host\nredis: {tls_cert: /a, tls_key: /b}\n"
        "payloads: {fast: 'file:///x', slow: 's3://bucket/x'}\n",
    ):
        path.write_text(settings)
        report = advice(admin, recording, "--capacity", "1GiB", "--settings", str(path))
        assert [line.segment_blocks for line in report.by_model] == [8]
    env = {"KVSTORE_SEGMENT__MAX_BLOCKS": "0"}
    ran = admin("advise", str(recording), env=env)
    assert ran.code == 2 and "segment.max_blocks" in ran.err


def test_progress_goes_to_stderr(admin: Admin, recording: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.cli.progress._EVERY_S", 0.0)
    ran = admin("advise", str(recording), "--capacity", "1MiB,1GiB", "--json")
    assert "reading the trace" in ran.err and "(2 of 2)" in ran.err
    assert AdviceReport.model_validate_json(ran.out)


@pytest.mark.parametrize("seed", [3, 4])
def test_what_it_foretells_comes_true(admin: Admin, tmp_path: Path, seed: int) -> None:
    asked = workloads.requests(seed, 400)
    report = advice(admin, record(tmp_path, asked), "--price", "gpu-hour=2")
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
    report = advice(admin, record(tmp_path / "told", asked, own=0.995), "--price", "gpu-hour=100")
    assert 0 < report.best.gained_ratio < 0.01 and report.verdict == "yes"
    assert advice(admin, record(tmp_path / "untold", asked, own=0.995, costs=False)).verdict == "unclear"


def test_what_computing_costs_must_be_known(admin: Admin, tmp_path: Path) -> None:
    path = record(tmp_path, workloads.requests(3, 100), costs=False)
    report = advice(admin, path)
    assert report.verdict == "unclear" and "--prefill-tokens-s" in report.because[1]
    assert report.best.net_month is None and report.prompts == () and report.settings
    assert "Perhaps" in admin("advise", str(path)).out
    told = advice(admin, path, "--prefill-tokens-s", "10000")
    assert told.best.saved_month is not None
    [line] = told.by_model
    assert line.token_us == pytest.approx(100)
    assert line.break_even_bytes_s == pytest.approx(BLOCK_BYTES / 16 * 10_000)
    assert [one.tokens for one in told.prompts] == [1024, 4096, 16384, 65536]
    assert told.prompts[0].compute_s == pytest.approx(0.1024)


def test_a_model_of_unknown_costs_keeps_it_from_saying_no(admin: Admin, tmp_path: Path) -> None:
    record(tmp_path, workloads.requests(3, 100))
    dear = ("--price", "gb-month=100000")
    assert advice(admin, tmp_path, *dear).verdict == "no"
    record(tmp_path, workloads.requests(4, 100), model="other", costs=False)
    report = advice(admin, tmp_path, *dear)
    assert report.verdict == "unclear" and report.best.net_month is not None
    assert "--prefill-tokens-s" in report.because[0] and "with other;" in report.because[0]
    assert any("with other is unknown" in caveat for caveat in report.caveats)
    assert advice(admin, tmp_path, *dear, "--prefill-tokens-s", "10000").verdict == "no"


def test_recordings_of_different_times_keep_it_from_saying_no(admin: Admin, tmp_path: Path) -> None:
    dear = ("--price", "gb-month=100000")

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
    assert advice(admin, tmp_path, "--price", "gb-month=100000").verdict == "no"


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
    report = advice(admin, recording, "--price", "gb-month=100000")
    assert report.verdict == "no" and "no capacity pays" in report.because[0]
    shown = admin("advise", str(recording), "--price", "gb-month=100000").out
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
    free = ("--price", "gb-month=0,put-1000=0,get-1000=0")
    one, four = (advice(admin, tmp_path, "--gpus", gpus, *free).best.saved_month for gpus in ("1", "4"))
    assert four == pytest.approx(4 * (one or 0))


def test_all_gpus_of_an_engine_count_though_they_hold_copies(admin: Admin, tmp_path: Path) -> None:
    asked = workloads.requests(3, 100)
    free = ("--price", "gb-month=0,put-1000=0,get-1000=0")
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
    assert report.by_model[0].model == "" and report.recorded.requests == 100
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
    ran = admin("advise", str(path), "--html", str(page))
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


def test_points_lie_where_the_axes_say() -> None:
    def drawn(*points: tuple[int, float], ceiling: float | None = 0.45) -> ElementTree.Element:
        found = tuple(CapacityPoint(capacity_bytes=at, hit_ratio=ratio, hit_blocks=0) for at, ratio in points)
        report = AdviceReport(
            version="1", sources=(), verdict="no", because=(), asked_blocks=0, caveats=(),
            curves=(Curve(policy="kvstore", points=found),), ceiling_ratio=ceiling,
        )  # fmt: skip
        return ElementTree.fromstring("".join(plot(report)))

    root = drawn((GIB, 0.1), (8 * GIB, 0.3), (64 * GIB, 0.42))
    texts = {element.text: element for element in root.iter("text")}
    across = [float(texts[label].get("x") or 0) for label in ("1 GiB", "8 GiB", "64 GiB")]
    levels = {share: float(texts[f"{share}%"].get("y") or 0) - 4 for share in (0, 10, 20, 30, 40, 50)}
    # Logarithmic across, linear upwards.
    assert across[1] - across[0] == pytest.approx(across[2] - across[1], abs=0.2)
    assert levels[0] - levels[10] == pytest.approx(levels[40] - levels[50], abs=0.2)
    circles = [(float(one.get("cx") or 0), float(one.get("cy") or 0)) for one in root.iter("circle")]
    for at in ((across[0], levels[10]), (across[1], levels[30])):
        assert any(circle == pytest.approx(at, abs=0.2) for circle in circles)
    assert {"kvstore", "ceiling"} <= set(texts)
    for odd in (
        ((GIB, 0.3),),
        ((GIB, 0.0), (2 * GIB, 0.0)),
        ((1, 0.001), (2, 1.0)),
        ((1, 0.5), (1 << 60, 0.6)),
    ):
        for element in drawn(*odd, ceiling=None).iter():
            for name, most in (("x", 900), ("cx", 900), ("y", 560), ("cy", 560)):
                assert 0 <= float(element.get(name) or 0) <= most


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--price", "gpu-hour=-1"], "gpu_hour"),
        (["--price", "gpu-hour=nan"], "gpu_hour"),
        (["--price", "gpu-hour"], "gpu_hour"),
        (["--price", "gold=1"], "none of gpu-hour"),
        (["--capacity", "many"], "'many'"),
        (["--capacity", "1MiB,,"], "''"),
        (["--compare", "best"], "none of told"),
        (["--compare", "told"], "nothing is said of sessions"),
        (["--block-bytes", "-1"], "'-1'"),
        (["--prefill-tokens-s", "0"], "prefill-tokens-s"),
        (["--bandwidth", "fast"], "'fast'"),
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


# ---- without a recording


def test_within_a_step_ghosts_count_in_proportion() -> None:
    least = ghost_bytes(0)
    ghosts = [Ghosts(least, 100), Ghosts(ghost_bytes(GHOST_STEPS), 50)]
    below = ghost_bytes(GHOST_STEPS - 1)
    assert kept(ghosts, 0) == 0
    assert kept(ghosts, least / 2) == 50
    assert kept(ghosts, least) == kept(ghosts, below) == 100
    assert kept(ghosts, (below + 2 * least) / 2) == 125
    assert kept(ghosts, 2 * least) == kept(ghosts, 1 << 60) == 150
    assert kept([], 1 << 30) == 0


def test_the_index_says_what_it_remembers(
    admin: Admin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell_megabytes_apart(monkeypatch)
    with world(32 << 20, 5) as it:
        space = it.store.open(namespace(), block_bytes=BLOCK_BYTES)
        space.register()
        for at_s, chain in workloads.requests(4, 400):
            it.serve(space, at_s, chain)
        where = ["--payloads", it.store.settings.origin, "--index", it.store.settings.index_url]
        env = {"KVSTORE_CAPACITY_BYTES": "32MiB"}

        def points(*words: str, **more: str) -> tuple[AdviceReport, tuple[CapacityPoint, ...]]:
            ran = admin("advise", *where, *words, "--json", env=env | more)
            assert (ran.code, ran.err) == (0, "")
            report = AdviceReport.model_validate_json(ran.out)
            return report, report.curves[0].points

        report, (now, small, large) = points("--capacity", "96MiB,48MiB,32MiB")
        assert (report.asked_blocks, now.hit_blocks) == (it.ran.asked, sum(it.ran.hits))
        assert [one.capacity_bytes for one in (now, small, large)] == [32 << 20, 48 << 20, 96 << 20]
        assert now.hit_blocks < small.hit_blocks < large.hit_blocks < report.asked_blocks
        assert report.verdict == "unclear" and f"{large.hit_ratio:.1%}" in report.because[0]
        page = tmp_path / "page.html"
        shown = admin("advise", *where, "--capacity", "96MiB", "--html", str(page), env=env).out
        for text in (shown, page.read_text(encoding="utf-8")):
            assert f"{large.hit_ratio:.1%}" in text and f"{large.hit_blocks:,}" in text
        # By default up to three times the capacity, and the quota in force is what counts.
        it.store.maintenance.set_quota("store", 40 << 20)
        report, found = points()
        assert [one.capacity_bytes >> 20 for one in found] == [40, 44, 50, 60, 80, 120]
        # The ring is named if it is too short for the question.
        assert not any("last 10" in caveat for caveat in report.caveats)
        short, _ = points(KVSTORE_JOURNAL__GHOSTS="10")
        assert any("last 10 segments" in caveat for caveat in short.caveats)
        ran = admin("advise", *where, "--capacity", "39MiB", env=env)
        assert ran.code == 2 and "less than the present 40.0 MiB" in ran.err


def test_an_index_that_nobody_has_asked(admin: Admin, filled: Filled, tmp_path: Path) -> None:
    ran = admin("advise", *filled.options)
    assert ran.code == 0 and "No engine has told" in ran.out
    ran = admin("advise", "--payloads", f"file://{tmp_path}/none", "--json")
    assert ran.code == 0 and ran.json["namespaces"] == []
    assert not (tmp_path / "none").exists()
    ran = admin("advise", *filled.options, "--gpus", "2")
    assert ran.code == 2 and "without a RECORDING" in ran.err
