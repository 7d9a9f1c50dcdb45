"""drop: makes a whole namespace invisible, and then removes its payloads and the namespace itself.

Order, so that one that is cut off is finished by the next, or by the janitor:
    1. invalidate   out of sight, and refused beside the    crash: the janitor drains and reaps the rest
                    payloads, for an index that gets lost
    2. drain        into the trash, with the grace time     crash: the same
    3. reap         payloads whose grace has passed         crash: deleted once more
    4. erase        the namespace, once it holds nothing    crash: an empty namespace
Without a grace time (`now`) a load of another engine that had matched before step 1 finds nothing and
computes: no wrong answer, but a slow one. Stray payloads of the namespace are then deleted as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvstore.admin.backends import Cache, Refused
from kvstore.admin.counting import amount_of
from kvstore.admin.described import described
from kvstore.admin.progress import ProgressListener, Silent
from kvstore.admin.remove.removal import NamespaceRemoval
from kvstore.admin.remove.reports import DropReport, DropState
from kvstore.admin.selection import needed_index
from kvstore.index.maintenance import Account, FullIndex
from kvstore.keys import NamespaceId
from kvstore.rules.lateness import SETTLED_S


def drop(
    cache: Cache,
    prefix: str,
    *,
    apply: bool = False,
    now: bool = False,
    progress: ProgressListener | None = None,
    clock: Callable[[], float] = time.time,
) -> DropReport:
    """Removes a namespace and all that it holds, as far as the grace time allows; with `now`, all of it.

    Raises UnknownName, Refused and what the backends raise; what was done until then stays done.
    """
    index = needed_index(cache)
    name = cache.namespace(prefix)
    account = _account(index, name)
    kind, model = described(cache.namespaces().get(name))
    removal = NamespaceRemoval(cache, index, name, clock)
    state: DropState = "kept"
    if apply:
        when = "now" if now else "after the grace time"
        cache.record("drop", f"{name} ({kind}, {model}): {account.usage.segments} segments, {when}")
        (progress or Silent()).begin(f"drop {name}")
        removal.hide()
        removal.drain(at_once=now)
        if now:
            removal.reap_early()
        removal.reap()
        if now:
            # A younger payload may still be committed; if it isn't, fsck finds it.
            removal.delete_strays(clock() - SETTLED_S)
        state = removal.forget()
    return DropReport(
        at_s=clock(),
        applied=apply,
        now=now,
        namespace=name,
        kind=kind,
        model=model,
        tenant=account.tenant,
        visible=amount_of([account]),
        trashed=account.trashed,
        bygone=account.bygone,
        seen_s=account.seen_s or None,
        state=state,
        invalidated=removal.invalidated,
        deleted_payloads=removal.deleted,
        due_s=clock() + cache.settings.grace_s if state == "waiting" else None,
    )


def _account(index: FullIndex, name: NamespaceId) -> Account:
    found = [account for account in index.accounts() if account.namespace == name]
    if not found:
        raise Refused(f"another process has just removed namespace {name}")
    return found[0]
