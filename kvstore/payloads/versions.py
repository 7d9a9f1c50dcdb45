"""Versions: what a payload store keeps of payloads that were deleted, as a bucket with versioning does.

Only `erase` asks for them, which is why Versions is not part of PayloadStore.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Version:
    """A former version of a payload, or a mark that it was deleted. Neither can be listed or read by name."""

    name: str
    #: The store's id of it.
    version: str
    nbytes: int
    marker: bool = False


class Versions(ABC):
    """Lists and removes the former versions of one payload store. Raises what its payload store raises."""

    @abstractmethod
    def list(self, prefix: str) -> Iterator[Version]:
        """Yields all former versions, and marks, of names that start with `prefix`, in no order."""

    @abstractmethod
    def remove(self, versions: Sequence[Version]) -> None:
        """Removes them for good. No deleted payload can be read again meanwhile, nor if this raises."""

    @abstractmethod
    def close(self) -> None:
        """Releases connections."""


class NoVersions(Versions):
    """The versions of a store that keeps none."""

    def list(self, prefix: str) -> Iterator[Version]:
        return iter(())

    def remove(self, versions: Sequence[Version]) -> None:
        pass

    def close(self) -> None:
        pass
