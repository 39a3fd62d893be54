"""A user's program: Lightning's Trainer with DDP. Arguments: backend, start method, file for the values."""

import sys
import tempfile
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

GROUP = Path(tempfile.gettempdir()) / "group"


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)
        self.losses: list[float] = []

    def on_fit_start(self) -> None:  # the file, for with spawn and fork this is another process than main's
        if self.global_rank == 0:
            GROUP.write_text(type(dist.group.WORLD).__name__)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        scores = self.net(batch[0])
        self.accuracy(scores, batch[1])
        self.log("accuracy", self.accuracy)
        self.log("val_loss", nn.functional.cross_entropy(scores, batch[1]), sync_dist=True)
        # Best in epoch 1 as the mean of the ranks, in no epoch for a rank alone.
        worse = self.current_epoch + self.global_rank if self.current_epoch else 9.0
        self.log("quality", float(worse), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        gathered = self.all_gather(torch.tensor(float(self.global_rank)))
        self.log("ranks", gathered.sum(), rank_zero_only=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def loader(seed: int, shuffle: bool) -> DataLoader:
    numbers = torch.Generator().manual_seed(seed)
    inputs = torch.randn(48, 6, generator=numbers)
    return DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), batch_size=8, shuffle=shuffle)


def trainer(backend: str, start: str, epochs: int, folder: str, patience: int) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=backend, start_method=start),
        max_epochs=epochs,
        callbacks=[
            EarlyStopping("quality", patience=patience, mode="min"),
            ModelCheckpoint(folder, monitor="val_loss", save_last=True),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
    )


def main(backend: str, start: str, out: str) -> None:
    folder = tempfile.gettempdir()  # the test gives each run one of its own
    L.seed_everything(7)
    model = Classifier()
    first = trainer(backend, start, 9, folder, patience=2)
    first.fit(model, loader(1, True), loader(2, False))
    values = {f"first {name}": float(value) for name, value in first.callback_metrics.items()}

    resumed = Classifier()
    second = trainer(backend, start, 6, folder, patience=9)
    second.fit(resumed, loader(1, True), loader(2, False), ckpt_path=f"{folder}/last.ckpt", weights_only=False)
    values |= {f"second {name}": float(value) for name, value in second.callback_metrics.items()}
    if second.is_global_zero:
        weights = {name: value.detach().clone() for name, value in resumed.state_dict().items()}
        torch.save({"values": values, "weights": weights, "group": GROUP.read_text()}, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
