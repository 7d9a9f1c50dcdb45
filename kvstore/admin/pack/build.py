"""pack build: has an engine compute prompts into a store of its own, and writes that as a pack."""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvstore.admin.archive.export import ArchiveFile, export
from kvstore.admin.archive.members import MAX_MANIFEST
from kvstore.admin.backends import Cache, Refused
from kvstore.admin.curate.plan import MovePlan, Planned, plan_of
from kvstore.admin.curate.prompts import StoredPrompt, plan_prompt
from kvstore.admin.pack.engine import Computed, compute
from kvstore.admin.pack.pack import read_pack, report_of
from kvstore.admin.pack.place import check_free, local, upload
from kvstore.admin.pack.reports import PackBuildReport
from kvstore.admin.progress import ProgressListener
from kvstore.keys import NamespaceId, SegmentId
from schemas.pack import Pack
from schemas.settings import Settings

#: Bytes of a manifest that names of prompts may take beside their blocks.
_BESIDES = 1 << 20


def build(
    prompts: Sequence[Mapping[str, Any]],
    words: Sequence[str],
    settings: Settings,
    to: str,
    *,
    overwrite: bool = False,
    progress: ProgressListener,
) -> PackBuildReport:
    """Computes the prompts with an engine of those words of `vllm serve`, and writes a pack.

    Of `settings` counts what decides on what is written, `identity`, `segment`, `signing` and `kv`, and `s3`
    for a pack in a bucket. Needs room for the pack in the temporary folder, twice if it goes into a bucket.
    Raises Refused if `to` exists, EngineFailed, and what writing raises.
    """
    began = time.monotonic()
    path = local(to)
    if path is None:
        check_free(to, settings, overwrite=overwrite)
    else:
        ArchiveFile.check(path, overwrite=overwrite)
    with _interrupted_if_ended(), tempfile.TemporaryDirectory(prefix="kvstore-pack-") as scratch:
        inner = _settings_in(Path(scratch), settings)
        computed = compute(prompts, words, inner, Path(scratch) / "engine.log", progress)
        compute_s = time.monotonic() - began
        target = path or Path(scratch) / "pack.tar"
        with Cache(inner) as cache:
            report = write(cache, computed, target, overwrite=overwrite, progress=progress)
        if path is None and report.pack is not None:
            progress.begin("upload")
            upload(target, to, settings)
            report = report.model_copy(update={"pack": report.pack.model_copy(update={"source": to})})
        return report.model_copy(update={"compute_s": compute_s, "seconds": time.monotonic() - began})


@contextmanager
def _interrupted_if_ended() -> Iterator[None]:
    """Has SIGTERM and SIGHUP end what is done here as Ctrl-C does: no engine goes on, no folder is left."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_DFL
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def write(
    cache: Cache, computed: Computed, to: Path, *, overwrite: bool = False, progress: ProgressListener
) -> PackBuildReport:
    """Writes what the cache holds of the computed prompts as a pack. As `export`; Refused as well for prompts
    that no manifest has room for, and of which the cache doesn't hold all.
    """
    digits = sum(len(prompt.blocks) for prompt in computed.prompts)
    if digits + _BESIDES > MAX_MANIFEST:
        most = (MAX_MANIFEST - _BESIDES) // 32
        raise Refused(f"prompts of {digits // 32} blocks; a pack has at most {most}: make several")
    pack = Pack(engine=computed.engine, prompts=computed.prompts)
    plan = _planned(cache, pack)
    exported = export(cache, plan, to, overwrite=overwrite, progress=progress, pack=pack)
    found = None
    if exported.ended == "complete" and not exported.left_out:
        with to.open("rb") as file:
            found = report_of(read_pack(file), str(to), to.stat().st_size)
    return PackBuildReport(pack=found, export=exported, compute_s=0.0, seconds=exported.seconds)


def _planned(cache: Cache, pack: Pack) -> MovePlan:
    """Returns the segments that engines would load of the prompts, in the order of these."""
    entries: dict[tuple[NamespaceId, SegmentId], Planned] = {}
    namespaces: dict[NamespaceId, str] = {}
    for prompt in pack.prompts:
        plan, _ = plan_prompt(cache, StoredPrompt(hashes=prompt.hashes))
        entries |= {(one.namespace, one.segment): one for one in plan.entries}
        namespaces |= {one.namespace: plan.namespaces[one.namespace] for one in plan.entries}
        if not plan.entries:
            raise Refused(f"nothing of prompt {prompt.name!r} is stored")
    if len(namespaces) != 1:
        raise Refused(f"a pack is of one namespace; the prompts are in {', '.join(sorted(namespaces))}")
    return plan_of(namespaces, list(entries.values()), None)


def _settings_in(folder: Path, settings: Settings) -> Settings:
    """Returns the settings of an engine that saves all that it computes into `folder`, as those of
    `settings` would.
    """
    kv = {"observe": False, "load": "never", "audit_every": 0, "save_decode": False, "handoff": False}
    return Settings(
        payloads=f"file://{folder}/store",
        identity=settings.identity,
        segment=settings.segment,
        signing=settings.signing,
        transfers=settings.transfers,
        kv=settings.kv.model_copy(update=kv),
        grace_s=settings.grace_s,
        capacity_bytes=1 << 60,
    )
