"""Operations that combine: all_reduce, reduce, reduce_scatter, and their coalesced forms."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from unisono.backend.operations import Builder, Operation, Tensors, apart, same_dtype, unpack
from unisono.backend.tensors import Result, check, flat_input, ordinary, separate, with_results
from unisono.errors import UsageError
from unisono.run import direct, programs
from unisono.run.direct import extent
from unisono.run.offers import LARGE
from unisono.run.programs import Program
from unisono.run.reduce import reducer
from unisono.watch.call import Call

__all__ = ["Reducing", "reduce_op", "scaled"]

_OP_NAMES = {
    getattr(dist.ReduceOp.RedOpType, name): name
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
}
_OP_CODES = {int(op): name for op, name in _OP_NAMES.items()}  # torch hashes a ReduceOp to its code


def reduce_op(options: Any) -> tuple[str, float]:
    """The name of the reduce op in torch's options and, for PREMUL_SUM, its factor (else 1)."""
    op = options.reduceOp
    name = _OP_CODES.get(hash(op)) or _OP_NAMES.get(getattr(op, "op", op), "UNUSED")
    return name, float(op.__getstate__()[1]) if name == "PREMUL_SUM" else 1.0


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """A copy multiplied by the factor of PREMUL_SUM, as it goes into the sum; itself if only the long way takes it."""
    if factor == 1:
        return tensor
    floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    if not floating or not ordinary(tensor) or not tensor.data_ptr():
        return tensor
    return reducer(tensor.dtype, "PREMUL_SUM", factor).prepared(tensor.data)


class Reducing(Builder):
    """Builds the operations that combine; ``op`` is the reduce op's name, ``factor`` that of PREMUL_SUM."""

    def all_reduce(self, tensor: torch.Tensor, op: str, factor: float) -> Operation:
        """The combination of all tensors into each."""
        result = Result(tensor, "the tensor", load=True)
        combine, call, flat = reducer(tensor.dtype, op, factor), self.call("all_reduce", tensor, op), result.flat
        default: Callable[[], Program] = partial(programs.all_reduce, self.board, flat, flat, combine)
        if op != "PREMUL_SUM" and not programs.one_shot(flat.nbytes, self.size):
            default = self.directly(call, extent([flat]), default, direct.all_reduce(flat, combine), lambda: True)
        program = self.program(call, default, [flat], [flat], factor)
        if result.tensor is not None:
            program = with_results(program, [result])
        return Operation(call, program, [tensor])

    def all_reduce_many(self, tensors: Tensors, op: str, factor: float) -> Operation:
        """Several tensors of one dtype, in one call."""
        if not tensors:
            raise UsageError("all_reduce of no tensors at all: give one or more")
        results = [Result(tensor, "a tensor", load=True) for tensor in tensors]
        same_dtype(tensors, tensors[0], "a tensor")
        packed = torch.cat([result.flat for result in results])
        call = self.call("all_reduce", packed, op, parts=tensors)
        default = partial(programs.all_reduce, self.board, packed, packed, reducer(packed.dtype, op, factor))
        program = self.program(call, default, [packed], [packed], factor)
        return Operation(call, unpack(program, packed, results), list(tensors))

    def reduce(self, tensor: torch.Tensor, root: int, op: str, factor: float) -> Operation:
        """The combination of all tensors into the root's; the others' stay as they were."""
        self.check_rank(root)
        check(tensor, "the tensor")
        combine = reducer(tensor.dtype, op, factor)
        call = self.call("reduce", tensor, op, root)
        if self.rank != root:
            mine = flat_input(tensor)
            default = partial(programs.all_reduce, self.board, mine, None, combine, root)
            return Operation(call, self.program(call, default, [mine], [], factor), [tensor])
        result = Result(tensor, "the tensor", load=True)
        default = partial(programs.all_reduce, self.board, result.flat, result.flat, combine, root)
        program = self.program(call, default, [result.flat], [result.flat], factor)
        return Operation(call, with_results(program, [result]), [tensor])

    def reduce_scatter_call(self, inputs: Tensors, op: str) -> Call:
        """What `reduce_scatter` shall mean."""
        return self.call("reduce_scatter", inputs[0], op, parts=inputs)

    def reduce_scatter(self, output: torch.Tensor, inputs: Tensors, op: str, factor: float) -> Operation:
        """The combination of all ranks' ``inputs[r]`` into rank r's ``output``; shapes may differ by r."""
        self.one_per_rank(inputs, output, "inputs")
        for rank, tensor in enumerate(inputs):
            check(tensor, f"input {rank}")
        if output.numel() != inputs[self.rank].numel():
            raise UsageError(
                f"reduce_scatter gives group rank {self.rank} {inputs[self.rank].numel()} elements; its output "
                f"{list(output.shape)} has {output.numel()}"
            )
        call = self.reduce_scatter_call(inputs, op)
        return self._scattered(call, output, [flat_input(t) for t in inputs], factor)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, op: str, factor: float) -> Operation:
        """As `reduce_scatter`, the inputs side by side in one tensor."""
        check(tensor, "the input")
        same_dtype([output], tensor, "the output")
        if tensor.numel() != output.numel() * self.size:
            raise UsageError(
                f"reduce_scatter of {tensor.numel()} elements over {self.size} ranks does not give each the "
                f"{output.numel()} of its output: the input needs {output.numel() * self.size}"
            )
        call = self.call("reduce_scatter", tensor, op)
        return self._scattered(call, output, list(flat_input(tensor).view(self.size, -1)), factor)

    def _scattered(self, call: Call, output: torch.Tensor, parts: Tensors, factor: float) -> Operation:
        combine = reducer(output.dtype, call.reduce_op, factor)
        result = Result(output, "the output")
        inputs = [apart(part, [result.flat], 0 if rank == self.rank else -1) for rank, part in enumerate(parts)]
        default: Callable[[], Program] = partial(programs.reduce_scatter, self.board, inputs, result.flat, combine)
        if call.reduce_op != "PREMUL_SUM" and max(part.nbytes for part in inputs) > LARGE:
            default = self.directly(
                call, extent(inputs), default, direct.reduce_scatter(inputs, result.flat, combine), lambda: True
            )
        program = self.program(call, default, inputs, [result.flat], factor, [part.numel() for part in parts])
        return Operation(call, with_results(program, [result]), [output])

    def reduce_scatter_many(self, outputs: Tensors, tensors: Tensors, op: str, factor: float) -> Operation:
        """Several `reduce_scatter_single`, of any dtypes that the op knows, in one call: one program after another."""
        if not tensors or len(outputs) != len(tensors):
            raise UsageError(f"reduce_scatter of {len(tensors)} inputs into {len(outputs)} outputs: give one for each")
        for output, tensor in zip(outputs, tensors, strict=True):
            check(tensor, "an input")
            same_dtype([output], tensor, "an output")
            if tensor.numel() != output.numel() * self.size:
                raise UsageError(f"an input of {tensor.numel()} elements for {self.size} outputs of {output.numel()}")
        results = [Result(output, "an output") for output in outputs]
        separate(results, "outputs")
        call: Call | None = None
        parts = []
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            alike = [k for k, t in enumerate(tensors) if t.dtype == dtype]
            rows = torch.cat([flat_input(tensors[k]).view(self.size, -1) for k in alike], dim=1)
            call = call or self.call("reduce_scatter", rows, op, parts=tensors)
            packed = rows.new_empty(rows.shape[1])
            operation = self._scattered(call, packed, list(rows), factor)
            parts.append(unpack(operation.steps, packed, [results[k] for k in alike]))
        assert call is not None
        return Operation(call, _one_by_one(parts), list(outputs))


def _one_by_one(programs: Sequence[Program]) -> Program:
    for program in programs:
        yield from program
