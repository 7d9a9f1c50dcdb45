"""Block hashes computed without vLLM are vLLM's own, for every algorithm that a namespace can have."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils

from connectors.engine import identity
from kvstore.rules.hashing import ALGORITHMS, DEFAULT_SEED, block_hashes, root_digest

pytestmark = pytest.mark.engine

#: Beyond any vocabulary, so that every width of an integer is met.
TOKENS = st.lists(st.integers(0, 2**33), max_size=70)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


class Request:
    """As much of vLLM's request as its block hasher reads."""

    mm_features: Any = ()
    lora_request = None
    prompt_embeds = None

    def __init__(self, tokens: list[int], salt: str) -> None:
        self.all_token_ids = tokens
        self.num_tokens = len(tokens)
        self.cache_salt = salt or None
        self.block_hashes: list[bytes] = []


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(tokens=TOKENS, size=st.integers(1, 17), seed=TEXTS, salt=TEXTS)
@example(tokens=[0, 23, 24, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32], size=2, seed="0", salt="a")
@example(tokens=list(range(300)), size=300, seed="vllm-none-hash", salt="")
@example(tokens=list(range(40)), size=8, seed="cache_salt", salt="cache_salt")
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_names_of_blocks_are_those_that_vllm_gives_them(
    algorithm: str, tokens: list[int], size: int, seed: str, salt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasher = get_hash_fn_by_name(algorithm)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", hasher(seed), raising=False)
    request: Any = Request(tokens, salt)
    theirs = kv_cache_utils.get_request_block_hasher(size, hasher)(request)
    ours = block_hashes(tokens, algorithm=algorithm, block_tokens=size, seed=seed, salt=salt)
    assert ours == [bytes(one) for one in theirs]


@pytest.mark.parametrize("seed", [None, "0", "4711"])
def test_the_root_is_that_of_an_engine_with_this_environment(
    seed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    for algorithm in ("sha256", "sha256_cbor"):
        hasher = get_hash_fn_by_name(algorithm)
        assert kv_cache_utils.resolve_none_hash_seed(hasher) == (seed or DEFAULT_SEED)
        assert identity._hash_root(algorithm) == root_digest(seed or DEFAULT_SEED)
    assert root_digest(DEFAULT_SEED) == hashlib.sha256(b"vllm-none-hash").hexdigest()[:16]
