"""A trainer and two generators as actors of a local Ray cluster; a generator is killed and restarted by Ray.

weights_ray.py ADDRESS
"""

import os
import signal
import sys
import time
from typing import Any

import ray
import torch
from torch import nn

from unisono import weights


def make() -> nn.Module:
    torch.set_num_threads(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))


@ray.remote(num_cpus=0)
class Trainer:
    def __init__(self, address: str) -> None:
        self.model = make()
        self.sender = weights.Sender(address, self.model, receivers=2, lost="drop")

    def step(self) -> dict[str, Any]:
        torch._foreach_add_(list(self.model.state_dict().values()), 1.0)
        report = self.sender.push()
        return {"version": report.version, "receivers": report.receivers, "sums": self.sender.checksums()}

    def joined(self) -> list[str]:
        return sorted(self.sender.receivers)


@ray.remote(num_cpus=0, max_restarts=1, max_task_retries=5)
class Generator:
    def __init__(self, address: str, name: str) -> None:
        self.receiver = weights.Receiver(address, make(), name=name)
        self.receiver.follow()

    def state(self) -> dict[str, Any]:
        sums = self.receiver.checksums() if self.receiver.version is not None else {}
        return {"version": self.receiver.version, "sums": sums, "pid": os.getpid()}


def main(address: str) -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    trainer = Trainer.remote(address)
    names = ("one", "two")
    generators = [Generator.options(name=name).remote(address, name) for name in names]
    for _ in range(2):
        pushed = ray.get(trainer.step.remote())
        states = ray.get([each.state.remote() for each in generators])
        assert [(s["version"], s["sums"]) for s in states] == [(pushed["version"], pushed["sums"])] * 2
    os.kill(states[0]["pid"], signal.SIGKILL)
    end = time.monotonic() + 60
    while True:  # until Ray has restarted it, it has joined anew and a push has reached it
        pushed = ray.get(trainer.step.remote())
        found = ray.get(ray.get_actor("one").state.remote())
        if (found["version"], found["sums"]) == (pushed["version"], pushed["sums"]):
            break
        assert time.monotonic() < end, (pushed, found)
        time.sleep(0.1)
    assert found["pid"] != states[0]["pid"]
    other = ray.get(generators[1].state.remote())
    assert (other["version"], other["sums"]) == (pushed["version"], pushed["sums"])
    print(f"restarted and up to date at version {pushed['version']}: {ray.get(trainer.joined.remote())}")
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
