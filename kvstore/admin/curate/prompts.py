"""Finds what engines would load of a prompt: the segments that resuming it needs, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from kvstore.admin.backends import Cache, UnknownName
from kvstore.admin.curate.plan import MovePlan, Planned, plan_of
from kvstore.admin.curate.reports import PromptFound
from kvstore.errors import ConfigError
from kvstore.index.maintenance import FullIndex
from kvstore.index.port import Run
from kvstore.keys import NamespaceId, SegmentId, digests
from kvstore.rules.hashing import block_hashes, seed_for
from kvstore.rules.prefix import rule_of, stops
from schemas.namespace import Namespace


@dataclass(frozen=True, slots=True)
class StoredPrompt:
    """A prompt, by its token ids or else by the hashes of its full blocks, from the first one on.

    `seed` is the engines' PYTHONHASHSEED, if they have one, and `salt` the request's `cache_salt`; hashes
    hold both already. Prompts with images or an adapter have other names than their token ids tell.
    """

    tokens: Sequence[int] = ()
    hashes: Sequence[bytes] = ()
    seed: str | None = None
    salt: str = ""

    def names(self, space: Namespace) -> Sequence[bytes]:
        """Returns the block hashes in a namespace. Raises ConfigError if they can't be computed."""
        if self.hashes:
            return self.hashes
        return block_hashes(
            self.tokens,
            algorithm=space.hash_algo,
            block_tokens=space.block_tokens,
            seed=seed_for(space, self.seed),
            salt=self.salt,
        )

    def length(self, space: Namespace) -> int:
        """Returns how many tokens it has; one that is given by hashes goes on after its last full block."""
        return len(self.hashes) * space.block_tokens + 1 if self.hashes else len(self.tokens)


def plan_prompt(
    cache: Cache, prompt: StoredPrompt, prefixes: Sequence[str] = (), *, max_bytes: int | None = None
) -> tuple[MovePlan, list[PromptFound]]:
    """Returns what is to be moved for a prompt to be loaded, and how much of it each namespace has.

    It is looked for in the namespaces whose ids start with one of `prefixes`, by default in all whose blocks
    the prompt names. Of the segments `max_bytes` takes heads first. Raises UnknownName, ConfigError if
    the names of its blocks can't be computed, and what the index raises.
    """
    known, spaces = cache.namespaces(), spaces_of(cache, prompt, prefixes)
    entries: list[Planned] = []
    found = []
    for name, (space, hashes) in spaces.items():
        tokens, segments = _needed(cache, name, space, hashes, prompt.length(space))
        assert cache.index is not None, "a namespace is known, so there is an index"
        listings = cache.index.get(name, segments)
        entries += [Planned.of(name, listing) for listing in listings if listing is not None]
        found.append(PromptFound(namespace=name, tokens=len(hashes) * space.block_tokens, stored=tokens))
    entries.sort(key=lambda entry: (entry.depth, entry.namespace, entry.segment))
    return plan_of({name: known[name] for name in spaces}, entries, max_bytes), found


def spaces_of(
    cache: Cache, prompt: StoredPrompt, prefixes: Sequence[str] = ()
) -> dict[NamespaceId, tuple[Namespace, Sequence[bytes]]]:
    """Returns the namespaces whose blocks a prompt names, of those whose ids start with one of `prefixes` or
    of all, each with the prompt's block hashes there.

    Raises UnknownName, and ConfigError if the names of its blocks can't be computed.
    """
    known = cache.namespaces()
    chosen = sorted({cache.namespace(prefix) for prefix in prefixes}) if prefixes else list(known)
    spaces: dict[NamespaceId, tuple[Namespace, Sequence[bytes]]] = {}
    refusals = []
    for name in chosen:
        try:
            space = Namespace.model_validate_json(known[name])
            if space.kind == "kv":
                spaces[name] = space, prompt.names(space)
            elif prefixes:
                refusals.append(f"namespace {name} holds encoder items, not prompts")
        except ValidationError:
            refusals.append(f"namespace {name} is of another version of kvstore")
        except ConfigError as exc:
            refusals.append(f"namespace {name}: {exc}")
    if refusals and (prefixes or not spaces):
        raise ConfigError("; ".join(refusals))
    if not spaces:
        raise UnknownName("no namespace of KV blocks: no engine has registered one with this index yet")
    return spaces


def stored_runs(
    index: FullIndex, name: NamespaceId, space: Namespace, hashes: Sequence[bytes]
) -> list[list[Run | None]]:
    """Returns for each group of a namespace where each block of a chain is stored, None for those that
    aren't. Raises what the index raises."""
    runs = []
    for group, spec in enumerate(space.groups):
        # A block that spans several hashes has the last one as its key.
        ratio = max(1, spec.block_tokens // space.block_tokens)
        runs.append(index.find(name, digests(list(hashes[ratio - 1 :: ratio]), group)))
    return runs


def _needed(
    cache: Cache, name: NamespaceId, space: Namespace, hashes: Sequence[bytes], length: int
) -> tuple[int, list[SegmentId]]:
    """Returns how many leading tokens an engine would load, and the segments that hold them."""
    assert cache.index is not None, "a namespace is known, so there is an index"
    rules = [rule_of(spec.kind, spec.block_tokens, spec.window) for spec in space.groups]
    runs = stored_runs(cache.index, name, space, hashes)
    _, tokens = stops(rules, [[run is not None for run in one] for one in runs], length)
    needed = dict.fromkeys(
        run.segment
        for rule, one in zip(rules, runs, strict=True)
        for block in rule.needed(tokens)
        if (run := one[block]) is not None
    )
    return tokens, list(needed)
