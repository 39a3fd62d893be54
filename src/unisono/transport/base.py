"""A transport between ranks: post the messages of a step, then wait for each. Programs of messages run over it.

Between two ranks messages arrive in the order in which they were posted, and both ends know their sizes, so that a
transport needs no envelopes. Posting never waits for a peer: whatever order the ranks post and wait in, a schedule that
verify has proved comes to its end.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

__all__ = ["Transport", "Wait", "as_bytes"]

Wait = Callable[[], None]
"""Returns once its message is done: sent, so that its tensor may be written again; or received."""


class Transport(ABC):
    """One rank's connection to its peers.

    `rank` and `world_size` are within the transport, 0 .. world_size-1. Waits raise PeerLostError if the peer is gone
    and CollectiveTimeout if the message does not come, both naming the peer.
    """

    rank: int
    world_size: int

    @abstractmethod
    def post(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> list[Wait]:
        """Starts sending and receiving (peer, tensor), and returns one wait for each, sends first.

        Tensors are flat and contiguous, of one or more bytes; they must be left alone until their waits return. A
        receive's size in bytes is that of the send it meets.
        """

    def send(self, peer: int, tensor: torch.Tensor) -> None:
        """Sends one tensor and waits until it may be written again."""
        self.post([(peer, tensor)], [])[0]()

    def receive(self, peer: int, tensor: torch.Tensor) -> None:
        """Receives one tensor."""
        self.post([], [(peer, tensor)])[0]()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat contiguous tensor of any dtype as uint8: what every wire can carry."""
    return tensor.view(torch.uint8)
