"""One rank holds weights and optimizer, workers push gradients to it and pull weights.

    server = ParameterServer(model, optimizer)     # rank 0             (Li et al. 2014, Parameter Server)
    server.serve()                                 # until all workers have left
    ---
    with PsWorker(model, server=0) as worker:        # every other rank
        for batch in batches:
            worker.pull()
            loss_of(model(batch)).backward()
            worker.push()

The classical alternative to all_reduce: workers never meet, so a slow one need not hold up the others (`staleness`),
but every byte passes through one rank: (n-1) gradients in and (n-1) times the weights out per round, where a ring moves
2 (n-1)/n gradients per rank. Messages come from any source and carry tags, which NCCL has not: use a CPU group.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from parameter_server.clocks import Clocks
from unisono.errors import UnisonoError, UsageError
from unisono.parallel.agreement import check_structure

__all__ = ["ParameterServer", "PsWorker", "Report"]

PUSH, PULL, LEAVE = 0, 1, 2
HEADER, GRADIENT, WEIGHTS = 101, 102, 103  # tags: a group may carry other messages beside these


@dataclass
class Report:
    """What a server did: optimizer steps, payload bytes, and for each gradient how many steps old its weights were."""

    steps: int = 0
    received_nbytes: int = 0
    sent_nbytes: int = 0
    ages: list[int] = field(default_factory=list)


class ParameterServer:
    """The rank with the weights. All ranks of the group build a server or a worker, together.

    Args:
        module: its parameters are the weights, of one dtype, on the CPU; buffers do not travel.
        optimizer: over these parameters.
        workers: ranks, default all others of the group. This rank may be one of them: then serve `in_thread` and give
            its PsWorker this server and a module of its own.
        group: default all ranks.
        staleness: None is synchronous, one optimizer step for the mean of all workers' gradients (weighted by the
            counts pushed). A number applies each gradient as it comes, a step each, and lets a worker be so many pushes
            ahead of the slowest.

    Raises UsageError on every rank for a wrong line-up, MismatchError on every rank for other parameters.

    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        workers: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        staleness: int | None = None,
    ) -> None:
        self.module, self.optimizer, self.group = module, optimizer, group
        self.rank = dist.get_rank()
        others = [rank for rank in dist.get_process_group_ranks(group) if rank != self.rank]
        self.workers = others if workers is None else sorted(workers)
        _line_up(module, group, {"server": self.rank, "workers": self.workers, "staleness": staleness})
        self.report = Report()
        self._weights = list(module.parameters())
        self._clocks = Clocks(self.workers, staleness)
        self._pushed: dict[int, tuple[float, Tensor]] = {}
        self._pulling: list[int] = []
        self._pulled_at = dict.fromkeys(self.workers, 0)
        self._granted: Tensor | None = None
        self._changed = threading.Condition()
        self._failure: BaseException | None = None

    def serve(self) -> Report:
        """Answer the workers until all have left; the module then holds the final weights."""
        here = self.rank in self.workers
        remote = len(self.workers) - here
        header = torch.empty(2, dtype=torch.float64)
        while remote:
            worker = dist.recv(header, group=self.group, tag=HEADER)
            kind, count = int(header[0]), float(header[1])
            gradient = torch.empty_like(self._flat()) if kind == PUSH else None
            if gradient is not None:
                dist.recv(gradient, worker, self.group, GRADIENT)
                self.report.received_nbytes += gradient.nbytes
            self.take(worker, kind, count, gradient)
            remote -= kind == LEAVE
        if here:
            with self._changed:
                self._changed.wait_for(lambda: not self._clocks.pushes)
        return self.report

    @contextmanager
    def in_thread(self) -> Iterator[Self]:
        """Serve in a thread while the block runs, and until all workers have left; raises what the thread raised."""
        thread = threading.Thread(target=self._serve_and_tell, name="parameter-server", daemon=True)
        thread.start()
        yield self
        thread.join()
        if self._failure is not None:
            raise self._failure

    def take(self, worker: int, kind: int, count: float, gradient: Tensor | None) -> None:
        """One message of a worker, and all answers that are due after it; called by `serve` and by a PsWorker here."""
        with self._changed:
            if kind == PUSH:
                assert gradient is not None
                self._push(worker, count, gradient)
            elif kind == PULL:
                self._pulling.append(worker)
            else:
                self._clocks.leave(worker)
            last = bool(self._pushed) and not self._clocks.pushes  # of a round that those who left did not finish
            if self._clocks.staleness is None and (self._clocks.round_is_complete() or last):
                self._step_together()
            for waiting in [rank for rank in self._pulling if self._clocks.may_go_on(rank)]:
                self._pulling.remove(waiting)
                self._answer(waiting)
            self._changed.notify_all()

    def weights_here(self) -> Tensor:
        """Wait until the PsWorker on this rank may go on, then the flat weights for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._granted is not None or self._failure is not None)
            if self._failure is not None:
                raise UnisonoError(f"the server thread of rank {self.rank} has failed") from self._failure
            assert self._granted is not None
            weights, self._granted = self._granted, None
            return weights

    def _serve_and_tell(self) -> None:
        try:
            self.serve()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _push(self, worker: int, count: float, gradient: Tensor) -> None:
        self._clocks.push(worker)
        self.report.ages.append(self.report.steps - self._pulled_at[worker])
        if self._clocks.staleness is None:
            self._pushed[worker] = (count, gradient)
        else:
            self._step(gradient)

    def _step_together(self) -> None:
        """One step for the mean of a round, summed in rank order."""
        total = sum(count for count, _ in self._pushed.values())
        mean = torch.zeros_like(self._flat())
        for _, (count, gradient) in sorted(self._pushed.items()):
            mean.add_(gradient, alpha=count / total if total else 0.0)
        self._pushed.clear()
        self._step(mean)

    def _step(self, gradient: Tensor) -> None:
        for weight, piece in zip(self._weights, _pieces(gradient, self._weights), strict=True):
            weight.grad = piece
        self.optimizer.step()
        self.report.steps += 1

    def _answer(self, worker: int) -> None:
        self._pulled_at[worker] = self.report.steps
        if worker == self.rank:
            self._granted = self._flat()
        else:
            flat = self._flat()
            dist.send(flat, worker, self.group, WEIGHTS)
            self.report.sent_nbytes += flat.nbytes

    def _flat(self) -> Tensor:
        return _joined([weight.detach() for weight in self._weights])


class PsWorker:
    """A rank that computes gradients; leaves the server when its `with` block ends, also by an exception.

    `server`: its rank, or the ParameterServer itself on the rank where that serves in a thread. Raises as the server
    does, and UsageError if the module is the server's own.
    """

    def __init__(
        self, module: nn.Module, server: "int | ParameterServer", group: dist.ProcessGroup | None = None
    ) -> None:
        self.module, self.group = module, group
        self._weights = list(module.parameters())
        self._has_pushed = False  # since the last pull
        self._here = server if isinstance(server, ParameterServer) else None
        if self._here is None:
            self._server: Any = server
            _line_up(module, group, {"worker of": server})
        elif self._here.module is module:
            raise UsageError("the worker beside the server needs a module of its own: give it copy.deepcopy(module)")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._tell(LEAVE)

    @torch.no_grad()
    def pull(self) -> None:
        """Wait until this worker may go on, and bring the server's weights into the module."""
        self._tell(PULL)
        self._has_pushed = False
        if self._here is not None:
            flat = self._here.weights_here()
        else:
            flat = torch.empty_like(_joined([weight.detach() for weight in self._weights]))
            dist.recv(flat, self._server, self.group, WEIGHTS)
        for weight, piece in zip(self._weights, _pieces(flat, self._weights), strict=True):
            weight.copy_(piece)

    def push(self, count: float = 1.0) -> None:
        """Send the module's gradients, None as zeros, and forget them. `count`: their weight in a synchronous mean.

        Raises UsageError if the count is negative or not finite, or for a second push without a pull between, which no
        bound on staleness would hold up.
        """
        if not 0 <= count < float("inf"):
            raise UsageError(f"rank {dist.get_rank()} pushes a count of {count:g}, expected a finite number, 0 or more")
        if self._has_pushed:
            raise UsageError(
                f"rank {dist.get_rank()} pushes twice in a row: pull in between, or add the gradients up and push once"
            )
        self._has_pushed = True
        gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in self._weights]
        flat = _joined(gradients)
        self.module.zero_grad()
        self._tell(PUSH, count, flat)

    def _tell(self, kind: int, count: float = 0.0, gradient: Tensor | None = None) -> None:
        if self._here is not None:
            self._here.take(self._here.rank, kind, count, gradient)
            return
        dist.send(torch.tensor([kind, count], dtype=torch.float64), self._server, self.group, HEADER)
        if gradient is not None:
            dist.send(gradient, self._server, self.group, GRADIENT)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """(numel,): a copy of all of them, one after the other."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _pieces(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of flat (numel,) in the shapes of `like`."""
    parts = torch.split(flat, [tensor.numel() for tensor in like])
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _line_up(module: nn.Module, group: dist.ProcessGroup | None, role: dict[str, Any]) -> None:
    """Compare what the ranks are to each other, and their models; every rank raises the same error."""
    check_structure(module.named_parameters(), group)
    roles: list[Any] = [None] * dist.get_world_size(group)
    dtypes = sorted({str(weight.dtype) for weight in module.parameters()})
    dist.all_gather_object(roles, role, group)
    members = dist.get_process_group_ranks(group)
    servers = [rank for rank, other in zip(members, roles, strict=True) if "server" in other]
    if len(servers) != 1:
        raise UsageError(f"ranks {servers} of {members} are parameter servers, expected one")
    chief = roles[members.index(servers[0])]
    built = {rank: other["worker of"] for rank, other in zip(members, roles, strict=True) if "worker of" in other}
    expected = [rank for rank in chief["workers"] if rank != servers[0]]
    if not chief["workers"] or sorted(built) != expected:
        raise UsageError(f"server {servers[0]} expects workers {chief['workers']}, but workers are {sorted(built)}")
    if wrong := {rank: to for rank, to in built.items() if to != servers[0]}:
        raise UsageError(f"workers name another server than rank {servers[0]}: {wrong} (worker: server)")
    if chief["staleness"] is not None and chief["staleness"] < 0:
        raise UsageError(f"staleness is {chief['staleness']}, expected None (synchronous) or 0 and more pushes")
    if len(dtypes) != 1:
        raise UsageError(f"the parameters have dtypes {', '.join(dtypes) or 'none'}, expected one for all")
