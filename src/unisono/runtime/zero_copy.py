"""How ranks decide on direct access: they publish where their tensors lie, and all come to one decision.

With a call that may go from tensor to tensor every rank publishes an *handle* beside its header: where its tensor lies
in its shared memory (transport/shared_heap.py), if it lies there, whether it has mapped the memory of the peers it needs, and
whether it *speculative* that the call will go directly, and so has staged nothing for the first meeting. After that meeting
all ranks read the same handles, and so decide alike without another word:

    STAGED   some tensor is not shared, or some rank has not mapped a peer's memory: the call goes on as it began
    RETRY_STAGED    the same, but a rank has speculated in vain: the staged program begins anew, one meeting later
    DIRECT   every rank reads its peers' tensors where they lie; a last meeting lets the tensors go
    PUSHED   a broadcast in which the root, too, writes a part of the data into its peers' tensors

A rank maps what its peers handle once it has read of it (zero_copy.py), so that the first call of shared tensors is a
staged one. It speculative where the last call of its kind went directly. An handle carries the number of its meeting: an older
one, left in its place by a rank that makes none, counts for nothing.

Two words an handle: ``4 * (meeting + 1) + 2 * speculative + ready`` and ``place + 1``, 0 if the tensor is not shared.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

from unisono.runtime import words as w

if TYPE_CHECKING:
    from unisono.runtime.interpreter import Primitives

__all__ = ["DIRECT", "PUSHED", "RETRY_STAGED", "STAGED", "ZeroCopy", "zero_copy"]

STAGED, RETRY_STAGED, DIRECT, PUSHED = range(4)


class ZeroCopy(NamedTuple):
    """The functions of it, made of primitives; see interpreter.py."""

    publish: Any
    decide: Any
    abandoned: Any


def zero_copy(p: "Primitives") -> ZeroCopy:
    """The agreement of interpreters that are made of primitives."""
    words, handle_at = p.words, _handles(p)
    ready, extent = _mapping(p), _extents(p)

    @p.inner
    def publish(call: Any, control: Any, bases: Any, meeting: int) -> Any:
        """Publishes the handle of a call for its first meeting; whether this rank speculative."""
        root, rank, bounds = call[w.ROOT], control[w.RANK], words(control[w.BOUNDS], 2)
        address, nbytes = bases[0], extent(call, control, bases)
        inside = nbytes > 0 and bounds[0] <= address and address + nbytes <= bounds[1]
        mapped = ready(control, root)
        speculative = (
            call[w.SPECULATIVE] > 0 and call[w.DIRECT] > 0 and inside and (mapped if root < 0 else root == rank)
        )
        handle = words(handle_at(control, meeting, rank), 2)
        handle[0] = (meeting + 1) * 4 + (2 if speculative else 0) + (1 if mapped else 0)
        handle[1] = address - bounds[0] + 1 if inside else 0
        return speculative

    @p.inner
    def decide(call: Any, control: Any, bases: Any, meeting: int) -> int:
        """What follows from the handles at ``meeting``; peers' tensors get their bases where it is direct."""
        root, rank, size = call[w.ROOT], control[w.RANK], control[w.SIZE]
        speculated = False
        placed = able = complete = True  # those who are read; those who read; everybody's tensor
        for peer in range(size):
            handle = words(handle_at(control, meeting, peer), 2)
            there = handle[0] >> 2 == meeting + 1
            speculated = speculated or (there and handle[0] & 2 != 0)
            shared = there and handle[1] > 0
            complete = complete and shared
            if root < 0 or root == peer:
                placed = placed and shared
            if peer != root:
                able = able and there and handle[0] & 1 != 0
        possible = placed and call[w.DIRECT] > 0
        if possible and able:
            call[w.SPECULATIVE] = call[w.LARGE]
            mapped = words(control[w.MAPPED], size)
            for peer in range(size):
                at = mapped[peer] + words(handle_at(control, meeting, peer), 2)[1] - 1
                bases[control[w.PEER_INPUTS] + peer] = at
                bases[control[w.PEER_OUTPUTS] + peer] = at
            pushes = root >= 0 and complete and words(handle_at(control, meeting, root), 2)[0] & 1 != 0
            return PUSHED if pushes and call[w.PUSHED] > 0 else DIRECT
        call[w.SPECULATIVE] = 0
        if possible and (root != rank or complete) and not ready(control, root):
            control[w.UNMAPPED] = 1
        return RETRY_STAGED if speculated else STAGED

    @p.inner
    def abandoned(control: Any, number: int) -> bool:
        """Whether a peer has given up call ``number``, to whose last meeting it has come."""
        for peer in range(control[w.SIZE]):
            if words(control[w.ABANDONED_AT] + control[w.RECORD] * peer, 1)[0] == number:
                return True
        return False

    return ZeroCopy(publish, decide, abandoned)


def _handles(p: "Primitives") -> Any:
    """What tells where handles lie."""

    @p.inner
    def handle_at(control: Any, meeting: int, rank: int) -> Any:
        """Where a rank's handle for a meeting lies."""
        return control[w.HANDLES] + 64 * ((meeting & 1) * control[w.SIZE] + rank)

    return handle_at


def _mapping(p: "Primitives") -> Any:
    """What tells whether peers' memory is mapped."""
    words = p.words

    @p.inner
    def ready(control: Any, root: int) -> bool:
        """Whether the memory that this rank needs is mapped: the root's, or everybody's (root -1, or this rank)."""
        rank, size = control[w.RANK], control[w.SIZE]
        mapped = words(control[w.MAPPED], size)
        for peer in range(size):
            needed = peer != rank and (root < 0 or root in (rank, peer))
            if needed and mapped[peer] == 0:
                return False
        return True

    return ready


def _extents(p: "Primitives") -> Any:
    """What tells how much memory is offered."""
    words = p.words

    @p.inner
    def extent(call: Any, control: Any, bases: Any) -> Any:
        """Bytes of the memory from the first input block on that peers read on this rank; 0 where it does not lie
        together, or where results are written to it before peers have read it.
        """
        output, count = control[w.OUTPUT_BASE], call[w.IN_BLOCKS]
        sizes = words(call[w.IN_SIZES], count)
        total, end = 0, bases[0]
        for block in range(count):
            if call[w.LISTED] & w.INPUTS and bases[block] != end:
                return 0
            total += sizes[block]
            end += sizes[block]
        if call[w.EXCLUSIVE] > 0:
            if bases[0] == bases[output]:
                return 0
            for block in range(call[w.OUT_BLOCKS] if call[w.LISTED] & w.OUTPUTS else 0):
                if bases[0] <= bases[output + block] < end:
                    return 0
        return total

    return extent
