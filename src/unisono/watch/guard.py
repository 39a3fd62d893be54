"""The guard: compares the calls of a group's ranks, and lists them in a table if they differ.

It works on the headers that lie next to the data, after the meeting that the call needs anyway. Equal headers, the
common case, are one comparison of bytes.
"""

import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from unisono.runtime.call import SIGNATURE, Call, Site, piece_numel, site_text
from unisono.runtime.header import read_header
from unisono.transport.board import Board
from unisono.transport.layout import CALL, GAVE_UP
from unisono.watch.peer_state import PeerState

__all__ = ["Disagreement", "compare_words", "disagreement", "table"]

_REMEMBERED = 16  # sets of headers kept per call
_TALK = 0.7  # s: how long ranks whose calls differ wait for each other's words


class Disagreement(NamedTuple):
    """The difference: the odd ranks (group ranks) and, where it needs more words, one line per finding."""

    odd: list[int]
    lines: Sequence[str] = ()


def disagreement(call: Call, headers: bytes, size: int, global_ranks: Sequence[int]) -> Disagreement | None:
    """None if the headers (``size`` of them, end to end) describe one call, else the disagreement.

    ``global_ranks`` are those of the group, for the findings.
    """
    each = len(headers) // size
    mine = [headers[r * each : (r + 1) * each] for r in range(size)]
    if headers in call.accepted:
        return None
    signatures = [m[: SIGNATURE.size] for m in mine]
    if signatures.count(signatures[0]) != size:
        usual, votes = Counter(signatures).most_common(1)[0]
        # Without a majority it is unknown which ranks are wrong.
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
                lines.append(
                    f"rank {global_ranks[a]} sends {there} elements to rank {global_ranks[b]}, "
                    f"which expects {here}{shapes}"
                )
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


def compare_words(
    board: Board, peers: PeerState, label: str, number: int, call: Call, site: Site, found: Disagreement,
    meet: Callable[[], bool],
) -> tuple[str, bool]:  # fmt: skip
    """Publishes this rank's call and meets the others, which have read the same headers of call ``number``.

    ``meet`` arrives at the next meeting, and returns whether it is complete. Returns the text for the error, and
    whether all ranks have arrived: then the group can still be used.
    """
    parity, global_ranks = (board.position[0] - 1) & 1, peers.global_ranks
    board.segment.set_text(board.rank, CALL, f"{number}\n{site_text(site)}\n{call.describe(global_ranks)}")
    unanswered, limit = [], time.monotonic() + _TALK
    while not meet():
        now = time.monotonic()
        unanswered = [rank for rank in board.missing() if now > limit or peers.loss(rank)]
        if unanswered:
            break
        board.sleep(0.1)
    else:  # who has given up before this rank came will not go on
        unanswered = [r for r in range(board.size) if r != board.rank and board.segment.state(r) == GAVE_UP]
    rows = [_row(board, rank, global_ranks, number, parity) for rank in range(board.size)]
    lines = "".join(f"\n  {line}" for line in found.lines)
    listing = table(rows, [global_ranks[r] for r in found.odd])
    text = f"the ranks of {label} disagree about call no. {number}:\n{listing}{lines}\n"
    if not unanswered:
        text += "Nothing was changed and the group can still be used; all ranks must make the same call."
        return text, True
    who = ", ".join(str(global_ranks[rank]) for rank in unanswered)
    why = "".join(f"\n  {gone.words}" for rank in unanswered if (gone := peers.loss(rank)))
    return f"{text}Rank {who} did not come to tell of it: the group can only be destroyed.{why}", False


def _row(board: Board, rank: int, global_ranks: Sequence[int], number: int, parity: int) -> tuple[int, str, str]:
    """The call and the call site of a rank: in its own words, or else from its header (in ``parity``)."""
    words = board.segment.text(rank, CALL).split("\n", 2)
    if words[0] == str(number) and len(words) == 3:
        return global_ranks[rank], words[2].replace("\n", "; "), words[1]
    start, _ = board.header_span(parity, rank)
    header = read_header(board.segment.raw[start : start + SIGNATURE.size + 16 * board.size])
    return global_ranks[rank], header.describe(global_ranks) if header else "(no word from it)", ""
