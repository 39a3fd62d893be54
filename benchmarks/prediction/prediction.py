"""Predicted beside measured: every algorithm over links between hosts, made of namespaces on one machine.

python benchmarks/prediction/prediction.py [--links 10ms/100mbit] [--shapes 2x1,2x2,4x1]

Ranks measure their links (`measure_links`), then run each algorithm by `run_over` over Gloo's messages, all from one
moment on, for the hosts share one clock; what counts is the last rank's end, the least of some runs: other work on the
cores makes some runs slower, and none faster. Predicted is what `simulate_programs` gives for the same programs on the
measured topology. Needs root, iproute2, and hosts.py in the folder that --hosts-library names.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
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
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        _rank({**json.loads(asked.rank), "rank": int(os.environ["RANK"]), "ranks": int(os.environ["WORLD_SIZE"])})
        return
    rows = []
    for link in asked.links.split(","):
        for shape in asked.shapes.split(","):
            job = {"link": link, "hosts": shape, "sizes": asked.sizes, "collectives": asked.collectives}
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

    from unisono.schedule import as_hosts
    from unisono.transport.links import measure_links
    from unisono.transport.torch_p2p import TorchP2P

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    dist.init_process_group(
        "gloo", init_method=address, rank=job["rank"], world_size=job["ranks"], timeout=timedelta(seconds=60)
    )
    transport = TorchP2P()
    began = time.perf_counter()
    topology = measure_links(transport, as_hosts(job["hosts"], job["ranks"]))
    birth = time.perf_counter() - began
    if job["rank"] == 0:
        far, near = topology.link(0, job["ranks"] - 1), topology.intra
        print(f"links measured in {birth * 1e3:.0f} ms: {far}; inside {near}; gamma {topology.gamma:.3g}", flush=True)
    rows = []
    for collective, algorithm, nbytes, schedule in _cells(job):
        seconds = _timed(transport, schedule, nbytes)
        if job["rank"] == 0:
            rows.append(_row(job, collective, algorithm, nbytes, seconds, _predicted(schedule, topology, nbytes)))
    if job["rank"] == 0:
        Path(job["out"]).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _cells(job: dict[str, Any]) -> Iterator[tuple[str, str, int, Any]]:
    from unisono.algorithms import build, list_algorithms

    for collective in job["collectives"].split(","):
        for found in list_algorithms(collective):
            if found.simulation_only:
                continue
            options = {"hosts": job["hosts"]} if "hosts" in found.options else {}
            for nbytes in map(int, job["sizes"].split(",")):
                yield collective, found.name, nbytes, build(found.name, collective, job["ranks"], **options)


def _predicted(schedule: Any, topology: Any, nbytes: int) -> float:
    from unisono.program import lower
    from unisono.simulation import simulate_programs

    programs = [lower(schedule, rank, "messages") for rank in range(schedule.world_size)]
    return float(simulate_programs(programs, topology, _rounded(schedule, nbytes)).max())


def _rounded(schedule: Any, nbytes: int) -> int:
    """Bytes as nccl-tests count them, of whole float32 blocks."""
    blocks = 4 * schedule.world_size if schedule.collective.name not in ("all_reduce", "broadcast") else 4
    return max(nbytes // blocks, 1) * blocks


def _timed(transport: Any, schedule: Any, nbytes: int) -> float:
    """Seconds from the common start to the last rank's end, the median of some runs."""
    import torch

    from unisono.runtime.run import run_over

    c, n = schedule.collective, schedule.world_size
    numel = _rounded(schedule, nbytes) // 4
    whole, part = torch.ones(numel), torch.ones(max(numel // n, 1))
    given, into = {
        "all_gather": (part, whole),
        "reduce_scatter": (whole, part),
        "all_to_all": (whole, whole.clone()),
    }.get(c.name, (whole, whole))
    spans = []
    for _ in range(RUNS + 1):
        start = _common_start(transport)
        while time.monotonic() < start - 0.0006:
            time.sleep(0.0002)
        while time.monotonic() < start:
            pass
        run_over(schedule, given, transport, into)
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


if __name__ == "__main__":
    main()
