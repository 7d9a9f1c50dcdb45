"""The health of the index and the payload store, as far as it is known without a call."""

from __future__ import annotations

import logging
import threading

from kvstore.breaker import Breaker
from kvstore.errors import KVStoreError
from kvstore.index.sharding.breakers import ShardBreakers
from kvstore.store.backends import Backends

log = logging.getLogger(__name__)


class Health:
    """Tells whether the backends answer, by what breakers and readers have found out. Safe for threads."""

    def __init__(self, backends: Backends) -> None:
        self._payloads = backends.payloads
        self._transfers = backends.transfers
        self._breaker = backends.breaker
        self._index_breaker = backends.index_breaker
        self._throttle = backends.throttle
        self._lock = threading.Lock()
        self._probing = False
        #: Whether the processes that read payloads say that they can't now. Set by a scheduler, which never
        #: reads any itself.
        self.readers_down = False
        #: Likewise whether they say that reads are scarce.
        self.readers_scarce = False

    @property
    def index_down(self) -> bool:
        """Tells whether calls of the index are refused, because it has failed too often."""
        return _is_down(self._index_breaker)

    @property
    def payloads_down(self) -> bool:
        """Tells whether calls of the payload store are refused, because it has failed too often."""
        return _is_down(self._breaker)

    @property
    def reads_are_scarce(self) -> bool:
        """Tells whether the payload store has asked this process for fewer reads lately
        (Throttle.reads_are_scarce)."""
        return self._throttle is not None and self._throttle.reads_are_scarce()

    def payloads_answer(self) -> bool:
        """Tells whether payloads can be read just now; if not, another thread asks the store. No I/O."""
        if self._breaker is None or self._breaker.is_closed:
            return not self.readers_down
        self.probe_payloads()
        return False

    def read_hangs(self) -> None:
        """Records that a load's deadline has passed while a payload was being read.

        A disk that hangs raises no error, so without this every further request would wait for its deadline.
        A bucket raises an error. A load that waits for many turns at the bucket may be late though the bucket
        serves.
        """
        if self._breaker is not None and not self.reads_are_scarce:
            self._breaker.blame()

    def probe_payloads(self) -> None:
        """Finds out on a background thread whether the payload store is back."""
        with self._lock:
            if self._probing:
                return
            self._probing = True
        # Not on the threads of saves and uploads: those may be what hangs.
        if not self._transfers.call(self._probe):
            self._probing = False

    def _probe(self) -> None:
        try:
            self._payloads.ping()
        except KVStoreError as exc:
            log.debug("payloads: %s", exc)
        finally:
            self._probing = False


def _is_down(breaker: Breaker | ShardBreakers | None) -> bool:
    return breaker is not None and not breaker.is_closed
