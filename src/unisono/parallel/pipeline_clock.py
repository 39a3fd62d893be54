"""When each action of a step ran: by the clock on the CPU, by events in the stream on an accelerator."""

import time
from typing import Any

import torch

from unisono.schedule.pipeline import Action
from unisono.simulation import Slot

__all__ = ["Clock"]


class Clock:
    """Notes the start and the end of actions without making the device wait."""

    def __init__(self, device: torch.device) -> None:
        self._on_cpu = device.type in ("cpu", "meta")
        self._began = time.perf_counter()
        self._origin = self.now()
        self._noted: list[tuple[Action, Any, Any]] = []

    def now(self) -> Any:
        """This moment of the CPU, or of the device's stream."""
        if self._on_cpu:
            return time.perf_counter()
        event = torch.Event(enable_timing=True)
        event.record()
        return event

    def note(self, action: Action, start: Any) -> None:
        """The action that started at a moment ends now."""
        self._noted.append((action, start, self.now()))

    def slots(self) -> list[Slot]:
        """What was noted, in seconds. On an accelerator, waits for the last action to end."""
        if self._on_cpu:
            return [Slot(*noted) for noted in self._noted]
        if self._noted:
            self._noted[-1][2].synchronize()
        return [Slot(action, self._since(start), self._since(end)) for action, start, end in self._noted]

    def _since(self, event: Any) -> float:
        return self._began + float(self._origin.elapsed_time(event)) / 1e3
