"""What `evict` takes by another name than its own: a prompt, a request, a session.

A block is of use only together with all before it, so what is deleted of a prompt is the end of its chain,
from some segment on, or all of it. Segments are deleted whole: nobody can take a block out of a payload.

The index knows of no segment whose prompts it belongs to: a chain is known by hashes alone, and what engines
have in their own memory they use without telling anybody. So little is taken by default. If the end of the
chain is not stored, what is may be anybody's beginning, and all of it counts as shared. Else its last segment
goes; and where that belongs to a session, what that session alone was seen to use right before it
(kvstore.index.sessions). That is no proof that nobody else uses it. What that costs is computing: for others,
where it was wrong to delete.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.admin.backends import Cache, UnknownName
from kvstore.admin.curate.prompts import StoredPrompt, spaces_of
from kvstore.admin.curate.sessions import find_named
from kvstore.admin.remove.evict import EvictPlan, PlanFiller, empty_plan
from kvstore.index.maintenance import CLOCKS_DIFFER_S, FullIndex, Listing
from kvstore.index.port import REQUEST_CHARS
from kvstore.keys import DIGEST_BYTES, NamespaceId, SegmentId

#: Outcomes of a namespace that are looked through for a request.
_OUTCOMES = 1_000_000


def plan_prompt(
    cache: Cache, prompt: StoredPrompt, prefix: str | None, *, whole: bool, pinned: bool
) -> EvictPlan:
    """Plans to evict what a prompt has stored: of each group's chain the end that is most likely its own, or
    with `whole` all of it. Pinned segments go only with `pinned`.

    Raises UnknownName, ConfigError if the names of its blocks can't be computed, and what the index raises.
    """
    plan = empty_plan(cache, prefix, "a prompt", spare=False, rule="named")
    filler, index = PlanFiller(cache, plan), cache.index
    for name, (space, _) in spaces_of(cache, prompt, () if prefix is None else (prefix,)).items():
        assert index is not None, "a namespace is known, so there is an index"
        for group in prompt.digests(space):
            runs = index.find(name, group, group)
            segments = list(dict.fromkeys(run.segment for run in runs if run is not None))
            listings = [one for one in index.get(name, segments) if one is not None]
            ends = bool(runs) and runs[-1] is not None
            first = 0 if whole else _first_own(index, name, listings) if ends else len(listings)
            for one in listings[:first]:
                plan.shared.add(one.record.slots, one.record.nbytes)
            for one in listings[first:]:
                filler.add(name, one, pinned=pinned)
    if plan.shared.amount.segments:
        plan.remarks.append(
            "what may be shared holds the beginning of this prompt; --whole takes it, and others compute it "
            "again"
        )
    plan.remarks.append(
        "blocks that came after images or with an adapter have other names than token ids tell: --hashes"
    )
    return plan.in_order()


def _first_own(index: FullIndex, name: NamespaceId, chain: Sequence[Listing]) -> int:
    """Returns the place of the first segment of a chain that nobody else is seen to use, up to its end."""
    if not chain:
        return 0
    first, owners = len(chain) - 1, index.owners(name, [one.segment for one in chain])
    while first and owners[-1] and owners[first - 1] == owners[-1]:
        first -= 1
    return first


def plan_request(cache: Cache, request: str, prefix: str | None, *, whole: bool, pinned: bool) -> EvictPlan:
    """Plans to evict the segments that hold what the store lacked when a request came, and what it computed.

    The journal knows of a request the first block that it went without. What it saved behind that can't be
    served any more either. Segments that are older than the request are others', and go only with `whole`:
    they were missed for another reason, or have come from elsewhere since. Raises UnknownName if the journal
    doesn't know the request (any more), or nothing of it is stored, and what the index raises.
    """
    plan = empty_plan(cache, prefix, f"request {request}", spare=False, rule="named")
    filler, index, told = PlanFiller(cache, plan), cache.index, False
    for account in plan.accounts if index is not None else ():
        assert index is not None, "there are accounts, so there is an index"
        name = account.namespace
        every = [one for one in index.outcomes(name, _OUTCOMES) if one.request == request[:REQUEST_CHARS]]
        told = told or bool(every)
        missed: dict[bytes, float] = {}
        for one in every:
            if one.op == "match" and one.reason == "absent" and one.missing:
                block = one.missing[:DIGEST_BYTES]
                missed[block] = min(one.at_s, missed.get(block, one.at_s))
        runs = zip(missed.values(), index.find(name, b"".join(missed)), strict=True)
        segments = {run.segment: at_s for at_s, run in runs if run is not None}
        for at_s, found in zip(segments.values(), index.get(name, list(segments)), strict=True):
            if found is None:
                continue
            if whole or found.record.created_s >= at_s - CLOCKS_DIFFER_S:
                filler.add(name, found, pinned=pinned)
            else:
                plan.shared.add(found.record.slots, found.record.nbytes)
    if not (plan.segments or plan.pinned.amount.segments or plan.shared.amount.segments):
        raise UnknownName(
            f"what request {request!r} found missing is not stored: it was not saved, or is gone"
            if told
            else f"nothing is remembered of a request {request!r}: it was served in full, or came before "
            "what the journal reaches back to; name its prompt (--prompt, --tokens) or its session"
        )
    plan.remarks.append(
        "the journal names the first block that the store lacked when it came: the segment with that goes; "
        "what it saved behind is not served any more, and goes by its last use; what comes before stays"
    )
    return plan.in_order()


def plan_session(cache: Cache, wanted: str, salt: str, prefix: str | None, *, pinned: bool) -> EvictPlan:
    """Plans to evict what only a session has used, and to forget it.

    `wanted` and `salt` are those of kvstore.admin.curate.sessions.plan_session. Raises UnknownName and what
    the index raises.
    """
    found = find_named(cache, wanted, salt=salt, prefixes=() if prefix is None else (prefix,))
    session = found[0][1].session
    plan = empty_plan(cache, prefix, f"session {session.hex()}", spare=False, rule="named")
    filler, index = PlanFiller(cache, plan), cache.index
    assert index is not None, "a session is known, so there is an index"
    for name, one in found:
        segments: Sequence[SegmentId] = list(index.owned(name, one.session))
        for listing in index.get(name, segments):
            if listing is not None:
                filler.add(name, listing, pinned=pinned)
        plan.sessions.append((name, one.session))
    plan.remarks.append("what a session shares with others, or has used first, is not known to be its")
    return plan.in_order()
