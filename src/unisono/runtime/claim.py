"""What the ranks of `run` compare before the first message: no envelope ties a message to the call that it is of.

So a call that one rank refuses, or makes with another shape, would leave messages behind that the next call takes for
its own, and bytes would be read as another dtype. Every rank gets the claims of all and comes to the same verdict.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

from unisono.errors import MismatchError, UsageError
from unisono.schedule import Schedule
from unisono.units import name_ranks

__all__ = ["Claim", "agree", "digest"]

_REMEDIES = {
    "schedule": "one schedule",
    "tensor": "tensors of one shape and dtype",
    "op": "one reduce op",
    "deterministic": "one value of it",
}
_SHOWN = 3  # sides of a difference in one line


@dataclass(frozen=True)
class Claim:
    """One rank's arguments, in words; or its refusal, with which all of them are void."""

    schedule: str = ""
    tensor: str = ""
    op: str = ""
    deterministic: str = ""
    refusal: str = ""


@lru_cache(maxsize=512)
def digest(schedule: Schedule) -> str:
    """Eight hexadecimal digits of the schedule's text form: the same on all ranks if its transfers are."""
    return hashlib.sha256(schedule.to_text().encode()).hexdigest()[:8]


def agree(claims: Sequence[Claim], cause: Exception | None = None) -> None:
    """Raises, the same on all ranks, UsageError with the first refusal, or MismatchError with what differs.

    ``cause``: of a refusal of this process, where it is no error of unisono's.
    """
    refusals = [claim.refusal for claim in claims]
    if any(refusals):
        raise UsageError(_refusal(refusals)) from cause
    for field in fields(Claim):
        sides = _sides([getattr(claim, field.name) for claim in claims])
        if len(sides) > 1:
            listed = [f"{name_ranks(ranks)}: {words}" for words, ranks in sides.items()]
            more = [f"and {len(listed) - _SHOWN} more"] if len(listed) > _SHOWN else []
            raise MismatchError(
                f"run: the ranks differ in {field.name}: {'; '.join(listed[:_SHOWN] + more)}; nothing was moved: give "
                f"all ranks {_REMEDIES[field.name]}"
            )


def _refusal(refusals: Sequence[str]) -> str:
    """The first refusal, and who refuses."""
    sides = _sides(refusals)
    calm = sides.pop("", [])
    words, ranks = next(iter(sides.items()))
    others = [rank for rank in range(len(refusals)) if rank not in (*ranks, *calm)]
    if not others and not calm:
        return words
    as_well = f"; {name_ranks(others)} too" if others else ""
    return f"{words} (refused by {name_ranks(ranks)}{as_well})"


def _sides(words: Sequence[str]) -> dict[str, list[int]]:
    """Ranks by what they say."""
    found: dict[str, list[int]] = {}
    for rank, stated in enumerate(words):
        found.setdefault(stated, []).append(rank)
    return found
