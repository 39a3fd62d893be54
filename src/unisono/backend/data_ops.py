"""Operations that only move data, for every dtype: broadcast, all_gather, gather, scatter, all_to_all."""

from collections.abc import Callable, Sequence

import torch

from unisono.backend.operations import NOTHING, Builder, Operation, Tensors, clone_if_overlapping, same_dtype, shapes
from unisono.backend.tensors import Result, as_bytes, check, flat_input, late, separate
from unisono.errors import UsageError
from unisono.runtime.call import Call, name_of_dtype, piece
from unisono.runtime.choice import by_default
from unisono.runtime.prepared import AddressTable, Kind, Prepared

__all__ = ["DataOps"]


class DataOps(Builder):
    """Builds the operations that move data, and the calls of those whose pieces may differ by rank."""

    def all_gather_call(self, outputs: Tensors, tensor: torch.Tensor) -> Call:
        """The call of `all_gather`."""
        return self.moving(
            "all_gather",
            tensor.dtype,
            [tensor.shape] * self.size,
            [output.shape for output in outputs],
            lambda: f"{name_of_dtype(tensor.dtype)} {list(tensor.shape)} into {shapes(outputs)}",
        )

    def gather_call(self, outputs: Tensors, tensor: torch.Tensor, root: int) -> Call:
        """The call of `gather`; ``outputs``: none but at the root."""
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
        """The call of `scatter`; ``inputs``: none but at the root."""
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
        """The call of `all_to_all`."""
        dtype = inputs[0].dtype
        return self.moving(
            "all_to_all",
            dtype,
            [t.shape for t in inputs],
            [t.shape for t in outputs],
            lambda: f"{name_of_dtype(dtype)} {shapes(inputs)} into {shapes(outputs)}",
        )

    def broadcast_kind(self, output: torch.Tensor, tensor: torch.Tensor, root: int) -> Prepared:
        """A broadcast of tensors like this one from a root."""
        self.check_rank(root)
        return self.prepare(self.call("broadcast", tensor, root=root), torch.uint8, (tensor.nbytes,))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Operation:
        """``tensor`` of ``root`` into ``tensor`` of all."""
        self.check_rank(root)
        check(tensor, "the tensor")
        prepared = self.broadcast_kind(tensor, tensor, root)
        results = [] if self.rank == root else [Result(tensor, "the tensor")]
        flat = results[0].flat if results else flat_input(tensor)
        return Operation(prepared.call, [(prepared, flat, flat)], [tensor], late(results))

    def _results(self, outputs: Tensors) -> list[Result]:
        """The results of a call that has one per rank."""
        results = [Result(output, f"output {r}") for r, output in enumerate(outputs)]
        separate(results, "outputs")
        return results

    def all_gather_lists(self, outputs: Tensors, inputs: Tensors, key: None = None) -> Prepared | None:
        """An all_gather into lists."""
        if len(outputs) != self.size:
            return None
        call = self.all_gather_call(outputs, inputs[0])
        return self.prepare(call, torch.uint8, [output.nbytes for output in outputs], listed=(False, True))

    def all_gather(self, outputs: Tensors, tensor: torch.Tensor) -> Operation:
        """``tensor`` of every rank into ``outputs``, whose shapes may differ by rank."""
        check(tensor, "the input")
        self.one_per_rank(outputs, tensor, "outputs")
        results = self._results(outputs)
        prepared = self.all_gather_lists(outputs, [tensor])
        assert prepared is not None
        mine = clone_if_overlapping(flat_input(tensor), [r.flat for r in results], self.rank)
        part = (prepared, AddressTable([r.flat for r in results]), mine)
        return Operation(prepared.call, [part], list(outputs), late(results))

    def all_gather_kind(self, output: torch.Tensor, tensor: torch.Tensor, key: None = None) -> Prepared | None:
        """An all_gather of tensors like this one, side by side."""
        if output.numel() != tensor.numel() * self.size or output.dtype != tensor.dtype:
            return None
        call, nbytes = self.call("all_gather", tensor, extra_signature="single"), tensor.nbytes
        input_offset, reach = self.rank * nbytes, (nbytes * self.size, nbytes)
        return self.prepare(call, torch.uint8, (nbytes,) * self.size, input_offset=input_offset, reach=reach)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor) -> Operation:
        """``tensor`` of every rank, side by side into ``output``."""
        check(tensor, "the input")
        same_dtype([output], tensor, "the output")
        prepared = self.all_gather_kind(output, tensor)
        if prepared is None:
            raise UsageError(
                f"all_gather of {tensor.numel()} elements on {self.size} ranks fills {tensor.numel() * self.size}; "
                f"the output {list(output.shape)} has {output.numel()}"
            )
        result = Result(output, "the output")
        mine = clone_if_overlapping(flat_input(tensor), list(result.flat.view(self.size, -1)), self.rank)
        return Operation(prepared.call, [(prepared, result.flat, mine)], [output], late([result]))

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
        prepared = self.prepare(call, torch.uint8, (mine.nbytes,) * self.size)
        return Operation(call, [(prepared, packed, mine)], list(outputs), [_rows(packed, results, self.size)])

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
        operation.deliver.append(_copied(parts, results))
        operation.outputs = [t for row in outputs for t in row]
        return operation

    def counts(self, call: Call, nbytes: int) -> Prepared:
        """An all_gather of ``nbytes`` of every rank, which ``call`` begins with."""
        choice = by_default("all_gather", nbytes, self.size, 0, self.oversubscribed)
        return self.preparer.prepare(Kind(call, choice, torch.uint8, (nbytes,) * self.size))

    def gather_lists(self, outputs: Tensors, inputs: Tensors, root: int) -> Prepared | None:
        """A gather into lists at the root."""
        if root not in range(self.size) or len(outputs) != (self.size if self.rank == root else 0):
            return None
        tensor, call = inputs[0], self.gather_call(outputs, inputs[0], root)
        sizes = [output.nbytes for output in outputs] or [tensor.nbytes] * self.size
        alike = {output.shape for output in outputs} <= {tensor.shape}
        expected_calls = self._expected_calls(call, tensor, root, gathers=True) if alike else ()
        return self.prepare(call, torch.uint8, sizes, listed=(False, True), expected_calls=expected_calls)

    def gather(self, outputs: Tensors, tensor: torch.Tensor, root: int) -> Operation:
        """``tensor`` of every rank into the root's ``outputs``, whose shapes may differ by rank."""
        self.check_rank(root)
        check(tensor, "the input")
        results: list[Result] = []
        if self.rank == root:
            self.one_per_rank(outputs, tensor, "outputs")
            results = self._results(outputs)
        prepared = self.gather_lists(outputs if results else [], [tensor], root)
        assert prepared is not None
        mine = clone_if_overlapping(flat_input(tensor), [r.flat for r in results], self.rank)
        into = AddressTable([r.flat for r in results])
        return Operation(prepared.call, [(prepared, into, mine)], list(outputs) if results else [], late(results))

    def scatter_lists(self, outputs: Tensors, inputs: Tensors, root: int) -> Prepared | None:
        """A scatter of lists at the root."""
        if root not in range(self.size) or len(inputs) != (self.size if self.rank == root else 0):
            return None
        output, call = outputs[0], self.scatter_call(outputs[0], inputs, root)
        sizes = [tensor.nbytes for tensor in inputs] or [output.nbytes] * self.size
        alike = {tensor.shape for tensor in inputs} <= {output.shape}
        expected_calls = self._expected_calls(call, output, root, gathers=False) if alike else ()
        return self.prepare(call, torch.uint8, sizes, listed=(True, False), expected_calls=expected_calls)

    def scatter(self, output: torch.Tensor, inputs: Tensors, root: int) -> Operation:
        """The root's ``inputs[r]`` into rank r's ``output``; shapes may differ by rank."""
        self.check_rank(root)
        result = Result(output, "the output")
        sending = self.rank == root
        if sending:
            self.one_per_rank(inputs, output, "inputs")
            for rank, tensor in enumerate(inputs):
                check(tensor, f"input {rank}")
        prepared = self.scatter_lists([output], inputs if sending else [], root)
        assert prepared is not None
        flats = [
            clone_if_overlapping(flat_input(t), [result.flat], 0 if r == root else -1)
            for r, t in enumerate(inputs)
            if sending
        ]
        source = AddressTable(flats) if sending else NOTHING
        return Operation(prepared.call, [(prepared, result.flat, source)], [output], late([result]))

    def _expected_calls(self, call: Call, tensor: torch.Tensor, root: int, gathers: bool) -> tuple[Call, ...]:
        """The calls of all ranks of a gather or scatter whose pieces are all like ``tensor``."""
        number = piece(tensor.shape)
        each, none = (number,) * self.size, (0,) * self.size
        at_root = tuple(number * (r == root) for r in range(self.size))
        found = []
        for rank in range(self.size):
            many = each if rank == root else none
            sends, expects = (at_root, many) if gathers else (many, at_root)
            found.append(
                Call(call.op, call.dtype, root=call.root, sends=sends, expects=expects, algorithm=call.algorithm)
            )
        return tuple(found)

    def all_to_all_lists(self, outputs: Tensors, inputs: Tensors, key: None = None) -> Prepared | None:
        """An all_to_all of lists."""
        if len(outputs) != self.size or len(inputs) != self.size:
            return None
        call = self.all_to_all_call(outputs, inputs)
        sends, expects = [t.nbytes for t in inputs], [t.nbytes for t in outputs]
        return self.prepare(call, torch.uint8, self._pairs(sends, expects), listed=(True, True), exclusive=True)

    def _pairs(self, sends: Sequence[int], expects: Sequence[int]) -> list[int]:
        """Bytes between every pair of ranks, as far as this rank knows: all equal, if its own are."""
        if len({*sends, *expects}) == 1:
            return [sends[0]] * self.size**2
        sizes = [0] * self.size**2
        for peer in range(self.size):
            sizes[peer * self.size + self.rank] = expects[peer]
            sizes[self.rank * self.size + peer] = sends[peer]
        return sizes

    def all_to_all(self, outputs: Tensors, inputs: Tensors) -> Operation:
        """``inputs[j]`` of rank i into ``outputs[i]`` of rank j; any shapes that agree in pairs."""
        if not outputs or not inputs:
            raise UsageError("all_to_all needs one output and one input per rank")
        self.one_per_rank(outputs, inputs[0], "outputs")
        self.one_per_rank(inputs, inputs[0], "inputs")
        for rank, tensor in enumerate(inputs):
            check(tensor, f"input {rank}")
        return self._all_to_all(self._results(outputs), [flat_input(t) for t in inputs], outputs, inputs)

    def all_to_all_kind(self, output: torch.Tensor, tensor: torch.Tensor, key: None = None) -> Prepared | None:
        """An all_to_all of tensors like this one, in equal pieces."""
        rows, size = tensor.shape[0] if tensor.dim() else 1, self.size
        if output.shape != tensor.shape or output.dtype != tensor.dtype or rows % size:
            return None
        count = tensor.numel() // size
        pieces = [(count,)] * size
        name = name_of_dtype(tensor.dtype)
        call = self.moving(
            "all_to_all", tensor.dtype, pieces, pieces, lambda: f"{name} {size} x [{count}] into {size} x [{count}]"
        )
        if call.algorithm and output is tensor:
            return None  # by name, a block may be overwritten before it is sent: the long way copies
        nbytes = tensor.nbytes
        kept = {} if call.algorithm else {"input_offset": 0}  # the default reads a block before it overwrites it
        sizes = (nbytes // size,) * size**2
        return self.prepare(call, torch.uint8, sizes, exclusive=True, reach=(nbytes, nbytes), **kept)

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
        flat = clone_if_overlapping(flat_input(tensor), [result.flat], -1)
        inputs, outputs = list(torch.split(flat, in_rows)), list(torch.split(result.flat, out_rows))
        pieces = [Result(part, "the output") for part in outputs]
        operation = self._all_to_all(pieces, inputs, outputs, inputs)
        operation.deliver += late([result])
        operation.outputs = [output]
        return operation

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
        prepared = self.all_to_all_lists(outputs, inputs)
        assert prepared is not None
        targets = [r.flat for r in results]
        safe = [clone_if_overlapping(flat, targets, -1) for flat in flats]
        return Operation(
            prepared.call, [(prepared, AddressTable(targets), AddressTable(safe))], list(outputs), late(results)
        )


def _rows(packed: torch.Tensor, results: Sequence[Result], size: int) -> Callable[[], None]:
    """Brings the columns of gathered rows of bytes to their tensors."""

    def deliver() -> None:
        parts = torch.split(packed, [r.flat.nbytes // size for r in results], dim=1)
        for result, part in zip(results, parts, strict=True):
            as_bytes(result.flat).view(size, -1).copy_(part)
            result.deliver()

    return deliver


def _copied(parts: Tensors, results: Sequence[Result]) -> Callable[[], None]:
    """Brings each part to its result."""

    def deliver() -> None:
        for result, part in zip(results, parts, strict=True):
            result.flat.copy_(part.view(-1))
            result.deliver()

    return deliver
