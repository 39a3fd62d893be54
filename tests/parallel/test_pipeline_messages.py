import pytest
import torch
import torch.distributed as dist

from ranks import ranks
from unisono.algorithms.pipelines import SCHEDULES, build_pipeline
from unisono.parallel.pipeline.messages import Channels, PipelineMessages, group_links, messages
from unisono.parallel.pipeline.shapes import Form, Shapes
from unisono.schedule import Action


def shapes(num_stages: int, microbatches: int, whole_numbers_into: int = -1) -> Shapes:
    """Microbatch m has m + 1 rows wherever it is."""
    dtypes = [torch.int64 if stage == whole_numbers_into else torch.float32 for stage in range(num_stages)]
    return Shapes(tuple(tuple(Form((m + 1, 2), dtype) for m in range(microbatches)) for dtype in dtypes))


def test_what_is_sent_follows_from_the_schedule() -> None:
    schedule = build_pipeline("1f1b", 3, 2)
    assert list(messages(schedule, 1, shapes(3, 2))) == [
        (2, Action(2, "F", 0)),
        (2, Action(2, "F", 1)),
        (0, Action(0, "B", 0)),
        (0, Action(0, "B", 1)),
    ]
    assert list(messages(schedule, 2, shapes(3, 2), forward_only=True)) == []
    assert list(messages(schedule, 1, shapes(3, 2, whole_numbers_into=1))) == [
        (2, Action(2, "F", 0)),
        (2, Action(2, "F", 1)),
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rank_sends_nothing_to_itself(name: str) -> None:
    schedule = build_pipeline(name, 3, 4)
    sent = [(rank, *item) for rank in range(3) for item in messages(schedule, rank, shapes(schedule.num_stages, 4))]
    assert all(rank != to == schedule.ranks[message.stage] for rank, to, message in sent)
    assert len(sent) == len(set(sent))


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_rank_has_two_links_in_one_group(name: str) -> None:
    for world_size in range(1, 8):
        schedule = build_pipeline(name, world_size, 2)
        dealt = group_links(schedule)
        for links in dealt:
            taken = [rank for link in links for rank in link]
            assert len(taken) == len(set(taken))
        used = {(rank, to) for rank in range(world_size) for to, _ in messages(schedule, rank, shapes(99, 2))}
        assert used <= {link for links in dealt for link in links}
        assert len(dealt) <= 6


def value_of(message: Action) -> float:
    return message.stage * 100 + message.microbatch * 10 + (message.kind == "B")


def exchange(rank: int, world_size: int) -> None:
    """Each rank walks through its row and takes and sends what the actions need and give, computing nothing."""
    for name in SCHEDULES:
        for separate in (False, name in ("1f1b", "interleaved")):
            schedule = build_pipeline(name, world_size, 5)
            forms = shapes(schedule.num_stages, 5)
            channels = Channels(schedule, None, torch.device("cpu"), separate)
            mail = PipelineMessages(schedule, rank, forms, channels, torch.device("cpu"))
            for action in schedule.actions[rank]:
                stage, kind, microbatch = action.parts[0]
                if kind == "W":
                    continue
                arrived = mail.take(action.parts[0])
                if arrived is None:
                    assert stage == (0 if kind == "F" else schedule.num_stages - 1)
                else:
                    assert arrived.shape == (microbatch + 1, 2)
                    assert arrived.unique().tolist() == [value_of(Action(stage, kind, microbatch))]
                to = Action(stage + (1 if kind == "F" else -1), kind, microbatch)
                if 0 <= to.stage < schedule.num_stages:
                    mail.send(to, torch.full((microbatch + 1, 2), float(value_of(to))))
            mail.finish()
            dist.barrier()


@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_every_message_meets_its_receive(backend: str) -> None:
    ranks(3, backend=backend).run(exchange)
