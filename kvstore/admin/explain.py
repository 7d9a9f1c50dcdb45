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

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import NamedTuple

from pydantic import ValidationError

from kvstore import chains
from kvstore.admin.cache import Cache, UnknownName
from kvstore.admin.inventory import diff
from kvstore.admin.past import SCAN_MOST, UNSAVED, Past
from kvstore.admin.payloads import read_part
from kvstore.admin.progress import Progress, Silent
from kvstore.errors import ConfigError, CorruptPayload
from kvstore.index.redis import RedisIndex
from kvstore.index.sqlite import SqliteIndex
from kvstore.keys import (
    DIGEST_BYTES,
    GROUP_BYTES,
    ContentKey,
    Digest,
    NamespaceId,
    SegmentId,
    block_key,
    digest,
    digests,
    item_key,
    split_digests,
)
from kvstore.ports import Run
from schemas.explain import Block, Cause, Chain, ExplainReport, Finding, GroupChain, Subject, Told
from schemas.namespace import GroupSpec, Namespace
from schemas.records import SegmentRecord

#: Digests looked up with one call.
_STEP = 4096
#: Other namespaces that are asked for what is missing, the most lately registered ones.
_OTHERS = 50
#: Outcomes that a report lists.
_TOLD = 50
#: Why a block is not in the index.
_WENT: frozenset[Cause] = frozenset({"evicted", "invalidated", *UNSAVED})  # type: ignore[arg-type]


@dataclass
class Question:
    """What all four have in common: the cache, and what has been read of it."""

    cache: Cache
    now_s: float
    verify: bool = False
    progress: Progress = field(default_factory=Silent)
    remarks: list[str] = field(default_factory=list)
    _pasts: dict[NamespaceId, Past] = field(default_factory=dict)
    _texts: dict[NamespaceId, str] = field(default_factory=dict)
    #: Segments that were read: what is wrong with them, "" if nothing.
    _read: dict[tuple[NamespaceId, SegmentId], str] = field(default_factory=dict)
    _others: dict[tuple[NamespaceId, Digest], list[Finding]] = field(default_factory=dict)
    #: Blocks that may have to be looked for among all entries, and those that were.
    _wanted: dict[NamespaceId, set[Digest]] = field(default_factory=lambda: defaultdict(set))
    _searched: dict[NamespaceId, set[Digest]] = field(default_factory=lambda: defaultdict(set))

    @property
    def index(self) -> RedisIndex | SqliteIndex:
        """The index. Raises UnknownName if there is none."""
        if self.cache.index is None:
            raise UnknownName("there is no index yet: the first engine that saves will make it")
        return self.cache.index

    def kinds(self, kind: str, prefix: str | None) -> list[NamespaceId]:
        """The namespaces of a kind that are meant, those registered last first. Raises UnknownName."""
        self._texts = self.cache.namespaces()
        accounts = sorted(self.index.accounts(), key=lambda one: (-one.seen_s, one.namespace))
        if prefix is not None:
            return [self.cache.namespace(prefix)]
        return [one.namespace for one in accounts if kind in ("", one.kind)]

    def text(self, namespace: NamespaceId) -> str:
        """Its JSON."""
        return self._texts.get(namespace) or self.cache.namespaces()[namespace]

    def past(self, namespace: NamespaceId) -> Past:
        """Its journal."""
        if namespace not in self._pasts:
            self._pasts[namespace] = Past(self.index, namespace, self.cache.settings)
        return self._pasts[namespace]

    def present(self, namespace: NamespaceId, names: Sequence[Digest]) -> list[Run | None]:
        """Each block by itself."""
        found: list[Run | None] = []
        for at in range(0, len(names), _STEP):
            found += self.index.find(namespace, b"".join(names[at : at + _STEP]))
        return found

    def wrong(self, namespace: NamespaceId, segment: SegmentId, record: SegmentRecord) -> str:
        """Read a segment's payloads, all ranks', once: what is wrong with them, "" if nothing."""
        if (namespace, segment) not in self._read:
            problem = ""
            self.progress.begin(f"reading segment {segment.hex()}", record.nbytes)
            for rank, part in enumerate(record.parts):
                buffer = memoryview(bytearray(part.nbytes))
                try:
                    read_part(self.cache.payloads, namespace, segment, rank, record, buffer)
                except CorruptPayload as exc:
                    problem = problem or str(exc)
                self.progress.advance(part.nbytes)
            self._read[namespace, segment] = problem
        return self._read[namespace, segment]

    def here(self, namespace: NamespaceId, run: Run | None) -> list[Finding]:
        """What is so now of a block that the index names."""
        if run is None:
            return []
        problem = self.wrong(namespace, run.segment, run.record) if self.verify else ""
        if problem:
            text = f"the index names it, but {problem}; who loads it computes it, and has it evicted"
            cause = "missing" if "missing" in problem else "corrupt"
            return [Finding.model_validate({"cause": cause, "text": text, "segment": run.segment.hex()})]
        verified = ", its payload is whole" if self.verify else ""
        return [Finding(cause="stored", text=f"it is stored{verified}", segment=run.segment.hex())]

    def block(
        self,
        namespace: NamespaceId,
        names: Sequence[Digest],
        at: int,
        run: Run | None,
        *,
        group: int = 0,
        number: int | None = None,
        token: int | None = None,
        others: Sequence[Finding] = (),
    ) -> Block:
        """All that is known of block `at` of `names`."""
        past, name = self.past(namespace), names[at]
        findings = self.here(namespace, run)
        known = past.findings(names, at)
        if not findings and not any(one.cause in ("evicted", "invalidated") and one.segment for one in known):
            if not self._search(namespace, name):
                self.remarks.append(
                    f"namespace {namespace} has more than {SCAN_MOST:,} entries, which were not looked "
                    "through for evicted blocks; the journal alone was asked"
                )
            known = past.findings(names, at)
        findings += [*known, *others]
        if not findings or all(one.cause == "elsewhere" for one in findings):
            findings = [_never(past), *findings]
        return Block(
            namespace=namespace,
            group=group,
            block=number,
            token=token,
            digest=name.hex(),
            findings=tuple(findings),
        )

    def want(self, namespace: NamespaceId, name: Digest) -> None:
        """This block will be asked for: all that are wanted are looked for at once."""
        self._wanted[namespace].add(name)

    def _search(self, namespace: NamespaceId, name: Digest) -> bool:
        self.want(namespace, name)
        if name in self._searched[namespace]:
            return True
        self._searched[namespace] |= self._wanted[namespace]
        return self.past(namespace).look_for(self._wanted[namespace], self.progress)

    def others(self, namespace: NamespaceId, kind: str, name: Digest) -> list[Finding]:
        """Other namespaces that have a block or item of this name."""
        if (namespace, name) not in self._others:
            self._others[namespace, name] = [
                self.elsewhere(namespace, other, "has it")
                for other in self.kinds(kind, None)[:_OTHERS]
                if other != namespace and self.present(other, [name])[0] is not None
            ]
        return self._others[namespace, name]

    def elsewhere(self, namespace: NamespaceId, other: NamespaceId, what: str) -> Finding:
        """That another namespace has it, and what differs."""
        differences = diff(self.cache, namespace, other).differences
        fields = ", ".join(one.path for one in differences)
        return Finding(
            cause="elsewhere",
            text=f"namespace {other} {what}; the two differ in {fields}",
            namespace=other,
            differences=differences,
        )

    def report(
        self,
        subject: Subject,
        name: str,
        *,
        chain: Chain | None = None,
        blocks: Sequence[Block] = (),
        told: Sequence[Told] = (),
    ) -> ExplainReport:
        """All of it."""
        told = sorted(told, key=lambda one: -one.at_s)
        named = {one.namespace for one in blocks} | {one.namespace for one in told}
        if chain is not None:
            named.add(chain.namespace)
        if len(told) > _TOLD:
            self.remarks.append(f"the newest {_TOLD} of {len(told)} outcomes are listed")
        return ExplainReport(
            at_s=self.now_s,
            subject=subject,
            name=name,
            chain=chain,
            blocks=tuple(blocks),
            told=tuple(told[:_TOLD]),
            reach=tuple(past.reach() for name, past in self._pasts.items() if not named or name in named),
            verified=self.verify,
            damaged=sum(bool(problem) for problem in self._read.values()),
            remarks=tuple(dict.fromkeys(self.remarks)),
        )


def _never(past: Past) -> Finding:
    reach = past.reach()
    if not past.settings.journal.events:
        text = "it is not stored; the journal is off (journal.events = 0), so nobody knows if it ever was"
    elif reach.events_complete:
        text = "never stored: no engine has saved it since the journal began"
    else:
        text = "not stored as far back as the journal reaches"
    return Finding(cause="never_stored", text=text, at_s=None)


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
    stops, resumable = _stops(space, usable, len(tokens))
    others = []
    if any(stop is not None for stop in stops):
        others = _longer(question, chosen, tokens, resumable, seed, salt)
    groups = []
    for number, (spec, stop) in enumerate(zip(space.groups, stops, strict=True)):
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
                leading=_leading(there),
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


def _leading(there: Sequence[bool]) -> int:
    return next((i for i, one in enumerate(there) if not one), len(there))


def _stops(space: Namespace, usable: Sequence[Sequence[bool]], tokens: int) -> tuple[list[int | None], int]:
    """Per group, the block that keeps an engine from resuming the prompt further on; and where it resumes.

    Groups that need the whole prefix stop at what they lack first. For the others it is the last block that
    they lack of what resuming there would need.
    """
    whole = [spec.kind in ("full", "mla") for spec in space.groups]
    align = lcm(*(spec.block_tokens for spec in space.groups))
    most = min(len(there) * spec.block_tokens for spec, there in zip(space.groups, usable, strict=True))
    # A window would need a token on its left that was not loaded: as the engines, leave out the last one.
    most = min(most, tokens if all(whole) else tokens - 1) // align * align
    stops: list[int | None] = []
    limit = most
    for spec, there, prefix in zip(space.groups, usable, whole, strict=True):
        first = _leading(there)
        lacks = prefix and first * spec.block_tokens < most
        stops.append(first if lacks else None)
        if lacks:
            limit = min(limit, first * spec.block_tokens // align * align)
    resumable = limit
    while resumable > 0:
        lacking = [_lacks(spec, there, resumable) for spec, there in zip(space.groups, usable, strict=True)]
        if all(one is None for one in lacking):
            break
        if resumable == limit:
            stops = [one if prefix else lack for one, lack, prefix in zip(stops, lacking, whole, strict=True)]
        resumable -= align
    return stops, max(0, resumable)


def _lacks(spec: GroupSpec, there: Sequence[bool], tokens: int) -> int | None:
    """The last block that a prefix of `tokens` lacks of what its next token needs (connectors.boundary)."""
    match spec.kind:
        case "full" | "mla":
            skipped = 0
        case "sliding_window":
            skipped = max(0, tokens - (spec.window or 1) + 1)
        case "chunked_local":
            skipped = tokens // (spec.window or 1) * (spec.window or 1)
        case "mamba":
            skipped = max(0, tokens - 1)
    needed = range(skipped // spec.block_tokens, -(-tokens // spec.block_tokens))
    return next((block for block in reversed(needed) if not there[block]), None)


def _longer(
    question: Question, namespace: NamespaceId, tokens: Sequence[int], resumable: int, seed: str, salt: str
) -> list[Finding]:
    """Other namespaces that hold more of the prompt."""
    found: list[Finding] = []
    made: dict[tuple[str, int, str], list[bytes]] = {}
    for other in question.kinds("kv", None)[:_OTHERS]:
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
        held = _leading(there) * space.groups[0].block_tokens
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
    asked = sorted(exact or every, key=lambda pair: -pair[1].at_s)[:_TOLD]
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
        for space in spaces[:_OTHERS]:
            run = question.present(space, [wanted])[0]
            known = run is not None or question.past(space).findings([wanted], 0)
            (present if run is not None else absent).append(_Asked(space, wanted, run, group, bool(known)))
    blocks = []
    for space, wanted, run, group, _ in present + [one for one in absent if one.known] or absent[:1]:
        others = [] if run is not None else question.others(space, kind, wanted)
        blocks.append(question.block(space, [wanted], 0, run, group=group, others=others))
    told = [
        question.past(space).told(one)
        for space in spaces[:_OTHERS]
        for one in question.past(space).outcomes
        if Digest(one.missing[:DIGEST_BYTES]) in names
    ]
    return question.report(subject, name, blocks=blocks, told=told)
