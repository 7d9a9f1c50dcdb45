"""simulate and whatif as people run them: text, JSON, and what is said of bad input."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.admin.simulate.reports import SimulationReport, WhatIfReport
from kvstore.admin.simulate.whatif import kept
from kvstore.index import eviction
from kvstore.index.eviction import GHOST_STEPS, ghost_bytes
from kvstore.index.maintenance import Ghosts
from tests.admin.conftest import Admin, Filled
from tests.admin.simulate import workloads
from tests.admin.simulate.store_run import BLOCK_BYTES, namespace, world

GIB = 1 << 30


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    workloads.write(path, workloads.requests(9, 300))
    return path


def test_text_and_json_are_one_report(admin: Admin, chats: Path) -> None:
    options = [
        "--block-tokens",
        "16",
        "--block-bytes",
        "1MiB",
        "--capacity",
        "20MiB,100MiB",
        "--capacity",
        "2GiB",
    ]
    ran = admin("simulate", str(chats), *options, "--json")
    assert (ran.code, ran.err) == (0, "")
    report = SimulationReport.model_validate_json(ran.out)
    ours = report.curves[0]
    assert [point.capacity_bytes for point in ours.points] == [20 << 20, 100 << 20, 2 << 30]
    shown = admin("simulate", str(chats), *options).out
    for point in ours.points:
        assert f"{point.hit_ratio:.1%}" in shown
        assert f"{point.hit_tokens:,}" in shown
    for expected in ("300 in", "kvstore, second use only", "LRU of blocks", "hit ratio", "2.0 GiB"):
        assert expected in shown
    assert all(len(line) <= 160 for line in shown.splitlines())


def test_progress_goes_to_stderr(admin: Admin, chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.cli.progress._EVERY_S", 0.0)
    ran = admin("simulate", str(chats), "--policy", "kvstore", "--points", "2", "--json")
    assert "reading the trace" in ran.err
    assert "(2 of 2)" in ran.err
    assert SimulationReport.model_validate_json(ran.out)


def test_the_settings_of_a_cache_count_if_there_are_any(admin: Admin, chats: Path) -> None:
    options = ["simulate", str(chats), "--policy", "kvstore", "--json", "--points", "2"]
    assert admin(*options).json["window_s"] == 86400
    env = {"KVSTORE_PAYLOADS": "file:///nowhere", "KVSTORE_ADMISSION__WINDOW_S": "600"}
    assert admin(*options, env=env).json["window_s"] == 600
    # Also those of a cache that isn't named.
    del env["KVSTORE_PAYLOADS"]
    assert admin(*options, env=env).json["window_s"] == 600
    ran = admin(*options, env={"KVSTORE_ADMISSION__WINDOW_S": "0"})
    assert ran.code == 2
    assert "admission.window_s" in ran.err


@pytest.mark.parametrize(
    "settings",
    [
        "eviction: {fresh_s: 5}\nadmission: {window_s: 600}\n",
        "eviction: {fresh_s: 5}\nadmission: {window_s: 600}\npayloads: file:///nowhere\n",
        "admission: {window_s: 600}\nindex: rediss://host\nredis: {tls_cert: /a, tls_key: /b}\n"
        "payloads: {fast: 'file:///x', slow: 's3://bucket/x'}\n",
    ],
)
def test_a_file_of_settings_may_name_a_store_or_none(
    admin: Admin, chats: Path, tmp_path: Path, settings: str
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(settings)
    options = ["simulate", str(chats), "--policy", "kvstore", "--json", "--points", "2"]
    for ran in (
        admin(*options, "--settings", str(path)),
        admin(*options, env={"KVSTORE_SETTINGS": str(path)}),
    ):
        assert (ran.code, ran.err) == (0, "")
        assert ran.json["window_s"] == 600


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--capacity", "many"], "'many'"),
        (["--capacity", "0"], "no size"),
        (["--capacity", "1MiB,,"], "''"),
        (["--capacity", "99999999TiB"], "no size"),
        (["--policy", "best"], "none of kvstore"),
        (["--segment-blocks", "0"], "no list of numbers"),
        (["--segment-blocks", "4,x"], "no list of numbers"),
        (["--block-bytes", "-1"], "'-1'"),
        (["--points", "1"], "points"),
    ],
)
def test_bad_options_are_refused_with_a_sentence(
    admin: Admin, chats: Path, words: list[str], says: str
) -> None:
    ran = admin("simulate", str(chats), *words)
    assert ran.code == 2
    assert says in ran.err
    assert "Traceback" not in ran.err


def test_what_is_no_trace_is_refused_with_a_sentence(admin: Admin, tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        ran = admin("simulate", str(path))
        assert (ran.code, ran.out) == (2, "")
        assert str(path) in ran.err


# ---- whatif


def test_within_a_step_ghosts_count_in_proportion() -> None:
    least = ghost_bytes(0)
    ghosts = [Ghosts(least, 100), Ghosts(ghost_bytes(GHOST_STEPS), 50)]
    below = ghost_bytes(GHOST_STEPS - 1)
    assert kept(ghosts, 0) == 0
    assert kept(ghosts, least / 2) == 50
    assert kept(ghosts, least) == kept(ghosts, below) == 100
    assert kept(ghosts, (below + 2 * least) / 2) == 125
    assert kept(ghosts, 2 * least) == kept(ghosts, 1 << 60) == 150
    assert kept([], GIB) == 0


def test_whatif_shows_what_the_index_remembers(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "GHOST_LEAST", 1 << 20)
    with world(32 << 20, 5) as it:
        space = it.store.open(namespace(), block_bytes=BLOCK_BYTES)
        space.register()
        for at_s, chain in workloads.requests(4, 400):
            it.serve(space, at_s, chain)
        where = ["--payloads", it.store.settings.origin, "--index", it.store.settings.index_url]
        env = {"KVSTORE_CAPACITY_BYTES": "32MiB"}
        ran = admin("whatif", *where, "--more", "64MiB,16MiB", "--json", env=env)
        assert (ran.code, ran.err) == (0, "")
        report = WhatIfReport.model_validate_json(ran.out)
        assert (report.asked_blocks, report.served_blocks) == (it.ran.asked, sum(it.ran.hits))
        assert report.capacity_bytes == 32 << 20
        assert [gain.more_bytes for gain in report.gains] == [16 << 20, 64 << 20]
        small, large = report.gains
        assert 0 < small.blocks < large.blocks < report.asked_blocks - report.served_blocks
        shown = admin("whatif", *where, "--more", "64MiB", env=env).out
        assert f"{report.hit_ratio + large.added_ratio:.1%}" in shown
        assert f"+{large.blocks:,}" in shown
        # By default from a tenth of the capacity to twice as much, and the quota in force is what counts.
        it.store.maintenance.set_quota("store", 40 << 20)
        report = WhatIfReport.model_validate_json(admin("whatif", *where, "--json", env=env).out)
        assert report.capacity_bytes == 40 << 20
        assert [gain.more_bytes for gain in report.gains] == [4 << 20, 10 << 20, 20 << 20, 40 << 20, 80 << 20]
        # The ring is named if it is too short for the question.
        short = admin("whatif", *where, "--json", env={**env, "KVSTORE_JOURNAL__GHOSTS": "10"}).json
        assert any("last 10 segments" in caveat for caveat in short["caveats"])
        assert not any("last 10" in caveat for caveat in report.caveats)


@pytest.mark.parametrize(
    ("env", "says"), [({}, "No engine has told"), ({"KVSTORE_JOURNAL__GHOSTS": "0"}, "No engine has told")]
)
def test_whatif_of_a_cache_that_nobody_has_asked(
    admin: Admin, filled: Filled, env: dict[str, str], says: str
) -> None:
    ran = admin("whatif", *filled.options, env=env)
    assert ran.code == 0
    assert says in ran.out


def test_whatif_of_a_cache_that_is_not_there(admin: Admin, tmp_path: Path) -> None:
    ran = admin("whatif", "--payloads", f"file://{tmp_path}/none", "--json")
    assert ran.code == 0
    assert ran.json["namespaces"] == []
    assert not (tmp_path / "none").exists()
