"""A demonstration of the main job: two vLLM engines, one after the other, share one cache.

    python -m tools.demo [--index URL] [--folder DIR] [--json]

The first engine computes a short prompt, a long one and an image. The second, a new process with nothing in
its own caches, computes the short prompt too and compares: from then on it believes what the first engine
wrote. It answers the long prompt and a longer one from the store. Every answer is compared with one computed
from scratch. Exits with 1 if a single thing is not as it should be, and says which.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvstore.build import load_settings, open_index
from tests.believing import PROVE
from tests.e2e.engine import ROOT, Engine, Result, random_image, random_tokens
from tools.models import IMAGE_TOKEN, build

BLOCK = 32
LONG = random_tokens(3000, seed=1)
LONGER = [*LONG, *random_tokens(500, seed=2)]


@dataclass
class Row:
    """One request of the second engine, compared with the same request without the store."""

    request: str
    tokens: int
    expected: int
    loaded: int
    cold_s: float
    warm_s: float
    same: bool


@dataclass
class Report:
    """The results; `failures` is empty if all of them are right."""

    rows: list[Row] = field(default_factory=list)
    encoded: dict[str, int] = field(default_factory=dict)
    image_same: bool = False
    stored_bytes: int = 0
    segments: int = 0
    failures: list[str] = field(default_factory=list)

    def expect(self, ok: bool, sentence: str) -> None:
        if not ok:
            self.failures.append(sentence)


def main() -> int:
    parser = argparse.ArgumentParser(description="Two vLLM engines share one cache.")
    parser.add_argument("--index", help="redis://HOST:PORT/DB; default: SQLite inside the folder")
    parser.add_argument("--folder", type=Path, help="where payloads go; default: a temporary folder")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args()
    notes = Console(stderr=True, highlight=False)
    with _folder(options.folder) as folder:
        # What is shown is that all of it comes from the store, and in what time: an engine would choose, and
        # would not wait for an answer of the index for so long on a busy machine.
        kv = {"load": "always", "match_deadline_s": 10.0}
        config: dict[str, Any] = {"payloads": f"file://{folder}/cache", "kv": kv}
        if options.index:
            config["index"] = options.index
        # The namespace of a demo on a shared Redis is its own, so that it always starts cold.
        config["identity"] = {"tenant": f"demo-{os.getpid()}"}
        report = Report()
        _text(config, folder, report, notes)
        _image(config, folder, report, notes)
        _stored(config, report)
    if options.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        _print(report)
    return 1 if report.failures else 0


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given.resolve()
        return
    made = Path(tempfile.mkdtemp(prefix="kvstore-demo-"))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _text(config: dict[str, Any], folder: Path, report: Report, notes: Console) -> None:
    model = build(ROOT / ".cache" / "models", "text")
    notes.print("[1/4] engine 1 computes a prompt of 3000 tokens and stores its KV blocks ...")
    with Engine(model, kv=config, env={PROVE: "1"}, log_path=folder / "text-1.log") as engine:
        _warm_up(engine)
        cold = _ask(engine, LONG)
        # Another cache_salt: the same computation, under hashes that match nothing.
        cold_longer = _ask(engine, LONGER, cache_salt="computed from scratch")
    notes.print("[2/4] engine 2, a new process, answers it from the store, and a longer one ...")
    with Engine(model, kv=config, env={PROVE: "1"}, log_path=folder / "text-2.log") as engine:
        _warm_up(engine, until_stored=True)
        warm = _ask(engine, LONG)
        engine.reset_prefix_cache()
        longer = _ask(engine, LONGER)
    matched = len(LONG) // BLOCK * BLOCK
    for name, tokens, before, after in (
        ("the same prompt", LONG, cold, warm),
        ("a longer prompt", LONGER, cold_longer, longer),
    ):
        row = Row(
            name, len(tokens), matched, after.external_tokens, before.ttft_s or 0.0, after.ttft_s or 0.0,
            before.token_ids == after.token_ids,
        )  # fmt: skip
        report.rows.append(row)
        report.expect(row.loaded == matched, f"{name}: {row.loaded} of {matched} tokens came from the store")
        report.expect(row.same, f"{name}: the tokens differ")
    report.expect(cold.external_tokens == 0, "the first engine found something in an empty store")
    report.expect(cold.token_ids != longer.token_ids, "two prompts gave one answer, so nothing is shown")


def _image(config: dict[str, Any], folder: Path, report: Report, notes: Console) -> None:
    model = build(ROOT / ".cache" / "models", "image")
    first, request = (
        {"prompt": f"w20 w30 {IMAGE_TOKEN['image']} w40 w50", "images": [random_image(number)]}
        for number in (2, 1)
    )
    answers = []
    for number in (1, 2):
        done = "computes" if number == 1 else "loads"
        notes.print(f"[{number + 2}/4] engine {number} {done} the embedding of an image ...")
        with Engine(model, ec=config, env={PROVE: "1"}, log_path=folder / f"image-{number}.log") as engine:
            # A first image proves engine 1: engine 2 encodes it, and compares.
            engine.generate([first])
            for _ in range(8):
                engine.idle(0.5)
                # An engine hears with a step what its workers have found out.
                engine.generate([{"prompt": "w60"}], max_tokens=1)
            answers.append(engine.generate([request])[0].token_ids)
            report.encoded[f"engine {number}"] = engine.encoder_calls()
    report.image_same = answers[0] == answers[1]
    report.expect(report.encoded == {"engine 1": 2, "engine 2": 1}, f"encoder calls: {report.encoded}")
    report.expect(report.image_same, "the image's answers differ")


def _warm_up(engine: Engine, *, until_stored: bool = False) -> None:
    """Sends a first request, of eight blocks, which pays for much in a process that has nothing to do with
    the cache. In the second engine it also proves the first one: what nobody has compared yet is computed. So
    it is sent again there until it comes from the store."""
    for _ in range(60):
        short = _ask(engine, random_tokens(8 * BLOCK + 1, seed=9), max_tokens=2)
        engine.idle(0.5)
        if not until_stored or short.external_tokens:
            break
        engine.reset_prefix_cache()


def _ask(engine: Engine, tokens: list[int], **more: Any) -> Result:
    return engine.generate([{"prompt_token_ids": tokens}], **more)[0]


def _stored(config: dict[str, Any], report: Report) -> None:
    index = open_index(load_settings(config, environ={}))
    try:
        for namespace, text in index.namespaces().items():
            if config["identity"]["tenant"] in text:
                usage = index.usage(namespace)
                report.stored_bytes += usage.nbytes
                report.segments += usage.segments
    finally:
        index.close()
    report.expect(report.segments > 0, "nothing was stored")


def _print(report: Report) -> None:
    console = Console(highlight=False)
    table = Table(title="Engine 2, with what engine 1 had computed")
    for name in ("request", "tokens", "from the store", "first token: computed", "loaded", "same tokens"):
        table.add_column(name, justify="left" if name == "request" else "right")
    for row in report.rows:
        table.add_row(
            row.request, str(row.tokens), f"{row.loaded}", f"{row.cold_s * 1e3:.0f} ms",
            f"{row.warm_s * 1e3:.0f} ms", "yes" if row.same else "NO",
        )  # fmt: skip
    console.print(table)
    skipped = report.encoded.get("engine 1", 0) - report.encoded.get("engine 2", 0)
    console.print(
        f"image: {report.encoded.get('engine 1')} encoder calls by engine 1, "
        f"{report.encoded.get('engine 2')} by engine 2 ({skipped} skipped), "
        f"same tokens: {'yes' if report.image_same else 'NO'}"
    )
    console.print(f"stored: {report.stored_bytes / 2**20:.1f} MiB in {report.segments} segments")
    same = report.image_same and all(row.same for row in report.rows)
    console.print(f"same tokens: {'yes' if same else 'NO'}")
    for failure in report.failures:
        console.print(f"[red]not as it should be:[/red] {failure}")


if __name__ == "__main__":
    sys.exit(main())
