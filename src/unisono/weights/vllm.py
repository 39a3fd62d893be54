"""vLLM's workers as a replica: an extension class that its ``LLM`` mixes into each worker. Imports nothing of vLLM.

    llm = LLM(model, worker_extension_cls="unisono.weights.vllm.WorkerExtension", load_format="dummy")
    llm.collective_rpc("start_weight_updates", args=("file:///run/meeting", layout_path))
    llm.collective_rpc("pull_weights")            # between two batches, when no request is under way

It rests on what vLLM documents: ``worker_extension_cls``, ``collective_rpc``, and ``load_weights`` of its models, which
takes pairs of a checkpoint's names and whole tensors, fuses and shards them itself. So every worker wants the whole of
the checkpoint's tensors, whose names and shapes are those of a saved layout. Tested with a stand-in of a worker.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unisono.weights.layout import Layout
from unisono.weights.receiver import Receiver

__all__ = ["ModelEngine", "WorkerExtension"]


class ModelEngine:
    """An `Engine` over a model that has ``load_weights``; it keeps what arrives until the version is decided.

    model: vLLM's. layout: of the checkpoint, whole, of one rank.
    """

    def __init__(self, model: Any, layout: Layout) -> None:
        self._model, self._layout = model, layout
        self._loaded: dict[str, Tensor] = {}

    def layout(self) -> Layout:
        """The checkpoint's, whatever the model has made of it."""
        return self._layout

    def load(self, bucket: Mapping[str, Tensor]) -> None:
        """Keeps copies: ``load_weights`` writes into the tensors that serve."""
        self._loaded |= {name: tensor.clone() for name, tensor in bucket.items()}

    def commit(self, version: int | None) -> None:
        """Gives the model what was loaded, or forgets it."""
        loaded, self._loaded = self._loaded, {}
        if version is not None:
            with torch.no_grad():
                self._model.load_weights(loaded.items())


class WorkerExtension:
    """Methods for ``collective_rpc``. A worker has its model as ``self.model_runner.model``."""

    model_runner: Any
    _receiver: Receiver | None = None

    def start_weight_updates(self, address: str, layout: str, name: str = "vllm") -> None:
        """Join a sender's meeting; each worker is a replica named ``name`` and its rank.

        address: the sender's. layout: path of the checkpoint's `Layout`, saved by the trainer.
        """
        rank = getattr(self, "rank", 0)
        engine = ModelEngine(self.model_runner.model, Layout.load(layout))
        self._receiver = Receiver(address, engine, name=f"{name} {rank}", group="self")

    def pull_weights(self, version: int | None = None, timeout: float | None = None) -> int:
        """`Receiver.pull`; returns the version shown. Raises what it raises, and `RuntimeError` before the start."""
        if self._receiver is None:
            raise RuntimeError("start_weight_updates has not been called on this worker")
        return int(self._receiver.pull(version, timeout=timeout).version)

    def weight_checksums(self) -> dict[str, str]:
        """`Receiver.checksums` of the version shown."""
        if self._receiver is None:
            raise RuntimeError("start_weight_updates has not been called on this worker")
        return self._receiver.checksums()

    def stop_weight_updates(self) -> None:
        """Leave the meeting; the version shown stays."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
