"""Finds what engines would load of a prompt: the segments that resuming it needs, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from kvstore.admin.backends import Cache, UnknownName
from kvstore.admin.curate.plan import MovePlan, Planned, plan_of
from kvstore.admin.curate.reports import PromptFound
from kvstore.errors import ConfigError
from kvstore.keys import NamespaceId, SegmentId, digests
from kvstore.rules.hashing import block_hashes, seed_for
from kvstore.rules.prefix import PrefixRule, most_tokens, rule_of, stops
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

    def most(self, space: Namespace) -> int:
        """Returns how many leading tokens of it an engine would load at most."""
        return most_tokens(_rules(space), self.length(space))

    def digests(self, space: Namespace) -> list[bytes]:
        """Returns the packed digests of its blocks, by group. Raises ConfigError as `names`."""
        hashes = list(self.names(space))
        # A block that spans several hashes has the last one as its key.
        ratios = [max(1, rule.block_tokens // space.block_tokens) for rule in _rules(space)]
        return [digests(hashes[ratio - 1 :: ratio], group) for group, ratio in enumerate(ratios)]

    def loadable(self, space: Namespace, there: Sequence[Sequence[bool]]) -> int:
        """Returns how many leading tokens of it an engine would load if those blocks were there, by group."""
        return stops(_rules(space), there, self.length(space))[1]


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
        tokens, segments = _needed(cache, name, space, prompt)
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


def _needed(
    cache: Cache, name: NamespaceId, space: Namespace, prompt: StoredPrompt
) -> tuple[int, list[SegmentId]]:
    """Returns how many leading tokens an engine would load, and the segments that hold them."""
    assert cache.index is not None, "a namespace is known, so there is an index"
    runs = [cache.index.find(name, each, each) for each in prompt.digests(space)]
    tokens = prompt.loadable(space, [[run is not None for run in one] for one in runs])
    needed = dict.fromkeys(
        run.segment
        for rule, one in zip(_rules(space), runs, strict=True)
        for block in rule.needed(tokens)
        if (run := one[block]) is not None
    )
    return tokens, list(needed)


def _rules(space: Namespace) -> list[PrefixRule]:
    return [rule_of(spec.kind, spec.block_tokens, spec.window) for spec in space.groups]
