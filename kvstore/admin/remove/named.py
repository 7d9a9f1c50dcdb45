"""What `evict` takes by another name than its own: a prompt, a request, a session.

A block is of use only together with all before it, so what is deleted of a prompt is the end of its chain,
from some segment on, or all of it. Segments are deleted whole: nobody can take a block out of a payload.

The index knows of no segment whose prompts it belongs to: a chain is known by hashes alone. That a segment is
shared can be told by two traces of its uses. Where the last segment of the chain belongs to a session, what
that session alone has used is the prompt's own (kvstore.index.sessions), and all before it is shared. Else: a
request that uses a segment of a chain uses all before it, so a segment that was used in a later minute than
every one behind it was used by a request that went on otherwise. Neither is proof that nobody else uses the
rest. What that costs is computing: for others, where it was wrong to delete.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.admin.backends import Cache, UnknownName
from kvstore.admin.curate.prompts import StoredPrompt, spaces_of, stored_runs
from kvstore.admin.curate.sessions import find_named
from kvstore.admin.remove.evict import EvictPlan, PlanFiller, empty_plan
from kvstore.index.maintenance import FullIndex, Listing
from kvstore.keys import DIGEST_BYTES, NamespaceId, SegmentId

#: Outcomes of a namespace that are looked through for a request.
_OUTCOMES = 1_000_000


def plan_prompt(
    cache: Cache, prompt: StoredPrompt, prefix: str | None, *, whole: bool, pinned: bool
) -> EvictPlan:
    """Plans to evict what a prompt has stored: of each group's chain the end that nobody else is seen to use,
    or with `whole` all of it. Pinned segments go only with `pinned`.

    Raises UnknownName, ConfigError if the names of its blocks can't be computed, and what the index raises.
    """
    plan = empty_plan(cache, prefix, "a prompt", spare=False, rule="named")
    filler, index = PlanFiller(cache, plan), cache.index
    for name, (space, hashes) in spaces_of(cache, prompt, () if prefix is None else (prefix,)).items():
        assert index is not None, "a namespace is known, so there is an index"
        for runs in stored_runs(index, name, space, hashes):
            segments = list(dict.fromkeys(run.segment for run in runs if run is not None))
            listings = [one for one in index.get(name, segments) if one is not None]
            first = 0 if whole else _first_own(index, name, listings)
            for one in listings[:first]:
                plan.shared.add(one.record.slots, one.record.nbytes)
            for one in listings[first:]:
                filler.add(name, one, pinned=pinned)
    if plan.shared.amount.segments:
        plan.remarks.append(
            "what is shared holds the beginning of this prompt; --whole takes it, and others compute it again"
        )
    plan.remarks.append(
        "blocks that came after images or with an adapter have other names than token ids tell: --hashes"
    )
    return plan.in_order()


def _first_own(index: FullIndex, name: NamespaceId, chain: Sequence[Listing]) -> int:
    """Returns the place of the first segment of a chain behind which nobody else is seen to have gone on."""
    if not chain:
        return 0
    owners = index.owners(name, [one.segment for one in chain])
    first = len(chain) - 1
    if owners[-1]:
        while first and owners[first - 1] == owners[-1]:
            first -= 1
        return first
    used_s = chain[first].last_use_s
    while first and not owners[first - 1] and chain[first - 1].last_use_s <= used_s:
        first -= 1
    return first


def plan_request(cache: Cache, request: str, prefix: str | None, *, pinned: bool) -> EvictPlan:
    """Plans to evict the segments that hold what the store lacked when a request came, and what it computed.

    The journal knows of a request the first block that it went without. What it saved behind that can't be
    served any more either. Raises UnknownName if the journal doesn't know the request (any more), or nothing
    of it is stored, and what the index raises.
    """
    plan = empty_plan(cache, prefix, f"request {request}", spare=False, rule="named")
    filler, index, told = PlanFiller(cache, plan), cache.index, False
    for account in plan.accounts if index is not None else ():
        assert index is not None, "there are accounts, so there is an index"
        name = account.namespace
        every = [one for one in index.outcomes(name, _OUTCOMES) if one.request == request]
        wanted = list(dict.fromkeys(one.missing[:DIGEST_BYTES] for one in every if one.missing))
        told = told or bool(every)
        segments = {run.segment for run in index.find(name, b"".join(wanted)) if run is not None}
        for one in index.get(name, sorted(segments)):
            if one is not None:
                filler.add(name, one, pinned=pinned)
    if not plan.segments and not plan.pinned.amount.segments:
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
