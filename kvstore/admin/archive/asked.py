"""Has an engine compute the prompts of an export, and finds what they need in its store.

An engine ends its saves in later steps, and drops blocks when its queue of saves is full. So a prompt is
computed again, which makes steps as well, until all of it is stored that an engine could load.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.admin.archive.manifest import MAX_MANIFEST
from kvstore.admin.backends import Cache, Refused
from kvstore.admin.curate.plan import MovePlan, Planned, plan_of
from kvstore.admin.curate.prompts import StoredPrompt, plan_prompt, spaces_of
from kvstore.admin.described import described
from kvstore.admin.progress import ProgressListener
from kvstore.admin.tokenizer import compute, release
from kvstore.keys import DIGEST_BYTES, NamespaceId, SegmentId
from schemas.pack import Pack, PackedPrompt

#: How often a prompt is computed at most, and how long nothing more may be saved before it is again.
_ATTEMPTS = 5
_STILL_S = 10.0
_STEP_S = 0.1
#: Bytes of a manifest that names of prompts may take beside their blocks.
_BESIDES = 1 << 20


def ask(
    cache: Cache,
    engine: str,
    prompts: Sequence[Mapping[str, Any]],
    prefixes: Sequence[str] = (),
    *,
    seed: str | None = None,
    progress: ProgressListener,
) -> tuple[Pack, MovePlan]:
    """Has an engine that saves into the cache compute the prompts. Returns what a manifest says of them, and
    the segments that engines would load of them.

    The engine's namespace is that of `prefixes`, which may be left out where the cache has one of KV blocks
    alone; `seed` is its PYTHONHASHSEED. Raises Refused if it is not clear which that is, or if not all of a
    prompt comes to be stored; as `compute` and `spaces_of`; and what the index raises.
    """
    made = []
    version = release(engine)
    for prompt in prompts:
        progress.begin(f"compute {prompt['name']}")
        name, one = _computed(cache, engine, prompt, prefixes, seed)
        made.append(one)
        prefixes = [name]
    pack = Pack(engine=version, prompts=tuple(made))
    return pack, plan_pack(cache, name, pack)


def plan_pack(cache: Cache, name: NamespaceId, pack: Pack) -> MovePlan:
    """Returns the segments of a namespace that engines would load of a pack's prompts, in the order of these.
    Raises Refused for prompts that no manifest has room for, or of which nothing is stored.
    """
    digits = sum(len(prompt.blocks) for prompt in pack.prompts)
    if digits + _BESIDES > MAX_MANIFEST:
        most = (MAX_MANIFEST - _BESIDES) // 32
        raise Refused(f"prompts of {digits // 32} blocks; an archive has at most {most}: make several")
    entries: dict[SegmentId, Planned] = {}
    for prompt in pack.prompts:
        plan, _ = plan_prompt(cache, StoredPrompt(hashes=prompt.hashes), [name])
        entries |= {entry.segment: entry for entry in plan.entries}
        if not plan.entries:
            raise Refused(f"nothing of prompt {prompt.name!r} is stored")
    return plan_of(plan.namespaces, list(entries.values()), None)


def _computed(
    cache: Cache, engine: str, prompt: Mapping[str, Any], prefixes: Sequence[str], seed: str | None
) -> tuple[NamespaceId, PackedPrompt]:
    said = f"prompt {prompt['name']!r}"
    tokens = compute(engine, prompt)
    # All of them, also those with another seed: one might be the engine's, and another hold the prompt.
    known = [name for name, text in cache.namespaces().items() if described(text)[0] == "kv"]
    spaces = spaces_of(cache, StoredPrompt(tokens, seed=seed), prefixes or known)
    if len(spaces) != 1:
        raise Refused(f"the cache has namespaces {', '.join(spaces)}: name the engine's, which its log says")
    [(name, (space, hashes))] = spaces.items()
    # As something longer finds it, which the prompt is the beginning of.
    whole = StoredPrompt(hashes=hashes)
    most = whole.most(space) if hashes else 0
    if not most:
        raise Refused(f"{said} has {len(tokens)} tokens, fewer than a block: nothing is saved")
    stored = _settled(cache, name, whole, most)
    for _ in range(_ATTEMPTS - 1):
        if stored == most:
            break
        compute(engine, {"tokens": tokens})
        stored = _settled(cache, name, whole, most)
    if stored < most:
        raise Refused(
            f"{said}: only {stored} of {most} tokens are stored. The engine has to save into this cache, "
            "which needs room. It saves nothing that it still holds itself: start it again"
        )
    blocks = b"".join(one[:DIGEST_BYTES] for one in hashes).hex()
    return name, PackedPrompt(name=prompt["name"], tokens=len(tokens), blocks=blocks)


def _settled(cache: Cache, name: NamespaceId, whole: StoredPrompt, most: int) -> int:
    """Returns how many tokens of a prompt an engine would load, once that is all or no more come."""
    best, until = -1, time.monotonic() + _STILL_S
    while time.monotonic() < until:
        _, [found] = plan_prompt(cache, whole, [name])
        if found.stored >= most:
            return found.stored
        if found.stored > best:
            best, until = found.stored, time.monotonic() + _STILL_S
        time.sleep(_STEP_S)
    return best
