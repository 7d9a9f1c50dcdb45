"""The device of a trial, or the fake accelerator in its place, with calls that can be left out."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar
from unittest import mock

import torch

from trials.accelerator.device import CUDA, MODES, Accelerator, on

#: How long a stream is held up, in milliseconds, so that what doesn't wait for it comes first.
HOLD_MS = 40.0
#: A parameter of the C library's `mallopt`.
_M_MMAP_THRESHOLD: Final = -3
_T = TypeVar("_T")


class Machine:
    """The device on which all of a trial runs."""

    fake: bool
    #: Number of runs in which a clean scenario must be clean, and in one of which a planted fault must show.
    #: A device may serve two streams by one queue, where nothing shows.
    tries = 12
    #: Torch, as modules of the connectors see it on this device.
    torch: Any
    device = CUDA

    def __init__(self) -> None:
        self._elsewhere = ThreadPoolExecutor(1, "transfer")
        self._kept: list[Any] = []

    def keep(self, memory: _T) -> _T:
        """Returns host memory, which lives until the run has ended: a fault may leave copies under way."""
        self._kept.append(memory)
        return memory

    def elsewhere(self, call: Callable[[], Any]) -> Any:
        """Returns what `call` returns on a transfer thread."""
        return self._elsewhere.submit(call).result()

    @property
    def current(self) -> Any:
        """Returns the engine's stream, which is the calling thread's current one."""
        return self.torch.cuda.current_stream(self.device)

    @property
    def broken(self) -> set[tuple[str, str]]:
        """Returns calls that do nothing where one function of the connectors makes them: (call, function)."""
        raise NotImplementedError

    @property
    def places(self) -> Counter[tuple[str, str]]:
        """Returns such calls that were made in this run."""
        raise NotImplementedError

    def run(self, number: int) -> contextlib.AbstractContextManager[list[str]]:
        """Enter one run, which ends when the device has done everything; gives a list of what is wrong."""
        raise NotImplementedError

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Let `broken` have an effect."""
        return contextlib.nullcontext()

    def adopt(self, raw: torch.Tensor) -> Any:
        """Returns a copy of host memory (uint8 [bytes]) on the device."""
        raise NotImplementedError

    def down(self, there: Any) -> torch.Tensor:
        """Returns a copy of a device tensor on the host, after all that is queued."""
        raise NotImplementedError

    def hold(self, stream: Any, ms: float = HOLD_MS) -> None:
        """Hold a stream up from here on."""
        raise NotImplementedError

    def pass_by(self, stream: Any) -> None:
        """Let a stream do all that it may before streams that are held up."""
        raise NotImplementedError

    def last_error(self) -> str:
        """Returns the error that the next launch would report, and forgets it; "" if there is none."""
        return ""

    def head(self) -> dict[str, Any]:
        """Returns what the machine is."""
        raise NotImplementedError


class Cuda(Machine):
    """A real device."""

    fake = False

    def __init__(self) -> None:
        super().__init__()
        # Memory of 64 KiB and more has pages of its own, so that neighbours are locked without each other.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)
        self.torch = torch
        self._engine = torch.cuda.Stream(self.device)
        self._broken: set[tuple[str, str]] = set()
        self._places: Counter[tuple[str, str]] = Counter()
        self._cycles_a_ms = 1.0
        for cycles in (1_000_000, 100_000_000, 100_000_000):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            torch.cuda._sleep(cycles)
            ended.record()
            ended.synchronize()
            self._cycles_a_ms = cycles / began.elapsed_time(ended)

    @property
    def broken(self) -> set[tuple[str, str]]:
        return self._broken

    @property
    def places(self) -> Counter[tuple[str, str]]:
        return self._places

    @contextlib.contextmanager
    def run(self, number: int) -> Iterator[list[str]]:
        self._places.clear()
        with torch.cuda.stream(self._engine):
            try:
                yield []
            finally:
                torch.cuda.synchronize()
                self._kept.clear()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:

        def shim(owner: Any, call: str, answer: Any = None) -> Any:
            original = getattr(owner, call)

            def called(*args: Any, **kwargs: Any) -> Any:
                # Calls that torch makes of itself on the way are no place of the connectors.
                frame = sys._getframe(1)
                if frame.f_globals.get("__name__", "").startswith("connectors."):
                    place = (call, frame.f_code.co_qualname)
                    self._places[place] += 1
                    if place in self._broken:
                        return answer
                return original(*args, **kwargs)

            return mock.patch.object(owner, call, called)

        with contextlib.ExitStack() as stack:
            for call in ("wait_event", "wait_stream"):
                stack.enter_context(shim(torch.cuda.Stream, call))
            for call, answer in (("record", None), ("synchronize", None), ("query", True)):
                stack.enter_context(shim(torch.cuda.Event, call, answer))
            stack.enter_context(shim(torch.Tensor, "record_stream"))
            yield

    def adopt(self, raw: torch.Tensor) -> Any:
        return raw.to(self.device, copy=True)

    def down(self, there: Any) -> torch.Tensor:
        torch.cuda.synchronize()
        return there.cpu()

    def hold(self, stream: Any, ms: float = HOLD_MS) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(ms * self._cycles_a_ms))

    def pass_by(self, stream: Any) -> None:
        """Does nothing: time passes here by itself."""

    def last_error(self) -> str:
        try:
            torch.zeros(4, device=self.device).add_(1)
        except RuntimeError as exc:
            return str(exc).splitlines()[0]
        return ""

    def head(self) -> dict[str, Any]:
        about = torch.cuda.get_device_properties(self.device)
        query = "--query-gpu=driver_version,pcie.link.gen.current,pcie.link.width.current"
        try:
            command = ["nvidia-smi", query, "--format=csv,noheader"]
            said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
            driver, generation, lanes = said.splitlines()[0].split(", ")
            link = f"{driver}, PCIe {generation} x{lanes}"
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            link = "unknown"
        return {"device": f"{about.name}, {about.total_memory >> 20} MiB", "driver": link, **_versions()}


class Fake(Machine):
    """The fake accelerator: each run has another adversary."""

    fake = True

    def __init__(self) -> None:
        super().__init__()
        self.accelerator = Accelerator(0)
        self.torch = self.accelerator.torch

    @property
    def broken(self) -> set[tuple[str, str]]:
        return self.accelerator.broken

    @property
    def places(self) -> Counter[tuple[str, str]]:
        return self.accelerator.places

    @contextlib.contextmanager
    def run(self, number: int) -> Iterator[list[str]]:
        # Neither the mode nor the seed goes with `number` modulo 2, by which scenarios choose.
        self.accelerator = Accelerator(number, MODES[number // 2 % len(MODES)])
        self.torch = self.accelerator.torch
        said: list[str] = []
        with on(self.accelerator):
            yield said
            self.accelerator.finish_all()
            self._kept.clear()
        said += self.accelerator.reports

    def adopt(self, raw: torch.Tensor) -> Any:
        return self.accelerator.adopt(raw.clone())

    def down(self, there: Any) -> torch.Tensor:
        self.accelerator.finish_all()
        return there.raw.clone()

    def hold(self, stream: Any, ms: float = HOLD_MS) -> None:
        """Does nothing: it is `pass_by` that lets another stream be first."""

    def pass_by(self, stream: Any) -> None:
        self.accelerator.finish(stream)

    def head(self) -> dict[str, Any]:
        return {"device": "the fake accelerator, whose figures say nothing", "driver": "none", **_versions()}


def _versions() -> dict[str, str]:
    try:
        import triton

        found = triton.__version__
    except ImportError:
        found = "not here"
    python = f"{platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores"
    return {"torch": torch.__version__, "triton": found, "python": python}
