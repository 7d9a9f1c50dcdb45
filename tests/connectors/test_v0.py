"""The v0 adapter under a model loop of its own: what it answers, and that it never changes a token."""

from __future__ import annotations

import inspect
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the connectors' tests need the full set-up: make setup")

from connectors import v0, v0_worker
from connectors.v0 import KVStoreConnectorV0
from kvstore.blobs.faulty import Plan, Rule
from kvstore.errors import ConfigError
from tests.connectors.v0_model import (
    BLOCK,
    LAYERS,
    VOCAB,
    Cluster,
    IntermediateTensors,
    Meeting,
    Model,
    Rank,
    Runner,
    Sequence,
    config,
    model_input,
    together,
)
from tests.store.world import make_store

pytestmark = pytest.mark.engine  # the full set-up, not an engine

LENGTHS = (5, 8, 16, 37, 64)


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    drawn = random.Random(seed)
    return [[drawn.randrange(VOCAB) for _ in range(length)] for length in lengths]


PROMPTS = prompts(*LENGTHS)


class World:
    """Engines over one folder, each with connectors of its own; all are closed at the end."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._open: list[Cluster] = []

    def engine(
        self,
        *,
        tp: int = 1,
        pp: int = 1,
        mla: bool = False,
        store: bool = True,
        seed: int = 0,
        role: str = "kv_both",
        kind: type[KVStoreConnectorV0] = KVStoreConnectorV0,
        model_seed: int = 0,
        extra: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Cluster:
        settings = {"payloads": f"file://{self.root}", **(extra or {})}
        stages: list[list[Runner]] = []
        for stage in range(pp):
            layers = range(LAYERS * stage // pp, LAYERS * (stage + 1) // pp)
            meeting = Meeting(tp)
            ranks = [Rank(meeting, number) if tp > 1 else None for number in range(tp)]
            models = [Model(layers, rank=rank, mla=mla, seed=model_seed) for rank in ranks]
            connectors: list[Any] = [None] * tp
            if store:
                made = config(settings, tp=tp, pp=pp, mla=mla, **changes)
                jobs = [
                    lambda n=number: kind(stage * tp + n, n, made, peers=ranks[n]) for number in range(tp)
                ]
                connectors = together(jobs)
            stages.append(
                [Runner(model, one, role=role) for model, one in zip(models, connectors, strict=True)]
            )
        cluster = Cluster(stages, seed=seed)
        self._open.append(cluster)
        return cluster

    def files(self) -> list[Path]:
        return sorted(self.root.glob("*/??/*"))

    def close(self) -> None:
        for cluster in self._open:
            cluster.close()


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """For tensors as small as these, and ranks in threads of their own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def calls(cluster: Cluster) -> list[int]:
    """Forward passes of each runner."""
    return [runner.model.calls for runner in cluster.runners]


def bypassed(cluster: Cluster) -> list[list[bool]]:
    return [runner.bypassed for runner in cluster.runners]


def counters(cluster: Cluster, which: int = 0) -> dict[str, int]:
    return cluster.runners[which].connector._worker._store.counters.snapshot()


def namespaces(runner: Runner) -> list[str]:
    return [space.id for space in runner.connector._worker._spaces.values()]


def stored(world: World, texts: list[list[int]] = PROMPTS, **kind: Any) -> list[list[int]]:
    """Have an engine compute and store prompts; returns what an engine without a store answers."""
    cold = world.engine(**kind)
    answers = cold.generate(texts)
    cold.close()
    plain = {name: value for name, value in kind.items() if name in ("tp", "pp", "mla", "model_seed")}
    assert answers == world.engine(store=False, **plain).generate(texts)
    assert bypassed(cold) == [[False]] * len(cold.runners)
    return answers


# ---- the same tokens -------------------------------------------------------------------------------


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


# ---- bypass exactly when allowed -------------------------------------------------------------------


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


# ---- identity --------------------------------------------------------------------------------------


def test_images_are_not_cached_unless_the_engine_says_what_they_are(world: World) -> None:
    plain = world.engine()
    plain.generate([PROMPTS[3]], image=b"cat")
    plain.close()
    assert world.files() == []

    class WithImages(KVStoreConnectorV0):
        def extra_keys(self, model_input: Any, prompts: Any) -> list[bytes | None]:
            return [model_input.multi_modal_kwargs["pixel_values"][0] for _ in prompts]

    for image, served in ((b"cat", False), (b"dog", False), (b"cat", True), (b"dog", True)):
        engine = world.engine(kind=WithImages)
        engine.generate([PROMPTS[3]], image=image)
        engine.close()
        assert bypassed(engine) == [[served]], image
    text = world.engine()
    text.generate([PROMPTS[3]])
    assert bypassed(text) == [[False]]


def test_adapters_are_cached_by_name_and_path_if_trusted_and_not_at_all_otherwise(world: World) -> None:
    for _ in range(2):
        engine = world.engine()
        engine.generate([PROMPTS[3]], lora=1)
        engine.close()
        assert bypassed(engine) == [[False]]
    assert world.files() == []
    trust = {"identity": {"weights": "w", "lora": "trust"}}
    for lora, served in ((1, False), (2, False), (0, False), (1, True), (2, True), (0, True)):
        engine = world.engine(extra=trust)
        engine.generate([PROMPTS[3]], lora=lora)
        engine.close()
        assert bypassed(engine) == [[served]], lora


def test_prompts_without_an_adapter_are_stored_beside_one_that_has_one(world: World) -> None:
    engine = world.engine()
    with_one, without = Sequence(list(PROMPTS[3]), lora=1), Sequence(list(PROMPTS[4]))
    engine.step([(with_one, 37), (without, 64)])
    engine.close()
    warm = world.engine()
    warm.generate([PROMPTS[4]])
    warm.generate([PROMPTS[3]])
    assert bypassed(warm) == [[True, False]]


@pytest.mark.parametrize(
    "change",
    [
        {"extra": {"identity": {"weights": "other"}}},
        {"extra": {"identity": {"weights": "w", "tenant": "other"}}},
        {"extra": {"identity": {"weights": "w", "epoch": 1}}},
        {"dtype": torch.bfloat16},
        {"revision": "v2"},
        {"quantization": "awq"},
        {"hf_config": SimpleNamespace(to_dict=lambda: {"rope_theta": 5.0}, hidden_size=32)},
        {"mla": True},
        {"tp": 2},
        {"pp": 2},
    ],
    ids=str,
)
def test_what_makes_other_bytes_is_another_namespace(world: World, change: dict[str, Any]) -> None:
    names = []
    for engine in (world.engine(), world.engine(), world.engine(**change)):
        engine.step([(Sequence(list(PROMPTS[0])), 5)])
        names.append({name for runner in engine.runners for name in namespaces(runner)})
    assert names[0] == names[1]
    assert names[0].isdisjoint(names[2])


def test_weights_on_disk_are_told_apart(world: World, tmp_path: Path) -> None:
    folders = [tmp_path / "models" / name / "m" for name in "ab"]
    for number, folder in enumerate(folders):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "weights.bin").write_bytes(bytes([number]) * 1000)
    extra = {"identity": {}}
    for folder, seed, served in ((0, 0, False), (1, 1, False), (0, 0, True), (1, 1, True)):
        engine = world.engine(extra=extra, model=str(folders[folder]), model_seed=seed)
        engine.generate(PROMPTS)
        engine.close()
        assert bypassed(engine) == [[served]]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda made: setattr(made, "speculative_config", object()), "speculative"),
        (lambda made: setattr(made.model_config, "is_encoder_decoder", True), "encoder-decoder"),
        (lambda made: setattr(made.cache_config, "calculate_kv_scales", True), "calculate-kv-scales"),
        (
            lambda made: made.kv_transfer_config.kv_connector_extra_config.update(
                admission={"second_use": True}
            ),
            "second_use",
        ),
        (lambda made: setattr(made.parallel_config, "tensor_parallel_size", 2), "tensor"),
    ],
)
def test_what_cannot_be_served_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None], word: str
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    made = config({"payloads": f"file://{tmp_path}"})
    change(made)
    with pytest.raises(ConfigError, match=word):
        KVStoreConnectorV0(0, 0, made)


# ---- trouble ---------------------------------------------------------------------------------------


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-20] ^= 0x40
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage", [_flip, lambda path: path.write_bytes(path.read_bytes()[:-1]), Path.unlink],
    ids=["flipped", "truncated", "missing"],
)  # fmt: skip
def test_a_damaged_payload_is_computed_and_stored_again(world: World, damage: Callable[[Path], Any]) -> None:
    answers = stored(world)
    before = world.files()
    for number, path in enumerate(before):
        if number % 2:
            damage(path)
    warm = world.engine(seed=1)
    assert warm.generate(PROMPTS) == answers
    assert bypassed(warm) == [[False]]
    warm.close()
    assert counters(warm)["quarantined_segments"] > 0
    again = world.engine(seed=2)
    assert again.generate(PROMPTS) == answers
    assert bypassed(again) == [[True]]


def test_a_closed_store_is_a_miss(world: World) -> None:
    answers = stored(world)
    engine = world.engine()
    engine.close()
    engine.close()
    assert engine.generate(PROMPTS) == answers
    assert bypassed(engine) == [[False]]


def test_an_index_that_is_down_costs_its_deadline_once(world: World) -> None:
    engine = world.engine(extra={"index": "redis://127.0.0.1:1/0"})
    plain = world.engine(store=False).generate(PROMPTS)
    began = time.monotonic()
    for _ in range(4):
        assert engine.generate(PROMPTS) == plain
    assert bypassed(engine) == [[False] * 4]
    assert time.monotonic() - began < 5
    assert world.files() == []


@pytest.fixture
def plan(world: World, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Faults of the payload store of every engine that is made from now on."""
    made = Plan()

    def open_for(settings: Any, what: str) -> Any:
        tree = settings.model_dump(mode="python", exclude={"payloads", "index"})
        return make_store(world.root, plan=made, **tree)

    monkeypatch.setattr(v0, "open_for", open_for)
    return made


def test_a_load_that_is_late_is_computed_and_the_next_one_does_not_wait(world: World, plan: Plan) -> None:
    answers = stored(world)
    warm = world.engine(extra={"kv": {"load_deadline_s": 0.3}, "transfers": {"drain_s": 0.1}}, seed=1)
    plan.replace(Rule("delay", ("read",), delay_s=3))
    began = time.monotonic()
    assert warm.generate(PROMPTS) == answers
    first = time.monotonic() - began
    assert first > 0.25
    worker = warm.runners[0].connector._worker
    assert worker._reads.hanging
    tried = plan.injected["read", "delay"]
    while worker._reads.hanging and len(warm.runners[0].bypassed) < 4:
        assert warm.generate(PROMPTS) == answers
    assert len(warm.runners[0].bypassed) == 4
    assert plan.injected["read", "delay"] == tried, "as long as reads hang, no step waits for others"
    plan.replace()
    while worker._reads.hanging:
        time.sleep(0.05)
    assert warm.generate(PROMPTS) == answers
    assert bypassed(warm) == [[False] * 4 + [True]]


def test_a_slow_index_costs_the_match_deadline(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = stored(world)
    engine = world.engine(extra={"kv": {"match_deadline_s": 0.2}, "transfers": {"drain_s": 0.1}})
    index = engine.runners[0].connector._worker._store.index
    found = index.match
    monkeypatch.setattr(index, "match", lambda *args: time.sleep(1.5) or found(*args))
    began = time.monotonic()
    assert engine.generate(PROMPTS) == answers
    assert time.monotonic() - began < 1.4
    assert bypassed(engine) == [[False]]
    assert counters(engine)["miss_blocks{deadline}"] > 0


def test_payloads_that_fail_are_a_miss_and_heal(world: World, plan: Plan) -> None:
    answers = stored(world)
    warm = world.engine(seed=1)
    plan.replace(Rule("transient"))
    assert warm.generate(PROMPTS) == answers
    plan.replace()
    assert warm.generate(PROMPTS) == answers
    assert bypassed(warm) == [[False, True]]


def test_a_save_that_has_no_room_is_dropped_before_it_is_copied(
    world: World, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    real = v0_worker.HostCopy
    monkeypatch.setattr(v0_worker, "HostCopy", lambda one: copied.append(one.numel()) or real(one))
    engine = world.engine(
        extra={"transfers": {"write_bytes": 20_000, "drain_s": 0.1}, "segment": {"max_blocks": 2}}
    )
    plan.replace(Rule("delay", ("put",), delay_s=3))
    plain = world.engine(store=False).generate(PROMPTS)
    began = time.monotonic()
    assert engine.generate(PROMPTS) == plain
    assert time.monotonic() - began < 2.5, "the step waits for no write"
    assert counters(engine)["save_blocks{dropped}"] > 0
    assert 0 < sum(copied) <= 20_000
    assert engine.runners[0].connector._worker._store.transfers.queued["write_bytes"] <= 20_000


class Raising(KVStoreConnectorV0):
    """What a mistake in a subclass, or a bug here, looks like to the engine."""

    def extra_keys(self, model_input: Any, prompts: Any) -> Any:
        raise RuntimeError("no")


def test_no_error_reaches_the_engine(world: World, caplog: pytest.LogCaptureFixture) -> None:
    answers = stored(world)
    engine = world.engine(kind=Raising)
    assert engine.generate(PROMPTS) == answers
    assert bypassed(engine) == [[False]]
    assert "the engine goes on without" in caplog.text


def test_a_layout_that_is_not_known_is_said_once_and_left_alone(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    engine = world.engine()
    runner = engine.runners[0]
    sequence = Sequence(list(PROMPTS[3]))
    engine.pool.grow(sequence)
    made = model_input([(sequence, 37)], [])
    # PagedAttention's: [2, blocks, tokens * heads * size], the tokens of a block interleaved.
    odd = [cache.reshape(2, cache.shape[1], -1) for cache in runner.kv_caches]
    for _ in range(3):
        answer = runner.connector.recv_kv_caches_and_hidden_states(runner.model, made, odd)
        assert answer == (None, False, made)
        runner.connector.send_kv_caches_and_hidden_states(runner.model, made, odd, torch.zeros(37, 32))
    assert caplog.text.count("is not supported; such steps run without the cache") == 1
    # The run that measures memory before there are caches.
    caplog.clear()
    nothing = [torch.empty(0) for _ in runner.kv_caches]
    assert runner.connector.recv_kv_caches_and_hidden_states(runner.model, made, nothing)[1] is False
    assert not caplog.text
    # An output of another width or with padded rows.
    for wrong in (torch.zeros(37, 31), torch.zeros(40, 32), torch.zeros(37, 32, dtype=torch.bfloat16)):
        runner.connector.send_kv_caches_and_hidden_states(runner.model, made, runner.kv_caches, wrong)
    engine.close()
    assert world.files() == []


# ---- what it costs ---------------------------------------------------------------------------------


def test_what_is_stored_is_neither_copied_nor_written_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(world)
    before = world.files()
    warm = world.engine()
    copied: list[int] = []
    real = torch.stack
    monkeypatch.setattr("connectors.v0_pages.torch.stack", lambda *a: copied.append(1) or real(*a))
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


# ---- several ranks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"tp": 2, "mla": True}], ids=str)
def test_every_rank_keeps_its_part_and_all_are_served(world: World, kind: dict[str, Any]) -> None:
    answers = stored(world, **kind)
    warm = world.engine(seed=1, **kind)
    assert warm.generate(PROMPTS) == answers
    assert bypassed(warm) == [[True]] * len(warm.runners)
    assert calls(warm) == [3] * len(warm.runners)
    warm.close()
    if kind.get("mla"):
        new = world.engine(**kind)
        new.generate(prompts(30, seed=8))
        new.close()
        offered = [
            sum(value for name, value in counters(new, rank).items() if name.startswith("save_blocks"))
            for rank in (0, 1)
        ]
        assert offered == [4, 0], "the second has nothing to add"
    parts = {path.suffix for path in world.files()}
    assert parts == ({".0", ".1"} if kind == {"tp": 2} or kind == {"tp": 2, "pp": 2} else {".0"})
    assert len({path.parts[-3] for path in world.files()}) == kind.get("pp", 1), "a namespace per stage"


@pytest.mark.parametrize("rank", [0, 1])
def test_if_one_rank_cannot_load_all_of_them_compute(
    world: World, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = stored(world, tp=2)
    for path in world.files():
        if path.suffix == f".{rank}":
            _flip(path)
    warm = world.engine(tp=2, seed=1)
    # The good one has loaded everything before the bad one tells the index.
    good, bad = (warm.runners[number].connector._worker for number in (1 - rank, rank))
    loaded, load, fail = threading.Event(), good.load, bad.load
    monkeypatch.setattr(good, "load", lambda *args: (load(*args), loaded.set())[0])
    monkeypatch.setattr(bad, "load", lambda *args: loaded.wait(20) and fail(*args))
    assert warm.generate(PROMPTS) == answers
    assert counters(warm, 1 - rank)["load_blocks"] == counters(warm, 1 - rank)["match_blocks_asked"]
    assert bypassed(warm) == [[False], [False]]
    assert calls(warm) == [4, 4]
    warm.close()
    again = world.engine(tp=2, seed=2)
    assert again.generate(PROMPTS) == answers
    assert bypassed(again) == [[True], [True]], "what was bad is stored anew, by both"


def test_ranks_with_different_clocks_agree_on_when(world: World) -> None:
    engine = world.engine(tp=2)
    now = time.time()
    engine.runners[0].connector._clock = lambda: now + 100
    answers = engine.generate(PROMPTS)
    engine.close()
    warm = world.engine(tp=2, seed=1)
    assert warm.generate(PROMPTS) == answers
    assert bypassed(warm) == [[True], [True]]
    catalogue = warm.runners[0].connector._worker._store.catalogue
    [name] = namespaces(warm.runners[0])
    assert all(abs(one.record.created_s - now) < 50 for one in catalogue.segments(name))


def test_a_part_that_one_rank_could_not_write_is_never_served(world: World) -> None:
    engine = world.engine(tp=2)
    engine.runners[1].connector._worker._store.transfers.close(0)
    answers = engine.generate(PROMPTS)
    engine.close()
    assert {path.suffix for path in world.files()} == {".0"}
    warm = world.engine(tp=2, seed=1)
    assert warm.generate(PROMPTS) == answers
    assert bypassed(warm) == [[False], [False]]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_cannot_load_computes_from_what_the_other_has_handed_on(
    world: World, stage: int
) -> None:
    answers = stored(world, pp=2)
    probe = world.engine(pp=2)
    probe.generate([PROMPTS[0]])
    for path in world.files():
        if path.parts[-3] in namespaces(probe.runners[stage]):
            _flip(path)
    warm = world.engine(pp=2, seed=1)
    assert warm.generate(PROMPTS) == answers
    expected = [[True], [True]]
    expected[stage] = [False]
    assert bypassed(warm) == expected


# ---- the interface ---------------------------------------------------------------------------------


def test_the_hooks_are_spelled_as_the_interface_has_them() -> None:
    def names(method: Any) -> list[str]:
        return list(inspect.signature(method).parameters)

    made = KVStoreConnectorV0
    assert names(made.__init__)[:4] == ["self", "rank", "local_rank", "config"]
    assert names(made.recv_kv_caches_and_hidden_states) == [
        "self", "model_executable", "model_input", "kv_caches",
    ]  # fmt: skip
    assert names(made.send_kv_caches_and_hidden_states) == [
        "self", "model_executable", "model_input", "kv_caches", "hidden_or_intermediate_states",
    ]  # fmt: skip
    assert names(made.close) == ["self"]


_IMPORTED = """
import sys, types
from abc import ABC, abstractmethod
import connectors.v0 as before
assert not [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")], "needs no vllm"
assert before.KVStoreConnectorV0.__mro__[1] is object
del sys.modules["connectors.v0"]
class KVConnectorBase(ABC):
    @abstractmethod
    def __init__(self, rank, local_rank, config): ...
    @abstractmethod
    def close(self): ...
    @abstractmethod
    def send_kv_caches_and_hidden_states(self, a, b, c, d): ...
    @abstractmethod
    def recv_kv_caches_and_hidden_states(self, a, b, c): ...
name = "vllm.distributed.kv_transfer.kv_connector.base"
sys.modules[name] = types.SimpleNamespace(KVConnectorBase=KVConnectorBase)
import connectors.v0 as after
assert issubclass(after.KVStoreConnectorV0, KVConnectorBase), "the v0 factory insists on it"
assert not after.KVStoreConnectorV0.__abstractmethods__
del sys.modules["connectors.v0"]
sys.modules[name] = types.SimpleNamespace(KVConnectorBase=type("V1", (), {}))
import connectors.v0 as later
assert later.KVStoreConnectorV0.__mro__[1] is object, "later versions keep the name for another interface"
"""


def test_it_needs_no_vllm_and_is_what_its_factory_wants_where_there_is_one() -> None:
    subprocess.run([sys.executable, "-c", _IMPORTED], check=True, timeout=120)


def test_what_is_stored_is_named_apart_from_every_other_kv(world: World) -> None:
    stored(world)
    engine = world.engine()
    engine.generate(PROMPTS)
    [space] = engine.runners[0].connector._worker._spaces.values()
    made = space.namespace
    assert (made.kind, made.hash_algo, made.block_tokens) == ("kv", "kvstore-v0-sha256", BLOCK)
    assert made.groups[0].shape == (4, 4, BLOCK, 16) and made.page_format.startswith("v0/cpu/")
    assert isinstance(Model().make_empty_intermediate_tensors(1, torch.float32, "cpu"), IntermediateTensors)


_RANK = """
import sys, types
from pathlib import Path
rank, root = int(sys.argv[1]), Path(sys.argv[2])
import torch
import torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{root}/meet", rank=rank, world_size=2)
state = types.ModuleType("vllm.distributed.parallel_state")
state.get_tp_group = lambda: types.SimpleNamespace(cpu_group=dist.group.WORLD)
sys.modules |= {"vllm": types.ModuleType("vllm"), "vllm.distributed": types.ModuleType("vllm.distributed"),
                "vllm.distributed.parallel_state": state}
from connectors.v0 import KVStoreConnectorV0
from tests.connectors import v0_model as world
class Real(world.Meeting):
    def exchange(self, rank, value):
        held = [torch.empty_like(value) for _ in range(2)]
        dist.all_gather(held, value.contiguous())
        return held
text = [int(one) for one in range(40)]
def engine(store):
    meeting = Real(2)
    model = world.Model(rank=world.Rank(meeting, rank))
    made = world.config({"payloads": f"file://{root}/store"}, tp=2)
    return world.Cluster([[world.Runner(model, KVStoreConnectorV0(rank, rank, made) if store else None)]])
plain = engine(False).generate([text])
for served in (False, True):
    one = engine(True)
    assert one.generate([text]) == plain
    assert one.runners[0].bypassed == [served], one.runners[0].bypassed
    one.close()
    dist.barrier()
print("as it should be")
"""


@pytest.mark.slow
def test_ranks_in_processes_agree_over_the_engines_own_group(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert outputs == ["as it should be\n"] * 2
