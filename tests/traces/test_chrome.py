import json
from pathlib import Path

from traces.records import MAIN, read_one, two_ranks
from unisono.trace.chrome import write_trace


def test_every_call_has_its_phases_and_compute_lies_beside(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    compute = {
        "baseTimeNanoseconds": 10**18,
        "traceEvents": [
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.95, "dur": 0.4, "tid": 33, "pid": 1},
            {"ph": "X", "cat": "python_function", "name": "noise", "ts": 2.5, "dur": 0.4, "tid": 33, "pid": 1},
            {"ph": "M", "name": "process_name", "pid": 1},
        ],
    }
    (tmp_path / "rank-0-100.compute.json").write_text(json.dumps(compute))
    write_trace(tmp_path / "trace.json", read_one(tmp_path))
    data = json.loads((tmp_path / "trace.json").read_text())
    events = [event for event in data["traceEvents"] if event["ph"] == "X"]
    of_rank_0 = [(e["name"], e["ts"], round(e["ts"] + e["dur"], 3)) for e in events if e["pid"] == 0]
    assert of_rank_0 == [
        ("allreduce", 0.04, 1.06),
        ("allreduce", 2.04, 2.06),
        ("wait", 3.95, 4.05),
        ("all_reduce", 0.05, 1.05),
        ("wait", 0.05, 0.45),
        ("reduce", 0.65, 0.95),
        ("move", 0.45, 0.65),
        ("move", 0.95, 1.05),
        ("all_reduce", 2.05, 4.05),
        ("move", 2.05, 4.05),
        ("aten::mm", 0.0, 0.4),  # the first of all: Perfetto drops what comes before 0
    ]
    first = next(event for event in events if event["name"] == "all_reduce")
    assert (first["args"]["nbytes"], first["args"]["from"]) == (1024, "train.py:5 in step")
    names = {(e["pid"], e["args"]["name"]) for e in data["traceEvents"] if e["name"] == "process_name"}
    assert names == {(0, "rank 0 (pid 100 on here)"), (1, "rank 1 (pid 101 on here)")}
    assert MAIN not in {event["tid"] for event in events}
