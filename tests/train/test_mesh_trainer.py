import io
from pathlib import Path

import pytest
from rich.console import Console

from train.small import one_process, small
from unisono.parallel.mesh import ParallelDims
from unisono.train.launch import launch
from unisono.train.report import show_holdings, show_traffic
from unisono.train.settings import (
    AxisTraffic,
    MeshReport,
    MeshSettings,
    ModelShape,
    Outcome,
    RankShare,
    Settings,
    StepRecord,
)

MODEL = ModelShape(width=16, layers=3, heads=4, context=16)


@pytest.mark.parametrize(
    ("shape", "backend"), [(ParallelDims(tp=2, pp=2), "unisono"), (ParallelDims(dp=2, sp=2), "gloo")], ids=str
)
def test_the_loss_curve_is_that_of_one_process(tmp_path: Path, shape: ParallelDims, backend: str) -> None:
    settings = small(tmp_path, ranks=4, batch=24, backend=backend, shape=MODEL, mesh=MeshSettings(shape))
    outcome = launch(settings, lambda records: None)
    assert [record.loss for record in outcome.records] == pytest.approx(one_process(settings), rel=0, abs=1e-5)
    assert all(0 < record.sync_seconds < record.seconds for record in outcome.records)
    assert outcome.sample.startswith(b"The ")
    report = outcome.mesh
    assert report is not None
    assert list(report.traffic) == list(shape.axes)
    assert sum(traffic.seconds for traffic in report.traffic.values()) > 0
    assert [share.place for share in report.shares] == [
        {axis: place for axis, place in shape.place(rank).items() if axis in shape.axes} for rank in range(4)
    ]
    if shape.pp > 1:
        assert [share.layers for share in report.shares] == ["0-1", "0-1", "2", "2"]
        assert [share.heads for share in report.shares] == ["0-1", "2-3"] * 2
        assert report.bubble is not None
        assert all(0 < bubble < 1 for bubble in report.bubble)
    else:
        assert [share.sequences for share in report.shares] == ["0-11", "0-11", "12-23", "12-23"]
        assert [share.positions for share in report.shares] == ["0-3, 12-15", "4-11"] * 2
        assert report.bubble is None
        assert all(share.parameters == outcome.parameters for share in report.shares)
    assert all(share.state_nbytes > 16 * share.parameters for share in report.shares)  # four float32, and step counts
    assert all(share.activation_nbytes > 0 for share in report.shares)


def test_what_is_told_of_a_mesh() -> None:
    share = RankShare({"pp": 1, "tp": 0}, "2-3", "0-1", "0-15", "0-95", 67_808, 2**20, 3 * 2**19)
    traffic = {"pp": AxisTraffic(13, 2048, 0.02), "tp": AxisTraffic(33.2, 2**21, 0.05)}
    settings = Settings(mesh=MeshSettings(ParallelDims(tp=2, pp=2), "zb-h1"))
    records = [StepRecord(1, 3.0, 0.15, 0.01), StepRecord(2, 3.0, 0.25, 0.01)]
    mesh = MeshReport([share] * 4, traffic, (0.25, 0.2))
    outcome = Outcome(settings, "a text", 1, 3.2, records, [(0, 5.5)], b"", mesh)
    console = Console(file=io.StringIO(), width=80)
    show_holdings(console, outcome)
    show_traffic(console, outcome)
    assert isinstance(console.file, io.StringIO)
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    for line in (
        "who holds what on the mesh tp2 pp2",
        "rank pp tp layers heads parameters states activations",
        "3 1 0 2-3 0-1 67,808 1 MiB 1.5 MiB",
        "communication of a rank in a step on unisono, waits included",
        "pp 2 13 2 KiB 10.0%",
        "tp 2 33 2 MiB 25.0%",
        "bubble of zb-h1, 4 microbatches: 25.0% measured, 20.0% predicted",
    ):
        assert line in lines
