"""What does not fit is told on every rank of both sides before a byte moves, and the next update works."""

from pathlib import Path
from typing import Any

import torch

from ranks import ranks
from unisono import weights
from weights.live import attempt, blank, fill, raise_flag, replica, trainer, wait_for, wrong


def sent() -> dict[str, torch.Tensor]:
    return {"model.a.weight": torch.zeros(2, 3), "b": torch.zeros(4), "c": torch.zeros(3)}


def wanted() -> dict[str, torch.Tensor]:
    return {"a.weight": torch.zeros(2, 3), "b": torch.zeros(4), "c": torch.zeros(3)}


RULES = [weights.rename("model.*", "*")]


def steps(rank: int, world_size: int, folder: str) -> Any:
    """The sender, a replica that does not fit at first, and one that fits."""
    if rank == 0:
        model, found = fill(sent(), 1), list[Any]()
        with trainer(folder, model, receivers=2) as sender:
            found.append(attempt(sender.push))
            raise_flag(folder, "told")
            wait_for(folder, "gen-1 is back")
            found.append(attempt(sender.push))  # a rule without a match
            raise_flag(folder, "told again")
            wait_for(folder, "gen-1 is right")
            model["a.weight"] = model.pop("model.a.weight")  # what is sent may have other names by now
            found += [attempt(sender.push), sender.version]
            model["model.a.weight"] = model.pop("a.weight")
            found.append(sender.push(1).version)
            model["b"] = torch.zeros(5)
            found.append(attempt(sender.push))
            model["b"] = torch.zeros(4)
            fill(model, 3)
            return [*found, sender.push(3).version]
    model, found = blank(wanted()), []
    if rank == 1:
        misfit = {"a.weight": torch.zeros(3, 2), "b": torch.zeros(4, dtype=torch.int64), "c": torch.zeros(3)}
        misfit["d"] = torch.zeros(1)
        with replica(folder, misfit, "gen-1") as receiver:
            found += [attempt(receiver.pull), receiver.version]
        wait_for(folder, "told")
        with replica(folder, model, "gen-1", rules=[*RULES, weights.ignore("nothing.*")]) as receiver:
            raise_flag(folder, "gen-1 is back")
            found.append(attempt(receiver.pull))
        wait_for(folder, "told again")
    with replica(folder, model, f"gen-{rank}", rules=RULES) as receiver:
        if rank == 2:
            found += [attempt(receiver.pull), receiver.version, attempt(receiver.pull)]
        else:
            raise_flag(folder, "gen-1 is right")
        found.append(attempt(receiver.pull))
        right = {"a.weight": fill(sent(), 1)["model.a.weight"]}
        found += [receiver.pull().version, wrong(model, 1, right), attempt(receiver.pull), wrong(model, 1, right)]
        return [*found, receiver.pull().version, wrong(model, 3, {"a.weight": fill(sent(), 3)["model.a.weight"]})]


def test_what_does_not_fit_is_told_on_every_rank(tmp_path: Path) -> None:
    sender, one, two = ranks(3, group=False).run(steps, str(tmp_path))
    parts = ["replica 'gen-1'", "float32 [2, 3]", "float32 [3, 2]", "int64 [4]", "float32 [4]", "missing", "unexpected"]
    parts += ['rename("model.*", "*")', 'cast("b", torch.int64)', "nearest: ", "version 1 was given up, no version"]
    for name, text, seconds in (sender[0], one[0], two[0]):
        assert name == "MismatchError"
        assert [part for part in parts if part not in text] == []
        assert seconds < 5
    assert one[1] is two[1] is None
    for name, text, _ in (sender[1], one[2], two[2]):
        assert name == "UsageError"
        assert "nothing.*" in text
    for name, text, _ in (sender[2], one[3], two[3]):
        assert name == "UsageError"
        assert "model.*" in text
    assert sender[3:5] == [None, 1]
    assert one[4:6] == two[4:6] == [1, []]
    for name, text, _ in (sender[5], one[6], two[6]):
        assert name == "MismatchError"
        assert "float32 [5]" in text
        assert "version 1 is kept" in text
    assert sender[6] == 3
    assert one[7:] == two[7:] == [[], 3, []]


def test_all_replicas_that_do_not_fit_are_told_at_once() -> None:
    with weights.Sender("tcp://127.0.0.1:0", {"a": torch.zeros(2)}, receivers=3, timeout=10) as sender:
        models = [{"a": torch.zeros(3)}, {"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.int8)}]
        receivers = [weights.Receiver(sender.address, m, name=f"gen-{i}", timeout=10) for i, m in enumerate(models)]
        updates = [receiver.pull(background=True) for receiver in receivers]
        for call in (sender.push, *(update.wait for update in updates)):
            name, text, _ = attempt(call)
            assert name == "MismatchError"
            assert "does not fit replica 'gen-0': 1 difference\n  shape       a  float32 [2] is sent, float32" in text
            assert "does not fit replica 'gen-2': 1 difference\n  dtype       a  float32 [2] is sent, int8 [2]" in text
            assert "gen-1" not in text
        for receiver in receivers:
            receiver.close()


def test_a_rule_that_does_not_suit_names_its_replica() -> None:
    rules = [weights.rename("a", "x"), weights.rename("b", "x")]
    model = {"a": torch.zeros(2), "b": torch.zeros(2)}
    with (
        weights.Sender("tcp://127.0.0.1:0", model, timeout=10) as sender,
        weights.Receiver(sender.address, model, name="gen", rules=rules, timeout=10) as receiver,
    ):
        update = receiver.pull(background=True)
        for call in (sender.push, update.wait):
            name, text, _ = attempt(call)
            assert name == "UsageError"
            assert 'for replica \'gen\': rename("b", "x"): two tensors would be called x' in text
