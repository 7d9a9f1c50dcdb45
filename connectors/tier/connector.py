"""KVStoreTier: the store as a secondary tier of vLLM's OffloadingConnector.

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
      "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240,
        "secondary_tiers": [{"type": "KVStoreTier", "module_path": "connectors.tier",
          "index": "redis://HOST:6379/0", "payloads": "s3://BUCKET/PREFIX"}]}}'

vLLM moves KV blocks between the GPU and its CPU tier, in chunks; this moves chunks between the CPU tier and
the store. All of it lives in the scheduler's process. Every method runs on the scheduler's thread, or on the
thread that polls: from vLLM 0.33 on, beside a tier that is polled between steps. vLLM's lock of the manager
keeps the threads apart. Only `shutdown` waits for I/O, for queued saves and a bounded time. A facade over
`Lookups`, `Loads` and `Saves`.

vLLM pins the CPU tier's rows for a job until the job is reported, so every job is reported by
`kv.load_deadline_s`, whatever its I/O does; I/O that ends later touches no row (connectors.tier.memory).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from connectors.engine.version import check_vllm_version  # isort: skip

check_vllm_version()  # says so in words, before an import below fails on an older vLLM

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from connectors.engine.guard import Followers, guarded
from connectors.engine.opening import close, open_for
from connectors.tier.identity import (
    EngineConfig,
    chunk_facts,
    engine_of,
    refuse_engine,
    refuse_settings,
    tier_namespace,
)
from connectors.tier.load import Loads
from connectors.tier.lookups import Lookups
from connectors.tier.memory import Job, Jobs, Primary
from connectors.tier.metrics import Observed, definitions
from connectors.tier.save import GATHER_S, Saves
from kvstore.build import load_settings
from kvstore.errors import ConfigError
from kvstore.rules.segments import segment_blocks, staging_bytes
from schemas.base import redact
from schemas.settings import Settings

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, ReqContext
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import TransferJob

log = logging.getLogger(__name__)

_RESULTS = {"hit": LookupResult.HIT, "miss": LookupResult.MISS, "later": LookupResult.RETRY}


class KVStoreTier(SecondaryTierManager):
    """One engine's tier. Its `secondary_tiers` entry holds the store's settings (schemas.settings.Settings)
    besides `type`, `module_path`, `backpressure`, `locality` and `enable_kv_events`."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        locality: str | None = None,
        enable_kv_events: bool = False,
        **given: Any,
    ) -> None:
        """Raises ConfigError for settings or an engine that it can't serve."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = _locality(locality)
        settings = load_settings(given)
        engine = engine_of(offloading_spec)
        refuse_settings(settings)
        refuse_engine(engine, settings)
        self._start(engine, settings, primary_kv_view)
        kv_events = offloading_spec.kv_events_config.enable_kv_cache_events
        if enable_kv_events and not kv_events:
            log.warning("enable_kv_events has no effect: vLLM's KV cache events are off (--kv-events-config)")
        self._events: list[OffloadingEvent] | None = [] if enable_kv_events and kv_events else None

    def _start(self, engine: EngineConfig, settings: Settings, view: memoryview) -> None:
        primary = Primary(view)
        namespace = tier_namespace(engine, settings, primary.row_bytes)
        segment_chunks = segment_blocks(settings, primary.row_bytes)
        self._jobs = Jobs(settings.kv.load_deadline_s)
        if (staged := staging_bytes(settings.kv)) < primary.row_bytes:
            raise ConfigError(
                f"kvstore: kv.staging_bytes = {staged} is less than one chunk ({primary.row_bytes} bytes)"
            )
        self._store = store = open_for(settings, "offloading tier", namespace)
        space = store.open(namespace, block_bytes=primary.row_bytes)
        self._namespace_id = space.id
        #: The followers that each hook guards one by one; that a job which has ended is reported stands bare.
        self._followers = followers = Followers(store.counters)
        self._lookups = followers.guard(Lookups(space, rows=primary.rows), Lookups.restart)
        self._loads = Loads(space, primary, self._jobs, segment_chunks)
        self._saves = followers.guard(
            Saves(
                space,
                primary,
                self._jobs,
                segment_chunks,
                engine.chunk_tokens,
                # vLLM's detector would take waiting for more chunks for a slow store.
                gather_s=GATHER_S if self.bp_detector is None else 0.0,
            ),
            Saves.drop,
        )
        self._observed = followers.guard(Observed(store.counters))
        self._retired = False
        facts = json.dumps(chunk_facts(engine, settings), default=str)
        log.info("chunks of %d bytes, their format follows from %s", primary.row_bytes, facts)
        space.register_soon()

    # ---- lookups --------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    @guarded(LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if self._retired:
            return LookupResult.MISS
        return _RESULTS[self._lookups.look(key, req_context.req_id)]

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.send()
        self._saves.close_old()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._saves.close_request(req_context.req_id)
        self._lookups.forget(req_context.req_id)

    # ---- jobs -----------------------------------------------------------------------------------

    def submit_load(self, job_metadata: TransferJob) -> None:
        if self._retired or not self._load(job_metadata):
            self._jobs.give_up(job_metadata.job_id, job_metadata.keys, is_load=True)

    def submit_store(self, job_metadata: TransferJob) -> None:
        if self._retired or not self._save(job_metadata):
            self._jobs.give_up(job_metadata.job_id, job_metadata.keys, is_load=False)

    # A bug in these costs a job, not the engine; a job that is never reported would cost a request.

    @guarded(False)
    def _load(self, job: TransferJob) -> bool:
        request = job.req_context.req_id
        runs = [self._lookups.fetch(key, request) for key in job.keys]
        self._loads.submit(job.job_id, job.keys, job.chunk_ids, runs)
        return True

    @guarded(False)
    def _save(self, job: TransferJob) -> bool:
        request = job.req_context
        position = request.get_offload_key_position
        self._saves.submit(job.job_id, job.keys, job.chunk_ids, request.req_id, position)
        return True

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [self._result(job, late=late) for job, late in self._jobs.take()]

    def _result(self, job: Job, *, late: bool) -> JobResult:
        success = len(job.done) == len(job.keys)
        if job.is_load:
            if not success:
                self._lookups.failed(set(job.keys).difference(job.done))
            if late:
                self._store.counters.miss("deadline", len(job.pending))
        else:
            # Chunks that were absent before are stored now.
            self._lookups.changed(job.stored)
            if job.stored and self._events is not None:
                self._events.append(
                    OffloadingEvent(list(job.stored), self.medium, removed=False, locality=self.locality)
                )
        return JobResult(
            job_id=job.number,
            success=success,
            successful_keys=tuple(job.done) if job.is_load and job.done else None,
            transfer_time=job.took_s,
            transfer_bytes=len(job.done) * self._block_size_bytes,
        )

    def drain_jobs(self) -> None:
        """Retire: the engine forgets its KV blocks, perhaps because its weights have changed in place.

        Stored blocks of this namespace may then be wrong for this engine, and blocks that it computes from
        now on would be wrong for others. So the store is left alone until the engine is started anew. Jobs
        that have not ended by now fail. This method waits only for copies within memory.
        """
        log.warning("reset: this engine uses the store no more, since its weights may have changed in place")
        self._retired = True
        self._jobs.end_all()

    # ---- the rest -------------------------------------------------------------------------------

    def take_events(self) -> Iterable[OffloadingEvent]:
        if self._events:
            events, self._events = self._events, []
            return events
        return ()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return definitions()

    @classmethod
    def config_info_keys(cls, tier_config: dict[str, Any]) -> tuple[str, ...]:
        return "kvstore_namespace", "kvstore_index", "kvstore_payloads"

    def config_info(self) -> Mapping[str, str]:
        settings = self._store.settings
        values = self._namespace_id, redact(settings.index_url), redact(settings.origin)
        return dict(zip(self.config_info_keys({}), values, strict=True))

    def get_stats(self) -> Any | None:
        return self._observed.take()

    def shutdown(self) -> None:
        """Let queued saves finish, for at most `transfers.drain_s`; after that no row is touched any more."""
        if not self._retired:
            self._saves.close_all()
        close(self._store, "offloading tier")
        self._jobs.end_all()


def _locality(given: str | None) -> Locality | None:
    if given is None:
        return None
    try:
        return Locality(given)
    except ValueError:
        allowed = " or ".join(one.value for one in Locality)
        raise ConfigError(f"kvstore: locality {given!r} of the offloading tier; allowed: {allowed}") from None
