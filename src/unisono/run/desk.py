"""Where compiled collectives (fused.py) are prepared: the desk tells the loops where things lie, an order what to do.

Each rank may decide for itself whether it uses the loops: the wire is the same. When they are loaded: loops.py.
"""

import ctypes
import threading
import weakref
from array import array
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from unisono.run import direct
from unisono.run import fused_words as words
from unisono.run.loops import WARM, loops, wanted
from unisono.run.offers import AGAIN, DIRECT, LARGE, Direct, Offers
from unisono.transport.arena import BOUNDS
from unisono.transport.board import Board
from unisono.transport.futex import CROWDED
from unisono.transport.inference import plain
from unisono.transport.layout import ABANDONED, COMPLETED, COMPLETED_AT, HEADER, ISSUED, ISSUED_AT, MEETINGS, MOMENTS
from unisono.watch.call import Call
from unisono.watch.flight import CollectiveRecord

__all__ = ["Desk", "Order", "Places"]

_FLOATING = ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "PREMUL_SUM")
_ORDERED, _BITS = ("SUM", "PRODUCT", "MIN", "MAX"), ("BAND", "BOR", "BXOR")
_LOOPS: tuple[tuple[str, tuple[str, ...], tuple[torch.dtype, ...]], ...] = (
    ("float32", _FLOATING, (torch.float32,)),
    ("float64", _FLOATING, (torch.float64,)),
    ("uint16", _FLOATING, (torch.bfloat16,)),
    ("int16", _FLOATING, (torch.float16,)),
    ("int32", _ORDERED, (torch.int32,)),
    ("int64", _ORDERED, (torch.int64,)),
    ("uint8", _ORDERED, (torch.uint8,)),
    ("uint8", _BITS, (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)),
    ("uint8", (*_BITS, "MIN", "MAX"), (torch.bool,)),
    ("uint8", _BITS, (torch.uint16, torch.uint32, torch.uint64)),
    ("uint8", ("SUM", "PRODUCT"), (torch.int8,)),
    ("int32", ("SUM", "PRODUCT"), (torch.uint32,)),
    ("int64", ("SUM", "PRODUCT"), (torch.uint64,)),
    ("float32", ("SUM", "PREMUL_SUM"), (torch.complex64,)),
    ("float64", ("SUM", "PREMUL_SUM"), (torch.complex128,)),
)
"""What the loops reduce: as which dtype of theirs, by which ops, which of torch's (sums of unsigned integers have the
same bits as signed ones, complex numbers are summed by halves; inputs of PREMUL_SUM come multiplied). torch reduces all
else. Moving takes any."""
_AS: dict[tuple[torch.dtype, str], str] = {
    (dtype, op): name for name, ops, dtypes in _LOOPS for dtype in dtypes for op in ops
}
_NEVER, _COLD, _AT_ONCE, _WARM = range(4)  # when a desk may use the loops; see loops.wanted
_OPS = {"SUM": 0, "PREMUL_SUM": 0, "PRODUCT": 1, "MIN": 2, "MAX": 3, "BAND": 4, "BOR": 5, "BXOR": 6, "AVG": 8}


class Places:
    """Where several tensors lie, in a table that compiled loops read; takes the place of a tensor beside an order."""

    __slots__ = ("_address", "_table", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._table = array("q", [tensor.data_ptr() for tensor in tensors])
        self._address = self._table.buffer_info()[0]

    def data_ptr(self) -> int:
        """The address of the table."""
        return self._address


@dataclass(frozen=True, slots=True)
class Order:
    """A kind of call, prepared for the loops: ``address``, ``header``: where they read it; ``meetings``: how many.

    ``rounds``: after the first meeting, if it goes directly (offers.py), 0 if it never does; ``root``: of a broadcast.
    ``apart``: bytes from the output to the input where these may overlap; ``reach``: bytes of output and input.
    """

    call: Call
    address: int
    header: int
    meetings: int
    rounds: int
    root: int
    run: Callable[..., int]
    step: Callable[..., int]
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

    def __init__(self, board: Board, flight: CollectiveRecord, offers: Offers) -> None:
        self._board, self._flight, self._mode = board, flight, wanted()
        self._offers = offers
        self._words: Any = None
        self._setting_up = threading.RLock()
        self.address = 0
        self._users: list[weakref.WeakMethod[Callable[[], None]]] = []
        self.open_at = WARM if self._mode == _COLD else -1
        """The call after which the loops are wanted even if they must be compiled; see `warm`."""
        loops.users.add(self)

    def tell(self, user: Callable[[], None]) -> None:
        """Calls the method ``user``, while its object lives, whenever more orders can be had."""
        self._users.append(weakref.WeakMethod(user))

    def warm(self) -> None:
        """The group has made enough calls to be worth compiling."""
        self._mode = _WARM
        self.change()

    def change(self) -> None:
        """More loops are there."""
        for user in [method() for method in self._users]:
            if user is not None:
                user()

    def _set_up(self) -> None:
        """Once: another thread may be at work with the words."""
        with self._setting_up:
            if self._words is None:
                self._lay_out()

    def _lay_out(self) -> None:
        board, flight = self._board, self._flight
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
        self._scratch = np.empty(8 * (words.BLOCK + board.size), np.uint8)
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
            "crowded": ctypes.addressof(CROWDED),
            "offers": base + layout.offers,
            "bounds": ctypes.addressof(BOUNDS),
            "bases": ctypes.addressof(self._offers.neighbours.bases),
            "abandoned": base + 8 * segment.field(0, ABANDONED),
            "record": layout.RECORD,
        }
        desk = np.array([places[name] for name in words.DESK], np.int64)
        self.address = int(desk.ctypes.data)
        self._words = desk

    def order(
        self,
        kind: str,
        call: Call,
        dtype: torch.dtype,
        nbytes: int,
        op: str = "",
        root: int = -1,
        apart: int = 0,
        listed: int = 0,
        everybody: Sequence[Call] = (),
    ) -> Order | None:
        """The order for a call of a kind on tensors of ``dtype``; None if the loops do not serve it.

        The rest as in fused_words.py, but ``op``: the reduce op's name, if any; ``apart``: see `Order`; ``everybody``:
        the calls of all ranks, where they are not alike.
        """
        name = _AS.get((dtype, op)) if op else "uint8"
        if self._mode == _NEVER or name is None:
            return None
        if not loops.kept(name) and (self._mode == _COLD or not loops.serve(name, self._mode == _AT_ONCE)):
            return None
        ways = loops.of(name)
        if self._words is None:
            self._set_up()
        size, length = self._board.size, self._board.segment.layout.header
        width, meetings = self._rounds(kind, nbytes, dtype.itemsize)
        stride = length if everybody else 0
        each, rounds = direct.rounds(kind, nbytes, size) if op != "PREMUL_SUM" else (0, 0)  # of a copy, never directly
        code = _OPS.get(op, 0)
        told = np.array(
            [getattr(words, kind), meetings, nbytes, code, root, width, listed, stride, each, rounds, 0], np.int64
        )
        header = np.frombuffer(b"".join(each.header(size, length) for each in everybody or [call]), np.uint8)
        pieces = nbytes * size
        reach = {"ALL_GATHER": (pieces, nbytes), "ALL_TO_ALL": (pieces, pieces), "REDUCE_SCATTER": (nbytes, pieces)}
        kept = (told, header)
        return Order(
            call,
            int(told.ctypes.data),
            int(header.ctypes.data),
            meetings,
            rounds,
            root,
            ways["run"],
            ways["step"],
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
        if kind in ("BROADCAST", "ALL_GATHER", "GATHER"):
            return stage, max(1, -(-nbytes // stage))
        if kind in ("ALL_TO_ALL", "SCATTER"):
            width = stage // size // 64 * 64
            return width, max(1, -(-nbytes // width))
        width = stage // itemsize // size // 64 * 64 * itemsize
        if kind == "REDUCE_SCATTER":
            return width, max(1, -(-nbytes // width))
        return width, -(-nbytes // (width * size)) + 1

    def steps(
        self,
        order: Order,
        target: torch.Tensor | Places,
        source: torch.Tensor | Places,
        meeting: int,
        k: int,
        mode: int,
        met: bool,
    ) -> Generator[None, None, None]:
        """What is left, as a program, after step ``k`` of a call whose first meeting was ``meeting``.

        ``mode``: the verdict of that meeting, `STAGED` before it; ``met``: whether the loops have compared the headers
        and come to it, else the lane does the one and this the other.
        """
        call, last = order.call, order.meetings
        if not met:
            if call.sends:  # the headers have told
                last = max(1, -(-call.longest_nbytes // order.width))
            if order.rounds or call.sends:
                mode = self._verdict(order, meeting)
            if mode == AGAIN:
                meeting, k = meeting + 1, -1
            elif mode >= DIRECT and call.sends:  # and may be uneven
                yield from self._pieces(call, target, source)(self._offers, meeting, mode)
                self._offers.confirm(call)
                return
        if mode >= DIRECT:
            last = order.rounds + 1
        while k < last:
            k += 1
            order.step(self.address, order.address, k, mode, meeting, target.data_ptr(), source.data_ptr())
            if k < last:
                yield
        if mode >= DIRECT:
            self._offers.confirm(call)

    def _verdict(self, order: Order, meeting: int) -> int:
        call, told = order.call, order.kept[0]
        large = not call.sends or call.longest_nbytes > LARGE
        verdict = self._offers.verdict(call, meeting, order.root, large)
        told[words.HOPES] = call.hopes
        return verdict

    def _pieces(self, call: Call, target: torch.Tensor | Places, source: torch.Tensor | Places) -> Direct:
        """The pieces of an all_gather or all_to_all, which may be of other sizes elsewhere."""
        if call.op == "all_gather":
            assert isinstance(source, torch.Tensor)
            return direct.all_gather(call, _flat(source), self._each(target))
        return direct.all_to_all(call, self._each(source)[self._board.rank], self._each(target))

    def _each(self, tensors: torch.Tensor | Places) -> list[torch.Tensor]:
        if isinstance(tensors, Places):
            return [_flat(tensor) for tensor in tensors.tensors]
        return list(_flat(tensors).view(self._board.size, -1))

    def settle(self, order: Order, mode: int) -> None:
        """What is left to do of a call that ended in UNSURE: see fused.py. Raises if a peer has given the call up."""
        if mode >= DIRECT:
            self._offers.confirm(order.call)
        else:
            self._offers.learn(order.root)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor."""
    return plain(tensor).view(-1).view(torch.uint8)
