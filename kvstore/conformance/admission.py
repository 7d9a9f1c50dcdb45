"""NoteConformance: what kvstore.ports.Index promises of `note`, as tests; a part of IndexConformance."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.conformance.chains import EXPECTED_BLOCKS, blocks_of, chain, namespace, part_of, put, served
from kvstore.errors import NamespaceUnknown
from kvstore.keys import NamespaceId
from kvstore.ports import Index

UNKNOWN = NamespaceId("0000000000000000")
DAY_S = 86_400.0
#: The middle of a window of a day.
NOON_S = 19_676 * DAY_S + DAY_S / 2
#: Roomy enough for these tests that none of their blocks passes by accident.
ROOMY = 1 << 18


def use(
    index: Index,
    name: NamespaceId,
    digests: bytes,
    *,
    at_s: float = NOON_S,
    window_s: float = DAY_S,
    sketch_bytes: int = ROOMY,
) -> int:
    """One note, of a window of a day unless a test says otherwise."""
    return index.note(name, digests, now_s=at_s, window_s=window_s, sketch_bytes=sketch_bytes)


def is_about(answer: int, truth: int) -> bool:
    """Right but for an accident: where a chain is new from block `truth` on, a block or two may pass."""
    return truth <= answer <= truth + 2


class NoteConformance:
    """Its fixtures are IndexConformance's."""

    def test_note_counts_from_the_second_use(self, index: Index, other: Index, name: NamespaceId) -> None:
        digests = chain(100)
        assert use(index, name, digests) == 0
        assert use(other, name, digests) == 100
        assert use(index, name, digests) == 100

    def test_note_of_nothing(self, index: Index, name: NamespaceId) -> None:
        assert use(index, name, b"") == 0
        use(index, name, chain(3))
        assert use(index, name, b"") == 0

    def test_note_needs_a_namespace(self, index: Index, name: NamespaceId) -> None:
        with pytest.raises(NamespaceUnknown):
            use(index, UNKNOWN, chain(3))
        assert use(index, name, chain(3)) == 0

    @pytest.mark.parametrize("blocks", [1, 2, 31, 32, 33, 63, 64, 65, 200])
    def test_note_knows_every_prefix(self, index: Index, name: NamespaceId, blocks: int) -> None:
        digests = chain(blocks)
        use(index, name, digests)
        for asked in range(blocks + 1):
            assert use(index, name, part_of(digests, 0, asked)) == asked
        assert is_about(use(index, name, chain(70, after=digests)), blocks)

    @pytest.mark.parametrize("common", [0, 1, 2, 5, 31, 32, 33, 60, 64, 65, 99, 100])
    def test_note_ends_where_a_chain_is_new(
        self, index: Index, other: Index, name: NamespaceId, common: int
    ) -> None:
        trunk = chain(100)
        use(index, name, trunk)
        branch = chain(80, seed="branch", after=part_of(trunk, 0, common))
        assert is_about(use(other, name, branch), common)
        twig = chain(40, seed="twig", after=part_of(branch, 0, common + 7))
        assert is_about(use(index, name, twig), common + 7)
        for known in (trunk, branch, twig):
            assert use(other, name, known) == blocks_of(known)

    @pytest.mark.parametrize("turn", [1, 3, 10, 40])
    def test_note_of_a_chain_that_grows(self, index: Index, name: NamespaceId, turn: int) -> None:
        """A conversation: every request is the one before and a bit more."""
        digests = chain(150)
        for known in range(0, 150, turn):
            assert is_about(use(index, name, part_of(digests, 0, known + turn)), known)
        assert use(index, name, digests) == 150

    def test_note_of_many_prompts_behind_one_prefix(self, index: Index, name: NamespaceId) -> None:
        """A system prompt that everything begins with must not make everything look known."""
        system = chain(3)
        use(index, name, system)
        counts = [use(index, name, chain(50, seed=f"user {i}", after=system)) for i in range(200)]
        assert min(counts) == 3
        assert sum(counts) <= 200 * 3 + 10
        assert use(index, name, chain(50, seed="user 0", after=system)) == 53

    def test_note_keeps_namespaces_apart(self, index: Index, name: NamespaceId) -> None:
        beside = index.register(namespace("another"), expected_blocks=EXPECTED_BLOCKS)
        digests = chain(40)
        use(index, name, digests)
        assert use(index, beside, digests) == 0
        assert use(index, name, digests) == use(index, beside, digests) == 40

    def test_note_has_nothing_to_do_with_what_is_stored(self, index: Index, name: NamespaceId) -> None:
        digests = chain(10)
        put(index, name, digests)
        assert use(index, name, digests) == 0
        noted = chain(10, seed="noted")
        use(index, name, noted)
        assert index.match(name, noted) == []
        assert served(index.match(name, digests)) == 10
        assert index.find(name, noted) == [None] * 10

    # Time

    def test_a_note_lasts_until_the_end_of_the_next_window(self, index: Index, name: NamespaceId) -> None:
        start, days = NOON_S - DAY_S / 2, [0, 0.99, 1, 1.99, 2, 3, 100]
        # Each look is a use as well, so each has a chain of its own.
        chains = [chain(70, seed=f"{later}") for later in days]
        for digests in chains:
            assert use(index, name, digests, at_s=start) == 0
        for later, digests in zip(days, chains, strict=True):
            assert use(index, name, digests, at_s=start + later * DAY_S) == (70 if later < 2 else 0)

    def test_a_use_every_window_keeps_a_chain_noted(self, index: Index, name: NamespaceId) -> None:
        digests = chain(40)
        assert use(index, name, digests) == 0
        for day in range(1, 6):
            assert use(index, name, digests, at_s=NOON_S + day * DAY_S) == 40
        assert use(index, name, digests, at_s=NOON_S + 7 * DAY_S) == 0

    def test_two_windows_together_make_a_prefix(self, index: Index, name: NamespaceId) -> None:
        """The head was used today and yesterday, the rest yesterday."""
        digests = chain(100)
        use(index, name, digests)
        assert use(index, name, part_of(digests, 0, 45), at_s=NOON_S + DAY_S) == 45
        longer = chain(20, seed="more", after=digests)
        assert is_about(use(index, name, longer, at_s=NOON_S + DAY_S), 100)
        assert use(index, name, longer, at_s=NOON_S + 2 * DAY_S) == 120

    def test_a_sketch_is_used_again_without_what_it_held(self, index: Index, name: NamespaceId) -> None:
        """Also where two sketches take turns in one place."""
        for day in range(8):
            digests = chain(300, seed=f"day {day}")
            assert use(index, name, digests, at_s=NOON_S + day * DAY_S) == 0
            assert use(index, name, digests, at_s=NOON_S + day * DAY_S + 1) == 300
        for day in range(6):
            mine = chain(300, seed=f"day {day}")
            assert use(index, name, mine, at_s=NOON_S + 7 * DAY_S) == 0

    @pytest.mark.parametrize("window_s", [0.25, 1.0, 7.5, 3600.0, 1e7, 1e300])
    def test_windows_of_any_length(self, index: Index, name: NamespaceId, window_s: float) -> None:
        digests = chain(5)
        assert use(index, name, digests, window_s=window_s) == 0
        assert use(index, name, digests, window_s=window_s) == 5
        if window_s < 1e100:
            assert use(index, name, digests, window_s=window_s, at_s=NOON_S + 2 * window_s) == 0

    # Space

    @pytest.mark.parametrize("sketch_bytes", [64, 100, 1024, 5000])
    def test_a_small_sketch_forgets_nothing(self, index: Index, name: NamespaceId, sketch_bytes: int) -> None:
        """However crowded it is: too many pass, never too few."""
        for i in range(20):
            digests = chain(90, seed=f"{i}")
            use(index, name, digests, sketch_bytes=sketch_bytes)
        for i in range(20):
            digests = chain(90, seed=f"{i}")
            assert use(index, name, digests, sketch_bytes=sketch_bytes) == 90
            branch = chain(20, seed="branch", after=part_of(digests, 0, 50))
            assert use(index, name, branch, sketch_bytes=sketch_bytes) >= 50
            assert use(index, name, branch, sketch_bytes=sketch_bytes) == 70

    @pytest.mark.parametrize("blocks", [1, 20, 128])
    def test_few_new_blocks_pass_in_a_sketch_filled_as_promised(
        self, index: Index, name: NamespaceId, blocks: int
    ) -> None:
        size = 8192
        for i in range(size // 2 // blocks):
            use(index, name, chain(blocks, seed=f"{i}"), sketch_bytes=size)
        # In the next window both sketches are looked at, the other one being empty; asking fills it a bit.
        strange = [chain(40, seed=f"strange {i}") for i in range(300)]
        counts = [use(index, name, one, sketch_bytes=size, at_s=NOON_S + DAY_S) for one in strange[:40]]
        counts += [use(index, name, one[:16], sketch_bytes=size) for one in strange[40:]]
        assert sum(count > 0 for count in counts) <= 0.03 * 300 + 3
        # A new prompt of 40 blocks is no likelier to pass, and passes with a block or two.
        assert max(counts) <= 3

    @pytest.mark.parametrize(("window_s", "sketch_bytes"), [(0.0, 1024), (-1.0, 1024), (1.0, 0), (1.0, 63)])
    def test_half_a_sketch_is_an_error(
        self, index: Index, name: NamespaceId, window_s: float, sketch_bytes: int
    ) -> None:
        with pytest.raises(ValueError, match="sketch"):
            use(index, name, chain(2), window_s=window_s, sketch_bytes=sketch_bytes)

    def test_note_of_half_a_digest_is_an_error(self, index: Index, name: NamespaceId) -> None:
        with pytest.raises(ValueError, match="16"):
            use(index, name, bytes(24))

    def test_note_of_a_long_chain(self, index: Index, other: Index, name: NamespaceId) -> None:
        digests = chain(8192)
        assert use(index, name, digests) == 0
        assert use(other, name, digests) == 8192
        assert use(index, name, digests, at_s=NOON_S + DAY_S) == 8192

    # Many at once

    def test_of_many_at_once_one_is_the_first(self, index: Index, other: Index, name: NamespaceId) -> None:
        chains = [chain(20, seed=f"{i}") for i in range(10)]

        def work(worker: int) -> list[int]:
            return [use((index, other)[worker % 2], name, digests) for digests in chains]

        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(work, range(4)))
        for counts in zip(*answers, strict=True):
            assert sorted(counts) == [0, 20, 20, 20]
