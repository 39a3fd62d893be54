"""A user's program: Lightning's Trainer with synchronized batch normalization on CPU.

Arguments: backend, number of ranks, file for the values.
"""

import sys

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(backend: str, ranks: str, out: str) -> None:
    L.seed_everything(5)
    model = Model().double()
    inputs = torch.randn(32, 4, dtype=torch.float64)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(ranks),
        strategy=DDPStrategy(process_group_backend=backend),
        sync_batchnorm=int(ranks) > 1,
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # Each batch of the whole is the same, whatever the number of ranks that share it: theirs are its every n-th sample.
    trainer.fit(model, DataLoader(data, batch_size=8 // int(ranks), shuffle=False))
    if trainer.is_global_zero:
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        torch.save({"values": values, "weights": model.state_dict(), "group": type(dist.group.WORLD).__name__}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
