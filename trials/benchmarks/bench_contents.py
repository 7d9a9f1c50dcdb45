"""What it costs the engine's thread to tell what a picture is, and to name the blocks behind it.

    python -m trials.benchmarks.bench_contents [--json FILE] [--repeat N]

The digest of an item's processed input, beside SHA-256 of the same bytes in the same loop; and the names of a
prompt of 8192 blocks behind a picture, beside hashing as many blocks as vLLM does (SHA-256 of a pickle).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pickle
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from connectors.engine.contents import Contents, content_digest
from connectors.engine.media import Media
from connectors.engine.names import BlockNames
from connectors.engine.step import RequestView
from tests.fake_vllm import FakeData, FakeFeature, FakeField, FakePlace, FakeRequest

#: Shapes of processed inputs, in float32.
INPUTS = {
    "LLaVA-1.5, 336 pixels": (3, 336, 336),
    "Qwen-VL, a megapixel": (5120, 1176),
    "Qwen-VL, a minute of video": (61440, 1176),
}
BLOCKS, TOKENS = 8192, 16


def medians(calls: list[Callable[[], object]], repeat: int) -> list[float]:
    """Milliseconds of each call; they take turns."""
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(repeat):
        for call, times in zip(calls, taken, strict=True):
            began = time.perf_counter()
            call()
            times.append((time.perf_counter() - began) * 1e3)
    return [statistics.median(one) for one in taken]


def of_items(repeat: int) -> list[dict[str, Any]]:
    rows = []
    for what, shape in INPUTS.items():
        pixels = torch.rand(shape)
        data = {"pixel_values": pixels, "image_grid_thw": torch.tensor([1, 64, 80])}
        bare = pixels.numpy().data.cast("B")
        ours, theirs = medians(
            [lambda d=data: content_digest("image", d), lambda b=bare: hashlib.sha256(b).digest()],  # type: ignore[misc]
            repeat,
        )
        rows.append({"what": f"digest: {what}", "mb": pixels.nbytes / 1e6, "ms": ours, "bare_ms": theirs})
    feature = FakeFeature("a", data=FakeData({"pixels": FakeField(pixels)}))
    contents, view = Contents(Media({})), RequestView(FakeRequest("r", [], mm_features=[feature]))
    contents.of(view, 0)
    [known] = medians([lambda: contents.of(view, 0)], 1000)
    rows.append({"what": "digest: known already", "mb": 0.0, "ms": known, "bare_ms": None})
    return rows


def of_names(repeat: int) -> dict[str, Any]:
    feature = FakeFeature("a", data=FakeData({"pixels": FakeField("x")}), mm_position=FakePlace(5, 10))
    request = FakeRequest("r", range(BLOCKS), mm_features=[feature])
    contents, tokens = Contents(Media({})), tuple(range(TOKENS))

    def theirs() -> None:
        parent = b""
        for _ in range(BLOCKS):
            parent = hashlib.sha256(pickle.dumps((parent, tokens, None))).digest()

    made = medians(
        [lambda: BlockNames(RequestView(request), contents, TOKENS).all(), theirs], min(repeat, 20)
    )
    return {"what": f"names of {BLOCKS} blocks", "mb": 0.0, "ms": made[0], "bare_ms": made[1]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeat", type=int, default=20)
    options = parser.parse_args()
    rows = [*of_items(options.repeat), of_names(options.repeat)]
    print(f"{'':36} {'MB':>7} {'ms':>9} {'bare ms':>9} {'ratio':>6}")
    for row in rows:
        bare = row["bare_ms"]
        ratio = f"{bare:9.3f} {row['ms'] / bare:6.2f}" if bare else ""
        print(f"{row['what']:36} {row['mb']:7.1f} {row['ms']:9.4f} {ratio}")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
