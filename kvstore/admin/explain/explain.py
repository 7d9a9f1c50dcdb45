"""explain: tells where a chain stops, and why. It only reads.

It answers four questions, all about blocks or items by their digests:

    tokens     computes the keys of a prompt's blocks (rules.hashing) and follows each group's chain
    request    what engines have reported of it, and the present state of the block at which it stopped
    digest     a block or item by its digest, hash or content key

What the index has now comes first; then what its journal remembers (journal.py), the newest first;
then what other namespaces have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pydantic import ValidationError

from kvstore.admin.backends import UnknownName
from kvstore.admin.explain.journal import NamespaceJournal
from kvstore.admin.explain.lookup import OTHERS, TOLD, Lookup
from kvstore.admin.explain.reports import (
    Block,
    Cause,
    Chain,
    ExplainReport,
    Finding,
    GroupChain,
    Subject,
    Told,
)
from kvstore.errors import ConfigError
from kvstore.index.port import Run
from kvstore.keys import (
    DIGEST_BYTES,
    GROUP_BYTES,
    ContentKey,
    Digest,
    NamespaceId,
    block_key,
    digest,
    digests,
    split_digests,
)
from kvstore.rules import hashing as chains
from kvstore.rules.prefix import leading, rule_of, stops
from kvstore.rules.reasons import TOLD_UNSAVED
from schemas.namespace import Namespace

#: The most sessions that are named as those that alone have used a prompt's blocks.
_SESSIONS = 5
#: Causes that explain why a block is not in the index.
_GONE: frozenset[Cause] = frozenset({"evicted", "invalidated", "expired", *TOLD_UNSAVED})  # type: ignore[arg-type]


# ---- a prompt ---------------------------------------------------------------------------------------


def explain_tokens(
    lookup: Lookup,
    tokens: Sequence[int],
    *,
    namespace: str | None = None,
    seed: str | None = None,
    salt: str = "",
) -> ExplainReport:
    """Returns where a prompt's chain stops in a namespace, by default in the one that was registered last.

    Raises UnknownName, ConfigError if the keys of its blocks can't be computed, and what the backends raise.
    """
    chosen, space, seed = _chosen(lookup, namespace, seed)
    hashes = _hashes(space, tokens, seed, salt)
    if not hashes:
        lookup.remarks.append(
            f"{len(tokens)} tokens are less than a block of {space.block_tokens}: there is nothing to store"
        )
    names = [_names(space, hashes, group) for group in range(len(space.groups))]
    found = [lookup.present(chosen, one) for one in names]
    usable = [_usable(lookup, chosen, runs) for runs in found]
    rules = [rule_of(spec.kind, spec.block_tokens, spec.window) for spec in space.groups]
    stopped, resumable = stops(rules, usable, len(tokens))
    others = []
    if any(stop is not None for stop in stopped):
        others = _longer(lookup, chosen, tokens, resumable, seed, salt)
    groups = []
    for number, (spec, stop) in enumerate(zip(space.groups, stopped, strict=True)):
        block = None
        if stop is not None:
            block = lookup.block(
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
    lookup.remarks += _of_sessions(lookup, chosen, [run for runs in found for run in runs if run is not None])
    wanted = {name for one in names for name in one}
    journal = lookup.journal(chosen)
    told = [journal.told(one) for one in journal.outcomes if Digest(one.missing[:DIGEST_BYTES]) in wanted]
    chain = Chain(
        namespace=chosen,
        model=space.model,
        tokens=len(tokens),
        resumable_tokens=resumable,
        groups=tuple(groups),
    )
    lookup.remarks.append(
        "of token ids alone: a prompt with images or an adapter has other names; ask by --request or --digest"
    )
    return lookup.report("tokens", f"{len(tokens)} tokens", chain=chain, told=told)


def _of_sessions(lookup: Lookup, namespace: NamespaceId, runs: Sequence[Run]) -> Iterator[str]:
    """Yields what sessions have to do with these blocks."""
    segments = list(dict.fromkeys(run.segment for run in runs))
    own = dict(zip(segments, lookup.owners(namespace, segments), strict=True))
    blocks = Counter(one for run in runs if (one := own[run.segment]) is not None)
    for session, count in blocks.most_common(_SESSIONS):
        yield f"only session {session.session.hex()} has used {count:,} of its blocks{lookup.fate(session)}"


def _chosen(lookup: Lookup, prefix: str | None, seed: str | None) -> tuple[NamespaceId, Namespace, str]:
    refusals = []
    found = lookup.kinds("kv", prefix)
    for name in found:
        try:
            space = Namespace.model_validate_json(lookup.text(name))
            if space.kind != "kv":
                raise ConfigError("it holds encoder items; ask for one by --request or --digest")
            made = chains.seed_for(space, seed)
        except ValidationError:
            refusals.append(f"namespace {name} is of another version of kvstore")
        except ConfigError as exc:
            refusals.append(f"namespace {name}: {exc}")
        else:
            if len(found) > 1:
                lookup.remarks.append(
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
    """Returns the digests of a group's blocks: one that spans several hashes has the last one as its key."""
    ratio = max(1, space.groups[group].block_tokens // space.block_tokens)
    return split_digests(digests(list(hashes[ratio - 1 :: ratio]), group))


def _usable(lookup: Lookup, namespace: NamespaceId, runs: Sequence[Run | None]) -> list[bool]:
    if not lookup.verify:
        return [run is not None for run in runs]
    return [run is not None and lookup.wrong(namespace, run.segment, run.record) is None for run in runs]


def _longer(
    lookup: Lookup, namespace: NamespaceId, tokens: Sequence[int], resumable: int, seed: str, salt: str
) -> list[Finding]:
    """Returns the other namespaces that hold more of the prompt."""
    found: list[Finding] = []
    made: dict[tuple[str, int, str], list[bytes]] = {}
    for other in lookup.kinds("kv", None)[:OTHERS]:
        try:
            space = Namespace.model_validate_json(lookup.text(other))
        except ValidationError:
            continue
        matching = [one for one in (seed, chains.DEFAULT_SEED) if chains.root_digest(one) == space.hash_root]
        if other == namespace or not matching or space.hash_algo not in chains.ALGORITHMS:
            continue
        key = (space.hash_algo, space.block_tokens, matching[0])
        if key not in made:
            made[key] = _hashes(space, tokens, matching[0], salt)
        there = [run is not None for run in lookup.present(other, _names(space, made[key], 0))]
        held = leading(there) * space.groups[0].block_tokens
        if held > resumable:
            found.append(lookup.elsewhere(namespace, other, f"holds its first {held:,} tokens"))
    return found


# ---- a request, an item, a block --------------------------------------------------------------------


def explain_request(lookup: Lookup, request: str, *, namespace: str | None = None) -> ExplainReport:
    """Returns what engines have reported of a request, given the engine's name for it or a part of that."""
    every = [
        (name, one)
        for name in lookup.kinds("", namespace)
        for one in lookup.journal(name).outcomes
        if request in one.request
    ]
    exact = [(name, one) for name, one in every if one.request == request]
    told = []
    asked = sorted(exact or every, key=lambda pair: -pair[1].at_s)[:TOLD]
    for name, one in asked:
        if one.missing:
            lookup.want(name, Digest(one.missing[:DIGEST_BYTES]))
    for name, one in asked:
        line, block = lookup.journal(name).told(one), None
        if one.missing:
            wanted = Digest(one.missing[:DIGEST_BYTES])
            kind = Namespace.model_validate_json(lookup.text(name)).kind
            others = lookup.others(name, kind, wanted) if one.reason == "absent" else []
            run = lookup.present(name, [wanted])[0]
            block = lookup.block(name, [wanted], 0, run, number=one.position, others=others)
        told.append(
            line.model_copy(update={"block": block, "because": _by_then(lookup.journal(name), line, block)})
        )
    if not told:
        lookup.remarks.append(
            "nothing is remembered of such a request: it was served and saved in full, or it was not looked "
            "up (shorter than a block, an adapter, prompt log-probabilities), or it came before what the "
            "journal reaches back to, or its engine could not reach the index since"
        )
    elif not exact:
        names = sorted({one.request for one in told})
        lookup.remarks.append(f"no request is called so; these are called like it: {', '.join(names[:5])}")
    return lookup.report("request", request, told=told)


def explain_digest(lookup: Lookup, text: str, *, namespace: str | None = None) -> ExplainReport:
    """Explains a block or item, given its digest, block hash or content key.

    Raises ConfigError for anything else.
    """
    try:
        data = bytes.fromhex(text)
    except ValueError:
        data = b""
    groups = range(max((_groups(lookup.text(one)) for one in lookup.kinds("kv", None)), default=1))
    if len(data) == DIGEST_BYTES:
        # vLLM's own block hash has 16 bytes with xxhash, and is the digest of group 0.
        names = [Digest(data)]
    elif len(data) == 32:
        names = [digest(block_key(data, group)) for group in groups]
    elif len(data) in (DIGEST_BYTES + GROUP_BYTES, 32 + GROUP_BYTES):
        names = [digest(ContentKey(data))]
    else:
        raise ConfigError(
            f"{text!r} is no digest (32 hex digits), block hash (32 or 64) or content key (36 or 68)"
        )
    return _named(lookup, "digest", text, "", names, namespace)


def _groups(text: str) -> int:
    try:
        return len(Namespace.model_validate_json(text).groups) or 1
    except ValidationError:
        return 1


def _by_then(journal: NamespaceJournal, told: Told, block: Block | None) -> Finding | None:
    """Returns why a block was absent when it was asked for: what happened to it last before that."""
    if block is None or told.reason != "absent":
        return None
    before = (one for one in block.findings if journal.was_gone(one, told.at_s))
    return next((one for one in before if one.cause in _GONE), None)


class _Candidate(NamedTuple):
    space: NamespaceId
    wanted: Digest
    run: Run | None
    group: int
    known: bool


def _named(
    lookup: Lookup, subject: Subject, name: str, kind: str, names: Sequence[Digest], prefix: str | None
) -> ExplainReport:
    """Explains a block in each namespace that has or remembers it, or else in the one registered last."""
    spaces = lookup.kinds(kind, prefix)
    if not spaces:
        raise UnknownName("no engine has registered such a namespace with this index yet")
    present: list[_Candidate] = []
    absent: list[_Candidate] = []
    for group, wanted in enumerate(names):
        for space in spaces[:OTHERS]:
            run = lookup.present(space, [wanted])[0]
            known = run is not None or lookup.journal(space).findings([wanted], 0)
            candidate = _Candidate(space, wanted, run, group, bool(known))
            (present if run is not None else absent).append(candidate)
    blocks = []
    for space, wanted, run, group, _ in present + [one for one in absent if one.known] or absent[:1]:
        others = [] if run is not None else lookup.others(space, kind, wanted)
        blocks.append(lookup.block(space, [wanted], 0, run, group=group, others=others))
    told = [
        lookup.journal(space).told(one)
        for space in spaces[:OTHERS]
        for one in lookup.journal(space).outcomes
        if Digest(one.missing[:DIGEST_BYTES]) in names
    ]
    return lookup.report(subject, name, blocks=blocks, told=told)
