"""The express: calls prepared once per kind and carried out with as little Python as possible.

What travels, and in which places of the board, is what the programs do (run/programs.py): a rank may come by express
while its peers take the long way (a tensor that is not contiguous). All that is saved is work on
this rank: views of the staging areas in the tensor's own shape are made once, and no task, generator or flat view is.
Where compiled loops serve the call (run/desk.py) it is an order for them, of any size, else a ticket of one meeting.
"""

from collections.abc import Callable
from typing import Any

import torch

from unisono.backend.operations import Builder
from unisono.backend.options import chosen
from unisono.backend.tensors import ordinary
from unisono.errors import UsageError
from unisono.run.desk import Desk
from unisono.run.message import Letter, letter
from unisono.run.prepared import Prepared, Ticket
from unisono.run.programs import one_shot
from unisono.run.reduce import reducer
from unisono.transport.inference import outside_inference
from unisono.watch.call import Call, name_of_dtype

__all__ = ["Express", "Maker"]

_KEPT = 512  # tickets kept for reuse


def _nothing(half: int, output: torch.Tensor, tensor: torch.Tensor) -> None:
    """Nothing to stage, or to collect."""


Maker = Callable[["Express", torch.Tensor, torch.Tensor, Any], Prepared | None]


class Express:
    """Tickets of one rank in one group; None where a call must take the long way."""

    def __init__(self, operations: Builder, desk: Desk) -> None:
        self._ops, self._board = operations, operations.board
        self._rank, self._size = operations.rank, operations.size
        self._desk = desk
        self._tickets: dict[Any, Prepared | None] = {}
        self._letters: dict[Any, Letter] = {}
        self._prepare()
        desk.tell(self._prepare)

    def _prepare(self) -> None:
        """Begins anew, with what the desk offers now."""
        call = Call("barrier")  # by default, whatever block this is called in
        self._barrier: Prepared = self._desk.order("BARRIER", call, torch.uint8, 0) or Ticket(call, _nothing, _nothing)
        self._tickets = {}

    def ticket(self, make: Maker, key: Any, output: torch.Tensor, tensor: torch.Tensor) -> Prepared | None:
        """The ticket that ``make`` gives for these tensors and ``key``, if the tensors and the options allow one."""
        alike = output is tensor  # in place: half of the questions
        if not ordinary(output) or not (alike or ordinary(tensor)) or chosen(self._ops.options) is not None:
            return None
        whole: tuple[Any, ...] = (make, key, output.dtype, output.shape)
        if not alike:
            whole = (*whole, tensor.dtype, tensor.shape)
        try:
            return self._tickets[whole]
        except KeyError:
            if len(self._tickets) >= _KEPT:
                self._tickets.clear()
            try:
                found = outside_inference(make)(self, output, tensor, key)
            except UsageError:
                found = None  # refused the long way, where the peers hear of it
            self._tickets[whole] = found
            return found

    def letter(self, op: str, tensor: torch.Tensor, tag: int) -> Letter | None:
        """The letter of a send or recv of ``tensor``, if the tensor allows one."""
        if not ordinary(tensor):
            return None
        key = (op, tensor.dtype, tensor.shape, tag)
        found = self._letters.get(key)
        if found is None:
            if len(self._letters) >= _KEPT:
                self._letters.clear()
            found = self._letters[key] = letter(self._ops.call(op, tensor), tag, tensor.nbytes)
        return found

    def barrier(self) -> Prepared | None:
        """No data."""
        return self._barrier if chosen(self._ops.options) is None else None

    def all_reduce(self, output: torch.Tensor, tensor: torch.Tensor, op: str) -> Prepared | None:
        """Everybody stages all and combines all."""
        small = one_shot(tensor.nbytes, self._size)
        call = self._ops.call("all_reduce", tensor, op)
        kind = "ONE_SHOT" if small else "ALL_REDUCE"
        if order := self._desk.order(kind, call, tensor.dtype, tensor.nbytes, op):
            return order
        if not small or op == "PREMUL_SUM":
            return None
        combine, rank = reducer(tensor.dtype, op), self._rank
        parts = [[p.view(tensor.shape) for p in row] for row in self._board.parts(tensor.numel(), tensor.dtype)]
        places = [row[rank] for row in parts]
        return Ticket(
            call,
            lambda half, out, mine: places[half].copy_(mine),
            lambda half, out, mine: combine(parts[half], out),
        )

    def reduce(self, output: torch.Tensor, tensor: torch.Tensor, key: tuple[int, str]) -> Prepared | None:
        """As `all_reduce`, for the root alone."""
        root, op = key
        self._ops.check_rank(root)
        kind = "ONE_SHOT" if one_shot(tensor.nbytes, self._size) else "REDUCE"
        call = self._ops.call("reduce", tensor, op, root)
        return self._desk.order(kind, call, tensor.dtype, tensor.nbytes, op, root=root)

    def broadcast(self, output: torch.Tensor, tensor: torch.Tensor, root: int) -> Prepared | None:
        """The root stages, the others copy."""
        self._ops.check_rank(root)
        call = self._ops.call("broadcast", tensor, root=root)
        if order := self._desk.order("BROADCAST", call, tensor.dtype, tensor.nbytes, root=root):
            return order
        if tensor.nbytes > self._board.stage_nbytes:
            return None
        parts = self._board.parts(tensor.numel(), tensor.dtype)
        places = [row[root].view(tensor.shape) for row in parts]
        if self._rank == root:
            return Ticket(call, lambda half, out, mine: places[half].copy_(mine), _nothing)
        return Ticket(call, _nothing, lambda half, out, mine: out.copy_(places[half]))

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, _: None) -> Prepared | None:
        """Everybody stages its own and copies all, in one go."""
        size, count = self._size, tensor.numel()
        fits = output.numel() == count * size and output.dtype == tensor.dtype
        if not fits:
            return None
        call = self._ops.call("all_gather", tensor, rest="single")
        dtype, apart = tensor.dtype, self._rank * tensor.nbytes
        if order := self._desk.order("ALL_GATHER", call, dtype, tensor.nbytes, apart=apart):
            return order
        if tensor.nbytes > self._board.stage_nbytes:
            return None
        stages = self._board.typed(tensor.dtype)
        rows = [stages[half, :, :count] for half in (0, 1)]
        places = [row[self._rank].view(tensor.shape) for row in rows]
        return Ticket(
            call,
            lambda half, out, mine: places[half].copy_(mine),
            lambda half, out, mine: out.view(size, count).copy_(rows[half]),
        )

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, _: None) -> Prepared | None:
        """Everybody stages a piece for each and copies the pieces for itself, in one go; equal pieces."""
        size, rank, rows = self._size, self._rank, tensor.shape[0] if tensor.dim() else 1
        width = self._board.stage_nbytes // size // 64 * 64 // tensor.itemsize
        fits = output.shape == tensor.shape and output.dtype == tensor.dtype and rows % size == 0
        count = tensor.numel() // size
        if not fits:
            return None
        pieces = [(count,)] * size
        call = self._ops.moving(
            "all_to_all",
            tensor.dtype,
            pieces,
            pieces,
            lambda: f"{name_of_dtype(tensor.dtype)} {size} x [{count}] into {size} x [{count}]",
        )
        if order := self._desk.order("ALL_TO_ALL", call, tensor.dtype, count * tensor.itemsize):
            return order
        if count > width or size > 2:  # of three ranks two may send each other longer pieces, in more meetings
            return None
        cut = self._board.typed(tensor.dtype)[:, :, : size * width].view(2, size, size, width)[..., :count]
        return Ticket(
            call,
            lambda half, out, mine: cut[half, rank].copy_(mine.view(size, count)),
            lambda half, out, mine: out.view(size, count).copy_(cut[half, :, rank]),
        )

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: str) -> Prepared | None:
        """Everybody stages all parts and combines its own."""
        size, rank, count = self._size, self._rank, output.numel()
        stages = self._board.typed(tensor.dtype)
        width = stages.shape[2] // size // 64 * 64
        fits = tensor.numel() == count * size and output.dtype == tensor.dtype
        if not fits:
            return None
        call = self._ops.call("reduce_scatter", tensor, op)
        apart = -rank * output.nbytes
        if order := self._desk.order("REDUCE_SCATTER", call, tensor.dtype, output.nbytes, op, apart=apart):
            return order
        if count > width or op == "PREMUL_SUM":
            return None
        combine = reducer(tensor.dtype, op)
        cut = stages[:, :, : size * width].view(2, size, size, width)[..., :count]
        places = [cut[half, rank] for half in (0, 1)]
        parts = [[part.view(output.shape) for part in cut[half, :, rank]] for half in (0, 1)]
        return Ticket(
            call,
            lambda half, out, mine: places[half].copy_(mine.view(size, count)),
            lambda half, out, mine: combine(parts[half], out),
        )
