"""The base addresses that the words of a table name. Never imports torch."""

from dataclasses import dataclass

__all__ = ["INLINE", "Bases"]

INLINE = 3
"""Halves, even, odd, even, of the staging memory, before those of inline calls."""


@dataclass(frozen=True)
class Bases:
    """Indices into the table of base addresses of a rank among ``size``."""

    size: int

    def input(self, block: int = 0) -> int:
        """The user's input, or one tensor of several."""
        return block

    def output(self, block: int = 0) -> int:
        """The user's output, or one tensor of several."""
        return self.size + block

    @property
    def temp(self) -> int:
        """Memory of this rank alone."""
        return 2 * self.size

    def peer_input(self, rank: int) -> int:
        """The input of ``rank``, where it is mapped."""
        return 2 * self.size + 1 + rank

    def peer_output(self, rank: int) -> int:
        """The output of ``rank``, where it is mapped."""
        return 3 * self.size + 1 + rank

    @property
    def stages(self) -> int:
        """From here on the parity of the iteration counts."""
        return 4 * self.size + 1

    def stage(self, rank: int, other: int, inline: bool = False) -> int:
        """The staging memory of ``rank``: the half of the iteration's first meeting (``other`` 0), or the other.

        ``inline``: what of the counters' lines takes its place in an inline call. Rows never name it.
        """
        return self.stages + (other + INLINE * inline) * self.size + rank

    @property
    def length(self) -> int:
        """Words of the table."""
        return 4 * self.size + 1 + 2 * INLINE * self.size

    def name(self, index: int) -> str:
        """As a table's text has it."""
        n = self.size
        if index >= self.stages:
            other, rank = divmod(index - self.stages, n)
            return f"STAGE[{rank}].{('now', 'other')[other & 1]}"
        if index == self.temp:
            return "TEMP"
        kind, at = divmod(index if index < 2 * n else index - 1, n)
        return f"{('IN', 'OUT', 'PEER_IN', 'PEER_OUT')[kind]}[{at}]"
