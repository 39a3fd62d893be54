"""Training goes on from the last step in memory after a rank, or a host, is lost: DDP, or FSDP2 with --fsdp.

    python examples/12_survivors.py [--fsdp]

starts 4 ranks, two of which kill themselves on the way. With RANK set it is one rank, on any of several hosts. What a
rank of FSDP2 holds is lost with it, so after each step another rank, of another host if there is one, gets a copy.
"""

import os
import signal
import socket
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from survivors.training import Training, finish, gather

import unisono

STEPS, PAUSE = 40, float(os.environ.get("PAUSE", "0"))
DEATHS = dict(map(int, death.split(":")) for death in os.environ.get("DEATHS", "10:3 20:0").split())  # step: rank
KIND = "fsdp" if "--fsdp" in sys.argv else "ddp"


def main() -> None:
    """One rank: steps, until the loss of others ends one; then on, with those that are left."""
    dist.init_process_group("unisono")
    curve, marks, saved, training = [0.0] * STEPS, [], {}, None
    while True:
        try:
            key, wholes = 0, []
            if training is not None:  # ranks may be a step apart: on from the last that all have
                newest = torch.tensor(max(saved))
                dist.all_reduce(newest, dist.ReduceOp.MIN)
                key = int(newest)
                wholes = gather(*saved[key], [t.shape for t in training.held()])
            begun = Training(KIND, wholes)
            step, key = key // 1000, key + 1  # 1000 times the step, and how often the training has begun anew
            saved = {key: (begun.shards, begun.copies()), **({key - 1: saved[key - 1]} if wholes else {})}
            training = begun
            while step < STEPS:
                time.sleep(PAUSE)
                if DEATHS.get(step) == int(os.environ["RANK"]):
                    os.kill(os.getpid(), signal.SIGKILL)
                loss = torch.tensor(training.step(step))
                dist.all_reduce(loss, dist.ReduceOp.AVG)
                curve[step] = loss.item()
                step, key = step + 1, key + 1000
                saved = {key - 1000: saved[key - 1000], key: (training.shards, training.copies())}
            wholes = gather(*saved[key], [t.shape for t in training.held()])
            break
        except RuntimeError as error:  # of torch, not of unisono, where a call of DDP in backward has failed
            began, last = time.monotonic(), max(saved) // 1000
            unisono.shrink()
            marks.append(last)
            if dist.get_rank() == 0:
                print(f"after step {last}: {str(error).splitlines()[0]}")
                print(f"{dist.get_world_size()} ranks go on after {time.monotonic() - began:.2f} s", flush=True)
    if dist.get_rank() == 0:
        finish(KIND, curve, marks, wholes)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:  # processes of their own: a launcher such as torchrun ends all ranks of its host when one ends
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "4"}
        places = [{**os.environ, **place, "OMP_NUM_THREADS": "1", "RANK": str(rank)} for rank in range(4)]
        started = [subprocess.Popen([sys.executable, *sys.argv], env=env) for env in places]
        print("exit codes:", [process.wait() for process in started])
