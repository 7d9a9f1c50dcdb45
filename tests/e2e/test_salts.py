"""What real engines store names the salt of the request that it was computed for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.build import load_settings, open_index
from kvstore.index.maintenance import FullIndex
from kvstore.keys import NO_SALT, NamespaceId, SaltId, digests, salt_id, split_digests
from kvstore.rules.hashing import block_hashes
from schemas.namespace import Namespace
from tests.e2e.engine import Engine, random_image
from tests.e2e.sharing import check_store, extended, prompt
from tests.e2e.test_ec import IMAGES, ask

pytestmark = pytest.mark.engine

SALTS = ("hers", "his", "")
#: The same text under every salt, a text of each salt's own, and one that goes on from the first.
SAME = prompt(320, 60)
TEXTS = [
    text if not salt else {**text, "cache_salt": salt}
    for number, salt in enumerate(SALTS)
    for text in (SAME, extended(SAME, 70, 61), prompt(200, 70 + number))
]
PICTURES = [random_image(seed) for seed in (80, 81)]


def namespace_of(index: FullIndex) -> tuple[NamespaceId, Namespace]:
    [(name, text)] = index.namespaces().items()
    return name, Namespace.model_validate_json(text)


def stored(index: FullIndex, name: NamespaceId) -> dict[bytes, SaltId]:
    """Every block that the index has, and the salt that the record of its segment names."""
    salts = {one.segment: SaltId(one.record.salt) for one in index.segments(name)}
    return {entry.digest: salts[entry.segment] for entry in index.entries(name)}


def test_blocks_and_items_are_found_by_their_salt(
    text_model: Path, image_model: Path, tmp_path: Path, store_config: Any
) -> None:
    config = store_config("sqlite")
    # Requests of all salts in one batch, in chunks: a step saves blocks of several.
    options = {"max_num_batched_tokens": 256, "max_num_seqs": 16}
    with Engine(text_model, kv=config, log_path=tmp_path / "kv.log", **options) as engine:
        engine.generate(TEXTS)
        engine.idle(0.1)
    check_store(config)
    with open_index(load_settings(config, environ={})) as index:
        name, namespace = namespace_of(index)
        expected: dict[bytes, SaltId] = {}
        for text in TEXTS:
            salt = text.get("cache_salt", "")
            made = block_hashes(
                text["prompt_token_ids"],
                algorithm=namespace.hash_algo,
                block_tokens=namespace.block_tokens,
                salt=salt,
            )
            expected |= dict.fromkeys(split_digests(digests(made)), salt_id(salt))
        assert len(expected) == 3 * (10 + 2 + 6)
        assert stored(index, name) == expected
        held = index.holdings(name, 0)
        assert set(held) == {salt_id("hers"), salt_id("his")}
        for salt in held:
            assert held[salt] == sum(one.record.nbytes for one in index.of_salt(name, salt))

    items = config | {"payloads": f"file://{tmp_path}/items"}
    with Engine(image_model, ec=items, log_path=tmp_path / "ec.log", **IMAGES) as engine:
        for salt in SALTS:
            engine.generate([ask("image", one) for one in PICTURES], cache_salt=salt or None)
            engine.reset_mm_cache()
            engine.reset_prefix_cache()
        calls = engine.encoder_calls()
    assert check_store(items)["segments"] == 3 * len(PICTURES) == calls
    with open_index(load_settings(items, environ={})) as index:
        name, _ = namespace_of(index)
        salts = list(stored(index, name).values())
        assert {one: salts.count(one) for one in salts} == dict.fromkeys(
            (salt_id("hers"), salt_id("his"), NO_SALT), len(PICTURES)
        )
        # That the right ones are hers shows when they are gone: tests/e2e/test_erase.py.
