"""Every alert, as the chart renders it: what makes it fire, and what looks like it and doesn't, evaluated by
promtool."""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.alert_cases import CASES, SLOWLY, healthy
from tests.helm.monitoring import NAMED, RELEASE, alerts, every_rule, rules
from tests.helm.prometheus import binary


def unit(
    title: str, world: Sequence[dict[str, str]], step: int, asked: list[dict[str, Any]]
) -> dict[str, Any]:
    """A test of promtool's."""
    return {"name": title, "interval": f"{step}m", "input_series": list(world), "alert_rule_test": asked}


def units(alert: str) -> list[dict[str, Any]]:
    """Those of one alert."""
    step = 10 if alert == SLOWLY else 1
    found = []
    for case in (one for one in CASES if one.alert == alert):
        own = {"release": RELEASE, "severity": NAMED[alert], "team": "inference"}
        expected = [{"exp_labels": own | fired} for fired in case.fires]
        asked = {"alertname": alert, "eval_time": f"{case.at * step}m", "exp_alerts": expected}
        found.append(unit(case.title, case.world, step, [asked]))
    return found


def promtool(folder: Path, written: Sequence[dict[str, Any]], tests: list[dict[str, Any]]) -> str:
    """What promtool finds wrong with these rules; "" if nothing. Annotations are left out: here they
    would have to be written out for each case."""
    bare = [{key: value for key, value in rule.items() if key != "annotations"} for rule in written]
    (folder / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": bare}]}))
    step = tests[0]["interval"]
    plan = {"rule_files": ["rules.yml"], "evaluation_interval": step, "tests": tests}
    (folder / "tests.yml").write_text(yaml.safe_dump(plan))
    words = [binary("promtool"), "test", "rules", str(folder / "tests.yml")]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=120)
    return "" if ran.returncode == 0 else ran.stdout + ran.stderr


def needed(alert: str) -> list[dict[str, Any]]:
    """The alert's rule, after those that record something."""
    return [rule for rule in every_rule() if rule.get("alert", alert) == alert]


@pytest.mark.parametrize("alert", NAMED)
def test_an_alert_fires_when_it_should_and_only_then(alert: str, tmp_path: Path) -> None:
    assert promtool(tmp_path, needed(alert), units(alert)) == ""


def test_nobody_is_alerted_by_a_rolling_restart(tmp_path: Path) -> None:
    # A CronJob is none of it.
    asked = [
        {"alertname": name, "eval_time": f"{at}m", "exp_alerts": []}
        for name in alerts()
        if name != "KVStoreCronJobFailing"
        for at in (*range(88, 116), 140, 190)
    ]
    assert promtool(tmp_path, list(every_rule()), [unit("healthy", healthy(), 1, asked)]) == ""


def test_every_alert_has_cases_for_both() -> None:
    assert {case.alert for case in CASES if case.fires} == set(alerts())
    assert {case.alert for case in CASES if not case.fires} == set(alerts())
    titles = [(case.alert, case.title) for case in CASES]
    assert len(titles) == len(set(titles))


def test_promtool_has_nothing_against_the_rules(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules()))
    words = [binary("promtool"), "check", "rules", str(tmp_path / "rules.yml")]
    checked = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(
    ("alert", "instead_of", "this"),
    [
        ("KVStoreIndexDown", "max (", "min ("),
        ("KVStoreIndexDown", 'backend="index", ', ""),
        ("KVStoreDirtyBytesHigh", "> 0.4", ">= 0"),
        ("KVStoreHitRatioCollapsed", "and kvstore:asked_blocks:rate1h", "or kvstore:asked_blocks:rate1h"),
        ("KVStoreJanitorStuck", "max (kvstore_janitor_round", "min (kvstore_janitor_round"),
        ("KVStoreScrubBehind", "max by (cache_namespace)", "sum by (cache_namespace)"),
        ("KVStoreVersionMix", "> 1", "> 2"),
    ],
)
def test_a_wrong_rule_is_noticed(tmp_path: Path, alert: str, instead_of: str, this: str) -> None:
    wrong = copy.deepcopy(needed(alert))
    assert instead_of in wrong[-1]["expr"]
    wrong[-1]["expr"] = wrong[-1]["expr"].replace(instead_of, this)
    assert alert in promtool(tmp_path, wrong, units(alert))
