"""Operations that only move data, for every dtype: broadcast, all_gather, gather, scatter, all_to_all."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from unisono.backend.operations import Builder, Operation, Tensors, apart, same_dtype, shapes
from unisono.backend.tensors import Result, as_bytes, check, flat_input, separate, with_results
from unisono.errors import UsageError
from unisono.run import direct, programs
from unisono.run.direct import extent
from unisono.run.offers import LARGE, Direct, Extent
from unisono.run.programs import Program
from unisono.watch.call import Call, name_of_dtype

__all__ = ["Moving"]


class Moving(Builder):
    """Builds the operations that move data, and the calls of those whose pieces may differ by rank."""

    def all_gather_call(self, outputs: Tensors, tensor: torch.Tensor) -> Call:
        """What `all_gather` shall mean."""
        return self.moving(
            "all_gather",
            tensor.dtype,
            [tensor.shape] * self.size,
            [output.shape for output in outputs],
            lambda: f"{name_of_dtype(tensor.dtype)} {list(tensor.shape)} into {shapes(outputs)}",
        )

    def gather_call(self, outputs: Tensors, tensor: torch.Tensor, root: int) -> Call:
        """What `gather` shall mean; ``outputs``: none but at the root."""
        return self.moving(
            "gather",
            tensor.dtype,
            [tensor.shape if r == root else None for r in range(self.size)],
            [o.shape for o in outputs] if outputs else [None] * self.size,
            lambda: (
                f"{name_of_dtype(tensor.dtype)} {list(tensor.shape)}" + (f" into {shapes(outputs)}" if outputs else "")
            ),
            root,
        )

    def scatter_call(self, output: torch.Tensor, inputs: Tensors, root: int) -> Call:
        """What `scatter` shall mean; ``inputs``: none but at the root."""
        return self.moving(
            "scatter",
            output.dtype,
            [t.shape for t in inputs] if inputs else [None] * self.size,
            [output.shape if r == root else None for r in range(self.size)],
            lambda: (
                (f"{shapes(inputs)} of " if inputs else "") + f"{name_of_dtype(output.dtype)} into {list(output.shape)}"
            ),
            root,
        )

    def all_to_all_call(self, outputs: Tensors, inputs: Tensors) -> Call:
        """What `all_to_all` shall mean."""
        dtype = inputs[0].dtype
        return self.moving(
            "all_to_all",
            dtype,
            [t.shape for t in inputs],
            [t.shape for t in outputs],
            lambda: f"{name_of_dtype(dtype)} {shapes(inputs)} into {shapes(outputs)}",
        )

    def broadcast(self, tensor: torch.Tensor, root: int) -> Operation:
        """``tensor`` of ``root`` into ``tensor`` of all."""
        self.check_rank(root)
        check(tensor, "the tensor")
        call = self.call("broadcast", tensor, root=root)
        if self.rank == root:
            mine = as_bytes(flat_input(tensor))
            return Operation(call, self.program(call, self._broadcast(call, root, mine), [mine], [mine]), [tensor])
        result = Result(tensor, "the tensor")
        data = as_bytes(result.flat)
        program = self.program(call, self._broadcast(call, root, data), [], [data])
        return Operation(call, with_results(program, [result]), [tensor])

    def _broadcast(self, call: Call, root: int, data: torch.Tensor) -> Callable[[], Program]:
        staged = partial(programs.broadcast, self.board, root, data)
        if data.numel() <= LARGE:
            return staged
        return self.directly(call, extent([data]), staged, direct.broadcast(data, root), lambda: True, root)

    def _results(self, outputs: Tensors) -> list[Result]:
        """The results of a call that has one per rank."""
        results = [Result(output, f"output {r}") for r, output in enumerate(outputs)]
        separate(results, "outputs")
        return results

    def all_gather(self, outputs: Tensors, tensor: torch.Tensor) -> Operation:
        """``tensor`` of every rank into ``outputs``, whose shapes may differ by rank."""
        check(tensor, "the input")
        self.one_per_rank(outputs, tensor, "outputs")
        results = self._results(outputs)
        call = self.all_gather_call(outputs, tensor)
        mine = as_bytes(apart(flat_input(tensor), [r.flat for r in results], self.rank))
        places = [as_bytes(r.flat) for r in results]
        staged = partial(programs.all_gather, self.board, mine, places)
        default = self._measured(call, extent([mine]), staged, direct.all_gather(call, mine, places))
        program = self.program(call, default, [mine], places)
        return Operation(call, with_results(program, results), list(outputs))

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> Operation:
        """``tensor`` of every rank, side by side into ``output``."""
        check(tensor, "the input")
        same_dtype([output], tensor, "the output")
        if output.numel() != tensor.numel() * self.size:
            raise UsageError(
                f"all_gather of {tensor.numel()} elements on {self.size} ranks fills {tensor.numel() * self.size}; "
                f"the output {list(output.shape)} has {output.numel()}"
            )
        result = Result(output, "the output")
        call = self.call("all_gather", tensor, rest="single")
        mine = apart(flat_input(tensor), list(result.flat.view(self.size, -1)), self.rank)
        places = as_bytes(result.flat).view(self.size, -1)
        default: Callable[[], Program] = partial(programs.all_gather_flat, self.board, as_bytes(mine), places)
        if mine.nbytes > LARGE:
            go = direct.collect(as_bytes(mine), list(places), lambda offers, rank, meeting: 0, lambda: mine.nbytes)
            default = self.directly(call, extent([mine]), default, go, lambda: True)
        program = self.program(call, default, [as_bytes(mine)], list(places))
        return Operation(call, with_results(program, [result]), [output])

    def _measured(
        self, call: Call, memory: Extent | None, staged: Callable[[], Program], go: Direct
    ) -> Callable[[], Program]:
        """`directly`, of pieces whose sizes only the headers tell."""
        return self.directly(call, memory, staged, go, lambda: call.longest_nbytes > LARGE)

    def all_gather_many(self, outputs: Tensors, tensors: Tensors) -> Operation:
        """Several `all_gather_single`, of any dtypes, in one call."""
        if not tensors or len(outputs) != len(tensors):
            raise UsageError(f"all_gather of {len(tensors)} inputs into {len(outputs)} outputs: give one for each")
        results = self._results(outputs)
        for output, tensor in zip(outputs, tensors, strict=True):
            check(tensor, "an input")
            same_dtype([output], tensor, "an output")
            if output.numel() != tensor.numel() * self.size:
                raise UsageError(f"an output of {output.numel()} elements for {self.size} inputs of {tensor.numel()}")
        mine = torch.cat([as_bytes(flat_input(t)) for t in tensors])
        packed = mine.new_empty((self.size, mine.numel()))
        call = self.call("all_gather", mine, parts=tensors)
        default = partial(programs.all_gather_flat, self.board, mine, packed)
        program = self.program(call, default, [mine], list(packed))
        return Operation(call, self._unpack_rows(program, packed, results), list(outputs))

    def all_gather_coalesced(self, outputs: Sequence[Tensors], tensors: Tensors) -> Operation:
        """``outputs[r][i]`` receives rank r's ``tensors[i]``: several `all_gather` of equal shapes in one call."""
        if len(outputs) != self.size or any(len(row) != len(tensors) for row in outputs):
            raise UsageError(
                f"all_gather of {len(tensors)} inputs on {self.size} ranks into {[len(row) for row in outputs]} "
                "outputs: give a list for each rank, with one output for each input"
            )
        for row in outputs:
            for output, tensor in zip(row, tensors, strict=True):
                same_dtype([output], tensor, "an output")
                if output.shape != tensor.shape:
                    raise UsageError(f"an output of shape {list(output.shape)} for inputs of {list(tensor.shape)}")
        results = self._results([output for row in outputs for output in row])
        packed = [torch.empty((self.size, *t.shape), dtype=t.dtype, device="cpu") for t in tensors]
        operation = self.all_gather_many(packed, tensors)
        parts = [gathered[rank] for rank in range(self.size) for gathered in packed]
        return Operation(operation.call, _copied(operation.steps, parts, results), [t for row in outputs for t in row])

    def _unpack_rows(self, program: Program, packed: torch.Tensor, results: Sequence[Result]) -> Program:
        yield from program
        parts = torch.split(packed, [r.flat.nbytes // self.size for r in results], dim=1)
        for result, part in zip(results, parts, strict=True):
            as_bytes(result.flat).view(self.size, -1).copy_(part)
            result.deliver()

    def gather(self, outputs: Tensors, tensor: torch.Tensor, root: int) -> Operation:
        """``tensor`` of every rank into the root's ``outputs``, whose shapes may differ by rank."""
        self.check_rank(root)
        check(tensor, "the input")
        results: list[Result] = []
        if self.rank == root:
            self.one_per_rank(outputs, tensor, "outputs")
            results = self._results(outputs)
        call = self.gather_call(outputs if results else [], tensor, root)
        mine = as_bytes(apart(flat_input(tensor), [r.flat for r in results], self.rank))
        sends = [mine if r == root else None for r in range(self.size)]
        places = [as_bytes(r.flat) for r in results]
        default = partial(programs.exchange, self.board, call, sends, places or [None] * self.size, slots=1)
        program = self.program(call, default, [mine], places)
        return Operation(call, with_results(program, results), list(outputs) if results else [])

    def scatter(self, output: torch.Tensor, inputs: Tensors, root: int) -> Operation:
        """The root's ``inputs[r]`` into rank r's ``output``; shapes may differ by rank."""
        self.check_rank(root)
        result = Result(output, "the output")
        if self.rank == root:
            self.one_per_rank(inputs, output, "inputs")
            for rank, tensor in enumerate(inputs):
                check(tensor, f"input {rank}")
        sending = self.rank == root
        call = self.scatter_call(output, inputs if sending else [], root)
        flats = [apart(flat_input(t), [result.flat], 0 if r == root else -1) for r, t in enumerate(inputs) if sending]
        receives = [as_bytes(result.flat) if r == root else None for r in range(self.size)]
        sends = [as_bytes(f) for f in flats]
        default = partial(programs.exchange, self.board, call, sends or [None] * self.size, receives, slots=self.size)
        program = self.program(call, default, sends, [as_bytes(result.flat)])
        return Operation(call, with_results(program, [result]), [output])

    def all_to_all(self, outputs: Tensors, inputs: Tensors) -> Operation:
        """``inputs[j]`` of rank i into ``outputs[i]`` of rank j; any shapes that agree in pairs."""
        if not outputs or not inputs:
            raise UsageError("all_to_all needs one output and one input per rank")
        self.one_per_rank(outputs, inputs[0], "outputs")
        self.one_per_rank(inputs, inputs[0], "inputs")
        for rank, tensor in enumerate(inputs):
            check(tensor, f"input {rank}")
        results = self._results(outputs)
        return self._all_to_all(results, [flat_input(t) for t in inputs], outputs, inputs)

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Operation:
        """Rows ``input_splits[j]`` of ``tensor`` to rank j, rows ``output_splits[i]`` of ``output`` from rank i.

        No splits means equal ones.
        """
        check(tensor, "the input")
        same_dtype([output], tensor, "the output")
        result = Result(output, "the output")
        out_rows = self._rows(output, output_splits, "output")
        in_rows = self._rows(tensor, input_splits, "input")
        flat = apart(flat_input(tensor), [result.flat], -1)
        inputs, outputs = list(torch.split(flat, in_rows)), list(torch.split(result.flat, out_rows))
        pieces = [Result(part, "the output") for part in outputs]
        operation = self._all_to_all(pieces, inputs, outputs, inputs)
        return Operation(operation.call, with_results(operation.steps, [result]), [output])

    def _rows(self, tensor: torch.Tensor, splits: Sequence[int], what: str) -> list[int]:
        """Elements per rank, from rows per rank."""
        rows = tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % self.size:
                raise UsageError(
                    f"{what} {list(tensor.shape)}: {rows} rows do not divide among {self.size} ranks; give splits"
                )
            splits = [rows // self.size] * self.size
        if len(splits) != self.size or sum(splits) != rows or min(splits) < 0:
            raise UsageError(
                f"{what} splits {list(splits)} must be {self.size} numbers that sum to the {rows} rows of "
                f"{list(tensor.shape)}"
            )
        each = tensor.numel() // rows if rows else 0
        return [count * each for count in splits]

    def _all_to_all(self, results: Sequence[Result], flats: Tensors, outputs: Tensors, inputs: Tensors) -> Operation:
        call = self.all_to_all_call(outputs, inputs)
        targets = [r.flat for r in results]
        safe = [apart(flat, targets, -1) for flat in flats]
        sends, receives = [as_bytes(f) for f in safe], [as_bytes(t) for t in targets]
        staged = partial(programs.exchange, self.board, call, sends, receives, slots=self.size)
        go = direct.all_to_all(call, sends[self.rank], receives)
        default = self._measured(call, extent(sends), staged, go)
        program = self.program(call, default, sends, receives)
        return Operation(call, with_results(program, results), list(outputs))


def _copied(program: Program, parts: Tensors, results: Sequence[Result]) -> Program:
    """The program, then each part to its result."""
    yield from program
    for part, result in zip(parts, results, strict=True):
        result.flat.copy_(part.view(-1))
        result.deliver()
