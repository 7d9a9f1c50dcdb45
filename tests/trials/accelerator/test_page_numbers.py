"""Page numbers on their way to a device: through memory that is locked once, and never overwritten there."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the connectors' tests need the full set-up: make setup")
pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.engine.paging.ids import Upload
from connectors.engine.tensors import Staging
from trials.accelerator.device import CUDA, MODES, Accelerator, Tensor
from trials.accelerator.engine import on

pytestmark = pytest.mark.engine  # the full set-up, not an engine


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what is locked."""
    sizes: list[int] = []
    pin = Tensor.pin_memory
    monkeypatch.setattr(Tensor, "pin_memory", lambda one: sizes.append(one.numel()) or pin(one))
    return sizes


def numbers(start: int, count: int = 8) -> np.ndarray[Any, Any]:
    return np.arange(start, start + count, dtype=np.int64)


@pytest.mark.parametrize("mode", MODES)
def test_memory_is_used_again_and_never_too_early(mode: str, pinned: list[int]) -> None:
    accelerator = Accelerator(1, mode)
    with on(accelerator):
        upload = Upload(CUDA, room=4 * 64)
        sent = []
        for i in range(200):
            sent.append((i, upload.send(numbers(i))))
            if i % 3 == 2:
                # The step has run: whatever was sent is there.
                accelerator.finish_all()
                for start, there in sent:
                    assert there.raw.tolist() == numbers(start).tolist()
                sent.clear()
    assert pinned == [] and not accelerator.stalls


def test_a_device_that_is_far_behind_costs_memory_and_no_wait(pinned: list[int]) -> None:
    accelerator = Accelerator(1, "lazy")
    with on(accelerator):
        upload = Upload(CUDA, room=4 * 64)
        # Nobody gets a lazy one's event by asking once.
        accelerator.chance = lambda share: False
        sent = [upload.send(numbers(i)) for i in range(10)]
        assert pinned == [8] * 6 and not accelerator.stalls
        accelerator.finish_all()
        assert [one.raw.tolist() for one in sent] == [numbers(i).tolist() for i in range(10)]
        upload.send(numbers(0, 32))
        assert len(pinned) == 6, "what has passed is free again, all of it at once"


def test_what_could_not_be_sent_takes_no_memory(pinned: list[int]) -> None:
    accelerator = Accelerator(1, "lazy")
    with on(accelerator):
        upload = Upload(CUDA, room=64)
        accelerator.refuses = partial(next, iter([True, False]))
        with pytest.raises(torch.OutOfMemoryError):
            upload.send(numbers(0))
        there = upload.send(numbers(5))
        accelerator.finish_all()
        assert there.tolist() == numbers(5).tolist() and pinned == []


def test_locked_memory_is_unlocked_when_nobody_has_it() -> None:
    """Another engine of the process may get its addresses, and lock them."""
    accelerator = Accelerator(1, "eager")
    with on(accelerator):
        staging = Staging(1 << 16, 1, pin=True)
        memory = staging._memory.raw  # type: ignore[attr-defined]
        assert accelerator.is_registered(memory)
        del staging
        assert not accelerator.is_registered(memory)
