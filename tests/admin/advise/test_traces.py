"""Traces as they are read: in both forms, and whatever a file says."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.admin.advise.sessions import NONE, Heard, sessions, told
from kvstore.admin.advise.traces import Assumed, BadTrace, Said, Trace, TracedSpace, read_traces
from kvstore.admin.advise.worth import cuts
from kvstore.admin.progress import Silent
from kvstore.errors import ConfigError
from schemas.settings import Settings

OURS = '{"kvstore_trace": 1, "began_s": 1000.0}\n'
SPACE = (
    '{"space": 0, "namespace": "0123456789abcdef", "kind": "kv", "block_tokens": 16, "block_bytes": 100, '
    '"parts": 2}\n'
)
#: Eight bytes each.
ONE, TWO = "AAAAAAAAAAE=", "AAAAAAAAAAEAAAAAAAAAAg=="


def mooncake(*chains: Sequence[int | str], gap_ms: int = 1000, tokens: int = 512) -> str:
    lines = [
        {"timestamp": gap_ms * number, "input_length": tokens * len(chain), "output_length": 1,
         "hash_ids": list(chain)}
        for number, chain in enumerate(chains)
    ]  # fmt: skip
    return "".join(json.dumps(line) + "\n" for line in lines)


def read(path: Path, text: str, assumed: Assumed = Assumed(block_bytes=10)) -> Trace:
    path = path / "trace.jsonl"
    path.write_text(text, encoding="utf-8")
    return read_traces([path], assumed, Silent())


def chains(trace: Trace) -> list[list[int]]:
    return [request.chain for request in trace.requests]


def test_mooncakes_form(tmp_path: Path) -> None:
    text = (
        '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}\n'
        '{"timestamp": 30535, "input_length": 1500, "output_length": 1, "hash_ids": [46, 47, 99]}\n'
        '{"timestamp": 30536, "input_length": 511, "output_length": 1, "hash_ids": [7]}\n'
    )
    trace = read(tmp_path, text, Assumed())
    # The last block of 1500 tokens isn't full; a prompt of 511 has none.
    assert [(request.at_s, request.chain) for request in trace.requests] == [
        (27.482, [0, 1, 2]),
        (30.535, [0, 1]),
    ]
    assert (trace.references, trace.blocks, trace.skipped) == (5, 3, 0)
    assert trace.spaces[0].block_bytes == 512 * 131072
    assert trace.distinct_bytes == 3 * 512 * 131072


def test_a_block_is_its_name_and_all_that_precedes_it(tmp_path: Path) -> None:
    """Whatever a file says, what is replayed are chains that share prefixes."""
    trace = read(tmp_path, mooncake([1, 2, 3], [9, 2, 3], [1, 2, 2], [9, 2], ["1", 2]))
    assert chains(trace) == [[0, 1, 2], [3, 4, 5], [0, 1, 6], [3, 4], [7, 8]]


def test_requests_of_several_files_are_in_the_order_of_time(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(mooncake([1], [2], [3], gap_ms=2000))
    (tmp_path / "b.jsonl").write_text(mooncake([1, 5], [2, 6], gap_ms=3000))
    (tmp_path / "note.txt").write_text("not read")
    trace = read_traces([tmp_path], Assumed(), Silent())
    assert [request.at_s for request in trace.requests] == [0, 0, 2, 3, 4]
    assert chains(trace) == [[0], [0, 3], [1], [1, 4], [2]]


def test_engines_of_one_store_share_blocks_across_files(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(OURS + SPACE + f'{{"t": 1, "n": 0, "d": "{TWO}"}}\n')
    trace = read_traces([tmp_path], Assumed(), Silent())
    assert chains(trace) == [[0, 1], [0, 1]]
    (space,) = trace.spaces
    assert (space.block_tokens, space.block_bytes, space.parts) == (16, 100, 2)


def test_namespaces_share_no_blocks(tmp_path: Path) -> None:
    """Whatever their requests have in common, and whatever a line of one says of the other."""
    other = SPACE.replace('"space": 0', '"space": 1').replace("0123", "4567")

    def line(space: int, *words: int, more: str = "") -> str:
        data = base64.b64encode(np.array(words, dtype="<u8").tobytes()).decode()
        return f'{{"t": 1, "n": {space}, {more}"d": "{data}"}}\n'

    text = OURS + SPACE + other + line(0, 1, 2) + line(1, 1, 2) + line(0, 2, 1) + line(1, 2, 1)
    trace = read(tmp_path, text + line(1, 9, more='"like": [3, 2], ') + line(1, 9, more='"like": [4, 2], '))
    assert chains(trace) == [[0, 1], [2, 3], [4, 5], [6, 7], [2, 3, 8]]
    assert trace.space_of == [0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert trace.skipped == 1


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[1]",
        "7",
        "{}",
        "[" * 100_000,
        '{"t": 1}',
        '{"t": 1, "n": 3, "d": "AAAAAAAAAAE="}',
        '{"t": NaN, "n": 0, "d": "AAAAAAAAAAE="}',
        '{"t": true, "n": 0, "d": "AAAAAAAAAAE="}',
        '{"t": 1' + "0" * 400 + ', "n": 0, "d": "AAAAAAAAAAE="}',
        '{"t": 1, "n": [], "d": "AAAAAAAAAAE="}',
        '{"t": 1, "n": 0, "d": "AAA="}',
        '{"t": 1, "n": 0, "d": "no base64!"}',
        '{"t": 1, "n": 0, "d": "\u00e9"}',
        '{"t": 1, "n": 0, "d": 5}',
        '{"t": 1, "n": 0, "d": ""}',
        '{"t": 1, "n": 0, "like": [2, 9], "d": ""}',
        '{"t": 1, "n": 0, "like": [2, -1], "d": ""}',
        '{"t": 1, "n": 0, "like": [1, 1], "d": ""}',
        '{"t": 1, "n": 0, "like": 2, "d": ""}',
        '{"t": 1, "n": 0, "like": [[], 1], "d": ""}',
        '{"t": 1, "n": 0, "like": [2], "d": ""}',
        '{"space": 1, "namespace": "../etc", "kind": "kv", "block_tokens": 1, "block_bytes": 1, "parts": 1}',
        '{"space": 1, "namespace": "0123456789abcdef", "kind": "kv", "block_tokens": 1, "block_bytes": 0}',
        '{"space": [], "namespace": "0123456789abcdef", "kind": "kv", "block_tokens": 1, "block_bytes": 1}',
        '{"timestamp": 1, "hash_ids": {"a": 1}}',
        '{"timestamp": 1, "hash_ids": [1.5]}',
        '{"timestamp": 1, "hash_ids": [true]}',
        '{"timestamp": 1, "input_length": "9", "hash_ids": [1]}',
        '{"timestamp": 1, "input_length": -600, "hash_ids": [1, 2]}',
        '{"timestamp": "now", "hash_ids": [1]}',
    ],
)
def test_a_line_that_makes_no_sense_is_skipped_and_counted(tmp_path: Path, line: str) -> None:
    good = f'{{"t": 1, "n": 0, "d": "{TWO}"}}\n'
    trace = read(tmp_path, f'{OURS}{SPACE}{good}{line}\n{{"t": 2, "n": 0, "like": [2, 1], "d": ""}}\n')
    assert chains(trace) == [[0, 1], [0]]
    assert trace.skipped == 1


def test_a_line_that_is_too_long_is_never_held_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.admin.advise.traces.MAX_LINE", 1000)
    good = f'{{"t": 1, "n": 0, "d": "{TWO}"}}\n'
    later = '{"t": 2, "n": 0, "like": [2, 1], "d": ""}'
    trace = read(tmp_path, f"{OURS}{SPACE}{good}{'x' * 5000}\n{later}\n{later}{' ' * 3000}\n{later}")
    assert chains(trace) == [[0, 1], [0], [0]]
    assert trace.skipped == 2


def test_references_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of a few bytes may stand for millions of blocks."""
    monkeypatch.setattr("kvstore.admin.advise.traces.MAX_REFERENCES", 100)
    more = '{"t": 1, "n": 0, "like": [2, 2], "d": ""}\n' * 60
    with pytest.raises(BadTrace, match="more than 100 references"):
        read(tmp_path, f'{OURS}{SPACE}{{"t": 1, "n": 0, "d": "{TWO}"}}\n{more}')


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no request in"),
        ("not a trace\n", "is no trace"),
        (OURS + SPACE, "no request in"),
        ('{"kvstore_trace": 2, "began_s": 0}\n', "version 2"),
        (f'{{"t": 1, "n": 0, "d": "{ONE}"}}\n', "is no trace"),
    ],
)
def test_what_is_no_trace_is_refused_with_a_sentence(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read(tmp_path, text)


def test_what_is_not_there_is_refused_with_a_sentence(tmp_path: Path) -> None:
    for path, says in ((tmp_path / "none.jsonl", "No such file"), (tmp_path, r"no file \*\.jsonl in")):
        with pytest.raises(BadTrace, match=says):
            read_traces([path], Assumed(), Silent())


def random_trace(tmp_path: Path, seed: int, *, spaces: int = 1) -> Trace:
    """Parts of a few long chains, which go on in their own ways, with blocks of one or of two sizes."""
    draw = random.Random(seed)
    lines = [OURS]
    for number in range(spaces):
        about = {"space": number, "namespace": f"{number:016x}", "kind": "kv", "block_tokens": 16}
        lines.append(json.dumps({**about, "block_bytes": 10 + 15 * number, "parts": 1}) + "\n")
    known = [[draw.randrange(3) for _ in range(16)] for _ in range(6)]
    for at_s in range(300):
        chain = draw.choice(known)[: draw.randrange(1, 17)]
        chain += [draw.randrange(3) for _ in range(draw.randrange(3))]
        data = base64.b64encode(np.array(chain, dtype="<u8").tobytes()).decode()
        lines.append(json.dumps({"t": 7 * at_s, "n": draw.randrange(spaces), "d": data}) + "\n")
    return read(tmp_path, "".join(lines), Assumed())


def test_segments_are_cut_as_the_connectors_cut_them() -> None:
    settings = Settings(payloads="memory://x", index="memory://x")
    spaces = [TracedSpace("", "kv", 16, nbytes) for nbytes in (1000, 1 << 20, 5 << 20, 64 << 20)]
    assert cuts(Trace(spaces=spaces), settings) == [64, 32, 6, 1]
    two, item = TracedSpace("", "kv", 16, 2 << 20, parts=2), TracedSpace("", "ec", 0, 1000)
    assert cuts(Trace(spaces=[two, item]), settings) == [32, 1]


# ---- sessions


def line(at_s: float, session: str | None, chain: Sequence[int], **said: Any) -> str:
    named = {} if session is None else {"session_id": session}
    return json.dumps({"timestamp": 1000 * at_s, "hash_ids": list(chain), **named, **said}) + "\n"


def test_what_is_said_comes_after_the_request_that_says_it(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        line(10, "a", [1], end=True) + line(5, "b", [2], retain=7.5) + line(20, None, [3], end=True)
        + line(30, "c", [], priority="low") + line(40, "a", [1]),
        )  # fmt: skip
    assert trace.said == [
        Said(5, 0, "b", retain_s=7.5), Said(10, 0, "a", end=True), Said(30, 0, "c", priority="low")
    ]  # fmt: skip
    owners = sessions(trace)
    assert told(trace, owners) == [
        Heard(0, 5, 0, owners[0], retain_s=7.5),
        Heard(1, 10, 0, owners[1], end=True),
        # Nobody has asked in it.
        Heard(2, 30, 0, NONE, priority="low"),
    ]


@pytest.mark.parametrize("said", [{"end": 1}, {"retain": "1"}, {"priority": "highest"}, {"priority": 1}])
def test_what_makes_no_sense_is_skipped(tmp_path: Path, said: dict[str, Any]) -> None:
    trace = read(tmp_path, line(1, "a", [1]) + line(2, "a", [2], **said))
    assert (len(trace.requests), trace.said, trace.skipped) == (1, [], 1)


def test_an_end_that_is_denied_is_none(tmp_path: Path) -> None:
    trace = read(tmp_path, line(1, "a", [1], end=False))
    assert trace.said == [Said(1, 0, "a")]
