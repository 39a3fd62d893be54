"""A user's program: Lightning's Fabric with DDP. Arguments: backend, file for the values."""

import sys
import tempfile

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(backend: str, out: str) -> None:
    strategy = DDPStrategy(process_group_backend=backend)
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(5)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    inputs = torch.randn(24, 4)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    data = fabric.setup_dataloaders(data)
    values: dict[str, float] = {}
    for step, (x, y) in enumerate(data):
        with fabric.no_backward_sync(model, enabled=step % 2 == 0):
            loss = nn.functional.mse_loss(model(x), y)
            fabric.backward(loss)
        if step % 2:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        values[f"loss {step}"] = float(fabric.all_reduce(loss.detach(), reduce_op="mean"))
    rank = fabric.global_rank
    values["gathered"] = float(fabric.all_gather(torch.tensor([rank, 7])).sum())
    values["summed"] = float(fabric.all_reduce(torch.tensor(rank + 1), reduce_op="sum"))
    values["broadcast"] = float(fabric.broadcast({"from": rank}, src=1)["from"])
    with fabric.rank_zero_first():
        values["ranks"] = fabric.world_size
    path = fabric.broadcast(f"{tempfile.gettempdir()}/fabric.ckpt")
    fabric.save(path, {"model": model, "optimizer": optimizer})
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    module[0].weight.data.zero_()
    fabric.load(path, {"model": model, "optimizer": optimizer})
    fabric.barrier()
    values["restored"] = float(torch.equal(weights["0.weight"], module[0].weight))
    if fabric.is_global_zero:
        torch.save({"values": values, "weights": weights, "group": type(dist.group.WORLD).__name__}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
