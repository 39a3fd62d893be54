"""One rank of `unisono bench weights`: the same walk over cases and contenders on every rank."""

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono import weights
from unisono.bench.machine import measure_rates
from unisono.bench.result import Rates, Row
from unisono.bench.settings import Settings, cores
from unisono.bench.weights import Case, WeightSettings
from unisono.parallel.agreement import gather_objects
from unisono.weights.prediction import push_seconds

__all__ = ["measure_weights", "rank_main"]

_TIMEOUT = 300.0  # s
_WARM_UP, _LEAST_RUNS = 2, 2
_CACHE = 64 << 20  # bytes that leave little in caches, as training does between two updates
Model = dict[str, Tensor]


def rank_main(rank: int, pipe: Connection, init_method: str, settings: WeightSettings) -> None:
    """A rank that `launch_weights` has started."""
    measure_weights(settings, rank, init_method, pipe.send)
    pipe.close()
    os._exit(0)  # the backends' threads have nothing left to do


def measure_weights(settings: WeightSettings, rank: int, init_method: str, report: Callable[[Row], None]) -> None:
    """Join as ``rank``, measure every case, leave. ``report`` gets the rows, on rank 0 alone. Pins this process."""
    torch.set_num_threads(1)
    before, free = os.sched_getaffinity(0), cores()
    os.sched_setaffinity(0, {free[rank % len(free)]})
    limit = timedelta(seconds=_TIMEOUT)
    dist.init_process_group("unisono", init_method=init_method, rank=rank, world_size=settings.ranks, timeout=limit)
    try:
        walk = _Walk(settings, rank, Path(init_method.removeprefix("file://")).parent)
        walk.load()
        for case in settings.cases:
            rows = walk.rows(case) if rank < case.ranks else []
            for row in rows if rank == 0 else []:
                report(row)
            dist.barrier()
    finally:
        dist.destroy_process_group()
        os.sched_setaffinity(0, before)


class _Walk:
    """The walk of one rank. Every decision rests on numbers that all ranks of the case share."""

    def __init__(self, settings: WeightSettings, rank: int, folder: Path) -> None:
        self.settings, self.rank, self.folder = settings, rank, folder
        self.meetings = 0  # so far in this case
        self.case = settings.cases[0]
        self.groups: dict[tuple[str, int, int], Any] = {}
        self.rates: dict[tuple[int, int], Rates] = {}
        self.other_work = torch.zeros(0 if settings.parts else _CACHE // 4)
        loops = ["gloo"] if "gloo" in settings.against else []
        for case in settings.cases:
            wanted = [(backend, 0, case.ranks) for backend in ("unisono", *loops)]
            wanted += [("unisono", 0, case.senders), ("unisono", case.senders, case.ranks)] * (case.way == "reshard")
            for backend, first, end in wanted:
                if (backend, first, end) not in self.groups:
                    limit = timedelta(seconds=_TIMEOUT)
                    made = dist.new_group(list(range(first, end)), backend=backend, timeout=limit)
                    self.groups[backend, first, end] = made

    def load(self) -> None:
        """One update among all ranks: the modules and loops that it loads are not memory of the first measured one."""
        with self._update(Case(1, 1, 1, self.settings.ranks - 1), checksum=True):
            pass

    def rows(self, case: Case) -> list[Row]:
        """All contenders of one case, in the settings' order."""
        times: dict[str, list[float]] = {}
        self.meetings, self.case = 1, case
        with ExitStack() as stack:
            calls = {"weights": stack.enter_context(self._update(case, checksum=True))}
            seen = self._seen
            calls |= {name: getattr(self, f"_{name}")(case) for name in self.settings.against}
            if self.settings.parts:
                calls["unchecked"] = stack.enter_context(self._update(case, checksum=case.way == "delta"))
                one = Case(1, 1, case.senders, case.replicas, "update" if case.way != "reshard" else "reshard")
                calls["wait"] = stack.enter_context(self._update(one, checksum=False))
            for name, call in calls.items():
                first = max(self._time(case, call) for _ in range(_WARM_UP))
                times[name] = [first] if first > self.settings.seconds else []
            for _ in range(self.settings.runs):
                for name, call in calls.items():
                    if len(times[name]) < _LEAST_RUNS or sum(times[name]) < self.settings.seconds:
                        times[name].append(self._time(case, call))
        middle = {name: median(found) for name, found in times.items()}
        return [self._row(case, name, times[name], middle, seen) for name in self.settings.contenders]

    def _row(self, case: Case, name: str, times: list[float], middle: dict[str, float], seen: dict[str, Any]) -> Row:
        bound, parts, mine = 0.0, {"": 0.0}, dict[str, Any]()
        if self.settings.parts:
            bound = case.touched / 2 / case.ranks / self._rates(case).copies(case.nbytes)
            parts = _parts(case, middle, bound)
        if name == "weights":
            mine = seen | {"limit": max(parts, key=lambda part: parts[part])}
            mine["check"] = parts.get("check", 0.0) / middle["weights"]
        return Row(
            collective=case.name,
            contender=name,
            nbytes=case.nbytes,
            count=case.count * case.elements,
            dtype="float32",
            op="none",
            place="in",
            ranks=case.ranks,
            iterations=1,
            seconds=tuple(times),
            bound=bound,
            **mine,
        )

    # Contenders

    @contextmanager
    def _update(self, case: Case, checksum: bool) -> Iterator[Callable[[], object]]:
        """Senders and receivers that have met, as one call: a push, or the pull that takes part in it."""
        self.meetings += 1
        sends, place = self.rank < case.senders, f"{self.settings.cases.index(self.case)}-{self.meetings}"
        address = f"file://{self.folder}/meeting-{place}"
        group: Any = "self"
        if case.way == "reshard":
            first, end = (0, case.senders) if sends else (case.senders, case.ranks)
            group = self.groups["unisono", first, end]
        before = self._memory(case)
        model = _model(case, self.rank, sends)
        shard: Any = {"*": 0 if sends else 1} if case.way == "reshard" else None
        if sends:
            receivers = 1 if case.way == "reshard" else case.replicas
            source = weights.share(model) if case.way == "shared" else model
            made: Any = weights.Sender(
                address, source, receivers=receivers, shard=shard, group=group, checksum=checksum,
                delta=case.way == "delta", timeout=_TIMEOUT,
            )  # fmt: skip
            call = made.push
        else:
            made = weights.Receiver(
                address, model, name=f"replica {self.rank if case.way != 'reshard' else ''}", shard=shard, group=group,
                mapped=case.way == "mapped", timeout=_TIMEOUT,
            )  # fmt: skip
            call = made.pull
        with made:
            for _ in range(_WARM_UP + 1):  # the memory that a model came with is replaced by the second
                call()
            models = {"reshard": 2, "mapped": 1}.get(case.way, case.ranks) * case.nbytes
            beyond = max(0, self._memory(case) - before - models)
            wrong = self._differing(case, made.checksums()) if checksum else 0
            tuned = self.settings.tuned
            seconds = push_seconds(made.plan, tuned, case.way) if tuned is not None else None
            self._seen = {"wrong": wrong, "beyond": beyond, "predicted": seconds or 0.0}
            changed = list(model.values())[: case.changed] if sends else []

            def change_and_call() -> None:
                if changed:
                    torch._foreach_add_(changed, 1.0)
                call()

            yield change_and_call

    def _flat(self, case: Case) -> Callable[[], object]:
        flat, group = torch.full((case.count * case.elements,), 1.0), self.groups["unisono", 0, case.ranks]
        return lambda: dist.broadcast(flat, 0, group)

    def _gloo(self, case: Case) -> Callable[[], object]:
        tensors, group = list(_model(case, 0, True).values()), self.groups["gloo", 0, case.ranks]

        def loop() -> None:
            for tensor in tensors:
                dist.broadcast(tensor, 0, group)

        return loop

    # What the ranks of a case measure together

    def _time(self, case: Case, call: Callable[[], object]) -> float:
        """Seconds of a call on the slowest rank."""
        group = self.groups["unisono", 0, case.ranks]
        self.other_work.add_(1.0)  # as training does, and where contenders take turns the others
        dist.barrier(group)
        began = time.perf_counter()
        call()
        return max(self._all_numbers(case, time.perf_counter() - began))

    def _all_numbers(self, case: Case, number: float) -> list[float]:
        mine = torch.tensor([number], dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(case.ranks)]
        dist.all_gather(found, mine, self.groups["unisono", 0, case.ranks])
        return [float(each) for each in found]

    def _rates(self, case: Case) -> Rates:
        key = (case.ranks, case.nbytes)
        if key not in self.rates:
            group = self.groups["unisono", 0, case.ranks]
            settings = Settings(("broadcast",), case.ranks, most=max(64 << 10, case.nbytes))
            barrier = lambda: dist.barrier(group)  # noqa: E731
            self.rates[key] = measure_rates(settings, barrier, lambda number: self._all_numbers(case, number))
        return self.rates[key]

    def _memory(self, case: Case) -> int:
        """Resident bytes of all ranks of the case, those that are shared counted once."""
        ctypes.CDLL(None).malloc_trim(0)
        text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
        resident = next(float(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
        return round(1024 * sum(self._all_numbers(case, resident)))

    def _differing(self, case: Case, sums: dict[str, str]) -> int:
        """How many tensors have another checksum on some rank than on rank 0."""
        found = gather_objects(sums, self.groups["unisono", 0, case.ranks])
        return sum(any(other.get(name) != value for other in found) for name, value in found[0].items())


def _parts(case: Case, middle: dict[str, float], bound: float) -> dict[str, float]:
    """What an update's time is made of, as unisono/bench/weights.py has it."""
    check = max(0.0, middle["weights"] - middle["unchecked"]) if case.way != "delta" else 0.0  # it needs checksums
    copy = bound if case.way == "delta" else middle.get("flat", bound)
    parts = {"copy": copy, "check": check, "wait": middle["wait"]}
    rest = "wait" if case.way in ("shared", "mapped") else "pack"
    parts[rest] = parts.get(rest, 0.0) + max(0.0, middle["weights"] - sum(parts.values()))
    return parts


def _model(case: Case, rank: int, sends: bool) -> Model:
    """This rank's tensors: known values on senders, zeros elsewhere."""
    shape = list(case.shape)
    if case.way == "reshard":
        dim, ranks, index = (0, case.senders, rank) if sends else (1, case.replicas, rank - case.senders)
        shape[dim] = torch.empty(shape[dim], device="meta").tensor_split(ranks)[index].numel()
    value = rank + 1.0 if sends else 0.0
    return {f"layer.{index}": torch.full(shape, value + index % 7 if sends else 0.0) for index in range(case.count)}
