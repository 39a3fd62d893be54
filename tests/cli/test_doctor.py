"""`unisono doctor` and `unisono topo` on this host alone; what they find on several is in tests/hosts."""

import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unisono.cli.main import app
from unisono.topo.exchange import listen


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen() as door:
        monkeypatch.setenv("MASTER_PORT", str(door.getsockname()[1] - 1))
    monkeypatch.delenv("MASTER_ADDR", raising=False)


def test_the_doctor_looks_at_this_host() -> None:
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "100"})
    assert result.exit_code in (0, 1), result.output
    assert result.output.startswith("unisono doctor   1 host, ")
    assert "this one alone: run it on all of a job's hosts to try the network" in result.output


def test_the_doctor_in_json() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    data = json.loads(result.stdout)
    assert result.exit_code == bool(data["findings"])
    assert [each["hostname"] for each in data["hosts"]] == [socket.gethostname()]
    assert "versions" in data["right"]


def test_a_peer_that_does_not_come_is_a_finding() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json", "--peer", "no-such-host.invalid", "--timeout", "0.3"])
    assert result.exit_code == 1
    found = {each["cause"]: each for each in json.loads(result.stdout)["findings"]}
    assert found["ranks"]["words"].startswith("1 of 2 hosts did not come within 0.3 s")
    assert "no-such-host.invalid" in found["open ports"]["words"]
    assert "(name does not resolve)" in found["open ports"]["words"]


def test_topo_shows_this_host(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["topo", "--html", str(tmp_path / "topo.html")])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("unisono topo   1 host\n")
    assert "cores" in (tmp_path / "topo.html").read_text()


def test_topo_in_json() -> None:
    result = CliRunner().invoke(app, ["topo", "--json"])
    data = json.loads(result.stdout)
    assert (data["topology"], data["hosts"], data["between"]) == ("measured", [[0]], [[None]])
    assert data["intra"]["name"] == "shared_memory"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["doctor", "--timeout", "0"], "--timeout is 0, expected 0.1 to 3600 seconds"),
        (["topo", "--port", "70000"], "--port is 70000, expected 1 to 65535"),
        *(
            (
                ["doctor", "--rdzv-endpoint", endpoint],
                f"--rdzv-endpoint is {endpoint}, expected HOST or HOST:PORT with a port of 0 to 65535",
            )
            for endpoint in ("foo:bar", "host0:70000", ":29400")
        ),
        (
            ["topo", "--png", "/nowhere/topo.png"],
            "cannot write /nowhere/topo.png: the directory /nowhere does not exist",
        ),
    ],
)
def test_wrong_command_lines(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, words)
    assert (result.exit_code, result.stderr) == (2, f"unisono: {message}\n")


def test_peers_and_a_launcher_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["doctor", "--peer", "host1"])
    assert result.exit_code == 2
    assert result.stderr.startswith("unisono: --peer is for hosts without a launcher, but this is rank 0 of 1")
