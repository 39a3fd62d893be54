"""The guard: compares what the ranks of a group called, and says in a table who called what.

It works on the headers that lie next to the data, after the meeting that the call needs anyway. Equal headers, the
common case, are one comparison of bytes.
"""

import struct
from collections import Counter
from collections.abc import Sequence

from unisono.watch.call import SIGNATURE, Call, piece_numel

__all__ = ["Disagreement", "disagreement", "table"]

_REMEMBERED = 16  # sets of headers kept per call


class Disagreement:
    """What differs: the odd ranks (group ranks) and, if there is more to say, one line per finding."""

    def __init__(self, odd: Sequence[int], lines: Sequence[str] = ()) -> None:
        self.odd, self.lines = list(odd), list(lines)


def disagreement(call: Call, headers: bytes, size: int, names: Sequence[int]) -> Disagreement | None:
    """None if the headers (``size`` of them, end to end) tell of one and the same call, else what is wrong.

    ``names`` are the global ranks of the group, for the findings.
    """
    each = len(headers) // size
    mine = [headers[r * each : (r + 1) * each] for r in range(size)]
    if headers in call.accepted:
        return None
    signatures = [m[: SIGNATURE.size] for m in mine]
    if signatures.count(signatures[0]) != size:
        usual, votes = Counter(signatures).most_common(1)[0]
        # Without a majority nobody can tell who is wrong.
        return Disagreement([r for r, s in enumerate(signatures) if s != usual or 2 * votes <= size])
    if not call.sends:
        return None
    sends, expects = [], []
    for header in mine:
        numbers = struct.unpack_from(f"<{2 * size}Q", header, SIGNATURE.size)
        sends.append(numbers[:size])
        expects.append(numbers[size:])
    odd, lines = [], []
    for a in range(size):
        for b in range(size):
            if sends[a][b] != expects[b][a]:
                there, here = piece_numel(sends[a][b]), piece_numel(expects[b][a])
                shapes = " in another shape" if there == here else ""
                lines.append(f"rank {names[a]} sends {there} elements to rank {names[b]}, which expects {here}{shapes}")
                odd += [a, b]
    if lines:
        return Disagreement(sorted(set(odd)), lines[:20])
    if len(call.accepted) >= _REMEMBERED:
        call.accepted.clear()
    call.accepted.add(headers)
    return None


def table(rows: Sequence[tuple[int, str, str]], odd: Sequence[int]) -> str:
    """Lines ``rank  call  from`` with the odd ranks marked; a row is (global rank, call, call site)."""
    wide = max(len(call) for _, call, _ in rows)
    mark = {True: "->", False: "  "}
    return "\n".join(f"  {mark[rank in odd]} rank {rank}: {call:<{wide}}  {site}".rstrip() for rank, call, site in rows)
