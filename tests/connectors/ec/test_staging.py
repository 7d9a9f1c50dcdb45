"""The staging folder: bounded, pinned items stay, nothing is left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from connectors.ec.staging import StagingFolder
from kvstore.errors import CapacityExceeded, ConfigError, TransientError


def view(size: int) -> memoryview:
    return memoryview(bytes(size))


def held(parent: Path) -> int:
    return sum(path.stat().st_size for path in parent.rglob("*") if path.is_file() and path.name != ".lock")


@pytest.fixture
def folder(tmp_path: Path) -> StagingFolder:
    return StagingFolder(str(tmp_path), 1000)


def test_least_recently_used_items_make_room_and_pinned_ones_stay(
    folder: StagingFolder, tmp_path: Path
) -> None:
    for name in "abc":
        folder.put(name, view(300))
        folder.unpin(name)
    assert folder.pin("a")  # used last, and pinned
    folder.put("d", view(300))
    assert not folder.pin("b")
    assert folder.pin("c")
    with pytest.raises(CapacityExceeded):
        folder.put("e", view(300))  # a, c and d are pinned
    folder.unpin("c")
    folder.put("e", view(300))
    assert folder.used_bytes == held(tmp_path) == 900


def test_an_item_larger_than_the_folder_is_refused_and_costs_nobody_their_place(
    folder: StagingFolder,
) -> None:
    folder.put("a", view(300))
    folder.unpin("a")
    with pytest.raises(CapacityExceeded):
        folder.put("huge", view(1001))
    assert folder.pin("a")


def test_what_has_a_name_is_not_written_again(folder: StagingFolder, tmp_path: Path) -> None:
    path = folder.put("a", view(300))
    inode = Path(path).stat().st_ino
    assert folder.put("a", view(300)) == path
    assert Path(path).stat().st_ino == inode
    assert folder.used_bytes == held(tmp_path) == 300
    for _ in range(2):  # pinned twice
        with pytest.raises(CapacityExceeded):
            folder.put("b", view(800))
        folder.unpin("a")
    folder.put("b", view(800))


def test_an_item_that_somebody_removed_is_not_promised(folder: StagingFolder) -> None:
    path = Path(folder.put("a", view(300)))
    folder.unpin("a")
    path.unlink()
    assert not folder.pin("a")
    assert folder.used_bytes == 0
    assert Path(folder.put("a", view(300))).exists()


def test_a_folder_that_vanished_is_an_error_and_is_not_accounted(
    folder: StagingFolder, tmp_path: Path
) -> None:
    folder.close()
    with pytest.raises(TransientError):
        folder.put("a", view(10))
    assert folder.used_bytes == 0


def test_what_dead_engines_left_is_removed_and_what_live_ones_hold_stays(tmp_path: Path) -> None:
    live = StagingFolder(str(tmp_path), 1000)
    live.put("a", view(10))
    script = (
        "from connectors.ec.staging import StagingFolder; import os, sys\n"
        "StagingFolder(sys.argv[1], 1000).put('b', memoryview(b'x' * 10)); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert len(list(tmp_path.iterdir())) == 2
    StagingFolder(str(tmp_path), 1000).close()
    assert len(list(tmp_path.iterdir())) == 1
    assert live.pin("a")
    live.close()
    assert not list(tmp_path.iterdir())


def test_an_impossible_folder_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"ec\.staging_dir"):
        StagingFolder(str(tmp_path / "file" / "x"), 1000)
