"""A user's program: torchmetrics under torch.distributed. Arguments: backend, file for the values."""

import sys

import torch
import torch.distributed as dist
from torchmetrics import CatMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassConfusionMatrix
from torchmetrics.regression import PearsonCorrCoef


def main(backend: str, out: str) -> None:
    dist.init_process_group(backend)
    rank = dist.get_rank()
    numbers = torch.Generator().manual_seed(rank)
    found = MetricCollection({"accuracy": MulticlassAccuracy(3), "confusion": MulticlassConfusionMatrix(3)})
    auroc, pearson, mean, total, listed = BinaryAUROC(), PearsonCorrCoef(), MeanMetric(), SumMetric(), CatMetric()
    for _ in range(2 + rank):  # lists of unequal lengths, and so states of unequal sizes
        scores, labels = torch.rand(5, 3, generator=numbers), torch.randint(0, 3, (5,), generator=numbers)
        found.update(scores, labels)
        auroc.update(scores[:, 0], labels == 0)
        pearson.update(scores[:, 0], scores[:, 1])
        mean.update(scores.sum())
        total.update(rank + 1)
        listed.update(scores[: rank + 1, 0])
    values = {name: value.double().sum() for name, value in found.compute().items()}
    weights = {"confusion": found.compute()["confusion"], "listed": listed.compute()}
    for metric in (auroc, pearson, mean, total):
        values[type(metric).__name__] = metric.compute()
    values["nothing"] = CatMetric().compute() == []
    if rank == 0:
        values = {name: float(value) for name, value in values.items()}
        torch.save({"values": values, "weights": weights, "group": type(dist.group.WORLD).__name__}, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
