import json
import stat
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unisono.bench import launch as starting
from unisono.bench.launch import Mpi, find_mpi, launch
from unisono.bench.result import Rates, Row
from unisono.bench.settings import COLLECTIVES, Contender, Settings
from unisono.cli.main import app
from unisono.errors import PeerLostError, UnisonoError, UsageError

SETTINGS = Settings(contenders=(Contender("unisono"), Contender("mpi")), listed=(8,))
ROW = Row("all_reduce", "mpi", 8, 2, "float32", "sum", "in", 2, 10, (1e-5,), 0)
HYDRA = "HYDRA build details:\n    Version:                                 5.0.2\n"
OTHERS = {"mpiexec (Open MPI) 5.0.11\n": ("Open MPI", "5.0.11"), "mpiexec (OpenRTE) 4.1.4\n": ("Open MPI", "4.1.4")}


def _missing() -> str:
    """Why there is no MPI here, or nothing."""
    try:
        find_mpi({})
    except UsageError as error:
        return str(error)
    return ""


needs_mpi = pytest.mark.skipif(bool(_missing()), reason=_missing())


def _program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], str]:
    """Has an MPI of this version text found, whatever is installed here."""

    def no_files(wheel: str) -> None:
        raise PackageNotFoundError(wheel)

    def install(version: str) -> str:
        path = _program(tmp_path / "mpiexec", f"#!/bin/sh\ncat << 'end'\n{version}\nend\n")
        monkeypatch.setattr(starting, "find_spec", lambda name: name)
        monkeypatch.setattr(starting, "files", no_files)
        monkeypatch.setattr(starting.shutil, "which", lambda name: path)
        return path

    return install


@pytest.mark.parametrize(("told", "found"), [(HYDRA, ("MPICH", "5.0.2")), *OTHERS.items()])
def test_the_mpi_on_the_path_is_told_by_its_mpiexec(
    installed: Callable[[str], str], told: str, found: tuple[str, str]
) -> None:
    path = installed(told)
    assert find_mpi({}) == Mpi(path, *found)


def test_what_is_missing_is_said_with_the_remedy(
    installed: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = installed("Some other MPI 1.0")
    with pytest.raises(UsageError, match=r"mpiexec is neither MPICH's nor Open MPI's: pip install \"unisono"):
        find_mpi({})
    Path(path).write_text("#!/nowhere/sh\n")
    with pytest.raises(UsageError, match=r"cannot run .*mpiexec: .*pip install"):
        find_mpi({})
    monkeypatch.setattr(starting.shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match=r"mpi needs an MPI library with its mpiexec, .*: pip install \"unisono"):
        find_mpi({})
    monkeypatch.setattr(starting, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"mpi needs mpi4py, which is not installed: pip install \"unisono"):
        find_mpi({})


@pytest.mark.parametrize(
    ("name", "by"), [("RANK", "torchrun"), ("PMI_RANK", "mpiexec"), ("OMPI_COMM_WORLD_RANK", "mpiexec")]
)
def test_other_launchers_are_refused(name: str, by: str) -> None:
    with pytest.raises(UsageError, match=rf"starts its ranks itself, by mpiexec: run it without {by}"):
        find_mpi({name: "0"})


@pytest.mark.parametrize("arguments", [["--against", "mpi"], ["--backend", "mpi"]])
def test_the_command_says_what_is_missing_in_one_line(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setattr(starting, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == 'unisono: mpi needs mpi4py, which is not installed: pip install "unisono[bench]"\n'


RANK = """
import sys, time
from multiprocessing.connection import Client
from test_mpi import RATES, ROW
rank = int(sys.argv[1])
pipe = Client(sys.argv[2], "AF_UNIX")
pipe.send(rank)
settings, init_method = pipe.recv()
assert init_method.startswith("file:///") and settings.listed == (8,)
"""
RATES = Rates((64,), (1e9,), (1e9,))


def _measure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: tuple[str, str], then: str = "wait"
) -> list[object]:
    """A launch by an mpiexec that starts ranks of these programs; what was told."""
    for rank, rest in enumerate(ranks):
        (tmp_path / f"{rank}.py").write_text(RANK + rest)
    lines = [f"{sys.executable} {tmp_path}/{rank}.py {rank} $address &" for rank in range(2)]
    body = "\n".join(["#!/bin/sh", 'for address in "$@"; do :; done', *lines, "wait $!", then])
    mpi = Mpi(_program(tmp_path / "mpiexec", body), "MPICH", "1")
    monkeypatch.setattr(starting, "find_mpi", lambda: mpi)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    told: list[object] = []
    launch(SETTINGS, told.append)
    return told


def test_ranks_tell_the_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    teller = "pipe.send(RATES)\npipe.send(ROW)\npipe.send(None)\n"
    assert _measure(monkeypatch, tmp_path, (teller, "pipe.send(None)")) == [RATES, ROW]


def test_how_ranks_of_mpiexec_fail_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patient = "try: pipe.recv()\nexcept EOFError: pass\n"
    with pytest.raises(UnisonoError, match=r"^rank 1 cannot measure: UsageError: no such thing$"):
        _measure(monkeypatch, tmp_path, (patient, "pipe.send('UsageError: no such thing')\n" + patient))
    with pytest.raises(PeerLostError, match=r"^rank 1 of the bench died \(mpiexec ended with exit code 9: words\)$"):
        _measure(monkeypatch, tmp_path, (patient, "print('words', flush=True)"), "echo =====\necho BAD\nexit 9")


@pytest.mark.parametrize("code", [0, 3])
def test_an_mpiexec_that_starts_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int) -> None:
    mpi = Mpi(_program(tmp_path / "mpiexec", f"#!/bin/sh\necho no slots\nexit {code}\n"), "MPICH", "1")
    monkeypatch.setattr(starting, "find_mpi", lambda: mpi)
    with pytest.raises(UnisonoError, match=rf"^mpiexec ended with exit code {code}: no slots$"):
        launch(SETTINGS, lambda news: None)


@needs_mpi
def test_every_call_of_mpi_gives_what_must_come_out(tmp_path: Path) -> None:
    mpi, ranks = find_mpi({}), 2
    program = [sys.executable, str(Path(__file__).with_name("mpi_walk.py")), str(tmp_path), str(ranks)]
    command = [mpi.mpiexec, *starting._OPTIONS[mpi.kind], "-n", str(ranks), *program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(ranks):
        found = json.loads((tmp_path / str(rank)).read_text())
        assert (found.pop("wrong"), found.pop("cases")) == (0, 30 + 3 * 25)
        silent = ("barrier", "reduce ", "gather") if rank != 1 else ("barrier",)
        assert found == {name: int(not name.startswith(silent)) for name in found}


@needs_mpi
def test_every_collective_against_mpi(tmp_path: Path) -> None:
    few = ["--bytes", "8,64K", "--runs", "2", "--warm-up", "1", "--seconds", "0.01", "--pin"]
    saved = tmp_path / "a.json"
    result = CliRunner().invoke(app, ["bench", "all", *few, "--against", "gloo,mpi", "--json", str(saved)])
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert "# all 57 results checked are right" in result.stdout
    data = json.loads(saved.read_text())
    assert data["machine"]["mpi"] == find_mpi({}).words
    assert {row["collective"] for row in data["rows"] if row["contender"] == "mpi" and row["seconds"]} == {*COLLECTIVES}
