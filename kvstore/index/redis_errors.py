"""What redis-py raises, sorted into the store's own tree of errors.

timed out (connect, reply, or waiting for a pooled connection)      DeadlineExceeded
refused, reset, LOADING, READONLY, CLUSTERDOWN, MASTERDOWN, other   TransientError
NOAUTH, WRONGPASS, NOPERM                                           PermissionDenied
OOM (maxmemory reached and nothing may be evicted)                  CapacityExceeded
"""

from __future__ import annotations

import redis
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
)

from kvstore.errors import CapacityExceeded, DeadlineExceeded, KVStoreError, PermissionDenied, TransientError

#: What redis-py raises for a failed call; RedisClusterException is not a RedisError.
FAILURES = (redis.RedisError, RedisClusterException, OSError)
#: Denials that redis-py has no class for: a large command from a stranger, refused before it is read
#: ("unauthenticated multibulk length"); a right that is missing inside a script, to Redis 7.0 and later.
_DENIALS = ("unauthenticated", "The user executing the script can't", "ACL failure in script")


def classified(exc: Exception, operation: str) -> KVStoreError:
    """The error of our tree that `exc` is; its message begins with `operation`."""
    text = str(exc)
    cause = exc.__cause__
    if isinstance(exc, RedisClusterException) and isinstance(cause, FAILURES):
        # "cannot be connected": why is what the last seed said.
        exc = cause
    kind: type[KVStoreError] = TransientError
    if isinstance(exc, (redis.TimeoutError, TimeoutError)) or "No connection available" in text:
        kind = DeadlineExceeded
    elif denied(exc):
        kind = PermissionDenied
    elif isinstance(exc, OutOfMemoryError) or "OOM command not allowed" in text:
        kind = CapacityExceeded
    return kind(f"{operation}: {text.splitlines()[0] if text else type(exc).__name__}")


def denied(exc: Exception) -> bool:
    """Whether an operator must grant something first."""
    if isinstance(exc, (AuthenticationError, AuthorizationError, NoPermissionError)):
        return True
    text = str(exc)
    return text.startswith(("NOAUTH", "NOPERM", "WRONGPASS")) or any(words in text for words in _DENIALS)


def demoted(exc: Exception) -> bool:
    """Whether a replica said this: it takes no writes, or has lost its own master. Nothing was changed."""
    if isinstance(exc, (ReadOnlyError, MasterDownError)):
        return True
    # Redis before 7.0 says it in the middle, if a script ran into it.
    return isinstance(exc, redis.ResponseError) and "READONLY You can't write" in str(exc)
