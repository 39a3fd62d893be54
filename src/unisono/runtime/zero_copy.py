"""Zero-copy: ranks publish where their tensors lie, and all of them decide alike whether to read them there.

With a call that may be zero-copy every rank publishes a *handle* beside its header: the place of its tensor in its
shared heap (transport/shared_heap.py), whether it has mapped the heaps of the peers that it needs, and whether it runs
*speculatively*: it expects direct access, and has staged nothing for the first meeting. After that meeting all ranks
read the same handles, so they come to the same decision without another message:

    STAGED        a tensor is not shared, or a heap is not mapped: the call goes on as it began
    RETRY_STAGED  the same, but a rank has speculated in vain: the staged program starts again, one meeting later
    DIRECT        every rank reads its peers' tensors where they lie; a last meeting releases the tensors
    PUSHED        a broadcast in which the root, too, writes a part of the data into its peers' tensors

A rank maps the heaps of its peers once it has read their handles (transport/peer_mappings.py), so that the first call
on shared tensors is a staged one. It speculates if the last call of its kind was direct. A handle carries the number
of its meeting: an older one, left by a call that publishes none, is ignored.

A handle is two words: ``4 * (meeting + 1) + 2 * speculative + mapped`` and ``offset + 1``, 0 if the tensor is not
shared.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

from unisono.runtime import words as w

if TYPE_CHECKING:
    from unisono.runtime.interpreter import Primitives

__all__ = ["DIRECT", "PUSHED", "RETRY_STAGED", "STAGED", "ZeroCopy", "zero_copy"]

STAGED, RETRY_STAGED, DIRECT, PUSHED = range(4)


class ZeroCopy(NamedTuple):
    """The steps of the decision, built from primitives; see interpreter.py."""

    publish: Any
    decide: Any
    aborted: Any


def zero_copy(p: "Primitives") -> ZeroCopy:
    """Builds them for the interpreters that use these primitives."""
    words, handle_at = p.words, _handles(p)
    peers_mapped, extent = _mapped_peers(p), _extents(p)

    @p.inner
    def publish(call: Any, control: Any, bases: Any, meeting: int) -> Any:
        """Publishes the handle of a call for its first meeting; returns whether this rank speculates."""
        root, rank, bounds = call[w.ROOT], control[w.RANK], words(control[w.BOUNDS], 2)
        address, nbytes = bases[0], extent(call, control, bases)
        inside = nbytes > 0 and bounds[0] <= address and address + nbytes <= bounds[1]
        mapped = peers_mapped(control, root)
        speculative = (
            call[w.SPECULATIVE] > 0 and call[w.DIRECT] > 0 and inside and (mapped if root < 0 else root == rank)
        )
        handle = words(handle_at(control, meeting, rank), 2)
        handle[0] = (meeting + 1) * 4 + (2 if speculative else 0) + (1 if mapped else 0)
        handle[1] = address - bounds[0] + 1 if inside else 0
        return speculative

    @p.inner
    def decide(call: Any, control: Any, bases: Any, meeting: int) -> int:
        """Decides by the handles at ``meeting``; sets the bases of the peers' tensors if access is direct."""
        root, rank, size = call[w.ROOT], control[w.RANK], control[w.SIZE]
        speculated = False
        placed = able = complete = True  # tensors that are read; ranks that read; all tensors
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
        if possible and (root != rank or complete) and not peers_mapped(control, root):
            control[w.UNMAPPED] = 1
        return RETRY_STAGED if speculated else STAGED

    @p.inner
    def aborted(control: Any, number: int) -> bool:
        """Returns True if a peer aborted call ``number`` after it came to its last meeting."""
        for peer in range(control[w.SIZE]):
            if words(control[w.ABORTED_AT] + control[w.RECORD] * peer, 1)[0] == number:
                return True
        return False

    return ZeroCopy(publish, decide, aborted)


def _handles(p: "Primitives") -> Any:
    """Builds ``handle_at``."""

    @p.inner
    def handle_at(control: Any, meeting: int, rank: int) -> Any:
        """The address of a rank's handle for a meeting."""
        return control[w.HANDLES] + 64 * ((meeting & 1) * control[w.SIZE] + rank)

    return handle_at


def _mapped_peers(p: "Primitives") -> Any:
    """Builds ``peers_mapped``."""
    words = p.words

    @p.inner
    def peers_mapped(control: Any, root: int) -> bool:
        """Returns True if the heaps this rank needs are mapped: the root's, or all (root -1, or this rank)."""
        rank, size = control[w.RANK], control[w.SIZE]
        mapped = words(control[w.MAPPED], size)
        for peer in range(size):
            needed = peer != rank and (root < 0 or root in (rank, peer))
            if needed and mapped[peer] == 0:
                return False
        return True

    return peers_mapped


def _extents(p: "Primitives") -> Any:
    """Builds ``extent``."""
    words = p.words

    @p.inner
    def extent(call: Any, control: Any, bases: Any) -> Any:
        """Bytes from the first input block on that peers read on this rank; 0 if the blocks are not contiguous, or if
        results overwrite them before peers have read them.
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
