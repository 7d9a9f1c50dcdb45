"""A rank's comparisons of what it has computed with what is stored, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the connectors' tests need the full set-up: make setup")
pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.distance import Tolerance, distances
from connectors.kv.messages import GroupLoad, Load, Save
from connectors.kv.worker.worker import KVWorker
from kvstore.keys import digests, new_segment_id, parse_payload_name
from kvstore.store.space import Space
from kvstore.store.store import Store
from tests.connectors.groups import LAYERS, WORKERS
from tests.store.world import chain, make_store, match, open_space, with_scarce_reads
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.engine

BLOCKS = 20
A = chain(*range(8))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = make_store(tmp_path)
    yield made
    made.close()


@pytest.fixture
def space(store: Store) -> Space:
    return open_space(store)


@pytest.fixture
def caches() -> dict[str, Any]:
    numbers = torch.Generator().manual_seed(7)
    return {name: torch.randn(BLOCKS, 2, 8, 16, generator=numbers).bfloat16() for name in LAYERS}


@pytest.fixture
def worker(store: Store, space: Space, caches: dict[str, Any]) -> KVWorker:
    made = KVWorker(store, WORKERS, segment_blocks=[4])
    made.register(caches, BLOCKS)
    made.use(space.namespace)
    return made


@pytest.fixture
def audit(worker: KVWorker, space: Space, store: Store) -> Callable[[], dict[str, int]]:
    """Compares blocks 5 to 12 with what is stored of A. Returns what has been counted."""

    def compare() -> dict[str, int]:
        runs = match(space, A).runs
        worker.audits.start([Load("r", [GroupLoad(0, 0, runs, A, {0: list(range(5, 13))})])])
        assert store.transfers.drain(PATIENCE_S)
        stats = worker.take_stats()
        counts = {} if stats is None else stats.data["counts"]
        return {name: int(count) for name, count in counts.items() if name.startswith("audits")}

    return compare


@pytest.fixture
def saved(worker: KVWorker, store: Store) -> None:
    """A is stored from blocks 5 to 12, as two segments."""
    for at in (0, 4):
        ids = list(range(5 + at, 9 + at))
        segment, part = new_segment_id(digests(A)), A[at : at + 4]
        worker.writes.start([Save(0, segment, 1_700_000_000, at, part, {0: ids}, chain=digests(A[:1]))])
    assert store.transfers.drain(PATIENCE_S)
    worker.take_report()


@pytest.mark.usefixtures("saved")
def test_what_is_stored_as_it_was_computed_is_alike(worker: KVWorker, audit: Any, space: Space) -> None:
    assert sum(audit().values()) == audit()["audits{alike}"]
    assert worker.take_report() is None
    assert match(space, A).blocks == 8
    assert worker.memory.saves.used_bytes == 0


@pytest.mark.usefixtures("saved")
def test_rounding_is_alike_and_learned(worker: KVWorker, audit: Any, caches: dict[str, Any]) -> None:
    for tensor in caches.values():
        noise = 1 + 2**-6 * (torch.rand(tensor.shape) - 0.5)
        tensor.copy_((tensor.float() * noise).bfloat16())
    for _ in range(8):
        audit()
    assert worker.take_report() is None
    tolerance = worker.audits._tolerances[0]
    assert 0 < tolerance._largest < 0.012 and tolerance.limit < 0.2


@pytest.mark.parametrize("change", ["most tokens of a head", "one head everywhere", "not a number", "sign"])
@pytest.mark.usefixtures("saved")
def test_one_wrong_block_is_found_evicted_and_both_are_kept(
    change: str, worker: KVWorker, audit: Any, caches: dict[str, Any], space: Space, store: Store
) -> None:
    layer = caches[LAYERS[-1]]
    match_before = match(space, A)
    wrong = next(run.segment for run in match_before.runs if run.start <= 6 < run.start + run.count)
    block = layer[11]  # block 6 of the chain
    if change == "most tokens of a head":
        block[1, 3:] = layer[12][1, 3:]
    elif change == "one head everywhere":
        block[1] = layer[12][1]
    elif change == "not a number":
        block[0, 0, 0] = torch.nan
    else:
        block.neg_()
    counts = audit()
    assert counts["audits{wrong}"] == 1 and counts["audits{alike}"] >= 1
    report = worker.take_report()
    assert report is not None and list(report.wrong) == [wrong]
    one = report.wrong[wrong]
    assert (one.request_id, one.group) == ("r", 0)
    assert one.first <= 6 < one.first + len(one.hashes) and one.hashes == A[one.first :][: len(one.hashes)]
    assert match(space, A).blocks < 8
    # Both payloads are kept, what was stored and what was computed, where nobody looks for payloads.
    listed = {parsed[1] for one in store.payloads.list() if (parsed := parse_payload_name(one.name))}
    kept = {
        parsed[1]
        for one in store.backends.evidence.copies(space.id)
        if (parsed := parse_payload_name(one.name))
    }
    assert wrong in kept and len(kept) == 2 and not kept & listed
    # The index has it deleted at once as well, should this engine have ended before it could.
    assert [segment for segment, _ in store.maintenance.reapable(space.id, None, 10)] == [wrong]


@pytest.mark.usefixtures("saved")
def test_a_token_that_another_expert_has_had_is_no_wrong_block(
    worker: KVWorker, audit: Any, caches: dict[str, Any]
) -> None:
    """Rounding can send a token to another expert: its state is then another, and right all the same."""
    for tensor in caches.values():
        tensor[5:13, :, 2] = tensor[13:14, :, 5].clone()
    assert set(audit()) == {"audits{alike}"}
    assert worker.take_report() is None


@pytest.mark.usefixtures("saved")
def test_what_finds_no_room_is_not_compared(worker: KVWorker, audit: Any) -> None:
    held = worker.memory.saves.try_acquire(worker.memory.saves.size_bytes)
    counts = audit()
    assert set(counts) == {"audits{dropped}"}
    assert held is not None
    worker.memory.saves.release(held)
    assert worker.take_report() is None


@pytest.mark.usefixtures("saved")
def test_what_is_gone_is_not_compared(worker: KVWorker, audit: Any, store: Store) -> None:
    store.payloads.delete([one.name for one in store.payloads.list()])
    assert set(audit()) == {"audits{unread}"}
    assert worker.memory.saves.used_bytes == 0


@pytest.mark.usefixtures("saved")
def test_nothing_is_compared_while_reads_are_scarce(worker: KVWorker, audit: Any, store: Store) -> None:
    worker.audits._store = with_scarce_reads(store)
    assert set(audit()) == {"audits{unread}"}
    assert worker.memory.saves.used_bytes == 0
    worker.audits._store = store
    assert set(audit()) == {"audits{alike}"}


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("F32", "float32"), ("BF16", "bfloat16"), ("F16", "float16"), ("F8_E4M3", "float8_e4m3fn")],
)
def test_rounding_and_other_blocks_lie_on_either_side_of_the_bounds(dtype: str, kind: str) -> None:
    numbers = torch.Generator().manual_seed(1)
    exact = torch.randn(4, 3, 2, 8, 16, generator=numbers, dtype=torch.float64)

    def stored(values: Any) -> Any:
        return values.to(getattr(torch, kind)).flatten(1).view(torch.uint8)

    one, other = stored(exact), stored(torch.randn(exact.shape, generator=numbers, dtype=torch.float64))
    # As if computed in another order: off by a unit in the last place or so.
    near = stored(exact * (1 + torch.finfo(getattr(torch, kind)).eps * (torch.rand(exact.shape) - 0.5)))
    shape = (3, 2, 8, 16)
    assert distances(one, one, dtype, shape) == [0.0] * 4
    least, most = Tolerance(dtype)._least, Tolerance(dtype)._most
    assert max(distances(near, one, dtype, shape)) < least * 2
    assert min(distances(other, one, dtype, shape)) > 2 * most


def test_a_last_token_that_is_no_number_is_a_token_like_others() -> None:
    """In a draft model's layers it follows from the next token, too, which a block's name doesn't cover."""
    stored = torch.randn(1, 1, 2, 8, 16, generator=torch.Generator().manual_seed(2)).bfloat16()

    def apart(*tokens: int, value: float) -> set[float]:
        computed = stored.clone()
        computed[:, :, :, list(tokens)] = value
        one, other = (side.flatten(1).view(torch.uint8) for side in (computed, stored))
        return {distances(*pair, "BF16", (1, 2, 8, 16))[0] for pair in ((one, other), (other, one))}

    nan, inf = float("nan"), float("inf")
    assert apart(7, value=nan) == apart(7, value=inf) == {0.0}
    assert apart(6, value=nan) == {inf}, "of any other it is no rounding"
    assert min(apart(*range(8), value=inf)) > 1


def test_a_number_that_is_infinite_hides_no_others() -> None:
    numbers = torch.Generator().manual_seed(3)
    one, other = (torch.randn(1, 1, 1, 8, 16, generator=numbers).bfloat16() for _ in range(2))
    one[..., 7, :] = other[..., 7, :] = float("inf")
    sides = (side.flatten(1).view(torch.uint8) for side in (one, other))
    assert distances(*sides, "BF16", (1, 1, 8, 16))[0] > 0.5


def test_a_tolerance_narrows_to_what_it_has_seen_and_never_below_the_dtypes() -> None:
    tolerance = Tolerance("BF16")
    assert tolerance.limit == 0.2
    assert tolerance.judge([0.004] * 100) and tolerance.limit == pytest.approx(0.064)
    assert not tolerance.judge([0.0] * 99 + [0.07]) and tolerance.limit == pytest.approx(0.064)
    exact = Tolerance("BF16")
    exact.judge([0.0] * 100)
    assert exact.limit == 0.02
    assert not Tolerance("F32").judge([float("nan")])


@pytest.mark.parametrize("how", ["alike", "unsure", "differs", "dropped"])
@pytest.mark.usefixtures("saved")
def test_a_proof_is_reported_as_one_and_condemns_nothing(
    how: str, worker: KVWorker, caches: dict[str, Any], space: Space, store: Store
) -> None:
    if how == "unsure":
        for tensor in caches.values():
            tensor.copy_((tensor.float() * (1 + 0.5 * (torch.rand(tensor.shape) - 0.5))).bfloat16())
    elif how == "differs":
        caches[LAYERS[-1]][11].neg_()
    held = worker.memory.saves.try_acquire(worker.memory.saves.size_bytes) if how == "dropped" else None
    runs, writer = match(space, A).runs, store.backends.writer.id
    worker.audits.start([Load("r", [GroupLoad(0, 0, runs, A, {0: list(range(5, 13))})], proof=True)])
    assert store.transfers.drain(PATIENCE_S)
    report = worker.take_report()
    assert report is not None and report.wrong == {}
    compared = report.compared["r"]
    assert compared.steps == 1, "once, when all of it has ended"
    assert (writer in compared.wrong) == (how == "differs")
    if how == "differs":
        run, one = compared.wrong[writer]
        assert run.start <= 6 < run.start + run.count and one.request_id == "r"
    else:
        assert compared.alike == ({writer: {0}} if how == "alike" else {})
    assert match(space, A).blocks == 8, "nothing is condemned by one opinion"
    if held is not None:
        worker.memory.saves.release(held)
    assert worker.memory.saves.used_bytes == 0
