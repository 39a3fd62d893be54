import copy
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from parameter_server import Clocks, ParameterServer, PsWorker
from torch import Tensor, nn

from parallel.models import assert_close, mlp, rows
from ranks import ranks
from unisono.errors import MismatchError, UnisonoError, UsageError

BACKENDS = ("unisono", "gloo")
STEPS = 4


def squares(out: Tensor) -> Tensor:
    return out.pow(2).sum(-1)


def weights(net: nn.Module) -> dict[str, Tensor | None]:
    return {name: weight.detach().clone() for name, weight in net.named_parameters()}


@settings(max_examples=60)
@given(st.integers(1, 5), st.one_of(st.none(), st.integers(0, 3)), st.randoms(use_true_random=False))
def test_no_worker_gets_too_far_ahead_and_somebody_can_always_go_on(workers: int, bound: Any, random: Any) -> None:
    clocks = Clocks(range(workers), bound)
    for _ in range(40):
        free = [worker for worker in clocks.pushes if clocks.may_go_on(worker)]
        assert free
        worker = random.choice(free)
        if random.random() < 0.05:
            clocks.leave(worker)
        else:
            clocks.push(worker)
        if bound is None:
            clocks.round_is_complete()
        if not clocks.pushes:
            break
        assert max(clocks.pushes.values()) - min(clocks.pushes.values()) <= (bound or 0) + 1


def test_the_rules_by_hand() -> None:
    together = Clocks([1, 2], None)
    together.push(1)
    assert (together.may_go_on(1), together.may_go_on(2), together.round_is_complete()) == (False, True, False)
    together.leave(2)
    assert (together.round_is_complete(), together.round_is_complete(), together.may_go_on(1)) == (True, False, True)
    loose = Clocks([1, 2], 2)
    allowed = []
    for _ in range(4):
        allowed.append(loose.may_go_on(1))
        loose.push(1)
    assert allowed == [True, True, True, False]


def work(rank: int, worker: PsWorker, steps: int, delay: float = 0.0) -> None:
    with worker:
        for step in range(steps):
            worker.pull()
            time.sleep(delay)
            batch = rows(rank + 1, seed=10 * step + rank)
            squares(worker.module(batch)).mean().backward()
            worker.push(len(batch))


def one_process(members: list[int], lengths: dict[int, int]) -> nn.Module:
    net = mlp()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for step in range(max(lengths.values())):
        here = [rank for rank in members if step < lengths[rank]]
        optimizer.zero_grad()
        squares(net(torch.cat([rows(rank + 1, seed=10 * step + rank) for rank in here]))).mean().backward()
        optimizer.step()
    return net


def on_ranks_synchronous(rank: int, world_size: int, beside: bool) -> list[int] | None:
    """Rank 2 serves, in a thread beside a worker or alone; worker r has r + 1 rows and r + 2 steps."""
    lengths = {peer: peer + 2 for peer in range(world_size)}
    if rank != 2:
        return work(rank, PsWorker(mlp(rank), server=2), lengths[rank])
    net = mlp()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    members = [peer for peer in range(world_size) if beside or peer != 2]
    server = ParameterServer(net, optimizer, workers=members)
    if beside:
        with server.in_thread():
            work(rank, PsWorker(copy.deepcopy(net), server), lengths[rank])
    else:
        server.serve()
    assert_close(weights(net), weights(one_process(members, lengths)))
    report = server.report
    nbytes = sum(weight.nbytes for weight in net.parameters())
    remote = sum(lengths[peer] for peer in members if peer != 2)
    assert (report.received_nbytes, report.sent_nbytes) == (remote * nbytes, remote * nbytes)
    assert report.steps == max(lengths[peer] for peer in members)
    assert set(report.ages) == {0}
    return [report.steps]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a worker"])
def test_synchronous_steps_are_those_of_one_process_on_all_rows(backend: str, beside: bool) -> None:
    assert ranks(4, backend=backend).run(on_ranks_synchronous, beside)[2] == [5]


def on_ranks_bounded(rank: int, world_size: int, staleness: int) -> tuple[list[int], float, float] | None:
    """Rank 1 is slow. Ages of gradients stay in bounds, and the loss falls."""
    torch.manual_seed(0)
    if rank:
        return work(rank, PsWorker(mlp(), server=0), 12, delay=0.004 if rank == 1 else 0.0)
    net = mlp()
    before = squares(net(rows(20))).mean().item()
    server = ParameterServer(net, torch.optim.SGD(net.parameters(), lr=0.02), staleness=staleness)
    report = server.serve()
    assert report.steps == len(report.ages) == 12 * (world_size - 1)
    return report.ages, before, squares(net(rows(20))).mean().item()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bounded_staleness(backend: str) -> None:
    for staleness in (0, 2):
        ages, before, after = ranks(3, backend=backend).run(on_ranks_bounded, staleness)[0]
        assert max(ages) <= 2 * staleness + 1  # one other worker: it is staleness ahead, or as far behind, at most
        assert after < 0.7 * before
        if staleness:
            assert max(ages) >= 1


def on_ranks_errors(rank: int, world_size: int) -> None:
    def server(**options: Any) -> ParameterServer:
        net = mlp()
        return ParameterServer(net, torch.optim.SGD(net.parameters(), lr=0.1), **options)

    with pytest.raises(UsageError, match=r"ranks \[0, 1, 2\] of \[0, 1, 2\] are parameter servers, expected one"):
        server()
    with pytest.raises(UsageError, match=r"server 0 expects workers \[1\], but workers are \[1, 2\]"):
        PsWorker(mlp(), 0) if rank else server(workers=[1])
    with pytest.raises(UsageError, match=r"another server than rank 0: \{2: 1\}"):
        PsWorker(mlp(), rank - 1) if rank else server()
    with pytest.raises(UsageError, match="staleness is -1, expected None"):
        PsWorker(mlp(), 0) if rank else server(staleness=-1)
    with pytest.raises(MismatchError, match=r"first in '0\.weight'"):
        PsWorker(mlp(widths=(5, 4)), 0) if rank else server()
    mixed = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).double())
    with pytest.raises(UsageError, match=r"dtypes torch.float32, torch.float64, expected one"):
        PsWorker(mixed, 0) if rank else ParameterServer(mixed, torch.optim.SGD(mixed.parameters(), lr=0.1))
    if rank:
        with pytest.raises(UsageError, match=f"rank {rank} pushes a count of -1"), PsWorker(mlp(), 0) as worker:
            worker.push(-1)  # the block ends by an exception: the server is told all the same
        with PsWorker(mlp(), 0) as worker:
            worker.push()
            with pytest.raises(UsageError, match=f"rank {rank} pushes twice in a row"):
                worker.push()
        return
    chief = server()
    with pytest.raises(UsageError, match="a module of its own"):
        PsWorker(chief.module, chief)
    assert chief.serve().steps == 0
    assert server().serve().steps == 1


def on_ranks_leave_early(rank: int, world_size: int) -> list[float]:
    """PsWorker 1 pushes and leaves, worker 2 leaves without a push: the one gradient of the round still counts."""
    if rank == 0:
        net = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(net.weight)
        server = ParameterServer(net, torch.optim.SGD(net.parameters(), lr=1.0))
        assert server.serve().steps == 1
        return [net.weight.item()]
    with PsWorker(nn.Linear(1, 1, bias=False), 0) as worker:
        if rank == 1:
            worker.pull()
            worker.module(torch.full((1, 1), 3.0)).sum().backward()
            worker.push()
    return []


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_last_gradient_counts(backend: str) -> None:
    assert ranks(3, backend=backend).run(on_ranks_leave_early)[0] == [-3.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_errors_are_on_every_rank(backend: str) -> None:
    ranks(3, backend=backend).run(on_ranks_errors)


class Broken(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise ZeroDivisionError("no step")


def push_and_pull(worker: PsWorker, go: Tensor) -> None:
    """Between the two, have the other worker push: the round ends in the server's thread."""
    worker.push()
    dist.send(go, 1)
    worker.pull()


def on_ranks_broken_server(rank: int, world_size: int) -> str:
    """The optimizer fails in the server's thread while the worker beside it waits."""
    go = torch.zeros(1)
    if rank:
        with PsWorker(mlp(), 0) as worker:
            dist.recv(go, 0)
            worker.push()
        return ""
    net = mlp()
    server = ParameterServer(net, Broken(net.parameters(), lr=0.1), workers=[0, 1])
    beside = PsWorker(mlp(), server)
    with pytest.raises(UnisonoError) as caught, server.in_thread():
        push_and_pull(beside, go)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    dist.recv(torch.zeros(2, dtype=torch.float64), 1, tag=101)  # the other worker's farewell
    return str(caught.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_server_thread_that_fails_tells_the_worker_beside_it(backend: str) -> None:
    assert ranks(2, backend=backend).run(on_ranks_broken_server)[0] == "the server thread of rank 0 has failed"
