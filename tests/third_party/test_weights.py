"""Weight updates into programs of the field, each in processes of its own and started as users start it."""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ports import free_port
from unisono import weights

PROGRAMS = Path(__file__).parent / "programs"
UPDATES, CLIENTS = 20, 8


def needs(extra: str, *modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install unisono[{extra}], or make test-frameworks")


@contextmanager
def server(address: str, folder: Path) -> Iterator[str]:
    """uvicorn in a process of its own; yields its URL once it answers."""
    import httpx

    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "weights_server:app", "--port", str(port), "--log-level", "warning"]
    changed = os.environ | {"UNISONO_WEIGHTS": address, "PYTHONPATH": os.pathsep.join([str(PROGRAMS), *sys.path])}
    with open(folder / "printed", "w") as printed:
        job = subprocess.Popen(command, env=changed, stdout=printed, stderr=subprocess.STDOUT)
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + 60
        try:
            while True:
                try:
                    httpx.get(f"{url}/generate?prompt=1", timeout=5)
                    break
                except httpx.TransportError:
                    assert job.poll() is None, (folder / "printed").read_text()
                    assert time.monotonic() < end, (folder / "printed").read_text()
                    time.sleep(0.1)
            yield url
        finally:
            job.send_signal(signal.SIGTERM)
            try:
                assert job.wait(30) in (0, -signal.SIGTERM), (folder / "printed").read_text()
            finally:
                job.kill()


def ask(url: str, prompt: int, ended: threading.Event, answers: list[Any], failures: list[str]) -> None:
    """A client: the same question until the end."""
    import httpx

    with httpx.Client(timeout=30) as client:
        while not ended.is_set():
            try:
                answers.append((prompt, client.get(f"{url}/generate?prompt={prompt}").raise_for_status().json()))
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")


@pytest.mark.timeout(240)
def test_an_inference_server_answers_by_one_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("serve", "fastapi", "uvicorn", "httpx")
    monkeypatch.syspath_prepend(str(PROGRAMS))
    from weights_server import Model

    address, model, own = f"file://{tmp_path}/meeting", Model(), defaultdict[int, dict[int, list[int]]](dict)
    answers: list[Any] = []
    failures: list[str] = []
    ended = threading.Event()
    with server(address, tmp_path) as url, weights.Sender(address, model, group="self") as sender:
        update(model, sender, 1, own)
        clients = [threading.Thread(target=ask, args=(url, n, ended, answers, failures)) for n in range(CLIENTS)]
        for client in clients:
            client.start()
        for version in range(2, UPDATES + 1):
            before = len(answers)
            while len(answers) < before + CLIENTS and not failures:
                time.sleep(0.01)
            update(model, sender, version, own)
        ended.set()
        for client in clients:
            client.join(30)
    assert failures == []
    shown = [answer["version"] for prompt, answer in answers]
    assert len(set(shown)) >= UPDATES - 2
    assert [a for prompt, a in answers if a["tokens"] != own[a["version"]][prompt]] == []
    for n in range(CLIENTS):
        mine = [answer["version"] for prompt, answer in answers if prompt == n]
        assert mine == sorted(mine)


def update(model: torch.nn.Module, sender: weights.Sender, version: int, own: Any) -> None:
    """New random weights, and what they say."""
    torch.manual_seed(version)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    own[version] = {prompt: model.generate(prompt) for prompt in range(CLIENTS)}  # type: ignore[operator]
    assert sender.push().version == version


@pytest.mark.timeout(240)
def test_an_actor_of_ray_is_killed_and_restarted(tmp_path: Path) -> None:
    needs("ray", "ray")
    changed = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, str(PROGRAMS / "weights_ray.py"), f"file://{tmp_path}/meeting"]
    ran = subprocess.run(command, env=changed, capture_output=True, text=True, timeout=220, cwd=tmp_path)
    assert ran.returncode == 0, f"{ran.stdout[-3000:]}\n{ran.stderr[-6000:]}"
    assert "restarted and up to date" in ran.stdout
    assert "['one', 'two']" in ran.stdout
