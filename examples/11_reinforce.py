"""Reinforcement learning on sums modulo 10: two generators sample, a trainer learns and pushes its weights.

Each question gets eight answers; the advantage of one is its reward relative to theirs, as in GRPO (Shao et al. 2024).

python examples/11_reinforce.py          (--fsdp: two trainer ranks, the policy sharded over them)
"""

import multiprocessing
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import nn
from torch.distributed.fsdp import fully_shard

from unisono import weights

STEPS, QUESTIONS, ANSWERS, GENERATORS = 60, 50, 8, 2


def make_policy(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    return nn.Sequential(nn.Embedding(20, 16), nn.Flatten(), nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 10))


def generator(number: int, folder: str, samples: Any) -> None:
    policy = make_policy(100 + number)
    with weights.Receiver(f"file://{folder}/meeting", policy, name=f"generator {number}") as receiver:
        for step in range(1, STEPS + 1):
            receiver.pull(step)
            questions = (torch.randint(10, (QUESTIONS, 2)) + torch.tensor([0, 10])).repeat_interleave(ANSWERS, 0)
            with receiver.hold() as version, torch.no_grad():
                answers = policy(questions).softmax(1).multinomial(1)
            right = answers == questions.sum(1, keepdim=True) % 10
            samples.put((version, torch.cat([questions, answers, right], dim=1).numpy()))


def trainer(rank: int, world_size: int, folder: str, queues: list[Any], curve: Any) -> None:
    policy = make_policy(0)
    if world_size > 1:
        dist.init_process_group("unisono", init_method=f"file://{folder}/ranks", rank=rank, world_size=world_size)
        fully_shard(policy, mesh=dist.device_mesh.init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    with weights.Sender(f"file://{folder}/meeting", policy, receivers=GENERATORS) as sender:
        for _ in range(STEPS):
            report = sender.push()
            versions, tables = zip(*(queue.get(timeout=60) for queue in queues[rank::world_size]), strict=True)
            questions, answers, rewards = torch.cat([*map(torch.from_numpy, tables)]).split([2, 1, 1], dim=1)
            groups = rewards.float().view(-1, ANSWERS)
            advantage = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-3)
            optimizer.zero_grad()
            (-advantage.flatten() * policy(questions).log_softmax(1).gather(1, answers).flatten()).mean().backward()
            optimizer.step()
            if rank == 0 and report.version % 20 == 0:
                print(f"step {report.version}: samples of {versions}, reward {groups.mean():.2f}", flush=True)
            curve.put(float(groups.mean()) if rank == 0 else None)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    context, folder = multiprocessing.get_context("forkserver"), tempfile.mkdtemp()
    trainers = 2 if "--fsdp" in sys.argv else 1
    context.set_forkserver_preload(["unisono.weights", "torch._dynamo", "torch.distributed.fsdp", "matplotlib.figure"])
    queues, told = [context.Queue() for _ in range(GENERATORS)], context.Queue()
    jobs = [context.Process(target=trainer, args=(i, trainers, folder, queues, told)) for i in range(trainers)]
    jobs += [context.Process(target=generator, args=(i, folder, queues[i])) for i in range(GENERATORS)]
    for job in jobs:
        job.start()
    curve = [reward for _ in range(STEPS * trainers) if (reward := told.get(timeout=100)) is not None]
    print(f"reward: {sum(curve[:5]) / 5:.2f} in the first five steps, {sum(curve[-5:]) / 5:.2f} in the last five")
    (figure := Figure()).add_subplot(xlabel="step", ylabel="reward").plot(curve)
    figure.savefig("reinforce.png")
