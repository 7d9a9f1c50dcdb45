"""What each engine does with the cache: times, queues, traffic, its node's tier, encoder outputs."""

from __future__ import annotations

from tools.dashboards.grafana import Dashboard, Panel, Query, Row, Variable
from tools.dashboards.queries import ENGINE, HAD_TO, of_engines, percentile, share

_ENGINE = ("model_name", "instance", "engine")
_WHO = "{{model_name}} {{instance}} {{engine}}"


def _most(expr: str) -> str:
    """Of what each engine has, the largest: two hundred are no picture."""
    return f"topk($most, {expr})"


def _least(expr: str) -> str:
    return f"bottomk($most, {expr})"


def _percentiles(histogram: str) -> tuple[Query, ...]:
    """Over all chosen engines, and the worst percentile of each."""
    queries = [Query(percentile(part, histogram), f"p{100 * part:g}, all") for part in (0.5, 0.95, 0.99)]
    return (*queries, Query(_most(percentile(0.99, histogram, *_ENGINE)), f"p99 {_WHO}"))


def _state(gauge: str, *labels: str) -> str:
    return _most(f"sum by ({', '.join([*_ENGINE, *labels])}) (vllm:kvstore_{gauge}{{{ENGINE}}})")


def _by(metric: str, *labels: str) -> str:
    return of_engines(f"vllm:kvstore_{metric}", *labels, match=ENGINE)


def _unsaved(outcome: str) -> str:
    saves = "vllm:kvstore_kv_saves_total"
    return _most(share(saves, *_ENGINE, match=ENGINE, of=HAD_TO, outcome=outcome))


def _tier(gauge: str, what: str) -> Query:
    return Query(_most(f"max by (instance) (vllm:kvstore_{gauge}{{{ENGINE}}})"), f"{{{{instance}}}} {what}")


_LATENCY = Row(
    "How long it takes",
    (
        Panel(
            "Match",
            "timeseries",
            "s",
            _percentiles("vllm:kvstore_kv_match_seconds"),
            "From the question to the index's answer. A millisecond or two beside Redis; past "
            "kv.match_deadline_s (0.5 s) the request is not served. Slow everywhere: Redis' CPU, or its "
            "network. Slow on one engine: its Queues of calls.",
            limits=((0.4, "red"),),
            alerts=("KVStoreMatchSlow",),
        ),
        Panel(
            "Load",
            "timeseries",
            "s",
            _percentiles("vllm:kvstore_kv_load_seconds"),
            "From the plan of a request's load to its last block, on one rank. Compare it with what "
            "computing the prompt takes: a cache that loads more slowly than the engine computes is not "
            "worth its room (cache-admin bench).",
        ),
        Panel(
            "Save",
            "timeseries",
            "s",
            _percentiles("vllm:kvstore_kv_save_seconds"),
            "From the copy of a segment's blocks to its commit. No request waits for it; slow saves fill "
            "the queue, and then saves are dropped.",
            alerts=("KVStoreSavesDropped",),
        ),
    ),
)

_WAITS = Row(
    "What waits",
    (
        Panel(
            "Calls of the index, and reads",
            "timeseries",
            "short",
            (
                Query(_state("kv_queued_calls"), f"calls {_WHO}"),
                Query(_state("kv_queued_reads"), f"reads {_WHO}"),
            ),
            "Waiting for a thread. Always some: raise transfers.read_threads; the index is slow if calls "
            "wait.",
            alerts=("KVStoreMatchSlow",),
        ),
        Panel(
            "Segments to be written",
            "timeseries",
            "short",
            (
                Query(_state("kv_queued_writes"), f"queued {_WHO}"),
                Query(_state("kv_pending_segments"), f"not ended {_WHO}"),
            ),
            "Queued on their rank, and not ended by all ranks. Growing: the payload store is slower than "
            "the engine; raise transfers.write_threads.",
            alerts=("KVStoreSavesDropped",),
        ),
        Panel(
            "Bytes to be written",
            "timeseries",
            "bytes",
            (Query(_state("kv_queued_write_bytes"), _WHO),),
            "At transfers.write_bytes (512 MiB for each rank) saves are dropped.",
            alerts=("KVStoreSavesDropped",),
        ),
        Panel(
            "Staging memory",
            "timeseries",
            "bytes",
            (
                Query(_state("kv_load_staging_used_bytes", "rank"), f"loads {_WHO} rank {{{{rank}}}}"),
                Query(_state("kv_save_staging_used_bytes", "rank"), f"saves {_WHO} rank {{{{rank}}}}"),
            ),
            "Of kv.staging_bytes (256 MiB each). Full: loads wait, and saves are dropped; raise it, if the "
            "host has the memory.",
            alerts=("KVStoreSavesDropped",),
        ),
        Panel(
            "Breakers",
            "timeseries",
            "none",
            (
                Query(_state("kv_index_down"), f"index {_WHO}"),
                Query(_state("kv_payloads_down"), f"payloads {_WHO}"),
                Query(_state("ec_index_down"), f"index (encoder outputs) {_WHO}"),
                Query(_state("ec_payloads_down"), f"payloads (encoder outputs) {_WHO}"),
            ),
            "Above 0 while calls are refused because they failed; of payloads, the number of ranks. As of "
            "an engine's last step. It closes by itself once a probe succeeds.",
            limits=((1, "red"),),
            alerts=("KVStoreEngineCutOff", "KVStoreEnginesCutOff"),
        ),
        Panel(
            "What else the store did",
            "timeseries",
            "short",
            (
                Query(_by("kv_events_total", "event"), "{{event}}"),
                Query(_by("kv_resets_total", "outcome"), "reset: {{outcome}}"),
            ),
            "outcomes_lost, note_failures, trace_lost: the index was not told something. "
            "quarantined_segments: damaged, or gone. resets left_alone: the store is not used until "
            "somebody names the weights.",
            stack=True,
            alerts=("KVStoreOutcomesLost",),
        ),
    ),
)

_TRAFFIC = Row(
    "What comes and goes",
    (
        Panel(
            "Share of prompt tokens saved",
            "timeseries",
            "percentunit",
            (
                Query(
                    _least(
                        f"{_by('kv_loaded_tokens_total', *_ENGINE)}"
                        f" / {_by('kv_asked_tokens_total', *_ENGINE)}"
                    ),
                    _WHO,
                ),
            ),
            "Loaded, of the tokens that the index was asked for. One engine far below the others: it is cut "
            "off, or its settings name another namespace.",
            most=1,
            alerts=("KVStoreHitRatioCollapsed",),
        ),
        Panel(
            "From asked for to loaded",
            "timeseries",
            "short",
            (
                Query(_by("kv_asked_tokens_total"), "asked for"),
                Query(_by("kv_matched_tokens_total"), "found"),
                Query(_by("kv_promised_tokens_total"), "promised"),
                Query(_by("kv_loaded_tokens_total"), "loaded"),
                Query(_by("kv_saved_tokens_total"), "stored"),
            ),
            "Tokens per second. Found and not promised: the engine's own cache has them, or the index "
            "answered too late. Promised and not loaded: loads fail.",
            alerts=("KVStoreLoadsFailing",),
        ),
        Panel(
            "Blocks missed, by reason",
            "timeseries",
            "short",
            (Query(_by("kv_misses_total", "reason"), "{{reason}}"),),
            "Per second. See the same panel of the overview.",
            stack=True,
            alerts=("KVStoreCorruptLoads",),
        ),
        Panel(
            "Loads, by outcome",
            "timeseries",
            "short",
            (Query(_by("kv_loads_total", "outcome"), "{{outcome}}"),),
            "Per second. failed: a block did not come in time, or not intact, and was computed.",
            stack=True,
            alerts=("KVStoreLoadsFailing",),
        ),
        Panel(
            "Blocks offered, by outcome",
            "timeseries",
            "short",
            (Query(_by("kv_saves_total", "outcome"), "{{outcome}}"),),
            "Per second, each rank's part counted. present is a prompt that was stored before.",
            stack=True,
            alerts=("KVStoreSavesDropped", "KVStoreSavesFailing"),
        ),
        Panel(
            "Bytes loaded and saved",
            "timeseries",
            "Bps",
            (
                Query(_most(_by("kv_loaded_bytes_total", *_ENGINE)), f"loaded {_WHO}"),
                Query(_most(_by("kv_saved_bytes_total", *_ENGINE)), f"saved {_WHO}"),
                Query(_most(_by("ec_loaded_bytes_total", *_ENGINE)), f"loaded (encoder outputs) {_WHO}"),
                Query(_most(_by("ec_saved_bytes_total", *_ENGINE)), f"saved (encoder outputs) {_WHO}"),
            ),
            "What an engine moves. Compare it with its network.",
        ),
        Panel(
            "Saves dropped and failed",
            "timeseries",
            "percentunit",
            (
                Query(_unsaved("dropped"), f"dropped {_WHO}"),
                Query(_unsaved("failed"), f"failed {_WHO}"),
            ),
            "Of what had to be stored.",
            most=1,
            limits=((0.05, "red"),),
            alerts=("KVStoreSavesDropped", "KVStoreSavesFailing"),
        ),
    ),
)

_TIER = Row(
    "The local tier",
    (
        Panel(
            "Reads that it answered",
            "timeseries",
            "percentunit",
            (
                Query(
                    _least(
                        share(
                            "vllm:kvstore_kv_tier_total",
                            *_ENGINE,
                            match=ENGINE,
                            of={"event": "hits_fast|hits_slow"},
                            event="hits_fast",
                        )
                    ),
                    _WHO,
                ),
            ),
            "Of all reads that found their payload, those that this node's folder had. Low after a start: "
            "`cache-admin warm` fills it.",
            most=1,
        ),
        Panel(
            "What it holds",
            "timeseries",
            "bytes",
            (
                _tier("kv_tier_used_bytes", "held"),
                _tier("kv_tier_dirty_bytes", "not uploaded"),
                _tier("kv_tier_capacity_bytes", "may hold"),
                _tier("ec_tier_used_bytes", "held (encoder outputs)"),
                _tier("ec_tier_dirty_bytes", "not uploaded (encoder outputs)"),
                _tier("ec_tier_capacity_bytes", "may hold (encoder outputs)"),
            ),
            "Engines of one node share one. What is not uploaded is on this node alone (write: back); "
            "growing, uploads fail or are too slow.",
            alerts=("KVStoreDirtyBytesHigh", "KVStoreUploadsFailing"),
        ),
        Panel(
            "Its events",
            "timeseries",
            "short",
            (
                Query(_by("kv_tier_total", "event"), "{{event}}"),
                Query(_by("ec_tier_total", "event"), "{{event}} (encoder outputs)"),
            ),
            "fast_errors: disk, rights or ledger of the folder. upload_failures: tried again. "
            "fills_skipped: no room, or the disk is too slow (transfers.errand_bytes).",
            alerts=("KVStoreTierErrors", "KVStoreUploadsFailing"),
        ),
    ),
)

_FAILED = (
    "sum by (model_name) ("
    f"increase(vllm:kvstore_ec_unavailable_requests_total{{{ENGINE}}}[$__rate_interval]))"
)

_EC = Row(
    "Encoder outputs",
    (
        Panel(
            "Items, by source",
            "timeseries",
            "short",
            (Query(_by("ec_items_total", "source"), "{{source}}"),),
            "Encoder inputs per second, by where the output came from: the store, this node's staging, or "
            "the encoder. skipped: a producer found it stored.",
            stack=True,
        ),
        Panel(
            "Missed, by reason",
            "timeseries",
            "short",
            (Query(_by("ec_misses_total", "reason"), "{{reason}}"),),
            "Items per second that were encoded though the store was asked. absent: never seen before, or "
            "evicted. mismatch: an identifier that was used for something of another size.",
            stack=True,
            alerts=("KVStoreCorruptLoads",),
        ),
        Panel(
            "Requests failed",
            "timeseries",
            "short",
            (Query(_FAILED, "{{model_name}}"),),
            "Of engines without an encoder, for an item that could be neither had nor computed. These reach "
            "a user: the runbook says what to do.",
            limits=((1, "red"),),
            alerts=("KVStoreRequestsFailed",),
        ),
        Panel(
            "Fetch",
            "timeseries",
            "s",
            _percentiles("vllm:kvstore_ec_fetch_seconds"),
            "From the look-up of an item to its verified bytes on this node. Past ec.fetch_deadline_s (2 s) "
            "it is encoded.",
        ),
        Panel(
            "Save",
            "timeseries",
            "s",
            _percentiles("vllm:kvstore_ec_save_seconds"),
            "From the end of the encoder to the commit. In a disaggregated deployment the other engine "
            "waits for it.",
            alerts=("KVStoreRequestsFailed",),
        ),
        Panel(
            "Offered, by outcome",
            "timeseries",
            "short",
            (
                Query(_by("ec_saves_total", "outcome"), "{{outcome}}"),
                Query(_by("ec_save_failures_total", "reason"), "failed: {{reason}}"),
            ),
            "Items per second, and the reasons of those that failed.",
            alerts=("KVStoreSavesFailing",),
        ),
    ),
)

_OFFLOADING = Row(
    "Under vLLM's offloading",
    (
        Panel(
            "Chunks missed, by reason",
            "timeseries",
            "short",
            (Query(_by("tier_miss_chunks_total", "reason"), "{{reason}}"),),
            "Per second, of the KVStoreTier (docs/tier.md). Empty where it is not used.",
            stack=True,
        ),
        Panel(
            "Chunks offered, by outcome",
            "timeseries",
            "short",
            (Query(_by("tier_save_chunks_total", "outcome"), "{{outcome}}"),),
            "Per second, of the KVStoreTier.",
            stack=True,
        ),
        Panel(
            "What else it did",
            "timeseries",
            "short",
            (Query(_by("tier_events_total", "name"), "{{name}}"),),
            "The store's other counters, per second.",
        ),
    ),
)

_MATCH = 'release=~"$release"'

ENGINES = Dashboard(
    "kvstore-engines",
    "kvstore: engines",
    "How the engines get on with the cache: times, queues, traffic, the node's own tier, encoder outputs. "
    "By what the connectors export through vLLM. Of more engines than a picture takes, those are shown that "
    "have most of what it is about; of shares that ought to be high, those that have least.",
    (
        Variable("release", "Cache", "vllm:kvstore_kv_info", "release"),
        Variable("model", "Model", f'{{__name__=~"vllm:kvstore_(kv|ec)_info", {_MATCH}}}', "model_name"),
        Variable(
            "instance",
            "Engine",
            f'{{__name__=~"vllm:kvstore_(kv|ec)_info", {_MATCH}, model_name=~"$model"}}',
            "instance",
        ),
        Variable("most", "Engines in a picture, at most", text="20"),
    ),
    (_LATENCY, _WAITS, _TRAFFIC, _TIER, _EC, _OFFLOADING),
)
