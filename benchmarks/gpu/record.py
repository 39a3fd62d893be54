"""README.md here, from what was measured: bench_*.json of `unisono bench`, beside_compute_*.json and so on.

python benchmarks/gpu/record.py
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from unisono.bench.result import Result
from unisono.units import show_nbytes

HERE = Path(__file__).parent
TIMINGS = {
    "graph": "Replay of CUDA graphs, calls back to back: the GPU's time of a call, µs",
    "between": "What a call adds between small kernels, in CUDA graphs, µs",
    "eager": "The host's time of an eager call, µs",
    "async": "The host's time of a call with `async_op=True` and its `wait`, µs",
}
TEXT = """# On GPUs: unisono, NCCL, torch's symmetric memory

**What is asked**: whether kernels from schedules over mapped memory are faster than plain NCCL and than torch's own
operations on symmetric memory (`one_shot_all_reduce`, `two_shot_all_reduce_`), by themselves, between other kernels,
beside computation, in training steps. NVLink multicast is off for all. Medians; the slower rank counts; all results are
checked before they are timed. "x NCCL" is NCCL's time by unisono's.

torch's `two_shot_all_reduce_` works in place on symmetric memory, which a program has to allocate as such and its ranks
to exchange. unisono takes any tensor, so its kernels move the data into mapped memory and out again: two_shot takes
1.07 times as long at 4 MiB, as long at 16 MiB, and 0.82 times at 64 MiB, which NCCL carries in unisono's group.

Where both take the same time on the GPU NCCL carries the call in unisono's group, too. The host's time of such a call
is NCCL's, the guard's and that of a group in Python: 1.2 to 1.7 times NCCL's. The host's clock changed within the run,
by up to twice, as NCCL's own times at 4 and at 256 KiB show: contenders take turns, so a row is fair, but two rows are
not always comparable. Calls and what is beside computation are of one state, training steps of a day before it.

## A rank that was late

A rank of which a peer had once waited for 0.1 ms or longer made calls by 128 blocks 10 to 20 times as long from then
on: all waiting blocks looked for a word of their host every 256 polls, 128 reads of host memory take 0.1 to 0.2 ms,
and the peer waited for that in its next call, and so on in turn. 1 in 5 to 1 in 100 replays of 50 calls of 4 MiB fell
into that by itself (4.7 to 6 ms where 0.5 are usual). The word is read every 65,536 polls now. A replay of 50
all_gathers of 4 MiB whose peer comes 1 ms late, one run of both states: 4.59 ms before, and now within 1.5 times the
0.51 ms of a prompt one (tests/gpu/test_late_ranks_on_gpus.py); in the tables below no replay of kernels from 64 KiB
on took more than 1.5 times the quickest one.

## The host's time

Of an eager call of 4 KiB on lists, 2 GPUs, µs, median of 15 turns of 100 calls by turns with NCCL, the slower rank:

| | unisono | NCCL | NCCL / unisono |
| --- | ---: | ---: | ---: |
| all_gather of a list | 26.7 | 53.8 | 2.01 |
| reduce_scatter of a list | 28.5 | 59.5 | 2.09 |

What an all_reduce of 4 KiB is made of, in a group of one rank, where all but the guard's look at peers is the same, on
a host in a faster phase of its clock (the whole 12.4 µs, asynchronous 13.3; NCCL 14.3 and 17.2, which has nothing to
do there): `cuLaunchKernelEx` 3.4 to 3.8, and of that launch Python's part 0.7; torch's function around it 3 to 4, of
which its options are 1.6; the guard 0.95; reading op, dtype, shape and addresses and looking the kind up 1.5; the
Work of an asynchronous call 0.7 and its `wait` 0.3. What was tried and is no quicker: parameters in one packed buffer
(3.7), `cuLaunchKernel` by ctypes (4.4) or by cuda.bindings (4.0), keeping Python's lock while launching (3.6).

So 12 µs at 4 KiB holds where the host's clock is fast (a core runs the same at 13 to 22 µs in other phases), and 15 µs
asynchronous likewise: the driver and torch's own function are 7 of them, and no part left is larger than 1 µs.

Calls that NCCL carries take the host 9 to 11 µs more than in a group of NCCL's own when 20 of them follow each other,
and the guard and the look-up take 2.5 µs of that when they run again and again: the rest, it seems, is code that has
left the caches. A training step makes one such call in a millisecond. On one GPU, where NCCL has nothing to move and
the host's time is all there is, that is what a step takes more: 0.96 of NCCL's speed for a small DDP, 0.98 FSDP2, 0.98
TP; large 0.89, 0.99, 0.98. On 2 GPUs the transfers hide most of it: the table below. Two groups of plain NCCL differed
by 0.3 % in one run.

all_reduce of 64 MiB, the one size where torch's two_shot is ahead (0.82), goes by NCCL although kernels alone take
219 µs with 128 blocks (NCCL 247 to 257, two_shot 212), and matmuls and 12 such calls on another stream end in 0.87 of
the time that they take by NCCL: kernels run on the current stream, and DDP's buckets have such sizes, whose
all_reduce would then hold up the backward pass. Each GPU has to send 64 MiB, which takes 181 µs at 370 GB/s, the most
that was seen over NVLink here; 1.1 times two_shot's speed would be 193.

{sections}
## How it was measured

    unisono bench all --device cuda -d bfloat16 --against nccl,symm_mem -b 4K -e 256M -f 4 --json bench_2_h200.json
    torchrun --standalone --nproc-per-node 2 benchmarks/gpu/beside_compute.py
    torchrun --standalone --nproc-per-node 2 benchmarks/gpu/training_steps.py --steps 60
    torchrun --standalone --nproc-per-node 2 benchmarks/gpu/launch_shapes.py
    python benchmarks/gpu/record.py

The last one writes this page. docs/benchmarking.md says what the timings mean.
"""


def micro(result: Result, collective: str, contender: str, timing: str, nbytes: int) -> float | None:
    """A time in µs, if there is one."""
    found = [row.time for row in result.of(collective, contender, timing) if row.nbytes == nbytes]
    return 1e6 * found[0] if found else None


def bench(file: Path) -> Iterator[str]:
    """The tables of one result of `unisono bench`."""
    result = Result.load(file)
    yield f"## {result.machine.gpu}: calls\n"
    yield f"{result.rows[0].dtype}; {replace(result.machine, gpu='').words()}.\n"
    others = [name for name in result.contenders if name not in ("unisono", "nccl")]
    for timing, title in TIMINGS.items():
        kinds = [collective for collective, known in result.kinds if known == timing]
        if not kinds:
            continue
        yield f"### {title}\n"
        yield f"| | bytes | unisono | NCCL | x NCCL | {' | '.join(name.replace(':', ' ') for name in others)} |"
        yield f"| --- | ---: | ---: | ---: | ---: |{' ---: |' * len(others)}"
        for collective in kinds:
            for row in result.of(collective, "unisono", timing):
                mine, nccl = 1e6 * row.time, micro(result, collective, "nccl", timing, row.nbytes)
                rivals = [micro(result, collective, name, timing, row.nbytes) for name in others]
                shown = " | ".join("" if each is None else f"{each:.1f}" for each in rivals)
                beside = f"{nccl:.1f} | **{nccl / mine:.2f}**" if nccl is not None else " | "
                yield f"| {collective} | {show_nbytes(row.nbytes)} | {mine:.1f} | {beside} | {shown} |"
        yield ""


def beside(data: dict[str, Any]) -> Iterator[str]:
    """Collectives beside matmuls."""
    yield f"## {data['machine']['gpu']}: beside computation\n"
    yield "16 matmuls of 4096 x 4096 on one stream, calls on another, until both are done, ms. A kernel of so many"
    yield "blocks occupies as many of the 132 multiprocessors at most; by default they are 128.\n"
    yield "| | bytes | calls | | matmuls alone | calls alone | together | by NCCL's |"
    yield "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |"
    rows = data["rows"]
    for row in rows:
        case = row["collective"], row["nbytes"]
        nccl = next(r["together"] for r in rows if (r["collective"], r["nbytes"]) == case and r["contender"] == "nccl")
        times = " | ".join(f"{1e3 * row[name]:.2f}" for name in ("matmuls", "alone", "together"))
        named = f"{case[0]} | {show_nbytes(case[1])} | {row['calls']} | {row['contender']}"
        yield f"| {named} | {times} | {row['together'] / nccl:.3f} |"
    yield ""


def steps(data: dict[str, Any]) -> Iterator[str]:
    """Training steps."""
    yield f"## {data['machine']['gpu']}: training steps\n"
    yield "| model | | unisono, ms | NCCL, ms | NCCL / unisono | losses apart |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for row in data["rows"]:
        mine, nccl = row["unisono"]["ms"], row["nccl"]["ms"]
        yield f"| {row['model']} | {row['kind']} | {mine:.2f} | {nccl:.2f} | {nccl / mine:.3f} | {row['apart']:.1e} |"
    yield ""


def shapes(data: dict[str, Any]) -> Iterator[str]:
    """Launch shapes: the default and the fastest of each size."""
    yield f"## {data['machine']['gpu']}: launch shapes\n"
    yield "| | | bytes | default: tile, warps, blocks | µs | fastest | µs |"
    yield "| --- | --- | ---: | --- | ---: | --- | ---: |"
    cases: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in data["rows"]:
        cases.setdefault((row["collective"], row["schedule"], row["nbytes"]), []).append(row)
    for (collective, schedule, nbytes), rows in cases.items():
        pair = rows[0], min(rows, key=lambda row: row["seconds"])
        shown = [f"{show_nbytes(row['tile'])}, {row['warps']}, {row['blocks']}" for row in pair]
        named = [f"{words} | {1e6 * row['seconds']:.1f}" for words, row in zip(shown, pair, strict=True)]
        yield f"| {collective} | {schedule} | {show_nbytes(nbytes)} | {' | '.join(named)} |"
    yield ""


def main() -> None:
    """Write the page."""
    lines = [line for file in sorted(HERE.glob("bench_*.json")) for line in bench(file)]
    for name, section in (("beside_compute", beside), ("training_steps", steps), ("launch_shapes", shapes)):
        for file in sorted(HERE.glob(f"{name}_*.json")):
            lines += section(json.loads(file.read_text()))
    (HERE / "README.md").write_text(TEXT.format(sections="\n".join(lines)), encoding="utf-8")


if __name__ == "__main__":
    main()
