"""The doctor's checks of whether the cache is kept in bounds: quotas, the trash, the janitor, the sketch of
what has been asked for before, and the writers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import log1p

from kvstore.admin.backends import Cache
from kvstore.admin.curate.quota import quota_lines
from kvstore.admin.doctor.reports import Check
from kvstore.admin.reports import QuotaLine
from kvstore.index.maintenance import Account, FullIndex
from kvstore.keys import parse_payload_name
from kvstore.rules.units import size
from kvstore.store.rounds import is_at_work

#: Seconds after the end of its grace time from which an evicted payload counts as overdue: nothing deletes
#: it.
_OVERDUE_S = 900.0
#: The share of a quota from which on what is pinned leaves too little for all else.
_PINNED_SHARE = 0.9
#: How many namespaces' trash and sketch are looked at, the fullest: a round trip or two each.
_LOOKED_AT = 50
#: The share of a sketch's bits from which it is full: then all three bits of a block are set by chance, in
#: one of two windows, for about one block in twenty-five.
_FULL_SHARE = 0.27
_MARK_BITS = 3
#: Bytes of sketch per block for one false positive in a hundred.
_SKETCH_BYTES_PER_BLOCK = 2
#: Writers that are named, the latest first.
_NAMED = 5


def check_contents(cache: Cache) -> Iterator[Check]:
    """Checks that the index is not empty while payloads are stored: then it may have been lost."""
    if cache.index is not None and any(
        account.usage.segments or account.trashed or account.bygone for account in cache.index.accounts()
    ):
        return
    stored = next((listed.name for listed in cache.payloads.list() if parse_payload_name(listed.name)), None)
    if stored is not None:
        yield Check(
            name="contents",
            state="warning",
            found=f"the index names nothing, but payloads are stored, such as {stored}",
            advice="if the index was lost, `cache-admin rebuild --apply` makes it anew from the payloads",
        )


def check_quotas(cache: Cache, clock: Callable[[], float]) -> Iterator[Check]:
    """Checks for quotas that are exceeded, and for pins that keep them from being met."""
    if cache.index is None:
        return
    given = cache.index.quotas()
    lines = quota_lines(cache.index.accounts(), given, cache.settings)
    janitor = is_at_work(given, clock())
    troubled = False
    for line in lines:
        if line.state == "over":
            troubled = True
            yield Check(
                name="capacity",
                state="warning",
                found=f"{line.scope} holds {size(line.used_bytes)} of {size(line.quota_bytes)}",
                advice=_over(line, janitor=janitor),
            )
        elif line.pinned_bytes > _PINNED_SHARE * line.quota_bytes:
            troubled = True
            yield Check(
                name="capacity",
                state="warning",
                found=f"{size(line.pinned_bytes)} of {line.scope}'s {size(line.quota_bytes)} are pinned",
                advice="what is pinned is not evicted, so nothing else is kept: `cache-admin pin --remove`, "
                "or a larger quota",
            )
    if not troubled:
        store = lines[-1]
        others = f", and {len(lines) - 1} other quotas" if len(lines) > 1 else ""
        found = f"the store holds {size(store.used_bytes)} of {size(store.quota_bytes)}{others}"
        yield Check(name="capacity", state="ok", found=found)


def _over(line: QuotaLine, *, janitor: bool) -> str:
    if line.pinned_bytes > _PINNED_SHARE * line.quota_bytes:
        return (
            "most of it is pinned, and what is pinned is not evicted: `cache-admin pin --remove`, or a "
            "larger quota"
        )
    if not janitor:
        return (
            "engines evict when they save, and none does just now: run `cache-admin serve`, or "
            "`cache-admin evict --keep SIZE` once; have the engines the same settings as this tool?"
        )
    return "a janitor does the upkeep and has not evicted yet; if this stays so, see its log"


def check_maintenance(cache: Cache, clock: Callable[[], float]) -> Iterator[Check]:
    """Checks whether evicted payloads are deleted in time, and whether a janitor works."""
    if cache.index is None:
        return
    index, janitor = cache.index, is_at_work(cache.index.quotas(), clock())
    accounts = sorted(index.accounts(), key=lambda account: -account.trashed)
    trashed = sum(account.trashed for account in accounts)
    late = [
        account
        for account in accounts[:_LOOKED_AT]
        if account.trashed and index.reapable(account.namespace, clock() - _OVERDUE_S, 1)
    ]
    who = "a janitor does the upkeep" if janitor else "no janitor; engines do the upkeep when they save"
    if not late:
        found = f"{who}; {trashed} evicted segments wait to be deleted" if trashed else who
        yield Check(name="upkeep", state="ok", found=found)
        return
    yield Check(
        name="upkeep",
        state="warning",
        found=f"{who}; of {trashed} evicted segments that are not deleted, some are overdue for more than "
        f"{_OVERDUE_S / 60:.0f} minutes, such as in namespace {late[0].namespace}",
        advice="it may not be able to delete payloads: see its log"
        if janitor
        else "their payloads take up room: run `cache-admin serve`, or once "
        "`cache-admin fsck --list --apply`",
    )


def check_sketch(cache: Cache, clock: Callable[[], float]) -> Iterator[Check]:
    """Checks whether the sketch of uses is so full that first uses pass for second ones."""
    admission = cache.settings.admission
    if cache.index is None or not admission.second_use:
        return
    most, fullest = 0.0, None
    accounts = sorted(cache.index.accounts(), key=lambda account: -account.seen_s)
    for account in accounts[:_LOOKED_AT]:
        share = _share(cache.index, account, clock(), admission.window_s, admission.sketch_bytes)
        if share > most:
            most, fullest = share, account.namespace
    if fullest is None:
        return
    full = most > _FULL_SHARE
    # Blocks set bits at random: the share that is still unset tells how many blocks there were.
    blocks = -log1p(-min(most, 0.999)) * admission.sketch_bytes * 8 / _MARK_BITS
    wanted = admission.sketch_bytes
    while wanted < blocks * _SKETCH_BYTES_PER_BLOCK and wanted < 64 << 20:
        wanted *= 2
    yield Check(
        name="admission",
        state="warning" if full else "ok",
        found=f"the sketch of namespace {fullest} is {most:.0%} full: about {blocks:,.0f} blocks within "
        f"{admission.window_s:.0f} s",
        advice="first uses pass for second ones and are saved: raise admission.sketch_bytes to "
        f"{size(wanted)}, or shorten admission.window_s"
        if full
        else "",
    )


def _share(index: FullIndex, account: Account, now_s: float, window_s: float, sketch_bytes: int) -> float:
    bits = index.sketch_bits(account.namespace, now_s=now_s, window_s=window_s, sketch_bytes=sketch_bytes)
    return bits / (8 * sketch_bytes)


def check_writers(cache: Cache) -> Iterator[Check]:
    """Checks for writers that have failed or are disputed (kvstore.index.verdicts)."""
    if cache.index is None:
        return
    accounts = sorted(cache.index.accounts(), key=lambda account: account.seen_s, reverse=True)
    names = [account.namespace for account in accounts[:_LOOKED_AT]]
    judged = [one for name in names for one in cache.index.verdicts(name).items()]
    bad = sorted((v.at_s, v.state, w.hex(), v.name) for w, v in judged if v.state != "proven")
    if not bad:
        if judged:
            yield Check(name="writers", state="ok", found=f"{len(judged)} starts of engines were compared")
        return
    shown = ", ".join(f"{name or writer} ({state})" for _, state, writer, name in reversed(bad[-_NAMED:]))
    more = f", and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
    yield Check(
        name="writers",
        state="warning",
        found=f"what these starts of engines have stored is not what others compute: {shown}{more}",
        advice="look at those engines' weights, accelerators and versions, and restart them; a single engine "
        "that disputes all others is wrong itself (runbook KVStoreWriterFailed)",
    )
