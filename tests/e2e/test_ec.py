"""Encoder outputs that one engine computed are loaded by another: no encoder call, the same tokens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import Engine, EngineError, random_image
from tests.e2e.sharing import check_store, scheduler_counters, segment_files, worker_counters
from tools.models import IMAGE_TOKEN

pytestmark = [pytest.mark.engine, pytest.mark.servers]

ONE, TWO, THREE = (random_image(seed) for seed in (1, 2, 3))
IMAGES = {"limit_mm_per_prompt": {"image": 2}}


def ask(kind: str, *images: Any, **more: Any) -> dict[str, Any]:
    token = IMAGE_TOKEN[kind]
    return {"prompt": f"w20 w30 {' '.join([token] * len(images))} w40 w50", "images": list(images), **more}


@pytest.mark.parametrize(
    ("kind", "store"),
    [("image", "sqlite"), ("image", "s3"), ("deepstack", "tiered")],
)
def test_a_second_engine_encodes_nothing(
    kind: str, store: str, model: Any, tmp_path: Path, store_config: Any
) -> None:
    config = store_config(store)
    prompts = [ask(kind, ONE), ask(kind, TWO, THREE)]
    with Engine(model(kind), log_path=tmp_path / "0.log", **IMAGES) as engine:
        expected = [engine.generate([one])[0].token_ids for one in prompts]
        other = engine.generate([ask(kind, TWO)])[0].token_ids
    assert other != expected[0]
    with Engine(model(kind), ec=config, log_path=tmp_path / "1.log", **IMAGES) as engine:
        assert [engine.generate([one])[0].token_ids for one in prompts] == expected
        assert engine.encoder_calls() == 3
    assert check_store(config)["segments"] == 3
    with Engine(model(kind), ec=config, log_path=tmp_path / "2.log", **IMAGES) as engine:
        assert [engine.generate([one])[0].token_ids for one in prompts] == expected
        assert engine.encoder_calls() == 0
        # An item of a known pair, alone, and both prompts in one batch after everything was forgotten.
        engine.reset_mm_cache()
        engine.reset_prefix_cache()
        batch = engine.generate([*prompts, ask(kind, TWO)])
        assert [r.token_ids for r in batch] == [*expected, other]
        # A picture nobody has seen is encoded, and only that.
        engine.generate([ask(kind, random_image(99), ONE)])
        assert engine.encoder_calls() == 1
    assert check_store(config)["segments"] == 4


def test_producer_and_consumer_are_two_engines(image_model: Path, tmp_path: Path, store_config: Any) -> None:
    config = store_config("sqlite")
    prompts = [ask("image", ONE), ask("image", TWO, THREE)]
    with Engine(image_model, log_path=tmp_path / "0.log", **IMAGES) as engine:
        expected = [engine.generate([one])[0].token_ids for one in prompts]
        twice = engine.generate([ask("image", ONE, ONE)])[0].token_ids
    with Engine(
        image_model, ec=config, ec_role="ec_producer", log_path=tmp_path / "1.log", **IMAGES
    ) as engine:
        engine.generate(prompts, max_tokens=1)
        assert engine.encoder_calls() == 3
    with Engine(
        image_model, ec=config, ec_role="ec_producer", log_path=tmp_path / "1b.log", **IMAGES
    ) as engine:
        engine.generate(prompts, max_tokens=1)
        assert engine.encoder_calls() == 0, "what is stored is not encoded again"
    assert check_store(config)["segments"] == 3
    with Engine(
        image_model, ec=config, ec_role="ec_consumer", log_path=tmp_path / "2.log", **IMAGES
    ) as engine:
        assert [engine.generate([one])[0].token_ids for one in prompts] == expected
        # One picture under two names that its client has chosen: an engine ends over one that doesn't come.
        named = ask("image", ONE, ONE, uuids=["mine", "mine as well"])
        assert engine.generate([named])[0].token_ids == twice
        assert engine.encoder_calls() == 0
        engine.generate([ask("image", random_image(98))])
        assert engine.encoder_calls() == 1
    assert check_store(config)["segments"] == 3, "a consumer stores nothing"


def hash_of(engine: Engine, picture: bytes) -> str:
    """vLLM's own hash of a picture's content, which it calls the picture if no client does."""
    engine.reset_mm_cache()
    engine.generate([ask("image", picture)])
    [name] = engine.evaluate("list(llm.llm_engine.engine_core.engine_core.mm_receiver_cache._cache)")
    engine.reset_mm_cache()
    engine.reset_prefix_cache()
    return str(name)


def forget(engine: Engine) -> None:
    """Has the engine forget all pictures, and the connector know of it (docs/epd.md, limits)."""
    engine.reset_mm_cache()
    engine.reset_prefix_cache()
    scheduler = "llm.llm_engine.engine_core.engine_core.scheduler"
    engine.evaluate(f"{scheduler}.ec_connector._scheduler._resident.clear()")


@pytest.mark.parametrize("mode", ["trust", "refuse"])
def test_a_picture_under_anothers_hash_answers_nobody_else(
    mode: str, image_model: Path, tmp_path: Path, store_config: Any
) -> None:
    """The forger has the other's picture, so he can compute what vLLM calls it: a name of 64 hex digits."""
    config = store_config("sqlite") | {"identity": {"client_uuids": mode}}
    config["ec"] = {"fetch_deadline_s": 60.0}  # which a busy machine doesn't reach
    # vLLM's own block hashes hold the name, so with "trust" the KV connector can't tell the pictures apart.
    connectors = {"ec": config} | ({"kv": config} if mode == "refuse" else {})
    # The second block begins behind the picture, so its tokens don't tell what is in that.
    more = " ".join(f"w{300 + i}" for i in range(60))
    forged, real = (ask("image", one) for one in (ONE, TWO))
    forged["prompt"] = real["prompt"] = real["prompt"] + " " + more
    with Engine(image_model, log_path=tmp_path / "0.log") as engine:
        name = hash_of(engine, TWO)
        assert re.fullmatch("[0-9a-f]{64}", name)
        answer = engine.generate([forged])[0].token_ids
        expected = engine.generate([real])[0].token_ids
    assert answer != expected
    forged["uuids"] = [name]
    with Engine(image_model, **connectors, log_path=tmp_path / "1.log") as engine:
        for salt in ("forger's", None):
            assert engine.generate([forged], cache_salt=salt)[0].token_ids == answer
            forget(engine)
    with Engine(image_model, **connectors, log_path=tmp_path / "2.log") as engine:
        for salt in ("victim's", None, "another's"):
            calls = engine.encoder_calls()
            [got] = engine.generate([real], cache_salt=salt)
            assert (got.token_ids, got.external_tokens) == (expected, 0)
            assert engine.encoder_calls() == calls + 1, "salted requests share with nobody"
            forget(engine)
        if mode == "refuse":
            # Within one engine all goes by the name: its cache still has the blocks of the forged picture.
            # What it computes on top of them is wrong, and stays here.
            engine.generate([forged])
            engine.evaluate("llm.reset_mm_cache()")
            longer = {**real, "prompt": real["prompt"] + " " + more}
            engine.generate([longer])
    with Engine(image_model, **connectors, log_path=tmp_path / "3.log") as engine:
        # What is honestly the same is shared, whatever it is called.
        for salt in ("victim's", None):
            [got] = engine.generate([real], cache_salt=salt)
            assert (got.token_ids, got.external_tokens) == (expected, 64 if mode == "refuse" else 0)
            assert engine.encoder_calls() == 0
            forget(engine)
        if mode == "refuse":
            engine.generate([{**longer, "images": [THREE]}])
            [got] = engine.generate([longer])
            assert got.external_tokens == 64, "what stood on forged blocks was saved"
        named = {**real, "uuids": ["my picture"]}
        forget(engine)
        calls = engine.encoder_calls()
        assert engine.generate([named])[0].token_ids == expected
        assert engine.encoder_calls() == calls


def test_hostile_identifiers(image_model: Path, tmp_path: Path, store_config: Any) -> None:
    config = store_config("sqlite")
    names = ["../../x", "/etc/x", "x" * 1024, "nul\0byte", "kvs:{x}*", "\u202e💥", "0" * 64]
    long = "x" * 10_000
    prompts = [ask("image", random_image(200 + i), uuids=[name]) for i, name in enumerate([*names, long])]
    before = {path for path in tmp_path.rglob("*") if "payloads" not in path.parts}
    with Engine(image_model, ec=config, log_path=tmp_path / "1.log") as engine:
        first = [engine.generate([one])[0].token_ids for one in prompts]
    with Engine(image_model, ec=config, log_path=tmp_path / "2.log") as engine:
        assert [engine.generate([one])[0].token_ids for one in prompts] == first
        assert engine.encoder_calls() == 1, "over 1 KiB a name is not cached"
        assert engine.metrics()["vllm:kvstore_ec_misses_total"] == 1
    assert check_store(config)["segments"] == len(names)
    outside = {path for path in tmp_path.rglob("*") if "payloads" not in path.parts} - before
    assert {path.suffix for path in outside} == {".log"}


def test_a_name_reused_for_an_image_of_another_size_is_another_item(
    deepstack_model: Path, tmp_path: Path, store_config: Any
) -> None:
    config = store_config("sqlite")
    small = ask("deepstack", random_image(1), uuids=["mine"])
    large = ask("deepstack", random_image(2, side=224), uuids=["mine"])
    with Engine(deepstack_model, log_path=tmp_path / "0.log") as engine:
        expected = engine.generate([large])[0].token_ids
    with Engine(deepstack_model, ec=config, log_path=tmp_path / "1.log") as engine:
        engine.generate([small])
    with Engine(deepstack_model, ec=config, log_path=tmp_path / "2.log") as engine:
        assert engine.generate([large])[0].token_ids == expected
        assert engine.encoder_calls() == 1
    assert check_store(config)["segments"] == 2


def test_damage_and_outage_only_cost_encoder_calls(
    image_model: Path, tmp_path: Path, store_config: Any, private_redis: Any
) -> None:
    config = store_config("sqlite") | {
        "index": private_redis.url,
        "redis": {"timeout_s": 1.0, "connect_timeout_s": 1.0},
        "breaker": {"failures": 2, "backoff_s": 0.2, "max_backoff_s": 0.5},
    }
    prompts = [ask("image", random_image(300 + i)) for i in range(5)]
    with Engine(image_model, log_path=tmp_path / "0.log") as engine:
        expected = [engine.generate([one])[0].token_ids for one in prompts]
    with Engine(image_model, ec=config, log_path=tmp_path / "1.log") as engine:
        assert [engine.generate([one])[0].token_ids for one in prompts] == expected
    paths = segment_files(tmp_path / "payloads")
    assert len(paths) == 5
    data = bytearray(paths[0].read_bytes())
    data[-3] ^= 1
    paths[0].write_bytes(data)
    paths[1].write_bytes(paths[1].read_bytes()[:-100])
    paths[2].unlink()
    with Engine(image_model, ec=config, log_path=tmp_path / "2.log") as engine:
        assert [engine.generate([one])[0].token_ids for one in prompts] == expected
        assert engine.encoder_calls() == 3
        counts = scheduler_counters(engine, "ec")
        assert (counts["miss_blocks{corrupt}"], counts["miss_blocks{missing}"]) == (2, 1)
        engine.idle(0.2)
        assert worker_counters(engine, "ec")["save_blocks{stored}"] == 3

        private_redis.pause()
        engine.reset_mm_cache()
        engine.reset_prefix_cache()
        fresh = ask("image", random_image(400))
        engine.generate([fresh])
        private_redis.resume()
        private_redis.kill()
        engine.generate([ask("image", random_image(401))])
        assert engine.alive
        assert engine.encoder_calls() == 5


def test_an_engine_that_prepares_images_otherwise_shares_nothing(
    image_model: Path, tmp_path: Path, store_config: Any
) -> None:
    config = store_config("sqlite")
    other = {"mm_processor_kwargs": {"do_normalize": False}}
    with Engine(image_model, kv=config, ec=config, log_path=tmp_path / "1.log", **other) as engine:
        [first] = engine.generate([ask("image", ONE)])
    with Engine(image_model, kv=config, ec=config, log_path=tmp_path / "2.log") as engine:
        [second] = engine.generate([ask("image", ONE)])
        assert (second.external_tokens, engine.encoder_calls()) == (0, 1)
    assert first.token_ids != second.token_ids
    assert check_store(config)["namespaces"] == 4


@pytest.mark.parametrize("kind", ["kv", "ec"])
def test_counted_identifiers_are_refused_at_the_start(
    kind: str, image_model: Path, tmp_path: Path, store_config: Any
) -> None:
    engine = Engine(
        image_model,
        **{kind: store_config("sqlite")},
        log_path=tmp_path / "engine.log",
        mm_processor_cache_gb=0,
        enable_prefix_caching=False,
    )
    with pytest.raises(EngineError) as failure, engine:
        pass
    assert "per-process counter" in str(failure.value) + engine.log()


def test_both_connectors_on_one_engine(image_model: Path, tmp_path: Path, store_config: Any) -> None:
    """KV hits that end before an image, inside it and after it: each needs other things from the store."""
    config = store_config("redis")

    def words(count: int, first: int = 20) -> str:
        return " ".join(f"w{first + i % 200}" for i in range(count))

    def shown(before: int, after: int, image: bytes, first: int = 20) -> dict[str, Any]:
        # 16 tokens per image, 32 per block.
        text = f"{words(before, first)} {IMAGE_TOKEN['image']} {words(after, 300)}"
        return {"prompt": text, "images": [image]}

    ahead = shown(200, 1, ONE)  # 6 blocks, then the image
    inside = shown(24, 20, TWO, first=40)  # the block's boundary is 8 tokens into the image
    behind = shown(8, 60, THREE, first=60)  # the image ends before the first boundary
    # The same first block, and with it half of the image; then it goes on differently.
    branch = {**inside, "prompt": inside["prompt"].rsplit(" ", 10)[0] + " w900 w901 w902"}
    prompts = [ahead, inside, behind]
    with Engine(image_model, log_path=tmp_path / "0.log") as engine:
        expected = [engine.generate([one])[0].token_ids for one in [*prompts, branch]]
        assert len({tuple(one) for one in expected}) == 4
    with Engine(image_model, kv=config, ec=config, log_path=tmp_path / "1.log") as engine:
        assert [engine.generate([one])[0].token_ids for one in prompts] == expected[:3]
        assert engine.encoder_calls() == 3
    with Engine(image_model, kv=config, ec=config, log_path=tmp_path / "2.log") as engine:
        warm = engine.generate([*prompts, branch])
        assert [one.token_ids for one in warm] == expected
        assert [one.external_tokens + one.local_tokens for one in warm] == [192, 32, 64, 32]
        # Of two that share a block, one may find what the other has just loaded.
        first, half, whole, other = (one.external_tokens for one in warm)
        assert (first, whole, max(half, other)) == (192, 64, 32)
        assert engine.encoder_calls() == 0
        # What a hit covers is not even looked up.
        assert scheduler_counters(engine, "ec")["match_calls"] == 2
        # Its own prefix cache covers half of the image, its encoder cache is empty: the store has it.
        engine.reset_mm_cache()
        [again] = engine.generate([branch])
        assert (again.token_ids, again.local_tokens > 0) == (expected[3], True)
        # Both stores are told apart, and neither item nor block is taken for the other.
        engine.reset_mm_cache()
        engine.reset_prefix_cache()
        assert [one.token_ids for one in engine.generate([branch, *prompts])] == [expected[3], *expected[:3]]
        assert engine.encoder_calls() == 0
        assert (engine.metrics()["vllm:kvstore_ec_items_total"]) >= 2
    assert check_store(config)["namespaces"] == 2
