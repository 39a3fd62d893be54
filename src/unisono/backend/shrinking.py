"""`shrink`: the ranks that live go on in a new group, after others, or a host, are lost.

After torch.distributed.shrink_group, which is told whom to leave out and needs a C++ backend, and MPI_Comm_shrink of
MPI's ULFM, which finds the lost ones itself, as is done here. Who survives is agreed without the job's store
(survivors.py); the first that survives serves a new one, over which the new group is born as any other.
"""

import hashlib
import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from unisono.backend.group import Group, forget_failure, given
from unisono.backend.member_registry import MemberRegistry
from unisono.backend.membership import Membership
from unisono.backend.survivors import Survivors, Table
from unisono.errors import PeerLostError, UnisonoError, UsageError, first_line
from unisono.runtime.task import reentry_error
from unisono.transport.keepalive import keep_alive, sockets
from unisono.transport.process import OwnThread
from unisono.units import name_ranks

__all__ = ["shrink"]

_BIRTH = 30.0
"""Seconds that ranks which have agreed may take to make their group, and their store to be made or connected to: torch
asks the resolver for the name of each address, on both ends of a connection, 5 s where a packet is lost."""
_CONNECT = 2.0  # s that a plain connection to the new store may take
_SILENT = 5.0  # s after which a silent connection to it ends
_PAUSE = 0.02  # s between two looks whether the others have proposed anew
_LEAVING = 1.0  # s that the old groups may take, all together, to send what is left to other hosts


@contextmanager
def _giving(group: Group) -> Iterator[None]:
    given.append(group)
    try:
        yield
    finally:
        given.clear()


def shrink(
    group: dist.ProcessGroup | None = None,
    ranks_to_exclude: Sequence[int] = (),
    *,
    min_size: int = 1,
    timeout: timedelta | None = None,
) -> dist.ProcessGroup:
    """A new group of the ranks of ``group`` that live, in their old order; every one of them calls this.

    For use after `PeerLostError`. What is under way in the old group ends with an error, here and on the other ranks,
    which so get to their own call of `shrink`; then it is destroyed. If it is the default group the new one takes its
    place, all subgroups are destroyed, too, as in torch.distributed.shrink_group, and ranks are numbered anew:
    ``dist.get_rank()`` and ``dist.get_world_size()`` are those of the new group, the variables of the environment stay.
    Models in DDP and FSDP2 and device meshes are to be made anew. A subgroup is replaced alone, and its members keep
    their global ranks.

    Args:
        group: a group of unisono; None: the default group.
        ranks_to_exclude: ranks of ``group`` to leave out although they may live, such as one that is stopped; it is
            enough that one rank names them.
        min_size: of the new group. Hosts that do not reach each other each take the other for lost and go on, twice,
            unless this is more than half of the ranks.
        timeout: for all to come; None: the group's.

    Raises:
        CollectiveTimeout: ranks that live did not call this in time, or are stopped; the text names them and what they
            do. The old group is still there, so that it can be called again.
        PeerLostError: fewer than ``min_size`` ranks are left; the others have left this one out; or the new group
            could not be made, its store not being reached, say.
        UsageError: not a group of unisono in which this rank is, or ranks that it does not have.

    Source: MPI_Comm_shrink in User Level Failure Mitigation (Bland et al. 2013).

    """
    process_group, old = _asked(group)
    excluded = _excluded(old, ranks_to_exclude)
    if timeout is not None and timeout.total_seconds() <= 0:
        raise UsageError(f"shrink(timeout={timeout}): expected more than 0 s")
    _abort(old)
    default = process_group is dist.group.WORLD
    birth = _Birth(old, default)
    seconds = timeout.total_seconds() if timeout is not None else old.timeout
    survivors = birth.survivors = Survivors(_table(old), old.label, excluded, min_size, seconds, birth.port)
    try:
        survivors.agree(birth.join)
        _leave(old, default, survivors)
        return birth.replace(process_group)
    finally:
        birth.end()


def _asked(group: dist.ProcessGroup | None) -> tuple[Membership, Group]:
    """The group to shrink, as torch and as unisono know it."""
    if not dist.is_initialized():
        raise UsageError("shrink: there is no default group; it is for groups that have lost ranks")
    found: Any = dist.group.WORLD if group is None else group
    if not isinstance(found, Membership):
        raise UsageError(f"shrink: {found!r} is no group of unisono of which this rank is a member")
    if found not in dist.distributed_c10d._world.pg_map:
        raise UsageError(f"shrink: {found!r} has been destroyed, or is not known to torch.distributed")
    return found, found._group


def _excluded(old: Group, ranks: Sequence[int]) -> list[int]:
    wrong = [rank for rank in ranks if not (isinstance(rank, int) and 0 <= rank < old.size)]
    if wrong or len(set(ranks)) != len(ranks):
        raise UsageError(
            f"shrink(ranks_to_exclude={list(ranks)}): expected ranks of {old.label}, 0 to {old.size - 1}, each once"
        )
    if old.rank in ranks:
        raise UsageError(
            f"shrink(ranks_to_exclude={list(ranks)}): rank {old.rank} leaves itself out; only those that go on call it"
        )
    return list(ranks)


def _abort(old: Group) -> None:
    """Ends what is under way in the group, here and, as this rank gives it up, on its peers."""
    if not old.joined:
        return
    if old.collectives.entered() or old.messages.entered():
        raise reentry_error("shrink", old.label)
    me = old.global_ranks[old.rank]
    error = UnisonoError(f"rank {me} goes on without the ranks that are lost: it has called unisono.shrink")
    if old.collectives.failed is None:
        old.monitor.gave_up(error)
    old.collectives.close(error)
    old.messages.close(error)


def _table(old: Group) -> Table:
    """In the default group's memory: all ranks have joined that, and it is connected to all hosts."""
    world: Any = dist.group.WORLD
    place = world._group if isinstance(world, Membership) else old
    if place is old:
        old.join("shrink")
    segment = place.segment
    if segment is None:
        raise UsageError(f"shrink: this rank has left {place.label}")
    members = range(old.size) if place is old else old.global_ranks
    return Table(segment, members, place.global_ranks, old.rank, old.key)


class _Registry(MemberRegistry):
    """The registry of a group that is born among survivors: whoever waits in it looks whether the agreement holds."""

    survivors: Survivors | None = None

    def check_claim(self) -> None:
        """As the base; raises `PeerLostError`, too, if another rank is lost or has proposed anew."""
        if self.survivors is not None:
            self.survivors.check()
        super().check_claim()


class _Birth:
    """The birth of the group that takes the place of ``old``."""

    def __init__(self, old: Group, default: bool) -> None:
        self.survivors: Survivors | None = None
        self._old, self._default = old, default
        self._server: Any = None
        self._store: Any = None
        self._group: Group | None = None

    def port(self) -> int:
        """Of the store that this rank serves, from now on."""
        if self._server is None:
            try:
                self._server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=_BIRTH), wait_for_workers=False)
            except RuntimeError as error:
                words = first_line(error)
                raise UnisonoError(f"this rank can not serve a store for the ranks that are left: {words}") from error
        return int(self._server.port)

    def join(self) -> None:
        """Makes the group of those that survive. Raises what `Group.wait_for_all` raises."""
        old, survivors = self._old, self.survivors
        assert survivors is not None
        self._discard()
        ranks = survivors.ranks
        self._store = self._connect(ranks[0], *survivors.address.rsplit(" ", 1))
        names = list(range(len(ranks))) if self._default else [old.global_ranks[rank] for rank in ranks]
        label = old.label if self._default else f"group {names}, of {old.label}"
        epoch = hashlib.blake2b(f"{old.key} {survivors.mark}".encode(), digest_size=8).hexdigest()
        me = ranks.index(old.rank)
        members = _Registry(self._store, f"whole {epoch}", "default", label, names, me, counted=False)
        members.survivors = survivors
        group = self._group = Group(me, names, label, min(old.timeout, _BIRTH), members, old.options)
        group.wait_for_all()
        members.survivors, group.timeout = None, old.timeout

    def _connect(self, first: int, host: str, port: str) -> Any:
        """The new store, of rank ``first``, in a thread: torch goes on trying where that rank has died meanwhile."""
        if first == self._old.rank:
            return self._server
        assert self.survivors is not None
        found: list[Any] = []
        thread = OwnThread(target=lambda: found.append(_opened(host, int(port))), name="unisono connects", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(_PAUSE)
            self.survivors.check()
        if isinstance(found[0], Exception):
            name = self._old.global_ranks[first]
            raise PeerLostError(
                f"the store that rank {name} serves for the ranks that are left, at {host}, port {port}, can not be "
                f"reached ({first_line(found[0])}); ports above 1023 must be open between the hosts"
            ) from found[0]
        return found[0]

    def _discard(self) -> None:
        if self._group is not None:
            self._group.flush = _LEAVING
            self._group.close("has agreed on another group", failing=True)
            self._group = None

    def end(self) -> None:
        """Leaves what was made and not given to torch, and drops the rest."""
        self._discard()
        self._store = self._server = self.survivors = None

    def replace(self, process_group: Membership) -> dist.ProcessGroup:
        """Gives torch the new group in the place of the old one."""
        group, timeout, self._group = self._group, process_group._timeout, None
        assert group is not None
        backend, options = dist.get_backend(process_group), group.options
        limit = group.timeout if math.isfinite(group.timeout) else _BIRTH
        self._store.set_timeout(timedelta(seconds=limit))
        if self._default:
            dist.destroy_process_group()
            with _giving(group):
                dist.init_process_group(
                    backend, store=self._store, rank=group.rank, world_size=group.size, timeout=timeout,
                    pg_options=options,
                )  # fmt: skip
            return cast("dist.ProcessGroup", dist.group.WORLD)
        make: Callable[..., Any] = dist.new_group
        names, order = group.global_ranks, {}
        if names != sorted(names):
            order = {"sort_ranks": False}
        description = process_group.group_desc
        dist.destroy_process_group(process_group)
        with _giving(group):
            made: dist.ProcessGroup = make(
                names, timeout, backend, options, use_local_synchronization=True, group_desc=description, **order
            )
        return made


def _opened(host: str, port: int) -> Any:
    """A store, or why it can not be reached. A plain connection comes first: torch's store logs pages where it fails.

    A host that is cut off later ends the calls under way: by itself the store would wait for ever.
    """
    try:
        socket.create_connection((host, port), _CONNECT).close()
        store = TCPStore(host, port, None, False, timedelta(seconds=_BIRTH), wait_for_workers=False)
        keep_alive(sockets(port), _SILENT)
        return store
    except (OSError, RuntimeError) as error:
        return error


def _leave(old: Group, default: bool, survivors: Survivors) -> None:
    """Leaves the old group and, if it is the default one, all subgroups."""
    lost = name_ranks([old.global_ranks[rank] for rank in survivors.lost]) if survivors.lost else "nobody"
    why, deadline = f"goes on in another group, without {lost} (unisono.shrink)", time.monotonic() + _LEAVING
    every = [each._group for each in dist.distributed_c10d._world.pg_map if isinstance(each, Membership)]
    for each in every if default else [old]:
        each.flush = max(0.0, deadline - time.monotonic())
        each.close(why, failing=True)
    forget_failure()
