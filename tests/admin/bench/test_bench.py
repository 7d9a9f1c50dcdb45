"""bench: it measures put, match and get, and leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore.admin.backends import Cache
from kvstore.admin.bench.bench import bench
from kvstore.admin.bench.material import DEFAULT_KV_BYTES, TENANT, noise, shape_of
from kvstore.admin.bench.reports import BenchReport
from kvstore.build import load_settings
from kvstore.errors import TransientError
from kvstore.format.segment import Slot, encode
from kvstore.keys import SegmentId, block_key, namespace_id
from kvstore.payloads.local import LocalPayloads
from schemas.namespace import GroupSpec
from schemas.records import Codec
from tests.admin.conftest import Admin, Filled, kv_slots, kv_space, tensor_parallel
from tests.servers.redis import RedisServer
from tests.waiting import PATIENCE_S

QUICK = ["--seconds", "1", "--kv-bytes-per-token", "1024"]
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
    assert [one.operation for one in report.speeds] == ["put", "match", "get"]
    put, match, get = report.speeds
    assert (put.blocks, get.blocks, match.blocks) == (4, 4, 4 * put.calls)
    assert get.calls % put.calls == 0 and (put.at_a_time, match.at_a_time) == (min(2, put.calls), 1)
    assert put.bytes_s > 0 and get.bytes_s > 0 and match.bytes_s == 0
    assert all(0 < one.p50_s <= one.p99_s for one in report.speeds)
    # Nothing is left of it, and nothing else is gone.
    assert left(either) == (before, 0)


@pytest.mark.slow
def test_as_text(admin: Admin, filled: Filled) -> None:
    ran = admin("bench", *QUICK, *filled.options, env=SMALL)
    assert ran.code == 0
    assert "1,024 bytes: --kv-bytes-per-token" in ran.out and "break-even tokens/s" in ran.out
    assert "Traceback" not in ran.err


def test_the_size_of_kv_is_the_option_or_a_namespace_or_a_default(filled: Filled, tmp_path: Path) -> None:
    block = 2 * 2 * 16 * 8 * 2
    with Cache(load_settings(filled.settings, {})) as cache:
        assert shape_of(cache, 1000).kv_bytes_per_token == 1000
        fullest = shape_of(cache, None)
        assert fullest.kv_bytes_per_token == block // 16
        assert (fullest.block_tokens, filled.kv_id in fullest.source) == (16, True)
    # All ranks' bytes.
    ranks = tensor_parallel()
    for seed in range(1, 9):
        filled.save(ranks, kv_slots(4, seed=seed))
    with Cache(load_settings(filled.settings, {})) as cache:
        fullest = shape_of(cache, None)
        assert (fullest.kv_bytes_per_token, namespace_id(ranks) in fullest.source) == (block // 16 * 2, True)
    hybrid = kv_space(
        model="hybrid",
        groups=(
            GroupSpec(kind="full", block_tokens=16, dtype="BF16", shape=(2, 2, 16, 8)),
            GroupSpec(kind="sliding_window", block_tokens=16, dtype="BF16", shape=(9, 2, 16, 8), window=64),
        ),
    )
    for seed in range(11, 41):
        filled.save(hybrid, kv_slots(4, seed=seed))
    with Cache(load_settings(filled.settings, {})) as cache:
        # A window is one amount for any prompt, so only the full group counts.
        fullest = shape_of(cache, None)
        assert (fullest.kv_bytes_per_token, namespace_id(hybrid) in fullest.source) == (block // 16, True)
    empty = load_settings({"payloads": f"file://{tmp_path / 'none'}"}, {})
    with Cache(empty) as cache:
        default = shape_of(cache, None)
    assert default.kv_bytes_per_token == DEFAULT_KV_BYTES == 131072
    assert "32 layers" in default.source
    assert (default.segment_blocks, default.segment_bytes) == (16, 32 << 20)


@pytest.mark.parametrize("words", [["--seconds", "0"], ["--kv-bytes-per-token", "1"]])
def test_wrong_usage(admin: Admin, filled: Filled, words: list[str]) -> None:
    ran = admin("bench", *words, *filled.options)
    assert (ran.code, ran.out) == (2, "")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["put", "match", "get"])
def test_ctrl_c_leaves_nothing(
    admin: Admin, filled: Filled, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    target = {
        "put": "kvstore.payloads.local.LocalPayloads.put",
        "match": "kvstore.store.space.Space.match",
        "get": "kvstore.store.space.Space.load",
    }[stage]
    monkeypatch.setattr(target, interrupted)
    before = filled.payload_files()
    ran = admin("bench", *QUICK, "--json", *filled.options, env=SMALL)
    assert ran.code == 130
    report = BenchReport.model_validate_json(ran.out)
    assert (report.ended, report.left_behind) == ("cancelled", "")
    assert len(report.speeds) == ["put", "match", "get"].index(stage)
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
    assert (report.speeds, report.left_behind) == ((), "")


def test_without_its_index(admin: Admin, filled: Filled, private_redis: RedisServer) -> None:
    private_redis.kill()
    options = ["--payloads", f"file://{filled.folder}", "--index", private_redis.url]
    ran = admin("bench", *QUICK, *options)
    assert ran.code == 5
    assert "Traceback" not in ran.err


@pytest.mark.slow
def test_what_a_killed_run_has_left_is_removed_an_hour_later(
    admin: Admin, filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = filled.payload_files()
    with monkeypatch.context() as patched:
        patched.setattr("kvstore.admin.bench.bench._Bench.clean", lambda self: None)
        assert admin("bench", *QUICK, *filled.options, env=SMALL).code == 0
    files, segments = left(filled)
    assert len(files) - len(before) == segments > 0
    # Not yet: another run may be going on.
    admin("bench", *QUICK, *filled.options, env=SMALL)
    assert left(filled) == (files, segments)
    monkeypatch.setattr("kvstore.admin.bench.bench._ABANDONED_S", -10)
    admin("bench", *QUICK, *filled.options, env=SMALL)
    assert left(filled) == (before, 0)


@pytest.mark.slow
def test_what_cannot_be_removed_is_named(
    admin: Admin, filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = LocalPayloads.delete

    def refused(self: LocalPayloads, names: Sequence[str]) -> int:
        if names:
            raise TransientError("the bucket is gone")
        return delete(self, names)

    monkeypatch.setattr(LocalPayloads, "delete", refused)
    ran = admin("bench", *QUICK, "--json", *filled.options, env=SMALL)
    assert ran.code == 5 and "left behind" in ran.err
    assert "payloads of 64.0 KiB" in BenchReport.model_validate_json(ran.out).left_behind


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
        report = bench(cache, shape_of(cache, 1024), seconds=5)
    assert report.ended == "complete"
    assert 1 <= report.speeds[0].calls <= 4


def test_noise_looks_like_kv() -> None:
    data = noise(1 << 20)
    assert data.nbytes == 1 << 20
    slot = Slot(block_key(bytes(32)), data, "BF16", (1 << 19,))
    bounds: dict[Codec, tuple[float, float]] = {"lz4": (0.9, 1.01), "planes-lz4": (1.2, 1.6)}
    for codec, (least, most) in bounds.items():
        encoded = encode(
            [slot], namespace_json="{}", kind="kv", segment=SegmentId(bytes(8)), codec=codec, writer="bench"
        )
        assert least < data.nbytes / encoded.buffers[1].nbytes < most
