"""The engine that computes a pack: a process of `connectors.pack`, which has vLLM, and what it says.

It gets one JSON object as a line on stdin, `{"engine": words, "settings": {...}, "prompts": [...]}`, and
answers with an object a line: `{"begin": name}` and `{"prompt": {...}}` for each prompt,
`{"engine": release}` at the end, `{"error": text}` if it gives up. Everything else that is printed goes into
a log, whose end is shown if it fails. Once its stdin ends, with whoever asked, it ends as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.admin.progress import ProgressListener
from kvstore.build import PREFIX
from kvstore.errors import KVStoreError
from kvstore.threads.deadline import within
from schemas.pack import PackedPrompt
from schemas.settings import Settings

#: How long an engine may say nothing: the largest take minutes to start, and for a prompt.
_SILENT_S = 3600.0
#: Most bytes of the log's end that are shown.
_MOST_LOG = 3000


class EngineFailed(KVStoreError):
    """The engine did not start, or could not compute or save a prompt; the message says which."""

    reason = "engine"


@dataclass(frozen=True, slots=True)
class Computed:
    """What an engine has computed and saved."""

    #: Release of vLLM.
    engine: str
    prompts: tuple[PackedPrompt, ...]


def compute(
    prompts: Sequence[Mapping[str, Any]],
    words: Sequence[str],
    settings: Settings,
    log: Path,
    progress: ProgressListener,
    *,
    silent_s: float = _SILENT_S,
) -> Computed:
    """Computes the prompts with an engine of those words of `vllm serve`, which saves them into the store of
    `settings`. Takes as long as an engine's start and the prompts do. Raises EngineFailed, also if the engine
    says nothing for `silent_s` seconds.
    """
    job = {
        "engine": list(words),
        "settings": settings.model_dump(mode="json", exclude_defaults=True),
        "prompts": list(prompts),
    }
    progress.begin("start the engine")
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [sys.executable, "-P", "-m", "connectors.pack"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=_environment(),
            # A group of its own, so that all of the engine's processes end with it.
            start_new_session=True,
        ) as child,
    ):
        try:
            return _heard(child, job, silent_s, progress)
        except EngineFailed as exc:
            end = log.read_bytes()[-_MOST_LOG:].decode(errors="replace").strip()
            raise EngineFailed(f"{exc}; the end of what it said:\n{end}" if end else str(exc)) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    """Returns the environment of the engine, for whose processes the working folder holds no modules: it may
    be somebody's folder of prompts.
    """
    # Its settings are those of its job, whatever this process' environment says.
    made = {name: text for name, text in os.environ.items() if not name.startswith(PREFIX)}
    made["PYTHONSAFEPATH"] = "1"
    root = Path(__file__).parents[3]
    if (root / "pyproject.toml").exists():
        # A checkout, which Python may have found by the working folder alone.
        made["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), made.get("PYTHONPATH"))))
    return made


def _heard(
    child: subprocess.Popen[bytes], job: Mapping[str, Any], silent_s: float, progress: ProgressListener
) -> Computed:
    assert child.stdin is not None and child.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(json.dumps(job).encode() + b"\n")
        child.stdin.flush()
    made = []
    try:
        while line := within(silent_s, child.stdout.readline, late=lambda _: None):
            said = json.loads(line)
            if "begin" in said:
                progress.begin(f"compute {said['begin']}")
            elif "prompt" in said:
                made.append(PackedPrompt.model_validate(said["prompt"]))
            elif "engine" in said:
                return Computed(said["engine"], tuple(made))
            else:
                raise EngineFailed(str(said.get("error")))
    except TimeoutError:
        raise EngineFailed(f"the engine said nothing for {silent_s:g} s") from None
    raise EngineFailed("the engine ended")
