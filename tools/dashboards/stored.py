"""The rows of the overview on what the store holds and on its maintenance."""

from __future__ import annotations

from tools.dashboards.grafana import Panel, Query, Row
from tools.dashboards.queries import FLEET, INDEX, WHO, counted, filled, held, rate


def _failures() -> str:
    return f"increase(kvstore_janitor_step_failures_total{{{INDEX}}}[$__rate_interval])"


BYTES = Row(
    "Bytes",
    (
        Panel(
            "Stored, by namespace",
            "timeseries",
            "bytes",
            (
                Query(held("kvstore_stored_bytes"), WHO),
                Query(f"max(kvstore_capacity_bytes{{{INDEX}}})", "capacity"),
            ),
            "Bytes of payloads that can be loaded. Who takes room from whom is decided by last use; a quota "
            "keeps a tenant or a namespace in bounds (cache-admin quota set).",
        ),
        Panel(
            "Of their quotas",
            "bargauge",
            "percentunit",
            (
                Query(
                    f"max by (scope) ({filled()})",
                    "{{scope}}",
                ),
            ),
            "What each scope holds of what it may. Above 1 for long: eviction fails, or what is left is "
            "pinned.",
            most=1.2,
            limits=((1.0, "orange"), (1.05, "red")),
            alerts=("KVStoreOverQuota",),
        ),
        Panel(
            "Evicted to meet a quota",
            "timeseries",
            "Bps",
            (Query(counted("kvstore_evicted_bytes_total"), WHO),),
            "As many bytes as are stored, once the store is full. Many times the capacity in a day: what is "
            "stored does not live long enough to be used; `cache-admin whatif` says what more capacity "
            "would bring.",
        ),
        Panel(
            "Evictions, by rule",
            "timeseries",
            "short",
            (
                Query(
                    f"sum by (rule) (max by (release, rule) ({rate('kvstore_evictions_total', INDEX)}))",
                    "{{rule}}",
                ),
            ),
            "Segments per second. bad: they failed verification. abandoned: a rank did not write its part. "
            "admin, invalidated, erased: somebody did that.",
            stack=True,
            alerts=("KVStoreDamagedPayloads",),
        ),
        Panel(
            "Redis' memory",
            "timeseries",
            "bytes",
            (
                Query(f"max by (release) (kvstore_index_used_bytes{{{INDEX}}})", "{{release}} used"),
                Query(f"max by (release) (kvstore_index_limit_bytes{{{INDEX}}})", "{{release}} maxmemory"),
            ),
            "It grows with the number of blocks, not with their bytes. At maxmemory nothing more is stored: "
            "raise it, or lower capacity_bytes. Empty where Redis does not tell.",
            alerts=("KVStoreIndexMemoryHigh", "KVStoreNoRoom"),
        ),
        Panel(
            "Waiting to be deleted",
            "timeseries",
            "short",
            (
                Query(f"sum({held('kvstore_trashed_segments')})", "evicted"),
                Query(f"sum({held('kvstore_invalidated_segments')})", "invalidated"),
            ),
            "Segments whose payloads are still there: for grace_s after an eviction, and a while after a "
            "namespace was invalidated. If it only grows, the janitor's step reap fails.",
            alerts=("KVStoreJanitorStepFailing",),
        ),
    ),
)

UPKEEP = Row(
    "Upkeep",
    (
        Panel(
            "Since the last round",
            "timeseries",
            "s",
            (
                Query(
                    f"time() - max by (release) (kvstore_janitor_round_timestamp_seconds{{{INDEX}}})",
                    "{{release}}",
                ),
            ),
            "A round is due every janitor.interval_s (5 s) and may take minutes, in which much is evicted. "
            "If it only grows, the janitor hangs: its log and /api/status say at what.",
            width=6,
            limits=((600, "red"),),
            alerts=("KVStoreJanitorStuck",),
        ),
        Panel(
            "Steps that failed",
            "timeseries",
            "short",
            (
                Query(
                    f"sum by (step) ({_failures()})",
                    "{{step}}",
                ),
            ),
            "Each is tried again. What fails for long is said by the janitor's log, and by /api/status in "
            "words.",
            width=6,
            stack=True,
            alerts=("KVStoreJanitorStepFailing",),
        ),
        Panel(
            "Time spent, by step",
            "timeseries",
            "percentunit",
            (
                Query(
                    f"sum by (step) (rate(kvstore_janitor_step_seconds_total{{{INDEX}}}[$__rate_interval]))",
                    "{{step}}",
                ),
            ),
            "Of the janitor's time. Near 1: rounds don't end in time; a slow index or payload store.",
            width=6,
            stack=True,
        ),
        Panel(
            "Verified",
            "timeseries",
            "Bps",
            (
                Query(
                    f"sum(rate(kvstore_janitor_scrubbed_bytes_total{{{INDEX}}}[$__rate_interval]))",
                    "read and verified",
                ),
            ),
            "Payloads that the janitor reads again: janitor.scrub_percent of the store in a day.",
            width=6,
        ),
        Panel(
            "Damaged payloads, last day",
            "stat",
            "none",
            (
                Query(f"sum(increase(kvstore_janitor_scrubbed_bad_segments_total{{{INDEX}}}[1d]))", "bad"),
                Query(
                    f"sum(increase(kvstore_janitor_scrubbed_unanswered_segments_total{{{INDEX}}}[1d]))",
                    "not readable",
                ),
            ),
            "Bad twice, so damaged where they lie. They are evicted, and no engine uses them. More than a "
            "stray one: find out what damages them; `cache-admin fsck --read-data` reads everything.",
            width=6,
            limits=((1, "red"),),
            alerts=("KVStoreDamagedPayloads",),
        ),
        Panel(
            "Waiting to be verified",
            "timeseries",
            "short",
            (Query(f"max by (release) (kvstore_janitor_scrub_behind_segments{{{INDEX}}})", "{{release}}"),),
            "Segments whose turn has come. Growing: the payload store is too slow for "
            "janitor.scrub_percent; lower it.",
            width=6,
            alerts=("KVStoreScrubBehind",),
        ),
        Panel(
            "Versions",
            "table",
            "none",
            (
                Query(f"count by (release, version) (kvstore_info{{{INDEX}}})"),
                Query(
                    f"count by (release, version) (vllm:kvstore_kv_info{{{FLEET}}}"
                    f" or vllm:kvstore_ec_info{{{FLEET}}})"
                ),
            ),
            "Of servers and of engines. More than one for long: an upgrade was left half done.",
            width=6,
            alerts=("KVStoreVersionMix",),
            columns=("servers", "engines"),
        ),
        Panel(
            "Copied from elsewhere",
            "timeseries",
            "s",
            tuple(
                Query(
                    f"max by (release) (kvstore_follow_{name}_seconds{{{INDEX}}})",
                    f"{{{{release}}}} {legend}",
                )
                for name, legend in (
                    ("behind", "since the last look"),
                    ("way", "from making to here"),
                )
            ),
            "Where another region's payloads are copied into this bucket and `cache-admin rebuild --follow` "
            "keeps the index up with them: how late the index is, and how late the copier. Elsewhere empty.",
            alerts=("KVStoreFollowLate", "KVStoreCopyLate"),
        ),
    ),
)
