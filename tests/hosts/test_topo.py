"""`unisono topo` over hosts whose links are known: what it measures, and what becomes of it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hosts.conftest import Network

TOPO = [sys.executable, "-m", "unisono.cli", "topo"]
Make = Callable[..., Network]


def ranks(k: int, size: int) -> dict[str, str]:
    """What torchrun sets for the first of two ranks of host k."""
    return {"RANK": f"{2 * k}", "WORLD_SIZE": f"{size}", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


def test_links_are_measured_in_both_directions(make_hosts: Make, tmp_path: Path) -> None:
    net = make_hosts(3, latency="5ms", rate="100mbit")
    page = ("--html", f"{tmp_path}/topo.html", "--png", f"{tmp_path}/topo.png")
    running = [net.start(k, [*TOPO, "--json", *page], ranks(k, 6)) for k in range(3)]
    (code, text), *others = (each.end() for each in running)
    assert code == 0, text
    assert others == [(0, ""), (0, "")]
    data = json.loads(text.partition("\nwrote")[0])
    assert data["topology"] == "measured"
    assert data["hosts"] == [[0, 1], [2, 3], [4, 5]]
    for k, row in enumerate(data["between"]):
        assert row[k] is None
        for link in row[:k] + row[k + 1 :]:
            assert link["name"] == "eth0"
            assert link["alpha"] == pytest.approx(5e-3, rel=0.3)
            assert link["beta"] == pytest.approx(8 / 100e6, rel=0.3)
    assert [data["facts"][f"host{k}"]["towards"] for k in range(3)] == [f"10.77.0.{k + 1}" for k in range(3)]
    assert (tmp_path / "topo.html").read_text().count("Mbit/s</td>") == 6
    assert (tmp_path / "topo.png").read_bytes().startswith(b"\x89PNG")


def test_a_host_that_does_not_come_is_counted(make_hosts: Make) -> None:
    net = make_hosts(3)
    running = [net.start(k, [*TOPO, "--timeout", "3"], ranks(k, 6)) for k in range(2)]
    (code, text), (other, _) = (each.end() for each in running)
    assert code == other == 1
    assert "2 ranks did not come within 3 s, or could not be reached: see `unisono doctor`" in text
    assert "Gbit/s" in text  # between those that came
    assert "host1, 2 ranks" in text
