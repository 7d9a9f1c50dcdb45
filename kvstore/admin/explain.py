"""explain: where a chain stops, and why. Reads only.

Four questions, all about blocks or items by their digests:

    tokens     the names of a prompt's blocks are computed (kvstore.chains), each group's chain is followed
    request    what engines have told of it, and how the block at which it stopped is now
    image      an encoder item by its identifier
    digest     a block or item by its digest, hash or content key

What the index has now comes first; then what its journal remembers (kvstore.admin.past), the newest first;
then what other namespaces have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pydantic import ValidationError

from kvstore import chains
from kvstore.admin.cache import UnknownName
from kvstore.admin.past import UNSAVED
from kvstore.admin.question import OTHERS, TOLD, Question
from kvstore.admin.resuming import leading, stops
from kvstore.errors import ConfigError
from kvstore.keys import (
    DIGEST_BYTES,
    GROUP_BYTES,
    ContentKey,
    Digest,
    NamespaceId,
    block_key,
    digest,
    digests,
    item_key,
    split_digests,
)
from kvstore.ports import Run
from schemas.explain import Block, Cause, Chain, ExplainReport, Finding, GroupChain, Subject, Told
from schemas.namespace import Namespace

#: Why a block is not in the index.
_WENT: frozenset[Cause] = frozenset({"evicted", "invalidated", *UNSAVED})  # type: ignore[arg-type]


# ---- a prompt ---------------------------------------------------------------------------------------


def explain_tokens(
    question: Question,
    tokens: Sequence[int],
    *,
    namespace: str | None = None,
    seed: str | None = None,
    salt: str = "",
) -> ExplainReport:
    """Where a prompt's chain stops in a namespace, or in the one that was registered last.

    Raises UnknownName, ConfigError if its blocks' names can't be computed, and what the backends raise.
    """
    chosen, space, seed = _chosen(question, namespace, seed)
    hashes = _hashes(space, tokens, seed, salt)
    if not hashes:
        question.remarks.append(
            f"{len(tokens)} tokens are less than a block of {space.block_tokens}: there is nothing to store"
        )
    names = [_names(space, hashes, group) for group in range(len(space.groups))]
    found = [question.present(chosen, one) for one in names]
    usable = [_usable(question, chosen, runs) for runs in found]
    stopped, resumable = stops(space, usable, len(tokens))
    others = []
    if any(stop is not None for stop in stopped):
        others = _longer(question, chosen, tokens, resumable, seed, salt)
    groups = []
    for number, (spec, stop) in enumerate(zip(space.groups, stopped, strict=True)):
        block = None
        if stop is not None:
            block = question.block(
                chosen,
                names[number],
                stop,
                found[number][stop],
                group=number,
                number=stop,
                token=stop * spec.block_tokens,
                others=others,
            )
        there = usable[number]
        groups.append(
            GroupChain(
                group=number,
                kind=spec.kind,
                window=spec.window,
                block_tokens=spec.block_tokens,
                blocks=len(there),
                leading=leading(there),
                stored=sum(there),
                stop=block,
            )
        )
    wanted = {name for one in names for name in one}
    past = question.past(chosen)
    told = [past.told(one) for one in past.outcomes if Digest(one.missing[:DIGEST_BYTES]) in wanted]
    chain = Chain(
        namespace=chosen,
        model=space.model,
        tokens=len(tokens),
        resumable_tokens=resumable,
        groups=tuple(groups),
    )
    question.remarks.append(
        "of token ids alone: a prompt with images or an adapter has other names; ask by --request or --digest"
    )
    return question.report("tokens", f"{len(tokens)} tokens", chain=chain, told=told)


def _chosen(question: Question, prefix: str | None, seed: str | None) -> tuple[NamespaceId, Namespace, str]:
    refusals = []
    found = question.kinds("kv", prefix)
    for name in found:
        try:
            space = Namespace.model_validate_json(question.text(name))
            if space.kind != "kv":
                raise ConfigError("it holds encoder items; `--image IDENTIFIER` asks for one")
            made = chains.seed_for(space, seed)
        except ValidationError:
            refusals.append(f"namespace {name} is of another version of kvstore")
        except ConfigError as exc:
            refusals.append(f"namespace {name}: {exc}")
        else:
            if len(found) > 1:
                question.remarks.append(
                    f"namespace {name} is the one that was registered last; --namespace asks for another"
                )
            return name, space, made
    if not refusals:
        raise UnknownName("no namespace of KV blocks: no engine has registered one with this index yet")
    raise ConfigError("; ".join(refusals))


def _hashes(space: Namespace, tokens: Sequence[int], seed: str, salt: str) -> list[bytes]:
    return chains.block_hashes(
        tokens, algorithm=space.hash_algo, block_tokens=space.block_tokens, seed=seed, salt=salt
    )


def _names(space: Namespace, hashes: Sequence[bytes], group: int) -> list[Digest]:
    """A group's blocks: that of several hashes is called by the last one."""
    ratio = max(1, space.groups[group].block_tokens // space.block_tokens)
    return split_digests(digests(list(hashes[ratio - 1 :: ratio]), group))


def _usable(question: Question, namespace: NamespaceId, runs: Sequence[Run | None]) -> list[bool]:
    if not question.verify:
        return [run is not None for run in runs]
    return [run is not None and not question.wrong(namespace, run.segment, run.record) for run in runs]


def _longer(
    question: Question, namespace: NamespaceId, tokens: Sequence[int], resumable: int, seed: str, salt: str
) -> list[Finding]:
    """Other namespaces that hold more of the prompt."""
    found: list[Finding] = []
    made: dict[tuple[str, int, str], list[bytes]] = {}
    for other in question.kinds("kv", None)[:OTHERS]:
        try:
            space = Namespace.model_validate_json(question.text(other))
        except ValidationError:
            continue
        matching = [one for one in (seed, chains.DEFAULT_SEED) if chains.root_digest(one) == space.hash_root]
        if other == namespace or not matching or space.hash_algo not in chains.ALGORITHMS:
            continue
        key = (space.hash_algo, space.block_tokens, matching[0])
        if key not in made:
            made[key] = _hashes(space, tokens, matching[0], salt)
        there = [run is not None for run in question.present(other, _names(space, made[key], 0))]
        held = leading(there) * space.groups[0].block_tokens
        if held > resumable:
            found.append(question.elsewhere(namespace, other, f"holds its first {held:,} tokens"))
    return found


# ---- a request, an item, a block --------------------------------------------------------------------


def explain_request(question: Question, request: str, *, namespace: str | None = None) -> ExplainReport:
    """What engines have told of a request, by the engine's name of it or a part of that."""
    every = [
        (name, one)
        for name in question.kinds("", namespace)
        for one in question.past(name).outcomes
        if request in one.request
    ]
    exact = [(name, one) for name, one in every if one.request == request]
    told = []
    asked = sorted(exact or every, key=lambda pair: -pair[1].at_s)[:TOLD]
    for name, one in asked:
        if one.missing:
            question.want(name, Digest(one.missing[:DIGEST_BYTES]))
    for name, one in asked:
        line, block = question.past(name).told(one), None
        if one.missing:
            wanted = Digest(one.missing[:DIGEST_BYTES])
            kind = Namespace.model_validate_json(question.text(name)).kind
            others = question.others(name, kind, wanted) if one.reason == "absent" else []
            run = question.present(name, [wanted])[0]
            block = question.block(name, [wanted], 0, run, number=one.position, others=others)
        told.append(line.model_copy(update={"block": block, "because": _by_then(line, block)}))
    if not told:
        question.remarks.append(
            "nothing is remembered of such a request: it was served and saved in full, or it was not looked "
            "up (shorter than a block, an adapter, prompt log-probabilities), or it came before what the "
            "journal reaches back to, or its engine could not reach the index since"
        )
    elif not exact:
        names = sorted({one.request for one in told})
        question.remarks.append(f"no request is called so; these are called like it: {', '.join(names[:5])}")
    return question.report("request", request, told=told)


def explain_image(question: Question, identifier: str, *, namespace: str | None = None) -> ExplainReport:
    """An encoder item by its identifier: vLLM's hash of it, or the uuid that a client gave."""
    return _named(question, "image", identifier, "ec", [digest(item_key(identifier))], namespace)


def explain_digest(question: Question, text: str, *, namespace: str | None = None) -> ExplainReport:
    """A block or item by its digest, block hash or content key. Raises ConfigError for what is none."""
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    groups = range(max((_groups(question.text(one)) for one in question.kinds("kv", None)), default=1))
    if len(data) == DIGEST_BYTES:
        # vLLM's own, of 16 bytes with xxhash, is the digest of group 0.
        names = [Digest(data)]
    elif len(data) == 32:
        names = [digest(block_key(data, group)) for group in groups]
    elif len(data) in (DIGEST_BYTES + GROUP_BYTES, 32 + GROUP_BYTES):
        names = [digest(ContentKey(data))]
    else:
        raise ConfigError(
            f"{text!r} is no digest (32 hex digits), block hash (32 or 64) or content key (36 or 68)"
        )
    return _named(question, "digest", text, "", names, namespace)


def _groups(text: str) -> int:
    try:
        return len(Namespace.model_validate_json(text).groups) or 1
    except ValidationError:
        return 1


def _by_then(told: Told, block: Block | None) -> Finding | None:
    """Why a block was absent when it was asked for: what happened to it last before that."""
    if block is None or told.reason != "absent":
        return None
    before = (one for one in block.findings if one.at_s is not None and one.at_s <= told.at_s)
    return next((one for one in before if one.cause in _WENT), None)


class _Asked(NamedTuple):
    space: NamespaceId
    wanted: Digest
    run: Run | None
    group: int
    known: bool


def _named(
    question: Question, subject: Subject, name: str, kind: str, names: Sequence[Digest], prefix: str | None
) -> ExplainReport:
    """In each namespace that has it or remembers it; if none does, in the one registered last."""
    spaces = question.kinds(kind, prefix)
    if not spaces:
        raise UnknownName("no engine has registered such a namespace with this index yet")
    present: list[_Asked] = []
    absent: list[_Asked] = []
    for group, wanted in enumerate(names):
        for space in spaces[:OTHERS]:
            run = question.present(space, [wanted])[0]
            known = run is not None or question.past(space).findings([wanted], 0)
            (present if run is not None else absent).append(_Asked(space, wanted, run, group, bool(known)))
    blocks = []
    for space, wanted, run, group, _ in present + [one for one in absent if one.known] or absent[:1]:
        others = [] if run is not None else question.others(space, kind, wanted)
        blocks.append(question.block(space, [wanted], 0, run, group=group, others=others))
    told = [
        question.past(space).told(one)
        for space in spaces[:OTHERS]
        for one in question.past(space).outcomes
        if Digest(one.missing[:DIGEST_BYTES]) in names
    ]
    return question.report(subject, name, blocks=blocks, told=told)
