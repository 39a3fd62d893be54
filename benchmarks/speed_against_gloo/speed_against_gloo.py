"""Measure every collective against Gloo and write the record: README.md here, with the numbers in n2.json and n4.json.

python benchmarks/speed_against_gloo/speed_against_gloo.py [--only 2|4] [--seconds S]
"""

import argparse
import subprocess
import sys
from pathlib import Path

from unisono.bench.result import Result
from unisono.units import show_nbytes

HERE = Path(__file__).parent
SIZES = (4, 1 << 10, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20)
ALL = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "barrier")
MOVING = ("broadcast", "send_recv")
TARGETS = {2: (20, 20, 20, 20, 10, 7, 5), 4: (10, 50, 50, 40, 15, 5, 4)}
MOVING_TARGETS = (10, 10, 10, 8, 4, 3, 3)
BOUND = 0.5  # share of the machine's bound at 256 MiB with a core per rank

TEXT = """# How much faster than Gloo

**Claim to be met** (float32, medians, both in the same processes, taking turns): the ratios below. At 256 MiB with a
core per rank a call also takes at most twice the machine's own lower bound: the bytes that must be read and written, at
the rate at which all ranks at once copy memory.

{verdict}
{tables}
A cell is Gloo's time by unisono's; **bold** reaches the claim, which is in brackets. Sizes count as in nccl-tests; with
more than one rank a size below an element per rank is rounded up to that. Every result was compared with what must come
out.

{machines}
Once per rank count N (then `make bench` writes this page from the JSON files beside it):

    {command}
"""


def command(ranks: int, seconds: float) -> list[str]:
    """The command line of one table."""
    sizes = ",".join(show_nbytes(size).replace(" ", "").removesuffix("B") or "0" for size in SIZES)
    sizes = sizes.replace("Ki", "K").replace("Mi", "M")
    options = ["-n", str(ranks), "--bytes", sizes, "--against", "gloo", "--pin", "--seconds", f"{seconds:g}"]
    return ["bench", *ALL, *MOVING, *options, "--json"]


def ratio(result: Result, collective: str, nbytes: int) -> tuple[float, float] | None:
    """Gloo's time by unisono's, and unisono's share of the bound, at the size measured for ``nbytes``."""
    mine, theirs = (result.of(collective, name) for name in ("unisono", "gloo"))
    for a, b in zip(mine, theirs, strict=True):
        if collective == "barrier" or nbytes <= a.nbytes < 4 * nbytes:
            return b.time / a.time, a.share_of_bound
    return None


def table(result: Result, ranks: int) -> tuple[list[str], int, int]:
    """Lines of Markdown, how many claims were reached, and of how many."""
    head = [show_nbytes(size) for size in SIZES]
    lines = [f"| {ranks} ranks | {' | '.join(head)} | of the bound |", f"| --- |{' ---: |' * (len(head) + 1)}"]
    reached = asked = 0
    for collective in (*ALL, *MOVING):
        cells = []
        share = 0.0
        for i, size in enumerate(SIZES if collective != "barrier" else SIZES[:1]):
            found = ratio(result, collective, size)
            if found is None:
                cells.append("")
                continue
            target = MOVING_TARGETS[i] if collective in MOVING else TARGETS[ranks][i]
            value, share = found
            asked, reached = asked + 1, reached + (value >= target)
            text = f"{value:.1f}" if value < 99.5 else f"{value:.0f}"
            cells.append(f"{f'**{text}**' if value >= target else text} ({target})")
        cells += [""] * (len(SIZES) - len(cells))
        bounded = collective in ALL[:4] and ranks <= result.machine.cores
        last = f"{share:.0%}" if collective != "barrier" else ""
        if bounded:
            asked, reached = asked + 1, reached + (share >= BOUND)
            last = f"{f'**{last}**' if share >= BOUND else last} ({BOUND:.0%})"
        lines.append(f"| {collective} | {' | '.join(cells)} | {last} |")
    return lines, reached, asked


def write(results: dict[int, Result]) -> None:
    """README.md from what was measured."""
    tables, machines, reached, asked = [], [], 0, 0
    for ranks, result in results.items():
        lines, some, of = table(result, ranks)
        tables += ["", *lines]
        reached, asked = reached + some, asked + of
        rates = ", ".join(
            f"{rate / 1e9:.3g} at {show_nbytes(size)}"
            for size, rate in zip(result.rates.sizes, result.rates.copy, strict=True)
        )
        pinned = "each rank on its own core" if ranks <= result.machine.cores else "not pinned"
        machines.append(
            f"{ranks} ranks, {pinned}: {result.machine.words()}; load before the run {result.machine.load:.1f}; "
            f"copying, GB/s per rank: {rates}.\n"
        )
    verdict = f"**{reached} of {asked} cells reach it.**" if reached < asked else "**Met, in every cell.**"
    shown = command(0, 20)
    shown[shown.index("-n") + 1] = "N"
    (HERE / "README.md").write_text(
        TEXT.format(
            verdict=verdict,
            tables="\n".join([*tables, ""]),
            machines="\n".join(machines),
            command=" ".join(["unisono", *shown, "nN.json"]),
        )
    )


def main() -> None:
    """Measure what was asked for, then write the page from all results there are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", type=int, choices=sorted(TARGETS), help="this rank count; the other stays as it is")
    parser.add_argument("--seconds", type=float, default=20.0, help="about what each collective shall take")
    parser.add_argument("--again", action="store_true", help="measure nothing, write the page")
    arguments = parser.parse_args()
    for ranks in TARGETS:
        if not arguments.again and arguments.only in (None, ranks):
            line = [*command(ranks, arguments.seconds), str(HERE / f"n{ranks}.json")]
            subprocess.run([sys.executable, "-m", "unisono.cli", *line], check=True)
    found = {ranks: HERE / f"n{ranks}.json" for ranks in TARGETS}
    write({ranks: Result.load(file) for ranks, file in found.items() if file.exists()})


if __name__ == "__main__":
    main()
