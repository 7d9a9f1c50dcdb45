"""A feed of a small cache, and a router that subscribes to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.admin.backends import Cache
from kvstore.admin.feed.feed import Choice, RouterFeed
from kvstore.admin.feed.sockets import Sockets
from kvstore.build import load_settings
from tests.waiting import until

if TYPE_CHECKING:
    from tests.admin.feed.router import Router

ANY = "tcp://127.0.0.1:*"


class Feeding:
    """A feed whose turns the test takes."""

    def __init__(self, settings: dict[str, Any], engines: tuple[str, ...], **choice: Any) -> None:
        self.cache = Cache(load_settings(settings, {}))
        self.sockets = Sockets(ANY, ANY, engines, topic="kv@kvstore@tiny-random")
        self.feed = RouterFeed(self.cache, Choice(**choice), self.sockets)
        self.routers: list[Router] = []

    @property
    def addresses(self) -> list[str]:
        return self.sockets.addresses

    def router(self) -> Router:
        """One that has subscribed and was told all."""
        # It needs vLLM, and the tests that need it say so.
        from tests.admin.feed.router import Router

        router = Router(*self.addresses, topic=b"kv@")
        self.routers.append(router)
        snapshots = self.feed.last.snapshots
        self.until(lambda: self.feed.last.snapshots > snapshots)
        self.settle(router)
        return router

    def settle(self, *routers: Router) -> None:
        """Returns when these routers have read the newest batch."""
        for router in routers or self.routers:
            self._settle(router)

    def _settle(self, router: Router) -> None:
        def up_to_date() -> bool:
            router.read()
            return self.sockets.number - 1 in router.batches

        self.until(up_to_date)

    def until(self, what: Callable[[], object]) -> None:
        def turn() -> object:
            self.feed.turn(0.01)
            return what()

        until(turn, say=lambda: str(self.feed.last))

    def asked(self, router: Router, number: int) -> list[tuple[int, bytes]]:
        """What a router is answered that asks for the batches from one on."""
        replays = self.feed.last.replays
        router.ask(number)
        self.until(lambda: self.feed.last.replays > replays)
        return router.answered()

    def close(self) -> None:
        for router in self.routers:
            router.close()
        self.sockets.close()
        self.cache.__exit__()


@pytest.fixture
def feeding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Feeding]]:
    """`feeding(filled.settings, ...)`; whoever subscribes is told all at once."""
    monkeypatch.setattr("kvstore.admin.feed.feed.SNAPSHOT_EVERY_S", 0.0)
    with ExitStack() as stack:

        def start(settings: dict[str, Any], engines: tuple[str, ...] = (), **choice: Any) -> Feeding:
            made: Feeding = stack.enter_context(closing(Feeding(settings, engines, **choice)))
            return made

        yield start


Start = Callable[..., Feeding]
