"""advise on the live store: hits, ceiling, money and more room, from what the index holds of requests."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore.admin.advise.reports import AdviceReport, LiveAdviceReport
from kvstore.admin.backends import Cache
from kvstore.admin.simulate.reports import WhatIfReport
from kvstore.admin.simulate.whatif import whatif
from kvstore.build import open_store
from kvstore.format.segment import Slot
from kvstore.index.demand import OwnDemand
from kvstore.index.port import MISSING_DIGESTS, Outcome
from kvstore.keys import NamespaceId, block_key, digests
from schemas.settings import parse_bytes
from tests.admin.advise.test_cli import record
from tests.admin.conftest import Admin, Filled
from tests.admin.simulate import workloads
from tests.admin.simulate.store_run import BLOCK_BYTES, SHAPE, hashes, namespace

#: Microseconds that computing a block takes; and room for a part of what is asked for.
BLOCK_US = 50_000
CAPACITY = "40MiB"


def serve(filled: Filled, *, told: bool = True, **settings: Any) -> tuple[int, int, int]:
    """Serves requests as an engine does; returns blocks asked for, served and different ones."""
    asked = served = 0
    different = set[bytes]()
    zeros = memoryview(bytes(BLOCK_BYTES))
    with closing(open_store(filled.settings | {"capacity_bytes": CAPACITY} | settings)) as store:
        space = store.open(namespace("org/model"), block_bytes=BLOCK_BYTES)
        space.register()
        for _, chain in workloads.requests(3, 120):
            own = hashes(chain)
            packed = digests(own)
            found = space.match(packed)
            space.touch([run.segment for run in found.runs])
            missing = packed[16 * found.blocks :][: 16 * MISSING_DIGESTS]
            reason = "absent" if missing else ""
            now_s = time.time()
            outcome = Outcome(now_s, "r", "match", len(own), found.blocks, reason, found.blocks, missing)
            assert space.tell([outcome], packed if told else None)
            asked, served = asked + len(own), served + found.blocks
            different |= set(own)
            for at in range(found.blocks, len(own), 16):
                piece = [Slot(block_key(one), zeros, "BF16", SHAPE) for one in own[at : at + 16]]
                space.save(piece, depth=at, chain=digests(own[:1]), cost_us=BLOCK_US * len(piece))
    return asked, served, len(different)


def live(admin: Admin, filled: Filled, *words: str, **environ: str) -> LiveAdviceReport:
    ran = admin("advise", "--since", "24h", "--json", *filled.options, *words, env=environ)
    assert ran.code == 0, ran.err
    return LiveAdviceReport.model_validate_json(ran.out)


SMALL = {"KVSTORE_CAPACITY_BYTES": CAPACITY}


def test_it_says_what_the_store_was_worth(admin: Admin, either: Filled) -> None:
    asked, served, different = serve(either)
    report = live(admin, either, "--gpu-hour", "2", "--gpus", "4", **SMALL)
    period = report.period
    assert (period.window_s, period.asked_blocks, period.served_blocks) == (86400, asked, served)
    assert period.ceiling_ratio == pytest.approx(1 - different / asked, abs=0.05)
    assert [one.window_s for one in report.periods] == [900, 3600, 86400]
    months = 730 * 3600 / period.seconds
    # What compressed segments lack of a block counts nowhere: computing is of whole blocks.
    gpu_s = served * months * 4 * BLOCK_US / 1e6
    assert period.gpu_seconds_month == pytest.approx(gpu_s, rel=0.02)
    assert period.saved_month == pytest.approx(gpu_s * 2 / 3600, rel=0.02)
    assert period.net_month == pytest.approx(
        (period.saved_month or 0) - period.storage_month - period.requests_month - period.transfer_month
    )
    assert report.verdict == "yes"
    [line] = [one for one in report.by_model if one.asked_blocks]
    assert (line.model, line.asked_blocks) == ("org/model", asked)
    assert {one.reason: one.blocks for one in report.missed} == {"absent": asked - served}
    assert report.recorded is None and any("24 hours" not in one for one in report.basis)


def test_more_room_is_recommended_where_it_pays(admin: Admin, either: Filled) -> None:
    asked, served, _ = serve(either)
    report = live(admin, either, **SMALL)
    now, *more = report.capacities
    assert now.capacity_bytes == parse_bytes(CAPACITY) and now.hit_ratio == pytest.approx(served / asked)
    assert [one.added_ratio for one in more] == sorted(one.added_ratio for one in more)
    assert more[-1].added_ratio > 0.01 and report.best in more
    changed = yaml.safe_load(report.settings)
    assert parse_bytes(changed["capacity_bytes"]) >= report.best.capacity_bytes
    # At a trillion dollars a GB and month it isn't, however much this machine's pace saves in a month.
    dear = live(admin, either, "--gb-month", "1e12", **SMALL)
    assert dear.verdict == "no" and dear.settings == "" and dear.best == dear.capacities[0]


def asked_of_another(filled: Filled, model: str, ago_s: float) -> NamespaceId:
    """Registers a namespace of which something was asked for, and nothing is stored."""
    with closing(open_store(filled.settings)) as store:
        space = store.open(namespace(model), block_bytes=BLOCK_BYTES)
        space.register()
        at_s = time.time() - ago_s
        outcome = Outcome(at_s, "r", "match", 10, 0, "absent", 0, b"")
        store.maintenance.tell(space.id, [outcome], OwnDemand().add(digests(hashes(list(range(10)))), at_s))
        return space.id


def test_a_block_of_more_room_is_worth_what_any_is(admin: Admin, either: Filled) -> None:
    """Also in a namespace that is asked for the first time, of a store that has been for long."""
    asked_of_another(either, "org/older", 20 * 3600)
    _, served, _ = serve(either)
    report = live(admin, either, **SMALL)
    period, most = report.period, report.capacities[-1]
    assert period.seconds > 20 * 3600 and most.added_ratio > 0.01
    each = (period.saved_month or 0.0) / served
    assert most.saved_month == pytest.approx(each * most.added_ratio * period.asked_blocks)


def test_a_quota_is_the_capacity_that_is_weighed_and_changed(admin: Admin, either: Filled) -> None:
    serve(either)
    assert admin("quota", "set", "store", CAPACITY, "--apply", *either.options).code == 0
    report = live(admin, either, KVSTORE_CAPACITY_BYTES="1MiB")
    now = parse_bytes(CAPACITY)
    assert [one.capacity_bytes / now for one in report.capacities] == pytest.approx([1, 1.1, 1.25, 1.5, 2, 3])
    assert report.best.capacity_bytes > now and report.settings == ""
    [words] = [one for one in report.because if "cache-admin quota set store" in one]
    assert "--apply" in words


def test_namespaces_may_come_and_go_meanwhile(
    admin: Admin, either: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, _, _ = serve(either)
    gone = asked_of_another(either, "org/gone", 0)

    def later(cache: Cache, more: Sequence[int]) -> WhatIfReport:
        with closing(open_store(either.settings)) as store:
            while (state := store.maintenance.erase(gone, 1000)) == "more":
                pass
            assert state == "erased"
        asked_of_another(either, "org/new", 0)
        return whatif(cache, more)

    monkeypatch.setattr("kvstore.admin.advise.live.whatif", later)
    report = live(admin, either, **SMALL)
    assert report.period.asked_blocks == asked + 10
    assert report.capacities[-1].added_ratio > 0.01


def test_what_nobody_told_is_unknown(admin: Admin, either: Filled) -> None:
    serve(either, told=False)
    report = live(admin, either, **SMALL)
    assert report.verdict == "unclear" and report.period.asked_blocks == 0
    assert "demand" in report.because[0]


def test_text_page_and_status(admin: Admin, filled: Filled, tmp_path: Path) -> None:
    asked, _, _ = serve(filled)
    page = tmp_path / "live.html"
    ran = admin("advise", "--since", "2h", *filled.options, "--html", str(page), env=SMALL)
    assert ran.code == 0, ran.err
    for words in (
        "This store saves",
        "What it is worth, a month",
        "the last 24 hours",
        f"{asked:,}",
        "rest on",
    ):
        assert words in ran.out
    text = page.read_text()
    assert (
        "<svg" in text and "More room, a month" in text and "http://" not in text.replace("http://www.w3", "")
    )
    status = admin("status", *filled.options, env=SMALL)
    assert f"{asked:,} blocks in the last 15 minutes" in status.out and "ceiling" in status.out
    lines = admin("status", "--json", *filled.options, env=SMALL).json["demand"]
    assert [one["window_s"] for one in lines] == [900, 3600, 86400]


def test_its_engines_recordings_are_weighed_too(admin: Admin, filled: Filled, tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    serve(filled, trace={"folder": str(folder)})
    report = live(admin, filled, "--prefill-tokens-s", "1000", KVSTORE_TRACE__FOLDER=str(folder), **SMALL)
    assert report.recorded is not None and report.recorded.trace.requests == 120
    assert f"file://{filled.folder}" in report.recorded.settings
    assert any("120 requests" in one for one in report.basis)
    # None of them is from tomorrow.
    later = time.strftime("%Y-%m-%d", time.gmtime(time.time() + 2 * 86400))
    ran = admin("advise", str(folder), "--since", later)
    assert ran.code != 0 and "since then" in ran.err


def test_a_recording_from_a_time_on(admin: Admin, tmp_path: Path) -> None:
    asked = workloads.requests(3, 200)
    record(tmp_path / "all", asked)
    record(tmp_path / "late", asked[100:])
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(asked[100][0] - 0.5))
    words = ("--points", "4", "--json")
    cut = AdviceReport.model_validate(admin("advise", str(tmp_path / "all"), "--since", at, *words).json)
    late = AdviceReport.model_validate(admin("advise", str(tmp_path / "late"), *words).json)
    assert cut.trace.requests in (100, 101)
    assert cut.trace.distinct_blocks == pytest.approx(late.trace.distinct_blocks, rel=0.02)
    assert cut.ceiling_ratio == pytest.approx(late.ceiling_ratio, abs=0.02)


def test_what_can_not_be_asked_is_refused_in_words(admin: Admin, tmp_path: Path) -> None:
    ran = admin("advise")
    assert ran.code == 2 and "--since" in ran.err
    ran = admin("advise", "--since", "yesterday", "--payloads", f"file://{tmp_path}")
    assert ran.code == 2 and "yesterday" in ran.err
    ran = admin("advise", "--since", "24h", "--payloads", f"file://{tmp_path}")
    assert ran.code != 0 and "no index" in ran.err
    assert json.dumps(ran.out) == '""'
