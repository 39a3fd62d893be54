"""Hosts for tests, made of namespaces (hosts.py): `make_hosts` makes them, `Running.text` is what a command printed."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hosts.hosts import CannotMakeHosts, Hosts, Running

HERE = Path(__file__).parent
SECONDS = 60.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("hosts")


class Network:
    """Some hosts, and what the commands on them printed."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self._folder, self._count = hosts, folder, 0

    def start(self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None) -> "Command":
        """Starts a command on a host; this process's Python path goes with it."""
        self._count += 1
        printed = self._folder / f"printed-{self._count}-on-{host}"
        full = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", **(env or {})}
        with printed.open("wb") as file:
            running = self.hosts.start(host, argv, full, stdout=file.fileno(), stderr=file.fileno())
        return Command(running, printed)

    def on_all(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> list["Command"]:
        """Starts a command on every host."""
        return [self.start(host, argv, env) for host in range(self.hosts.count)]


class Command:
    """A command on a host."""

    def __init__(self, running: Running, printed: Path) -> None:
        self.running, self._printed = running, printed

    @property
    def text(self) -> str:
        """What it has printed so far, errors too."""
        return self._printed.read_text(encoding="utf-8", errors="replace")

    def end(self, seconds: float = SECONDS) -> tuple[int, str]:
        """Its exit code and what it printed; the test fails if it does not end."""
        try:
            return self.running.wait(seconds), self.text
        except TimeoutError as error:
            raise AssertionError(f"{error}: {self.text}") from None


@pytest.fixture
def make_hosts(tmp_path: Path) -> Iterator[Callable[..., Network]]:
    """Makes hosts, with the options of `Hosts`, that are gone after the test; skips it where none can be made."""
    with ExitStack() as ends:

        def make(count: int = 2, **options: Any) -> Network:
            try:
                hosts = ends.enter_context(Hosts(count, **options))
            except CannotMakeHosts as error:
                pytest.skip(str(error))
            return Network(hosts, tmp_path)

        yield make
