"""Computes the prompts of a prefix pack: the engine of `cache-admin pack build` (kvstore.admin.pack.engine).

    python -m connectors.pack    reads a job from stdin, and answers on stdout until stdin ends

One process holds engine and connector. So it can make steps without requests, with which a connector ends its
saves. The engine computes one prompt after the other. It computes a prompt again if a full queue of saves has
dropped blocks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kvstore.admin.backends import Cache
from kvstore.admin.curate.prompts import StoredPrompt, plan_prompt
from kvstore.build import load_settings
from kvstore.errors import KVStoreError
from kvstore.keys import DIGEST_BYTES
from kvstore.threads.deadline import in_background
from schemas.namespace import Namespace

Tell = Callable[[Mapping[str, Any]], None]

#: How often a prompt is computed at most, and how long nothing more may be saved before it is again.
_ATTEMPTS: Final = 5
_STILL_S: Final = 10.0
_STEP_S: Final = 0.005


class NotComputed(Exception):
    """The pack can't be computed; the message says why."""


def main() -> int:
    """Computes the job on stdin; returns 1 if it can't be done. Whatever is printed goes to stderr."""
    job = json.loads(sys.stdin.readline())
    in_background(_end_with_stdin)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(what: Mapping[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    try:
        _compute(job, tell)
    except (NotComputed, KVStoreError) as exc:
        tell({"error": str(exc)})
        return 1
    return 0


def _end_with_stdin() -> None:
    # As a file, a read at the interpreter's end would keep it from ending.
    while os.read(0, 1):
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _compute(job: Mapping[str, Any], tell: Tell) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        import vllm
    except ImportError as exc:
        raise NotComputed(
            f"a pack is computed by vLLM, which can't be imported here ({exc}): use the engines' Python"
        ) from exc
    llm, chat = _engine(job["engine"], job["settings"])
    with Cache(load_settings(job["settings"], {})) as cache:
        cache.made_index()
        for prompt in job["prompts"]:
            tell({"begin": prompt["name"]})
            tell({"prompt": _one(llm, cache, chat, prompt)})
    llm.llm_engine.engine_core.shutdown()
    tell({"engine": vllm.__version__})


def _engine(words: Sequence[str], settings: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Returns the engine, and how the server of those words would render messages: arguments of `chat`."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # Options of the server alone are refused, as are mistyped options: both would go unnoticed.
    parser = FlexibleArgumentParser(prog="ENGINE", usage="MODEL [an engine's arguments of `vllm serve`]")
    EngineArgs.add_cli_args(parser)
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--chat-template")
    parser.add_argument(
        "--chat-template-content-format", choices=("auto", "string", "openai"), default="auto"
    )
    parser.add_argument("--default-chat-template-kwargs", type=json.loads)
    given = parser.parse_args(list(words))
    if given.model_tag is not None:
        given.model = given.model_tag
    # An engine's segments don't depend on the number of its replicas, or on its place among them.
    for name in vars(given):
        if name.startswith("data_parallel_"):
            setattr(given, name, parser.get_default(name))
    arguments = vars(EngineArgs.from_cli_args(given)) | {
        # Nor on who listens to it.
        "ec_transfer_config": None,
        "kv_events_config": None,
        "kv_transfer_config": {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "connectors.kv",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": dict(settings),
        },
    }
    chat = {
        "chat_template_content_format": given.chat_template_content_format,
        "chat_template_kwargs": given.default_chat_template_kwargs,
    }
    return LLM(**arguments, chat_template=given.chat_template), chat


def _one(llm: Any, cache: Cache, chat: Mapping[str, Any], prompt: Mapping[str, Any]) -> dict[str, Any]:
    """Computes a prompt until all of it that can be resumed is stored. Raises NotComputed."""
    name = prompt["name"]
    try:
        tokens = _asked(llm, chat, prompt)
    except ValueError as exc:
        raise NotComputed(f"prompt {name!r}: {exc}") from exc
    for _ in range(_ATTEMPTS):
        stored, most, hashes = _settled(llm, cache, tokens)
        if 0 < most == stored:
            blocks = b"".join(one[:DIGEST_BYTES] for one in hashes).hex()
            return {"name": name, "tokens": len(tokens), "blocks": blocks}
        if len(tokens) < llm.llm_engine.vllm_config.cache_config.block_size or (hashes and not most):
            raise NotComputed(
                f"prompt {name!r} has {len(tokens)} tokens, fewer than a block: nothing is saved"
            )
        _asked(llm, chat, {"tokens": tokens})
    raise NotComputed(
        f"prompt {name!r}: only {stored} of {most} tokens could be saved; has the temporary folder room?"
    )


def _tools(llm: Any, tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Returns tools as the server hands them to a chat template: with what a definition leaves out, without
    what it shouldn't have. Raises ValueError for those that the server refuses.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam

    if llm.llm_engine.vllm_config.model_config.hf_config.model_type == "gpt_oss":
        raise ValueError("the server renders messages to this model without a chat template: give its tokens")
    if tools is None:
        return None
    return [ChatCompletionToolsParam.model_validate(one).model_dump() for one in tools]


def _asked(llm: Any, chat: Mapping[str, Any], prompt: Mapping[str, Any]) -> list[int]:
    """Returns the token ids of a prompt, after it was computed."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    if "messages" in prompt:
        [output] = llm.chat(
            [prompt["messages"]],
            params,
            # The prompt is the beginning of a conversation, whoever speaks next.
            add_generation_prompt=False,
            tools=_tools(llm, prompt["tools"]),
            use_tqdm=False,
            **chat,
        )
    else:
        given = {"prompt_token_ids": prompt["tokens"]} if "tokens" in prompt else prompt["text"]
        [output] = llm.generate([given], params, use_tqdm=False)
    return list(output.prompt_token_ids)


def _settled(llm: Any, cache: Cache, tokens: Sequence[int]) -> tuple[int, int, Sequence[bytes]]:
    """Steps the engine until all of a prompt is stored, or nothing more comes. Returns how many tokens an
    engine would load, how many it could at most, and the hashes of its blocks.
    """
    best, most = -1, 0
    hashes: Sequence[bytes] = ()
    until = time.monotonic() + _STILL_S
    while time.monotonic() < until:
        llm.llm_engine.step()
        time.sleep(_STEP_S)
        stored, most, hashes = _stored(cache, tokens)
        if 0 < most == stored:
            return stored, most, hashes
        if stored > best:
            best, until = stored, time.monotonic() + _STILL_S
    return best, most, hashes


def _stored(cache: Cache, tokens: Sequence[int]) -> tuple[int, int, Sequence[bytes]]:
    for name, text in cache.namespaces().items():
        space = Namespace.model_validate_json(text)
        prompt = StoredPrompt(tokens=tokens, seed=os.environ.get("PYTHONHASHSEED"))
        hashes = prompt.names(space)
        if not hashes:
            return 0, 0, hashes
        # As something longer finds it, which a prompt of a pack is the beginning of.
        whole = StoredPrompt(hashes=hashes)
        _, [found] = plan_prompt(cache, whole, [name])
        return found.stored, whole.most(space), hashes
    return 0, 0, []


if __name__ == "__main__":
    sys.exit(main())
