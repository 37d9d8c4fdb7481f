"""Where the seconds of a step went."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Seconds by phase; between `switch` and `stop` exactly one phase is running, so the phases add up to the step.

    On CUDA it records events and waits for the device only at the end: looking at the clock does not slow a step down.
    """

    def __init__(self, device: str):
        self.cuda = device.startswith("cuda")
        self.marks: list[tuple[str, object]] = []
        if self.cuda:
            torch.cuda.synchronize(device)

    def switch(self, phase: str) -> None:
        """From now on time counts for `phase`."""
        self.marks.append((phase, self._now()))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time inside counts for `name`, afterwards again for what was running before."""
        before = self.marks[-1][0]
        self.switch(name)
        try:
            yield
        finally:
            self.switch(before)

    def stop(self) -> dict[str, float]:
        """{phase: seconds}, with "step" for all of them together."""
        marks = [*self.marks, ("", self._now())]
        if self.cuda:
            torch.cuda.synchronize()
        seconds: dict[str, float] = {}
        for (phase, start), (_, end) in zip(marks, marks[1:], strict=False):
            spent = start.elapsed_time(end) / 1000 if self.cuda else end - start
            seconds[phase] = seconds.get(phase, 0.0) + spent
        return {**seconds, "step": sum(seconds.values())}

    def _now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
