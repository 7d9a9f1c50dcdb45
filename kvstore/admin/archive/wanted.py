"""What of an archive may come in: an archive proves neither who made it nor what it was meant to bring."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.admin.archive.manifest import Prompts
from kvstore.admin.backends import Refused
from kvstore.admin.described import fields_of
from kvstore.admin.inspect.namespaces import differences
from kvstore.admin.inspect.reports import Difference
from kvstore.errors import CorruptPayload
from kvstore.format.segment import Header
from kvstore.keys import NamespaceId
from kvstore.rules.segments import staging_bytes
from kvstore.rules.text import readable
from schemas.namespace import Namespace
from schemas.settings import ECSettings, KVSettings, Settings

#: A slot of a kv namespace that is no block, such as a row of hidden states, has at most so many bytes.
_BESIDES = 16 << 20
#: What the page format of any engine begins with that doesn't share across releases of vLLM.
_RELEASE = re.compile(r"vllm[^/]*/")


class UnknownNamespace(Exception):
    """A segment is of a namespace that nobody has let in; the message says how to."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The namespaces that an import lets in: those that are named, or else those that the store knows."""

    #: Starts of namespaces' ids, in lower case; none: any.
    prefixes: tuple[str, ...] = ()
    #: Tenants; none: any.
    tenants: Collection[str] = ()
    #: The start of their weights' digest; "": any.
    weights: str = ""
    #: Whether namespaces may come in that are neither named nor known.
    new: bool = False

    def names(self, name: NamespaceId, namespace: Namespace) -> bool:
        """Tells whether the namespace is among those that were named, or none was."""
        return (
            name.startswith(self.prefixes or "")
            and (not self.tenants or namespace.tenant in self.tenants)
            and namespace.weights.startswith(self.weights)
        )

    def check_known(self, name: NamespaceId, namespace: Namespace, known: Collection[str]) -> None:
        """Raises UnknownNamespace unless the namespace was named, is known, or new ones may come in."""
        if not (self.new or self.prefixes or self.tenants or self.weights or name in known):
            raise UnknownNamespace(
                f"this store doesn't know its namespace (tenant {namespace.tenant!r}, model "
                f"{namespace.model!r}); name it, or its --tenant, or let all in with --new-namespaces"
            )


#: All that is in an archive.
EVERYTHING = Wanted(new=True)


def check_slots_fit(header: Header, namespace: Namespace, settings: Settings | None) -> None:
    """Raises CorruptPayload for a slot that no engine of these settings (None: the defaults) could load.

    Memory for it would be taken on the word of an archive.
    """
    if namespace.kind == "kv":
        name, most = "kv.staging_bytes", staging_bytes(settings.kv if settings else KVSettings())
        largest = max(group.slot_bytes for group in namespace.groups)
        if largest < most:
            name, most = "its namespace's blocks", max(largest, min(most, _BESIDES))
    else:
        name, most = "ec.staging_bytes", (settings.ec if settings else ECSettings()).staging_bytes
    for slot in header.meta.slots:
        if slot.raw_bytes > most:
            raise CorruptPayload(f"a slot of {slot.raw_bytes} bytes; more than {name} ({most} bytes)")


def check_fits(prompts: Prompts, wanted: Wanted, known: Mapping[NamespaceId, str]) -> list[Difference]:
    """Returns how a pack's namespace differs from the nearest one that is known, of its weights if there is
    one, in what no upgrade changes by itself.

    Raises Refused if it was not asked for, or, where that wasn't said, if its model is known with other
    weights alone, or its weights as another model or of another tenant alone.
    """
    name, fields = prompts.name, fields_of(prompts.manifest.namespaces[prompts.name])
    model, weights = readable(prompts.space.model), readable(prompts.space.weights)
    if not wanted.names(name, prompts.space):
        near = [text for id, text in known.items() if wanted.prefixes and id.startswith(wanted.prefixes)]
        why = "".join(map(_worded, differences(fields, fields_of(near[0])))) if len(near) == 1 else ""
        raise Refused(
            f"the pack is not what was named: it is of namespace {name}, {_owner(fields)}, and of weights "
            f"{weights}{why}"
        )
    if name in known:
        return []
    others = [other for text in known.values() if (other := fields_of(text)).get("kind") == "kv"]
    alike = [other for other in others if other.get("weights") == prompts.space.weights]
    same = [other for other in others if all(other.get(one) == fields[one] for one in ("model", "tenant"))]
    if same and not any(other in alike for other in same) and not (wanted.weights or wanted.prefixes):
        held = sorted({readable(other.get("weights")) for other in same})
        raise Refused(
            f"engines here have model {model} with weights {', '.join(held)}, and the pack is of weights "
            f"{weights}: they would load nothing of it. If a rollout brings these weights, say so: --weights "
            f"{weights}"
        )
    if alike and not same and not wanted.prefixes:
        where = sorted({_owner(other) for other in alike})
        raise Refused(
            f"engines here have weights {weights} as {', '.join(where)}, and the pack is of "
            f"{_owner(fields)}: they would load nothing of it. If others will, name its namespace: {name}"
        )
    nearest = [other for other in same if other in alike] or alike or same or others
    return min((differences(_besides(other), _besides(fields)) for other in nearest), key=len, default=[])


def _owner(fields: Mapping[str, Any]) -> str:
    return f"model {readable(fields.get('model'))} of tenant {readable(fields.get('tenant'))}"


def _besides(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields without what an upgrade of vLLM or of kvstore changes by itself."""
    text = _RELEASE.sub("", str(fields.get("page_format", "")), count=1)
    return {name: value for name, value in fields.items() if name != "format"} | {"page_format": text}


def _worded(one: Difference) -> str:
    return f"; {one.path} is {readable(one.a)}, not {readable(one.b)}"
