import json
from pathlib import Path

from traces.records import MAIN, two_ranks
from unisono.trace.chrome import write_trace
from unisono.trace.record import read


def test_every_call_has_its_phases_and_compute_lies_beside(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    compute = {
        "baseTimeNanoseconds": 10**18,
        "traceEvents": [
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 2.5, "dur": 0.4, "tid": 33, "pid": 1},
            {"ph": "X", "cat": "python_function", "name": "noise", "ts": 2.5, "dur": 0.4, "tid": 33, "pid": 1},
            {"ph": "M", "name": "process_name", "pid": 1},
        ],
    }
    (tmp_path / "rank-0-100.compute.json").write_text(json.dumps(compute))
    write_trace(tmp_path / "trace.json", read(tmp_path))
    data = json.loads((tmp_path / "trace.json").read_text())
    events = [event for event in data["traceEvents"] if event["ph"] == "X"]
    of_rank_0 = [(e["name"], e["ts"], round(e["ts"] + e["dur"], 3)) for e in events if e["pid"] == 0]
    assert of_rank_0 == [
        ("allreduce", -0.01, 1.01),
        ("allreduce", 1.99, 2.01),
        ("wait", 3.9, 4.0),
        ("all_reduce", 0.0, 1.0),
        ("wait", 0.0, 0.4),
        ("reduce", 0.6, 0.9),
        ("move", 0.4, 0.6),
        ("move", 0.9, 1.0),
        ("all_reduce", 2.0, 4.0),
        ("move", 2.0, 4.0),
        ("aten::mm", 1.5, 1.9),
    ]
    first = next(event for event in events if event["name"] == "all_reduce")
    assert (first["args"]["nbytes"], first["args"]["from"]) == (1024, "train.py:5 in step")
    names = {(e["pid"], e["args"]["name"]) for e in data["traceEvents"] if e["name"] == "process_name"}
    assert names == {(0, "rank 0 (pid 100 on here)"), (1, "rank 1 (pid 101 on here)")}
    assert MAIN not in {event["tid"] for event in events}
