"""vLLM's own scheduler, both halves of KVStoreConnector and a checking model, on a fake accelerator.

Requests come from a few families of prompts that share prefixes, into a pool that is too small for all of
them, so that they find blocks in the engine's cache, in the store and nowhere, are preempted and aborted, and
their blocks are handed out again at once. Whatever the adversary does, no request may read a wrong byte and
no wrong byte may be saved. Nor may the engine die, a request wait for blocks that only the store keeps, or a
reset fail over them; only a load under way and a prompt that is handed over have blocks without a request.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory as ECFactory
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_request_block_hasher,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

import connectors.kv.connector
from connectors.choice.cost import Prefill, TokenCost
from connectors.engine.shards import Place
from connectors.kv.messages import CUT
from kvstore.payloads.memory import MemoryPayloads
from tools.models import build
from trials.accelerator import device
from trials.accelerator.configs import DRAFTS, configured, of_rank
from trials.accelerator.contents import Chain
from trials.accelerator.device import Accelerator, Stream
from trials.accelerator.items import PICTURES, ROWS, Encoder, feature, on_device
from trials.accelerator.layouts import Layout
from trials.accelerator.plan import Found, Plan
from trials.accelerator.promises import Promises
from trials.accelerator.runner import Launched, Runner

MODELS = Path(__file__).parents[2] / ".cache" / "models"
VOCABULARY = 50
#: Lengths at which prompts of one family part.
LENGTHS = (22, 48, 80, 112, 150)
#: Longest run, in seconds, before it is given up as hanging.
PATIENCE_S = 120.0


@contextlib.contextmanager
def on(accelerator: Accelerator) -> Iterator[None]:
    """Put all modules of the connectors on this device, in an engine."""

    class Backend:
        get_name = staticmethod(lambda: "FAKE")

    utils = "vllm.distributed.kv_transfer.kv_connector.utils"
    with device.on(accelerator), mock.patch(f"{utils}.get_current_attn_backends", lambda *_: [Backend]):
        yield


class Engine:
    """One engine on one fake accelerator, over a store of its own in memory."""

    def __init__(self, plan: Plan, layout: Layout, model: Path, accelerator: Accelerator) -> None:
        self.plan, self.layout, self.accelerator = plan, layout, accelerator
        self._random = random.Random(plan.seed)
        self._chains: dict[str, Chain] = {}
        self._prompts: dict[str, int] = {}
        config = configured(model, plan, layout)
        [cache, *_] = caches = get_kv_cache_configs(
            config, [dict(layout.specs)] * plan.ranks, [1 << 30] * plan.ranks
        )
        cache.kv_cache_layout = layout.order
        whole = generate_scheduler_kv_cache_config(caches)
        config.cache_config.num_gpu_blocks = cache.num_blocks
        sizes = [group.kv_cache_spec.block_size for group in cache.kv_cache_groups]
        config.cache_config.block_size = min(sizes)
        block, self.hash_tokens = resolve_kv_cache_block_sizes(whole, config)
        made = AsyncScheduler if plan.depth > 1 else Scheduler
        self.scheduler = made(
            config, whole, StructuredOutputManager(config), block, self.hash_tokens, log_stats=False
        )
        self.scheduler.use_v2_model_runner = plan.v2
        # What the platform of this machine rules out.
        self.scheduler.defer_block_free = plan.depth > 1
        encoder = None
        if plan.items:
            self._items: Any = ECFactory.create_connector(config, ECConnectorRole.WORKER)
            width = config.model_config.get_inputs_embeds_size()
            encoder = Encoder(accelerator, self._items, width)
        self._encoder = encoder
        self._connector: Any = self.scheduler.connector
        self._connector.bind_gpu_block_pool(self.scheduler.kv_cache_manager.block_pool)
        self._half = self._connector.sub_connectors[0] if plan.beside else self._connector
        speculates = config.speculative_config is not None
        self.runners: list[Runner] = []
        for rank in range(plan.ranks):
            with mock.patch.object(connectors.kv.connector, "_place", lambda _, n=rank: Place(n, plan.ranks)):
                worker = KVConnectorFactory.create_connector(
                    of_rank(config, rank), KVConnectorRole.WORKER, cache
                )
            stream = Stream(accelerator) if rank else accelerator.current
            with accelerator.within(stream):
                runner = Runner(
                    accelerator, cache, worker, plan.v2, self._chains, encoder, plan.drafts, layout, rank,
                    speculates, stream,
                )  # fmt: skip
            self.runners.append(runner)
            if plan.beside:
                worker.sub_connectors[1].writes = runner.write_now
        self._aggregator = KVOutputAggregator(plan.ranks)
        handshake = {(0, one.rank): one.connector.get_handshake_metadata() for one in self.runners}
        self.groups = handshake[0, 0].groups
        self._connector.set_xfer_handshake_metadata_pp_aware(handshake)
        self.promises = Promises(accelerator, layout, self.groups, self.hash_tokens)
        hasher = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        self._hasher = get_request_block_hasher(self.hash_tokens, hasher)
        self._in_flight: deque[Launched] = deque()
        #: Requests whose loads are under way, and those that have ended and are handed over.
        self._loading: set[str] = set()
        self._sending: set[str] = set()
        self.found = Found()
        #: Prompts that were handed over, with what their next engine is told.
        self._handed: list[tuple[list[int], dict[str, Any]]] = []

    # ---- requests -------------------------------------------------------------------------------

    def _prompt(self) -> list[int]:
        """One of a few families, up to one of a few lengths, and then perhaps something of its own."""
        family = random.Random(self._random.randrange(4))
        prompt = [family.randrange(VOCABULARY) for _ in range(150)][: self._random.choice(LENGTHS)]
        own = self._random.randrange(12) if self._random.random() < 0.5 else 0
        return prompt + [self._random.randrange(VOCABULARY) for _ in range(own)]

    def _add(self, name: str) -> None:
        extra: dict[str, Any] = {}
        prompt, features = self._prompt(), []
        seen = list(prompt)
        if self._encoder is not None:
            for offset in range(2, len(prompt) - ROWS, 24):
                number = prompt[offset] % PICTURES
                # What vLLM is told of a picture is a placeholder; the model sees which it is.
                prompt[offset : offset + ROWS] = [VOCABULARY] * ROWS
                seen[offset : offset + ROWS] = [1000 + number] * ROWS
                features.append(feature(number, offset))
            self._encoder.knows(name, features)
        elif self._handed:
            prompt, extra = self._handed.pop(0)
            seen, prompt = list(prompt), list(prompt)
            self.found.handed_over += 1
        elif self.plan.handoffs and self._random.random() < 0.5:
            extra = {"do_remote_decode": True}
        self._chains[name], self._prompts[name] = Chain(seen, VOCABULARY), len(prompt)
        answers = 1 if extra.get("do_remote_decode") else self._random.randrange(1, 40)
        params = SamplingParams(
            max_tokens=answers, ignore_eos=True, extra_args={"kv_transfer_params": extra} if extra else None
        )
        params.update_from_generation_config({}, eos_token_id=None)
        request = Request(name, prompt, params, None, mm_features=features, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        tracked = self._half._scheduler.requests.get(name)
        if tracked is not None and tracked.sending is not None:
            self.promises.learn_prompt(tracked.sending.names, tracked.sending.tokens, self._chains[name])

    # ---- steps ----------------------------------------------------------------------------------

    def run(self) -> Found:
        """Serve all requests of the plan, and return what was found."""
        names = [f"r{i}" for i in range(self.plan.requests)]
        end, added = time.monotonic() + PATIENCE_S, 0
        with self.promises.kept():
            while names or self._handed or self.scheduler.has_requests() or self._in_flight:
                wanted = self.plan.until_found
                if self.found.deaths or (
                    wanted is not None and any(wanted in one for one in self.accelerator.reports)
                ):
                    break
                assert time.monotonic() < end, f"the engine hangs: {self.scheduler.get_request_counts()}"
                while (
                    (names or self._handed)
                    and len(self.scheduler.requests) < 8
                    and self._random.random() < 0.6
                ):
                    added += 1
                    self._add(names.pop(0) if names and not self._handed else f"h{added}")
                try:
                    self._interfere()
                    self._step()
                except Exception as exc:
                    self.found.deaths += 1
                    last = traceback.extract_tb(exc.__traceback__)[-1]
                    self.accelerator.report(f"the engine dies: {exc!r} in {last.name}, line {last.lineno}")
            halves = [*(one.connector for one in self.runners), self._connector]
            halves += [self._items, self.scheduler.ec_connector] if self._encoder is not None else []
            for half in halves:
                half.shutdown()
            self.accelerator.finish_all()
        found = self.found
        found.reads_checked, found.blocks_saved = (
            sum(one.checked for one in self.runners),
            self.promises.checked,
        )
        found.wrong_bytes = sum(one.wrong_bytes for one in self.runners) + self.promises.wrong_bytes
        found.rejected = self.runners[0].rejected
        for runner in self.runners:
            half = runner.connector.sub_connectors[0] if self.plan.beside else runner.connector
            counted = half._worker._store.counters.snapshot()
            found.blocks_dropped += counted.get("save_blocks{dropped}", 0)
        found.items_saved = self.promises.items
        if self._encoder is not None:
            found.items_loaded = self._encoder.loads
            found.reads_checked += self._encoder.checked
            found.wrong_bytes += self._encoder.wrong_bytes
        found.reports = tuple(self.accelerator.reports)
        return found

    def _interfere(self) -> None:
        """Abort a request, or reset the engine's cache, now and then."""
        running = list(self.scheduler.requests)
        loading = [name for name in running if name in self._loading]
        if running and self._random.random() < self.plan.aborts:
            self._abort(self._random.choice(running))
        if loading and self._random.random() < self.plan.aborts_loading:
            self._abort(self._random.choice(loading))
        if self.plan.resets and self._random.random() < 0.03:
            self._reset()

    def _abort(self, name: str) -> None:
        if not self.scheduler.requests[name].is_finished():
            self.found.aborts += 1
            self.found.aborts_loading += name in self._loading
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def _reset(self) -> None:
        if self._random.random() < 0.5:
            # As trainers do: no step is in flight.
            while self._in_flight:
                self._end_step()
        try:
            self.found.resets += self.scheduler.reset_prefix_cache(
                reset_running_requests=self._random.random() < 0.7,
                reset_connector=self._random.random() < 0.3,
            )
        except RuntimeError as exc:
            # It has preempted all requests by then. A step in flight may hold blocks, and what is loaded.
            if kept := self._kept():
                self.accelerator.report(
                    f"a reset fails over blocks of {kept} that only the store keeps: {exc}"
                )

    def _kept(self) -> list[str]:
        """Requests that have ended and have blocks, though they are neither loaded nor handed over."""
        ended = [name for name, one in self.scheduler.requests.items() if one.is_finished()]
        return [name for name in ended if name not in self._loading | self._sending]

    def _look_who_waits(self) -> None:
        """Report a request that waits for blocks which nobody but the store has."""
        scheduler, manager = self.scheduler, self.scheduler.kv_cache_manager
        waiting = [one for one in scheduler.waiting if one.status is RequestStatus.WAITING]
        kept = self._kept()
        if not waiting or not kept or len(scheduler.running) >= scheduler.max_num_running_reqs:
            return
        free = manager.block_pool.get_num_free_blocks()
        some = sum(len(blocks) for name in kept for blocks in manager.get_block_ids(name))
        sizes = [group.kv_cache_spec.block_size for group in scheduler.kv_cache_config.kv_cache_groups]
        lacks = sum(-(-waiting[0].num_tokens // size) for size in sizes)
        if free < lacks <= free + some:
            self.accelerator.report(
                f"{waiting[0].request_id} waits for {lacks - free} blocks, and {some} of {kept}, which have "
                "ended, are kept for the store"
            )

    def _step(self) -> None:
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self._look_who_waits()
            for name, request in self.scheduler.requests.items():
                self.promises.learn(request, self._chains[name])
            metadata = output.kv_connector_metadata
            loads = (metadata.metadata[0] if self.plan.beside else metadata).loads
            self.found.loads += len(loads)
            self._loading.update(one.request_id for one in loads)
            self.found.blocks_loaded += sum(run.count for one in loads for g in one.groups for run in g.runs)
            self.found.preemptions += len(output.preempted_req_ids or ())
            self._in_flight.append(self._launch(output))
            if not output.num_scheduled_tokens:
                time.sleep(0.001)
            elif len(self._in_flight) < self.plan.depth:
                return
        if self._in_flight:
            self._end_step()

    def _end_step(self) -> None:
        """Let the oldest step that was launched end, and the scheduler hear of it."""
        launched = self._in_flight.popleft()
        self.accelerator.dawdle(0.25)
        for sampled in launched.sampled:
            self.accelerator.reach(sampled, sampled.recorded)
        known = dict(self.scheduler.requests)
        told = launched.result.kv_connector_output
        made = self.scheduler.update_from_output(launched.output, launched.result)
        if told is not None:
            self._loading -= told.finished_recving or set()
            self._sending -= told.finished_sending or set()
            meta = told.kv_connector_worker_meta
            for part in getattr(meta, "metadata", (meta,)):
                reasons = getattr(part, "load_reasons", {})
                self.found.cuts += sum(reason == CUT for reason in reasons.values())
        for name, request in known.items():
            self.promises.learn(request, self._chains[name])
        for one in (one for out in made.values() for one in out.outputs):
            self.found.finished += one.finished
            if one.kv_transfer_params:
                prompt = self._chains[one.request_id].tokens[: self._prompts[one.request_id]]
                self._handed.append((prompt, one.kv_transfer_params))
                self._sending.add(one.request_id)
        if self.runners[0].speculates:
            names = launched.result.req_ids
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, [[0] * DRAFTS for _ in names]))

    def _launch(self, output: Any) -> Launched:
        """Launch a step on all ranks. Returns what the scheduler gets of them."""
        steps = []
        for runner in self.runners:
            with self.accelerator.within(runner.stream):
                steps.append(runner.launch(output))
        for step in steps[1:]:
            steps[0].sampled += step.sampled
        self._aggregator.aggregate([step.result for step in steps])
        return steps[0]


def serve(plan: Plan, layout: Layout, faults: Sequence[Any] = ()) -> tuple[Found, Accelerator]:
    """One run. `faults` are context managers, entered with the accelerator for as long as it lasts."""
    # States are neither written by position nor taken back.
    plan = replace(plan, beside=plan.beside and layout.mamba_mode == "none")
    model = build(MODELS, "image" if plan.items else "text")
    accelerator = Accelerator(plan.seed, plan.mode, delay_s=plan.delay_s)
    chances = random.Random(plan.seed)
    engine_thread = threading.current_thread()
    accelerator.refuses = lambda: (
        threading.current_thread() is not engine_thread and chances.random() < plan.refused
    )
    read, put = MemoryPayloads.read, MemoryPayloads.put

    def late(*args: Any, **kwargs: Any) -> Any:
        if chances.random() < plan.late:
            time.sleep(0.08)
        return read(*args, **kwargs)

    def slow(*args: Any, **kwargs: Any) -> None:
        if chances.random() < plan.slow:
            time.sleep(0.05)
        put(*args, **kwargs)

    # A model that computes nothing takes no time: what a token takes is said instead.
    prefill = Prefill(chances.choice((300.0, 3000.0, 20000.0)))

    with contextlib.ExitStack() as stack:
        stack.enter_context(on(accelerator))
        for patch in on_device() if plan.items else ():
            stack.enter_context(patch)
        stack.enter_context(mock.patch.object(MemoryPayloads, "read", late))
        stack.enter_context(mock.patch.object(MemoryPayloads, "put", slow))
        if plan.adaptive:
            stack.enter_context(mock.patch.object(TokenCost, "prefill", lambda _: prefill))
        engine = Engine(plan, layout, model, accelerator)
        # Not before: the connector's own test at the start finds some of them.
        for fault in faults:
            stack.enter_context(fault(accelerator))
        return engine.run(), accelerator
