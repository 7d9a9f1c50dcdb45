"""Encoder outputs that one engine computed are loaded by another: no encoder call, the same tokens."""

from __future__ import annotations

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
        assert engine.encoder_calls() == 0
        engine.generate([ask("image", random_image(98))])
        assert engine.encoder_calls() == 1
    assert check_store(config)["segments"] == 3, "a consumer stores nothing"


@pytest.mark.parametrize("trust", ["trust", "refuse"])
def test_hostile_identifiers(trust: str, image_model: Path, tmp_path: Path, store_config: Any) -> None:
    config = store_config("sqlite") | {"identity": {"client_uuids": trust}}
    names = ["../../x", "/etc/x", "x" * 10_000, "nul\0byte", "kvs:{x}*", "\u202e💥", "0" * 63 + "Z"]
    prompts = [ask("image", random_image(200 + i), uuids=[name]) for i, name in enumerate(names)]
    before = {path for path in tmp_path.rglob("*") if "payloads" not in path.parts}
    with Engine(image_model, ec=config, log_path=tmp_path / "1.log") as engine:
        first = [engine.generate([one])[0].token_ids for one in prompts]
    with Engine(image_model, ec=config, log_path=tmp_path / "2.log") as engine:
        assert [engine.generate([one])[0].token_ids for one in prompts] == first
        assert engine.encoder_calls() == (0 if trust == "trust" else len(names))
    assert check_store(config)["segments"] == (len(names) if trust == "trust" else 0)
    outside = {path for path in tmp_path.rglob("*") if "payloads" not in path.parts} - before
    assert {path.suffix for path in outside} == {".log"}


def test_a_name_reused_for_an_image_of_another_size_does_not_end_the_engine(
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


def test_damage_and_outage_only_cost_encoder_calls(
    image_model: Path, tmp_path: Path, store_config: Any, private_redis: Any
) -> None:
    config = store_config("sqlite") | {
        "index": private_redis.url,
        "redis": {"timeout_s": 0.3, "connect_timeout_s": 0.3},
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
