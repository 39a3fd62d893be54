"""The meetings of a table, in order: positions are (iteration, number in the body). Never imports torch."""

from unisono.program.bind import KIND, LEFT, MEET, Table

__all__ = ["following", "passed"]


def passed(before: tuple[int, int], now: tuple[int, int], meets: int) -> list[tuple[int, int]]:
    """(iteration, meetings of the body passed in it) of the parts of a body that ran between two meetings."""
    found, (iteration, passed) = [], (before[0], before[1] + 1)
    while True:
        if passed > meets:
            iteration, passed = iteration + 1, 0
        found.append((iteration, passed))
        if (iteration, passed) == now:
            return found
        passed += 1


def following(table: Table, now: tuple[int, int]) -> tuple[int, int] | None:
    """Iteration and number, in the body, of the meeting after one; None if it is the last."""
    beyond = [row[LEFT] for row in table.rows.tolist() if row[KIND] == MEET]
    iteration, passed = now
    while iteration < table.pieces + table.lags:
        passed += 1
        if passed >= len(beyond):
            iteration, passed = iteration + 1, 0
        if iteration < table.pieces + beyond[passed]:
            return iteration, passed
    return None
