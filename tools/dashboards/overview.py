"""What people on call look at first: what the cache brings, what it doesn't and why, whether it is well."""

from __future__ import annotations

from tools.dashboards.grafana import Dashboard, Panel, Query, Row, Variable
from tools.dashboards.queries import (
    FLEET,
    HAD_TO,
    INDEX,
    WHO,
    by_namespace,
    counted,
    either,
    filled,
    held,
    hit_ratio,
    of_engines,
    share,
)
from tools.dashboards.stored import BYTES, UPKEEP

#: Several servers export one index.
_IN = "max by (release, window)"
_CUT_OFF = (
    "sum by (instance, model_name, engine) ("
    f'increase(vllm:kvstore_kv_misses_total{{reason="breaker_open", {FLEET}}}[5m])) > bool 0'
)
_FAST = by_namespace("kv", "tier_total", event="hits_fast")
_EITHER_TIER = by_namespace("kv", "tier_total", event="hits_fast|hits_slow")
_SERVED = f"sum by (cache_namespace) ({counted('kvstore_served_blocks_total')})"
_ASKED = f"sum by (cache_namespace) ({counted('kvstore_asked_blocks_total')})"


def _open(gauge: str) -> str:
    return f"sum(max by (instance, model_name, engine) (vllm:kvstore_{gauge}{{{FLEET}}}))"


_SAVED_COMPUTE = either(
    of_engines("vllm:kvstore_kv_saved_compute_seconds_total"),
    of_engines("vllm:kvstore_ec_saved_compute_seconds_total"),
)


_GLANCE = Row(
    "At a glance",
    (
        Panel(
            "Hit ratio",
            "stat",
            "percentunit",
            (Query(hit_ratio(total=True)),),
            "Of the blocks that requests asked for, those that came from the store. There is no right "
            "value: it is the share of prompts that repeat. A fall is what matters: see Blocks missed, by "
            "reason.",
            width=4,
            height=5,
            most=1,
            good="red",
            limits=((0.1, "orange"), (0.3, "green")),
            alerts=("KVStoreHitRatioCollapsed",),
        ),
        Panel(
            "Tokens saved per hour",
            "stat",
            "short",
            (Query(f"3600 * {of_engines('vllm:kvstore_kv_loaded_tokens_total')}"),),
            "Tokens of prompts that engines loaded instead of computing them. 0 with traffic: see Backends "
            "and Engines cut off.",
            width=4,
            height=5,
        ),
        Panel(
            "GPU-seconds saved per hour",
            "stat",
            "s",
            (Query(f"3600 * $gpus * ({_SAVED_COMPUTE})"),),
            "What computing what was loaded took the engines that saved it, as they estimate it, times the "
            "GPUs of an engine, which you choose above. KV blocks and encoder outputs together.",
            width=4,
            height=5,
        ),
        Panel(
            "Stored, of the capacity",
            "stat",
            "percentunit",
            (Query(f"max({filled(scope='store')})"),),
            "A cache in use is full, to within 2% or 2 GiB. Well above 1 eviction does not keep up: look at "
            "the janitor, and whether too much is pinned (cache-admin pin).",
            width=4,
            height=5,
            limits=((1.0, "orange"), (1.05, "red")),
            alerts=("KVStoreOverQuota",),
        ),
        Panel(
            "Backends",
            "stat",
            "none",
            (Query(f"max by (release, backend) (kvstore_up{{{INDEX}}})", "{{release}} {{backend}}"),),
            "Whether index and payloads answer at least one server. While one does not, engines compute "
            "everything: no request fails. `cache-admin doctor` says what is wrong.",
            width=4,
            height=5,
            good="red",
            limits=((1, "green"),),
            words=((0, "no answer", "red"), (1, "answers", "green")),
            alerts=("KVStoreIndexDown", "KVStorePayloadsDown"),
        ),
        Panel(
            "Engines cut off",
            "stat",
            "none",
            (Query(f"sum({_CUT_OFF})"),),
            "Engines that asked in the last five minutes and were refused by a breaker of their own, "
            "because index or payloads had failed. It closes by itself. See which, on the dashboard of the "
            "engines.",
            width=4,
            height=5,
            limits=((1, "red"),),
            alerts=("KVStoreEnginesCutOff", "KVStoreEngineCutOff"),
        ),
    ),
)

_BRINGS = Row(
    "What it brings",
    (
        Panel(
            "Hit ratio by namespace",
            "timeseries",
            "percentunit",
            (Query(hit_ratio(), WHO), Query(hit_ratio(total=True), "all")),
            "A namespace is one model with one set of settings that changes its blocks. One that falls "
            "alone: its traffic or its quota. A new one that begins at 0: an engine was started with other "
            "settings; `cache-admin namespaces diff` says which.",
            most=1,
            alerts=("KVStoreHitRatioCollapsed",),
        ),
        Panel(
            "Hit ratio by tier and namespace",
            "timeseries",
            "percentunit",
            (
                Query(f"{_SERVED} / {_ASKED} * {_FAST} / {_EITHER_TIER}", "{{cache_namespace}} fast"),
                Query(f"{_SERVED} / {_ASKED} * (1 - {_FAST} / {_EITHER_TIER})", "{{cache_namespace}} slow"),
            ),
            "The hit ratio, shared out by which tier answered the reads: the node's own (fast) or the "
            "shared store (slow). Empty with one tier. Little from the fast one: the engines of a node "
            "don't see the same prompts, or it is too small; `cache-admin warm` fills it.",
            stack=True,
            most=1,
        ),
        Panel(
            "Tokens saved, by namespace",
            "timeseries",
            "short",
            (Query(by_namespace("kv", "loaded_tokens_total"), "{{cache_namespace}}"),),
            "Tokens per second that engines loaded instead of computing them.",
        ),
        Panel(
            "GPU-seconds saved per second, by namespace",
            "timeseries",
            "short",
            (
                Query(
                    f"$gpus * {by_namespace('kv', 'saved_compute_seconds_total')}",
                    "{{cache_namespace}} prompts",
                ),
                Query(
                    f"$gpus * {by_namespace('ec', 'saved_compute_seconds_total')}",
                    "{{cache_namespace}} encoders",
                ),
            ),
            "How many GPUs more it would take to do without the cache, by what the engines that saved the "
            "blocks measured then. An estimate: see docs/metrics.md.",
        ),
        Panel(
            "Requests told of",
            "timeseries",
            "reqps",
            (Query(counted("kvstore_requests_total"), WHO),),
            "Requests that engines have told the index about. Fewer than there are: engines are cut off, or "
            "outcomes are lost.",
            alerts=("KVStoreOutcomesLost", "KVStoreEnginesAbsent"),
        ),
        Panel(
            "Worth of what is stored",
            "timeseries",
            "s",
            (Query(f"$gpus * {held('kvstore_recompute_seconds')}", WHO),),
            "GPU-seconds that computing all of it again would take: what is lost with the bucket.",
        ),
    ),
)

_MISSES = Row(
    "What it doesn't bring, and why",
    (
        Panel(
            "Blocks missed, by reason",
            "timeseries",
            "short",
            (
                Query(
                    f"sum by (reason) ({counted('kvstore_missed_blocks_total', 'reason')})",
                    "{{reason}}",
                ),
            ),
            "Blocks per second that were asked for and did not come. absent is what a cache is like; "
            "`cache-admin whatif` says what more capacity would bring. deadline, breaker_open, unavailable, "
            "throttled: index or payloads are slow or fail. computing_is_faster: they are too slow to pay. "
            "window, below_threshold: settings. corrupt: damaged bytes.",
            stack=True,
            alerts=("KVStoreCorruptLoads",),
        ),
        Panel(
            "Blocks not stored, by reason",
            "timeseries",
            "short",
            (
                Query(
                    f"sum by (reason) ({counted('kvstore_unsaved_blocks_total', 'reason')})",
                    "{{reason}}",
                ),
            ),
            "Blocks per second that were offered and not stored. dropped: no room in time. failed: index or "
            "payloads. held and not_admitted are as they should be.",
            stack=True,
            alerts=("KVStoreSavesDropped", "KVStoreSavesFailing"),
        ),
        Panel(
            "Failures of saves, by reason",
            "timeseries",
            "short",
            (
                Query(of_engines("vllm:kvstore_kv_save_failures_total", "reason"), "{{reason}}"),
                Query(
                    of_engines("vllm:kvstore_ec_save_failures_total", "reason"),
                    "{{reason}} (encoder outputs)",
                ),
            ),
            "Segments per second that could not be saved. capacity: Redis at maxmemory, or a full disk. "
            "permission: an access key or a policy. other_region: the bucket is in another region. The "
            "others pass by themselves, or with the backend.",
            stack=True,
            alerts=("KVStoreSavesFailing", "KVStoreNoRoom"),
        ),
        Panel(
            "Saves dropped",
            "timeseries",
            "percentunit",
            (
                Query(
                    share("vllm:kvstore_kv_saves_total", "model_name", of=HAD_TO, outcome="dropped"),
                    "{{model_name}}",
                ),
            ),
            "Of what had to be stored, what found no room in time. Short peaks are harmless. Always: "
            "raise transfers.write_threads or kv.staging_bytes, or save less (admission.second_use).",
            most=1,
            limits=((0.05, "red"),),
            alerts=("KVStoreSavesDropped",),
        ),
        Panel(
            "Loads that failed",
            "timeseries",
            "percentunit",
            (Query(share("vllm:kvstore_kv_loads_total", "model_name", outcome="failed"), "{{model_name}}"),),
            "Of the loads that were promised, those of which a block did not come and was computed after "
            "all. The reasons are in Blocks missed; deadline is the usual one, of a payload store that is "
            "slow.",
            most=1,
            limits=((0.05, "red"),),
            alerts=("KVStoreLoadsFailing",),
        ),
        Panel(
            "Breakers",
            "timeseries",
            "short",
            (
                Query(_open("kv_index_down"), "index"),
                Query(_open("kv_payloads_down"), "payloads"),
                Query(_open("ec_index_down"), "index (encoder outputs)"),
                Query(_open("ec_payloads_down"), "payloads (encoder outputs)"),
            ),
            "Engines whose breaker is open, by which backend failed them. As of an engine's last step: an "
            "idle one may show an old state. One engine: its network. All: the backend.",
            limits=((1, "red"),),
            alerts=("KVStoreEnginesCutOff", "KVStoreEngineCutOff"),
        ),
    ),
)

OVERVIEW = Dashboard(
    "kvstore-overview",
    "kvstore: overview",
    "What the cache brings and whether it is well, by what its servers and the engines export. Namespace, "
    "model and tenant are those of the index; where a panel is about engines it goes for all of the "
    "release.",
    (
        Variable("release", "Cache", "kvstore_info", "release"),
        Variable("namespace", "Namespace", f"kvstore_stored_bytes{{{INDEX}}}", "cache_namespace"),
        Variable("model", "Model", f"kvstore_stored_bytes{{{INDEX}}}", "model"),
        Variable("tenant", "Tenant", f"kvstore_stored_bytes{{{INDEX}}}", "tenant"),
        Variable("gpus", "GPUs of an engine", text="1"),
    ),
    (_GLANCE, _BRINGS, _MISSES, BYTES, UPKEEP),
)
