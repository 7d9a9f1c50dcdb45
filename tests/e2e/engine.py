"""Real vLLM engines in processes of their own, driven from tests.

    with Engine(model, kv={"index": url, "payloads": url}, log_path=tmp_path / "engine.log") as engine:
        [result] = engine.generate([{"prompt_token_ids": random_tokens(300, seed=1)}], max_tokens=16)

Every engine is a fresh process, so that what one finds of another's work came through the store, and so
that a test may end one by `kill -9`. An engine that dies or hangs raises `EngineDied` with the end of its
log; a request that vLLM refuses raises `EngineError` and leaves the engine usable.

An engine is forked from a process that has imported vLLM (tests.e2e.nursery), which makes it ready in one or
two seconds instead of five; one whose environment is another when vLLM is imported is started afresh. A test
that can ask several questions of one engine should. Two constructed before either is entered start side by
side. With `multiprocess` it is three processes (front end, engine core, worker), forked one from the other.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.e2e.nursery import Forked, Nursery
from tests.waiting import PATIENCE_S, until

ROOT = Path(__file__).resolve().parents[2]
#: Only an engine that hangs takes so long, to start and to answer.
START_TIMEOUT_S = ANSWER_S = 300.0

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # By default vLLM pins its threads to cores and its memory to a node, and two engines side by side pin
    # theirs to the same ones.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # The n-gram speculator counts its own, and leaves OpenMP with as many.
    "NUMBA_NUM_THREADS": "1",
    # Tiny models compute faster than anything can be loaded.
    "KVSTORE_KV__LOAD": "always",
    # Loopback only, and no guess from the machine's name.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    # Where vLLM remembers what it found out about a model's class, 5 s of importing in a process of its own.
    "VLLM_CACHE_ROOT": str(ROOT / ".cache" / "vllm"),
    "PYTHONUNBUFFERED": "1",
    # Importing from source each time would double the start.
    "PYTHONDONTWRITEBYTECODE": "",
}

_ARGUMENTS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 4096,
    "block_size": 32,
    "kv_cache_memory_bytes": 256 << 20,
    "distributed_executor_backend": "uni",
    "disable_log_stats": False,
    "mm_processor_cache_gb": 1,
    "seed": 0,
    # The CPU's rotary kernel ignores the strides of its inputs; MLA hands it slices, and what comes out
    # then depends on the rest of the batch. PyTorch's version agrees with transformers on all models here.
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},
    "worker_extension_cls": "tests.e2e.engine_child.EncoderCounter",
}


class EngineError(Exception):
    """The engine answered with an error: `kind` is the exception's class name there."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class EngineDied(Exception):
    """The engine's process ended, never started, or did not answer in time; the log's end is attached."""


@dataclass(frozen=True, slots=True)
class Result:
    """One request's outcome."""

    token_ids: list[int]
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int
    """`RequestOutput.num_cached_tokens`: local and external together."""
    local_tokens: int
    """Prompt tokens found in the engine's own prefix cache when the request was first scheduled."""
    external_tokens: int
    """Prompt tokens that the connector promised then. A load that fails later does not lower it."""
    ttft_s: float | None
    """From handing in the whole batch to this request's first token; None if it never had one."""
    ec_params: dict[str, Any] | None
    """`RequestOutput.ec_transfer_params`: what an EC producer says of the request's items."""
    kv_params: dict[str, Any] | None = None
    """`RequestOutput.kv_transfer_params`: what a prefill engine says of the prompt that it hands over."""


class Engine:
    """A vLLM engine in a process of its own; a context manager.

    `kv` and `ec` are the connectors' extra configs, `{"index": ..., "payloads": ...}`; None means no
    connector. `kv_config` and `ec_config` override any other key of the transfer configs. `arguments` go
    to `vllm.LLM` over the defaults above. `multiprocess` puts the engine core and the worker into processes
    of their own, as `vllm serve` does; `evaluate` then reaches the front end only.
    """

    def __init__(
        self,
        model: Path,
        *,
        log_path: Path,
        kv: Mapping[str, Any] | None = None,
        ec: Mapping[str, Any] | None = None,
        kv_role: str = "kv_both",
        ec_role: str = "ec_both",
        kv_config: Mapping[str, Any] | None = None,
        ec_config: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        multiprocess: bool = False,
        **arguments: Any,
    ) -> None:
        made: dict[str, Any] = {"model": str(model), **_ARGUMENTS}
        if not (model / "tokenizer.json").exists():
            made["skip_tokenizer_init"] = True
        model_config = json.loads((model / "config.json").read_text())
        if "mamba_chunk_size" in model_config:
            made["split_mamba2_prefills"] = True
        if "kv_lora_rank" in model_config:
            # The reference backend on every machine, rather than one for bfloat16 where there is AMX. It
            # has blocks of 16, no chunked prefill and no prefix cache of its own.
            made |= {"attention_backend": "CPU_MLA", "block_size": 16}
        if kv is not None:
            made["kv_transfer_config"] = {
                "kv_connector": "KVStoreConnector",
                "kv_connector_module_path": "connectors.kv",
                "kv_role": kv_role,
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": dict(kv),
                **(kv_config or {}),
            }
        if ec is not None:
            made["ec_transfer_config"] = {
                "ec_connector": "ECStoreConnector",
                "ec_connector_module_path": "connectors.ec",
                "ec_role": ec_role,
                "ec_connector_extra_config": dict(ec),
                **(ec_config or {}),
            }
        made.update(arguments)
        environment = {
            **os.environ,
            **_ENVIRONMENT,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if multiprocess else "0",
            **(env or {}),
        }
        if kv is not None and "load" in kv.get("kv", {}):
            del environment["KVSTORE_KV__LOAD"]
        self.log_path = log_path
        self.start_s: float | None = None
        """Seconds from process start to ready, once it is."""
        self.block_size = 0
        """Tokens per KV block, once ready."""
        self._unread = b""
        self._ready = False
        self._began = time.monotonic()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._process = _started(log_path, environment)
        self._send(made)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Returns once the engine can serve; raises EngineError with the reason why it will not."""
        if self._ready:
            return
        try:
            ready = self._receive(timeout_s)
        except EngineError:
            self._process.wait(PATIENCE_S)
            self._release()
            raise
        self._ready = True
        self.block_size = ready["block_size"]
        self.start_s = time.monotonic() - self._began

    def generate(
        self,
        prompts: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int = 16,
        cache_salt: str | None = None,
        timeout_s: float = ANSWER_S,
        abort_after: Mapping[int, int | str] | None = None,
        **sampling: Any,
    ) -> list[Result]:
        """Runs the prompts as one batch, greedily, to exactly `max_tokens` each or their own; results in
        order.

        A prompt has `prompt_token_ids`, `prompt` or `embeds_of` (token ids, handed in as their embeddings),
        and may have `images` (encoded, as `random_image` makes them), `uuids` (one for each image, None
        allowed), its own `cache_salt` and `max_tokens`, a `session`, `kv_hints` as in an HTTP client's
        `kv_transfer_params`, `actions` as an orchestrator attaches them (types and payloads), and `lora` (an
        adapter's folder, named `<name>-<number>`); instead of images `descriptions`, the model's fields that
        say how many placeholders each has.
        `abort_after` maps a prompt's position to the number of engine steps after which it is aborted, or
        to the state in which it is: `waiting` (for a place in the batch), `loading` (from the store),
        `prefilling` (some of its prompt is computed), `saving` (all of it is, and the store is writing) or
        `prefetched` (it runs, and what those that wait are to load is in the node's folder).
        Its result then has no tokens. `sampling` goes to SamplingParams.
        """
        value = self._call(
            "generate",
            timeout_s + 30,
            prompts=[_encoded(prompt, cache_salt) for prompt in prompts],
            max_tokens=max_tokens,
            timeout_s=timeout_s,
            abort_after={str(position): when for position, when in (abort_after or {}).items()},
            sampling=sampling,
        )
        return [Result(**result) for result in value]

    def start_generate(
        self, prompts: Sequence[Mapping[str, Any]], *, max_tokens: int = 16, **sampling: Any
    ) -> None:
        """Hands the batch in and returns at once: for tests that kill the engine while it works.

        The only thing that may follow is `kill()` or `finish_generate()`.
        """
        self.wait_ready()
        self._send(
            {
                "verb": "generate",
                "prompts": [_encoded(prompt, None) for prompt in prompts],
                "max_tokens": max_tokens,
                "timeout_s": ANSWER_S,
                "abort_after": {},
                "sampling": sampling,
            }
        )

    def finish_generate(self) -> list[Result]:
        return [Result(**result) for result in self._receive(ANSWER_S + 30)]

    def session(
        self, turns: Sequence[Sequence[int]], *, max_tokens: int = 16, timeout_s: float = ANSWER_S
    ) -> list[Result]:
        """Runs a streaming session, greedily: the tokens of each turn are handed in when the answer to the
        one before is there. One result per turn; what was cached is that of the first."""
        made = [list(turn) for turn in turns]
        value = self._call(
            "session", timeout_s * len(made) + 30, turns=made, max_tokens=max_tokens, timeout_s=timeout_s
        )
        return [Result(**result) for result in value]

    def held(self) -> dict[str, int]:
        """What the engine and its KV connector hold at the moment: KV blocks, requests, staging buffers,
        transfers. One process only."""
        return dict(self._call("held"))

    def idle_steps(self) -> int:
        """Steps so far that gave no request a token."""
        return int(self._call("idle_steps"))

    def delay_transfers(self, *, read_s: float = 0.0, write_s: float = 0.0) -> None:
        """From now on the store's reads and writes begin so much later. One process only."""
        self._call("delay_transfers", read_s=read_s, write_s=write_s)

    def encoder_calls(self) -> int:
        """Images the engine has run its encoder on since it became ready."""
        return int(self._call("encoder_calls"))

    def metrics(self) -> dict[str, float]:
        """Prometheus samples by name (`vllm:external_prefix_cache_hits_total`), summed over labels."""
        return dict(self._call("metrics"))

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """Forgets the engine's own KV blocks, so that the next request can only be served from outside."""
        return bool(self._call("reset_prefix_cache", reset_connector=reset_connector))

    def reset_mm_cache(self) -> None:
        """Forgets the engine's own encoder outputs and processed images."""
        self._call("reset_mm_cache")

    def idle(self, seconds: float) -> None:
        """Lets the engine step with nothing to do, for what a connector finishes in `get_finished`: for so
        long at least, and in one process until no transfer is under way."""
        self._call("idle", seconds + 2 * PATIENCE_S, seconds=seconds)

    def evaluate(self, source: str, *, within_s: float = ANSWER_S) -> Any:
        """The value of a Python expression in the engine's process, where `llm` is the `vllm.LLM`.

        Values that are not JSON come back as their repr. With one process the whole engine is in reach,
        scheduler and worker: `llm.llm_engine.engine_core.engine_core.scheduler`.
        """
        return self._call("evaluate", within_s, source=source)

    def kill(self) -> None:
        """`kill -9` of the engine and whatever it started; returns when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(PATIENCE_S)
        # The others of the group are no children of ours to wait for, and until they are gone they hold
        # files, sockets and memory.
        until(lambda: not group_members(self._process.pid), say=self.log)
        self._release()

    def close(self, timeout_s: float = ANSWER_S) -> None:
        """Shuts the engine down in order, connectors first; raises if it does not end with status 0."""
        if self._process.stdin is None or self._process.stdin.closed:
            return
        try:
            if self.alive:
                self.wait_ready()
                self._call("shutdown", timeout_s)
            status = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise self._died("did not end after its shutdown") from None
        finally:
            self.kill()
        if status != 0:
            raise self._died(f"ended with status {status}")

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def __enter__(self) -> Self:
        try:
            self.wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failure an orderly end is not worth waiting for, and its error would hide the first.
        if exc is not None:
            self.kill()
        else:
            self.close()

    def _call(self, verb: str, within_s: float = ANSWER_S, **arguments: Any) -> Any:
        self.wait_ready()
        self._send({"verb": verb, **arguments})
        return self._receive(within_s)

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise self._died("is not there to take a request") from None

    def _receive(self, timeout_s: float) -> Any:
        line = self._line(timeout_s)
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"], answer["message"])
        return answer["value"]

    def _line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        source = self._process.stdout.fileno()
        end = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            ready, _, _ = select.select([source], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                # Every thread's stack goes to the log before the process does.
                os.kill(self._process.pid, signal.SIGUSR1)
                time.sleep(1)
                died = self._died(f"gave no answer in {timeout_s:g} s")
                self.kill()
                raise died
            chunk = os.read(source, 1 << 20)
            if not chunk:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(PATIENCE_S)
                raise self._died(f"ended with status {self._process.returncode}")
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _died(self, what: str) -> EngineDied:
        return EngineDied(f"engine {self.pid} {what}; the end of {self.log_path}:\n{self.log()[-6000:]}")

    def _release(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


#: Forks the engines of this process.
_nursery: Nursery | None = None

#: What is read when it is needed, and not when vLLM is imported.
_READ_LATE = {
    "TESTS_PROVE_WRITERS",
    "PYTEST_CURRENT_TEST",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_PP_LAYER_PARTITION",
    "VLLM_SERVER_DEV_MODE",
}
_READ_LATE_PREFIXES = ("KVSTORE_", "OTEL_")


def _started(log_path: Path, environment: dict[str, str]) -> subprocess.Popen[bytes] | Forked:
    """The process of an engine: forked from one that has imported vLLM, where that has read the same of the
    environment."""
    if forked := _forked(log_path, environment):
        return forked
    with log_path.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.engine_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
            env=environment,
            # A group of its own, so that kill() ends the other processes of an engine too.
            start_new_session=True,
        )


def serve(arguments: Sequence[str], log_path: Path, env: Mapping[str, str]) -> Forked:
    """The process of `vllm serve` with these arguments, forked from one that has imported vLLM."""
    made = _forked(
        log_path, {**os.environ, **_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **env}, arguments
    )
    assert made is not None, "a server is not started afresh"
    # All that it says is in its log.
    made.stdin.close()
    made.stdout.close()
    return made


def _forked(log_path: Path, environment: dict[str, str], serve: Sequence[str] | None = None) -> Forked | None:
    global _nursery
    if _nursery is None or not _nursery.alive:
        _nursery = Nursery(environment)
    differing = {name for name, _ in environment.items() ^ _nursery.environment.items()}
    if not all(name in _READ_LATE or name.startswith(_READ_LATE_PREFIXES) for name in differing):
        return None
    with log_path.open("ab") as log:
        return _nursery.fork(
            log.fileno(),
            START_TIMEOUT_S,
            environment={name: environment.get(name) for name in differing},
            serve=serve,
        )


def _encoded(prompt: Mapping[str, Any], cache_salt: str | None) -> dict[str, Any]:
    made = dict(prompt)
    if cache_salt is not None:
        made.setdefault("cache_salt", cache_salt)
    if "images" in made:
        made["images"] = [base64.b64encode(image).decode("ascii") for image in made["images"]]
    return made


def random_tokens(count: int, seed: int) -> list[int]:
    """Token ids that are plain words in every model of `tools.models`."""
    from tools.models import FIRST_WORD, VOCAB

    draw = random.Random(seed)
    return [draw.randrange(FIRST_WORD, VOCAB) for _ in range(count)]


def random_image(seed: int, side: int = 56) -> bytes:
    """A PNG of noise. Two seeds differ in every patch.

    Made without PIL, which the quick set-up lacks, since test modules draw their images when collected.
    """
    draw = random.Random(seed)
    rows = b"".join(b"\0" + draw.randbytes(side * 3) for _ in range(side))
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows, 0)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )


def group_members(group: int) -> list[int]:
    """The living processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        # Gone while we look is as good as not there.
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.getpgid(int(entry.name)) == group:
                state = (entry / "stat").read_text().rpartition(") ")[2].split()[0]
                if state != "Z":
                    found.append(int(entry.name))
    return found
