"""Measure collectives against MPICH, a C library, and write the record: README.md here, with the numbers in n2.json.

python benchmarks/speed_against_mpi/speed_against_mpi.py [--ranks 2] [--seconds S] [--again]

Needs the extra `bench` (mpich, mpi4py). All ways take turns in the same processes, which mpiexec starts.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from unisono.bench.result import Result
from unisono.units import show_nbytes, show_seconds

HERE = Path(__file__).parent
SIZES = (4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20)
ALL = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send_recv")
AHEAD_FROM = 64 << 10  # bytes
SMALL, FACTOR = (4, 1 << 10), 1.3

TEXT = """# Against MPICH

**Claim to be met** (float32, medians, all in the same processes, taking turns, a core per rank): from 64 KiB on a call
takes no longer than MPICH's; and below, where torch's wrapper and options are most of a call's time, a persistent
all_reduce (`unisono.prepare`) takes at most {factor} times MPICH's time at 4 B and at 1 KiB.

A cell: unisono's time, in brackets that of the persistent call, then MPICH's; and MPICH's time by unisono's.
**Bold** is ahead. Every result was compared with what must come out.

{tables}
    python benchmarks/speed_against_mpi/speed_against_mpi.py
"""


def command(ranks: int, seconds: float) -> list[str]:
    """The command line of the table."""
    sizes = ",".join(str(size) for size in SIZES)
    options = ["-n", str(ranks), "--bytes", sizes, "--against", "mpi", "--algorithm", "default,persistent", "--pin"]
    return ["bench", *ALL, *options, "--seconds", f"{seconds:g}", "--json"]


def cell(result: Result, collective: str, nbytes: int) -> tuple[str, float, float]:
    """What the table shows, MPICH's time by unisono's, and the persistent call's by MPICH's (0: there is none)."""
    rows = {name: {row.nbytes: row for row in result.of(collective, name)} for name in ("unisono", "mpi")}
    lasting = {row.nbytes: row for row in result.of(collective, "unisono:persistent")}
    size = min((size for size in rows["unisono"] if size >= nbytes), default=0)
    mine, theirs = rows["unisono"].get(size), rows["mpi"].get(size)
    if mine is None or theirs is None:
        return "", 0.0, 0.0
    ratio, prepared = theirs.time / mine.time, lasting.get(size)
    again = f" ({show_seconds(prepared.time)})" if prepared is not None else ""
    shown = f"**{ratio:.2f}**" if ratio >= 1 else f"{ratio:.2f}"
    share = prepared.time / theirs.time if prepared is not None else 0.0
    return f"{show_seconds(mine.time)}{again} / {show_seconds(theirs.time)}: {shown}", ratio, share


def table(result: Result) -> str:
    """The Markdown of one result."""
    ranks, machine = int(result.settings["ranks"]), result.machine
    lines = [
        f"| {ranks} ranks, {machine.cores} cores | {' | '.join(map(show_nbytes, SIZES))} |",
        f"| --- |{' ---: |' * len(SIZES)}",
    ]
    asked = reached = 0
    shares = []
    for collective in ALL:
        cells = []
        for nbytes in SIZES:
            text, ratio, share = cell(result, collective, nbytes)
            cells.append(text)
            if nbytes >= AHEAD_FROM and text:
                asked, reached = asked + 1, reached + (ratio >= 1)
            if collective == "all_reduce" and nbytes in SMALL and share:
                shares.append(f"{share:.2f} at {show_nbytes(nbytes)}")
        lines.append(f"| {collective} | {' | '.join(cells)} |")
    lines.append(
        f"\nFrom 64 KiB on **{reached} of {asked}** are ahead. The persistent all_reduce takes {', '.join(shares)} of "
        f"MPICH's time. {machine.words()}; load before the run {machine.load:.1f}.\n"
    )
    return "\n".join(lines)


def main() -> None:
    """Measure, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=15.0, help="about what each collective shall take")
    parser.add_argument("--again", action="store_true", help="measure nothing, write the page")
    arguments = parser.parse_args()
    if not arguments.again:
        line = [*command(arguments.ranks, arguments.seconds), str(HERE / f"n{arguments.ranks}.json")]
        subprocess.run([sys.executable, "-m", "unisono.cli", *line], check=True)
    tables = "\n".join(table(Result.load(file)) for file in sorted(HERE.glob("n*.json")))
    (HERE / "README.md").write_text(TEXT.format(tables=tables, factor=FACTOR))


if __name__ == "__main__":
    main()
