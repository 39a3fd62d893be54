"""Parallel training on torch.distributed's public interface: values are those of one process, on any backend.

| folder | what is split over the ranks |
| --- | --- |
| `data` | the batch |
| `tensor` | the weights of a layer |
| `expert` | the experts of a mixture, and the rows that go to them |
| `sequence` | the positions of a sequence, in attention |
| `pipeline` | the layers, into stages |
| `mesh` | all of them at once, for a transformer |

Names are imported from the folder: `from unisono.parallel.tensor import ColumnParallelLinear`.
"""

from importlib import import_module
from typing import Any

__all__ = ["data", "expert", "mesh", "pipeline", "sequence", "tensor"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}: it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
