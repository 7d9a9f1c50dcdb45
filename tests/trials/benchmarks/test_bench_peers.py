"""What the comparison with the peers makes of its numbers; engines and peers are not run here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from trials.benchmarks.peers.install import PINNED
from trials.benchmarks.peers.report import Outcome, drawn, main, remarks, table, text, verdict

SAME = Outcome(answered=True, right=True, loaded=True)
COMPUTED = Outcome(answered=True, right=True, loaded=False)
WRONG = Outcome(answered=True, right=False, loaded=True)
FAILED = Outcome(answered=False, right=False, loaded=False)
HUNG = Outcome(answered=False, right=False, loaded=False, hung=True)
LATE = Outcome(answered=True, right=True, loaded=False, added_s=4.2)


@pytest.mark.parametrize(
    ("outcomes", "words"),
    [
        ([SAME, SAME], "same tokens, 2 of 2 loaded"),
        ([SAME, COMPUTED], "same tokens, 1 of 2 loaded"),
        ([COMPUTED, COMPUTED], "same tokens, recomputed"),
        ([COMPUTED, LATE], "same tokens, recomputed, +4.2 s"),
        ([SAME, WRONG], "WRONG TOKENS, 1 of 2"),
        ([HUNG, COMPUTED], "1 of 2 requests hang"),
        ([FAILED, WRONG, SAME], "1 of 3 requests failed, WRONG TOKENS, 1 of 3"),
    ],
)
def test_words_for_what_became_of_requests(outcomes: list[Outcome], words: str) -> None:
    assert verdict(outcomes) == words
    assert verdict(outcomes, "engine dead") == "engine dead"


def _phase(ttft_s: float, *, right: bool = True, cached: float = 1.0) -> dict[str, Any]:
    return {
        "ttft_s": [ttft_s, 3 * ttft_s, 2 * ttft_s],
        "engine_cpu_s": [0.08] * 3,
        "servers_cpu_s": [0.01] * 3,
        "network_bytes": [16_800_000] * 3,
        "lookup_s": [0.0021] * 3,
        "cached": [1.0, cached, 1.0],
        "right": [True, right, True],
    }


def _report(warm: dict[str, Any]) -> dict[str, Any]:
    nothing = {"phases": {"cold": _phase(0.3, cached=0.0), "warm": _phase(0.3)}, "stored_bytes": 0.0}
    some = {"phases": {"cold": _phase(0.35), "warm": warm, "restart": _phase(0.03)}, "stored_bytes": 16.8e6}
    return {
        "versions": {"kvstore": "0.1.0", "lmcache": "0.5.6"},
        "machine": {"cpu": "2 x a processor", "load": "0.1 0.1 0.1"},
        "load after": "1.0 1.0 0.5",
        "tokens": 4096,
        "prompts": 3,
        "rounds": 1,
        "minutes": 2.0,
        "faults": ["flipped bytes"],
        "variants": {
            "no cache": {"what": "", "rounds": [nothing], "faults": {}},
            "kvstore, folder": {"what": "", "rounds": [some], "faults": {"flipped bytes": "same tokens"}},
            "LMCache, S3": {"what": "", "rounds": [], "faults": {}, "skipped": "no | module"},
        },
    }


def test_the_table() -> None:
    assert table(_report(_phase(0.015))).splitlines()[2:5] == [
        "| no cache | 600 | 600 | 1.00 |  |  |  | 80 |  |  |  |",
        "| kvstore, folder | 700 | 30 | 0.05 | 60 | 0.10 | 2.1 | 80 | 10 | 16.8 | 16.8 |",
        "| LMCache, S3 | not run: no / module |  |  |  |  |  |  |  |  |  |",
    ]


def test_every_row_has_all_columns() -> None:
    for part in table(_report(_phase(0.015))).split("\n\n"):
        assert len({line.count("|") for line in part.splitlines()}) == 1


def test_what_is_not_right_is_said() -> None:
    assert not remarks(_report(_phase(0.015)))
    assert "every load was one" in text(_report(_phase(0.015)))
    [wrong, missed] = remarks(_report(_phase(0.015, right=False, cached=0.5)))
    assert wrong == "kvstore, folder: other tokens than without a cache in 1 of 9"
    assert missed == "kvstore, folder, warm: 1 of 3 prompts not loaded"


def test_the_plot_names_all() -> None:
    texts = [element.text for element in ElementTree.fromstring(drawn(_report(_phase(0.015)))).iter()]
    assert {"no cache", "kvstore, folder", "LMCache, S3", "after a restart", "600", "30"} <= set(texts)


def test_the_table_is_made_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "found.json"
    file.write_text(json.dumps(_report(_phase(0.015))))
    monkeypatch.setattr("sys.argv", ["report", str(file)])
    assert main() == 0
    assert "lmcache 0.5.6" in capsys.readouterr().out


def test_versions_are_exact() -> None:
    assert all(one.count("==") == 1 for one in PINNED)
