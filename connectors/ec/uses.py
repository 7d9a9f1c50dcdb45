"""Tells the index which items a session's requests use.

The index learns of a use when an item has been fetched for a request, in place of the touch. A staged item
can be used again without a fetch. Such a use is reported, too, if its request has a session: else the session
that had the item fetched would go on to own it. Uses without a session are reported once.

A request's hints are reported once more when it ends, whatever it needed of the encoder: the items that its
session saved are in the index.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from connectors.ec.items import Item
from connectors.ec.messages import NOBODY, User
from connectors.engine.guard import otherwise
from connectors.engine.sessions.hints import Hints
from connectors.engine.sessions.telling import SessionTeller, tell
from connectors.engine.step import RequestView
from kvstore.index.sessions import USE
from kvstore.keys import salt_id
from kvstore.store.space import Space
from kvstore.store.store import Store


@dataclass(frozen=True, slots=True)
class _Known:
    hints: Hints
    user: User


class ItemUses:
    """Tells of the uses of one engine's items. Belongs to the scheduler's thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._teller = SessionTeller(store)
        #: Hints and users of requests with items, until the requests end.
        self._known: dict[str, _Known] = {}

    def use(self, space: Space | None) -> None:
        """Report uses in this namespace from now on, or in none if `space` is None."""
        self._space = space
        if space is not None:
            self._teller.use(space)

    @otherwise(lambda: NOBODY)
    def by(self, request: RequestView) -> User:
        """Returns who uses the items of a request, which has not ended."""
        if (known := self._known.get(request.request_id)) is None:
            known = self._known[request.request_id] = self._read(request)
        return known.user

    def restart(self) -> None:
        """Forget the requests under way."""
        self._known.clear()

    def again(self, request: RequestView, item: Item) -> None:
        """A request loads a staged item, which perhaps another one had fetched."""
        user, before = self.by(request), item.user
        space, segment = self._space, item.segment
        if space is None or segment is None or item.asked_by == request.request_id:
            return
        # An item that has lost its owner stays without.
        item.user = user if user.session else NOBODY
        if user.session:
            tell(self._store, space, user.session, user.salt, [segment], USE)
        elif before.session:
            self._store.transfers.call(lambda: space.touch([segment]))

    def ends(self, request: RequestView, items: Iterable[Item | None]) -> None:
        """A request has ended, well or not; `items` are the items of its look-ups."""
        known = self._known.pop(request.request_id, None) or self._read(request)
        if self._space is None:
            return
        segments = [item.segment for item in items if item is not None and item.segment is not None]
        self._teller.ends(known.hints, known.user.salt, segments)

    def _read(self, request: RequestView) -> _Known:
        hints = Hints.of(request)
        self._teller.arrives(hints)
        user = User(hints.session, salt_id(request.cache_salt))
        return _Known(hints, user)
