"""Collectives over hosts beside Gloo's over all ranks: namespaces of one machine, in turn, in the same processes.

python benchmarks/over_hosts/over_hosts.py [--links 0.1ms/1gbit] [--shape 2x2] [--sizes 4,65536] [--json FILE]

With --profile each cell is followed by what a call takes of processor time, by thread, and of packets, by rank.

Needs root, iproute2, and hosts.py in the folder that --hosts-library names. README.md here has the claims.
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from ranks_on_hosts import HOSTS_LIBRARY, rows_of

LINKS = ("0.1ms/1gbit", "10ms/100mbit")
SIZES = (4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
CLAIMS = {
    "0.1ms/1gbit": {4: 1.5, 64 << 10: 3.5, 1 << 20: 1.3, 64 << 20: 1.45},
    "10ms/100mbit": {4: 2.5, 64 << 10: 4.5, 1 << 20: 1.7, 64 << 20: 1.4},
}
"""Gloo's time by unisono's, of all_reduce, by bytes."""
BLOCKS, SECONDS, MOST = 5, 2.0, 40  # blocks of each; about what a block takes; calls in it at most
# A connection that was idle for as long as the other backend's block took begins slowly: no blocks of one call.


def main() -> None:
    """Parses the command line; makes the hosts, or is one rank on one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts-library", type=Path, default=HOSTS_LIBRARY)
    parser.add_argument("--links", default=",".join(LINKS))
    parser.add_argument("--shape", default="2x2", help="hosts x ranks on each")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--collectives", default=",".join(COLLECTIVES))
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true", help="processor time by thread, and packets, of a call")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        _rank(json.loads(asked.rank))
        return
    rows = []
    for link in asked.links.split(","):
        found = _measured(link, asked)
        rows += found
        print(f"{asked.shape}, {link}, load {os.getloadavg()[0]:.1f}", *map(_line, found), sep="\n", flush=True)
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=0))


def _measured(link: str, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """The cells of one network."""
    job = {"link": link, "shape": asked.shape, "blocks": asked.blocks}
    job |= {"sizes": asked.sizes, "collectives": asked.collectives, "profile": asked.profile}
    return rows_of(__file__, asked.hosts_library, link, asked.shape, job)


def _rank(job: dict[str, Any]) -> None:
    """One rank: every cell, both backends in turn."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("unisono", timeout=timedelta(seconds=120))
    groups = {"unisono": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    rows = []
    for collective in job["collectives"].split(","):
        for nbytes in map(int, job["sizes"].split(",")):
            seconds = _cell(collective, nbytes, groups, job["blocks"])
            rows.append({**{key: job[key] for key in ("link", "shape")}, "collective": collective, "nbytes": nbytes})
            rows[-1] |= seconds
            if job["profile"]:
                rows[-1]["profile"] = _profile(collective, nbytes, groups)
    if dist.get_rank() == 0:
        Path(job["out"]).write_text(json.dumps(rows))
    dist.destroy_process_group()


def _cell(collective: str, nbytes: int, groups: dict[str, Any], blocks: int) -> dict[str, float]:
    """Seconds of a call by backend, the medians of blocks, as rank 0 measures them."""
    import torch
    import torch.distributed as dist

    calls = {name: _call(collective, nbytes, group) for name, group in groups.items()}
    results = {name: [call().clone() for _ in range(2)][-1] for name, call in calls.items()}
    assert torch.equal(results["unisono"], results["gloo"]), f"{collective} of {nbytes} bytes differs"
    began = time.perf_counter()
    calls["gloo"]()
    count = torch.tensor([max(1, min(MOST, int(SECONDS / (time.perf_counter() - began))))])
    dist.broadcast(count, 0)
    found: dict[str, list[float]] = {name: [] for name in groups}
    for _ in range(blocks):
        for name, call in calls.items():
            dist.barrier(group=groups[name])
            began = time.perf_counter()
            for _ in range(int(count)):
                call()
            found[name].append((time.perf_counter() - began) / int(count))
    return {name: median(each) for name, each in found.items()}


def _profile(collective: str, nbytes: int, groups: dict[str, Any]) -> dict[str, list[dict[str, float]]]:
    """By backend and rank: microseconds of processor time that a call takes by thread, and packets of the host."""
    import torch.distributed as dist

    found: dict[str, list[dict[str, float]]] = {}
    for name, group in groups.items():
        call = _call(collective, nbytes, group)
        for _ in range(MOST):
            call()
        dist.barrier(group=group)
        before = _used()
        for _ in range(MOST):
            call()
        used = {part: (amount - before.get(part, 0.0)) / MOST for part, amount in _used().items()}
        found[name] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(found[name], used, group=groups["gloo"])
    return found


def _used() -> dict[str, float]:
    """Microseconds of processor time by the name of a thread, and packets that the host has sent and received."""
    names = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    found = {"packets": 0.0}
    for task in Path("/proc/self/task").iterdir():
        name = names.get(task.name) or (task / "comm").read_text().strip()
        found[name] = found.get(name, 0.0) + int((task / "schedstat").read_text().split()[0]) / 1e3
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("eth0:"):
            numbers = line.partition(":")[2].split()
            found["packets"] += int(numbers[1]) + int(numbers[9])
    return found


def _call(collective: str, nbytes: int, group: Any) -> Callable[[], Any]:
    """A function that runs the collective once and returns its result: small numbers, whose sums are exact.

    Bytes are counted as in nccl-tests, of float32.
    """
    import torch
    import torch.distributed as dist

    n, rank = dist.get_world_size(), dist.get_rank()
    part = max(nbytes // 4 // n, 1)
    whole, mine = torch.full((part * n,), rank + 1.0), torch.full((part,), rank + 1.0)
    into, zero = torch.empty(part * n), torch.zeros(max(nbytes // 4, 1))
    split, gathered = list(whole.split(part)), list(into.split(part))

    def run() -> Any:
        match collective:
            case "all_reduce":
                dist.all_reduce(zero, group=group)
                return zero
            case "all_gather":
                dist.all_gather(gathered, mine, group=group)
            case "reduce_scatter":
                dist.reduce_scatter(into[:part], split, group=group)
                return into[:part]
            case "all_to_all":
                dist.all_to_all_single(into, whole, group=group)
            case "broadcast":
                dist.broadcast(whole if rank == 0 else into, 0, group=group)
                return whole if rank == 0 else into
        return into

    return run


def _line(row: dict[str, Any]) -> str:
    """A cell in words, with the claim where there is one."""
    ratio = row["gloo"] / row["unisono"]
    claim = CLAIMS.get(row["link"], {}).get(row["nbytes"]) if row["collective"] == "all_reduce" else None
    words = f"{row['collective']:15} {row['nbytes']:>9} unisono {row['unisono'] * 1e3:9.3f} ms"
    words += f" gloo {row['gloo'] * 1e3:9.3f} ms {ratio:5.2f}x" + (f" (claim {claim})" if claim else "")
    for name, ranks in row.get("profile", {}).items():
        for rank, used in enumerate(ranks):
            threads = sorted(((us, part) for part, us in used.items() if part != "packets" and us >= 1.0), reverse=True)
            parts = ", ".join(f"{part} {us:.0f}" for us, part in threads)
            total = sum(us for us, _ in threads)
            words += f"\n    {name} rank {rank}: {used['packets']:.1f} packets, {total:.0f} us: {parts}"
    return words


if __name__ == "__main__":
    main()
