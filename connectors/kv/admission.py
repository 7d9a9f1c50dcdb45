"""Decides which blocks of a request are worth saving (settings: `admission`).

With `second_use` a prompt's blocks are noted in the index when the request arrives. Blocks that an earlier
request has asked for, on any engine, are worth saving. A request is noted once: when it is matched again
after a preemption, it would otherwise count as its own first use. A session's prompt grows; each growth is
noted once.

Everything here belongs to the scheduler's thread, except that a call thread sets a note's answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from connectors.engine.step import RequestView
from connectors.planning import admitted_blocks
from kvstore.keys import digests
from kvstore.store.space import Space
from kvstore.store.store import Store


@dataclass(slots=True)
class Note:
    """One use of a prompt's blocks, to be counted in the index."""

    digests: bytes
    blocks: int
    #: How many leading blocks earlier requests have asked for, or None while the answer is out. Set once.
    noted: int | None = None
    #: The answer to this request's earlier note, if some of that note's blocks were new; else None. A prompt
    #: that has grown is noted as a whole, so the index's answer includes what this very request has noted
    #: before: it counts only if all of that was known already, and otherwise `settled` is the answer.
    settled: int | None = None

    def run(self, space: Space) -> None:
        """Count the use in the index and set the answer. Runs on a call thread."""
        noted = space.note(self.digests)
        self.noted = noted if self.settled is None else self.settled


class Admission:
    """Decides which blocks of one engine's requests are worth saving. Call `use` before anything else."""

    def __init__(self, store: Store, block_tokens: int) -> None:
        self._store = store
        self._settings = store.settings.admission
        self._block_tokens = block_tokens

    def use(self, space: Space) -> None:
        """Note in this namespace from now on."""
        self._space = space

    def begin(self, request: RequestView, names: Sequence[bytes], last: Note | None) -> Note | None:
        """Returns the note to send for blocks of the prompt that `last` left out, or None without such
        blocks. `names` are the names of the request's blocks.

        There is no next note while the answer to `last` is out.
        """
        if not self._settings.second_use or (last is not None and last.noted is None):
            return None
        blocks = self._prompt_blocks(request, names)
        if blocks <= (last.blocks if last is not None else 0):
            return None
        note = Note(digests(list(names[:blocks])), blocks)
        if last is not None and last.noted is not None and last.noted < last.blocks:
            note.settled = last.noted
        return note

    def send(self, note: Note) -> None:
        """Run the note on a call thread, without a match before it."""
        space = self._space
        if not self._store.transfers.call(lambda: note.run(space)):
            note.noted = 0

    def admitted(self, request: RequestView, names: Sequence[bytes], note: Note | None) -> int | None:
        """Returns how many leading blocks are worth saving, or None while the index has not answered."""
        blocks = self._prompt_blocks(request, names)
        if not self._settings.second_use:
            noted = None
        elif not blocks:
            noted = 0
        elif note is None or note.noted is None or note.blocks < blocks:
            return None
        else:
            noted = note.noted
        return admitted_blocks(blocks, self._settings.min_blocks, noted)

    def _prompt_blocks(self, request: RequestView, names: Sequence[bytes]) -> int:
        return min(request.num_prompt_tokens // self._block_tokens, len(names))
