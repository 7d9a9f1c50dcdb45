"""The v0 adapter's interface, what it takes for the same prompt, and what it refuses."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the connectors' tests need the full set-up: make setup")

from connectors.v0.connector import KVStoreConnectorV0
from kvstore.errors import ConfigError
from tests.connectors.v0.model import BLOCK, IntermediateTensors, Model, Sequence, config
from tests.connectors.v0.world import PROMPTS, World, bypassed, namespaces, stored

pytestmark = pytest.mark.engine  # the full set-up, not an engine


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as made:
        yield made


# ---- identity -------------------------------------------------------------------------------------


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
    ids=lambda change: "-".join(f"{k}" for k in change),
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
        (
            lambda made: made.kv_transfer_config.kv_connector_extra_config.update(
                kv={"observe": True}, trace={"folder": "/nowhere"}
            ),
            "kv.observe",
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


# ---- the interface --------------------------------------------------------------------------------


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
del sys.modules["connectors.v0"], sys.modules["connectors.v0.connector"]
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
del sys.modules["connectors.v0"], sys.modules["connectors.v0.connector"]
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
from tests.connectors.v0 import model as world
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
