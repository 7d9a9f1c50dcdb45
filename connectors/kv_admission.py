"""Which blocks of a request are worth saving (settings: `admission`).

With `second_use` a prompt's blocks are noted in the index when the request arrives, and what an earlier
request has asked for, on any engine, is worth saving. A request is noted once: preempted and asked for
again, it would otherwise be its own first use. A session's prompt grows; each growth is noted once.

Everything here belongs to the scheduler's thread, except that a call thread sets a note's answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from connectors.planning import admitted_blocks
from kvstore.keys import digests
from kvstore.store import Space, Store

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True)
class Note:
    """One use of a prompt's blocks, to be counted in the index."""

    digests: bytes
    blocks: int
    #: How many leading blocks earlier requests have asked for; None while the answer is out. Set once.
    noted: int | None = None
    #: A prompt that has grown is noted as a whole, so the index's answer includes what this very request
    #: has noted before. It counts if all of that was known already; if not, this is the answer.
    settled: int | None = None

    def run(self, space: Space) -> None:
        """Call thread: count the use."""
        noted = space.note(self.digests)
        self.noted = noted if self.settled is None else self.settled


class Admission:
    """Of one engine."""

    def __init__(self, store: Store, space: Space, block_tokens: int) -> None:
        self._store = store
        self._space = space
        self._settings = store.settings.admission
        self._block_tokens = block_tokens

    def begin(self, request: Request, last: Note | None) -> Note | None:
        """The note to send for blocks of the prompt that `last` left out; None if there are none.

        While the answer to `last` is out there is no next one.
        """
        if not self._settings.second_use or (last is not None and last.noted is None):
            return None
        blocks = self._prompt_blocks(request)
        if blocks <= (last.blocks if last is not None else 0):
            return None
        note = Note(digests(list(request.block_hashes[:blocks])), blocks)
        if last is not None and last.noted is not None and last.noted < last.blocks:
            note.settled = last.noted
        return note

    def send(self, note: Note) -> None:
        """Run the note by itself on a call thread."""
        if not self._store.transfers.call(lambda: note.run(self._space)):
            note.noted = 0

    def admitted(self, request: Request, note: Note | None) -> int | None:
        """How many leading blocks are worth saving; None while the index hasn't said."""
        blocks = self._prompt_blocks(request)
        if not self._settings.second_use:
            noted = None
        elif not blocks:
            noted = 0
        elif note is None or note.noted is None or note.blocks < blocks:
            return None
        else:
            noted = note.noted
        return admitted_blocks(blocks, self._settings.min_blocks, noted)

    def _prompt_blocks(self, request: Request) -> int:
        return min(request.num_prompt_tokens // self._block_tokens, len(request.block_hashes))
