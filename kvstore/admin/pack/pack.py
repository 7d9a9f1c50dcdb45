"""pack inspect, verify and apply: what is in a pack, whether it is whole, and how it gets into a store."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from pydantic import ValidationError

from kvstore.admin.archive.import_ import import_archive
from kvstore.admin.archive.manifest import check_signed
from kvstore.admin.archive.members import read_manifest
from kvstore.admin.archive.tar import BadArchive, read_members
from kvstore.admin.archive.wanted import Wanted
from kvstore.admin.backends import Cache, Refused
from kvstore.admin.curate.prompts import StoredPrompt, plan_prompt
from kvstore.admin.described import fields_of
from kvstore.admin.inspect.namespaces import differences
from kvstore.admin.inspect.reports import Difference
from kvstore.admin.pack.place import opened
from kvstore.admin.pack.reports import PackApplyReport, PackReport, PackVerifyReport, PromptLine
from kvstore.admin.progress import ProgressListener
from kvstore.format.keyring import Keyring
from kvstore.keys import DIGEST_BYTES, NamespaceId
from kvstore.rules.text import readable
from kvstore.verify.headers import digests_of
from schemas.archive import Manifest
from schemas.base import redact
from schemas.namespace import Namespace
from schemas.pack import Pack
from schemas.settings import Settings

#: What the page format of any engine begins with that doesn't share across releases of vLLM.
_RELEASE = re.compile(r"vllm[^/]*/")


@dataclass(frozen=True, slots=True)
class Intended:
    """What the engines have that the pack is for, as far as it was said; "" is anything."""

    model: str = ""
    #: The start of the weights' digest.
    weights: str = ""
    #: The start of their namespace's id.
    namespace: str = ""


def read_pack(stream: BinaryIO) -> Manifest:
    """Returns the manifest of a pack. Raises BadArchive if it is none, and what reading raises."""
    manifest, _ = read_manifest(read_members(stream))
    if manifest.pack is None:
        raise BadArchive("this is an export, not a pack: `cache-admin import` takes it")
    if len(manifest.namespaces) != 1:
        raise BadArchive("a pack is of one namespace")
    try:
        _, space, _ = _named(manifest)
    except ValidationError as exc:
        raise BadArchive("the pack's namespace is not one that this version reads") from exc
    if space.kind != "kv":
        raise BadArchive("the pack's namespace holds encoder items, not prompts")
    return manifest


def report_of(manifest: Manifest, source: str, nbytes: int) -> PackReport:
    """Returns what the manifest of a pack says."""
    name, space, pack = _named(manifest)
    return PackReport(
        source=redact(source),
        pack_bytes=nbytes,
        version=manifest.version,
        engine=pack.engine,
        created_s=manifest.created_s,
        namespace=name,
        tenant=space.tenant,
        model=space.model,
        weights=space.weights,
        dtype=space.dtype,
        kv_dtype=space.kv_dtype,
        tp=space.parallel.tp,
        pp=space.parallel.pp,
        key=pack.key,
        segments=manifest.segments,
        stored_bytes=manifest.payload_bytes,
        prompts=tuple(
            PromptLine(name=one.name, tokens=one.tokens, blocks=len(one.hashes)) for one in pack.prompts
        ),
    )


def inspect(source: str, settings: Settings) -> PackReport:
    """Returns what a pack says of itself; nothing of it is verified. Raises as `opened` and `read_pack`."""
    with opened(source, settings) as (stream, nbytes):
        return report_of(read_pack(stream), source, nbytes)


def verify(source: str, settings: Settings, keyring: Keyring, progress: ProgressListener) -> PackVerifyReport:
    """Reads a pack to its end. Raises as `inspect`, and for a signature what `check_signed` raises."""
    held: set[bytes] = set()
    with opened(source, settings) as (stream, nbytes):
        manifest = read_pack(stream)
        name, space, pack = _named(manifest)
        check_signed(manifest, keyring)
        stream.seek(0)
        archive = import_archive(
            stream, None, source=redact(source), wanted=Wanted((name,)), keyring=keyring,
            total_bytes=nbytes, progress=progress, good=lambda header: held.update(_cut(digests_of(header))),
        )  # fmt: skip
    prompts = [StoredPrompt(hashes=one.hashes) for one in pack.prompts]
    good = (
        archive.ended == "complete"
        and not archive.unwanted
        and (archive.verified.segments, archive.verified.stored_bytes)
        == (archive.found_segments, manifest.payload_bytes)
        and manifest.segments == archive.found_segments
        and all(_of(held, prompt, space) == prompt.most(space) for prompt in prompts)
    )
    return PackVerifyReport(good=good, pack=report_of(manifest, source, nbytes), archive=archive)


def apply(source: str, cache: Cache, intended: Intended, progress: ProgressListener) -> PackApplyReport:
    """Commits what a pack holds to a store, as `import` does; what is there already is left. Not all of it
    may be there afterwards: the report says so.

    Raises Refused for a pack that the store's engines would load nothing of, before anything is changed; as
    `inspect` and `verify`; and what the index raises.
    """
    with opened(source, cache.settings) as (stream, nbytes):
        manifest = read_pack(stream)
        check_signed(manifest, cache.keyring)
        name, space, pack = _named(manifest)
        differing = check_fits(name, fields_of(manifest.namespaces[name]), cache.namespaces(), intended)
        cache.record("pack apply", f"{redact(source)}, namespace {name}")
        stream.seek(0)
        archive = import_archive(
            stream, cache.saving(), source=redact(source), wanted=Wanted((name,), new=True),
            total_bytes=nbytes, progress=progress,
        )  # fmt: skip
    report = report_of(manifest, source, nbytes)
    whole = archive.ended == "complete"
    if whole:
        report = report.model_copy(update={"prompts": _loadable(cache, name, pack)})
        most = [StoredPrompt(hashes=one.hashes).most(space) for one in pack.prompts]
        there = archive.verified.segments + archive.present.segments
        whole = not archive.unwanted and there == archive.found_segments == manifest.segments
        whole = whole and [one.loadable for one in report.prompts] == most
    return PackApplyReport(whole=whole, pack=report, archive=archive, differences=tuple(differing))


def check_fits(
    name: NamespaceId, fields: Mapping[str, Any], known: Mapping[NamespaceId, str], intended: Intended
) -> list[Difference]:
    """Returns how a pack's namespace differs from the nearest one that is known, of its weights if there is
    one, in what no upgrade changes by itself.

    Raises Refused if it is not what it is meant for, or, where that wasn't said, if its model is known with
    other weights alone, or its weights as another model or of another tenant alone.
    """
    model, weights = str(fields.get("model")), str(fields.get("weights"))
    if not name.startswith(intended.namespace.lower()):
        near = [text for id, text in known.items() if id.startswith(intended.namespace.lower())]
        why = "; ".join(map(_worded, differences(fields, fields_of(near[0])))) if len(near) == 1 else ""
        raise Refused(f"the pack is of namespace {name}, not {intended.namespace}{': ' if why else ''}{why}")
    if intended.model not in ("", model):
        raise Refused(f"the pack is of model {readable(model)}, not {readable(intended.model)}")
    if not weights.startswith(intended.weights):
        raise Refused(
            f"the pack is of weights {readable(weights)}, not {readable(intended.weights)}: engines with "
            "those would load nothing of it"
        )
    if name in known:
        return []
    others = [other for text in known.values() if (other := fields_of(text)).get("kind") == "kv"]
    alike = [other for other in others if str(other.get("weights")) == weights]
    same = [other for other in others if _alike(other, fields)]
    held = sorted({str(other.get("weights")) for other in same})
    if same and weights not in held and not (intended.weights or intended.namespace):
        raise Refused(
            f"engines here have model {readable(model)} with weights {', '.join(map(readable, held))}, and "
            f"the pack is of weights {readable(weights)}: they would load nothing of it. If a rollout brings "
            f"these weights, say so: --weights {readable(weights)}"
        )
    # --model says so as well, of another model of a tenant that is here.
    said = intended.model and fields.get("tenant") in [other.get("tenant") for other in alike]
    if alike and not same and not (intended.namespace or said):
        where = sorted({_owner(other) for other in alike})
        raise Refused(
            f"engines here have weights {readable(weights)} as {', '.join(where)}, and the pack is of "
            f"{_owner(fields)}: they would load nothing of it. If others will, say so: --namespace {name}"
        )
    nearest = [other for other in same if other in alike] or alike or same or others
    return min((differences(_besides(other), _besides(fields)) for other in nearest), key=len, default=[])


def _owner(fields: Mapping[str, Any]) -> str:
    return f"model {readable(str(fields.get('model')))} of tenant {readable(str(fields.get('tenant')))}"


def _besides(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields without what an upgrade of vLLM or of kvstore changes by itself."""
    text = _RELEASE.sub("", str(fields.get("page_format", "")), count=1)
    return {name: value for name, value in fields.items() if name != "format"} | {"page_format": text}


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one.get(word) == other.get(word) for word in ("kind", "tenant", "model"))


def _worded(one: Difference) -> str:
    return f"{one.path} is {readable(one.a)}, not {readable(one.b)}"


def _named(manifest: Manifest) -> tuple[NamespaceId, Namespace, Pack]:
    [(name, text)] = manifest.namespaces.items()
    assert manifest.pack is not None, "read_pack has seen to it"
    return NamespaceId(name), Namespace.model_validate_json(text), manifest.pack


def _cut(packed: bytes) -> list[bytes]:
    return [packed[start : start + DIGEST_BYTES] for start in range(0, len(packed), DIGEST_BYTES)]


def _of(held: Collection[bytes], prompt: StoredPrompt, space: Namespace) -> int:
    """Returns how many tokens of a prompt an engine would load of the blocks with those digests."""
    return prompt.loadable(space, [[one in held for one in _cut(each)] for each in prompt.digests(space)])


def _loadable(cache: Cache, name: NamespaceId, pack: Pack) -> tuple[PromptLine, ...]:
    # It isn't known if nothing at all of the pack was let in.
    known = name in cache.namespaces()
    lines = []
    for one in pack.prompts:
        stored = 0
        if known:
            _, [found] = plan_prompt(cache, StoredPrompt(hashes=one.hashes), [name])
            stored = found.stored
        lines.append(PromptLine(name=one.name, tokens=one.tokens, blocks=len(one.hashes), loadable=stored))
    return tuple(lines)
