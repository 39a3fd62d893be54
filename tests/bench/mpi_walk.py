"""What every rank of test_mpi.py does under mpiexec: all of MPI's calls on small cases; wrong elements into a file."""

import json
import os
import sys
from pathlib import Path

import torch

from unisono.backend.launchers import MPI_RANKS
from unisono.bench.cases import Case
from unisono.bench.mpi_calls import MpiCaller, mpi_caller
from unisono.bench.settings import COLLECTIVES, IN_PLACE, MPI_DTYPES, MPI_OPS, REDUCING, Contender, Settings
from unisono.bench.values import Tables


def wrong(settings: Settings, caller: MpiCaller, collective: str, rank: int, spoil: bool = False) -> int:
    tables = Tables(settings.ranks, getattr(torch, settings.dtype), settings.op)
    case = Case(settings, collective, 5000, rank, tables)
    case.fill()
    caller.call(case, settings.asynchronous)()
    output = caller.output(case)
    if spoil and len(output):
        output[-1] += 1
    return case.wrong(output)


def walk(rank: int, ranks: int) -> dict[str, int]:
    """Every collective in every form; every op on whole numbers and bools; every dtype."""
    found, spoilt = {}, {}
    few = Settings(ranks=ranks, contenders=(Contender("mpi"),), root=1)
    with mpi_caller(few, rank) as joined:
        for collective in COLLECTIVES:
            for place in ("in", "out") if collective in IN_PLACE else ("out",):
                for memory, late in (("ordinary", False), ("shared", True)):
                    settings = Settings(**{**vars(few), "place": place, "memory": memory, "asynchronous": late})
                    found[f"{collective} {place} {late}"] = wrong(settings, joined, collective, rank)
                spoilt[f"{collective} {place}"] = wrong(settings, joined, collective, rank, spoil=True)
        forms = [("int32", op) for op in MPI_OPS] + [("bool", op) for op in MPI_OPS] + [(d, "sum") for d in MPI_DTYPES]
        for dtype, op in forms:
            settings = Settings(**{**vars(few), "dtype": dtype, "op": op})
            settings.validate()
            for collective in sorted(REDUCING):
                found[f"{collective} {dtype} {op}"] = wrong(settings, MpiCaller(joined.mpi, settings), collective, rank)
        numbers = joined.all_numbers(torch.tensor([rank, 0.5], dtype=torch.float64)).tolist()
    assert numbers == [number for r in range(ranks) for number in (r, 0.5)]
    return {"wrong": sum(found.values()), "cases": len(found)} | spoilt


if __name__ == "__main__":
    rank = next(int(os.environ[name]) for name in MPI_RANKS if name in os.environ)
    Path(sys.argv[1], str(rank)).write_text(json.dumps(walk(rank, int(sys.argv[2]))))
    os._exit(0)
