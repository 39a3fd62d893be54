"""Operations that combine: all_reduce, reduce, reduce_scatter, and their coalesced forms."""

from typing import Any

import torch

from unisono.backend.operations import Builder, Operation, Tensors, clone_if_overlapping, same_dtype, unpack
from unisono.backend.tensors import Result, check, flat_input, late, ordinary, overlap, separate
from unisono.errors import UsageError
from unisono.runtime.call import Call
from unisono.runtime.collectives import Part
from unisono.runtime.prepared import AddressTable, Prepared
from unisono.runtime.reduce import reducer

__all__ = ["ReduceOps", "scaled"]


def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """A copy multiplied by the factor of PREMUL_SUM, as it goes into the sum; itself if only the long way takes it."""
    if factor == 1:
        return tensor
    floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    if not floating or not ordinary(tensor) or not tensor.data_ptr():
        return tensor
    return reducer(tensor.dtype, "PREMUL_SUM", factor).prepared(tensor.data)


def _weighed(flat: torch.Tensor, op: str, factor: float) -> torch.Tensor:
    """A flat input as it goes into the sum: multiplied for PREMUL_SUM, else itself."""
    return reducer(flat.dtype, op, factor).prepared(flat) if op == "PREMUL_SUM" else flat


class ReduceOps(Builder):
    """Builds the operations that combine; ``op`` is the reduce op's name, ``factor`` that of PREMUL_SUM."""

    def all_reduce_kind(self, output: torch.Tensor, tensor: torch.Tensor, op: str) -> Prepared:
        """An all_reduce of tensors like this one."""
        return self.prepare(self.call("all_reduce", tensor, op), tensor.dtype, (tensor.numel(),))

    def all_reduce(self, tensor: torch.Tensor, op: str, factor: float) -> Operation:
        """The combination of all tensors into each."""
        result = Result(tensor, "the tensor", load=True)
        mine = _weighed(result.flat, op, factor)
        prepared = self.all_reduce_kind(tensor, tensor, op)
        return Operation(prepared.call, [(prepared, result.flat, mine)], [tensor], late([result]))

    def all_reduce_many(self, tensors: Tensors, op: str, factor: float) -> Operation:
        """Several tensors of one dtype, in one call."""
        if not tensors:
            raise UsageError("all_reduce of no tensors at all: give one or more")
        results = [Result(tensor, "a tensor", load=True) for tensor in tensors]
        same_dtype(tensors, tensors[0], "a tensor")
        packed = torch.cat([result.flat for result in results])
        call = self.call("all_reduce", packed, op, parts=tensors)
        mine = _weighed(packed, op, factor)
        prepared = self.prepare(call, packed.dtype, (packed.numel(),))
        return Operation(call, [(prepared, packed, mine)], list(tensors), [unpack(packed, results)])

    def reduce_kind(self, output: torch.Tensor, tensor: torch.Tensor, key: tuple[int, str]) -> Prepared:
        """A reduce of tensors like this one to a root, by an op."""
        root, op = key
        self.check_rank(root)
        return self.prepare(self.call("reduce", tensor, op, root), tensor.dtype, (tensor.numel(),))

    def reduce(self, tensor: torch.Tensor, root: int, op: str, factor: float) -> Operation:
        """The combination of all tensors into the root's; the others' stay as they were."""
        self.check_rank(root)
        check(tensor, "the tensor")
        result = Result(tensor, "the tensor", load=True) if self.rank == root else None
        flat = result.flat if result is not None else flat_input(tensor)
        mine = _weighed(flat, op, factor)
        prepared = self.reduce_kind(tensor, tensor, (root, op))
        results = [result] if result is not None else []
        return Operation(prepared.call, [(prepared, flat, mine)], [tensor], late(results))

    def reduce_scatter_lists(self, outputs: Tensors, inputs: Tensors, op: str) -> Prepared | None:
        """A reduce_scatter of lists of tensors that are all alike."""
        if len(inputs) != self.size:
            return None
        return self._scattered_kind(self.call("reduce_scatter", inputs[0], op, parts=inputs), inputs)

    def _scattered_kind(self, call: Call, inputs: Tensors) -> Prepared:
        sizes = [tensor.numel() for tensor in inputs]
        return self.prepare(call, inputs[0].dtype, sizes, listed=(True, False))

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
        result = Result(output, "the output")
        flats = [_weighed(flat_input(t), op, factor) for t in inputs]
        mine = [
            clone_if_overlapping(flat, [result.flat], 0 if rank == self.rank else -1) for rank, flat in enumerate(flats)
        ]
        prepared = self._scattered_kind(self.call("reduce_scatter", inputs[0], op, parts=inputs), inputs)
        return Operation(prepared.call, [(prepared, result.flat, AddressTable(mine))], [output], late([result]))

    def reduce_scatter_kind(self, output: torch.Tensor, tensor: torch.Tensor, op: str) -> Prepared | None:
        """A reduce_scatter of one tensor like this into outputs like that."""
        if tensor.numel() != output.numel() * self.size or output.dtype != tensor.dtype:
            return None
        call, nbytes = self.call("reduce_scatter", tensor, op), output.nbytes
        sizes = (output.numel(),) * self.size
        input_offset, reach = -self.rank * nbytes, (nbytes, nbytes * self.size)
        return self.prepare(call, tensor.dtype, sizes, input_offset=input_offset, reach=reach)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, op: str, factor: float) -> Operation:
        """As `reduce_scatter`, the inputs side by side in one tensor."""
        check(tensor, "the input")
        same_dtype([output], tensor, "the output")
        prepared = self.reduce_scatter_kind(output, tensor, op)
        if prepared is None:
            raise UsageError(
                f"reduce_scatter of {tensor.numel()} elements over {self.size} ranks does not give each the "
                f"{output.numel()} of its output: the input needs {output.numel() * self.size}"
            )
        result = Result(output, "the output")
        mine = _weighed(flat_input(tensor), op, factor)
        if overlap(mine, result.flat) and not prepared.fits(result.flat.data_ptr(), mine.data_ptr()):
            mine = mine.clone()
        return Operation(prepared.call, [(prepared, result.flat, mine)], [output], late([result]))

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
        parts: list[Part] = []
        deliver: list[Any] = []
        dtypes = list(dict.fromkeys(t.dtype for t in tensors))
        for k, dtype in enumerate(dtypes):
            alike = [i for i, t in enumerate(tensors) if t.dtype == dtype]
            rows = torch.cat([flat_input(tensors[i]).view(self.size, -1) for i in alike], dim=1)
            call = call or self.call("reduce_scatter", rows, op, parts=tensors)
            packed = rows.new_empty(rows.shape[1])
            sizes = (packed.numel(),) * self.size
            prepared = self.prepare(call, dtype, sizes, guarded=k == 0, completes=k == len(dtypes) - 1)
            parts.append((prepared, packed, _weighed(rows.view(-1), op, factor)))
            deliver.append(unpack(packed, [results[i] for i in alike]))
        assert call is not None
        return Operation(call, parts, list(outputs), deliver)
