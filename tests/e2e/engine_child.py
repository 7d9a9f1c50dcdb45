"""The process that holds the engine of `tests.e2e.engine`: reads one JSON request a line, answers in order.

Started as `python -m tests.e2e.engine_child`. Descriptor 0 carries requests, descriptor 1 answers; both are
moved away before vLLM is imported, so that nothing it or a library prints can break the protocol, and
whatever is printed goes to the log that the parent gave as descriptor 2.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import copy
import faulthandler
import gc
import io
import json
import os
import queue
import select
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from tests.believing import believe_writers
from tests.e2e import engine_patches
from tests.waiting import PATIENCE_S

IDLE_STEP_S = 0.001


class EncoderCounter:
    """Mixed into vLLM's worker (`worker_extension_cls`), so the count is kept where the model runs."""

    model_runner: Any
    _items_encoded: int

    def count_encoder_items(self) -> None:
        """Starts counting. Called after start-up, whose profiling runs the encoder too."""
        self._items_encoded = 0
        model = self.model_runner.get_model()
        encode = getattr(model, "embed_multimodal", None)
        if encode is None:
            return

        def counted(**inputs: Any) -> Any:
            outputs = encode(**inputs)
            self._items_encoded += len(outputs)
            return outputs

        model.embed_multimodal = counted

    def encoder_items(self) -> int:
        return self._items_encoded

    def make_pipeline_buffers(self) -> None:
        """What a pipeline's later stages receive into. vLLM makes it in a warm-up that the CPU skips."""
        runner = self.model_runner
        if runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )


class Served:
    """One engine and the verbs the parent may call on it. All of it runs on the main thread."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        # The ~300,000 objects that imports leave behind are never garbage; without this each full
        # collection, and vLLM forces several while starting, takes 0.3 s to find that out.
        gc.disable()
        from vllm import LLM

        gc.freeze()
        gc.enable()
        if arguments.pop("split_mamba2_prefills", False):
            engine_patches.split_mamba2_prefills()
        engine_patches.fork_processes()
        if arguments.get("async_scheduling"):
            engine_patches.allow_async_scheduling()
        believe_writers()
        self.slow = engine_patches.SlowTransfers()
        self.llm = LLM(**arguments)
        self._model = Path(arguments["model"])
        self.llm.collective_rpc("count_encoder_items")
        if arguments.get("pipeline_parallel_size", 1) > 1:
            self.llm.collective_rpc("make_pipeline_buffers")
        self._prefills: dict[str, Any] = {}
        self._first_token_at: dict[str, float] = {}
        self._core_outputs = 0
        self._sessions = self._idle_steps = 0
        self._observe_core_outputs()

    def _observe_core_outputs(self) -> None:
        """Keeps each request's prefill stats and the time of its first token.

        `RequestOutput` has only the sum of locally and externally cached tokens, and with `LLM` only
        final outputs arrive at all; the engine core's own outputs carry both, in one process and in two.
        """
        processor = self.llm.llm_engine.output_processor
        process = processor.process_outputs

        def observed(outputs: Any, *rest: Any, **named: Any) -> Any:
            now = time.monotonic()
            self._core_outputs += len(outputs)
            for output in outputs:
                state = processor.request_states.get(output.request_id)
                if state is None:
                    continue
                name = state.external_req_id
                if output.prefill_stats is not None:
                    self._prefills.setdefault(name, output.prefill_stats)
                if output.new_token_ids:
                    self._first_token_at.setdefault(name, now)
            return process(outputs, *rest, **named)

        processor.process_outputs = observed

    def generate(
        self,
        prompts: list[dict[str, Any]],
        max_tokens: int,
        timeout_s: float,
        abort_after: dict[str, int | str],
        sampling: dict[str, Any],
    ) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        options = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, **sampling}
        self._prefills.clear()
        self._first_token_at.clear()
        began = time.monotonic()
        with engine_patches.of_sessions(engine, prompts):
            ids = self.llm.enqueue(
                [_decoded(prompt, self._model) for prompt in prompts],
                [
                    SamplingParams(max_tokens=one.get("max_tokens", max_tokens), **options | _hinted(one))
                    for one in prompts
                ],
                lora_request=[_adapter(prompt) for prompt in prompts],
                use_tqdm=False,
            )
        # The engine's own ids carry a random suffix; outputs carry the plain one.
        names = [one.split("-")[0] for one in ids]
        aborts = {ids[int(i)]: when for i, when in abort_after.items()}
        finished: dict[str, Any] = {}
        steps = 0
        while engine.has_unfinished_requests():
            if time.monotonic() - began > timeout_s:
                engine.abort_request(names)
                raise TimeoutError(f"requests unfinished after {timeout_s:g} s and {steps} steps")
            due = [one for one, when in aborts.items() if self._is_due(one, when, steps)]
            if due:
                engine.abort_request(due, internal=True)
                for one in due:
                    del aborts[one]
                continue
            self._step(finished)
            steps += 1
        return [self._result(finished.get(name), name, began) for name in names]

    def _is_due(self, request_id: str, when: int | str, steps: int) -> bool:
        """Whether a request is to be aborted now: after so many steps, or in the state that `when` names."""
        if isinstance(when, int):
            return when <= steps
        from vllm.v1.request import RequestStatus

        request = self._scheduler.requests.get(request_id)
        if request is None:
            return False
        if when in ("waiting", "loading"):
            status = {"waiting": "WAITING", "loading": "WAITING_FOR_REMOTE_KVS"}[when]
            return steps > 0 and request.status is RequestStatus[status]
        if request.status is not RequestStatus.RUNNING:
            return False
        if when == "prefetched":
            return engine_patches.prefetched(self._scheduler)
        left = request.num_prompt_tokens - request.num_computed_tokens
        if when == "prefilling":
            return 0 < left < request.num_prompt_tokens
        if when == "saving":
            return left <= 0 and self.slow.under_way("writes") > 0
        raise ValueError(f"unknown state {when!r}")

    @property
    def _scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def session(self, turns: list[list[int]], max_tokens: int, timeout_s: float) -> list[dict[str, Any]]:
        """A streaming session: each turn's tokens are added to a request that goes on living."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self.llm.llm_engine
        params = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            max_tokens=max_tokens,
            output_kind=RequestOutputKind.DELTA,
        )
        tasks = engine.get_supported_tasks()

        def request(prompt: list[int], request_id: str, resumable: bool) -> Any:
            return engine.input_processor.process_inputs(
                request_id, {"prompt_token_ids": prompt}, params, tasks, resumable=resumable
            )

        def hand_in(made: Any) -> None:
            # Both halves append to the list of tokens; between two processes each has its own.
            theirs = copy.copy(made)
            theirs.prompt_token_ids = list(made.prompt_token_ids)
            engine.output_processor.add_request(made, None)
            engine.engine_core.add_request(theirs)

        self._sessions += 1
        name = f"session{self._sessions}"
        # Says at the end that no more input comes; its token is ignored.
        last = request([0], name, resumable=False)
        engine.input_processor.assign_request_id(last)
        self._prefills.clear()
        results = []
        for turn in turns:
            began = time.monotonic()
            self._first_token_at.clear()
            made = request(turn, last.request_id, resumable=True)
            made.external_req_id = name
            hand_in(made)
            tokens: list[int] = []
            while len(tokens) < max_tokens:
                if time.monotonic() - began > timeout_s:
                    engine.abort_request([name])
                    raise TimeoutError(f"a turn unfinished after {timeout_s:g} s")
                for output in engine.step():
                    tokens += output.outputs[0].token_ids
            results.append(self._result(None, name, began) | {"token_ids": tokens, "finish_reason": None})
        hand_in(last)
        return results

    def held(self) -> dict[str, int]:
        pool = self._scheduler.kv_cache_manager.block_pool
        return {
            "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "requests": len(self._scheduler.requests),
            "transfers": self.slow.under_way("reads") + self.slow.under_way("writes"),
            **engine_patches.held_by_connector(self._scheduler.connector),
        }

    def idle_steps(self) -> int:
        return self._idle_steps

    def delay_transfers(self, read_s: float, write_s: float) -> None:
        self.slow.read_s, self.slow.write_s = read_s, write_s

    def _step(self, finished: dict[str, Any]) -> None:
        before = self._core_outputs
        for output in self.llm.llm_engine.step():
            if output.finished:
                finished[output.request_id] = output
        if self._core_outputs == before:
            self._idle_steps += 1
            # What EngineCoreProc does between steps that had nothing to run: let transfer threads have
            # the interpreter. In one process no one else does it.
            time.sleep(IDLE_STEP_S)

    def _result(self, output: Any, name: str, began: float) -> dict[str, Any]:
        prefill = self._prefills.get(name)
        first = self._first_token_at.get(name)
        completion = output.outputs[0] if output is not None else None
        return {
            "token_ids": list(completion.token_ids) if completion else [],
            "finish_reason": completion.finish_reason if completion else "abort",
            "prompt_tokens": len(output.prompt_token_ids) if output is not None else 0,
            "cached_tokens": (output.num_cached_tokens or 0) if output is not None else 0,
            "local_tokens": prefill.num_local_cached_tokens if prefill else 0,
            "external_tokens": prefill.num_external_cached_tokens if prefill else 0,
            "ttft_s": first - began if first is not None else None,
            "ec_params": output.ec_transfer_params if output is not None else None,
            "kv_params": output.kv_transfer_params if output is not None else None,
        }

    def idle(self, seconds: float) -> None:
        """Steps the engine without requests, so that a connector's polled work can end."""
        began = time.monotonic()
        finished: dict[str, Any] = {}
        quiet = 0
        # On a busy machine transfers take longer than any time; what they lead to comes with later steps.
        while (spent := time.monotonic() - began) < seconds or (quiet < 3 and spent < seconds + PATIENCE_S):
            moving = self.slow.under_way("reads") + self.slow.under_way("writes")
            quiet = 0 if moving else quiet + 1
            self._step(finished)
            time.sleep(0.01)

    def encoder_calls(self) -> int:
        return int(max(self.llm.collective_rpc("encoder_items")))

    def metrics(self) -> dict[str, float]:
        from prometheus_client import REGISTRY

        sums: dict[str, float] = {}
        for metric in REGISTRY.collect():
            for sample in metric.samples:
                if not sample.name.endswith(("_bucket", "_created")):
                    sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    def reset_prefix_cache(self, reset_connector: bool) -> bool:
        return bool(self.llm.reset_prefix_cache(reset_connector=reset_connector))

    def reset_mm_cache(self) -> None:
        """Forgets processed images and, in the worker, their encoder outputs."""
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def evaluate(self, source: str) -> Any:
        value = eval(source, {"llm": self.llm, "served": self})
        return value if _is_json(value) else repr(value)

    def shutdown(self) -> None:
        # vLLM collects garbage twice on the way out (1.3 s); this process ends in the next line.
        gc.freeze()
        gc.collect = lambda generation=2: 0
        self.llm.llm_engine.engine_core.shutdown(timeout=60)


def _adapter(prompt: dict[str, Any]) -> Any:
    """The LoRA adapter of a prompt: the folder `lora`, whose name ends in the adapter's number."""
    if "lora" not in prompt:
        return None
    from vllm.lora.request import LoRARequest

    folder = Path(prompt["lora"])
    return LoRARequest(folder.name, int(folder.name.rpartition("-")[2]), str(folder))


def _decoded(prompt: dict[str, Any], model: Path) -> dict[str, Any]:
    made: dict[str, Any] = {
        key: prompt[key] for key in ("prompt", "prompt_token_ids", "cache_salt") if key in prompt
    }
    if prompt.get("images"):
        from PIL import Image

        made["multi_modal_data"] = {
            "image": [
                Image.open(io.BytesIO(base64.b64decode(image))).convert("RGB") for image in prompt["images"]
            ]
        }
    if prompt.get("descriptions"):
        import torch

        made["multi_modal_data"] = {
            "image": {
                name: torch.tensor([one[name] for one in prompt["descriptions"]])
                for name in prompt["descriptions"][0]
            }
        }
    if prompt.get("embeds_of"):
        from safetensors import safe_open

        with safe_open(model / "model.safetensors", "pt") as weights:
            made["prompt_embeds"] = weights.get_tensor("model.embed_tokens.weight")[prompt["embeds_of"]]
    if prompt.get("uuids"):
        made["multi_modal_uuids"] = {"image": prompt["uuids"]}
    return made


def _hinted(prompt: dict[str, Any]) -> dict[str, Any]:
    """What an HTTP client's kv_transfer_params become."""
    if "kv_hints" not in prompt:
        return {}
    return {"extra_args": {"kv_transfer_params": {"kv_hints": prompt["kv_hints"]}}}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _watch(requests: queue.SimpleQueue[bytes], source: int) -> None:
    """Hands lines to the main thread; ends the process group when the parent is gone.

    End of file is the sign, whatever killed the parent. Its process id is looked at as well, since a
    process that the parent forked may hold the pipe open.
    """
    parent = os.getppid()
    rest = b""
    while True:
        ready, _, _ = select.select([source], [], [], 1.0)
        if ready:
            chunk = os.read(source, 1 << 20)
            if not chunk:
                break
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                requests.put(line)
        elif os.getppid() != parent:
            break
    # The group holds the engine core and the worker of a multiprocess engine too.
    os.killpg(0, signal.SIGKILL)


def _error(exc: BaseException) -> dict[str, Any]:
    traceback.print_exception(exc)
    return {"error": type(exc).__name__, "message": str(exc)}


def main() -> None:
    source, sink = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    answers = os.fdopen(sink, "w", encoding="utf-8")
    faulthandler.register(signal.SIGUSR1, all_threads=True)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_watch, args=(requests, source), name="watchdog", daemon=True).start()

    try:
        served = Served(json.loads(requests.get()))
    except BaseException as exc:
        answer(_error(exc))
        sys.stderr.flush()
        os._exit(1)
    answer({"value": {"block_size": served.llm.llm_engine.vllm_config.cache_config.block_size}})

    while True:
        request = json.loads(requests.get())
        verb = request.pop("verb")
        if verb == "shutdown":
            break
        try:
            answer({"value": getattr(served, verb)(**request)})
        except Exception as exc:
            answer(_error(exc))

    try:
        served.shutdown()
        # Not sys.exit: tearing down the interpreter with torch loaded takes 2 s and proves nothing.
        # Exit hooks still run, since a connector may rely on one to drain.
        atexit._run_exitfuncs()
    except BaseException as exc:
        answer(_error(exc))
        sys.stderr.flush()
        os._exit(1)
    answer({"value": "bye"})
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
