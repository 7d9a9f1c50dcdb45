"""The tree of errors, sorted by what the caller does next.

    KVStoreError
      ConfigError          fix the settings; raised while opening only
      TransientError       try again later; the wrappers retry these, and breakers count them
        DeadlineExceeded   the call's time ran out
        Throttled          the backend asks for fewer calls: try again later than that
          HeldBack         not even tried, for that: others wait for their turn already
        BreakerOpen        not even tried: the backend failed too often just before
        StoreClosed        the store is shutting down
      DamagedIndex         what the index holds makes no sense: a miss; `cache-admin fsck --apply` mends it
      NamespaceUnknown     the index lost the namespace: register it again, then try once more
      PermissionDenied     an operator must act; not retried
      CorruptPayload       quarantine the segment; the blocks are a miss
        NamespaceMismatch  the bytes belong to another namespace
        PayloadMissing     a rank's payload is not there
        UnsignedPayload    nothing proves who wrote it, and this process demands that
      UnreadablePayload    leave it alone: another reader may be able to use it; the blocks are a miss
        UnknownKey         it is signed or encrypted with a key that this process doesn't have
        NewerFormat        it is of a format that this version doesn't know
      CapacityExceeded     drop the save and count it

A miss is a value, never an error. Leaves classify what their libraries raise, `raise ... from exc`.
Messages carry operation, key and backend, never a credential.
"""

from __future__ import annotations


class KVStoreError(Exception):
    """The base of all errors that the store raises on purpose."""

    #: Label of counters; one that is not in kvstore.rules.reasons.MISS_REASONS counts as `error`.
    reason = "error"


class ConfigError(KVStoreError):
    """The settings can't work. The message says which key is wrong and what is allowed."""

    reason = "config"


class TransientError(KVStoreError):
    """The backend failed in a way that may pass."""

    reason = "unavailable"


class DeadlineExceeded(TransientError):
    """The call took longer than its deadline."""

    reason = "deadline"


class Throttled(TransientError):
    """The backend asks for fewer calls."""

    reason = "throttled"
    #: For how many more seconds the call would have waited for its turn, at least.
    wait_s = 0.0


class HeldBack(Throttled):
    """The call was not made, because others wait for their turn already. It says nothing of the backend."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        """`wait_s`: seconds that it would have waited for its turn."""
        super().__init__(message)
        self.wait_s = wait_s


class BreakerOpen(TransientError):
    """The call was refused at once, because the backend failed repeatedly a moment ago."""

    reason = "breaker_open"


class StoreClosed(TransientError):
    """The store has been closed."""

    reason = "closed"


class DamagedIndex(KVStoreError):
    """The index answers, and what it holds in one place is not what any version of ours writes there.

    It says nothing about the rest of the index, so breakers don't count it.
    """


class NamespaceUnknown(KVStoreError):
    """The index doesn't know the namespace: it was emptied, or never had it."""

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


class PayloadMissing(CorruptPayload):
    """The payload of a rank is not there."""

    reason = "missing"


class UnsignedPayload(CorruptPayload):
    """A payload carries no signature, and unsigned ones are refused."""

    reason = "unsigned"


class UnreadablePayload(KVStoreError):
    """A payload that this process can't judge. It is nobody's to evict or delete for that: whoever has
    another key, or a newer version, may find it good.
    """


class UnknownKey(UnreadablePayload):
    """A payload is signed or encrypted with a key that this process doesn't have."""

    reason = "unknown_key"


class NewerFormat(UnreadablePayload):
    """A payload is of a format that this version doesn't know."""

    reason = "newer_format"


class CapacityExceeded(KVStoreError):
    """There is no room: the disk is full, a quota is reached or a queue is full."""

    reason = "capacity"
