"""Files that were replaced while an engine started don't name what it has loaded."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from connectors.engine.allowed import files
from connectors.engine.allowed.files import NotKnown, Source, source_of

_REAL = files.process_began_s


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "models" / "v1"
    made.mkdir(parents=True)
    (made / "model.safetensors").write_bytes(bytes(100))
    (made / "config.json").write_text("{}")
    return made


def began() -> float:
    """A moment that lies after everything that was made until now, and before everything that comes."""
    slack = 2 * files._SLACK_S
    time.sleep(slack)
    now = time.time() - files._SLACK_S
    time.sleep(slack)
    return now


def replaced(path: Path) -> None:
    """A file with the same bytes and times, as rsync and tar leave one."""
    seen = path.stat()
    fresh = path.with_name("fresh")
    fresh.write_bytes(path.read_bytes())
    os.utime(fresh, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    fresh.replace(path)


def written(path: Path) -> None:
    seen = path.stat()
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))


def test_what_is_left_alone_is_unchanged(folder: Path) -> None:
    source = source_of(str(folder), None, None)
    since = began()
    (folder / "model.safetensors").read_bytes()
    (folder.parent / "another").mkdir()
    source.check_unchanged(since)


@pytest.mark.parametrize("how", [replaced, written])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_in_the_place_of_another(folder: Path, name: str, how: Callable[[Path], None]) -> None:
    since = began()
    how(folder / name)
    with pytest.raises(NotKnown, match="has changed since the engine's process began"):
        source_of(str(folder), None, None).check_unchanged(since)


def test_a_folder_in_the_place_of_another(folder: Path) -> None:
    other = folder.with_name("v2")
    other.mkdir()
    (other / "model.safetensors").write_bytes(bytes(100))
    since = began()
    folder.rename(folder.with_name("old"))
    other.rename(folder)
    with pytest.raises(NotKnown):
        source_of(str(folder), None, None).check_unchanged(since)


def test_the_folder_above_in_the_place_of_another(folder: Path) -> None:
    since = began()
    models = folder.parent
    models.rename(models.with_name("elsewhere"))
    models.with_name("elsewhere").rename(models)
    with pytest.raises(NotKnown):
        source_of(str(folder), None, None).check_unchanged(since)


@pytest.mark.parametrize("where", ["itself", "above", "behind another"])
def test_a_link_that_leads_elsewhere(folder: Path, tmp_path: Path, where: str) -> None:
    other = tmp_path / "others" / "v1"
    other.mkdir(parents=True)
    (other / "model.safetensors").write_bytes(bytes(100))
    link = tmp_path / "current"
    target, new = (folder, other) if where != "above" else (folder.parent, other.parent)
    link.symlink_to(target)
    name = link if where == "itself" else link / "v1"
    if where == "behind another":
        name = tmp_path / "first"
        name.symlink_to("current")
    since = began()
    source_of(str(name), None, None).check_unchanged(since)
    fresh = tmp_path / "fresh"
    fresh.symlink_to(new)
    fresh.replace(link)
    with pytest.raises(NotKnown, match="current"):
        source_of(str(name), None, None).check_unchanged(since)


COMMITS = ("a" * 40, "b" * 40)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache with one snapshot of one model, as its client leaves it."""
    repo = tmp_path / "hub" / "models--some--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMITS[0])
    snapshot(repo, COMMITS[0])
    return repo


def snapshot(repo: Path, commit: str) -> Path:
    made = repo / "snapshots" / commit
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    return made


def test_what_vllm_downloads_of_one_snapshot_is_no_change(hub: Path) -> None:
    since = began()
    (hub / "snapshots" / COMMITS[0] / "model.safetensors").write_bytes(bytes(100))
    source = source_of("some/model", None, str(hub.parent))
    assert source.path.name == COMMITS[0]
    source.check_unchanged(since)
    # By its path, as vLLM has it when it is offline.
    source_of(str(source.path), None, None).check_unchanged(since)


def test_a_branch_that_moved_while_the_engine_started(hub: Path) -> None:
    since = began()
    snapshot(hub, COMMITS[1])
    source_of("some/model", None, str(hub.parent)).check_unchanged(since)
    (hub / "refs" / "main").write_text(COMMITS[1])
    source = source_of("some/model", None, str(hub.parent))
    assert source.path.name == COMMITS[1]
    with pytest.raises(NotKnown, match="main"):
        source.check_unchanged(since)
    # A commit's own name stands for that commit only.
    source_of("some/model", COMMITS[1], str(hub.parent)).check_unchanged(since)


def test_what_is_not_there_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotKnown, match="not on this machine"):
        source_of("some/model", None, str(tmp_path))


def test_models_of_another_hub_are_not_known(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    with pytest.raises(NotKnown):
        source_of("some/model", None, str(hub.parent))


def test_a_machine_that_does_not_say_when_processes_began(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "process_began_s", lambda: None)
    with pytest.raises(NotKnown, match="when the engine's process began"):
        Source(folder).check_unchanged()


def test_a_process_knows_when_it_began() -> None:
    before = time.time()
    code = "from connectors.engine.allowed.files import process_began_s; print(process_began_s())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # The kernel counts in hundredths of a second.
    assert before - 0.1 <= float(ran.stdout) <= time.time()
    mine = _REAL()
    assert mine is not None and mine < before
