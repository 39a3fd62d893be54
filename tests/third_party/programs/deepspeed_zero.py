"""A user's program: DeepSpeed's ZeRO, stages 0 to 3. Arguments: backend, file for the values."""

import sys
import tempfile

import deepspeed
import torch
import torch.distributed as dist
from torch import nn


def train(stage: int, folder: str) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    torch.manual_seed(4)
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    engine, _, _, _ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    numbers = torch.Generator().manual_seed(dist.get_rank())
    values = {}
    for step in range(6):
        x = torch.randn(4, 4, generator=numbers)
        loss = nn.functional.mse_loss(engine(x), x.sum(1, keepdim=True))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        values[f"loss {step} of stage {stage}"] = mean.item()
        if step == 3:
            engine.save_checkpoint(folder, tag=f"stage{stage}")
    engine.load_checkpoint(folder, tag=f"stage{stage}")
    with deepspeed.zero.GatheredParameters(list(module.parameters()), enabled=stage == 3):
        weights = {f"{stage} {name}": value.detach().clone() for name, value in module.named_parameters()}
    engine.destroy()
    return values, weights


def main(backend: str, out: str) -> None:
    deepspeed.init_distributed(dist_backend=backend)
    values: dict[str, float] = {}
    weights: dict[str, torch.Tensor] = {}
    for stage in range(4):
        more, gained = train(stage, tempfile.gettempdir())
        values |= more
        weights |= gained
    if dist.get_rank() == 0:
        torch.save({"values": values, "weights": weights, "group": type(dist.group.WORLD).__name__}, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[-2:])
