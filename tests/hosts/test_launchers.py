"""Launchers over several hosts: where the ranks meet is found with nothing set, and groups over hosts made there."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import mpi
from hosts.conftest import Network

PROGRAM = """
import os, sys
import torch, torch.distributed as dist
import unisono

for between in sys.argv[2:] or [""]:
    how = {"pg_options": unisono.Options(between=between)} if between else {}
    dist.init_process_group("unisono", **how)
    x = torch.full((100_000,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    with open(f"{sys.argv[1]}/{dist.get_rank()}", "a") as file:
        print(os.uname().nodename, dist.get_world_size(), x.unique().tolist(), file=file)
    dist.barrier()
    dist.destroy_process_group()
"""
FOUND = [f"host{rank // 2} 4 [10.0]\n" for rank in range(4)]
UNSET = ["env", "-u", "MASTER_ADDR", "-u", "MASTER_PORT"]


def start(kind: str) -> list[str]:
    """mpiexec over the hosts, two ranks on each."""
    if kind != "Open MPI":
        how = "-launcher ssh -launcher-exec $HOSTS_RSH -f $HOSTS_FILE -ppn 2"
    else:
        prted = Path(mpi.found(kind)).with_name("prted")
        agents = f"PRTE_MCA_plm_ssh_agent=$HOSTS_RSH PRTE_MCA_prte_launch_agent={prted}"
        how = "--allow-run-as-root --host host0:2,host1:2"
        return [
            *UNSET,
            "sh",
            "-c",
            f'export {agents}; exec "$@" ',
            "sh",
            mpi.found(kind),
            *how.split(),
            "-n",
            "4",
            *UNSET,
        ]
    return [*UNSET, "sh", "-c", f'exec {mpi.found(kind)} {how} -n 4 "$@"', "sh", *UNSET]


def found(folder: Path) -> list[str]:
    return [(folder / f"{rank}").read_text() for rank in range(4)]


@pytest.mark.parametrize("kind", mpi.KINDS)
def test_ranks_of_mpiexec_meet_over_hosts(kind: str, make_hosts: Callable[..., Network], tmp_path: Path) -> None:
    """With nothing set; then with MPI between the hosts."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [*start(kind), sys.executable, f"{tmp_path}/program.py", str(tmp_path), "", "mpi"]
    code, printed = make_hosts().start(0, command, mpi.program_environment(kind)).end(100.0)
    assert code == 0, printed
    assert found(tmp_path) == [2 * line for line in FOUND]


def test_ranks_without_mpi4py_are_told_how_to_get_it(make_hosts: Callable[..., Network], tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['mpi4py'] = None\nimport torch.distributed as dist\ndist.init_process_group('gloo')"
    )
    (tmp_path / "program.py").write_text(program)
    command = [*start("MPICH"), sys.executable, f"{tmp_path}/program.py"]
    code, printed = make_hosts().start(0, command, mpi.program_environment("MPICH")).end()
    assert code != 0
    words = 'on several hosts, where ranks meet by MPI: mpi4py is not installed: pip install "unisono[mpi]", or set'
    assert words in printed


def test_the_own_name_may_be_a_loopback_address(make_hosts: Callable[..., Network], tmp_path: Path) -> None:
    """As Debian and Ubuntu install it: the address of rank 0 is an interface's, not that of its host's name."""
    program = PROGRAM.replace("**how", "'launcher://'").replace(
        "import os,", "import os; os.environ['GLOO_SOCKET_IFNAME'] = 'eth0'\nimport"
    )
    (tmp_path / "program.py").write_text(program)
    command = [*start("MPICH"), sys.executable, f"{tmp_path}/program.py", str(tmp_path)]
    code, printed = make_hosts(loopback_name=True).start(0, command, mpi.program_environment("MPICH")).end()
    assert code == 0, printed
    assert found(tmp_path) == FOUND


def test_agents_of_torchrun_on_two_hosts(make_hosts: Callable[..., Network], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    for command in make_hosts().on_all([*torchrun, f"{tmp_path}/program.py", str(tmp_path)]):
        code, printed = command.end()
        assert code == 0, printed
    assert found(tmp_path) == FOUND
