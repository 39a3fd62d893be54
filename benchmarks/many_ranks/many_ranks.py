"""Small calls of more ranks than cores, beside Gloo's: what each rank more adds.

python benchmarks/many_ranks/many_ranks.py [seconds per collective]
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from unisono.bench.result import Result

RANKS, COLLECTIVES = (2, 4, 8, 16), ("all_reduce", "all_gather", "broadcast", "barrier")


def measured(ranks: int, seconds: float, file: Path) -> Result:
    """One run of the bench at 4 bytes."""
    options = ["-n", str(ranks), "--bytes", "4", "--against", "gloo", "--pin", "--seconds", f"{seconds:g}"]
    line = [sys.executable, "-m", "unisono.cli", "bench", *COLLECTIVES, *options, "--json", str(file)]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return Result.load(file)


def main() -> None:
    """Prints a line of Markdown per collective: microseconds, and how many times Gloo's are, by ranks."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 4.0
    with tempfile.TemporaryDirectory() as folder:
        results = [measured(ranks, seconds, Path(folder) / f"{ranks}.json") for ranks in RANKS]
    print(f"| 4 B, µs (Gloo by unisono) | {' | '.join(f'{ranks} ranks' for ranks in RANKS)} |")
    print(f"| --- |{' ---: |' * len(RANKS)}")
    for collective in COLLECTIVES:
        cells = []
        for result in results:
            (mine,), (theirs,) = (result.of(collective, name) for name in ("unisono", "gloo"))
            cells.append(f"{1e6 * mine.time:.1f} ({theirs.time / mine.time:.0f})")
        print(f"| {collective} | {' | '.join(cells)} |")
    print(f"\n{results[0].machine.words()}")


if __name__ == "__main__":
    main()
