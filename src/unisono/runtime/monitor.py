"""`Monitor`: the interface by which a queue reports its calls and asks about peers.

`unisono.watch.monitor` implements it; a queue imports nothing from there. A collective that completes at once costs no
call of a method: interpreters write `CallLog`. Never imports torch.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from unisono.errors import CollectiveTimeout, PeerLostError, UnisonoError
from unisono.runtime.call_site import Site
from unisono.transport.process import Identity

if TYPE_CHECKING:
    from unisono.runtime.call import Call

__all__ = ["CallLog", "Loss", "Monitor", "Wait"]


class Loss(NamedTuple):
    """The loss of a rank: ``words`` on the rank; ``cause``: the loss that it aborted over, empty if it is the first.

    ``who`` is its process, if known.
    """

    words: str
    cause: str = ""
    who: Identity | None = None


class CallLog(NamedTuple):
    """The last collectives of this rank: no. k, counted from 1, has its place ``k % len(calls)`` in each.

    The queue writes ``calls``, interpreters write ``issue_times`` and ``end_times`` (``time.monotonic_ns``).
    """

    calls: "list[Call | None]"
    issue_times: "array[int]"
    end_times: "array[int]"


class Wait(Protocol):
    """A long wait."""

    def check(self, needs: Sequence[Identity]) -> str:
        """Publishes the processes that the wait certainly needs; returns words on a deadlock, if it is in one."""

    def end(self) -> None:
        """Ends the publication of the wait."""


class Monitor(Protocol):
    """Watches the queues of one rank in one group. ``call_id``: the number of a call, or the result of `issued`."""

    call_log: CallLog

    def issued(self, call: "Call", peer: int | None, tag: int) -> Any: ...  # noqa: D102  # a message
    def located(self, call_id: Any, site: Site) -> None: ...  # noqa: D102
    def met(
        self, call: "Call", number: int, site: Site | None, headers: bytes, meet: Callable[[], bool]
    ) -> tuple[str, bool]:
        """Compares the headers of call ``number``; returns words on a mismatch, and whether all ranks agree on it.

        ``meet`` arrives at one more meeting, and returns whether it is complete; called until it is.
        """

    def completed(self, call_id: Any, source: int) -> None: ...  # noqa: D102  # a message
    def moved(self, call: "Call", peer: int, tag: int, began: int) -> None: ...  # noqa: D102  # issued and completed
    def failed(self, error: BaseException, call_id: Any = None) -> None: ...  # noqa: D102
    def gave_up(self, error: UnisonoError) -> None: ...  # noqa: D102  # no call can follow
    def waits(self, text: Callable[[], str], site: Site) -> Wait: ...  # noqa: D102
    def loss(self, rank: int) -> Loss | None: ...  # noqa: D102  # why it will never come
    def losses(self, missing: Sequence[int]) -> list[Loss]: ...  # noqa: D102  # why a call of all ranks never ends
    def lost(self, what: str, losses: Sequence[Loss]) -> PeerLostError: ...  # noqa: D102
    def late(self, what: str, missing: Sequence[int]) -> CollectiveTimeout: ...  # noqa: D102  # what these do instead
