"""A user's program: Ignite, started by its own Parallel. Arguments: backend, port, file for the values."""

import sys

import ignite.distributed as idist
import torch
import torch.distributed as dist
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, EarlyStopping
from ignite.metrics import Accuracy, Loss
from torch import nn
from torch.utils.data import TensorDataset


def work(local_rank: int, out: str) -> None:
    torch.manual_seed(2)
    inputs = torch.randn(32, 4)
    data = idist.auto_dataloader(TensorDataset(inputs, inputs.argmax(1)), batch_size=8, shuffle=False)
    model = idist.auto_model(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.5))
    criterion = nn.CrossEntropyLoss()
    trainer = create_supervised_trainer(model, optimizer, criterion)
    evaluator = create_supervised_evaluator(model, {"accuracy": Accuracy(), "loss": Loss(criterion)})
    history: dict[str, float] = {}
    saver = DiskSaver(f"{out}.checkpoints", require_empty=False)

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine) -> None:
        evaluator.run(data)
        history.update({f"{name} {engine.state.epoch}": v for name, v in evaluator.state.metrics.items()})

    stop = EarlyStopping(2, lambda e: -e.state.epoch * trainer.state.epoch, trainer)
    evaluator.add_event_handler(Events.COMPLETED, stop)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint({"model": model}, saver))
    trainer.run(data, max_epochs=8)
    history["stopped in epoch"] = trainer.state.epoch
    history["summed"] = float(idist.all_reduce(idist.get_rank() + 1))
    history["gathered"] = float(idist.all_gather(torch.ones(2) * idist.get_rank()).sum())
    history["words"] = float(len("".join(idist.all_gather("ab" * (idist.get_rank() + 1)))))
    history["broadcast"] = float(idist.broadcast(float(idist.get_rank()), src=1))
    idist.barrier()
    if idist.get_rank() == 0:
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        torch.save({"values": history, "weights": weights, "group": type(dist.group.WORLD).__name__}, out)


def main(backend: str, port: str, out: str) -> None:
    with idist.Parallel(backend=backend, nproc_per_node=2, master_port=int(port)) as parallel:
        parallel.run(work, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
