"""Models for the engines, built once and kept under .cache/models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import ROOT


@pytest.fixture(scope="session")
def model() -> Callable[..., Path]:
    """`model(kind, seed=0)`: the folder of a tiny random model, built if it is not there."""
    from tools.models import build

    def folder(kind: str, seed: int = 0) -> Path:
        return build(ROOT / ".cache" / "models", kind, seed)

    return folder


@pytest.fixture(scope="session")
def text_model(model: Callable[..., Path]) -> Path:
    return model("text")


@pytest.fixture(scope="session")
def mla_model(model: Callable[..., Path]) -> Path:
    return model("mla")


@pytest.fixture(scope="session")
def image_model(model: Callable[..., Path]) -> Path:
    return model("image")


@pytest.fixture(scope="session")
def deepstack_model(model: Callable[..., Path]) -> Path:
    return model("deepstack")


@pytest.fixture
def store_config(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """`store_config(kind)`: an extra config for a store of this test's own.

    sqlite   a folder and the index inside it     s3       a bucket and Redis
    redis    a folder and Redis                   tiered   a folder in front of the bucket, and Redis
    """

    def config(kind: str) -> dict[str, Any]:
        # A busy machine is no reason to miss: what a deadline does has tests of its own.
        made: dict[str, Any] = {
            "payloads": f"file://{tmp_path}/payloads",
            "kv": {"match_deadline_s": 20.0, "match_ttl_s": 30.0},
            "ec": {"fetch_deadline_s": 20.0},
            "redis": {"timeout_s": 20.0, "connect_timeout_s": 20.0},
            "sqlite": {"busy_timeout_s": 20.0},
        }
        if kind != "sqlite":
            made["index"] = request.getfixturevalue("redis_server").url
        if kind in ("s3", "tiered"):
            bucket = request.getfixturevalue("s3_bucket")
            made["payloads"] = bucket.url
            made["s3"] = bucket.settings["s3"] | {"stall_timeout_s": 20.0, "read_timeout_s": 20.0}
        if kind == "tiered":
            fast = f"file://{tmp_path}/fast"
            made["payloads"] = {"fast": fast, "slow": bucket.url, "fast_capacity": "256MiB"}
        return made

    return config
