"""bench: it measures, says what it means, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.admin.backends import Cache, UnknownName
from kvstore.admin.bench import stages
from kvstore.admin.bench.bench import bench, shape_of
from kvstore.admin.bench.findings import findings
from kvstore.admin.bench.material import DEFAULT_KV_BYTES, TENANT, noise
from kvstore.admin.bench.measure import SideBySide, latency, timed
from kvstore.admin.bench.reports import (
    BenchReport,
    CodecSpeed,
    IndexSpeed,
    Latency,
    LoadTime,
    MatchTime,
    TransferSpeed,
)
from kvstore.build import load_settings
from kvstore.errors import TransientError
from kvstore.keys import namespace_id
from schemas.namespace import GroupSpec
from tests.admin.conftest import Admin, Filled, kv_slots, kv_space, tensor_parallel
from tests.servers.redis import RedisServer
from tests.waiting import PATIENCE_S

QUICK = ["--seconds", "1", "--kv-bytes-per-token", "1024", "--tokens", "300,4096"]
SMALL = {"KVSTORE_SEGMENT__TARGET_BYTES": "64KiB", "KVSTORE_CAPACITY_BYTES": "5MiB"}


def left(filled: Filled) -> tuple[list[Path], int]:
    """Payloads in the folder, and segments in the bench's namespace."""
    with Cache(load_settings(filled.settings, {})) as cache:
        count = 0
        for name, text in cache.namespaces().items():
            if TENANT in text and cache.index is not None:
                count += sum(1 for _ in cache.index.segments(name))
                assert cache.index.usage(name).nbytes == 0 or count
                assert cache.index.reapable(name, 4e9, 100) == []
        return filled.payload_files(), count


@pytest.mark.slow
def test_a_quick_run(admin: Admin, either: Filled) -> None:
    before = either.payload_files()
    ran = admin("bench", *QUICK, "--json", *either.options, env=SMALL)
    assert ran.code == 0, ran.err
    report = BenchReport.model_validate_json(ran.out)
    assert (report.ended, report.left_behind) == ("complete", "")
    assert report.seconds < PATIENCE_S
    assert report.kv_bytes_per_token == 1024
    assert (report.segment_blocks, report.segment_bytes) == (4, 64 << 10)
    assert report.machine is not None
    assert report.machine.checksum_bytes_s > 1e6
    assert [codec.codec for codec in report.codecs] == ["none", "lz4", "planes-lz4"]
    assert all(0.9 < codec.ratio < 3 for codec in report.codecs), "noise that looks like KV"
    assert report.index_speed is not None
    assert [match.blocks for match in report.index_speed.matches] == [256, 2048, 8192]
    assert [(t.operation, t.concurrency) for t in report.transfers] == [
        *(("put", number) for number in (1, 8, 32)),
        *(("get", number) for number in (1, 8, 32)),
    ]
    assert all(t.errors == {} for t in report.transfers)
    assert report.transfers[0].bytes_s > 0
    assert report.small_reads is not None
    assert [load.tokens for load in report.loads] == [300, 4096]
    for load in report.loads:
        assert load.nbytes == load.tokens // 16 * 16 * 1024
        assert load.break_even_tokens_s == pytest.approx(load.tokens / (load.match_s + load.load_s))
    assert report.loads[0].measured
    assert report.findings
    # Nothing is left of it, and nothing else is gone.
    assert left(either) == (before, 0)


@pytest.mark.slow
def test_as_text(admin: Admin, filled: Filled) -> None:
    ran = admin("bench", *QUICK, *filled.options, env=SMALL)
    assert ran.code == 0
    for words in (
        "1,024 bytes: --kv-bytes-per-token",
        "4 blocks of 16 tokens",
        "Loading",
        "that pays where prefill is slower than",
        "break-even tokens/s",
        "match of 8,192 blocks",
        "codec planes-lz4",
        "PUT",
    ):
        assert words in ran.out
    assert "Traceback" not in ran.err


def test_the_size_of_kv_is_the_option_or_a_namespace_or_a_default(filled: Filled, tmp_path: Path) -> None:
    block = 2 * 2 * 16 * 8 * 2
    with Cache(load_settings(filled.settings, {})) as cache:
        assert shape_of(cache, 1000, None).kv_bytes_per_token == 1000
        fullest = shape_of(cache, None, None)
        assert fullest.kv_bytes_per_token == block // 16
        assert (fullest.block_tokens, filled.kv_id in fullest.source) == (16, True)
    filled.save(tensor_parallel(), kv_slots(1))
    hybrid = kv_space(
        model="hybrid",
        groups=(
            GroupSpec(kind="full", block_tokens=16, dtype="BF16", shape=(2, 2, 16, 8)),
            GroupSpec(kind="sliding_window", block_tokens=16, dtype="BF16", shape=(9, 2, 16, 8), window=64),
        ),
    )
    filled.save(hybrid, kv_slots(1, seed=4))
    with Cache(load_settings(filled.settings, {})) as cache:
        # All ranks' bytes; a window is one amount for any prompt, so only the full group counts.
        assert shape_of(cache, None, namespace_id(tensor_parallel())).kv_bytes_per_token == block // 16 * 2
        assert shape_of(cache, None, namespace_id(hybrid)).kv_bytes_per_token == block // 16
        with pytest.raises(UnknownName, match="no KV blocks"):
            shape_of(cache, None, filled.ec_id)
    empty = load_settings({"payloads": f"file://{tmp_path / 'none'}"}, {})
    with Cache(empty) as cache:
        default = shape_of(cache, None, None)
    assert default.kv_bytes_per_token == DEFAULT_KV_BYTES == 131072
    assert "32 layers" in default.source
    assert (default.segment_blocks, default.segment_bytes) == (16, 32 << 20)
    assert default.blocks(8192) * default.block_bytes == 1 << 30


@pytest.mark.parametrize(
    "words",
    [
        ["--tokens", "many"],
        ["--tokens", "0"],
        ["--tokens", ""],
        ["--seconds", "0"],
        ["--kv-bytes-per-token", "100", "--namespace", "ab"],
    ],
)
def test_wrong_usage(admin: Admin, filled: Filled, words: list[str]) -> None:
    ran = admin("bench", *words, *filled.options)
    assert (ran.code, ran.out) == (2, "")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["index", "put", "get", "loads"])
def test_ctrl_c_leaves_nothing(
    admin: Admin, filled: Filled, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    target = {
        "index": "kvstore.admin.bench.stages._match",
        "put": "kvstore.payloads.local.LocalPayloads.put",
        "get": "kvstore.admin.bench.stages.Payloads.get",
        "loads": "kvstore.admin.bench.loads.Loader.load",
    }[stage]
    monkeypatch.setattr(target, interrupted)
    before = filled.payload_files()
    ran = admin("bench", *QUICK, "--json", *filled.options, env=SMALL)
    assert ran.code == 130
    report = BenchReport.model_validate_json(ran.out)
    assert (report.ended, report.left_behind) == ("cancelled", "")
    assert report.machine is not None
    assert bool(report.transfers) == (stage in ("get", "loads"))
    monkeypatch.undo()
    assert left(filled) == (before, 0)


@pytest.mark.slow
def test_a_store_that_takes_nothing_ends_it(
    admin: Admin, filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*args: object, **options: object) -> None:
        raise TransientError("the bucket is gone")

    monkeypatch.setattr("kvstore.payloads.local.LocalPayloads.put", down)
    ran = admin("bench", *QUICK, "--json", *filled.options, env=SMALL)
    assert ran.code == 5
    report = BenchReport.model_validate_json(ran.out)
    assert (report.ended, report.problem) == ("failed", "the bucket is gone")
    assert report.index_speed is not None


def test_without_its_index(admin: Admin, filled: Filled, private_redis: RedisServer) -> None:
    private_redis.kill()
    options = ["--payloads", f"file://{filled.folder}", "--index", private_redis.url]
    ran = admin("bench", *QUICK, *options)
    assert ran.code == 5
    assert "Traceback" not in ran.err


@pytest.mark.slow
def test_what_is_kept_is_removed_an_hour_later(
    admin: Admin, filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = filled.payload_files()
    ran = admin("bench", *QUICK, "--keep", "--json", *filled.options, env=SMALL)
    assert ran.code == 0
    assert "payloads of 64.0 KiB" in BenchReport.model_validate_json(ran.out).left_behind
    assert "left behind" in ran.err
    files, segments = left(filled)
    assert len(files) - len(before) == segments > 0
    # Not yet: another run may be going on.
    admin("bench", *QUICK, *filled.options, env=SMALL)
    assert left(filled) == (files, segments)
    monkeypatch.setattr("kvstore.admin.bench.bench._ABANDONED_S", -10)
    admin("bench", *QUICK, *filled.options, env=SMALL)
    assert left(filled) == (before, 0)


@pytest.mark.slow
def test_a_real_ctrl_c(filled: Filled) -> None:
    code = """
import os, signal, threading, time
from kvstore.cli import main
from kvstore.admin.bench.bench import _Bench

begun, stages = threading.Event(), _Bench.all
_Bench.all = lambda self: (begun.set(), stages(self))

# A shell's background job starts with it ignored, and so do its children.
signal.signal(signal.SIGINT, signal.default_int_handler)

def interrupt():
    begun.wait()
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
main()
"""
    ran = subprocess.run(
        [sys.executable, "-c", code, "bench", "--seconds", "30", "--json", *filled.options],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert ran.returncode == 130
    assert BenchReport.model_validate_json(ran.stdout).ended == "cancelled"
    assert "Traceback" not in ran.stderr
    assert left(filled)[1] == 0
    assert len(left(filled)[0]) == 5


@pytest.mark.slow
def test_little_room_is_respected(filled: Filled) -> None:
    tree = filled.settings | {"capacity_bytes": 600 << 10, "segment": {"target_bytes": 64 << 10}}
    with Cache(load_settings(tree, {})) as cache:
        report = bench(cache, shape_of(cache, 1024, None), seconds=60 / 100, tokens=[2048])
    assert report.ended == "complete"
    skipped = [t for t in report.transfers if t.skipped]
    assert [(t.operation, t.concurrency) for t in skipped] == [("put", 8), ("put", 32)]
    assert "would write" in skipped[0].skipped
    assert not report.loads[0].measured


def test_noise_looks_like_kv() -> None:
    data = noise(1 << 20)
    assert data.nbytes == 1 << 20
    [none, lz4, planes] = stages.codecs(0.05)
    assert (none.codec, none.ratio, lz4.ratio) == ("none", 1.0, 1.0)
    assert 1.2 < planes.ratio < 1.6


def test_measuring() -> None:
    assert latency([3.0, 1.0, 2.0]) == Latency(count=3, p50_s=2.0, p99_s=3.0)
    calls: list[int] = []
    assert len(timed(lambda: calls.append(1), 0.0, least=3)) == len(calls) == 3

    def prepare() -> Any:
        def call() -> int:
            calls.append(1)
            if len(calls) % 2:
                raise TransientError("now and then")
            return 100

        return call

    done = SideBySide(4).run(prepare, 0.0, most=1)
    assert len(done.times) + done.errors["unavailable"] == 4
    assert done.nbytes == 100 * len(done.times)


def speed(**changes: Any) -> BenchReport:
    """A report of a bucket at 180 MB/s, 8 reads at a time."""
    once = Latency(count=10, p50_s=0.0004, p99_s=0.001)
    gets = {1: 60e6, 8: 180e6, 32: 200e6} | changes.pop("gets", {})
    load = {
        "tier": "shared",
        "tokens": 8192,
        "nbytes": 1 << 30,
        "measured": True,
        "match_s": 0.001,
        "load_s": (1 << 30) / 180e6,
        "bytes_s": 180e6,
        "break_even_tokens_s": 8192 / ((1 << 30) / 180e6 + 0.001),
    } | changes.pop("load", {})
    fields: dict[str, Any] = {
        "version": "1",
        "ended": "complete",
        "problem": "",
        "index": "redis://h:1/0",
        "payloads": "s3://bucket/x",
        "fast": None,
        "seconds": 60.0,
        "kv_bytes_per_token": 131072,
        "kv_source": "",
        "block_tokens": 16,
        "segment_blocks": 16,
        "segment_bytes": 32 << 20,
        "codec": "none",
        "read_threads": 8,
        "machine": None,
        "codecs": (),
        "index_speed": IndexSpeed(
            round_trip=once, matches=(MatchTime(blocks=8192, latency=once),), commit=once
        ),
        "transfers": tuple(
            TransferSpeed(
                tier="shared",
                operation="get",
                concurrency=number,
                object_bytes=32 << 20,
                bytes_s=bytes_s,
                latency=once,
                errors={},
                skipped="",
            )
            for number, bytes_s in gets.items()
        ),
        "small_reads": once,
        "loads": (LoadTime(**load),),
        "findings": (),
        "left_behind": "",
    }
    return BenchReport(**fields | changes)


def test_what_the_numbers_say() -> None:
    plain = list(findings(speed()))
    assert plain[0] == "loading is bounded by the payload store (8 reads at a time: 180 MB/s)"
    assert plain[1].startswith("8,192 tokens of 131,072 bytes each = 1.0 GiB: 6.0 s to load, ")
    assert plain[1].endswith("prefill is slower than 1,373 tokens/s")
    assert "the index answers in 0.40 ms" in plain[2]
    assert len(plain) == 3
    few = list(findings(speed(read_threads=1, load={"bytes_s": 58e6})))
    assert few[0] == "loading is bounded by the payload store (1 read at a time: 60 MB/s)"
    assert "32 reads at a time get 200 MB/s: raise transfers.read_threads (now 1)" in few
    cores = list(findings(speed(load={"bytes_s": 90e6})))
    assert "share this machine's cores" in cores[0]
    index = list(findings(speed(load={"match_s": 9.0})))
    assert "bounded by the index" in index[0]
    planes = CodecSpeed(codec="planes-lz4", ratio=1.4, encode_bytes_s=3e9, decode_bytes_s=6e9)
    assert any("planes-lz4 makes 29% fewer bytes" in line for line in findings(speed(codecs=(planes,))))
    assert not any("planes" in line for line in findings(speed(codecs=(planes,), gets={8: 30e9})))
    [broken] = [t.model_copy(update={"errors": {"deadline": 3}}) for t in speed().transfers[:1]]
    assert "GET 1 at a time: errors (3 deadline)" in findings(speed(transfers=(broken,)))
    assert list(findings(speed(loads=(), transfers=(), index_speed=None))) == []
