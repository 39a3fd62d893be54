"""Where compiled collectives (fused.py) are prepared: the desk tells the loops where things lie, an order what to do.

Nothing here imports numba before the first order: `desk` gives None where it is not installed (``unisono[fast]``), or
where ``UNISONO_FUSED=0`` asks for torch's operations alone. Each rank may decide for itself: the wire is the same.
"""

import fcntl
import importlib.util
import os
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from unisono.transport.board import Board
from unisono.transport.layout import COMPLETED, COMPLETED_AT, HEADER, ISSUED, ISSUED_AT, MEETINGS, MOMENTS
from unisono.watch.call import Call
from unisono.watch.flight import CollectiveRecord

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["Desk", "Order", "desk", "wanted"]

_SAMPLES = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.bfloat16: np.uint16,
    torch.int32: np.int32,
    torch.int64: np.int64,
}
"""What the loops reduce; every other dtype is reduced by torch. Moving takes any."""
_OPS = {"SUM": 0, "PRODUCT": 1, "MIN": 2, "MAX": 3, "AVG": 8}


def wanted() -> bool:
    """Whether compiled loops can be used here, and are not forbidden by ``UNISONO_FUSED=0``."""
    return os.environ.get("UNISONO_FUSED", "1") != "0" and importlib.util.find_spec("numba") is not None


@dataclass(frozen=True, slots=True)
class Order:
    """A kind of call, prepared for the loops: ``address``, ``header``: where they read it; ``meetings``: how many.

    ``apart``: bytes from the output to the input where these may overlap; ``reach``: bytes of output and input.
    """

    call: Call
    address: int
    header: int
    meetings: int
    sample: Any
    apart: int
    reach: tuple[int, int]
    width: int
    kept: tuple[Any, ...]  # the memory behind the addresses

    def fits(self, output: int, tensor: int) -> bool:
        """Whether output and input, at these addresses, lie where the loops can take them: apart, or as they ask."""
        distance, (out, into) = tensor - output, self.reach
        return distance == self.apart or not -into < distance < out


class Desk:
    """One rank's desk in one group; see the module's text."""

    def __init__(self, board: Board, flight: CollectiveRecord, fused: "ModuleType") -> None:
        self._board, self._fused = board, fused
        segment = board.segment
        layout, base = segment.layout, segment.address
        record = {
            name: base + 8 * segment.field(board.rank, place)
            for name, place in (
                ("begun", MEETINGS),
                ("issued", ISSUED),
                ("completed", COMPLETED),
                ("completed_at", COMPLETED_AT),
                ("header_at", HEADER),
                ("issued_at", ISSUED_AT),
            )
        }
        self._scratch = np.empty(8 * fused.BLOCK, np.uint8)
        places = {
            **record,
            "rank": board.rank,
            "size": board.size,
            "counters": base + layout.counters,
            "headers": base + layout.headers,
            "header": layout.header,
            "stages": base + layout.stages,
            "stage": layout.stage,
            "issued_kept": MOMENTS,
            "moments": flight.moments.buffer_info()[0],
            "ends": flight.ends.buffer_info()[0],
            "kept": len(flight.moments),
            "base": base,
            "scratch": self._scratch.ctypes.data,
        }
        self._words = np.array([places[name] for name in fused.DESK], np.int64)
        self.address = int(self._words.ctypes.data)
        self.run, self._step = fused.run, fused.step
        self.done, self.waits = fused.DONE, fused.WAITS
        self._ready: set[Any] = set()

    def order(
        self, kind: str, call: Call, tensor: torch.Tensor, nbytes: int, op: str | int = 0, apart: int = 0
    ) -> Order | None:
        """The order for a call of a kind (see fused.py) on tensors like ``tensor``; None if the loops do not serve it.

        ``nbytes``: of the tensor, or of one rank's piece; ``op``: the reduce op, or the root.
        """
        reduces = isinstance(op, str)
        if reduces and (tensor.dtype not in _SAMPLES or op not in _OPS):
            return None
        sample = np.empty(0, _SAMPLES[tensor.dtype] if reduces else np.uint8)
        width, meetings = self._rounds(kind, nbytes, sample.itemsize)
        code = _OPS[op] if isinstance(op, str) else op
        words = np.array([getattr(self._fused, kind), meetings, nbytes, code], np.int64)
        header = np.frombuffer(call.header(self._board.size, self._board.segment.layout.header), np.uint8)
        self._compile(sample, words)
        pieces = nbytes * self._board.size
        reach = {"ALL_GATHER": (pieces, nbytes), "ALL_TO_ALL": (pieces, pieces), "REDUCE_SCATTER": (nbytes, pieces)}
        kept = (words, header)
        return Order(
            call,
            int(words.ctypes.data),
            int(header.ctypes.data),
            meetings,
            sample,
            apart,
            reach.get(kind, (0, 0)),
            width,
            kept,
        )

    def _rounds(self, kind: str, nbytes: int, itemsize: int) -> tuple[int, int]:
        """Bytes of a piece that go in one round, and the meetings it takes: as the programs have it."""
        stage, size = self._board.stage_nbytes, self._board.size
        if kind in ("BARRIER", "ONE_SHOT"):
            return stage, 1
        if kind in ("BROADCAST", "ALL_GATHER"):
            return stage, max(1, -(-nbytes // stage))
        if kind == "ALL_TO_ALL":
            width = stage // size // 64 * 64
            return width, max(1, -(-nbytes // width))
        width = stage // itemsize // size // 64 * 64 * itemsize
        if kind == "REDUCE_SCATTER":
            return width, max(1, -(-nbytes // width))
        return width, -(-nbytes // (width * size)) + 1

    def _compile(self, sample: Any, words: Any) -> None:
        """Compiles the loops for a dtype, or loads them; one process of this user at a time: the others load."""
        if sample.dtype in self._ready:
            return
        signature = (*(self._fused.types.intp,) * 8, self._fused.typeof(sample))
        with open(os.path.join(tempfile.gettempdir(), f"unisono-compiles-{os.geteuid()}"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.run.compile(signature)
        self._ready.add(sample.dtype)

    def steps(
        self,
        order: Order,
        target: torch.Tensor,
        source: torch.Tensor,
        meeting: int | None = None,
        k: int = -1,
        met: bool = False,
    ) -> Generator[None, None, None]:
        """A call as a program: all of it, or what is left after step ``k`` of one whose first meeting was ``meeting``.

        ``met``: whether the loops have compared the headers; else the lane does.
        """
        call, last = order.call, order.meetings
        if meeting is None:
            meeting = self._board.meetings
        while k < last:
            k += 1
            self._step(self.address, order.address, k, meeting, target.data_ptr(), source.data_ptr(), order.sample)
            if k == 1 and not met and call.sends and call.dtype is not None:  # the headers have told
                last = max(1, -(-call.longest * call.dtype.itemsize // order.width))
            if k < last:
                yield


def desk(board: Board, flight: CollectiveRecord) -> Desk | None:
    """The desk of a rank, if it can have one."""
    if not wanted():
        return None
    from unisono.run import fused

    return Desk(board, flight, fused)
