"""The flight record in the schema of PyTorch's flight recorder, version 2.10. Never imports torch.

Source: what ``torch._C._distributed_c10d._dump_fr_trace`` writes and torch/distributed/flight_recorder/ reads. The
analyzer knows a fixed list of backends, so calls are named after the one for CPU tensors, ``gloo:all_reduce``; before
torch 2.13 it knew two, for GPUs. It takes a group's entries with equal numbers together and compares names, sizes,
dtypes and states. It has no notion of a message between two ranks of a larger group; therefore every direction and tag
between two ranks is a group of its own.
"""

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from unisono.runtime.call_site import Site
from unisono.runtime.header import piece_numel

if TYPE_CHECKING:
    from unisono.runtime.call import Call

__all__ = ["Entry", "dump", "sizes"]

VERSION = "2.10"
_DTYPES = {
    "uint8": "Byte", "int8": "Char", "int16": "Short", "int32": "Int", "int64": "Long", "float16": "Half",
    "bfloat16": "BFloat16", "float32": "Float", "float64": "Double", "bool": "Bool", "complex32": "ComplexHalf",
    "complex64": "ComplexFloat", "complex128": "ComplexDouble", "uint16": "UInt16", "uint32": "UInt32",
    "uint64": "UInt64",
}  # fmt: skip
_Sizes = list[list[int]]


@dataclass(frozen=True, slots=True)
class Entry:
    """One call: number ``number`` of the group ``label`` of these ``global_ranks``.

    ``when`` and ``ended`` are ``time.monotonic_ns``, 0 for not yet. ``way`` is sender and receiver of a message, as
    places in ``global_ranks``.
    """

    label: str
    global_ranks: Sequence[int]
    number: int
    call: "Call"
    state: str
    when: int
    ended: int
    site: Site | None
    way: tuple[int, int] | None = None


def dump(entries: Sequence[Entry], groups: Mapping[str, Sequence[int]], here: Sequence[Site]) -> dict[str, Any]:
    """The whole record; ``here`` is where the process is now, for calls that are not done and have no call site."""
    clock = time.time_ns() - time.monotonic_ns()
    ordered = sorted(entries, key=lambda entry: entry.when)
    known = dict(groups) | {entry.label: entry.global_ranks for entry in ordered}
    places = {label: place for place, label in enumerate(known)}
    return {
        "version": VERSION,
        "comm_lib_version": "",
        "pg_config": {
            label: {"name": label, "desc": "undefined", "ranks": str(sorted(global_ranks))}
            for label, global_ranks in known.items()
        },
        "pg_status": {str(place): _status(label, ordered) for label, place in places.items()},
        "entries": [_row(k, entry, places[entry.label], clock, here) for k, entry in enumerate(ordered)],
        "pid": os.getpid(),
    }


def _status(label: str, entries: Sequence[Entry]) -> dict[str, int]:
    mine = [entry for entry in entries if entry.label == label]

    def newest(*states: str) -> int:
        return max((entry.number for entry in mine if entry.state in states), default=-1)

    return {
        "last_enqueued_collective": newest("scheduled", "started", "completed"),
        "last_started_collective": newest("started", "completed"),
        "last_completed_collective": newest("completed"),
    }


@cache
def _elder() -> bool:
    """True if torch's analyzer is that of before 2.13, which knows no Gloo, no barrier, no pieces of unequal sizes."""
    major, minor = version("torch").split(".")[:2]
    return (int(major), int(minor)) < (2, 13)


def _for_elder(kind: str, inputs: _Sizes, outputs: _Sizes) -> tuple[str, _Sizes, _Sizes]:
    """The entry of such a call for the analyzer before torch 2.13: all pieces as large as the largest."""
    if kind == "barrier":
        return "all_reduce_barrier", inputs, outputs
    if kind.endswith("_v"):
        piece, whole = max(inputs), [[len(inputs), *max(inputs)]]
        return ("all_gather", [piece], whole) if kind == "all_gather_v" else ("reduce_scatter", whole, [piece])
    return kind, inputs, outputs


def _row(record_id: int, entry: Entry, place: int, clock: int, here: Sequence[Site]) -> dict[str, Any]:
    kind, inputs, outputs = sizes(entry.call, len(entry.global_ranks))
    if _elder():
        kind, inputs, outputs = _for_elder(kind, inputs, outputs)
    if entry.way is not None:
        kind = "{} {}->{}".format(kind, *entry.way) if kind == "send" else "{} {}<-{}".format(kind, *entry.way[::-1])
    dtype = str(entry.call.dtype).removeprefix("torch.") if entry.call.dtype is not None else ""
    dtypes = [_DTYPES.get(dtype, dtype.capitalize())] if dtype else []
    sites = [entry.site] if entry.site else here if entry.state != "completed" else []
    return {
        "record_id": record_id,
        "pg_id": place,
        "process_group": (entry.label, "undefined"),
        "thread_name": "",
        "thread_id": "",
        "collective_seq_id": entry.number,
        "p2p_seq_id": entry.number if entry.way is not None else 0,
        "op_id": entry.number,
        "profiling_name": f"{'nccl' if _elder() else 'gloo'}:{kind}",
        "time_created_ns": entry.when + clock,
        "input_sizes": inputs,
        "input_dtypes": dtypes * len(inputs) or dtypes,
        "output_sizes": outputs,
        "output_dtypes": dtypes * len(outputs) or dtypes,
        "state": entry.state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": entry.ended + clock if entry.ended else None,
        "retired": entry.state == "completed",
        "timeout_ms": 0,
        "is_p2p": entry.way is not None,
        "frames": [{"name": function, "filename": file, "line": line} for file, line, function in sites],
    }


def sizes(call: "Call", world_size: int) -> tuple[str, _Sizes, _Sizes]:
    """The analyzer's name of a call, its input sizes and its output sizes.

    Sizes are such that the analyzer finds them equal, or fitting, exactly if the ranks agree. Where pieces differ by
    rank those of all ranks are given; ``_v`` marks the operations for which the analyzer has such a name.
    """
    shape = list(call.shape)
    if call.sends:
        return _pieces(call, [piece_numel(n) for n in call.sends], [piece_numel(n) for n in call.expects])
    if call.op == "barrier":
        return call.op, [], []
    if call.op == "all_gather":
        return call.op, [shape], [[world_size, *shape]]
    if call.op == "reduce_scatter":
        return _reduce_scatter(call, world_size)
    if call.op in ("send", "recv"):
        return call.op, [shape] * (call.op == "send"), [shape] * (call.op == "recv")
    return call.op, [shape], [shape]


def _pieces(call: "Call", sends: list[int], expects: list[int]) -> tuple[str, _Sizes, _Sizes]:
    if call.op == "all_gather":
        if len(set(expects)) == 1:
            return call.op, [[expects[0]]], [[len(expects), expects[0]]]
        return "all_gather_v", [[n] for n in expects], [[n] for n in expects]
    if call.op == "gather":
        return call.op, [[max(sends)]], [[n] for n in expects] if any(expects) else []
    if call.op == "scatter":
        return call.op, [[n] for n in sends] if any(sends) else [], [[max(expects)]]
    return call.op, [[sum(sends)]], [[sum(expects)]]


def _reduce_scatter(call: "Call", world_size: int) -> tuple[str, _Sizes, _Sizes]:
    shape = list(call.shape)
    parts = call.parts or (math.prod(shape),)
    total = sum(parts)
    if len(parts) == world_size and len(set(parts)) > 1 and total != math.prod(shape):
        return "reduce_scatter_v", [[n] for n in parts], [[n] for n in parts]
    return call.op, [shape if math.prod(shape) == total else [total]], [[total // world_size]]
