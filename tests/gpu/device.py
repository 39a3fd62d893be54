"""Runs the text of generated kernels on a CPU: all ranks and blocks at once, in a random order of their accesses.

The module's text is executed with stand-ins for ``triton`` and ``triton.language``, whose values are torch tensors.
Every block of every rank is a thread; only the one that holds the turn runs, and before each access to memory, each
flag raised and each look at a flag the turn goes to a thread chosen at random. What is proved so is the text itself:
addresses, masks, the order of loads and stores, meetings, halves and counters.
"""

import random
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from unisono.gpu.layout import COUNTERS, FLAGS, HALF_NBYTES, ROWS, STAGE, TAKEN

__all__ = ["Device", "Number", "Pointers", "Space", "Stuck", "Unstaged"]

_local = threading.local()
Launch = tuple[str, int, int, Sequence[int]]
"""A launch of messages: the kernel's name, BLOCK, blocks, arguments."""


class Stuck(Exception):
    """No block can go on."""


class Unstaged(Exception):
    """A block reads staging memory that nothing has written."""


class Turns:
    """Hands the turn from thread to thread at random; one runs at a time."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.error = chance, None  # type: ignore[var-annotated]
        self.living: list[int] = []
        self.turn: list[threading.Semaphore] = []
        self.idle = 0  # looks at flags since something happened

    def step(self, moved: bool = True) -> None:
        """Called before each access: another thread may run first, for long at times."""
        self.idle = 0 if moved else self.idle + 1
        if self.idle > 400 * len(self.living):
            self.fail(Stuck())
        if not moved or self.chance.random() < 0.3:
            chosen = self.chance.choice(self.living)
            if chosen != _local.number:
                self.turn[chosen].release()
                self.turn[_local.number].acquire()
        if self.error is not None:
            raise Stuck

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error
        for turn in self.turn:
            turn.release()

    def run(self, work: Sequence[Callable[[], None]]) -> None:
        """Runs all to their ends; raises `Stuck` if they wait for ever."""
        self.turn = [threading.Semaphore(0) for _ in work]
        self.living = list(range(len(work)))
        threads = [threading.Thread(target=self._one, args=(k, f), daemon=True) for k, f in enumerate(work)]
        for thread in threads:
            thread.start()
        self.turn[self.chance.choice(self.living)].release()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error

    def _one(self, number: int, f: Callable[[], None]) -> None:
        _local.number = number
        self.turn[number].acquire()
        try:
            if self.error is None:
                f()
        except Stuck:
            pass
        except BaseException as error:
            self.fail(error)
        self.living.remove(number)
        if self.living:
            self.turn[self.chance.choice(self.living)].release()


class Space:
    """Memory of one tensor, element by element; it refuses what lies outside."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat


class Pointers:
    """Addresses: of a space, in elements of its dtype; or of a workspace, by rank and byte."""

    def __init__(self, space: Any, at: Any) -> None:
        self.space, self.at = space, at

    @property
    def dtype(self) -> Any:
        class Kind:
            element_ty = self.space.flat.dtype if isinstance(self.space, Space) else None

        return Kind

    def __add__(self, more: Any) -> "Pointers":
        return Pointers(self.space, self.at + more)

    def to(self, kind: "PointerType") -> "Pointers":
        return Pointers(Space(self.space.flat.view(kind.dtype)), self.at * self.space.flat.itemsize)


class Slot:
    """Pointers into staging memory: a workspace, the first byte, the dtype of the elements."""

    def __init__(self, rank: int, first: int, dtype: torch.dtype, at: torch.Tensor) -> None:
        self.rank, self.first, self.dtype, self.at = rank, first, dtype, at

    def __add__(self, more: Any) -> "Slot":
        return Slot(self.rank, self.first, self.dtype, self.at + more)


class PointerType:
    """Of pointers to elements of a dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


class Word:
    """A pointer to one word in staging memory."""

    def __init__(self, rank: int, at: int) -> None:
        self.rank, self.at = rank, at


class Number(int):
    """An integer of a kernel."""

    def to(self, kind: Any) -> Any:
        """Itself, or the address that it is."""
        if not isinstance(kind, PointerType):
            return self
        rank, byte = divmod(int(self), 1 << 40)
        return Slot(rank, byte, kind.dtype, 0)

    def __sub__(self, other: Any) -> Any:
        return Number(int(self) - int(other)) if isinstance(other, int) else int(self) - other

    def __and__(self, bits: int) -> "Number":
        return Number(int(self) & bits)

    def __lshift__(self, bits: Any) -> "Number":
        return Number(int(self) << bits)

    def __add__(self, other: Any) -> Any:
        return Number(int(self) + int(other)) if isinstance(other, int) else int(self) + other

    def __mul__(self, other: Any) -> Any:
        return Number(int(self) * int(other)) if isinstance(other, int) else int(self) * other


class Device:
    """The workspaces of all ranks, and kernels to run over them."""

    def __init__(self, text: str, world_size: int, chance: random.Random) -> None:
        self.n, self.chance = world_size, chance
        self.stages: list[dict[int, torch.Tensor]] = [{} for _ in range(world_size)]
        self.words: list[dict[int, int]] = [{} for _ in range(world_size)]
        self.flags: list[dict[int, int]] = [{} for _ in range(world_size)]
        self.counters = [Space(torch.zeros(COUNTERS, dtype=torch.int32)) for _ in range(world_size)]
        self.waits = True  # False: nobody waits at a meeting
        self.kernels = self._load(text)

    def _load(self, text: str) -> dict[str, Any]:
        triton, language = ModuleType("triton"), ModuleType("triton.language")
        triton.jit = lambda function: function  # type: ignore[attr-defined]
        triton.language = language  # type: ignore[attr-defined]
        for name in ("program_id", "num_programs", "load", "store", "arange", "maximum", "minimum", "full", "div_rn"):
            setattr(language, name, getattr(self, name))
        language.sum, language.rsqrt, language.where = torch.sum, torch.rsqrt, where  # type: ignore[attr-defined]
        language.max = lambda values, axis: Number(values.max(axis)[0])  # type: ignore[attr-defined]
        language.constexpr = lambda value: value  # type: ignore[attr-defined]
        language.int64, language.int32, language.int8 = torch.int64, torch.int32, torch.int8  # type: ignore[attr-defined]
        language.pointer_type = PointerType  # type: ignore[attr-defined]
        language.debug_barrier = lambda: None  # type: ignore[attr-defined]
        language.PropagateNan = type("PropagateNan", (), {"ALL": None})  # type: ignore[attr-defined]
        kept = {name: sys.modules.get(name) for name in ("triton", "triton.language")}
        sys.modules.update({"triton": triton, "triton.language": language})
        names: dict[str, Any] = {}
        try:
            exec(compile(text, "kernels", "exec"), names)
        finally:
            for name, module in kept.items():
                if module is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = module
        names.update(arrive=self.arrive, await_peers=self.await_peers, half_of=half_of(names), slot=self.slot)
        names.update(word=self.word, gave_up=lambda mine: 0)
        names.update(raise_at=self.raise_at, await_one=self.await_one)
        return names

    # What stands in for the language

    def program_id(self, axis: int) -> Number:
        return Number(_local.block)

    def num_programs(self, axis: int) -> Number:
        return Number(_local.blocks)

    def arange(self, begin: int, end: int) -> torch.Tensor:
        return torch.arange(begin, end)

    def full(self, shape: Any, value: Any, dtype: Any) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype)

    def div_rn(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a / b

    def maximum(self, a: Any, b: Any, propagate_nan: Any = None) -> Any:
        return Number(max(a, b)) if isinstance(a, int) else torch.maximum(a, b)

    def minimum(self, a: Any, b: Any, propagate_nan: Any = None) -> Any:
        return Number(min(a, b)) if isinstance(a, int) else torch.minimum(a, b)

    def load(self, where: Any, mask: Any = None, cache_modifier: str = "", other: int = 77) -> Any:
        if isinstance(where, Pointers) and where.space == "bases":
            return Number(where.at << 40)
        self.turns.step()
        if isinstance(where, Word):
            if where.at not in self.words[where.rank]:
                raise Unstaged(f"byte {where.at} of rank {where.rank}")
            return Number(self.words[where.rank][where.at])
        if isinstance(where, Pointers) and isinstance(where.at, int):
            return Number(where.space.flat[where.at].item())
        at, keep = where.at, torch.ones_like(where.at, dtype=torch.bool) if mask is None else mask
        if isinstance(where, Slot):
            assert cache_modifier == ".cg", "staging memory must not come from the first cache"
            memory = self.stages[where.rank].get(where.first)
            if memory is None:
                raise Unstaged(f"byte {where.first} of rank {where.rank}")
            found = memory.view(where.dtype)[: len(at)].clone()
        else:
            flat = where.space.flat
            assert not bool((keep & ((at < 0) | (at >= flat.numel()))).any()), "a load outside the tensor"
            found = flat[at.clamp(0, max(0, flat.numel() - 1))].clone() if flat.numel() else at.to(flat.dtype)
        return torch.where(keep, found, torch.full_like(found, other))

    def store(self, where: Any, values: Any, mask: Any = None) -> None:
        self.turns.step()
        if isinstance(where, Word):
            self.words[where.rank][where.at] = int(values)
            return
        if isinstance(where, Pointers) and isinstance(where.at, int):
            where.space.flat[where.at] = int(values)
            return
        keep = torch.ones(len(where.at), dtype=torch.bool) if mask is None else mask
        if isinstance(where, Slot):
            memory = self.stages[where.rank].setdefault(where.first, torch.zeros(8 * len(where.at), dtype=torch.uint8))
            memory.view(where.dtype)[: len(where.at)][keep] = values.to(where.dtype)[keep]
        else:
            at = where.at[keep]
            assert not bool(((at < 0) | (at >= where.space.flat.numel())).any()), "a store outside the tensor"
            where.space.flat[at] = values[keep]

    def slot(self, half: int, offset: int, like: Pointers, offsets: torch.Tensor) -> Slot:
        rank, byte = divmod(int(half), 1 << 40)
        dtype = like.space.flat.dtype
        assert byte >= STAGE
        return Slot(rank, byte + offset * dtype.itemsize, dtype, offsets)

    def word(self, half: int, source: int) -> "Word":
        rank, byte = divmod(int(half), 1 << 40)
        return Word(rank, byte + HALF_NBYTES - 8 * (source + 1))

    def arrive(self, bases: Any, block: int, number: int, header: int, rank: int, world_size: int) -> None:
        line = FLAGS + ((number & 1) * ROWS + block) * 64
        for peer in range(world_size):
            if peer != rank:
                self.turns.step()
                self.flags[peer][line + 8 * rank] = number << 32 | header

    def await_peers(
        self,
        bases: Any,
        mine: int,
        block: int,
        number: int,
        header: int,
        record: Any,
        limit: Any,
        rank: int,
        world_size: int,
    ) -> None:
        line = FLAGS + ((number & 1) * ROWS + block) * 64
        for peer in range(world_size):
            while self.waits and peer != rank:
                flag = self.flags[rank].get(line + 8 * peer, 0)
                if flag >> 32 >= number:
                    assert flag & 0xFFFFFFFF == header, "the flag of a later call was taken for one of this call"
                    break
                self.turns.step(moved=False)

    def raise_at(self, bases: Any, offset: int, flag: int, peer: int) -> None:
        self.turns.step()
        self.flags[int(peer)][offset] = flag

    def await_one(
        self, bases: Any, mine: int, line: int, flag: int, record: Any, limit: Any, peer: int, world_size: int
    ) -> None:
        number, header = flag >> 32, flag & 0xFFFFFFFF
        while self.waits:
            came = self.flags[mine >> 40].get(line + 8 * peer, 0)
            if came >> 32 >= number:
                assert came >> 32 == number or line >= TAKEN, "a tile was overwritten before it was taken"
                assert came & 0xFFFFFFFF == header, "the flag of another message was taken for one of this one"
                return
            self.turns.step(moved=False)

    # Calls

    def launch(self, calls: Sequence[tuple[Sequence[str], int, Callable[[int], Sequence[Any]]]]) -> None:
        """As `run`, of kernels of any arguments. A call: the kernels' names by rank, blocks, a rank's arguments."""
        self.turns = Turns(self.chance)

        def work(rank: int, block: int) -> Callable[[], None]:
            def go() -> None:
                for names, blocks, arguments in calls:
                    if block < blocks:
                        _local.block, _local.blocks = block, blocks
                        self.kernels[names[rank]](*arguments(rank))

            return go

        self.turns.run([work(rank, b) for rank in range(self.n) for b in range(max(call[1] for call in calls))])

    def run_messages(self, streams: Sequence[tuple[int, Sequence[Launch]]], memory: dict[int, torch.Tensor]) -> None:
        """Runs kernels of messages: streams of a rank, each of launches one after the other.

        ``memory``: the words at every address among the arguments.
        """
        self.turns, work = Turns(self.chance), []

        def block(rank: int, launches: Sequence[Launch], ended: list[int], number: int) -> Callable[[], None]:
            def go() -> None:
                for k, (kernel, tile, blocks, arguments) in enumerate(launches):
                    while k and ended[k - 1] < launches[k - 1][2]:
                        self.turns.step(moved=False)
                    if number < blocks:
                        _local.block, _local.blocks = number, blocks
                        given = [Pointers(Space(memory[a]), 0) if a in memory else Number(a) for a in arguments[:-6]]
                        own = Pointers("bases", 0), Pointers(self.counters[rank], 0), None, Number(rank), Number(self.n)
                        self.kernels[kernel](*given, *own, None, None, tile)
                        ended[k] += 1

            return go

        for rank, launches in streams:
            ended = [0] * len(launches)
            work += [block(rank, launches, ended, number) for number in range(max(launch[2] for launch in launches))]
        self.turns.run(work)

    def run(self, calls: Sequence[tuple[Sequence[str], Sequence[Any], Sequence[Any], int, int, int, Any]]) -> None:
        """Makes calls one after the other on every rank's stream, ranks and blocks as they come.

        A call: the kernels' names by rank, inputs, outputs, elements of a block, blocks, BLOCK, ACC.
        """
        rows: list[Any] = []
        for number, (names, xs, outs, count, blocks, tile, acc) in enumerate(calls):
            header = 1000 + number

            def arguments(rank: int, xs: Any = xs, outs: Any = outs, rest: Any = (count, header, acc, tile)) -> Any:
                count, header, acc, tile = rest
                return (
                    Pointers(Space(xs[rank]), 0), Pointers(Space(outs[rank]), 0), Pointers("bases", 0),
                    Pointers(self.counters[rank], 0), None, Number(count), header, None, acc, tile,
                )  # fmt: skip

            rows.append((names, blocks, arguments))
        self.launch(rows)


def where(condition: Any, a: Any, b: Any) -> Any:
    return torch.where(condition, a, b) if isinstance(condition, torch.Tensor) else a if condition else b


def half_of(names: dict[str, Any]) -> Callable[[int, int], Number]:
    stage, half = names["STAGE"], names["HALF"]
    return lambda block, number: Number(stage + (block * 2 + (number & 1)) * half)
