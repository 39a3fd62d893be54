"""Whom Lightning's launcher of multiprocessing blames: the rank that failed first."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="Lightning is not installed")

JOB = """
import os, sys, torch, lightning.pytorch as pl
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, number):
        if number == 3 and self.global_rank == 2:
            if sys.argv[2] == "raise":
                raise ValueError("bad sample 17")
            os._exit(3)
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

if __name__ == "__main__":
    strategy = DDPStrategy(process_group_backend="unisono", start_method=sys.argv[1])
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="cpu", devices=3, strategy=strategy, plugins=[LightningEnvironment()], max_epochs=1, **quiet
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(300, 4), batch_size=4))
"""
BLAMED = {
    "raise": "Process 2 terminated with the following error",
    "_exit": "process 2 terminated with exit code 3",
}


@pytest.mark.parametrize("start", ["spawn", "fork"])
@pytest.mark.parametrize("way", list(BLAMED))
def test_lightning(way: str, start: str, tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    changed = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    job = subprocess.run([sys.executable, path, start, way], env=changed, capture_output=True, text=True, timeout=100)
    assert job.returncode == 1
    assert BLAMED[way] in job.stderr, job.stderr
