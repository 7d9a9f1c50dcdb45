"""The weights digest tells models apart and nodes together."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from connectors.engine.weights_digest import weights_digest
from kvstore.errors import ConfigError


def model(folder: Path, seed: int, tensors: int = 20) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(seed)
    for shard in range(2):
        arrays = {f"layer.{i}": rng.standard_normal((64, 64), dtype=np.float32) for i in range(tensors)}
        save_file(arrays, folder / f"model-{shard}.safetensors")
    return folder


def test_two_random_models_of_one_shape_differ(tmp_path: Path) -> None:
    assert weights_digest(model(tmp_path / "a", 1)) != weights_digest(model(tmp_path / "b", 2))


def test_copies_on_two_nodes_are_the_same(tmp_path: Path) -> None:
    first = model(tmp_path / "a", 1)
    second = Path(shutil.copytree(first, tmp_path / "elsewhere"))
    os.utime(second / "model-0.safetensors", (0, 0))
    assert weights_digest(first) == weights_digest(second)


@pytest.mark.parametrize("at", [0, 7, 19])
def test_one_changed_tensor_is_noticed(tmp_path: Path, at: int) -> None:
    folder = model(tmp_path / "a", 1)
    before = weights_digest(folder)
    from safetensors.numpy import load_file

    file = folder / "model-1.safetensors"
    arrays = load_file(file)
    arrays[f"layer.{at}"] = arrays[f"layer.{at}"] * 1.001
    save_file(arrays, file)
    assert weights_digest(folder) != before


def test_other_formats_and_single_files(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(bytes(range(256)) * 1000)
    before = weights_digest(tmp_path)
    assert weights_digest(file) == before
    file.write_bytes(bytes(range(256)) * 999 + bytes(256))
    assert weights_digest(tmp_path) != before


def test_a_file_that_is_no_safetensors_is_sampled_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    assert len(weights_digest(tmp_path)) == 32


def test_no_weights_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"identity\.weights"):
        weights_digest(tmp_path)
