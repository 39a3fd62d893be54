"""Ray Train on a cluster of two nodes, one on each host: the workers of a TorchTrainer make a group over both."""

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hosts.conftest import Command, Network

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed: make test-frameworks installs it", allow_module_level=True)

PROGRAM = Path(__file__).parents[1] / "third_party" / "programs" / "ray_train.py"
RAY = str(Path(sys.executable).with_name("ray"))
PORT = 6379
WAIT = """
import ray, time
ray.init(log_to_driver=False)
while len(ray.nodes()) < 2:
    time.sleep(0.2)
"""


def start_cluster(net: Network, settings: dict[str, str]) -> list[Command]:
    """A node of one core on each host; returns once both are there."""
    sizes = ["--num-cpus", "1", "--object-store-memory", "80000000", "--block"]
    head = [RAY, "start", "--head", "--port", f"{PORT}", "--include-dashboard", "false"]
    node = [RAY, "start", "--address", settings["RAY_ADDRESS"]]
    alone = {name: text for name, text in settings.items() if name != "RAY_ADDRESS"}
    own = [["--node-ip-address", address] for address in net.hosts.addresses]
    nodes = [net.start(0, [*head, *own[0], *sizes], alone)]
    deadline = time.monotonic() + 60.0
    while "Ray runtime started" not in nodes[0].text:
        assert time.monotonic() < deadline, nodes[0].text
        time.sleep(0.2)
    nodes.append(net.start(1, [*node, *own[1], *sizes], alone))
    code, printed = net.start(0, [sys.executable, "-c", WAIT], settings).end(90.0)
    assert code == 0, printed + nodes[1].text
    return nodes


def one_process() -> tuple[float, dict[str, Any]]:
    """The last loss and the weights of the same training without ranks: each step has the batches of both."""
    torch.manual_seed(9)
    inputs = torch.randn(32, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=0.1), torch.zeros(())
    for x in inputs.split(8) * 2:
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return 2 * loss.item(), model.state_dict()


@pytest.mark.timeout(300)
def test_ray_train_on_two_nodes(make_hosts: Callable[..., Network], tmp_path: Path) -> None:
    net = make_hosts()
    settings = {
        "RAY_ADDRESS": f"{net.hosts.addresses[0]}:{PORT}",
        "RAY_AUTH_MODE": "disabled",  # else Ray leaves a file at HOME
        "RAY_TRAIN_V2_ENABLED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
        "PATH": os.pathsep.join([str(Path(RAY).parent), os.environ["PATH"]]),
    }
    start_cluster(net, settings)
    code, printed = net.start(0, [sys.executable, str(PROGRAM), "unisono", f"{tmp_path}/values"], settings).end(150.0)
    assert code == 0, printed
    found = torch.load(tmp_path / "values")
    loss, weights = one_process()
    assert found["group"] == "UnisonoProcessGroup"
    assert sorted(found["hosts"]) == ["host0", "host1"]
    torch.testing.assert_close(found["values"]["loss"], loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dict(found["weights"]), dict(weights), rtol=1e-5, atol=1e-6)
