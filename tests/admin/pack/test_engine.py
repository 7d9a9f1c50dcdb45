"""The process that computes a pack: what it runs, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.admin.pack.engine import EngineFailed, compute
from kvstore.admin.progress import Silent
from schemas.settings import Settings
from tests.waiting import PATIENCE_S, until

SETTINGS = Settings(payloads="memory://pack", index="memory://pack")

#: A vLLM that starts a process, as vLLM does, and can't be imported.
VLLM = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "import json"], check=True)
raise ImportError("none")
"""

#: One that never comes up, and says whether it lives.
SLOW = """
import os, pathlib, time
print("loading", flush=True)
pathlib.Path(__file__).with_name("pid").write_text(str(os.getpid()))
time.sleep(10_000)
"""


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in the place of vLLM."""
    (modules := tmp_path / "modules").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(modules))
    return modules / "vllm.py"


def test_the_working_folder_holds_no_modules(
    tmp_path: Path, vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prompts := tmp_path / "prompts").mkdir()
    monkeypatch.chdir(prompts)
    vllm.write_text(VLLM)
    (prompts / "json.py").write_text("open('ran', 'w')")
    with pytest.raises(EngineFailed, match=r"vLLM, which can't be imported here \(none\)"):
        compute([], ["model"], SETTINGS, tmp_path / "engine.log", Silent())
    assert not (prompts / "ran").exists()


def test_the_end_of_what_an_engine_said_is_shown(tmp_path: Path, vllm: Path) -> None:
    vllm.write_text("print('no such device')\nraise ImportError('none')")
    with pytest.raises(
        EngineFailed, match="use the engines' Python; the end of what it said:\nno such device"
    ):
        compute([], ["model"], SETTINGS, tmp_path / "engine.log", Silent())


def test_an_engine_that_says_nothing_is_ended(tmp_path: Path, vllm: Path) -> None:
    vllm.write_text(SLOW)
    with pytest.raises(EngineFailed, match=r"the engine said nothing for 0\.5 s"):
        compute([], ["model"], SETTINGS, tmp_path / "engine.log", Silent(), silent_s=0.5)


def test_an_engine_ends_with_its_stdin(vllm: Path) -> None:
    vllm.write_text(SLOW)
    words = [sys.executable, "-m", "connectors.pack"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdin is not None
        child.stdin.write(b'{"engine": [], "settings": {}, "prompts": []}\n')
        child.stdin.flush()
        until((vllm.parent / "pid").exists)
        child.stdin.close()
        assert child.wait(PATIENCE_S) == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_engine_outlives_whoever_asked(
    tmp_path: Path, vllm: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    vllm.write_text(SLOW)
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    (prompts := tmp_path / "prompts.json").write_text(json.dumps({"prompts": [{"name": "a", "text": "b"}]}))
    words = ["-m", "kvstore.cli", "pack", "build", str(prompts), "--to", str(tmp_path / "a.tar"), "--", "m"]

    def heeds() -> None:
        # Whoever runs the tests may have told them to ignore it, as nohup does.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

    with subprocess.Popen([sys.executable, *words], preexec_fn=heeds) as asking:
        try:
            pid = vllm.parent / "pid"
            until(lambda: pid.exists() and pid.read_text())
            asking.send_signal(number)
            assert asking.wait(PATIENCE_S) == (-number if number is signal.SIGKILL else 130)
        finally:
            asking.kill()
    until(lambda: not Path(f"/proc/{pid.read_text()}/exe").exists())
    assert number is signal.SIGKILL or not os.listdir(scratch)
