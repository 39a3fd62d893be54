"""Ranks that mpiexec or srun has started: their numbers, and the store where they meet. Imports torch when it meets.

torchrun sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and torch's env:// rendezvous takes them. mpiexec and srun
number their processes in variables of their own, and mpiexec does not publish where rank 0 is. Rank 0 serves a TCPStore
on a free port here; its address goes by a file where all ranks are on one host, else by an MPI broadcast (mpi4py).
Slurm lists the nodes: there the first is rank 0's, and the port comes from the job's number. Nothing is written into
the environment. MASTER_ADDR and MASTER_PORT, where they are set, count.

Sources: MPICH's hydra (Intel MPI has the same), Open MPI's and srun's manual pages.
"""

import os
import re
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from tempfile import gettempdir
from typing import Any, NamedTuple

from unisono.errors import CollectiveTimeout, UsageError
from unisono.transport.host import Host
from unisono.transport.interfaces import address_for_peers, own_addresses
from unisono.transport.mpi import load_mpi

__all__ = ["MPI_RANKS", "RankPlace", "by_scheme", "launched", "master_address", "rendezvous"]

_TORCHRUN, _SLURM, _OPEN_MPI, _HYDRA = (
    "torchrun",
    "srun (Slurm)",
    "Open MPI's mpiexec",
    "MPICH's or Intel MPI's mpiexec",
)
_VARIABLES = {
    _TORCHRUN: ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _OPEN_MPI: (
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    ),
    _HYDRA: ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _SLURM: ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}  # fmt: skip
"""Rank, world size, rank on the host, ranks of the host. In this order: mpiexec may run inside a step of Slurm."""
MPI_RANKS = tuple(_VARIABLES[name][0] for name in (_HYDRA, _OPEN_MPI))
"""The variables in which MPICH's and Open MPI's mpiexec give a process's rank."""
_MASTER = ("MASTER_ADDR", "MASTER_PORT")
_PORTS = range(10_000, 30_000)  # below those that Linux gives to outgoing connections
_CONNECT_SECONDS = 3.0
_meetings = count()  # of this process; every rank makes as many


class RankPlace(NamedTuple):
    """One rank as its launcher has numbered it; ``local_rank`` of ``local_world_size`` on its host."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def words(self) -> str:
        """For messages: ``rank 1 of 4, started by Open MPI's mpiexec``."""
        return f"rank {self.rank} of {self.world_size}, started by {self.launcher}"


def launched(environment: Mapping[str, str] = os.environ) -> RankPlace | None:
    """This process's place by its launcher's variables; None if no launcher that is known has started it.

    Raises `UsageError` if they are no numbers, or not those of a rank.
    """
    for launcher, names in _VARIABLES.items():
        if all(name in environment for name in names):
            texts = [environment[name] for name in names]
            if launcher == _SLURM:
                texts[3] = _tasks_here(texts[3], environment.get("SLURM_NODEID", "0"))
            return _place(launcher, names, texts)
    return None


def _place(launcher: str, names: tuple[str, ...], texts: list[str]) -> RankPlace:
    found = ", ".join(f"{name}={text}" for name, text in zip(names, texts, strict=True))
    try:
        place = RankPlace(launcher, *map(int, texts))
    except ValueError:
        raise UsageError(f"the variables of {launcher} should be whole numbers, but are {found}") from None
    if not (0 <= place.rank < place.world_size and 0 <= place.local_rank < place.local_world_size <= place.world_size):
        raise UsageError(f"the variables of {launcher} contradict each other: {found}")
    return place


def _tasks_here(listed: str, node: str) -> str:
    """Slurm's number of tasks on a node, out of its list for all: ``2(x3),1`` is 2, 2, 2, 1."""
    numbers: list[str] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed):
        numbers += [number] * int(times or 1)
    return numbers[int(node)] if node.isdecimal() and int(node) < len(numbers) else listed


def by_scheme(url: str, timeout: timedelta | None) -> Iterator[tuple[Any, int, int]]:
    """The rendezvous of ``init_method="launcher://"``, under torchrun too; raises `UsageError` without a launcher."""
    from torch.distributed.rendezvous import rendezvous as meet

    place = launched()
    if place is None:
        wanted = "; ".join(f"{' and '.join(names[:2])} ({launcher})" for launcher, names in _VARIABLES.items())
        raise UsageError(f"launcher:// found no launcher that it knows: it looks for {wanted}, and for local ranks")
    given = {name: int(number) for name, number in re.findall(r"[?&](rank|world_size)=(\d+)", url)}
    numbers = {"rank": place.rank, "world_size": place.world_size}
    if any(numbers[name] != number for name, number in given.items()):
        raise UsageError(f"launcher:// was given {given}, but this is {place.words}: leave them out")
    if place.launcher == _TORCHRUN:
        met: Iterator[tuple[Any, int, int]] = meet("env://", timeout=timeout or _default_timeout())
        return met
    return rendezvous(place, timeout)


def rendezvous(place: RankPlace, timeout: timedelta | None = None) -> Iterator[tuple[Any, int, int]]:
    """torch's rendezvous of the ranks of ``place``'s job: yields the store, the rank and the world size, once.

    Raises `UsageError` if there is no way to meet, with the remedy, and `CollectiveTimeout` if rank 0 does not come.
    """
    yield _meet(place, timeout or _default_timeout()), place.rank, place.world_size
    raise RuntimeError("ranks of a launcher meet once: a new rendezvous needs a new call of init_process_group")


def master_address(place: RankPlace) -> str:
    """Where rank 0 is: MASTER_ADDR, Slurm's first node, or by an MPI broadcast, which every rank must call.

    Raises `UsageError` if there is no way to learn it.
    """
    if address := os.environ.get("MASTER_ADDR", "") or (_first_node() if place.launcher == _SLURM else ""):
        return address
    if place.local_world_size == place.world_size:
        return "localhost"
    if place.launcher == _TORCHRUN:
        raise UsageError(f"MASTER_ADDR is not set ({place.words}): set it to an address of rank 0's host")
    return str(_mpi_world(place).bcast(address_for_peers("") if place.rank == 0 else None, root=0))


def _default_timeout() -> timedelta:
    from torch.distributed.constants import default_pg_timeout

    return default_pg_timeout


def _meet(place: RankPlace, timeout: timedelta) -> Any:
    address, port = (os.environ.get(name, "") for name in _MASTER)
    if place.launcher == _SLURM:
        address, port = address or _first_node(), port or _port_of_job()
    if address and port:
        if not port.isdecimal():
            raise UsageError(f"MASTER_PORT is {port!r}, expected a number ({place.words})")
        return _store(place, timeout, address, int(port), serve=place.rank == 0)
    if address or port:
        given, missing = _MASTER if address else _MASTER[::-1]
        raise UsageError(f"{given} is set and {missing} is not ({place.words}): set both, or neither")
    if place.local_world_size == place.world_size:
        return _meet_by_file(place, timeout)
    return _meet_by_mpi(place, timeout)


def _store(place: RankPlace, timeout: timedelta, address: str, port: int, serve: bool = False) -> Any:
    """A store at an address, served by this process or by rank 0's; does not wait for the other ranks."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(address, port, place.world_size, serve, timeout, wait_for_workers=False, multi_tenant=True)


def _first_node() -> str:
    """The first node of Slurm's list of the step's: ``node[07-09,12],other`` gives node07."""
    listed = os.environ.get("SLURM_STEP_NODELIST", "")
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", listed)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0]) if first else ""


def _port_of_job() -> str:
    """A port that all ranks of a step of Slurm agree on, and no other step of the job has."""
    job, step = (int(os.environ.get(name, "") or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return str(_PORTS[(job * 101 + step) % len(_PORTS)])


# On one host: the port goes by a file.


def _meet_by_file(place: RankPlace, timeout: timedelta) -> Any:
    path = _folder() / f"launched-{_launcher_process(place)}-{next(_meetings)}"
    if place.rank == 0:
        store = _store(place, timeout, "localhost", 0, serve=True)
        whole = path.with_name(f"{path.name}.{os.getpid()}")
        whole.write_text(str(store.port))
        whole.replace(path)
    else:
        store = _store(place, timeout, "localhost", _port_in(path, place, timeout.total_seconds()))
    if store.add("unisono/met", 1) == place.world_size:
        path.unlink(missing_ok=True)
    return store


def _port_in(path: Path, place: RankPlace, seconds: float) -> int:
    deadline = time.monotonic() + seconds if seconds >= 0 else float("inf")
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            return int(path.read_text())
        time.sleep(0.01)
    raise CollectiveTimeout(f"{place.words}: rank 0 did not come within {seconds:g} s (it should write {path})")


def _folder() -> Path:
    """This user's folder for files of launched jobs; raises `UsageError` if it is another user's."""
    folder = Path(gettempdir()) / f"unisono-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise UsageError(f"{folder} is not a folder that this user alone may write to: remove it, or set TMPDIR")
    return folder


def _launcher_process(place: RankPlace) -> str:
    """Names the process that started this host's ranks: the next ancestor without the rank's variable.

    Programs in between (a shell, a profiler) have inherited it.
    """
    name, pid = f"{_VARIABLES[place.launcher][0]}=".encode(), os.getppid()
    while pid > 1:
        try:
            inherited = any(each.startswith(name) for each in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
        except PermissionError:  # another user's
            inherited = False
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if not inherited:
            return f"{pid}-{fields[19]}"  # its start: a later process may have the same pid
        pid = int(fields[1])
    return str(pid)


# Over several hosts: address and port go by MPI.


def _meet_by_mpi(place: RankPlace, timeout: timedelta) -> Any:
    world, store, published = _mpi_world(place), None, None
    if place.rank == 0:
        try:
            store = _store(place, timeout, "localhost", 0, serve=True)
            addresses = own_addresses(os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0])
            published = (addresses, store.port, Host.mine().to_text())
        finally:
            world.bcast(published, root=0)  # None: the others do not wait for what failed here
        return store
    published = world.bcast(None, root=0)
    if published is None:
        raise UsageError(f"{place.words}: rank 0 can not serve a store; its own error says why")
    addresses, port, host = published
    here = set() if Host.from_text(host).boot == Host.mine().boot else set(own_addresses())
    candidates = [address for address in addresses if address not in here]  # docker0 is alike on all hosts
    return _store(place, timeout, _reachable(candidates, port, place), port)


def _mpi_world(place: RankPlace) -> Any:
    """COMM_WORLD of the MPI that started this process."""
    needed = f"{place.words}, on several hosts, where ranks meet by MPI"
    mpi = load_mpi(needed, ", or set MASTER_ADDR (an address of rank 0's host) and MASTER_PORT (a free port there)")
    if (size := mpi.COMM_WORLD.Get_size()) != place.world_size:
        library = mpi.Get_library_version().partition("\n")[0].strip("\0 ")
        raise UsageError(
            f"{needed}: mpi4py has loaded {library}, whose world has {size} of the {place.world_size} ranks, for it is "
            "not the MPI that mpiexec belongs to; use that one's mpiexec, or set MPI4PY_LIBMPI to the libmpi.so of "
            "this one's"
        )
    return mpi.COMM_WORLD


def _reachable(addresses: list[str], port: int, place: RankPlace) -> str:
    """The first address that answers; raises `UsageError` if none does."""
    failures = []
    for address in addresses:
        try:
            socket.create_connection((address, port), _CONNECT_SECONDS).close()
            return address
        except OSError as error:
            failures.append(f"{address}: {error.strerror or error}")
    raise UsageError(
        f"{place.words}: no address of rank 0's host answers on port {port} from {socket.gethostname()} "
        f"({'; '.join(failures) or 'it has none'}): open the hosts' network to each other, or set GLOO_SOCKET_IFNAME "
        "to the interface that leads there; `unisono doctor` finds out which"
    )
