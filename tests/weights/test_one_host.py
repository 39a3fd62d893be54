"""Updates on one host: torch's stores, which ask a resolver, have no part in them."""

from pathlib import Path
from typing import Any

import pytest
from tests.weights.live import Net, blank, fill, replica, trainer, wrong

from unisono.weights import participant, sending


def test_updates_on_one_host_ask_no_resolver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's stores do, for the name of every address that connects."""

    def refuse(*given: Any, **named: Any) -> None:
        raise AssertionError("a store of torch was made")

    monkeypatch.setattr(participant, "TCPStore", refuse)
    monkeypatch.setattr(sending, "TCPStore", refuse)
    model = blank(Net())
    with trainer(str(tmp_path), fill(Net(), 1)) as sender, replica(str(tmp_path), model) as receiver:
        pulled = receiver.pull(background=True)
        sender.push()
        assert pulled.wait().version == 1
    assert wrong(model, 1) == []
