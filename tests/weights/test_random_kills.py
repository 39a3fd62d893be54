"""A replica that is killed at any moment, again and again: the trainer is told, others keep whole versions."""

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from unisono.errors import UnisonoError
from weights.live import Net, blank, fill, raise_flag, replica, trainer, wrong
from weights.test_lost import playing


def pushes_on(folder: str) -> Any:
    """Pushes until it is told to end; returns the kinds of errors, and the last version."""
    model, errors, version, last = Net(), set(), 0, None
    with trainer(folder, model, timeout=20.0) as sender:
        while last is None:
            enough = Path(folder, "enough").exists()  # nobody is killed after that
            version += 1
            fill(model, version)
            try:
                pushed = sender.push(version)
            except UnisonoError as error:
                errors.add(type(error).__name__)
            else:
                last = pushed if enough else None
        raise_flag(folder, f"last {version}")
        return [sorted(errors), last.receivers]


def stays_whole(folder: str, name: str) -> Any:
    """Follows; returns what was ever mixed, and the version shown once the trainer has ended."""
    model, mixed = blank(Net()), []
    with replica(folder, model, name, timeout=20.0) as receiver:
        receiver.follow()
        while not list(Path(folder).glob("last *")):
            with receiver.hold() as version:
                found = wrong(model, version)
                if found:
                    mixed.append([version, found])
            time.sleep(0.001)
        return [mixed, receiver.version]


@pytest.mark.parametrize("kills", [3, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_a_replica_is_killed_at_random_moments(kills: int, tmp_path: Path) -> None:
    draw = random.Random(kills)
    with playing(tmp_path, (pushes_on,), (stays_whole, "stays")) as (sender, stays):
        for _ in range(kills):
            with playing(tmp_path, (stays_whole, "dies")) as (dies,):
                time.sleep(draw.uniform(0.0, 0.6))
                dies.send(signal.SIGKILL)
        raise_flag(str(tmp_path), "enough")
        errors, receivers = sender.result(60.0)
        mixed, version = stays.result(60.0)
    assert set(errors) <= {"PeerLostError"}
    assert receivers == ("stays",)
    assert mixed == []
    assert version == int(next(tmp_path.glob("last *")).name.split()[1])
