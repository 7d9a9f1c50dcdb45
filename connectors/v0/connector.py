"""KVStoreConnectorV0: the store behind vLLM's first KV connector interface, for engines that still speak it.

    --kv-transfer-config '{"kv_connector": "KVStoreConnectorV0", "kv_connector_module_path": "connectors.v0",
      "kv_role": "kv_both", "kv_connector_extra_config": {"payloads": "file:///DIR"}}'

The contract (vllm/distributed/kv_transfer/kv_connector/base.py up to vLLM 0.10): the model runner calls
`recv_kv_caches_and_hidden_states` before the forward pass of every step that has prompts, and
`send_kv_caches_and_hidden_states` after it. The first returns (hidden states, bypass, model input). With
bypass the runner leaves out the forward pass of the whole step and samples from the hidden states given;
without, it runs as if there had been no call.

The interface is synchronous: the model runner's thread waits for the answer. The wait is bounded by
kv.match_deadline_s (the index) and kv.load_deadline_s (the bytes); past them the step is computed. Set the
second to less than a prefill takes.

Bypass is all or nothing, for a step and for the ranks. A step is served only if it holds nothing but prompts,
all from their first token on. For each prompt the KV of every token must be there and verified, and the
hidden state from which its next token is sampled. Missing, damaged or late bytes make the answer (None,
False, model input). No error reaches the engine once it runs.
"""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Sequence
from typing import Any

from connectors.engine.guard import guarded
from connectors.engine.opening import open_for
from connectors.v0.identity import engine_of, is_unchanged, model_fields, refuse_unsupported
from connectors.v0.pages import Unsupported
from connectors.v0.peers import Alone, Peers, tensor_parallel_peers
from connectors.v0.planning import Prompt, adapter_key
from connectors.v0.stage import Step, read_step
from connectors.v0.worker import V0Worker
from kvstore import __version__
from kvstore.build import load_settings
from kvstore.errors import ConfigError

log = logging.getLogger(__name__)


def _interface() -> type:
    """Returns vLLM's base class, which its factory insists on and has loaded; else `object`."""
    module = sys.modules.get("vllm.distributed.kv_transfer.kv_connector.base")
    base = getattr(module, "KVConnectorBase", None)
    # Later versions keep the name for another interface.
    return base if base is not None and hasattr(base, "recv_kv_caches_and_hidden_states") else object


_BASE: Any = _interface()


class KVStoreConnectorV0(_BASE):
    """A worker's connector, made by the engine's factory. Everything runs on that worker's thread."""

    def __init__(self, rank: int, local_rank: int, config: Any, *, peers: Peers | None = None) -> None:
        """`rank` is the worker's rank in the world; `local_rank` is part of the interface and not needed.

        `peers` are the tensor-parallel ranks, by default those of the vLLM engine that this runs in. Raises
        ConfigError for what can't be served; nothing later raises.
        """
        self._settings = load_settings(config.kv_transfer_config.kv_connector_extra_config)
        refuse_unsupported(config, self._settings)
        engine = engine_of(rank, config)
        fields = model_fields(config, self._settings)
        if peers is None:
            peers = _peers() if engine.tp > 1 else Alone()
        self._peers = peers
        self._said: set[str] = set()
        self._saves = 0
        store = open_for(self._settings, f"v0 connector, rank {rank}")
        self._worker = V0Worker(
            store,
            engine,
            fields,
            str(config.cache_config.cache_dtype),
            unchanged=lambda: is_unchanged(config, self._settings, fields),
        )
        self._clock = store.clock
        # The smallest number that any rank has drawn is as random, and all of them know it.
        self._nonce = peers.least(secrets.randbits(62))
        # Ranks commit one segment together, so they are one writer.
        store.backends.writer.adopt(f"kvstore/{__version__} v0-{self._nonce:016x}")

    def recv_kv_caches_and_hidden_states(
        self, model_executable: Any, model_input: Any, kv_caches: list[Any]
    ) -> tuple[Any, bool, Any]:
        """Fill the paged caches and return (hidden states, True, model input), or (None, False, model input).

        To be called before the forward pass. All tensor-parallel ranks get the same answer.
        """
        output = self._load(model_executable, model_input, kv_caches)
        # Last, so that nothing of this rank can fail after it has agreed.
        served = self._agreed(output is not None)
        self._worker.decided(served=served)
        return (output, True, model_input) if served else (None, False, model_input)

    def send_kv_caches_and_hidden_states(
        self,
        model_executable: Any,
        model_input: Any,
        kv_caches: list[Any],
        hidden_or_intermediate_states: Any,
    ) -> None:
        """Save the step's prompts: copy them to host memory now, and do the rest on the store's threads."""
        # Counted first and whatever happens: all ranks must name the segments of a save alike.
        self._saves += 1
        created_s = self._now()
        self._save(model_executable, model_input, kv_caches, hidden_or_intermediate_states, created_s)

    def extra_keys(self, model_input: Any, prompts: Sequence[Prompt | None]) -> Sequence[bytes | None]:
        """Returns what else than tokens identifies each prompt: b"" for nothing, None for "don't cache it".

        A subclass may know better, for example the hashes of a request's images: what it returns becomes a
        part of the prompt's name. It must be the same on every rank, and the same only for requests whose KV
        is the same. By default, prompts with images, prompt adapters or embeddings are not cached. v0 says
        nothing about them that would be the same in another engine; those with a LoRA adapter are cached only
        with identity.lora = "trust", by its name and path.
        """
        unknown = ("multi_modal_kwargs", "prompt_adapter_requests", "encoder_input_tokens")
        if any(_some(getattr(model_input, name, None)) for name in (*unknown, "inputs_embeds")):
            return [None] * len(prompts)
        requests = getattr(model_input, "lora_requests", None)
        if not requests:
            return [b""] * len(prompts)
        trusted = requests if self._settings.identity.lora == "trust" else ()
        adapters = {one.lora_int_id: f"{one.lora_name}\0{one.lora_path}" for one in trusted}
        mapping = model_input.lora_mapping.index_mapping
        return [
            None if one is None else adapter_key(mapping[one.start : one.last + 1], adapters)
            for one in prompts
        ]

    @guarded(None)
    def close(self) -> None:
        """Let queued saves finish for transfers.drain_s, then release everything. Idempotent."""
        self._worker.close()

    # ---- guarded --------------------------------------------------------------------------------

    @guarded(None)
    def _load(self, model_executable: Any, model_input: Any, kv_caches: list[Any]) -> Any:
        step = self._step(model_input, kv_caches)
        if step is None:
            return None
        keys = self.extra_keys(model_input, step.prompts)
        try:
            return self._worker.load(model_executable, model_input, kv_caches, step, keys)
        except Unsupported as exc:
            self._say(exc)
            return None

    @guarded(None)
    def _save(
        self, model_executable: Any, model_input: Any, kv_caches: list[Any], output: Any, created_s: int
    ) -> None:
        step = self._step(model_input, kv_caches)
        if step is None:
            return
        keys = self.extra_keys(model_input, step.prompts)
        try:
            self._worker.save(
                model_executable, kv_caches, output, step, keys,
                nonce=self._nonce, number=self._saves, created_s=created_s,
            )  # fmt: skip
        except Unsupported as exc:
            self._say(exc)

    def _step(self, model_input: Any, kv_caches: list[Any]) -> Step | None:
        if not kv_caches or not kv_caches[0].numel():
            return None  # the run that measures memory has no caches yet
        try:
            return read_step(model_input)
        except Unsupported as exc:
            self._say(exc)
            return None

    @guarded(False)
    def _agreed(self, mine: bool) -> bool:
        return self._peers.least(int(mine)) == 1

    @guarded(0)
    def _now(self) -> int:
        return self._peers.least(int(self._clock()))

    def _say(self, exc: Unsupported) -> None:
        """Warns once for each text: it would be the same at every step."""
        text = str(exc)
        if text not in self._said and len(self._said) < 16:
            self._said.add(text)
            log.warning("kvstore v0: %s is not supported; such steps run without the cache", text)


def _some(value: Any) -> bool:
    """Returns whether a field that may be a tensor, a mapping or None holds something."""
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


def _peers() -> Peers:
    try:
        return tensor_parallel_peers()
    except (ImportError, AssertionError) as exc:
        raise ConfigError(
            f"kvstore: tensor parallelism without vLLM's tensor-parallel group ({exc}); give `peers`"
        ) from exc
