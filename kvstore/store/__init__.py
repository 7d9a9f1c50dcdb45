"""The store: its backends, a namespace in them, and the housekeeping that keeps them in bounds.

Use `Store` and `Space`; the other modules are their parts.
"""

from typing import TYPE_CHECKING

from kvstore.lazy import resolver

if TYPE_CHECKING:
    from kvstore.store.saving import Saved as Saved
    from kvstore.store.space import Match as Match
    from kvstore.store.space import Space as Space
    from kvstore.store.store import Store as Store

__all__ = ["Match", "Saved", "Space", "Store"]
__getattr__ = resolver(
    __name__,
    {"Store": "kvstore.store.store", "Saved": "kvstore.store.saving"}
    | dict.fromkeys(("Match", "Space"), "kvstore.store.space"),
)
