"""Any torch.distributed group as a transport: its own isend and irecv carry the messages.

    dist.init_process_group("gloo", ...)
    run_over(schedule, x, TorchP2P())

Data travels as bytes, so that every dtype goes over a backend that knows few. All messages of a step are posted as one
batch, which backends that want sends and receives grouped (NCCL) rely on; tensors must be on the backend's device.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from unisono.errors import PeerLostError, UnisonoError, UsageError
from unisono.transport.base import Transport, Wait, as_bytes

__all__ = ["TorchP2P"]


class TorchP2P(Transport):
    """This rank within a group (None: the default group); `rank` counts within the group.

    Raises UsageError if there is no such group or this process is not in it. Waits raise PeerLostError with the
    backend's own words if it reports a failure.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_initialized():
            raise UsageError("TorchP2P needs a process group: call torch.distributed.init_process_group first")
        rank = dist.get_rank(group)
        if rank < 0:
            raise UsageError(f"global rank {dist.get_rank()} is not in this group")
        self.rank, self.world_size = rank, dist.get_world_size(group)
        self._group = group
        self._global_ranks = [dist.get_global_rank(group, r) if group else r for r in range(self.world_size)]

    def post(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> list[Wait]:
        """Posts all messages as one batch, receives first; see `Transport.post`.

        Gloo moves a message once its receiver has announced the buffer: a send posted before the receive waits.
        """
        ops = [self._op(dist.irecv, peer, tensor) for peer, tensor in receives]
        ops += [self._op(dist.isend, peer, tensor) for peer, tensor in sends]
        if not ops:
            return []
        works = dist.batch_isend_irecv(ops)
        peers = [peer for peer, _ in (*receives, *sends)]
        if len(works) != len(ops):  # one for the whole batch
            return [self._waiter(works, peer) for peer, _ in (*sends, *receives)]
        waits = [self._waiter([work], peer) for work, peer in zip(works, peers, strict=True)]
        return waits[len(receives) :] + waits[: len(receives)]

    def _op(self, kind: Any, peer: int, tensor: torch.Tensor) -> dist.P2POp:
        if not 0 <= peer < self.world_size or peer == self.rank:
            raise UsageError(f"rank {self.rank} of {self.world_size} has no peer {peer}")
        return dist.P2POp(kind, as_bytes(tensor), self._global_ranks[peer], self._group)

    def _waiter(self, works: Sequence[Any], peer: int) -> Wait:
        def wait() -> None:
            try:
                for work in works:
                    work.wait()
            except UnisonoError:
                raise
            except RuntimeError as error:
                raise PeerLostError(f"rank {self.rank}: the message with rank {peer} failed: {error}") from error

        return wait
