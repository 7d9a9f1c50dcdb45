"""The v0 adapter under a model loop of its own: the same tokens, and bypass exactly when allowed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the connectors' tests need the full set-up: make setup")

from connectors.v0.connector import KVStoreConnectorV0
from tests.connectors.v0.model import BLOCK, Sequence, model_input
from tests.connectors.v0.world import PROMPTS, World, bypassed, calls, counters, prompts, stored

pytestmark = pytest.mark.engine  # the full set-up, not an engine


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as made:
        yield made


# ---- the same tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["none", "lz4"])
@pytest.mark.parametrize("mla", [False, True])
def test_off_cold_and_warm_answer_alike_and_warm_computes_no_prompt(
    world: World, mla: bool, codec: str
) -> None:
    extra = {"segment": {"codec": codec}}
    answers = stored(world, mla=mla, extra=extra)
    assert len({tuple(answer) for answer in answers}) == len(answers), "all alike would prove nothing"
    warm = world.engine(mla=mla, seed=1, extra=extra)
    assert warm.generate(PROMPTS) == answers
    assert bypassed(warm) == [[True]]
    assert calls(warm) == [3], "the decodes"


def test_a_step_may_hold_any_of_the_prompts_that_are_stored(world: World) -> None:
    answers = dict(zip(map(tuple, PROMPTS), stored(world), strict=True))
    warm = world.engine(seed=2)
    for chosen in ([PROMPTS[3]], PROMPTS[::-1], [PROMPTS[1], PROMPTS[1]], PROMPTS[2:]):
        assert warm.generate(chosen) == [answers[tuple(prompt)] for prompt in chosen]
    assert bypassed(warm) == [[True] * 4]


def test_the_prefill_engine_stores_and_the_decode_engine_loads(world: World) -> None:
    producer = world.engine(role="kv_producer")
    producer.step([(Sequence(list(prompt)), len(prompt)) for prompt in PROMPTS])
    producer.close()
    assert bypassed(producer) == [[]]
    consumer = world.engine(role="kv_consumer", seed=3)
    answers = consumer.generate(PROMPTS)
    assert bypassed(consumer) == [[True]]
    assert calls(consumer) == [3]
    assert answers == world.engine(store=False).generate(PROMPTS)
    before = world.files()
    consumer.generate(prompts(20, seed=9))
    consumer.close()
    assert world.files() == before, "a consumer stores nothing"


def test_a_prompt_larger_than_the_staging_memory_is_loaded_in_pieces(world: World) -> None:
    long = prompts(300, 70, 9)
    answers = stored(world, long)
    # 8 tokens of 4 layers, 4 heads, key and value of 8 floats: 8 KiB a block.
    warm = world.engine(extra={"kv": {"staging_bytes": 3 * 8192 + 100}})
    assert warm.generate(long) == answers
    assert bypassed(warm) == [[True]]
    small = world.engine(extra={"kv": {"staging_bytes": 8191}})
    assert small.generate(long) == answers
    assert bypassed(small) == [[False]]
    assert counters(small)["miss_blocks{capacity}"] > 0


# ---- bypass exactly when allowed ------------------------------------------------------------------


def test_one_prompt_that_is_not_stored_makes_the_step_run(world: World) -> None:
    stored(world)
    batch = [*PROMPTS, *prompts(20, seed=5)]
    warm = world.engine(seed=1)
    assert warm.generate(batch) == world.engine(store=False).generate(batch)
    assert bypassed(warm) == [[False]]
    warm.close()
    again = world.engine()
    again.generate(batch)
    assert bypassed(again) == [[True]], "and is stored by it"


def test_kv_without_the_prompts_own_end_is_not_enough(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """A prefix of a stored prompt has its KV, but not the hidden state that its next token comes from."""
    [long] = prompts(64)
    stored(world, [long])
    warm = world.engine()
    for length in (8, 40, 63, 61):
        assert warm.generate([long[:length]]) == world.engine(store=False).generate([long[:length]])
    assert bypassed(warm) == [[False] * 4]
    assert counters(warm)["match_blocks_found"] == 1 + 5 + 7 + 7
    assert counters(warm)["load_runs"] == 0 and not caplog.text


def test_a_step_with_decodes_runs(world: World) -> None:
    answers = stored(world)
    for store in (True, False):
        engine = world.engine(store=store, seed=1)
        first, second = Sequence(list(PROMPTS[3])), Sequence(list(PROMPTS[4]))
        engine.step([(first, 37)])
        engine.step([(second, 64)], [first])
        engine.step([], [first, second])
        assert (first.tokens[37:], second.tokens[64:]) == (answers[3][:3], answers[4][:2])
        if store:
            assert bypassed(engine) == [[True, False]]


def test_a_stage_that_samples_nothing_runs_a_step_with_decodes_too(world: World) -> None:
    stored(world, pp=2)
    engine = world.engine(pp=2, seed=1)
    first, second = Sequence(list(PROMPTS[3])), Sequence(list(PROMPTS[4]))
    engine.step([(first, 37)])
    engine.step([(second, 64)], [first])
    assert bypassed(engine) == [[True, False], [True, False]]
    plain = world.engine(store=False).generate([PROMPTS[3], PROMPTS[4]])
    assert (first.tokens[37:], second.tokens[64:]) == (plain[0][:2], plain[1][:1])


def test_a_step_of_decodes_alone_asks_nothing(world: World) -> None:
    engine = world.engine()
    connector = engine.runners[0].connector
    sequence = Sequence(list(PROMPTS[0]))
    engine.step([(sequence, 5)])
    before = counters(engine)
    made = SimpleNamespace(attn_metadata=SimpleNamespace(num_prefills=0), input_tokens=torch.zeros(1))
    caches = engine.runners[0].kv_caches
    assert connector.recv_kv_caches_and_hidden_states(None, made, caches) == (None, False, made)
    connector.send_kv_caches_and_hidden_states(None, made, caches, torch.zeros(1, 32))
    assert counters(engine) == before


def test_chunked_prefill_is_served_for_its_first_piece_only(world: World) -> None:
    [long] = prompts(60)
    plain = world.engine(store=False).generate([long])
    made = []
    for _ in range(2):
        engine = world.engine()
        sequence = Sequence(list(long))
        engine.step([(sequence, 24)])
        engine.step([(sequence, 24)])
        engine.step([(sequence, 12)])
        for _ in range(3):
            engine.step([], [sequence])
        assert sequence.tokens[60:] == plain[0]
        engine.close()
        made.append(bypassed(engine))
    assert made == [[[False, False, False]], [[True, False, False]]]
    # What a piece has computed serves every prompt that begins alike, up to its end.
    assert world.engine().generate([long[:24]]) == world.engine(store=False).generate([long[:24]])


def test_a_prompt_that_begins_in_the_engines_own_prefix_cache_runs(world: World) -> None:
    stored(world)
    engine = world.engine(seed=1)
    first = Sequence(list(PROMPTS[4]))
    engine.step([(first, 64)])
    second = Sequence(list(PROMPTS[4]), blocks=first.blocks[:3], computed=3 * BLOCK)
    third = Sequence(list(PROMPTS[3]))
    engine.step([(second, 40), (third, 37)])
    assert bypassed(engine) == [[True, False]]
    assert second.tokens == first.tokens
    assert third.tokens[37:] == world.engine(store=False).generate([PROMPTS[3]], 1)[0]
    before = world.files()
    engine.close()
    assert world.files() == before


def test_the_last_piece_of_a_prompt_is_never_served_with_another(world: World) -> None:
    """Also where neither of its rows is sampled from, so that nothing but its missing beginning says so."""

    class Whole(KVStoreConnectorV0):
        def extra_keys(self, model_input: Any, prompts: Any) -> list[bytes | None]:
            return [None if prompt is None else b"" for prompt in prompts]

    stored(world)
    [long] = prompts(60, seed=4)
    engine = world.engine(kind=Whole, seed=1)
    sequence = Sequence(list(long))
    engine.step([(sequence, 24)])
    engine.step([(sequence, 24), (Sequence(list(PROMPTS[4])), 64)])
    engine.step([(sequence, 12)])
    assert bypassed(engine) == [[False, False, False]]
    assert sequence.tokens[60:] == world.engine(store=False).generate([long], 1)[0]


def test_prompt_log_probabilities_need_every_row(world: World) -> None:
    answers = stored(world)
    engine = world.engine()
    assert engine.generate(PROMPTS, prompt_logprobs=True) == answers
    assert bypassed(engine) == [[False]]


def test_slots_that_are_not_written_are_not_stored(world: World) -> None:
    """A model with a sliding window drops the first tokens of a long prompt: slot -1."""
    engine = world.engine()
    connector, runner = engine.runners[0].connector, engine.runners[0]
    sequence = Sequence(list(PROMPTS[4]))
    engine.pool.grow(sequence)
    made = model_input([(sequence, 64)], [])
    hidden = runner.model(made, runner.kv_caches, None)
    made.attn_metadata.slot_mapping[:4] = -1
    connector.send_kv_caches_and_hidden_states(runner.model, made, runner.kv_caches, hidden)
    made.attn_metadata.slot_mapping[:4] = torch.tensor(sequence.slots(0, 4))
    made.input_positions = made.input_positions + 1
    connector.send_kv_caches_and_hidden_states(runner.model, made, runner.kv_caches, hidden)
    engine.close()
    assert world.files() == []


# ---- what it costs --------------------------------------------------------------------------------


def test_what_is_stored_is_neither_copied_nor_written_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(world)
    before = world.files()
    warm = world.engine()
    copied: list[int] = []
    real = torch.stack
    monkeypatch.setattr("connectors.v0.pages.torch.stack", lambda *a: copied.append(1) or real(*a))
    warm.generate(PROMPTS)
    warm.generate([*PROMPTS, prompts(20, seed=3)[0]])
    assert len(copied) == 2, "the new prompt's blocks and its rest, nothing of the others"
    warm.close()
    assert len(world.files()) == len(before) + 1


def test_prompts_that_begin_alike_share_their_beginning(world: World) -> None:
    extra = {"segment": {"max_blocks": 4}}
    [long] = prompts(80)
    first = world.engine(extra=extra)
    first.generate([long[:70]])
    first.close()
    assert len(world.files()) == 2, "blocks 0 to 3, 4 to 7 and the end"
    second = world.engine(extra=extra)
    second.generate([long])
    second.close()
    saved = counters(second)
    assert saved["save_blocks{present}"] == 0 and saved["save_blocks{stored}"] == 3
    assert len(world.files()) == 3


def test_short_prompts_are_left_out_where_the_settings_say_so(world: World) -> None:
    extra = {"admission": {"min_blocks": 3}}
    engine = world.engine(extra=extra)
    engine.generate(PROMPTS)
    engine.close()
    assert counters(engine)["save_blocks{not_admitted}"] == 1 + 2 + 3
    least = world.engine(extra={"kv": {"min_load_blocks": 9}})
    least.generate([PROMPTS[4]])
    assert bypassed(least) == [[False]]
    assert counters(least)["miss_blocks{below_threshold}"] == 8
    enough = world.engine(extra={"kv": {"min_load_blocks": 8}})
    enough.generate([PROMPTS[4]])
    assert bypassed(enough) == [[True]]
