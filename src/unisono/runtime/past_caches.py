"""Copies to shared memory: by way of the caches, or past them where these would fetch its lines from far away.

A line of staging memory, or of a ring, lies in the caches of the ranks that have read it. A plain store fetches it from
there first. Where the cores share a cache that costs little, and what is stored is read from it at once. Where they do
not, stores were five to twenty times as slow as past the caches, and reading was as fast (docs/performance.md has the
numbers). Nothing but time says which it is: a virtual machine's cores may be anywhere, and move. So every rank measures
its own copies, and decides for itself; its peers read the same bytes.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unisono.runtime.interpreter import Primitives

__all__ = ["STATE_WORDS", "staging_copy"]

STATE_WORDS = 4
"""Words of a control block that `staging_copy` keeps."""

_MEASURED = 16 << 10
"""Bytes from which a copy is measured; what is shorter takes no longer than reading the clock a few times."""
_SLOW = 256  # ns per KiB, 4 GB/s: between cores that share a cache copies took half of that at most
_SLOW_COPIES = 4  # in a row, for one may have been interrupted, or the first to touch its memory
_COPIES = 128  # until the other way is tried again


def staging_copy(p: "Primitives", known: int) -> Any:
    """Builds ``stage``, which copies to memory that peers read.

    The words of the control block from ``known`` on say for how many copies it is decided that they go past the
    caches, or, below 0, by way of them; what a KiB took, in ns, past the caches at best, and by way of them when they
    were slow; how many copies in a row were.
    """
    now, copy, copy_past = p.now, p.copy, p.copy_past
    left, past_cost, plain_cost, slow = range(known, known + STATE_WORDS)

    @p.inner
    def stage(control: Any, target: int, source: int, nbytes: int) -> None:
        """Copies ``nbytes`` between addresses; only `_MEASURED` bytes or more go past the caches."""
        if nbytes < _MEASURED:
            copy(target, source, nbytes)
            return
        past, begun = control[left], now()
        if past > 0:
            copy_past(target, source, nbytes)
        else:
            copy(target, source, nbytes)
        cost = (now() - begun) * 1024 // nbytes
        if past > 0:
            control[past_cost] = min(cost, control[past_cost])
            control[left] = past - 1
            if past == 1 and control[past_cost] * 2 > control[plain_cost]:  # memory itself is slow
                control[left] = -_COPIES
        elif past < 0:
            control[left] = past + 1
        elif cost < _SLOW:
            control[slow] = 0
        else:
            control[slow] += 1
            if control[slow] >= _SLOW_COPIES:
                control[left], control[plain_cost], control[past_cost] = _COPIES, cost, cost
                control[slow] = _SLOW_COPIES - 1  # the next plain copy decides alone

    return stage
