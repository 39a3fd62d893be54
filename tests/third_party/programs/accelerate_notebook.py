"""A user's program, as a notebook's cells: Accelerate's notebook_launcher. Arguments: backend, port, file."""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator, notebook_launcher
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train(backend: str, out: str) -> None:
    dist.init_process_group(backend)  # the documented line; Accelerate takes the group that it finds
    accelerator = Accelerator(cpu=True)
    set_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    inputs = torch.randn(32, 4)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    values: dict[str, float] = {}
    for step, (x, y) in enumerate(data):
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        values[f"loss {step}"] = accelerator.reduce(loss.detach(), "mean").item()
    if accelerator.is_main_process:
        weights = {name: value.clone() for name, value in accelerator.unwrap_model(model).state_dict().items()}
        torch.save({"values": values, "weights": weights, "group": type(dist.group.WORLD).__name__}, out)
    accelerator.end_training()


if __name__ == "__main__":
    notebook_launcher(train, (sys.argv[1], sys.argv[3]), num_processes=2, use_port=sys.argv[2])
