"""What ranks say to each other when their calls differ: each its call and its line, in words, for one table on all."""

import time
from collections.abc import Callable, Sequence

from unisono.transport.board import Board
from unisono.transport.segment import CALL, GAVE_UP
from unisono.watch.account import loss
from unisono.watch.call import SIGNATURE, Call, Site, site_text
from unisono.watch.guard import Disagreement, table
from unisono.watch.header import read_header

__all__ = ["parley"]

_TALK = 0.7  # s: how long ranks whose calls differ wait for each other's words


def parley(
    board: Board, names: Sequence[int], label: str, number: int, call: Call, site: Site, found: Disagreement,
    meet: Callable[[], bool],
) -> tuple[str, bool]:  # fmt: skip
    """Meets the others, who have seen the same headers, over call ``number`` of the group ``names``.

    ``meet`` comes to the next meeting, and tells whether all have come. Returns the text for the error, and whether all
    ranks have come to tell of it: then the group can still be used.
    """
    half = (board.position[0] - 1) & 1
    board.segment.say(board.rank, CALL, f"{number}\n{site_text(site)}\n{call.describe(names)}")
    silent, limit = [], time.monotonic() + _TALK
    while not meet():
        now = time.monotonic()
        silent = [rank for rank in board.missing() if now > limit or loss(board.segment, rank, names[rank])]
        if silent:
            break
        board.sleep(0.1)
    else:  # who has given up before this rank came will not go on
        silent = [r for r in range(board.size) if r != board.rank and board.segment.state(r) == GAVE_UP]
    rows = [_row(board, rank, names, number, half) for rank in range(board.size)]
    lines = "".join(f"\n  {line}" for line in found.lines)
    text = (
        f"the ranks of {label} disagree about call no. {number}:\n{table(rows, [names[r] for r in found.odd])}{lines}\n"
    )
    if not silent:
        text += "Nothing was changed and the group can still be used; all ranks must make the same call."
        return text, True
    who = ", ".join(str(names[rank]) for rank in silent)
    why = "".join(f"\n  {gone.words}" for rank in silent if (gone := loss(board.segment, rank, names[rank])))
    return f"{text}Rank {who} did not come to tell of it: the group can only be destroyed.{why}", False


def _row(board: Board, rank: int, names: Sequence[int], number: int, half: int) -> tuple[int, str, str]:
    """What a rank called, and where: in its own words, or else as far as its header (in ``half``) tells."""
    words = board.segment.text(rank, CALL).split("\n", 2)
    if words[0] == str(number) and len(words) == 3:
        return names[rank], words[2].replace("\n", "; "), words[1]
    start, _ = board.header_span(half, rank)
    header = read_header(board.segment.raw[start : start + SIGNATURE.size + 16 * board.size])
    return names[rank], header.describe(names) if header else "(no word from it)", ""
