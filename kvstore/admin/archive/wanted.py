"""What of an archive may come in: an archive proves neither who made it nor what it was meant to bring."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvstore.errors import CorruptPayload
from kvstore.format.segment import Header
from kvstore.keys import NamespaceId
from kvstore.rules.segments import staging_bytes
from schemas.namespace import Namespace
from schemas.settings import ECSettings, KVSettings, Settings

#: A slot of a kv namespace that is no block, such as a row of hidden states, has at most so many bytes.
_BESIDES = 16 << 20


class UnknownNamespace(Exception):
    """A segment is of a namespace that nobody has let in; the message says how to."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The namespaces that an import lets in: those that are named, or else those that the store knows."""

    #: Starts of namespaces' ids, in lower case; none: any.
    prefixes: tuple[str, ...] = ()
    #: Tenants; none: any.
    tenants: Collection[str] = ()
    #: Whether namespaces may come in that are neither named nor known.
    new: bool = False

    def names(self, name: NamespaceId, namespace: Namespace) -> bool:
        """Tells whether the namespace is among those that were named, or none was."""
        return name.startswith(self.prefixes or "") and (not self.tenants or namespace.tenant in self.tenants)

    def check_known(self, name: NamespaceId, namespace: Namespace, known: Collection[str]) -> None:
        """Raises UnknownNamespace unless the namespace was named, is known, or new ones may come in."""
        if not (self.new or self.prefixes or self.tenants or name in known):
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
