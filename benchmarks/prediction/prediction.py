"""Predicted beside measured: every algorithm over links between hosts, made of namespaces on one machine.

python benchmarks/prediction/prediction.py [--links 10ms/100mbit] [--shapes 2x1,2x2,4x1] [--by group]

Ranks measure their links (`measure_links`), then run each algorithm, all from one moment on, for the hosts share one
clock; what counts is the last rank's end, the least of some runs: other work on the cores makes some runs slower, and
none faster. By a group of unisono, predicted is what `simulate_tables` gives for the same tables on the measured
topology, with a call and a way as short calls of the group take them; `default` is the choice of the group. By
messages, of Gloo, it is `run_over` and `simulate_programs`. Needs root, iproute2, hosts.py in the folder that
--hosts-library names.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from ranks_on_hosts import HOSTS_LIBRARY, rows_of

COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "all_to_all", "reduce_scatter")
SIZES = (4, 4 << 10, 64 << 10, 1 << 20)
LINKS = ("0.1ms/1gbit", "1ms/1gbit", "10ms/100mbit")
SHAPES = ("2x1", "2x2", "4x1")
RUNS, SETTLE = 5, 0.004  # runs of each cell; s before all begin, beside the time that the news takes


def main() -> None:
    """Parses the command line; makes the hosts, or is one rank on one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts-library", type=Path, default=HOSTS_LIBRARY, help="the folder of hosts.py")
    parser.add_argument("--links", default=",".join(LINKS))
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--collectives", default=",".join(COLLECTIVES))
    parser.add_argument("--algorithms", default="", help="all that can run, unless some are named")
    parser.add_argument("--by", choices=("group", "messages"), default="group")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        _rank({**json.loads(asked.rank), "rank": int(os.environ["RANK"]), "ranks": int(os.environ["WORLD_SIZE"])})
        return
    rows = []
    for link in asked.links.split(","):
        for shape in asked.shapes.split(","):
            job = {"link": link, "hosts": shape, "sizes": asked.sizes, "collectives": asked.collectives, "by": asked.by}
            job["algorithms"] = asked.algorithms
            found = rows_of(__file__, asked.hosts_library, link, shape, job)
            rows += found
            print(f"{link} {shape}: {_summary(found)}", flush=True)
    _show(rows)
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=0))


def _rank(job: dict[str, Any]) -> None:
    """One rank: measures its links, then every cell."""
    import torch
    import torch.distributed as dist

    from unisono.schedule import as_hosts, show_hosts
    from unisono.transport.links import measure_links
    from unisono.transport.torch_p2p import TorchP2P

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    by_group = job["by"] == "group"
    dist.init_process_group("unisono" if by_group else "gloo", timeout=timedelta(seconds=60))
    transport = TorchP2P(dist.new_group(backend="gloo") if by_group else None)
    hosts = as_hosts(job["hosts"], job["ranks"])
    began = time.perf_counter()
    topology = measure_links(transport, hosts, _memory(hosts) if by_group else None)
    if by_group:
        topology = _with_ways_of_calls(topology, transport)
    birth = time.perf_counter() - began
    if job["rank"] == 0:
        far, near = topology.link(0, job["ranks"] - 1), topology.intra
        print(f"links measured in {birth * 1e3:.0f} ms: {far}; inside {near}; gamma {topology.gamma:.3g}", flush=True)
        print(f"hosts {show_hosts(hosts)}; {topology.memory}", flush=True)
    rows = []
    for collective, algorithm, nbytes, schedule in _cells(job):
        if by_group:
            seconds = _timed(transport, _called(collective, algorithm, nbytes))
            predicted = _predicted_of_group(collective, algorithm, schedule, topology, nbytes)
        else:
            seconds = _timed(transport, _run_over(schedule, nbytes, transport))
            predicted = _predicted(schedule, topology, nbytes)
        if job["rank"] == 0:
            rows.append(_row(job, collective, algorithm, nbytes, seconds, predicted))
    if job["rank"] == 0:
        Path(job["out"]).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _memory(hosts: Any) -> Any:
    """What shared memory costs the ranks of a host, by a group of theirs: a short call, a barrier, a copy."""
    import torch
    import torch.distributed as dist

    from unisono.schedule import Memory

    groups = [dist.new_group(list(ranks)) for ranks in hosts]
    mine = next(group for group, ranks in zip(groups, hosts, strict=True) if dist.get_rank() in ranks)
    few, many, into = torch.ones(1), torch.ones(1 << 18), torch.ones(1 << 18)
    call, copy = _least(lambda: dist.all_reduce(few, group=mine)), _least(lambda: into.copy_(many))
    costs = torch.tensor([call, copy / many.nbytes])
    dist.all_reduce(costs, dist.ReduceOp.MAX)
    call, copy = costs.tolist()
    return Memory(call / 2, call / 2, copy, os.cpu_count() or 1)  # half of a call is its meeting, about


def _with_ways_of_calls(topology: Any, transport: Any) -> Any:
    """The topology whose calls, and links less the announcement, take what the group's short calls of two kinds say."""
    import torch
    import torch.distributed as dist

    one, two = (_called("all_reduce", name, 4) for name in ("one_shot", "two_phase"))  # one meeting, and two
    first = min(_timed(transport, one) for _ in range(3))
    numbers = torch.tensor([first, min(_timed(transport, two) for _ in range(3)) - first])
    dist.broadcast(numbers, 0)
    call, way = float(numbers[0]), min(max(float(numbers[1]), 0.0), float(numbers[0]))
    between = tuple(tuple(replace(link, alpha=link.announcement + way) for link in row) for row in topology.between)
    memory = replace(topology.memory, call=call - way)
    return replace(topology, between=between, inter=max(sum(between, ()), key=lambda link: link.alpha), memory=memory)


def _least(call: Any) -> float:
    found = []
    for _ in range(20):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return min(found)


def _cells(job: dict[str, Any]) -> Iterator[tuple[str, str, int, Any]]:
    from unisono.algorithms import build, list_algorithms

    by_group, wanted = job["by"] == "group", job["algorithms"].split(",") if job["algorithms"] else []
    for collective in job["collectives"].split(","):
        sizes = list(map(int, job["sizes"].split(",")))
        for found in list_algorithms(collective):
            if found.simulation_only or (wanted and found.name not in wanted):
                continue
            # A group builds what is asked for by name without options.
            options = {"hosts": job["hosts"]} if "hosts" in found.options and not by_group else {}
            for nbytes in sizes:
                yield collective, found.name, nbytes, build(found.name, collective, job["ranks"], **options)
        for nbytes in sizes if by_group else ():
            yield collective, "default", nbytes, None


def _called(collective: str, algorithm: str, nbytes: int) -> Any:
    """A call of the group, by an algorithm's name or by default."""
    import torch
    import torch.distributed as dist

    import unisono

    n = dist.get_world_size()
    numel = _rounded(collective, n, nbytes) // 4
    whole, part, into = torch.zeros(numel), torch.zeros(max(numel // n, 1)), torch.zeros(numel)
    calls = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "all_gather": lambda: dist.all_gather(list(whole.split(len(part))), part),
        "reduce_scatter": lambda: dist.reduce_scatter(part, list(whole.split(len(part)))),
        "all_to_all": lambda: dist.all_to_all_single(into, whole),
    }

    def call() -> None:
        with nullcontext() if algorithm == "default" else unisono.algorithm(algorithm):
            calls[collective]()

    return call


def _predicted_of_group(collective: str, algorithm: str, schedule: Any, topology: Any, nbytes: int) -> float:
    from unisono.cli.programs import Placed, place_over_hosts
    from unisono.simulation import simulate_tables

    hosts, size = topology.ranks_of_hosts, _rounded(collective, topology.world_size, nbytes)
    by_default = algorithm == "default"
    placed = place_over_hosts(collective, size, hosts) if by_default else Placed(schedule, hosts=hosts)
    return float(simulate_tables(placed.tables(size), topology).max())


def _predicted(schedule: Any, topology: Any, nbytes: int) -> float:
    from unisono.program import lower
    from unisono.simulation import simulate_programs

    programs = [lower(schedule, rank, "messages") for rank in range(schedule.world_size)]
    size = _rounded(schedule.collective.name, schedule.world_size, nbytes)
    return float(simulate_programs(programs, topology, size).max())


def _rounded(collective: str, ranks: int, nbytes: int) -> int:
    """Bytes as nccl-tests count them, of whole float32 blocks."""
    blocks = 4 * ranks if collective not in ("all_reduce", "broadcast") else 4
    return max(nbytes // blocks, 1) * blocks


def _run_over(schedule: Any, nbytes: int, transport: Any) -> Any:
    """A call of the schedule over messages."""
    import torch

    from unisono.runtime.run import run_over

    c, n = schedule.collective, schedule.world_size
    numel = _rounded(c.name, n, nbytes) // 4
    whole, part = torch.ones(numel), torch.ones(max(numel // n, 1))
    given, into = {
        "all_gather": (part, whole),
        "reduce_scatter": (whole, part),
        "all_to_all": (whole, whole.clone()),
    }.get(c.name, (whole, whole))
    return lambda: run_over(schedule, given, transport, into)


def _timed(transport: Any, call: Any) -> float:
    """Seconds from the common start to the last rank's end, the least of some runs."""
    spans = []
    for _ in range(RUNS + 1):
        start = _common_start(transport)
        while time.monotonic() < start - 0.0006:
            time.sleep(0.0002)
        while time.monotonic() < start:
            pass
        call()
        spans.append(_latest(transport, time.monotonic()) - start)
    return min(spans[1:])


def _common_start(transport: Any) -> float:
    """A moment that all ranks will see coming: what rank 0 says, once it has heard of all."""
    import torch

    moment = torch.zeros(1, dtype=torch.float64)
    if transport.rank:
        transport.send(0, moment)
        transport.receive(0, moment)
        return float(moment)
    for rank in range(1, transport.world_size):
        transport.receive(rank, moment)
    moment[0] = time.monotonic() + 0.03 + SETTLE
    for rank in range(1, transport.world_size):
        transport.send(rank, moment)
    return float(moment)


def _latest(transport: Any, moment: float) -> float:
    """The latest of all ranks' moments, at rank 0; its own elsewhere."""
    import torch

    mine = torch.tensor([moment], dtype=torch.float64)
    if transport.rank:
        transport.send(0, mine)
        return moment
    found = [moment]
    for rank in range(1, transport.world_size):
        theirs = torch.zeros(1, dtype=torch.float64)
        transport.receive(rank, theirs)
        found.append(float(theirs))
    return max(found)


def _row(
    job: dict[str, Any], collective: str, algorithm: str, nbytes: int, measured: float, predicted: float
) -> dict[str, Any]:
    return {
        "link": job["link"],
        "hosts": job["hosts"],
        "collective": collective,
        "algorithm": algorithm,
        "nbytes": nbytes,
        "measured": measured,
        "predicted": predicted,
    }


def _errors(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [abs(row["predicted"] / row["measured"] - 1) for row in rows]


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    errors = sorted(_errors(rows))
    return (
        f"{len(rows)} cells, median error {median(errors):.1%}, nine of ten below {errors[len(errors) * 9 // 10]:.1%}"
    )


def _show(rows: Sequence[dict[str, Any]]) -> None:
    """A table of all cells, then the errors by link and collective."""
    for row in rows:
        error = row["predicted"] / row["measured"] - 1
        words = f"{row['link']:13} {row['hosts']:4} {row['collective']:15} {row['algorithm']:19} {row['nbytes']:>9}"
        print(
            f"{words} measured {row['measured'] * 1e3:9.3f} ms predicted {row['predicted'] * 1e3:9.3f} ms {error:+6.1%}"
        )
    for key in ("link", "collective", "nbytes"):
        for value in dict.fromkeys(row[key] for row in rows):
            print(f"{key} {value}: {_summary([row for row in rows if row[key] == value])}")
    print(f"all: {_summary(rows)}")
    _show_choices(rows)


def _show_choices(rows: Sequence[dict[str, Any]]) -> None:
    """What choosing by prediction costs over the best measured, and what a group's own choice does."""
    by_cell: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        cell = by_cell.setdefault(tuple(row[key] for key in ("link", "hosts", "collective", "nbytes")), {})
        cell[row["algorithm"]] = row
    cost: dict[str, list[float]] = {"choosing by prediction": [], "default": []}
    for cell in by_cell.values():
        best = min(row["measured"] for row in cell.values())
        cost["choosing by prediction"].append(min(cell.values(), key=_rank_of)["measured"] / best)
        cost["default"] += [cell["default"]["measured"] / best] if "default" in cell else []
    for what, each in cost.items():
        if each:
            print(f"{what}: {median(each) - 1:.1%} over the best measured in the median, {max(each) - 1:.1%} at most")


def _rank_of(row: dict[str, Any]) -> tuple[float, bool]:
    """By the predicted time, to two digits; of equals the group's own choice is first."""
    return float(f"{row['predicted']:.2g}"), row["algorithm"] != "default"


if __name__ == "__main__":
    main()
