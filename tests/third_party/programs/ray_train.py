"""A user's program: Ray Train's TorchTrainer on a local cluster, or on that of RAY_ADDRESS.

Arguments: backend, file for the values.
"""

import os
import sys
import tempfile

import ray
import torch
import torch.distributed as dist
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def work(config: dict[str, str]) -> None:
    torch.manual_seed(9)
    inputs = torch.randn(32, 4)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
    data = prepare_data_loader(data)
    model = prepare_model(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for x, y in data:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        hosts = [""] * dist.get_world_size()
        dist.all_gather_object(hosts, os.uname().nodename)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if train.get_context().get_world_rank() == 0:
                state = {"weights": model.module.state_dict(), "group": type(dist.group.WORLD).__name__, "hosts": hosts}
                torch.save(state, f"{folder}/state.pt")
                checkpoint = train.Checkpoint.from_directory(folder)
            train.report({"loss": mean.item(), "epoch": epoch}, checkpoint=checkpoint)


def main(backend: str, out: str) -> None:
    cores = {} if "RAY_ADDRESS" in os.environ else {"num_cpus": 2}
    ray.init(**cores, include_dashboard=False, log_to_driver=False, configure_logging=False)
    result = TorchTrainer(
        work,
        torch_config=TorchConfig(backend=backend),
        scaling_config=train.ScalingConfig(num_workers=2, use_gpu=False),
        run_config=train.RunConfig(storage_path=tempfile.gettempdir()),
    ).fit()
    with result.checkpoint.as_directory() as folder:
        state = torch.load(os.path.join(folder, "state.pt"))
    torch.save({"values": {"loss": result.metrics["loss"], "epoch": result.metrics["epoch"]}, **state}, out)
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
