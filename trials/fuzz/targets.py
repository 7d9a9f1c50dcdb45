"""What is fuzzed: one table of targets, each a function of bytes.

A target's function gets any bytes and hands them to the product's own code. It raises one of the `allowed`
errors where the product refuses them, and asserts what must hold of everything that is accepted; any other
exception is a finding. A checksum would stop all but one in 2**64 inputs, so the functions put the right one
in: an attacker can compute it as well.

    python -m trials.fuzz.run          coverage-guided, with atheris (make fuzz)
    tests/trials/fuzz/test_replay.py   the corpus and some mutations of it, without atheris
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import CorruptPayload, KVStoreError, UnreadablePayload
from trials.fuzz import answers, formats
from trials.fuzz.answers import NEXT

#: Inputs that reach lines or errors that no seed reaches, and those that once were findings (`was-...`).
CORPUS = Path(__file__).parent / "corpus"
_MIB = 1 << 20


@dataclass(frozen=True)
class Target:
    """One function of bytes, and what is known of it."""

    name: str
    run: Callable[[bytes], None]
    #: The documented errors; everything else that is raised is a finding.
    allowed: tuple[type[Exception], ...]
    seeds: Callable[[], Iterable[bytes]]
    #: Modules of which the covered lines are reported.
    modules: tuple[str, ...]
    #: Longest input that is tried.
    most_bytes: int = 4096
    #: Most bytes of memory that one input may take.
    most_memory: int = 4 * _MIB
    #: Words that mutations put in.
    words: Sequence[bytes] = ()


_JSON = (
    b'":"', b"\\u0000", b"1e999", b"-1", b"NaN", b"[[", b"9" * 40, b"18446744073709551616", b"true", b"null",
)  # fmt: skip
_REDIS = ("index", "catalogue", "journal", "maintenance", "values")
TARGETS = (
    Target(
        "headers",
        formats.headers,
        (CorruptPayload, UnreadablePayload),
        formats.header_seeds,
        ("kvstore.format.segment", "kvstore.verify.headers"),
        most_bytes=16384,
        words=_JSON,
    ),
    Target(
        "namespaces",
        formats.namespaces,
        (CorruptPayload, UnreadablePayload),
        formats.namespace_seeds,
        ("kvstore.verify.headers", "schemas.namespace"),
        words=_JSON,
    ),
    Target(
        "slots",
        formats.slots,
        (CorruptPayload,),
        formats.slot_seeds,
        ("kvstore.format.planes", "kvstore.format.lz4", "kvstore.format.codecs"),
    ),
    Target(
        "planes",
        formats.split,
        (),
        formats.element_seeds,
        ("kvstore.format.planes", "kvstore.format.codecs"),
    ),
    Target(
        "records",
        formats.records,
        (),
        formats.record_seeds,
        ("schemas.records", "kvstore.index.scripted.values"),
        most_memory=64 * _MIB,
    ),
    Target(
        "replies",
        answers.replies,
        (KVStoreError,),
        answers.reply_seeds,
        tuple(f"kvstore.index.redis.{name}" for name in _REDIS),
        words=(
            b"\r\n",
            b"*-1\r\n",
            b"$-1\r\n",
            b":-1\r\n",
            b"*2\r\n",
            b"$8\r\n",
            b"nan",
            b"inf",
            b"-1",
            NEXT,
        ),
    ),
    Target(
        "archives",
        formats.archives,
        (),
        formats.archive_seeds,
        ("kvstore.admin.archive.import_", "kvstore.admin.archive.members", "kvstore.admin.archive.tar"),
        most_bytes=12288,
        words=(b"0000644", b"ustar", b"77777777777", b"\x80\x00\x00", *_JSON),
    ),
    Target(
        "engines",
        answers.engines,
        (ValueError,),
        answers.engine_seeds,
        ("kvstore.admin.feed.wire",),
        words=(
            b"\xabBlockStored",
            b"\xacBlockRemoved",
            b"\xcf" + b"\xff" * 8,
            b"\xd3" + b"\x80",
            b"\xc0",
            b"\xdd",
        ),
    ),
    Target(
        "urls",
        formats.urls,
        (ValueError,),
        formats.url_seeds,
        ("schemas.urls",),
        most_bytes=512,
        words=(b"://", b"@", b"%2f", b"?db=", b"&", b"#", b",", b"[::1]", b"endpoint=", b"redis+sentinel"),
    ),
    Target(
        "listings",
        answers.listings,
        (KVStoreError,),
        answers.listing_seeds,
        tuple(f"kvstore.payloads.s3.{name}" for name in ("store", "strays", "errors")),
        words=(b"<Key>", b"</Key>", b"<Size>", b"-1", b">true<", b"<LastModified>", b"0001-01-01", NEXT),
    ),
)
BY_NAME = {target.name: target for target in TARGETS}


def corpus(target: Target) -> list[bytes]:
    """A target's seeds, then the inputs that the tree keeps, in a fixed order."""
    kept = sorted((CORPUS / target.name).glob("*"))
    return [*target.seeds(), *(file.read_bytes() for file in kept)]


def try_one(target: Target, data: bytes) -> str:
    """Runs a target; returns "accepted" or the name of the error. Raises whatever is a finding."""
    try:
        target.run(data)
    except target.allowed as exc:
        return type(exc).__name__
    return "accepted"
