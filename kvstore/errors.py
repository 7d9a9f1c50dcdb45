"""One tree of errors, sorted by what the caller does next.

    KVStoreError
      ConfigError          fix the settings; raised while opening only
      TransientError       try again later; the wrappers count and break on these
        DeadlineExceeded   the call's time ran out
        Throttled          the backend asks for fewer calls: try again later than that
        BreakerOpen        not even tried: too many failures just now
        Closed             the store is shutting down
      NamespaceUnknown     the index lost the namespace: register it again, then try once more
      PermissionDenied     an operator must act; not retried
      CorruptPayload       quarantine the segment; the blocks are a miss
        NamespaceMismatch  the bytes belong to another namespace
      CapacityExceeded     drop the save and count it

A miss is a value, never an error. Leaves classify what their libraries raise, `raise ... from exc`.
Messages carry operation, key and backend, never a credential.
"""

from __future__ import annotations


class KVStoreError(Exception):
    """Base of everything the store raises on purpose."""

    #: Label for counters: `failures{reason=...}`.
    reason = "error"


class ConfigError(KVStoreError):
    """The settings can't work; the message says which key and what is allowed."""

    reason = "config"


class TransientError(KVStoreError):
    """The backend failed in a way that may pass."""

    reason = "unavailable"


class DeadlineExceeded(TransientError):
    """The call took longer than its deadline."""

    reason = "deadline"


class Throttled(TransientError):
    """The backend has had too many calls."""

    reason = "throttled"


class BreakerOpen(TransientError):
    """Refused at once because the backend failed repeatedly a moment ago."""

    reason = "breaker_open"


class Closed(TransientError):
    """The store has been closed."""

    reason = "closed"


class NamespaceUnknown(KVStoreError):
    """The index has no such namespace, because it was emptied or never had it."""

    reason = "namespace_unknown"


class PermissionDenied(KVStoreError):
    """The backend refuses this identity or path."""

    reason = "permission"


class CorruptPayload(KVStoreError):
    """A payload is truncated, altered or not what its name promises."""

    reason = "corrupt"


class NamespaceMismatch(CorruptPayload):
    """A payload's header names another namespace."""

    reason = "namespace_mismatch"


class CapacityExceeded(KVStoreError):
    """No room: disk full, quota reached or queue full."""

    reason = "capacity"
