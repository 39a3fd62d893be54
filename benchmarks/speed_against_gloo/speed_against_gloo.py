"""Measure every collective against Gloo and write the record: README.md here, with the numbers in n2.json and n4.json.

python benchmarks/speed_against_gloo/speed_against_gloo.py [--only 2|4] [--seconds S] [--again]

Results of other machines, made by the command that the page shows and put beside as n2_WHERE.json, are shown with them.
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

A cell is Gloo's time by unisono's; **bold** reaches the claim, which is in brackets. *Italic*: so fast is Gloo there
that nothing which reads every input byte and writes every output byte once, at the rate of the machine, reaches the
claim. Sizes count as in nccl-tests; with more than one rank a size below an element per rank is rounded up to that.
Every result was compared with what must come out.

{tables}
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
        if collective == "barrier" or nbytes <= a.nbytes <= 4 * nbytes:
            return b.time / a.time, a.share_of_bound
    return None


class Table:
    """The Markdown of one result, and how many of the claims it reaches or nothing could."""

    def __init__(self, result: Result) -> None:
        self.result, self.ranks = result, int(result.settings["ranks"])
        self.reached = self.asked = self.impossible = 0
        head = " | ".join(show_nbytes(size) for size in SIZES)
        ways = f"| {self.ranks} ranks, {result.machine.cores} cores | {head} | of the bound |"
        self.lines = [ways, f"| --- |{' ---: |' * (len(SIZES) + 1)}", *map(self._line, (*ALL, *MOVING))]

    def _line(self, collective: str) -> str:
        cells, share = [""] * len(SIZES), 0.0
        targets = MOVING_TARGETS if collective in MOVING else TARGETS[self.ranks]
        for i, size in enumerate(SIZES if collective != "barrier" else SIZES[:1]):
            if found := ratio(self.result, collective, size):
                cells[i], share = self._cell(*found, targets[i]), found[1]
        last = "" if collective == "barrier" else f"{share:.0%}"
        if collective in ALL[:4] and self.ranks <= self.result.machine.cores:
            self.asked, self.reached = self.asked + 1, self.reached + (share >= BOUND)
            last = f"{f'**{last}**' if share >= BOUND else last} ({BOUND:.0%})"
        return f"| {collective} | {' | '.join(cells)} | {last} |"

    def _cell(self, value: float, share: float, target: float) -> str:
        self.asked += 1
        text = f"{value:.1f}" if value < 99.5 else f"{value:.0f}"
        if value >= target:
            self.reached += 1
            text = f"**{text}**"
        elif share and value / share < target:
            self.impossible += 1
            text = f"*{text}*"
        return f"{text} ({target})"

    def machine(self) -> str:
        """What it was measured on."""
        rates, machine = self.result.rates, self.result.machine
        copy = ", ".join(
            f"{rate / 1e9:.3g} at {show_nbytes(size)}" for size, rate in zip(rates.sizes, rates.copy, strict=True)
        )
        pinned = "each rank on its own core" if self.ranks <= machine.cores else "not pinned"
        return (
            f"**{self.reached} of {self.asked} reach it**, {self.impossible} of the others cannot. "
            f"{self.ranks} ranks, {pinned}: {machine.words()}; load before the run {machine.load:.1f}; "
            f"copying, GB/s per rank: {copy}.\n"
        )


def write(results: list[Result]) -> None:
    """README.md from what was measured."""
    tables = [Table(result) for result in results]
    shown = command(0, 20)
    shown[shown.index("-n") + 1] = "N"
    text = "\n".join(line for table in tables for line in (*table.lines, "", table.machine()))
    (HERE / "README.md").write_text(TEXT.format(tables=text, command=" ".join(["unisono", *shown, "nN.json"])))


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
    write([Result.load(file) for file in sorted(HERE.glob("n*.json"))])


if __name__ == "__main__":
    main()
