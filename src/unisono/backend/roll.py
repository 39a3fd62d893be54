"""The roll: who was announced for a group, before or without joining its shared memory.

Every rank writes into the store, when it makes a group, which process it is and which ranks it believes the group to
have. Whoever waits for a rank that has not joined reads there whether that rank lives, and whether it made another
group under this name or this group under another name: then some rank skipped a call of ``new_group``, or gave other
ranks, and no waiting helps.
"""

import json
from collections import defaultdict
from collections.abc import Sequence

from unisono.errors import MismatchError
from unisono.transport.process import Identity
from unisono.transport.segment import StoreLike

__all__ = ["Roll"]

_made: "defaultdict[tuple[str, tuple[int, ...]], int]" = defaultdict(int)
_lists: dict[tuple[str, str], list[int]] = {}


class Roll:
    """The announcements of one group.

    ``store`` is shared by all groups of the job, ``epoch`` tells one default group from the next over the same store,
    ``name`` is the group's name and ``names`` are its global ranks, of which this process is number ``rank``.
    """

    def __init__(self, store: StoreLike, epoch: str, name: str, names: Sequence[int], rank: int) -> None:
        self._store, self._name, self._names, self._rank = store, name, list(names), rank
        self._prefix, self._epoch = f"unisono/{epoch}", epoch
        count = _made[epoch, tuple(names)]
        _made[epoch, tuple(names)] += 1
        _lists[epoch, name] = list(names)
        self._as_list = f"{self._prefix}/list/{'-'.join(map(str, names))}/{count}"
        self._as_name = f"{self._prefix}/name/{name}"
        me = Identity.mine()
        store.set(f"{self._as_name}/{names[rank]}", json.dumps(list(names)))
        store.set(f"{self._as_list}/{names[rank]}", json.dumps([name, me.pid, me.started]))

    def identity(self, rank: int) -> Identity:
        """The process that was announced as group rank ``rank``; pid 0 if none was."""
        found = self._read(f"{self._as_list}/{self._names[rank]}")
        return Identity(found[1], found[2]) if found else Identity(0, 0)

    def check(self) -> None:
        """Raises `MismatchError` if another rank's announcements contradict this rank's."""
        if words := self.complaint():
            raise MismatchError(words)

    def complaint(self) -> str:
        """What contradicts: lists that differ under one name, or calls of ``new_group`` that were skipped."""
        me = self._names[self._rank]
        other_name, other_list = {}, {}
        for rank in self._names:
            if rank == me:
                continue
            made = self._read(f"{self._as_list}/{rank}")
            if made and made[0] != self._name:
                other_name[rank] = made[0]
            named = self._read(f"{self._as_name}/{rank}")
            if named and named != self._names:
                other_list[rank] = named
        if not other_name and not other_list:
            return ""
        lines = [f"new_group was not called alike on all ranks: rank {me} made group {self._name!r} of {self._names}"]
        for rank, name in other_name.items():
            mine = _lists.get((self._epoch, name))
            skipped = f", which here is {mine}: rank {rank} skipped that call" if mine and mine != self._names else ""
            lines.append(f"rank {rank} made a group of {self._names} as group {name!r}{skipped}")
        lines += [f"rank {rank} made group {self._name!r} of {ranks}" for rank, ranks in other_list.items()]
        return "\n  ".join(lines) + "\nEvery rank must make every group, in the same order, with the same ranks."

    def _read(self, key: str) -> list | None:  # type: ignore[type-arg]
        try:
            return json.loads(self._store.get(key)) if self._store.check([key]) else None
        except RuntimeError:  # the store has gone with its process
            return None
