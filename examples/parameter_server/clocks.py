"""Who may go on: the rules of a parameter server without its messages.

A worker's clock counts the gradients it has pushed. Synchronous: a round ends when every worker has pushed, and nobody
goes on before. Bounded staleness: a worker may be ahead of the slowest by `staleness` pushes and no more (the stale
synchronous parallel model of Ho et al. 2013); 0 keeps all in step. A worker that has left holds nobody up.
"""

from collections.abc import Iterable

__all__ = ["Clocks"]


class Clocks:
    """The clocks of the workers that are still there; `staleness` None is the synchronous rule."""

    def __init__(self, workers: Iterable[int], staleness: int | None) -> None:
        self.pushes = dict.fromkeys(workers, 0)
        self.staleness = staleness
        self.rounds = 0

    def push(self, worker: int) -> None:
        """A gradient of this worker has come."""
        self.pushes[worker] += 1

    def leave(self, worker: int) -> None:
        """This worker pushes no more."""
        del self.pushes[worker]

    def round_is_complete(self) -> bool:
        """Synchronous: whether all that are left have pushed since the last round; counts the round if so."""
        complete = bool(self.pushes) and min(self.pushes.values()) > self.rounds
        self.rounds += complete
        return complete

    def may_go_on(self, worker: int) -> bool:
        """Whether this worker may have weights now, to compute its next gradient."""
        if self.staleness is None:
            return self.pushes[worker] <= self.rounds
        return self.pushes[worker] - min(self.pushes.values()) <= self.staleness
