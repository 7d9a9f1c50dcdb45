"""Every target over its seeds, its corpus and some mutations, without atheris: in seconds, always alike."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator

import pytest

from trials.fuzz.targets import CORPUS, TARGETS, Target, corpus, try_one

#: Mutations of all inputs of a target together.
_MUTATIONS = 300
_ODD = (b"\x00", b"\xff", b"\x7f", b"-1", b"0", b"9" * 20, b"\xff" * 8, b"\n", b'"', b"\\", b"[", b"{")


def mutated(data: bytes, others: list[bytes], target: Target, rng: random.Random) -> bytes:
    """An input with a few changes, or one that begins like one and goes on like another."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(6):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(out):
                out[at] = rng.randrange(256)
            case 2:
                del out[at : at + rng.choice((1, 1, 4, 64))]
            case 3:
                out[at:at] = out[at : at + rng.choice((1, 8, 64))]
            case 4:
                out[at:at] = rng.choice((*_ODD, *target.words))
            case _:
                other = rng.choice(others)
                out[at:] = other[rng.randrange(len(other) + 1) :]
    return bytes(out[: target.most_bytes])


def inputs(target: Target) -> Iterator[bytes]:
    known, rng = corpus(target), random.Random(target.name)
    yield from known
    for _ in range(_MUTATIONS):
        yield mutated(rng.choice(known), known, target, rng)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_what_is_known_and_some_of_what_is_not(target: Target) -> None:
    ended = {try_one(target, data) for data in inputs(target)}
    assert "accepted" in ended, "the seeds are what the product writes"


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_no_input_takes_much_memory(target: Target) -> None:
    # What is made once stays out of the account.
    known = corpus(target)
    try_one(target, known[0])
    tracemalloc.start()
    try:
        for data in known:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try_one(target, data)
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak <= target.most_memory, f"{peak} bytes for an input of {len(data)}"
    finally:
        tracemalloc.stop()


def test_the_corpus_is_small() -> None:
    files = [file for file in CORPUS.rglob("*") if file.is_file()]
    assert {file.parent.name for file in files} <= {target.name for target in TARGETS}
    assert sum(file.stat().st_size for file in files) < 300_000
    for target in TARGETS:
        assert len(corpus(target)) < 200
