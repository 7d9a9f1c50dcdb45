"""The doctor's check of writers: starts of engines of which others compute something else."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.admin.backends import Cache
from kvstore.admin.doctor.reports import Check

#: Writers that are named, the latest first.
_NAMED = 5
#: Namespaces that are asked, the latest registered first.
_ASKED = 50


def check_writers(cache: Cache) -> Iterator[Check]:
    """Checks for writers that have failed or are disputed (kvstore.index.verdicts)."""
    if cache.index is None:
        return
    accounts = sorted(cache.index.accounts(), key=lambda account: account.seen_s, reverse=True)
    names = [account.namespace for account in accounts[:_ASKED]]
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
