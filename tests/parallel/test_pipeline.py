import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.profiler import ProfilerActivity, profile

from ranks import ranks
from unisono.algorithms.pipelines import SCHEDULES, build_pipeline, interleaved_1f1b
from unisono.drawing import draw
from unisono.errors import MismatchError, ScheduleError, UsageError
from unisono.parallel.pipeline import Pipeline, divide_layers, stages_from_layers
from unisono.schedule.pipeline import PipelineSchedule

WIDTH = 4


def layers(count: int = 7) -> list[nn.Module]:
    """Layers of several kinds in float64, the first from 3 to 4 features."""
    torch.manual_seed(3)
    kinds = [nn.LayerNorm(WIDTH) if i % 3 == 2 else nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for i in range(9)]
    return [layer.double() for layer in (nn.Linear(3, WIDTH), *kinds[1:count])]


def batch(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    inputs, targets = (torch.randn(rows, n, generator=generator, dtype=torch.float64) for n in (3, WIDTH))
    return inputs, targets


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def mean_of_squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum(1).mean()


def assert_gradients(mine: Sequence[nn.Module], wanted: Sequence[nn.Module]) -> None:
    pairs = zip(nn.ModuleList(mine).parameters(), nn.ModuleList(wanted).parameters(), strict=True)
    for got, want in pairs:
        torch.testing.assert_close(got.grad, want.grad)


def against_one_process(rank: int, schedule: PipelineSchedule, rows: int, reduction: str, steps: int = 2) -> None:
    """Gradients of two steps, added up, and the losses."""
    own, whole = layers(), layers()
    loss_fn = squares if reduction == "sum" else mean_of_squares
    costs = [3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0]
    stages = stages_from_layers(own, schedule, costs=costs)
    pipeline = Pipeline(stages, schedule, loss_fn, reduction=reduction)  # type: ignore[arg-type]
    for step in range(steps):
        inputs, targets = batch(rows + step)
        wanted = loss_fn(nn.Sequential(*whole)(inputs), targets)
        wanted.backward()
        found = pipeline.evaluate(inputs, targets) if step else None
        loss = pipeline.step(inputs if 0 in pipeline.stages else None, targets)
        if schedule.num_stages - 1 in pipeline.stages:
            assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
            assert found is None or found.item() == pytest.approx(wanted.item(), rel=1e-5)
        else:
            assert loss is found is None
    held = [i for i, layer in enumerate(own) if any(layer is part for stage in stages for part in stage)]
    assert_gradients([own[i] for i in held], [whole[i] for i in held])
    assert all(p.grad is None for i, layer in enumerate(own) if i not in held for p in layer.parameters())


def every_schedule(rank: int, world_size: int) -> None:
    for name in SCHEDULES:
        schedule = build_pipeline(name, world_size, 4)
        if schedule.num_stages <= 7:
            for rows, reduction in ((7, "mean"), (8, "sum")):
                against_one_process(rank, schedule, rows, reduction)
    against_one_process(rank, interleaved_1f1b(world_size, 3, 6 // world_size), 3, "mean")


KEPT = [(3, "unisono"), (2, "gloo")]
SOAKED = [pytest.param(*case, marks=pytest.mark.soak) for case in ((2, "unisono"), (3, "gloo"))]


@pytest.mark.parametrize(("world_size", "backend"), [*KEPT, *SOAKED])
def test_losses_and_gradients_are_those_of_one_process(world_size: int, backend: str) -> None:
    ranks(world_size, backend=backend).run(every_schedule)


def alone(rank: int, world_size: int) -> None:
    for name in SCHEDULES:
        against_one_process(rank, build_pipeline(name, 1, 3), 5, "mean")


def test_one_rank_is_a_pipeline_too() -> None:
    ranks(1).run(alone)


def padded(rank: int, world_size: int) -> None:
    """Cross-entropy of targets that are ignored: one of a microbatch, all of another, and in the end all of all."""
    schedule = build_pipeline("zb-h1", world_size, 3)
    own, whole = layers(), layers()
    stages = stages_from_layers(own, schedule)
    pipeline = Pipeline(stages, schedule, F.cross_entropy, count=lambda target: (target >= 0).sum().item())
    inputs, _ = batch(6)
    for targets in (torch.tensor([0, -100, -100, -100, 2, 3]), torch.full((6,), -100)):
        for module in (*own, *whole):
            module.zero_grad()
        wanted = F.cross_entropy(nn.Sequential(*whole)(inputs), targets)
        wanted.backward()
        loss = pipeline.step(inputs, targets)
        assert loss is None or loss.item() == pytest.approx(wanted.item(), nan_ok=True)
        held = [i for i, layer in enumerate(own) if any(layer is part for stage in stages for part in stage)]
        for got, want in zip(own, whole, strict=True):
            if got in (own[i] for i in held):
                for mine, other in zip(got.parameters(), want.parameters(), strict=True):
                    torch.testing.assert_close(mine.grad, other.grad, equal_nan=True)


def test_a_microbatch_of_padding_alone_adds_nothing() -> None:
    ranks(2).run(padded)


class Words(nn.Module):
    """Tokens to features; the weight is the output layer's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-1)


def tied_on_ranks(rank: int, world_size: int) -> None:
    tokens = torch.randint(11, (6, 5), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(-1, 1)
    targets[0, 1:] = targets[4, :3] = -1  # microbatches count different numbers of tokens
    for name in ("1f1b", "zb-v", "zb-h1"):
        torch.manual_seed(5)
        middle = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        whole = nn.Sequential(Words(), *middle, Head())
        whole[-1].out.weight = whole[0].embedding.weight
        torch.manual_seed(5 + rank)  # copies differ until they are tied
        schedule = build_pipeline(name, world_size, 4)
        own = [Words(), *(nn.Linear(WIDTH, WIDTH) for _ in range(4)), Head()]
        for mine, other in zip(own[:5], whole[:5], strict=True):
            mine.load_state_dict(other.state_dict())
        last, *_, tail = schedule.num_stages - 1, *divide_layers(6, schedule.num_stages)
        tied = [{0: "0.embedding.weight", last: f"{len(tail) - 1}.out.weight"}]
        stages = stages_from_layers(own, schedule)
        pipeline = Pipeline(stages, schedule, token_loss, count=lambda t: (t >= 0).sum().item(), tied=tied)
        optimizers = [torch.optim.SGD(w.parameters(), 0.5) for w in (nn.ModuleList(stages), whole)]
        for _ in range(2):
            optimizers[1].zero_grad()
            for _ in range(2):  # gradients of two steps are added up
                wanted = token_loss(whole(tokens), targets)
                wanted.backward()
                loss = pipeline.step(tokens, targets)
                assert loss is None or loss.item() == pytest.approx(wanted.item(), rel=1e-5)
            for optimizer in optimizers:
                optimizer.step()
            optimizers[0].zero_grad()
        shared = whole[0].embedding.weight
        held = [stages[0][0].embedding.weight] if 0 in pipeline.stages else []
        held += [stages[-1][-1].out.weight] if last in pipeline.stages else []
        for weight in held:
            torch.testing.assert_close(weight, shared, rtol=1e-5, atol=1e-6)
        everyone: list[list[Tensor]] = [[] for _ in range(world_size)]
        dist.all_gather_object(everyone, [w.detach() for w in held])
        copies = [copy for copies in everyone for copy in copies]
        assert len(copies) == 2
        assert torch.equal(copies[0], copies[1])


@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_tied_weights_stay_equal_and_learn_as_one(backend: str) -> None:
    ranks(3, backend=backend).run(tied_on_ranks)


def refused(rank: int, world_size: int) -> list[str]:
    schedule = build_pipeline("1f1b", world_size, 2)
    told = []

    def refuse(error: type[Exception], make: object, *arguments: object, **options: object) -> None:
        with pytest.raises(error) as caught:
            make(*arguments, **options)  # type: ignore[operator]
        told.append(str(caught.value))

    refuse(UsageError, stages_from_layers, layers(2), schedule)
    refuse(UsageError, Pipeline, [nn.Identity()] * (1 + rank % 2), schedule, squares)
    refuse(UsageError, Pipeline, [nn.Identity()], build_pipeline("1f1b", 2, 2), squares)
    refuse(UsageError, Pipeline, [nn.Identity()], schedule, squares, reduction="avg" if rank else "sum")
    refuse(MismatchError, Pipeline, [nn.Identity()], build_pipeline("1f1b", world_size, 2 + rank // 2), squares)
    refuse(ScheduleError, Pipeline, [nn.Identity()], PipelineSchedule("none", 1, 1, ((),) * world_size), squares)
    refuse(UsageError, Pipeline, [nn.Linear(1, 1 + rank)], schedule, squares, tied=[{0: "weight", 2: "weight"}])
    refuse(UsageError, Pipeline, [nn.Linear(1, 1)], schedule, squares, tied=[{0: "weight", 1: "weigth"}])
    pipeline = Pipeline([nn.Linear(4 + (rank == 1), 4)], schedule, mean_of_squares)
    refuse(UsageError, pipeline.report)
    refuse(UsageError, pipeline.step, torch.ones(3, 4), torch.ones(3, 4))
    pipeline = Pipeline([nn.Linear(4, 4)], schedule, mean_of_squares)
    refuse(UsageError, pipeline.step, torch.ones(1, 4), torch.ones(1, 4))
    refuse(UsageError, pipeline.step, None, torch.ones(3, 4))
    with torch.no_grad():
        refuse(UsageError, pipeline.step, torch.ones(3, 4), torch.ones(3, 4))
    refuse(UsageError, pipeline.step, torch.ones(3, 4), torch.ones(4, 4))
    refuse(UsageError, pipeline.step, torch.ones(3, 4), torch.ones(3, 3))
    refuse(UsageError, pipeline.step, torch.ones(3, 4), None)
    refuse(UsageError, Pipeline([nn.Linear(4, 4)], schedule, torch.sub).step, torch.ones(3, 4), torch.ones(3, 4))
    assert pipeline.stages[rank].weight.grad is None
    loss = pipeline.step(torch.ones(3, 4), torch.ones(3, 4))  # the group is as good as before
    assert (loss is None) == (rank < 2)
    assert pipeline.stages[rank].weight.grad is not None
    return told


@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_what_one_rank_refuses_all_refuse_before_anything_moves(backend: str) -> None:
    told = ranks(3, backend=backend).run(refused)
    assert told[0] == told[1] == told[2]
    wanted = [
        "2 layers cannot make 3 stages of a layer or more: use 1 to 2 stages",
        "rank 1: 2 stages given, but 1f1b puts 1 here: [1]",
        "ranks 0, 1, 2: a schedule for 2 ranks does not fit a group of 3",
        "ranks 1, 2: reduction = 'avg': must be",
        "different schedules: rank 0: pipeline 1f1b stages=3 microbatches=2, rank 1: pipeline 1f1b",
        "none pipeline, 1 stage on 3 ranks, 1 microbatch: 3 findings",
        "a tied weight is torch.float32 [1, 1] in stage 0, but stage 2 has torch.float32 [3, 1]",
        "rank 1: stage 1 has no parameter 'weigth'",
        "ranks 0, 1, 2: nothing to report before the first step",
        "rank 1: stage 1 refuses its input, float32 [2, 4]: ",
        "rank 0: a batch of shape [1, 4] does not make 2 microbatches of a row; nothing has been computed or sent",
        "rank 0: the rank of the first stage needs inputs",
        "a step without gradients",
        "rank 2: targets of shape [4, 4] do not fit an input of 3 rows",
        "rank 2: the loss refuses float32 [2, 4] with float32 [2, 3]: ",
        "rank 2: the rank of the last stage needs targets",
        "rank 2: the loss must return a tensor of one number, not float32 [2, 4]",
    ]
    for words, want in zip(told[0], wanted, strict=True):
        assert want in words


class Round(nn.Module):
    """Whole numbers out, so that no gradient comes back."""

    def forward(self, x: Tensor) -> Tensor:
        return x.round().long()


class Forgetful(nn.Module):
    """Looks at its input's shape alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.expand(x.shape[0], WIDTH)


class Values(nn.Module):
    """Looks at values, so that it cannot run without them."""

    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.detach().sum() > -1e9)


class Look(nn.Module):
    """Whole numbers to features."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).mean(1)


def strange_pairs() -> dict[str, tuple[nn.Module, nn.Module]]:
    torch.manual_seed(2)
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    return {
        "no gradient comes back": (Round(), Look()),
        "the input is not looked at": (nn.Linear(WIDTH, WIDTH), Forgetful()),
        "nothing to train in the first": (frozen, nn.Linear(WIDTH, WIDTH)),
        "nothing to train in the last": (nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)),
        "no forward without values": (nn.Linear(WIDTH, WIDTH), Values()),
    }


def strange_stages(rank: int, world_size: int) -> None:
    inputs = torch.rand(5, WIDTH, generator=torch.Generator().manual_seed(1)) * 8
    for name in ("1f1b", "zb-h1"):
        for what, pair in strange_pairs().items():
            whole = nn.Sequential(*strange_pairs()[what])
            options = {"infer": lambda module, x: x} if "values" in what else {}
            pipeline = Pipeline([pair[rank]], build_pipeline(name, world_size, 2), mean_of_squares, **options)
            loss = pipeline.step(inputs, torch.ones(5, WIDTH))
            wanted = mean_of_squares(whole(inputs), torch.ones(5, WIDTH))
            wanted.backward()
            assert loss is None or loss.item() == pytest.approx(wanted.item(), rel=1e-5), what
            for mine, other in zip(pair[rank].parameters(), whole[rank].parameters(), strict=True):
                got = torch.zeros(()) if mine.grad is None else mine.grad
                want = torch.zeros_like(got) if other.grad is None else other.grad
                torch.testing.assert_close(got.expand_as(want), want, msg=what)


@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_stages_without_gradients_or_values(backend: str) -> None:
    ranks(2, backend=backend).run(strange_stages)


def wrong_promise(rank: int, world_size: int) -> None:
    schedule = interleaved_1f1b(1, 2, 2)
    stages = [nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)]
    pipeline = Pipeline(stages, schedule, mean_of_squares, infer=lambda module, x: x)
    words = r"stage 0 returned float32 \[1, 3\] for microbatch 0, but its forward without data gave float32 \[1, 4\]"
    with pytest.raises(UsageError, match=words):
        pipeline.step(torch.ones(2, WIDTH), torch.ones(2, WIDTH))
    pipeline = Pipeline([nn.Identity(), nn.LSTM(WIDTH, WIDTH)], schedule, mean_of_squares)
    with pytest.raises(UsageError, match="stage 1 must return one tensor, not tuple"):
        pipeline.step(torch.ones(2, WIDTH), torch.ones(2, WIDTH))


def test_a_stage_must_return_what_was_promised() -> None:
    ranks(1).run(wrong_promise)


class Slow(torch.autograd.Function):
    """Takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(0.0 if x.is_meta else seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class SlowLayer(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, x: Tensor) -> Tensor:
        return Slow.apply(self.linear(x), self.seconds)


def slow_pipeline(rank: int, world_size: int) -> tuple[float, float, str, int]:
    schedule = build_pipeline("1f1b", world_size, 4)
    group = dist.new_group(list(range(world_size)))
    pipeline = Pipeline([SlowLayer(0.01)], schedule, squares, group=group, reduction="sum")
    reports = []
    for _ in range(4):
        pipeline.step(torch.ones(4, WIDTH), torch.ones(4, WIDTH))
        reports.append(pipeline.report())
    dist.destroy_process_group(group)
    report = min(reports, key=lambda r: abs(r.measured.bubble - r.predicted.bubble))
    in_svg = str(draw(report.measured, "svg")).count("<title>")
    return report.measured.bubble, report.predicted.bubble, str(report), in_svg


def test_the_measured_bubble_is_near_the_predicted_one() -> None:
    results = ranks(3).run(slow_pipeline)
    assert results[0] == results[1] == results[2]
    measured, predicted, words, bars = results[0]
    assert predicted == pytest.approx(2 / 6, abs=0.1)
    assert measured == pytest.approx(predicted, abs=0.15)
    assert f"1f1b: bubble {measured:.1%}, predicted {predicted:.1%}" in words
    assert len(words.splitlines()) == 5
    assert bars == 3 * 8 + 1


def profiled(rank: int, world_size: int) -> set[str]:
    pipeline = Pipeline([nn.Linear(WIDTH, WIDTH)], build_pipeline("zb-h1", world_size, 2), squares)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
        pipeline.step(torch.ones(4, WIDTH), torch.ones(4, WIDTH))
    return {event.key for event in trace.key_averages() if event.key.startswith("pipeline ")}


def test_every_action_has_its_name_in_a_trace() -> None:
    schedule = build_pipeline("zb-h1", 2, 2)
    wanted = [{f"pipeline {action}" for action in row} for row in schedule.actions]
    assert ranks(2).run(profiled) == wanted


def on_ranks_beside_torch(rank: int, world_size: int) -> None:
    """Microbatches of one size, which torch's own pipelines ask for: the same gradients and loss."""
    ours, theirs = layers(), layers()
    schedule = build_pipeline("1f1b", world_size, 4)
    pipeline = Pipeline(stages_from_layers(ours, schedule), schedule, mean_of_squares)
    [stage] = stages_from_layers(theirs, schedule)
    torchs = Schedule1F1B(PipelineStage(stage, rank, world_size, torch.device("cpu")), 4, mean_of_squares)
    inputs, targets = batch(8)
    loss, losses = pipeline.step(inputs, targets), []
    torchs.step(*([inputs] if rank == 0 else []), target=targets if rank == world_size - 1 else None, losses=losses)
    assert_gradients(list(pipeline.stages.values()), [stage])
    if loss is not None:
        torch.testing.assert_close(loss, torch.stack(losses).mean())


@pytest.mark.parametrize("backend", ["unisono", "gloo"])
def test_torchs_own_1f1b_gives_the_same(backend: str) -> None:
    ranks(2, backend=backend).run(on_ranks_beside_torch)
