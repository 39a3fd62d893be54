"""A user's program: a training loop with Accelerate. Argument: file for the values."""

import sys
import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(out: str) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    inputs = torch.randn(30, 4)  # 30 on 2 ranks in batches of 4: the last one is uneven
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    values: dict[str, float] = {}
    for epoch in range(2):
        for x, y in data:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            values[f"loss {epoch}"] = accelerator.reduce(loss.detach(), "mean").item()
        if epoch == 0:
            folder = broadcast_object_list([tempfile.mkdtemp() if accelerator.is_main_process else None])[0]
            accelerator.save_state(folder)
            accelerator.wait_for_everyone()
    after_both = [p.detach().clone() for p in model.parameters()]
    accelerator.load_state(folder)
    values["moved since"] = sum((a - b).abs().sum().item() for a, b in zip(after_both, model.parameters(), strict=True))

    with torch.no_grad():
        errors = [accelerator.gather_for_metrics((model(x) - y).abs()) for x, y in data]
    values["samples"] = float(sum(len(error) for error in errors))
    values["error"] = torch.cat(errors).mean().item()
    rank = accelerator.process_index
    values["ragged"] = accelerator.pad_across_processes(torch.ones(rank + 1), dim=0).numel()
    values["objects"] = float(sum(gather_object([rank + 1])))
    with accelerator.main_process_first():
        values["processes"] = accelerator.num_processes
    if accelerator.is_main_process:
        weights = accelerator.unwrap_model(model).state_dict()
        torch.save({"values": values, "weights": weights, "group": type(dist.group.WORLD).__name__}, out)
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
