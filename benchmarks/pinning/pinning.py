"""The same calls of two ranks, each on a core of its own or wherever the scheduler puts them.

python benchmarks/pinning/pinning.py [starts]
"""

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from unisono.bench.result import Result
from unisono.units import show_nbytes

COLLECTIVES, SIZES = ("all_reduce", "broadcast", "send_recv"), "4,4K,64K,1M,16M"


def measured(pin: bool, file: Path) -> dict[tuple[str, int], float]:
    """Microseconds of each call in a job of its own."""
    options = ["-n", "2", "--bytes", SIZES, "--seconds", "1", "--json", str(file), *["--pin"] * pin]
    line = [sys.executable, "-m", "unisono.cli", "bench", *COLLECTIVES, *options]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rows = [row for name in COLLECTIVES for row in Result.load(file).of(name, "unisono")]
    return {(row.collective, row.nbytes): 1e6 * row.time for row in rows}


def main() -> None:
    """Prints a line of Markdown per call and size; jobs of both kinds take turns."""
    starts = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    with tempfile.TemporaryDirectory() as folder:
        jobs = [[measured(pin, Path(folder) / "result.json") for pin in (True, False)] for _ in range(starts)]
    print("| call | size | pinned, µs: median | slowest job | not pinned: median | slowest job |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for collective, nbytes in jobs[0][0]:
        cells = []
        for kind in (0, 1):
            times = [job[kind][collective, nbytes] for job in jobs]
            cells += [f"{statistics.median(times):.1f}", f"{max(times):.1f}"]
        print(f"| {collective} | {show_nbytes(nbytes)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
