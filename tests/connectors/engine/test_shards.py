"""A block in parts: whoever has cut it, whoever reads it gets its own layers and heads of it."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.engine.layout import LocalGroup, Page, merge
from connectors.engine.shards import Place, fits, read_part
from kvstore.cli.app import app
from kvstore.conformance.faulty import Plan, Rule
from kvstore.errors import CorruptPayload, DeadlineExceeded, NamespaceMismatch
from kvstore.format import segment as codec
from kvstore.format.segment import Slot
from kvstore.keys import block_key, digests, new_segment_id, payload_name
from kvstore.store.space import Space
from kvstore.store.store import Store
from kvstore.verify.headers import record_of
from schemas.namespace import GroupSpec, Namespace, Parallel
from tests.store.world import chain, make_store, namespace

pytestmark = pytest.mark.engine

TOKENS, CONTENT = 4, 6
#: numpy has no bfloat16; bits are bits.
BF16 = np.uint16


@dataclass(frozen=True)
class Cut:
    """How an engine cuts a block: layers of each pipeline stage, shards of heads, ranks per shard."""

    stages: tuple[int, ...]
    heads: int
    shards: int
    replicas: int = 1

    @property
    def tp(self) -> int:
        return self.shards * self.replicas

    def group(self, stage: int) -> LocalGroup:
        first = sum(self.stages[:stage])
        names = tuple(f"layers.{i}" for i in range(first, first + self.stages[stage]))
        heads = self.heads // self.shards
        page = Page("full", TOKENS, 0, "BF16", heads, TOKENS, CONTENT, self.shards, offered=False)
        return LocalGroup(page, ((0, names),))

    @property
    def groups(self) -> list[LocalGroup]:
        return [self.group(stage) for stage in range(len(self.stages))]

    @property
    def places(self) -> list[Place]:
        stages = len(self.stages)
        return [Place(rank, self.tp, stage, stages) for stage in range(stages) for rank in range(self.tp)]

    def of(self, whole: np.ndarray, place: Place) -> np.ndarray:
        """What a rank holds of [..., layers, heads, tokens, content]: the definition, in plain slices."""
        first = sum(self.stages[: place.pp_rank])
        few = self.heads // self.shards
        shard = place.tp_rank // self.replicas
        return whole[..., first : first + self.stages[place.pp_rank], shard * few : (shard + 1) * few, :, :]

    def spec(self, *, any_tp: bool = True) -> GroupSpec:
        return merge([[group] for group in self.groups], any_tp=any_tp)[0].spec


def space_of(store: Store, cut: Cut, **changes: Any) -> Space:
    """The namespace that engines of any TP size share."""
    spec = cut.spec()
    parallel = Parallel(tp=0, pp=len(cut.stages))
    made = namespace(groups=(spec,), block_tokens=TOKENS, parallel=parallel, **changes)
    return store.open(made, block_bytes=spec.slot_bytes)


def whole_blocks(count: int, cut: Cut, seed: int) -> np.ndarray:
    """[blocks, layers, heads, tokens, content], no two numbers at hand alike."""
    shape = (count, sum(cut.stages), cut.heads, TOKENS, CONTENT)
    return np.random.default_rng(seed).integers(0, 1 << 16, shape, BF16)


def write(space: Space, cut: Cut, whole: np.ndarray, hashes: Sequence[bytes]) -> list[str]:
    """Save the blocks as an engine of this cut does; the outcomes in the order of ranks."""
    segment, outcomes = new_segment_id(), []
    for place in cut.places:
        group = cut.group(place.pp_rank)
        if not place.writes(group):
            continue
        mine = np.ascontiguousarray(cut.of(whole, place))
        assert mine.shape[1:] == group.shape
        slots = [
            Slot(block_key(one), memoryview(block.tobytes()), "BF16", group.shape)
            for one, block in zip(hashes, mine, strict=True)
        ]
        part, parts = place.part(group), place.parts(group)
        saved = space.save(slots, segment=segment, created_s=1_700_000_000, rank=part, ranks=parts)
        outcomes.append(saved.outcome)
    return outcomes


def read(
    space: Space, cut: Cut, place: Place, hashes: Sequence[bytes], blocks: slice, within_s: float = 30.0
) -> np.ndarray:
    """The same blocks as a rank of another engine reads them."""
    group = cut.group(place.pp_rank)
    run, wanted = one_run(space, hashes), range(len(hashes))[blocks]
    cropped = type(run)(wanted.start, run.segment, run.slot + wanted.start, len(wanted), run.record)
    out = np.full((len(wanted), *group.shape), 0xABCD, BF16)
    into = [memoryview(block).cast("B") for block in out]
    keys = [block_key(one) for one in hashes[blocks]]
    read_part(space, group, place, cropped, keys, into, time.monotonic() + within_s)
    return out


def one_run(space: Space, hashes: Sequence[bytes]) -> Any:
    [run] = space.match(digests(hashes)).runs
    assert run.count == len(hashes)
    return run


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    made = make_store(tmp_path_factory.mktemp("store"))
    yield made
    made.close()


_chains = itertools.count()


def new_chain(count: int) -> list[bytes]:
    return chain(next(_chains), *range(1, count))


@st.composite
def _pairs(draw: st.DrawFn) -> tuple[Cut, Cut]:
    """A writer and a reader of one model: same stages, any heads that fit."""
    stages = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    heads = draw(st.sampled_from([1, 2, 4, 6, 8, 12]))
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    writer = Cut(stages, heads, draw(st.sampled_from(divisors)), draw(st.sampled_from([1, 2])))
    reader = Cut(stages, heads, draw(st.sampled_from(divisors)), draw(st.sampled_from([1, 2, 3])))
    return writer, reader


@settings(max_examples=60)
@given(pair=_pairs(), blocks=st.integers(1, 7), data=st.data())
def test_whoever_cut_it_everybody_reads_its_own_part(
    store: Store, pair: tuple[Cut, Cut], blocks: int, data: st.DataObject
) -> None:
    writer, reader = pair
    compressed = data.draw(st.sampled_from(["none", "lz4", "planes-lz4"]))
    space = space_of(store, writer, codec=compressed)
    assert space.namespace == space_of(store, reader, codec=compressed).namespace
    hashes, whole = new_chain(blocks), whole_blocks(blocks, writer, seed=blocks)
    parts = len(writer.stages) * writer.shards
    # Copies are not written, and nothing is visible before the last part is there.
    assert write(space, writer, whole, hashes) == ["waiting"] * (parts - 1) + ["stored"]
    first = data.draw(st.integers(0, blocks - 1))
    wanted = slice(first, data.draw(st.integers(first + 1, blocks)))
    for place in reader.places:
        if not fits(parts, place.pp, reader.shards):
            with pytest.raises(NamespaceMismatch, match=f": {parts} parts"):
                read(space, reader, place, hashes, wanted)
            continue
        got = read(space, reader, place, hashes, wanted)
        assert np.array_equal(got, reader.of(whole, place)[wanted])


@given(st.integers(1, 24), st.integers(1, 4), st.integers(1, 12))
def test_what_fits(parts: int, stages: int, shards: int) -> None:
    cuts = [cut for cut in range(1, parts + 1) if stages * cut == parts]
    assert fits(parts, stages, shards) == any(cut % shards == 0 or shards % cut == 0 for cut in cuts)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("stages", [(2,), (1, 2)])
def test_what_all_ranks_hold_is_written_once(store: Store, tp: int, stages: tuple[int, ...]) -> None:
    """As MLA has it: one latent vector per token, whatever the number of ranks."""
    cut = Cut(stages, heads=1, shards=1, replicas=tp)
    space = space_of(store, cut, tenant=f"{tp} {stages}")
    hashes, whole = new_chain(3), whole_blocks(3, cut, seed=7)
    writers = [place for place in cut.places if place.writes(cut.group(place.pp_rank))]
    assert [place.number for place in writers] == [stage * tp for stage in range(len(stages))]
    assert len(write(space, cut, whole, hashes)) == len(stages)
    assert len(one_run(space, hashes).record.parts) == len(stages)
    for place in cut.places:
        assert np.array_equal(read(space, cut, place, hashes, slice(0, 3)), cut.of(whole, place))


def test_every_rank_has_a_number_and_every_part_one_writer() -> None:
    for stages, shards, replicas in itertools.product([1, 2, 3], [1, 2, 4], [1, 2, 3]):
        cut = Cut((1,) * stages, heads=4, shards=shards, replicas=replicas)
        assert [place.number for place in cut.places] == list(range(stages * cut.tp))
        written = [
            place.part(group) for place in cut.places if place.writes(group := cut.group(place.pp_rank))
        ]
        assert written == list(range(stages * shards))
        assert {place.parts(cut.group(0)) for place in cut.places} == {len(written)}
        # Ranks that hold the same read the same.
        for place in cut.places:
            assert place.shard(cut.group(0)) == place.tp_rank // replicas


@pytest.mark.parametrize("bad", [0, 1, 2, 3])
def test_only_those_who_touch_a_damaged_part_miss(bad: int) -> None:
    with tempfile.TemporaryDirectory() as folder, closing(make_store(Path(folder))) as store:
        writer, reader = Cut((2,), heads=8, shards=4), Cut((2,), heads=8, shards=2)
        space, hashes = space_of(store, writer), new_chain(2)
        whole = whole_blocks(2, writer, seed=1)
        write(space, writer, whole, hashes)
        run = one_run(space, hashes)
        path = Path(folder) / payload_name(space.id, run.segment, bad)
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        good, broken = reader.places[1 - bad // 2], reader.places[bad // 2]
        assert np.array_equal(read(space, reader, good, hashes, slice(0, 2)), reader.of(whole, good))
        with pytest.raises(CorruptPayload):
            read(space, reader, broken, hashes, slice(0, 2))
        # All of it is out of sight: another engine would meet the same.
        assert space.match(digests(hashes)).blocks == 0


def test_many_parts_share_one_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, slept, clock = Plan(), [0.0], time.monotonic
    with closing(make_store(tmp_path, plan=plan)) as store:
        writer, reader = Cut((1,), heads=8, shards=8), Cut((1,), heads=8, shards=1)
        space, hashes = space_of(store, writer), new_chain(1)
        whole = whole_blocks(1, writer, seed=1)
        write(space, writer, whole, hashes)
        one_run(space, hashes)
        plan.replace(Rule("delay", ("read",), delay_s=400.0))
        monkeypatch.setattr(time, "monotonic", lambda: clock() + sum(slept))
        monkeypatch.setattr(store.payloads, "_sleep", slept.append)
        with pytest.raises(DeadlineExceeded):
            read(space, reader, Place(), hashes, slice(0, 1), within_s=1000.0)
        assert plan.injected["read", "delay"] == 3, "of eight"


def test_what_others_have_cut_larger_is_read_without_much_memory(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = Cut((2,), heads=8, shards=1), Cut((2,), heads=8, shards=8)
    space, hashes = space_of(store, writer, tenant="memory"), new_chain(20)
    whole = whole_blocks(20, writer, seed=5)
    write(space, writer, whole, hashes)
    asked = []

    def load(self: Space, run: Any, keys: Any, into: Sequence[memoryview], **options: Any) -> Any:
        asked.append(sum(view.nbytes for view in into))
        return whole_load(self, run, keys, into, **options)

    whole_load = Space.load
    monkeypatch.setattr(Space, "load", load)
    for place in reader.places:
        got = read(space, reader, place, hashes, slice(0, 20))
        assert np.array_equal(got, reader.of(whole, place))
        # No more at once than what the rank gets in the end.
        assert max(asked) <= got.nbytes


UNEVEN = Cut((3, 2), heads=4, shards=2)


def test_stages_of_unequal_size_commit_together(store: Store) -> None:
    space, hashes = space_of(store, UNEVEN, tenant="uneven"), new_chain(4)
    assert space.namespace.groups[0].shape == (5, 4, TOKENS, CONTENT)
    assert write(space, UNEVEN, whole_blocks(4, UNEVEN, seed=3), hashes) == ["waiting"] * 3 + ["stored"]
    record = one_run(space, hashes).record
    sizes = [part.slot_sizes for part in record.parts]
    assert sizes == [(3 * 2 * TOKENS * CONTENT * 2,) * 4] * 2 + [(2 * 2 * TOKENS * CONTENT * 2,) * 4] * 2
    usage = store.maintenance.usage(space.id)
    assert (usage.segments, usage.blocks, usage.nbytes) == (1, 4, record.nbytes)
    # An index that is lost is made anew from what the payloads say of themselves.
    headers = []
    for rank, part in enumerate(record.parts):
        data = memoryview(bytearray(part.nbytes))
        run = one_run(space, hashes)
        assert store.payloads.read(payload_name(space.id, run.segment, rank), 0, [data]) == part.nbytes
        headers.append(codec.parse_header(data, namespace=space.id))
    assert record_of(headers) == record


def test_stages_of_unequal_size_travel(tmp_path: Path) -> None:
    """Through an archive to another cache, and the doctor finds nothing wrong with either."""
    homes = [tmp_path / "here", tmp_path / "there"]
    hashes, whole = new_chain(5), whole_blocks(5, UNEVEN, seed=4)
    with closing(make_store(homes[0])) as store:
        write(space_of(store, UNEVEN), UNEVEN, whole, hashes)
    archive = str(tmp_path / "blocks.tar")
    admin("export", "--to", archive, "--payloads", f"file://{homes[0]}")
    admin("import", archive, "--new-namespaces", "--payloads", f"file://{homes[1]}")
    for home in homes:
        admin("doctor", "--payloads", f"file://{home}")
    with closing(make_store(homes[1])) as store:
        space = space_of(store, UNEVEN)
        for place in UNEVEN.places:
            assert np.array_equal(read(space, UNEVEN, place, hashes, slice(0, 5)), UNEVEN.of(whole, place))


def admin(*words: str) -> None:
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output + result.stderr


def test_engines_of_other_sizes_share_only_if_asked_to() -> None:
    two, four = Cut((2, 2), heads=8, shards=2), Cut((2, 2), heads=8, shards=4)
    assert two.spec(any_tp=True) == four.spec(any_tp=True)
    assert two.spec(any_tp=False) != four.spec(any_tp=False)
    # Another cut into stages makes other parts: never one namespace.
    assert Cut((1, 3), heads=8, shards=2).spec() != Cut((2, 2), heads=8, shards=2).spec()


def test_a_namespace_tells_its_parts() -> None:
    for cut in (Cut((3, 2), heads=8, shards=4), Cut((2,), heads=1, shards=1, replicas=4)):
        spec, parallel = cut.spec(any_tp=False), Parallel(tp=cut.tp, pp=len(cut.stages))
        made: Namespace = namespace(groups=(spec,), block_tokens=TOKENS, parallel=parallel)
        assert made.parts() == cut.places[0].parts(cut.group(0))
