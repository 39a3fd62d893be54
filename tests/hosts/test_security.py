"""Strangers at the ports on which ranks listen, before and while a job runs: nothing changes, nothing ends."""

import json
import os
import random
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from hangs.job import attempt
from hosts.conftest import Network
from hosts.test_faults import Job

DESCRIPTORS = 400  # that a rank may have: strangers who could keep some more would end it


def calls(rank: int, world_size: int, folder: str) -> tuple[str, str, int]:
    """Sums until the file ``stop`` is there, and a group of its own now and then: the error, its text, the rounds."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    stop, rounds = Path(folder, "stop"), 0

    def loop() -> None:
        nonlocal rounds
        ends = False
        while not ends:
            if rounds % 100 == 0:
                pair = dist.new_group([0, 3])
                if rank in (0, 3):
                    y = torch.ones(3)
                    dist.all_reduce(y, group=pair)
                    assert y.tolist() == [2.0] * 3
                    dist.destroy_process_group(pair)
            x = torch.arange(3000.0) + rank
            x[0] = float(rank == 0 and stop.exists())
            dist.all_reduce(x)
            assert torch.equal(x[1:], 4 * torch.arange(1.0, 3000.0) + 6)
            ends, rounds = bool(x[0]), rounds + 1
            Path(folder, f"ready-{rank}").touch()

    fault = attempt(loop)
    return fault.kind, fault.text, rounds


def listening() -> list[tuple[str, int]]:
    """Where processes of this host listen."""
    found = []
    for table in ("tcp", "tcp6"):
        lines = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
        for address, _, port in (line[1].partition(":") for line in lines if line[3] == "0A"):
            number = struct.pack("=I", int(address[-8:], 16))
            found.append((socket.inet_ntoa(number) if any(number) else "127.0.0.1", int(port, 16)))
    return found


def strangers(seconds: float, least: int) -> list[int]:
    """Connects to all of them again and again, with every kind of garbage, and keeps half of the connections.

    For so long, and more than ``least`` times. Returns how many were made, and on how many ports somebody listened.
    """
    chance, kept, count, until = random.Random(1), [], 0, time.monotonic() + seconds
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    ports: set[int] = set()
    while time.monotonic() < until or count <= least:
        for host, port in listening():
            ports.add(port)
            seat = struct.pack("<q", chance.randrange(4))  # what Gloo tells its peers apart by
            garbage = (b"", bytes(64), os.urandom(64), seat, seat + os.urandom(64), b"GET / HTTP/1.1\r\n\r\n")
            with suppress(OSError):
                stranger = socket.create_connection((host, port), 0.01)
                stranger.sendall(chance.choice(garbage))
                count += 1
                if chance.random() < 0.5 and len(kept) < 4000:
                    kept.append(stranger)
                else:
                    stranger.close()
    return [count, len(ports)]


ATTACK = "import sys; from hosts.test_security import strangers; print(strangers(25.0, int(sys.argv[1])))"


def test_strangers_change_nothing(make_hosts: Callable[..., Network], tmp_path: Path) -> None:
    net = make_hosts()
    most = (DESCRIPTORS, 0)  # the store's port, on the first host, stays open
    attacks = [net.start(host, [sys.executable, "-c", ATTACK, str(count)]) for host, count in enumerate(most)]
    job = Job(net, calls, tmp_path)
    made = [json.loads(attack.end(90.0)[1]) for attack in attacks]
    assert min(ports for _, ports in made) > 2  # of each rank, and of its smaller groups
    (tmp_path / "stop").touch()
    results = job.results(60.0)
    assert [kind for kind, _, _ in results] == [""] * 4, json.dumps(results, indent=1)
    assert min(rounds for _, _, rounds in results) > 100
