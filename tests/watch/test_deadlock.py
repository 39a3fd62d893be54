"""The search for cycles over pages that the test writes: what is a deadlock, and what only looks like one."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from unisono.transport.process import Identity
from unisono.watch.deadlock import CycleFinder


@dataclass
class FakePage:
    """A page without a process."""

    name: str
    number: int = 0
    looks: int = 0
    needs: list[Identity] = field(default_factory=list)
    judged: tuple[int, str] = (0, "")

    def wait(self) -> tuple[int, int]:
        return self.number, self.looks

    def edges(self) -> list[Identity]:
        return self.needs

    def text(self) -> str:
        return self.name

    def set_verdict(self, wait: int, text: str) -> None:
        self.judged = (wait, text)

    def verdict(self) -> tuple[int, str]:
        return self.judged


class World:
    """Processes 1 to n, all of them in their first wait; ``edges`` says who waits for whom."""

    def __init__(self, n: int, edges: dict[int, list[int]]) -> None:
        self.pages = {Identity(k, 100 + k): FakePage(f"rank {k}", 1) for k in range(1, n + 1)}
        self.finders = {k: self._finder(k) for k in range(1, n + 1)}
        for k, needs in edges.items():
            self.page(k).needs = [Identity(there, 100 + there) for there in needs]

    def page(self, k: int) -> FakePage:
        return self.pages[Identity(k, 100 + k)]

    def _finder(self, k: int) -> CycleFinder:
        world, mine = self, self.page(k)

        class OwnPage:
            me = Identity(k, 100 + k)
            wait, verdict = mine.wait, mine.verdict

            def peer(self, identity: Identity) -> FakePage | None:
                return world.pages.get(identity)

        own: Any = OwnPage()
        return CycleFinder(own)

    def round(self, *who: int) -> dict[int, str]:
        """Everybody (or these) looks around once; what they found."""
        found = {}
        for k in who or range(1, len(self.pages) + 1):
            self.page(k).looks += 1
            found[k] = self.finders[k].check()
        return found

    def rounds(self, count: int = 8) -> dict[int, str]:
        """What was found in the end."""
        for _ in range(count):
            found = self.round()
        return found


CYCLES: dict[str, tuple[int, dict[int, list[int]], set[int]]] = {
    "pair": (2, {1: [2], 2: [1]}, {1, 2}),
    "ring of five": (5, {1: [2], 2: [3], 3: [4], 4: [5], 5: [1]}, {1, 2, 3, 4, 5}),
    "cycle and a bystander": (3, {1: [2], 2: [1], 3: [1]}, {1, 2}),
    "a collective that misses several": (3, {1: [2, 3], 2: [1], 3: []}, {1, 2}),
    "two cycles": (4, {1: [2], 2: [1], 3: [4], 4: [3]}, {1, 2, 3, 4}),
}
SOUND: dict[str, dict[int, list[int]]] = {
    "chain": {1: [2], 2: [3], 3: []},
    "diamond": {1: [2, 3], 2: [4], 3: [4], 4: []},
    "waits for nobody for certain": {1: [2], 2: [], 3: [1]},
    "waits for a stranger": {1: [2], 2: [77]},
}


@pytest.mark.parametrize("name", CYCLES)
def test_cycles_are_found_by_their_members(name: str) -> None:
    n, edges, members = CYCLES[name]
    found = World(n, edges).rounds()
    assert {k for k, words in found.items() if words} == members


@pytest.mark.parametrize("name", SOUND)
def test_what_is_no_cycle_is_left_alone(name: str) -> None:
    found = World(4, SOUND[name]).rounds(20)
    assert set(found.values()) == {""}


def test_a_cycle_is_believed_only_after_everybody_has_looked_twice_more() -> None:
    world = World(2, {1: [2], 2: [1]})
    for _ in range(10):
        assert world.round(1) == {1: ""}  # 2 has stopped looking: it may be anywhere
    found = world.rounds(5)
    assert found[1]
    assert found[1] == found[2]


def test_a_wait_that_ends_in_between_is_no_deadlock() -> None:
    world = World(2, {1: [2], 2: [1]})
    world.round()
    for number in range(2, 20):
        world.page(2).number = number  # in a new wait each time
        world.page(2).looks = 0
        assert world.round() == {1: "", 2: ""}


def test_an_edge_that_vanishes_is_no_deadlock() -> None:
    world = World(2, {1: [2], 2: [1]})
    world.round()
    world.page(2).needs = []
    assert set(world.rounds().values()) == {""}


def test_a_process_that_ends_is_no_deadlock() -> None:
    world = World(2, {1: [2], 2: [1]})
    world.round()
    del world.pages[Identity(2, 102)]
    for _ in range(10):
        assert world.round(1) == {1: ""}


def test_the_chain_names_everybody_once_and_closes() -> None:
    found = World(3, {1: [2], 2: [3], 3: [1]}).rounds()
    assert len(set(found.values())) == 1
    lines = [line.strip() for line in found[2].splitlines()[1:]]
    assert lines == ["rank 1", "which waits for", "rank 2", "which waits for", "rank 3", "which waits for", "rank 1"]
