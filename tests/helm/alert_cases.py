"""Worlds in which an alert fires, and worlds that look like them in which it doesn't."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.helm.monitoring import RELEASE

#: In a step of ten minutes, a day and two hours: for what is compared with yesterday.
DAY = 156
SLOWLY = "KVStoreHitRatioCollapsed"


def series(metric: str, values: str, **labels: str) -> dict[str, str]:
    """`values` as promtool writes them, one a step."""
    named = {"release": RELEASE, "instance": "a"} | labels
    inside = ",".join(f'{name}="{value}"' for name, value in named.items() if value)
    return {"series": f"{metric}{{{inside}}}", "values": values}


def both(metric: str, first: str, second: str, **labels: str) -> list[dict[str, str]]:
    """What two servers export."""
    return [series(metric, first, **labels), series(metric, second, **labels, instance="b")]


def engine(metric: str, values: str, **labels: str) -> dict[str, str]:
    return series(f"vllm:kvstore_{metric}", values, **({"model_name": "m", "engine": "0"} | labels))


def space(metric: str, values: str, **labels: str) -> dict[str, str]:
    """Of a namespace."""
    named = {"cache_namespace": "ab", "kind": "kv", "model": "m", "tenant": "t"}
    return series(f"kvstore_{metric}", values, **(named | labels))


@dataclass
class Case:
    """One world. `fires`: the labels of what fires at step `at`, besides the release and the severity."""

    alert: str
    title: str
    world: Sequence[dict[str, str]]
    at: int
    fires: list[dict[str, str]] = field(default_factory=list)


def cron(what: str, values: str, name: str) -> dict[str, str]:
    """Of kube-state-metrics."""
    labels = {"release": "", "namespace": "inference", "cronjob": name}
    return series(f"kube_cronjob_status_last_{what}_time", values, **labels)


def match_buckets(slow: int, quick: int) -> list[dict[str, str]]:
    """Matches per minute that take 0.45 s, and that take 2 ms."""
    made = []
    for le in ("0.0025", "0.4", "0.5", "+Inf"):
        rate = quick + (slow if le in ("0.5", "+Inf") else 0)
        made.append(engine("kv_match_seconds_bucket", f"0+{rate}x60", le=le))
    return [*made, engine("kv_match_seconds_count", f"0+{slow + quick}x60")]


def regret_buckets(much: int, none: int) -> list[dict[str, str]]:
    """Requests per minute that take three times as long as computing, and that take a percent longer."""
    made = []
    for le in ("0.01", "0.5", "1.0", "2.0", "+Inf"):
        rate = none + (much if le in ("2.0", "+Inf") else 0)
        made.append(engine("kv_regret_ratio_bucket", f"0+{rate}x90", le=le))
    return [*made, engine("kv_regret_ratio_count", f"0+{much + none}x90")]


def saves(outcomes: dict[str, int], connector: str = "kv") -> list[dict[str, str]]:
    return [engine(f"{connector}_saves_total", f"0+{n}x120", outcome=name) for name, n in outcomes.items()]


def steps(*counters: str) -> list[dict[str, str]]:
    """Of an engine that is not idle."""
    return [engine(counter, "0+9x60") for counter in counters]


def uploads(connector: str, failed: str, done: str) -> list[dict[str, str]]:
    """Of one node's tier."""
    outcomes = (("upload_failures", failed), ("uploads", done))
    return [engine(f"{connector}_tier_total", values, event=event) for event, values in outcomes]


def ratio(asked: str, served: str) -> list[dict[str, str]]:
    return [
        *[space("asked_blocks_total", asked, instance=one) for one in "ab"],
        *[space("served_blocks_total", served, instance=one) for one in "ab"],
    ]


UP, DOWN = "1x60", "0x60"
#: Killed every four minutes, and away for two of them.
FLAPS = "1 1 0 0 " * 15
ANSWERS = both("kvstore_up", UP, UP, backend="index")
M = {"model_name": "m"}
KV = {"model_name": "m", "connector": "kv"}
CUT = {"reason": "breaker_open"}
FIRED = {"failed": 10, "stored": 90}
#: 100 blocks a second, of which 60 are served, and after a day 10.
ASKED, SERVED = "0+60000x156", "0+36000x156"
COLLAPSED = "0+36000x144 5190000+6000x12"

#: Of a CronJob, by the minute: due at every full hour; the same, with a gap; and done at ten past.
HOURLY = " ".join(str(m // 60 * 3600) for m in range(600))
HOURLY_GAP = HOURLY.replace(" 14400 14400 14400 ", " 14400 stale _ ", 1)
HOURLY_DONE = " ".join(str((m - 10) // 60 * 3600 + 600) for m in range(600))

#: By alert: title, world, step, and what fires then.
_CASES: dict[str, list[tuple[Any, ...]]] = {
    "KVStoreIndexDown": [
        ("for nobody", both("kvstore_up", DOWN, DOWN, backend="index"), 4, [{}]),
        ("for one of two", both("kvstore_up", UP, DOWN, backend="index"), 30),
        ("not for long", both("kvstore_up", "1 0 0 0 1x30", "1 0 0 0 1x30", backend="index"), 5),
        ("the payloads are", both("kvstore_up", DOWN, DOWN, backend="payloads"), 30),
        ("nothing is there", [], 30),
        (
            "a rolling restart: each new one has asked nobody yet",
            both("kvstore_up", "1x5 _ _ 0 1x50", "1x9 _ _ 0 1x50", backend="index"),
            12,
        ),
    ],
    "KVStorePayloadsDown": [
        ("for nobody", both("kvstore_up", DOWN, DOWN, backend="payloads"), 6, [{}]),
        ("for one of two", both("kvstore_up", DOWN, UP, backend="payloads"), 30),
        ("not for long", both("kvstore_up", "0x3 1x60", "0x3 1x60", backend="payloads"), 6),
    ],
    "KVStoreBackendUnreachable": [
        (
            "for one of two",
            both("kvstore_up", UP, DOWN, backend="payloads") + both("kvstore_up", UP, UP, backend="index"),
            16,
            [{"backend": "payloads"}],
        ),
        ("for both", both("kvstore_up", DOWN, DOWN, backend="index"), 30),
        ("for none", both("kvstore_up", UP, UP, backend="index"), 30),
    ],
    "KVStoreServersAbsent": [
        ("nobody is scraped", [], 11, [{}]),
        (
            "another release's are",
            [series("kvstore_info", "1x60", release="other/cache", version="1")],
            11,
            [{}],
        ),
        ("one is", [series("kvstore_info", "1x60", version="1")], 30),
        (
            "both are started anew",
            both("kvstore_info", "1x5 stale _x3 1x60", "1x5 stale _x3 1x60", version="1"),
            30,
        ),
    ],
    "KVStoreIndexMemoryHigh": [
        (
            "above 90 %",
            both("kvstore_index_used_bytes", "95x60", "95x60")
            + both("kvstore_index_limit_bytes", "100x60", "100x60"),
            16,
            [{}],
        ),
        (
            "below",
            both("kvstore_index_used_bytes", "89x60", "89x60")
            + both("kvstore_index_limit_bytes", "100x60", "100x60"),
            60,
        ),
        ("no bound", both("kvstore_index_used_bytes", "95x60", "95x60"), 60),
    ],
    "KVStoreJanitorStuck": [
        (
            "no round has ended since",
            both("kvstore_janitor_round_timestamp_seconds", "0x60", "0x60"),
            30,
            [{}],
        ),
        ("none without a round", both("kvstore_janitor_rounds_total", "0x60", "0x60"), 16, [{}]),
        ("servers that only show", ANSWERS, 60),
        (
            "rounds end, and another's last one is old",
            both("kvstore_janitor_round_timestamp_seconds", "0+60x60", "0x60"),
            60,
        ),
    ],
    "KVStoreJanitorStepFailing": [
        (
            "every time",
            [
                *ANSWERS,
                series("kvstore_janitor_step_failures_total", "0+10x90", step="reap"),
                series("kvstore_janitor_step_runs_total", "0+10x90", step="reap"),
                series("kvstore_janitor_step_failures_total", "0+1x90", step="scrub"),
                series("kvstore_janitor_step_runs_total", "0+10x90", step="scrub"),
            ],
            70,
            [{"step": "reap"}],
        ),
        (
            "every time, and the index comes and goes",
            [
                *both("kvstore_up", FLAPS * 2, FLAPS * 2, backend="index"),
                series("kvstore_janitor_step_failures_total", "0+10x90", step="reap"),
                series("kvstore_janitor_step_runs_total", "0+10x90", step="reap"),
            ],
            70,
            [{"step": "reap"}],
        ),
        (
            "a failure, then a restart",
            [
                *ANSWERS,
                series("kvstore_janitor_step_failures_total", "0 5 5 5 0x80", step="reap"),
                series("kvstore_janitor_step_runs_total", "0 10 20 30 0+10x80", step="reap"),
            ],
            70,
        ),
        (
            "the payloads are down",
            [
                *both("kvstore_up", "0x90", "0x90", backend="payloads"),
                series("kvstore_janitor_step_failures_total", "0+10x90", step="reap"),
                series("kvstore_janitor_step_runs_total", "0+10x90", step="reap"),
            ],
            80,
        ),
    ],
    "KVStoreScrubBehind": [
        (
            "by a tenth of all",
            [
                *both("kvstore_janitor_scrub_behind_segments", "100x480", "0x480"),
                *[space("segments", "1000x480", instance=one) for one in "ab"],
            ],
            400,
            [{}],
        ),
        (
            "by little, of two namespaces",
            [
                *both("kvstore_janitor_scrub_behind_segments", "100x480", "0x480"),
                space("segments", "1000x480"),
                space("segments", "1000x480", cache_namespace="cd"),
            ],
            400,
        ),
    ],
    "KVStoreDamagedPayloads": [
        ("one was found", both("kvstore_janitor_scrubbed_bad_segments_total", "0x20 1x40", "0x60"), 30, [{}]),
        (
            "found long ago, and the janitor was started anew",
            both("kvstore_janitor_scrubbed_bad_segments_total", "0 1x400 0x100", "0x500"),
            500,
        ),
    ],
    "KVStoreOverQuota": [
        (
            "a tenant",
            [
                *both("kvstore_quota_used_bytes", "110x60", "110x60", scope="tenant/t"),
                *both("kvstore_quota_bytes", "100x60", "100x60", scope="tenant/t"),
                *both("kvstore_quota_used_bytes", "110x60", "110x60", scope="store"),
                *both("kvstore_quota_bytes", "200x60", "200x60", scope="store"),
            ],
            31,
            [{"scope": "tenant/t"}],
        ),
        (
            "until it was evicted",
            [
                *both("kvstore_quota_used_bytes", "110x20 95x60", "110x20 95x60", scope="store"),
                *both("kvstore_quota_bytes", "100x60", "100x60", scope="store"),
            ],
            31,
        ),
    ],
    "KVStoreNoRoom": [
        ("Redis is full", [engine("kv_save_failures_total", "0+6x60", reason="capacity")], 40, [M]),
        ("once", [engine("kv_save_failures_total", "0x5 6x60", reason="capacity")], 40),
        ("another reason", [engine("kv_save_failures_total", "0+6x60", reason="deadline")], 40),
    ],
    "KVStoreDirtyBytesHigh": [
        (
            "an engine's node",
            [
                engine("kv_tier_dirty_bytes", "45x60", rank="0"),
                engine("kv_tier_capacity_bytes", "100x60", rank="0"),
                engine("kv_matches_total", "0+9x60"),
                engine("kv_saves_total", "0x60", outcome="stored"),
            ],
            40,
            [{"instance": "a"}],
        ),
        (
            "a server's node",
            [series("kvstore_tier_dirty_bytes", "45x60"), series("kvstore_tier_capacity_bytes", "100x60")],
            40,
            [{"instance": "a"}],
        ),
        (
            "as an engine's last step saw it, hours ago",
            [
                engine("kv_tier_dirty_bytes", "45x60", rank="0"),
                engine("kv_tier_capacity_bytes", "100x60", rank="0"),
                engine("kv_matches_total", "0+9x5 45x60"),
                engine("kv_saves_total", "0+9x5 45x60", outcome="stored"),
            ],
            50,
        ),
        (
            "an encoder's node",
            [
                engine("ec_tier_dirty_bytes", "45x60"),
                engine("ec_tier_capacity_bytes", "100x60"),
                engine("ec_items_total", "0x60", source="store"),
                engine("ec_saves_total", "0+9x60", outcome="stored"),
            ],
            40,
            [{"instance": "a"}],
        ),
        (
            "few",
            [
                engine("kv_tier_dirty_bytes", "30x60", rank="0"),
                engine("kv_tier_capacity_bytes", "100x60", rank="0"),
                *steps("kv_matches_total", "kv_saves_total"),
            ],
            40,
        ),
        (
            "one tier: all is 0",
            [
                engine("kv_tier_dirty_bytes", "0x60", rank="0"),
                engine("kv_tier_capacity_bytes", "0x60", rank="0"),
                *steps("kv_matches_total", "kv_saves_total"),
            ],
            40,
        ),
    ],
    "KVStoreEnginesAbsent": [
        (
            "their names have an underscore",
            [space("requests_total", "0+9x120"), series("vllm_kvstore_kv_info", "1x120", version="1")],
            100,
            [{}],
        ),
        (
            "another release's are there",
            [
                space("requests_total", "0+9x120"),
                engine("kv_info", "1x120", version="1", release="other/cache"),
            ],
            100,
            [{}],
        ),
        (
            "they are there",
            [space("requests_total", "0+9x120"), engine("kv_info", "1x120", version="1")],
            100,
        ),
        (
            "encoders alone are there",
            [space("requests_total", "0+9x120"), engine("ec_info", "1x120", version="1")],
            100,
        ),
        (
            "there are none: scaled to zero",
            [space("requests_total", "0+9x30 270x140"), engine("kv_info", "1x30 stale", version="1")],
            100,
        ),
        (
            "one comes for ten minutes an hour",
            [
                space("requests_total", "0+9x10 90x50 99+9x10 189x50"),
                engine("kv_info", "1x11 stale _x49 1x11 stale", version="1"),
            ],
            119,
        ),
    ],
    "KVStoreEnginesCutOff": [
        (
            "two of three",
            [
                engine("kv_misses_total", "0+50x60", **CUT),
                engine("kv_misses_total", "0+50x60", **CUT, instance="b"),
                engine("kv_misses_total", "0x60", **CUT, instance="c"),
                *ANSWERS,
            ],
            20,
            [M],
        ),
        (
            "the index is down for all, which is another alert's",
            [engine("kv_misses_total", "0+50x60", **CUT), *both("kvstore_up", DOWN, DOWN, backend="index")],
            40,
        ),
        (
            "the index comes and goes, never away for three minutes",
            [
                engine("kv_misses_total", "0+50x60", **CUT),
                *both("kvstore_up", FLAPS, FLAPS, backend="index"),
                *both("kvstore_up", UP, UP, backend="payloads"),
            ],
            40,
            [M],
        ),
        (
            "the payloads were down for twenty minutes",
            [
                engine("kv_misses_total", "0x5 0+50x20 1000x40", **CUT),
                *both("kvstore_up", "1x5 0x20 1x40", "1x5 0x20 1x40", backend="payloads"),
                *both("kvstore_up", UP, UP, backend="index"),
            ],
            35,
        ),
        (
            "one of three",
            [
                engine("kv_misses_total", "0+50x60", **CUT),
                engine("kv_misses_total", "0x60", **CUT, instance="b"),
                engine("kv_misses_total", "0x60", **CUT, instance="c"),
            ],
            40,
        ),
        ("a blip of a minute", [engine("kv_misses_total", "0x5 50x60", **CUT)], 16),
    ],
    "KVStoreEngineCutOff": [
        (
            "one of three",
            [
                engine("kv_misses_total", "0+50x60", **CUT),
                engine("kv_misses_total", "0x60", **CUT, instance="b"),
                engine("kv_misses_total", "0x60", **CUT, instance="c"),
            ],
            20,
            [{"model_name": "m", "engine": "0", "instance": "a"}],
        ),
        (
            "the index is down for all, and one of three has something to ask",
            [
                engine("kv_misses_total", "0+50x60", **CUT),
                engine("kv_misses_total", "0x60", **CUT, instance="b"),
                engine("kv_misses_total", "0x60", **CUT, instance="c"),
                *both("kvstore_up", DOWN, DOWN, backend="index"),
            ],
            30,
        ),
        (
            "an idle engine whose gauge says so still",
            [
                engine("kv_index_down", "1x60"),
                engine("kv_misses_total", "0x5 50x60", **CUT),
                engine("kv_misses_total", "0x60", **CUT, instance="b"),
            ],
            40,
        ),
        (
            "all of them, which is the other alert's",
            [
                engine("kv_misses_total", "0+50x60", **CUT),
                engine("kv_misses_total", "0+50x60", **CUT, instance="b"),
            ],
            40,
        ),
    ],
    "KVStoreRequestsFailed": [
        ("some", [engine("ec_unavailable_requests_total", "0+3x30")], 15, [M]),
        ("a stray one", [engine("ec_unavailable_requests_total", "0x5 1x30")], 8),
        (
            "an engine that had many was started anew",
            [engine("ec_unavailable_requests_total", "900x5 0x30")],
            8,
        ),
    ],
    "KVStoreLoadsFailing": [
        (
            "a tenth",
            [
                engine("kv_loads_total", f"0+{n}x60", outcome=name)
                for name, n in (("failed", 10), ("complete", 90))
            ],
            40,
            [M],
        ),
        (
            "few",
            [
                engine("kv_loads_total", f"0+{n}x60", outcome=name)
                for name, n in (("failed", 1), ("complete", 99))
            ],
            40,
        ),
        (
            "all, of next to none",
            [
                engine("kv_loads_total", "0x20 1x9 2x60", outcome="failed"),
                engine("kv_loads_total", "0x60", outcome="complete"),
            ],
            40,
        ),
    ],
    "KVStoreCorruptLoads": [
        (
            "one block",
            [
                engine("kv_misses_total", "0x20 1x60", reason="corrupt"),
                engine("kv_misses_total", "0x60", reason="absent"),
            ],
            30,
            [M],
        ),
        (
            "engines come and go, and blocks are absent",
            [
                engine("kv_misses_total", "0x20 stale", reason="corrupt"),
                engine("kv_misses_total", "_x20 0x60", reason="corrupt", instance="b"),
                engine("kv_misses_total", "0+9x60", reason="absent"),
            ],
            30,
        ),
    ],
    "KVStoreWrongBlocks": [
        ("one segment", [engine("kv_audits_total", "0x20 1x60", outcome="wrong")], 30, [M]),
        (
            "all alike, or not read",
            [
                engine("kv_audits_total", "0x60", outcome="wrong"),
                engine("kv_audits_total", "0+9x60", outcome="alike"),
                engine("kv_audits_total", "0+1x60", outcome="unread"),
            ],
            30,
        ),
    ],
    "KVStoreWriterFailed": [
        ("one", [engine("kv_verdicts_total", "0x20 1x60", verdict="failed")], 30, [M]),
        ("one, disputed", [engine("kv_verdicts_total", "0x20 1x60", verdict="disputed")], 30, [M]),
        ("all proven", [engine("kv_verdicts_total", "0+9x60", verdict="proven")], 30),
    ],
    "KVStoreRegret": [
        ("one in twenty", regret_buckets(much=5, none=95), 70, [M]),
        ("one in a thousand", regret_buckets(much=1, none=999), 70),
        ("all, a little", regret_buckets(much=0, none=100), 70),
        ("of hardly any", regret_buckets(much=1, none=0), 70),
    ],
    "KVStoreMatchSlow": [
        ("one in twenty", match_buckets(slow=5, quick=95), 40, [M]),
        ("one in a thousand", match_buckets(slow=1, quick=999), 40),
        ("of hardly any", match_buckets(slow=1, quick=0), 40),
    ],
    "KVStoreSavesDropped": [
        ("a tenth", saves({"dropped": 10, "stored": 90}), 100, [M]),
        ("few", saves({"dropped": 1, "stored": 90}), 100),
        ("nothing is saved", saves({"dropped": 0, "present": 0}), 100),
    ],
    "KVStoreSavesFailing": [
        ("of KV blocks", saves(FIRED), 60, [KV]),
        ("of encoder outputs", saves(FIRED, "ec"), 60, [{**KV, "connector": "ec"}]),
        ("of both", saves(FIRED) + saves(FIRED, "ec"), 60, [KV, {**KV, "connector": "ec"}]),
        ("few", saves({"failed": 1, "stored": 90}), 60),
    ],
    "KVStoreHitRatioCollapsed": [
        (
            "from 60 to 10 %",
            ratio(ASKED, COLLAPSED),
            DAY - 1,
            [{"cache_namespace": "ab", "kind": "kv", "model": "m", "tenant": "t"}],
        ),
        ("as yesterday", ratio(ASKED, SERVED), DAY - 1),
        ("hardly any traffic today", ratio("0+60000x144 8640060+60x12", "0+36000x144 5184000x12"), DAY - 1),
        ("new today", ratio("_x144 0+60000x12", "_x144 0x12"), DAY - 1),
        (
            "the index was emptied and fills again",
            ratio("0+60000x138 0+60000x18", "0+36000x138 0+36000x18"),
            DAY - 1,
        ),
    ],
    "KVStoreOutcomesLost": [
        (
            "for long",
            [
                engine("kv_events_total", "0+6x120", event="outcomes_lost"),
                engine("kv_matches_total", "0+9x120"),
            ],
            90,
            [KV],
        ),
        (
            "one in a thousand, again and again",
            [
                engine("kv_events_total", "0+1x120", event="outcomes_lost"),
                engine("kv_matches_total", "0+1000x120"),
                engine("ec_outcomes_lost_total", "0+1x120"),
                engine("ec_items_total", "0+1000x120", source="store"),
            ],
            90,
        ),
        (
            "nobody asks for anything",
            [engine("kv_events_total", "0x120", event="outcomes_lost"), engine("kv_matches_total", "0x120")],
            90,
        ),
        (
            "of items",
            [
                engine("ec_outcomes_lost_total", "0+6x120"),
                engine("ec_items_total", "0+9x120", source="store"),
            ],
            90,
            [{**KV, "connector": "ec"}],
        ),
        (
            "while Redis was restarted",
            [
                engine("kv_events_total", "0x9 60x120", event="outcomes_lost"),
                engine("kv_matches_total", "0+9x120"),
            ],
            90,
        ),
    ],
    "KVStoreTierErrors": [
        (
            "a bad disk",
            [engine("kv_tier_total", "0+6x60", event="fast_errors")],
            40,
            [{"instance": "a", "connector": "kv"}],
        ),
        ("a stray one", [engine("kv_tier_total", "0x20 1x60", event="fast_errors")], 40),
        ("hits", [engine("kv_tier_total", "0+600x60", event="hits_fast")], 40),
    ],
    "KVStoreUploadsFailing": [
        ("for long", uploads("ec", "0+1x90", "0+9x90"), 60, [{"instance": "a", "connector": "ec"}]),
        (
            "all of the few there are",
            uploads("kv", "0+1x90", "0x90"),
            60,
            [{"instance": "a", "connector": "kv"}],
        ),
        ("once", uploads("kv", "0x9 4x90", "0+1x90"), 60),
        ("one in a thousand, always", uploads("kv", "0+1x90", "0+999x90"), 60),
    ],
    "KVStoreVersionMix": [
        (
            "an engine that was forgotten",
            [*both("kvstore_info", "1x480", "1x480", version="2"), engine("kv_info", "1x480", version="1")],
            400,
            [{}],
        ),
        (
            "an upgrade",
            [
                *both("kvstore_info", "1x60 stale", "1x60 stale", version="1"),
                *both("kvstore_info", "_x60 1x480", "_x60 1x480", version="2"),
                engine("kv_info", "1x90 stale", version="1"),
                engine("kv_info", "_x90 1x400", version="2"),
            ],
            480,
        ),
    ],
    "KVStoreCronJobFailing": [
        (
            "due, and not done",
            [
                cron("schedule", "0x600", "cache-kvstore-gc"),
                cron("successful", "-86400x600", "cache-kvstore-gc"),
                cron("schedule", "0x600", "others-gc"),
            ],
            500,
            [{"namespace": "inference", "cronjob": "cache-kvstore-gc"}],
        ),
        (
            "never done",
            [cron("schedule", "0x600", "cache-kvstore-fsck")],
            500,
            [{"namespace": "inference", "cronjob": "cache-kvstore-fsck"}],
        ),
        (
            "due every hour, and never done; kube-state-metrics is restarted",
            [
                cron("schedule", HOURLY_GAP, "cache-kvstore-gc"),
                cron("successful", "-3600x241 stale _ -3600x360", "cache-kvstore-gc"),
            ],
            500,
            [{"namespace": "inference", "cronjob": "cache-kvstore-gc"}],
        ),
        (
            "due every hour, and done within minutes",
            [
                cron("schedule", HOURLY, "cache-kvstore-gc"),
                cron("successful", HOURLY_DONE, "cache-kvstore-gc"),
            ],
            599,
        ),
        (
            "done, or under way",
            [
                cron("schedule", "0x600", "cache-kvstore-gc"),
                cron("successful", "_x9 600x600", "cache-kvstore-gc"),
                cron("schedule", "_x400 24000x300", "cache-kvstore-fsck"),
            ],
            500,
        ),
    ],
    "KVStoreFollowLate": [
        (
            "looks don't end",
            [series("kvstore_follow_behind_seconds", "0+60x60"), series("kvstore_follow_up", "1x60")],
            40,
            [{}],
        ),
        (
            "what it finds is refused",
            [series("kvstore_follow_behind_seconds", "30x60"), series("kvstore_follow_up", "0x60")],
            40,
            [{}],
        ),
        ("there is none", [series("kvstore_follow_up", "1x5 stale")], 40, [{}]),
        (
            "restarted, and one look failed",
            [
                series("kvstore_follow_behind_seconds", "50x30 _x4 600 50x30"),
                series("kvstore_follow_up", "1x10 0 1x19 _x4 1x30"),
            ],
            45,
        ),
    ],
    "KVStoreCopyLate": [
        ("the copier lags", [series("kvstore_follow_way_seconds", "4000x60")], 40, [{}]),
        ("one late segment", [series("kvstore_follow_way_seconds", "50x20 4000 50x40")], 40),
    ],
}
CASES = [Case(alert, *case) for alert, cases in _CASES.items() for case in cases]


def healthy() -> list[dict[str, str]]:
    """Two servers and two engines that are well, with a rolling restart of each."""
    gone, back = 90, 100
    answers = (f"1x{gone} _x2 0 1x{back}", f"1x{gone + 9} _x2 0 1x{back}")
    world = [
        *both("kvstore_up", *answers, backend="index"),
        *both("kvstore_up", *answers, backend="payloads"),
        *both("kvstore_info", f"1x{gone} _x2 1x{back}", f"1x{gone + 9} _x2 1x{back}", version="1"),
        *both("kvstore_janitor_rounds_total", f"0+9x{gone} _x2 0+9x{back}", "0+9x200"),
        *both("kvstore_janitor_round_timestamp_seconds", f"0+60x{gone}", "0+60x200"),
        *both("kvstore_janitor_scrubbed_bad_segments_total", "0x200", f"0x{gone + 9} _x2 0x{back}"),
        *both("kvstore_janitor_step_runs_total", f"0+9x{gone}", f"0+9x{gone} 0+9x{back}", step="reap"),
        *both("kvstore_janitor_step_failures_total", f"0x{gone}", f"0 1x{gone} 0x{back}", step="reap"),
        *both("kvstore_janitor_scrub_behind_segments", "0x200", "1x200"),
        *both("kvstore_quota_used_bytes", "95x200", "95x200", scope="store"),
        *both("kvstore_quota_bytes", "100x200", "100x200", scope="store"),
        *both("kvstore_index_used_bytes", "50x200", "50x200"),
        *both("kvstore_index_limit_bytes", "100x200", "100x200"),
        *[space("segments", "1000x200", instance=one) for one in "ab"],
        *ratio("0+6000x200", "0+3000x200"),
        *[space("requests_total", "0+60x200", instance=one) for one in "ab"],
        series("kvstore_follow_behind_seconds", f"50x{gone} _x2 0 50x{back}"),
        series("kvstore_follow_way_seconds", f"90x{gone} _x2 0 90x{back}"),
        series("kvstore_follow_up", f"1x{gone} _x2 1x{back}"),
    ]
    # An engine's counters begin anew.
    grows, still = f"0+100x{gone} _x3 0+100x{back}", f"0x{gone} _x3 0x{back}"
    for one in "cd":
        world.append(engine("kv_info", f"1x{gone} _x3 1x{back}", version="1", instance=one))
        for metric, values, labels in (
            ("kv_misses_total", grows, {"reason": "absent"}),
            ("kv_misses_total", still, {"reason": "breaker_open"}),
            ("kv_misses_total", still, {"reason": "corrupt"}),
            ("kv_matches_total", grows, {}),
            ("kv_loads_total", grows, {"outcome": "complete"}),
            ("kv_loads_total", still, {"outcome": "failed"}),
            ("kv_saves_total", grows, {"outcome": "stored"}),
            ("kv_saves_total", still, {"outcome": "dropped"}),
            ("kv_saves_total", still, {"outcome": "failed"}),
            ("kv_save_failures_total", still, {"reason": "capacity"}),
            ("ec_unavailable_requests_total", still, {}),
            ("kv_match_seconds_bucket", grows, {"le": "0.0025"}),
            ("kv_match_seconds_bucket", grows, {"le": "+Inf"}),
            ("kv_match_seconds_count", grows, {}),
            ("kv_events_total", still, {"event": "outcomes_lost"}),
            ("kv_tier_total", grows, {"event": "hits_fast"}),
            ("kv_tier_total", still, {"event": "fast_errors"}),
            ("kv_tier_total", still, {"event": "upload_failures"}),
            ("kv_tier_total", grows, {"event": "uploads"}),
        ):
            world.append(engine(metric, values, **labels, instance=one))
    return world
