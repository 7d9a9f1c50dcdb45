"""A connector that only observes, under vLLM's own scheduler: what it records, and that it does no more."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.choice.cost import TokenCost
from connectors.engine.layout import Group
from connectors.kv.connector import KVStoreConnector
from connectors.observing.kv import ObservingKVConnector
from connectors.observing.recording import Asked, CostTeller
from kvstore.admin.advise.traces import Assumed, Trace, read_traces
from kvstore.admin.progress import Silent
from kvstore.build import load_settings, open_recording
from kvstore.keys import NamespaceId
from kvstore.rules.prefix import PrefixRule
from schemas.namespace import GroupSpec
from schemas.settings import Settings
from tests.connectors.kv.bed import TOKENS, Bed
from tests.store.world import chain, namespace

pytestmark = pytest.mark.engine


def prompt(*names: int, more: int = 3) -> list[int]:
    """The tokens of whole blocks of these names, and a few that fill none."""
    return [100 + name for name in names for _ in range(TOKENS)] + [1] * more


def observing(folder: Path, **settings: Any) -> Bed:
    kv = {"observe": True, **settings.pop("kv", {})}
    return Bed(folder, payloads=None, index=None, trace={"folder": str(folder / "trace")}, kv=kv, **settings)


def read(folder: Path) -> Trace:
    return read_traces([folder / "trace"], Assumed(), Silent())


def test_it_records_what_is_asked_and_how_much_the_engine_has_itself(tmp_path: Path) -> None:
    with observing(tmp_path) as bed:
        assert isinstance(bed.half, ObservingKVConnector)
        for names in ((1, 2, 3), (1, 2, 3, 4), (1, 5)):
            bed.request(prompt(*names), session_id="chat")
            bed.run()
        computed = bed.computed_tokens
    trace = read(tmp_path)
    assert [request.chain for request in trace.requests] == [[0, 1, 2], [0, 1, 2, 3], [0, 4]]
    # Its own cache had what came before, and no store has helped.
    assert [request.local for request in trace.requests] == [0, 3, 1]
    assert computed == sum((3, 1, 1)) * TOKENS + 9
    assert trace.skipped == 0 and len({request.session for request in trace.requests}) == 1
    [space] = trace.spaces
    assert (space.kind, space.block_tokens, space.parts, space.gpus) == ("kv", TOKENS, 1, 1)
    assert (space.model, space.tenant) == ("model", "default")
    # Nothing else is written, and no word of a request.
    assert {path.name for path in tmp_path.iterdir()} == {"model", "trace"}
    [file] = (tmp_path / "trace").iterdir()
    assert b"chat" not in file.read_bytes()


def test_a_store_would_have_been_asked_for_the_same(tmp_path: Path) -> None:
    asked = [(1, 2, 3), (7,), (1, 2, 4, 5)]
    observed, stored = tmp_path / "observed", tmp_path / "stored"
    for folder in (observed, stored):
        folder.mkdir()
    with observing(observed) as bed:
        for names in asked:
            bed.request(prompt(*names))
            bed.run()
    with Bed(stored, trace={"folder": str(stored / "trace")}) as bed:
        for names in asked:
            bed.request(prompt(*names))
            bed.run()
        bed.drain()
    one, other = read(observed), read(stored)
    assert [request.chain for request in one.requests] == [request.chain for request in other.requests]
    assert one.spaces == other.spaces


def test_a_request_is_one_line_however_many_groups_it_needs(tmp_path: Path) -> None:
    """Latents, an indexer of larger blocks, and a window: what is computed, is computed once."""
    specs = (
        GroupSpec(
            kind="sliding_window", block_tokens=8, dtype="BF16", shape=(1, 2, 8, 4), shards=2, window=20
        ),
        GroupSpec(kind="mla", block_tokens=8, dtype="BF16", shape=(3, 1, 8, 64)),
        GroupSpec(kind="mla", block_tokens=16, dtype="U8", shape=(3, 1, 16, 10)),
    )
    rules = (PrefixRule("window", 8, 20), PrefixRule("prefix", 8), PrefixRule("prefix", 16))
    groups = [
        Group(spec, rule, (0,), offered=False, writers=1, part_bytes=spec.slot_bytes)
        for spec, rule in zip(specs, rules, strict=True)
    ]
    settings = load_settings({"kv": {"observe": True}, "trace": {"folder": str(tmp_path / "trace")}}, {})
    asked = Asked(open_recording(settings), namespace(groups=specs), groups, 8, adapters=False)
    view: Any = SimpleNamespace(
        request_id="r", skip_reading_prefix_cache=False, lora_request=None, block_hashes=chain(1, 2, 3, 4, 5),
        session_id=None, cache_salt="", kv_transfer_params={}, kv_hints=[],
    )  # fmt: skip
    asked.arrives(view)
    asked.comes_to(view, 17)
    asked.close()
    found = read(tmp_path)
    [request], [space] = found.requests, found.spaces
    assert (request.chain, request.local) == ([0, 1, 2, 3, 4], 2)
    assert (space.block_tokens, space.parts) == (8, 1)
    # A block of the latents, and half a block of the indexer.
    assert space.block_bytes == 3 * 8 * 64 * 2 + 3 * 16 * 10 // 2


def test_a_request_counts_once_and_only_if_its_turn_comes(tmp_path: Path) -> None:
    # Room for one of the two: the other is asked about again and again, or preempted.
    with observing(tmp_path, blocks=12) as bed:
        bed.request(prompt(1, 2, 3, 4, 5), answers=60)
        bed.request(prompt(6, 7, 8, 9), answers=60)
        gone = bed.request(prompt(10))
        bed.scheduler.finish_requests(gone.request_id, _aborted())
        bed.run()
        assert len(bed.finished) == 2
        assert not bed.half._asked._requests and not bed.half._asked._new
    assert [len(request.chain) for request in read(tmp_path).requests] == [5, 4]


def _aborted() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


def test_after_a_reset_nothing_older_would_be_found(tmp_path: Path) -> None:
    with observing(tmp_path) as bed:
        for _ in range(2):
            bed.request(prompt(1, 2))
            bed.run()
            assert bed.half.reset_cache() is True
    trace = read(tmp_path)
    assert [request.chain for request in trace.requests] == [[0, 1], [2, 3]]
    assert len({space.namespace for space in trace.spaces}) == 2


def test_whatever_fails_costs_a_line_and_no_request(tmp_path: Path, faults: object) -> None:
    with observing(tmp_path) as bed:
        asked = bed.half._asked
        asked._trace = None  # every call fails from here on
        bed.request(prompt(1, 2), answers=3)
        bed.run()
        assert len(bed.finished) == 1
        asked._trace = asked._recording.trace
        bed.request(prompt(1))
        bed.run()
    assert [request.chain for request in read(tmp_path).requests] == [[0]]


def test_without_the_setting_it_is_the_connector_that_stores(tmp_path: Path) -> None:
    with Bed(tmp_path) as bed:
        assert type(bed.half) is KVStoreConnector


def test_what_computing_costs_is_told_now_and_then() -> None:
    calls: list[Any] = []

    class Told:
        def record_cost(self, *call: Any) -> None:
            calls.append(call)

    now = [0.0]
    cost = TokenCost(lambda: now[0])
    teller = CostTeller(Told(), cost)  # type: ignore[arg-type]
    name = NamespaceId("0" * 16)
    teller.tell(name, 100.0)
    assert not calls  # nothing is known yet
    cost.sent(1000, 1)
    now[0] += 0.1
    cost.ended()
    for at_s in (101.0, 110.0, 130.9, 131.0):
        teller.tell(name, at_s)
    assert [call[1] for call in calls] == [101.0, 131.0]
    assert calls[0][2] == pytest.approx(100.0)
    CostTeller(None, cost).tell(name, 200.0)  # nothing is recorded


def test_steps_are_measured_at_their_depth(tmp_path: Path) -> None:
    with observing(tmp_path, batch_tokens=64) as bed:
        asked: Asked = bed.half._asked
        bed.request(prompt(*range(1, 41)))
        bed.run()
        prefill = asked.cost.prefill()
        assert prefill is not None and prefill.token_us > 0
        assert asked.cost._x / asked.cost._w > 100  # tokens that precede one, on average
        assert asked.cost.under_way == 0
        bed.request(prompt(50))
        bed.run()
    [cost] = read(tmp_path).costs
    assert cost.token_us > 0 and cost.space == 0


def test_a_recording_needs_a_folder_and_no_store(tmp_path: Path) -> None:
    settings = load_settings({"kv": {"observe": True}, "trace": {"folder": str(tmp_path / "trace")}}, {})
    assert settings.nowhere and isinstance(settings, Settings)
    recording = open_recording(settings)
    recording.close()
    recording.close()
    assert not (tmp_path / "trace").exists()
