"""What each engine does with the cache: times, queues, traffic, its node's tier, encoder outputs."""

from __future__ import annotations

from tools.dashboards.encoders import ENCODERS, OFFLOADING
from tools.dashboards.fleet import ENGINE_LABELS, WHO, by, least, most, percentiles, state, tier, unsaved
from tools.dashboards.grafana import Dashboard, Panel, Query, Row, Variable
from tools.dashboards.queries import ENGINE, percentile, share

_LATENCY = Row(
    "How long it takes",
    (
        Panel(
            "Match",
            "timeseries",
            "s",
            percentiles("vllm:kvstore_kv_match_seconds"),
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
            percentiles("vllm:kvstore_kv_load_seconds"),
            "From the plan of a request's load to its last block, on one rank. Compare it with what "
            "computing the prompt takes: a cache that loads more slowly than the engine computes is not "
            "worth its room (cache-admin bench).",
            alerts=("KVStoreRegret",),
        ),
        Panel(
            "Regret",
            "timeseries",
            "percentunit",
            (
                *percentiles("vllm:kvstore_kv_regret_ratio"),
                Query(percentile(0.99, "vllm:kvstore_kv_measured_regret_ratio"), "p99, measured"),
            ),
            "How much longer a request's stored blocks took than the better of computing all and loading "
            "all, as a share of computing. Next to 0 if loads pay and are made. Measured: of the few "
            "requests that do the other thing, to find out.",
            limits=((0.5, "red"),),
            alerts=("KVStoreRegret",),
        ),
        Panel(
            "Save",
            "timeseries",
            "s",
            percentiles("vllm:kvstore_kv_save_seconds"),
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
                Query(state("kv_queued_calls"), f"calls {WHO}"),
                Query(state("kv_queued_reads"), f"reads {WHO}"),
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
                Query(state("kv_queued_writes"), f"queued {WHO}"),
                Query(state("kv_pending_segments"), f"not ended {WHO}"),
            ),
            "Queued on their rank, and not ended by all ranks. Growing: the payload store is slower than "
            "the engine; raise transfers.write_threads.",
            alerts=("KVStoreSavesDropped",),
        ),
        Panel(
            "Bytes to be written",
            "timeseries",
            "bytes",
            (Query(state("kv_queued_write_bytes"), WHO),),
            "KV blocks in staging memory, and other saves, which are dropped at transfers.write_bytes "
            "(512 MiB for each rank).",
            alerts=("KVStoreSavesDropped",),
        ),
        Panel(
            "Staging memory",
            "timeseries",
            "bytes",
            (
                Query(state("kv_load_staging_used_bytes", "rank"), f"loads {WHO} rank {{{{rank}}}}"),
                Query(state("kv_save_staging_used_bytes", "rank"), f"saves {WHO} rank {{{{rank}}}}"),
            ),
            "Of what the engine's log says at its start (kv.staging_bytes). Full: loads and saves wait.",
            alerts=("KVStoreSavesDropped",),
        ),
        Panel(
            "Blocks that wait to be saved",
            "timeseries",
            "short",
            (Query(state("kv_waiting_blocks", "rank"), f"{WHO} rank {{{{rank}}}}"),),
            "For staging memory, while their requests have them. Peaks are as they should be. Always: the "
            "engine computes faster than it can write.",
            alerts=("KVStoreSavesDropped",),
        ),
        Panel(
            "Breakers",
            "timeseries",
            "none",
            (
                Query(state("kv_index_down"), f"index {WHO}"),
                Query(state("kv_payloads_down"), f"payloads {WHO}"),
                Query(state("ec_index_down"), f"index (encoder outputs) {WHO}"),
                Query(state("ec_payloads_down"), f"payloads (encoder outputs) {WHO}"),
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
                Query(by("kv_events_total", "event"), "{{event}}"),
                Query(by("ec_events_total", "event"), "{{event}} (encoder outputs)"),
                Query(by("kv_resets_total", "outcome"), "reset: {{outcome}}"),
            ),
            "outcomes_lost, note_failures, session_failures, trace_lost: something was not told. "
            "hints_ignored: clients say what makes no sense. "
            "spans_lost: the collector of traces was not told. "
            "follower_failures: a fault of kvstore's own, which the log names. "
            "slow_downs: the bucket refuses requests, of which there are too many; held_back: those that "
            "were not made for that. "
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
                    least(
                        f"{by('kv_loaded_tokens_total', *ENGINE_LABELS)}"
                        f" / {by('kv_asked_tokens_total', *ENGINE_LABELS)}"
                    ),
                    WHO,
                ),
            ),
            "Loaded, of the tokens that the index was asked for. One engine far below the others: it is cut "
            "off, or its settings name another namespace.",
            most=1,
            alerts=("KVStoreHitRatioCollapsed",),
        ),
        Panel(
            "Prompt tokens, by tier",
            "timeseries",
            "short",
            (Query(by("kv_prompt_tokens_total", "tier"), "{{tier}}"),),
            "Tokens per second, each once, by where its KV came from. engine: its own prefix cache. folder, "
            "disk, bucket: loaded from there. Together they are the prompts that began to compute.",
            stack=True,
        ),
        Panel(
            "From asked for to loaded",
            "timeseries",
            "short",
            (
                Query(by("kv_asked_tokens_total"), "asked for"),
                Query(by("kv_matched_tokens_total"), "found"),
                Query(by("kv_promised_tokens_total"), "promised"),
                Query(by("kv_loaded_tokens_total"), "loaded"),
                Query(by("kv_saved_tokens_total"), "stored"),
            ),
            "Tokens per second. Found and not promised: the engine's own cache has them, or the index "
            "answered too late. Promised and not loaded: loads fail.",
            alerts=("KVStoreLoadsFailing",),
        ),
        Panel(
            "Blocks missed, by reason",
            "timeseries",
            "short",
            (Query(by("kv_misses_total", "reason"), "{{reason}}"),),
            "Per second. See the same panel of the overview.",
            stack=True,
            alerts=("KVStoreCorruptLoads",),
        ),
        Panel(
            "Loads, by outcome",
            "timeseries",
            "short",
            (Query(by("kv_loads_total", "outcome"), "{{outcome}}"),),
            "Per second. failed: a block did not come in time, or not intact, and was computed.",
            stack=True,
            alerts=("KVStoreLoadsFailing",),
        ),
        Panel(
            "Audits, by outcome",
            "timeseries",
            "short",
            (Query(by("kv_audits_total", "outcome"), "{{outcome}}"),),
            "Per second. declined: loads that were computed instead, to be compared. alike: stored blocks "
            "that are what the engine computes. wrong: blocks that aren't, though their checksums are right.",
            alerts=("KVStoreWrongBlocks", "KVStoreWriterFailed"),
        ),
        Panel(
            "Blocks offered, by outcome",
            "timeseries",
            "short",
            (Query(by("kv_saves_total", "outcome"), "{{outcome}}"),),
            "Per second, each rank's part counted. present is a prompt that was stored before.",
            stack=True,
            alerts=("KVStoreSavesDropped", "KVStoreSavesFailing"),
        ),
        Panel(
            "Bytes loaded and saved",
            "timeseries",
            "Bps",
            (
                Query(most(by("kv_loaded_bytes_total", *ENGINE_LABELS)), f"loaded {WHO}"),
                Query(most(by("kv_saved_bytes_total", *ENGINE_LABELS)), f"saved {WHO}"),
                Query(most(by("ec_loaded_bytes_total", *ENGINE_LABELS)), f"loaded (encoder outputs) {WHO}"),
                Query(most(by("ec_saved_bytes_total", *ENGINE_LABELS)), f"saved (encoder outputs) {WHO}"),
            ),
            "What an engine moves. Compare it with its network.",
        ),
        Panel(
            "Saves dropped and failed",
            "timeseries",
            "percentunit",
            (
                Query(unsaved("dropped"), f"dropped {WHO}"),
                Query(unsaved("failed"), f"failed {WHO}"),
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
                    least(
                        share(
                            "vllm:kvstore_kv_tier_total",
                            *ENGINE_LABELS,
                            match=ENGINE,
                            of={"event": "hits_fast|hits_slow"},
                            event="hits_fast",
                        )
                    ),
                    WHO,
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
                tier("kv_tier_used_bytes", "held"),
                tier("kv_tier_dirty_bytes", "not uploaded"),
                tier("kv_tier_capacity_bytes", "may hold"),
                tier("ec_tier_used_bytes", "held (encoder outputs)"),
                tier("ec_tier_dirty_bytes", "not uploaded (encoder outputs)"),
                tier("ec_tier_capacity_bytes", "may hold (encoder outputs)"),
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
                Query(by("kv_tier_total", "event"), "{{event}}"),
                Query(by("ec_tier_total", "event"), "{{event}} (encoder outputs)"),
            ),
            "fast_errors: disk, rights or ledger of the folder. upload_failures: tried again. "
            "fills_skipped: no room, or the disk is too slow (transfers.errand_bytes).",
            alerts=("KVStoreTierErrors", "KVStoreUploadsFailing"),
        ),
        Panel(
            "Fetched ahead",
            "timeseries",
            "Bps",
            (
                Query(by("kv_prefetched_bytes_total", "outcome"), "{{outcome}}"),
                Query(by("ec_prefetched_bytes_total", "outcome"), "{{outcome}} (encoder outputs)"),
            ),
            "For requests that wait, or because a client said so (hinted, of what was brought). used: a "
            "request then began to load it. wasted: aborted, computed or in the engine's own cache; "
            "payloads.prefetch_bytes bounds it.",
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
    (_LATENCY, _WAITS, _TRAFFIC, _TIER, ENCODERS, OFFLOADING),
)
