"""What the connectors rely on in vLLM that no signature shows: one sentence each, and how to tell.

Where it can be called alone it is called; the rest is the order of calls in vLLM's source, so a mere
rewording may fail here as well. Then read what has changed, and say here how to tell now. What is so from
some version on is in NEWER.
"""

from __future__ import annotations

import importlib.util
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.connectors.test_vllm_contract import running

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

pytestmark = pytest.mark.engine


def text_of(module: str) -> str:
    """Source of a module, read without importing it."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text()


def source(module: str, function: str) -> str:
    """Source of a function or method, read without importing its module."""
    text = text_of(module)
    found = re.search(
        rf"^( *)(?:async )?def {function}\(.*?(?=^\1(?:def|async def|@|class)\b|\Z)", text, re.M | re.S
    )
    assert found is not None, f"{module} has no {function}"
    return textwrap.dedent(found[0])


def in_order(text: str, *parts: str) -> bool:
    """Whether the parts are all there, each first found after the one before."""
    at = 0
    for part in parts:
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


_SCHEDULER = "vllm.v1.core.sched.scheduler"
_RUNNER = "vllm.v1.worker.kv_connector_model_runner_mixin"
_EC_RUNNER = "vllm.v1.worker.ec_connector_model_runner_mixin"
_CORE = "vllm.v1.engine.core"
_WORKER = "vllm.v1.worker.gpu_worker"
#: Where vLLM's core has the handshake: from 0.33 on in a method of its own.
_HANDSHAKE = "_set_kv_connector_handshake_metadata" if running() >= (0, 33) else "__init__"


def _base() -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return KVConnectorBase_V1


def null_block() -> bool:
    from vllm.v1.core.block_pool import BlockPool

    pool = BlockPool(num_gpu_blocks=4, enable_caching=True, hash_block_size=16)
    return bool(pool.null_block.block_id == 0 and pool.null_block.is_null)


def fails_by_default() -> bool:
    from vllm.config import KVTransferConfig

    return bool(KVTransferConfig().kv_load_failure_policy == "fail")


def producers_deliver() -> bool:
    base = _base()
    both = SimpleNamespace(_kv_transfer_config=SimpleNamespace(is_kv_producer=True))
    return bool(base.requires_kv_delivery.fget(both))


def seeds() -> bool:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    def seed(algo: str) -> Any:
        return resolve_none_hash_seed(get_hash_fn_by_name(algo))

    return bool(seed("sha256") == seed("sha256") and seed("sha256_cbor") == seed("sha256"))


def hands_on() -> bool:
    base = _base()
    got: list[Any] = []
    stub = SimpleNamespace(set_xfer_handshake_metadata=got.append)
    base.set_xfer_handshake_metadata_pp_aware(stub, {(0, 1): "one", (0, 0): "two"})
    return got == [{1: "one", 0: "two"}]


def layout_beside(other: str) -> str | None:
    """The KV layout that an engine is asked for with our connector and another one."""
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    ours = {"kv_connector": "KVStoreConnector", "kv_connector_module_path": "connectors.kv"}
    both = [{**ours, "kv_role": "kv_both"}, {"kv_connector": other, "kv_role": "kv_both"}]
    transfer = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": both}
    )
    config: Any = SimpleNamespace(
        kv_transfer_config=transfer, attention_config=SimpleNamespace(hisparse_config=None)
    )
    asked: str | None = MultiConnector.get_required_kvcache_layout(config)
    return asked


FACTS: dict[str, Callable[[], bool]] = {
    "whichever KV layout another connector asks for, it gets beside ours (decision 0035)": lambda: (
        layout_beside("OffloadingConnector") == "LBHNC"
        and layout_beside("ExampleHiddenStatesConnector") == "LBNHC"
    ),
    "of two connectors that ask for different KV layouts the engine doesn't start": lambda: in_order(
        source("vllm.distributed.kv_transfer.kv_connector.v1.multi_connector", "get_required_kvcache_layout"),
        "if len(layouts) > 1:",
        "raise ValueError(",
    ),
    "VLLM_KV_CACHE_LAYOUT goes before what a connector asks for": lambda: in_order(
        source("vllm.v1.attention.backends.utils", "resolve_kv_cache_layout"),
        "(requested := envs.VLLM_KV_CACHE_LAYOUT)",
        "elif (connector := get_kv_connector_cache_layout(vllm_config))",
    ),
    "AMD's native attention kernels want heads outside of blocks (decision 0035)": lambda: in_order(
        source("vllm.v1.attention.backends.rocm_attn", "supported_kv_cache_layouts"),
        "just without the native kernels",
        "(KVCacheLayout.LHBNC, KVCacheLayout.LBHNC)",
    ),
    "block 0 is the null block, which no request owns (the canary writes to it)": null_block,
    "a failed load fails its request unless told otherwise (the connector insists on recompute)": (
        fails_by_default
    ),
    "connectors that save must say that a save may be lost (requires_kv_delivery)": producers_deliver,
    "the root of sha256 hashes is the same in every process": seeds,
    "without pipeline stages, handshakes come by tensor-parallel rank": hands_on,
    "a step's metadata is built before computed tokens advance": lambda: in_order(
        source(_SCHEDULER, "schedule"), "_build_kv_connector_meta(", "_update_after_schedule("
    ),
    "block tables are there when metadata is built, and gone before the workers get it": lambda: in_order(
        source(_SCHEDULER, "schedule"),
        "kv_connector_block_state=",
        "_build_kv_connector_meta(",
        "kv_connector_block_state = None",
    ),
    "a connector hears of a request when it arrives": lambda: in_order(
        source(_SCHEDULER, "add_request"), "connector.on_new_request(request)"
    ),
    "with several KV cache groups, failed block ids are an error": lambda: in_order(
        source(_SCHEDULER, "_handle_invalid_blocks"), "kv_cache_groups) > 1", "raise"
    ),
    "a request whose load failed starts over": lambda: in_order(
        source(_SCHEDULER, "_handle_failed_recving"), "recompute_kv_load_failures", "num_computed_tokens = 0"
    ),
    "after a load of the whole prompt its last token is computed": lambda: in_order(
        source(_SCHEDULER, "_update_waiting_for_remote_kv"),
        "request.num_computed_tokens == request.num_tokens",
        "request.num_tokens - 1",
    ),
    "a connector's caches can be reset with the engine's": lambda: in_order(
        source(_SCHEDULER, "reset_connector_cache"), "connector.reset_cache()"
    ),
    "freed blocks can be read before they are overwritten (handle_preemptions)": lambda: in_order(
        source("vllm.v1.worker.gpu_model_runner", "execute_model"),
        "handle_preemptions(",
        "maybe_get_kv_connector_output(",
    ),
    "a worker saves, then reports transfers, failed blocks and its metadata; with a drafter it saves "
    "last": lambda: in_order(
        source(_RUNNER, "_get_kv_connector_output"),
        "bind_connector_metadata(",
        "yield",
        "if not defer_finalize:",
        "wait_for_save()",
        "get_transfer_results(",
        "failed_recving",
        "get_block_ids_with_load_errors()",
        "build_connector_worker_meta()",
    ),
    "workers tell what fills their pages before the first request": lambda: in_order(
        source(_CORE, _HANDSHAKE),
        "get_kv_connector_handshake_metadata()",
        "set_xfer_handshake_metadata_pp_aware(",
    ),
    "an engine resets its caches and the connector's before its memory goes": lambda: (
        in_order(source(_CORE, "sleep"), "clear_cache=clear_prefix_cache", "model_executor.sleep(level)")
        and in_order(source(_CORE, "_finish_pause"), "if clear_cache:", "self._reset_caches()")
        and "reset_connector: bool = True" in source(_CORE, "_reset_caches")
        and in_order(source(_CORE, "release_kv_cache_memory"), "self._reset_caches()", ".discard(")
    ),
    "it doesn't fall asleep while a request holds a block": lambda: in_order(
        source(_SCHEDULER, "reset_prefix_cache"), "reset_running_requests and not reset_successful", "raise"
    ),
    "all copies that were queued have ended before memory goes": lambda: in_order(
        source(_WORKER, "sleep"), "accelerator.synchronize()", ".suspend(level)"
    ),
    "an encoder input is waited for before it is asked whether it is there": lambda: (
        in_order(source(_SCHEDULER, "schedule"), "_ec_transfer_pending(", "_try_schedule_encoder_inputs(")
        and "has_cache_item(" in source(_SCHEDULER, "_try_schedule_encoder_inputs")
    ),
    "a worker loads encoder outputs before the encoder runs, and only a consumer's does": lambda: in_order(
        source(_EC_RUNNER, "_get_ec_connector_output"),
        "bind_connector_metadata(",
        "if ec_connector.is_consumer:",
        "start_load_caches(encoder_cache",
        "yield",
        "build_connector_worker_meta()",
    ),
    "each encoder output is handed over by name": lambda: (
        "save_caches(encoder_cache=encoder_cache, mm_hash=mm_hash)"
        in source(_EC_RUNNER, "maybe_save_ec_to_connector")
    ),
}

#: What is so from some version on.
NEWER: dict[tuple[int, int], dict[str, Callable[[], bool]]] = {
    (0, 33): {
        "an engine that wakes up repeats the handshake before it goes on": lambda: (
            in_order(
                source(_CORE, "wake_up"),
                "self.model_executor.wake_up(tags)",
                f"self.{_HANDSHAKE}()",
                "self.resume_scheduler()",
            )
            and f"self.{_HANDSHAKE}()" in source(_CORE, "__init__")
        ),
        "a worker tells the connector before the KV cache's memory goes, and when it is back": lambda: (
            in_order(source(_WORKER, "sleep"), ".unregister_kv_caches()", ".suspend(level)")
            and in_order(source(_WORKER, "discard"), ".unregister_kv_caches()", ".discard(tags)")
            and in_order(source(_WORKER, "wake_up"), ".resume(tags)", ".restore_kv_caches()")
        ),
        "the second model runner reports before its drafter runs, and saves after it": lambda: in_order(
            text_of("vllm.v1.worker.gpu.kv_connector").partition("class ActiveKVConnector")[2],
            "def post_forward",
            "if not defer_finalize:",
            "wait_for_save()",
            "get_transfer_results(",
            "build_connector_worker_meta()",
            "def finalize_step",
            "wait_for_save()",
            "clear_connector_metadata()",
        ),
        "with a connector, block hashes cover no token beyond their block": lambda: in_order(
            source("vllm.config.vllm", "num_hash_lookahead_tokens"),
            "self.kv_transfer_config is not None",
            "return 0",
        ),
        "a promise that is cut to nothing is no load, and isn't waited for": lambda: in_order(
            source(_SCHEDULER, "schedule"),
            "cap_external_hit(",
            "load_kv_async &= num_external_computed_tokens > 0",
            "update_state_after_alloc(",
        ),
        "a load is deferred only beside layers in host memory, which are refused": lambda: in_order(
            text_of(_SCHEDULER), "self.defer_async_loads = (", "hisparse_host_num_blocks is not None"
        ),
        "a deferred load comes with what was promised": lambda: in_order(
            source(_SCHEDULER, "_drain_deferred_loads"), "update_state_after_alloc(", "num_tokens"
        ),
        "whoever enters a tier holds its manager's lock": lambda: (
            in_order(
                source("vllm.v1.kv_offload.tiering.manager", "_tier_poll_loop"),
                "self._lock.acquire(",
                "self.poll_tiers()",
                "self._lock.release()",
            )
            and "with self.manager.lock:"
            in text_of("vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler")
        ),
        "dtypes of pages are told apart by name: two of them have one number": lambda: _one_number(),
    },
}
FACTS |= {fact: so for since, facts in NEWER.items() if since <= running() for fact, so in facts.items()}


def _one_number() -> bool:
    from vllm.v1.kv_cache_interface import KVQuantMode

    return bool(KVQuantMode["CUSTOM"] is KVQuantMode["OCTAVE_K3V4"])


@pytest.mark.parametrize("fact", FACTS)
def test_fact(fact: str) -> None:
    assert FACTS[fact](), f"no longer so in this vLLM, or not recognised: {fact}"
