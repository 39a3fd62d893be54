"""Calls prepared once per kind: a schedule, its program lowered and bound, the headers expected of peers.

A prepared call holds the words that an interpreter reads (words.py): a call of its kind is one call of that. It is
bound to the sizes of all ranks' blocks. If these may differ by rank, the headers carry them to the first meeting: an
unexpected set of headers stops the interpreter, `Prepared.adapt` binds the call to its sizes, and the call goes on; a
rank's rows before the first meeting depend on its own blocks alone.
"""

import struct
import threading
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from unisono.program import Unfit, bind, lower
from unisono.program.bases import INLINE
from unisono.program.bind import LINE, Table
from unisono.program.defaults import DIRECT_MOVED
from unisono.program.over_hosts import bind_over_hosts
from unisono.runtime import words as w
from unisono.runtime.call import SIGNATURE, Call, piece_numel
from unisono.runtime.choice import Choice, by_default
from unisono.runtime.control import Control
from unisono.runtime.loops import COMPILE_AFTER, loops, wanted
from unisono.runtime.reduce import reducer
from unisono.runtime.torch_ops import TORCH
from unisono.schedule import Schedule
from unisono.transport.board import Board

__all__ = ["AddressTable", "Kind", "Prepared", "Preparer"]

_FLOATING = ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "PREMUL_SUM")
_WHOLE, _BITS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG"), ("BAND", "BOR", "BXOR")
_LOOPS: tuple[tuple[str, tuple[str, ...], tuple[torch.dtype, ...]], ...] = (
    ("float32", _FLOATING, (torch.float32,)),
    ("float64", _FLOATING, (torch.float64,)),
    ("uint16", _FLOATING, (torch.bfloat16,)),
    ("int16", _FLOATING, (torch.float16,)),
    ("int32", _WHOLE, (torch.int32,)),
    ("int64", _WHOLE, (torch.int64,)),
    ("uint8", _WHOLE, (torch.uint8,)),
    ("uint8", _BITS, (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)),
    ("uint8", (*_BITS, "MIN", "MAX"), (torch.bool,)),
    ("uint8", _BITS, (torch.uint16, torch.uint32, torch.uint64)),
    ("uint8", ("SUM", "PRODUCT"), (torch.int8,)),
    ("int32", ("SUM", "PRODUCT"), (torch.uint32,)),
    ("int64", ("SUM", "PRODUCT"), (torch.uint64,)),
    ("float32", ("SUM", "PREMUL_SUM"), (torch.complex64,)),
    ("float64", ("SUM", "PREMUL_SUM"), (torch.complex128,)),
)
"""The reductions of the loops: their dtype, the ops, the dtypes of torch (sums of unsigned integers have the
same bits as signed ones, complex numbers are summed by halves; inputs of PREMUL_SUM come multiplied). torch reduces all
else. Moving takes any."""
_AS: dict[tuple[torch.dtype, str], str] = {
    (dtype, op): name for name, ops, dtypes in _LOOPS for dtype in dtypes for op in ops
}
_NEVER, _KEPT_ONLY, _AT_ONCE, _COMPILE = range(4)  # when the loops may be used; see loops.wanted
_OPS = {"SUM": 0, "PREMUL_SUM": 0, "PRODUCT": 1, "MIN": 2, "MAX": 3, "BAND": 4, "BOR": 5, "BXOR": 6, "AVG": 8}
_NOWHERE = -(1 << 62)
_IN_TURN = 8 << 10
"""Bytes of staging memory from which calls use windows of it in turn: what is shorter gains nothing."""
_SHORT_NBYTES = 16 << 10  # of all blocks: moved in a few microseconds


class AddressTable:
    """The addresses of several tensors, in a table that interpreters read; used in place of a tensor."""

    __slots__ = ("_address", "_table", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors
        self._table = array("q", [tensor.data_ptr() for tensor in tensors])
        self._address = self._table.buffer_info()[0]

    def data_ptr(self) -> int:
        """The address of the table."""
        return self._address


@dataclass(frozen=True, slots=True)
class Kind:
    """The arguments from which a call is prepared.

    ``dtype``, ``sizes``: of elements, and how many there are in every block, as far as this rank knows; ``listed``:
    whether input and output are a tensor per block; ``expected_calls``: the calls of all ranks as they are expected, if
    they are not all like this rank's; ``exclusive``: whether the output must share no memory with the input for direct
    access. ``input_offset``: bytes from output to input if they may overlap there; ``reach``: bytes of output and
    input. ``guarded``, ``completes``: whether it is the first, the last program of its call.
    """

    call: Call
    choice: Choice
    dtype: torch.dtype
    sizes: tuple[int, ...]
    listed: tuple[bool, bool] = (False, False)
    expected_calls: tuple[Call, ...] = ()
    exclusive: bool = False
    input_offset: int | None = _NOWHERE
    reach: tuple[int, int] = (0, 0)
    guarded: bool = True
    completes: bool = True

    @property
    def op(self) -> str:
        """The reduce op, if anything is combined."""
        return self.call.reduce_op if self.choice.schedule.collective.reduces else ""


class Prepared:
    """A kind of call, ready to run: ``run(address, control, ...)``, see `Interpreter`."""

    __slots__ = (
        "_adapted", "_input_offset", "_kept", "_kind", "_preparer", "_reach", "_sizes", "_words", "address", "call",
        "expected", "nbytes", "root_read", "run",
    )  # fmt: skip

    def __init__(self, kind: Kind, preparer: "Preparer", run: Callable[..., int]) -> None:
        self.call, self.run, self.root_read = kind.call, run, kind.choice.direct_root
        self._kind, self._preparer = kind, preparer
        self.nbytes = sum(kind.sizes) * kind.dtype.itemsize
        self._input_offset, self._reach = kind.input_offset, kind.reach
        self._adapted: dict[bytes, tuple[tuple[int, ...], tuple[int, ...], Any]] = {}
        self._words = array("q", bytes(8 * w.CALL_WORDS))
        self.address = self._words.buffer_info()[0]
        words = self._words
        words[w.OP] = _OPS.get(kind.op, 0)
        words[w.ROOT] = self.root_read
        words[w.LISTED] = kind.listed[0] * w.INPUTS | kind.listed[1] * w.OUTPUTS
        words[w.EXCLUSIVE], words[w.COMPLETES] = kind.exclusive, kind.completes
        self._sizes = kind.sizes
        self.expected = b""
        """The headers of all ranks with which the call goes on as it is; none are compared if it is empty."""
        bound, self._kept = preparer.tables(kind, kind.sizes)
        self._write_words(bound)
        if kind.guarded:
            calls = kind.expected_calls or (kind.call,)
            headers = b"".join(call.header(preparer.size, preparer.header_nbytes) for call in calls)
            if len(calls) == 1 and len({*kind.call.sends, *kind.call.expects}) > 1:
                # equal headers on all ranks would not match: the guard checks every set
                nothing = bytes(preparer.header_nbytes)
                headers = b"".join(headers if rank == preparer.rank else nothing for rank in range(preparer.size))
            self._expect(headers, len(headers) > preparer.header_nbytes)

    def _write_words(self, bound: Sequence[int]) -> None:
        for word, value in zip(_BOUND, bound, strict=True):
            self._words[word] = value

    def _expect(self, headers: bytes, each: bool) -> None:
        self.expected = headers if each else headers * self._preparer.size
        expected = np.frombuffer(headers, np.uint8)
        self._kept = (*self._kept, expected)
        self._words[w.HEADER_AT] = _address(expected)
        self._words[w.STRIDE] = self._preparer.header_nbytes if each else 0

    @property
    def staged(self) -> Table:
        """The table of the placement that stages, with the sizes of the last call."""
        found: Table = self._kept[0]
        return found

    def staged_of(self, rank: int, headers: bytes = b"") -> Table:
        """The same table of another rank, with the sizes that all have agreed on or that the ``headers`` give."""
        sizes = self._sizes_in(headers) if headers and self.call.sends else self._sizes
        return self._preparer.staged(self._kind, sizes, rank)

    def agrees(self, headers: bytes) -> bool:
        """True if the headers of all ranks have this call's signature, and it is not refused."""
        each, signature = self._preparer.header_nbytes, self.call.signature
        starts = range(0, len(headers), each)
        return not self.call.refused and all(headers[at : at + len(signature)] == signature for at in starts)

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        return self._kind.choice.schedule

    @property
    def guarded(self) -> bool:
        """True if headers are compared."""
        return self._kind.guarded

    def fits(self, output: int, tensor: int) -> bool:
        """Returns True if output and input, at these addresses, are disjoint or at the call's ``input_offset``."""
        distance, (out, into) = tensor - output, self._reach
        return distance == self._input_offset or not -into < distance < out

    def adapt(self, headers: bytes) -> None:
        """Binds the call to the sizes in the headers of all ranks, which the guard has found to agree."""
        if not self.call.sends:
            return
        found = self._adapted.get(headers)
        if found is None:
            if len(self._adapted) >= 16:
                self._adapted.clear()
            sizes = self._sizes_in(headers)
            found = self._adapted[headers] = (sizes, *self._preparer.tables(self._kind, sizes))
        self._sizes, bound, self._kept = found
        self._write_words(bound)
        self._expect(headers, True)

    def _sizes_in(self, headers: bytes) -> tuple[int, ...]:
        n, each, kind = self._preparer.size, self._preparer.header_nbytes, self._kind
        scale = (kind.call.dtype.itemsize if kind.call.dtype else 1) // kind.dtype.itemsize
        rows = []
        for rank in range(n):
            numbers = struct.unpack_from(f"<{n}Q", headers, rank * each + SIGNATURE.size)
            rows.append([piece_numel(number) * scale for number in numbers])
        root = kind.choice.root
        match kind.choice.schedule.collective.name:
            case "all_to_all":
                return tuple(size for row in rows for size in row)
            case "scatter":
                return tuple(rows[root])
            case "gather":
                return tuple(row[root] for row in rows)
        return tuple(row[0] for row in rows)


_BOUND = (
    w.STAGED, w.DIRECT, w.PUSHED, w.TEMP, w.PUBLISHES, w.LARGE, w.IN_BLOCKS, w.OUT_BLOCKS, w.IN_SIZES, w.INLINE,
    w.SHORT, w.ONE_WRITER, w.WINDOWS, w.WINDOW,
)  # fmt: skip
"""The words of a call that follow from sizes."""


class Preparer:
    """Prepares the calls of one rank in one group; decides whether compiled loops or torch's operations run them."""

    def __init__(self, board: Board, control: Control) -> None:
        self._board, self._control, self._mode = board, control, wanted()
        self.rank, self.size, self.header_nbytes = board.rank, board.size, board.segment.layout.header
        elsewhere = board.segment.elsewhere
        self.hosts: tuple[tuple[int, ...], ...] = elsewhere.ranks_of_hosts if elsewhere is not None else ()
        """The ranks of every host, if there are several."""
        self._users: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._binding = threading.RLock()
        self.issued: Callable[[int, int], int] = TORCH.issued
        self.completed: Callable[[int], int] = TORCH.completed
        self.compile_at = COMPILE_AFTER if self._mode == _KEPT_ONLY else -1
        """The call after which the loops are wanted even if they must be compiled; see `compile_now`."""
        loops.users.add(self)

    def subscribe(self, user: Callable[[], None]) -> None:
        """Calls the method ``user``, while its object lives, whenever faster loops are there."""
        self._users.append(weakref.WeakMethod(user, self._users.remove))

    def compile_now(self) -> None:
        """Asks for compiled loops: the group has made enough calls to be worth compiling."""
        self._mode = _COMPILE
        self.notify()

    def notify(self) -> None:
        """Notifies the subscribers: more loops are there."""
        for user in [method() for method in self._users]:
            if user is not None:
                user()

    def prepare(self, kind: Kind) -> Prepared:
        """Raises UsageError where the reduce op means nothing for the dtype, or the schedule does not fit."""
        with self._binding:
            return Prepared(kind, self, self._way(kind))

    def _way(self, kind: Kind) -> Callable[..., int]:
        """The function that runs a call: compiled loops if they serve it and are there, else torch's operations."""
        op, sample = kind.op, None
        if op:
            reducer(kind.dtype, op)  # raises if the op has no meaning
            sample = reducer(kind.dtype, "SUM" if op == "PREMUL_SUM" else op)
        name = _AS.get((kind.dtype, op)) if op else "uint8"
        if self._mode != _NEVER and name is not None:
            kept_only = self._mode == _KEPT_ONLY
            if loops.kept(name) or (not kept_only and loops.serve(name, self._mode == _AT_ONCE)):
                found = loops.of(name)
                self.issued, self.completed = found["issued"], found["completed"]
                return found["run"]
        return partial(TORCH.run, sample=sample)

    def meeting(self) -> Prepared:
        """A program of one meeting that belongs to no call."""
        choice = by_default("barrier", 0, self.size, 0, False)
        return self.prepare(Kind(Call("barrier"), choice, torch.uint8, (0,), guarded=False, completes=False))

    def tables(self, kind: Kind, sizes: Sequence[int]) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        """The words of a call that follow from sizes (`_BOUND`), and the memory behind them."""
        choice, call = kind.choice, kind.call
        nbytes, uneven, widths = self._measures(kind, sizes)
        staged = self.staged(kind, sizes, self.rank)
        program = staged.program
        direct: list[Table | None] = [None, None]
        publishes = self.size > 1 and bool(choice.directly) and not self._board.crosses
        if publishes and max(nbytes, default=0) > choice.directly_above:
            for k, placement in enumerate(("direct", "pushed") if choice.directly == "pushed" else ("direct",)):
                try:
                    placed = lower(choice.schedule, self.rank, placement)
                except Unfit:
                    continue
                direct[k] = bind(placed, nbytes, area=DIRECT_MOVED, listed=kind.listed, uneven=uneven, **widths)
        blocks_in = program.blocks_in[self.rank]
        if choice.direct_root >= 0:  # the root may write to what the others receive
            blocks_in = program.blocks_out[self.rank]
        alike = not (uneven or self._board.crosses)
        in_sizes = np.array([nbytes[block] for block in blocks_in], np.int64)
        arrays = [_laid_out(table) for table in (staged, *direct) if table is not None]
        addresses = iter(_address(a) for a in arrays)
        places = [next(addresses) if table is not None else 0 for table in (staged, *direct)]
        bound = (
            *places,
            self._control.temp(staged.temp_nbytes) if staged.temp_nbytes else 0,
            int(publishes and (uneven or any(direct))),
            int(not uneven or self._long(call, choice)),
            len(blocks_in),
            len(program.blocks_out[self.rank]),
            _address(in_sizes),
            INLINE * (alike and staged.stage_nbytes <= self._board.segment.layout.inline),
            int(alike and sum(nbytes) <= _SHORT_NBYTES),
            int(program.placement == "staged"),
            *(self._windows(staged) if alike else (1, 0)),
        )
        return bound, (staged, in_sizes, *arrays)

    def _windows(self, staged: Table) -> tuple[int, int]:
        """How many windows of a half of the staging memory calls of a kind use in turn, and the bytes of one.

        A line that a peer has read is slow to write until it has left the peer's caches: in turn, short calls use as
        much memory as long ones. All ranks count meetings alike, and a place stays in the half of its parity.
        """
        segment, window = self._board.segment, -(-staged.stage_nbytes // LINE) * LINE
        if staged.program.placement != "staged" or window < _IN_TURN or segment.oversubscribed:
            return 1, 0
        return max(1, segment.layout.stage // window), window

    def staged(self, kind: Kind, sizes: Sequence[int], rank: int) -> Table:
        """The table of the placement that stages, of this rank or, with all sizes known, of another one."""
        choice, (nbytes, uneven, widths) = kind.choice, self._measures(kind, sizes)
        stage, how = self._board.segment.layout.stage, (choice.schedule, choice.placement, choice.deterministic)
        widths |= {"cap": choice.cap, "listed": kind.listed, "uneven": uneven}
        if self.hosts:
            return bind_over_hosts(
                how[0], rank, how[1], nbytes, self.hosts, stage=stage, deterministic=how[2], **widths
            )
        return bind(lower(how[0], rank, *how[1:]), nbytes, area=stage, **widths)

    def _measures(self, kind: Kind, sizes: Sequence[int]) -> tuple[list[int], bool, dict[str, Any]]:
        """Bytes of the blocks, whether they may differ by rank, and the widths of an element."""
        item = kind.dtype.itemsize
        wide = reducer(kind.dtype, kind.op).wide if kind.op else None
        widths = {"itemsize": item, "wide": wide.itemsize if wide is not None else item}
        return [size * item for size in sizes], bool(kind.call.sends), widths

    def _long(self, call: Call, choice: Choice) -> bool:
        """Returns True if this rank sends or receives a large piece: then every rank treats the call as large."""
        pairs = [pair for rank, pair in enumerate(zip(call.sends, call.expects, strict=True)) if rank != self.rank]
        longest = max(map(piece_numel, sum(pairs, ())), default=0)
        return call.dtype is not None and longest * call.dtype.itemsize > choice.directly_above


def _laid_out(table: Table) -> Any:
    """A table as an interpreter reads it: scalars, then rows."""
    words = np.empty(w.SCALARS + table.rows.size, np.int64)
    words[: w.SCALARS] = len(table.rows), table.pieces, table.meets, table.lags
    words[w.SCALARS :] = table.rows.ravel()
    return words


def _address(memory: Any) -> int:
    """Of a NumPy array; quicker than by its ctypes."""
    found: int = memory.__array_interface__["data"][0]
    return found
