"""Sorts what redis-py raises into the store's own tree of errors.

timed out (connect, reply, or waiting for a pooled connection)      DeadlineExceeded
refused, reset, LOADING, READONLY, CLUSTERDOWN, MASTERDOWN, other   TransientError
NOAUTH, WRONGPASS, NOPERM                                           PermissionDenied
OOM (maxmemory reached and nothing may be evicted)                  CapacityExceeded
a key of another type, a field that is no number, a script's error  DamagedIndex
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

from kvstore.errors import (
    CapacityExceeded,
    DamagedIndex,
    DeadlineExceeded,
    KVStoreError,
    PermissionDenied,
    TransientError,
)
from kvstore.rules.text import readable

#: Errors that redis-py raises for a failed call; RedisClusterException is not a RedisError.
FAILURES = (redis.RedisError, RedisClusterException, OSError)
#: Most characters of a server's sentence that are repeated.
_SENTENCE_CHARS = 400
#: Texts of denials that redis-py has no class for: a large command before authentication, refused unread
#: ("unauthenticated multibulk length"); a missing right inside a script, since Redis 7.0.
_DENIALS = ("unauthenticated", "The user executing the script can't", "ACL failure in script")

#: Texts of what commands and scripts say about a value that none of ours has written: of another type, no
#: number, no cursor, or one with which Lua can't go on.
_DAMAGES = (
    "WRONGTYPE",
    "DAMAGED",
    "is not an integer",
    "is not a valid float",
    "is not a float",
    "is not a number",
    "would overflow",
    "NaN or Infinity",
    "invalid cursor",
    "is out of range",
    "stream has exhausted",
    "The ID specified in XADD",
    "attempt to ",
    "bad argument",
    "must be a number",
    "must be strings or integers",
    "too many results to unpack",
)


def classified(exc: Exception, operation: str) -> KVStoreError:
    """Returns the error of our tree for `exc`; its message begins with `operation`."""
    text = str(exc)
    cause = exc.__cause__
    if isinstance(exc, RedisClusterException) and isinstance(cause, FAILURES):
        # It only says "cannot be connected"; its cause, what the last seed said, is the reason.
        exc = cause
    kind: type[KVStoreError] = TransientError
    if isinstance(exc, (redis.TimeoutError, TimeoutError)) or "No connection available" in text:
        kind = DeadlineExceeded
    elif denied(exc):
        kind = PermissionDenied
    elif isinstance(exc, OutOfMemoryError) or "OOM command not allowed" in text:
        kind = CapacityExceeded
    elif damaged(exc):
        kind = DamagedIndex
    said = next(iter(text.splitlines()), "") or type(exc).__name__
    return kind(f"{operation}: {readable(said, _SENTENCE_CHARS)}")


def denied(exc: Exception) -> bool:
    """Returns whether an operator must grant something first."""
    if isinstance(exc, (AuthenticationError, AuthorizationError, NoPermissionError)):
        return True
    text = str(exc)
    return text.startswith(("NOAUTH", "NOPERM", "WRONGPASS")) or any(words in text for words in _DENIALS)


def damaged(exc: Exception) -> bool:
    """Returns whether the server is well, and a key holds what it should not."""
    # A script's error may say both, where and what: a full server, a missing right, a replica come first.
    text = str(exc)
    if not isinstance(exc, redis.ResponseError) or denied(exc) or demoted(exc):
        return False
    return "OOM command not allowed" not in text and any(words in text for words in _DAMAGES)


def demoted(exc: Exception) -> bool:
    """Returns whether a replica said this: it takes no writes, or has lost its master. It changed nothing."""
    if isinstance(exc, (ReadOnlyError, MasterDownError)):
        return True
    # Before 7.0, Redis says it in the middle of the text if a script ran into it.
    return isinstance(exc, redis.ResponseError) and "READONLY You can't write" in str(exc)
