"""RedisIndex: the index in one Redis. The scripts and their schema stand in kvstore.index.scripted."""

from __future__ import annotations

from math import inf
from typing import Any, Self

from kvstore.errors import KVStoreError
from kvstore.index.numbers import whole
from kvstore.index.redis.client import RedisClient
from kvstore.index.scripted.index import ScriptedIndex
from kvstore.index.scripted.values import NAMESPACES, is_namespace, key, understood
from kvstore.keys import NamespaceId
from schemas.settings import RedisSettings

#: Entries up to which Redis is to keep a bucket in its compact encoding.
_COMPACT = 128


class RedisIndex(ScriptedIndex):
    """The index in one Redis: a single server, the master that Sentinels name, or a Cluster."""

    def __init__(self, client: RedisClient, **options: Any) -> None:
        """`options` are ScriptedIndex's."""
        super().__init__(client, **options)
        self._server = client

    @classmethod
    def from_settings(cls, url: str, settings: RedisSettings, **options: Any) -> Self:
        """Returns the index at a URL of Redis (schemas.urls). Does no I/O. Raises ConfigError."""
        return cls(RedisClient.from_settings(url, settings), **options)

    def __repr__(self) -> str:
        return f"RedisIndex({self._server.where})"

    @understood
    def memory(self) -> tuple[int, int] | None:
        """Returns how many bytes Redis uses and may use (0: any number), in a Cluster its fullest node.

        None if it doesn't tell: managed servers, and users without the right, are refused INFO.
        """
        told = self._memory()
        nodes = [(one["used_memory"], one.get("maxmemory", 0)) for one in told if "used_memory" in one]
        return max(nodes, key=lambda node: (node[0] / (node[1] or inf), node[0]), default=None)

    def _memory(self) -> list[dict[str, Any]]:
        """Returns what each node says of its memory, nothing if one doesn't."""
        try:
            return self._info()
        except KVStoreError:
            return []  # nothing depends on it, least of all whether the index answers

    @understood
    def _info(self) -> list[dict[str, Any]]:
        found = []
        for one in self._server.everywhere("INFO", "memory"):
            numbers = {name: whole(one[name]) for name in ("used_memory", "maxmemory") if name in one}
            found.append({**one, **numbers})
        return found

    @understood
    def warnings(self) -> list[str]:
        """Returns sentences on what is wrong with this Redis's configuration. Raises what ping raises."""
        found = []
        policies = {str(one["maxmemory_policy"]) for one in self._memory() if "maxmemory_policy" in one}
        for policy in sorted(policies - {"noeviction"}):
            victims = "claims and incomplete saves" if policy.startswith("volatile") else "parts of the index"
            found.append(
                f"maxmemory-policy is {policy}: when full, Redis drops {victims} behind kvstore's back; "
                "set it to noeviction, kvstore evicts by itself"
            )
        if not policies:
            found.append(
                "Redis does not say what it drops when it is full (maxmemory_policy of INFO memory); make "
                "sure that its maxmemory-policy is noeviction"
            )
        strangers = [name for name in self._members() if not is_namespace(name)]
        if strangers:
            found.append(
                f"{NAMESPACES} has {len(strangers)} members that are no namespaces, such as "
                f"{strangers[0][:40]!r}; SREM removes them, nothing uses them"
            )
        found += super().warnings()
        found += [text for namespace in self.namespaces() if (text := self._overfull(namespace))]
        return found

    def _overfull(self, namespace: NamespaceId) -> str | None:
        """Returns a warning if one of the first buckets is not in the compact encoding.

        It may have outgrown it, or the server's limits on it may be too low: users with no more rights than
        the index needs can't read these, nor anything else of the configuration.
        """
        for bucket in range(4):
            where = key(namespace, f"b:{bucket:x}")
            if self._client.command("OBJECT", "ENCODING", where) == b"hashtable":
                if whole(self._client.command("HLEN", where)) <= _COMPACT:
                    return (
                        f"a bucket of namespace {namespace} has {_COMPACT} entries or fewer and is not in "
                        "the compact encoding: blocks take 2.5 times the memory; set "
                        "hash-max-listpack-entries to 128 and hash-max-listpack-value to 64"
                    )
                return (
                    f"namespace {namespace} has outgrown its buckets: its blocks take 2.5 times the memory; "
                    "raise identity.epoch, so that it begins anew with buckets for today's capacity_bytes"
                )
        return None
