"""The generator for all_to_all of rows whose numbers lie on the device: no host knows them, so graphs can replay it.

The rows of the program are those of the direct all_to_all; a block of threads walks over tiles as in any kernel, but
where a chunk begins and ends is read from memory: of what this rank sends from its ``counts``, of what it receives
from words that come with every tile, the number of rows for this rank and the most that their sender has for any. So
nothing is exchanged beforehand, and all ranks know how many tiles there are once the first has come.

Rows past the end of the input are sent as zeros, rows past the capacity of the output are dropped, and what is left of
the output is filled with zeros: so the reverse call is the transpose of the call, whatever the counts.
"""

from unisono.gpu.device_text import MODULE_HEAD
from unisono.gpu.kernel_text import Form, Tile, held, indented
from unisono.gpu.layout import WORLD_SIZE_MAX
from unisono.program import Place, Program

__all__ = ["ARGUMENTS", "row_kernel", "row_kernel_name", "row_module"]

ARGUMENTS = (
    "x", "counts", "out", "received", "bases", "counters", "record", "rows", "capacity", "width", "header", "limit"
)  # fmt: skip
"""Rows in and the numbers of them for each rank, rows out and the numbers of them from each; how many fit in ``x`` and
in ``out``, elements of a row; the rest as in `kernel_text.ARGUMENTS`."""

_HEAD = f'''
WORDS = tl.constexpr({8 * WORLD_SIZE_MAX})


@triton.jit
def word(half, SOURCE: tl.constexpr):
    """A rank's word, at the end of a half: above the most rows that it sends to any rank, below those for this one."""
    return (half + (HALF - WORDS + 8 * SOURCE)).to(tl.pointer_type(tl.int64))


@triton.jit
def gave_up(mine):
    """The abort word: not 0 once a wait has ended without its peer, whose words are then of another call."""
    return tl.load(mine.to(tl.pointer_type(tl.int32)), volatile=True)


@triton.jit
def agreed(number, offsets):
    """What the first thread has read, in all threads: they would part if the memory changed while they read it."""
    return tl.max(tl.where(offsets == 0, number, 0), 0)
'''
_MOST = (1 << 31) - 1


def row_module(kernel: str) -> str:
    """The text of a kernel's module."""
    return "\n\n".join([MODULE_HEAD, _HEAD.strip("\n") + "\n", kernel])


def row_kernel_name(program: Program) -> str:
    """``all_to_all_rows_rank1``."""
    return f"all_to_all_rows_rank{program.rank}"


def row_kernel(program: Program) -> str:
    """The text of a direct all_to_all's kernel."""
    n = program.collective.world_size
    lines = [
        "block, blocks = tl.program_id(0), tl.num_programs(0)",
        "met = tl.load(counters + block)",
        "offsets = tl.arange(0, BLOCK)",
        "wide = width.to(tl.int64)",
        "end, room = rows * wide, capacity * wide",
        *[f"b{rank} = tl.load(bases + {rank})" for rank in held(program)],
        *[f"s{p} = tl.minimum(tl.maximum(tl.load(counts + {p}), 0), {_MOST})" for p in range(n)],
        *[f"i{p} = tl.minimum({_after('i', 's', p)}, rows)" for p in range(1, n)],
        "longest = s0",
        *[f"longest = tl.maximum(longest, s{p})" for p in range(1, n)],
        *[f"r{p} = s{p}" for p in range(n)],
        "start = block.to(tl.int64) * BLOCK",
        "most, total = start + 1, start",
        "while start < most:",
        *indented(_RowTile(program).lines()),
        "tl.store(counters + block, met)",
        "if block == 0:",
        *indented([f"tl.store(received + {p}, r{p})" for p in range(n)]),
        "for begin in range(total * wide + block * BLOCK, room, blocks * BLOCK):",
        *indented(["left = begin + offsets"]),
        *indented(["tl.store(out + left, tl.full((BLOCK,), 0, out.dtype.element_ty), mask=left < room)"]),
    ]
    head = [
        "@triton.jit",
        f"def {row_kernel_name(program)}(",
        f"    {', '.join(ARGUMENTS)},",
        "    ACC: tl.constexpr, BLOCK: tl.constexpr",
        "):",
        f'    """all_to_all of rows, rank {program.rank} of {n}, {program.placement}: a meeting a tile."""',
    ]
    return "\n".join([*head, *indented(lines)]) + "\n"


def _after(first: str, number: str, p: int) -> str:
    """The first row of rank p's, after those of rank p - 1."""
    return f"{first}{p - 1} + {number}{p - 1}" if p > 1 else f"{number}0"


class _RowTile(Tile):
    """The lines for one tile. Of rank p: i{p} the first row for it, s{p} how many; o{p} and r{p} of those from it."""

    def __init__(self, program: Program) -> None:
        super().__init__(program, Form(), masked=True)
        self.n = program.collective.world_size
        self.peers = [p for p in range(self.n) if p != self.rank]

    def lines(self) -> list[str]:
        """What is sent, with the words; the meeting; where what has come begins; what is received."""
        rows = [row for row in self.program.rows if row.kind != "meet"]
        sent = [row for row in rows if self.foreign(row.to[0])]
        taken = [row for row in rows if not self.foreign(row.to[0])]
        self.put("now = half_of(block, met + 1)")
        self.put("at = start + offsets")
        for peer in self.peers:
            self.put(f"tl.store(word({self.base(peer)} + now, {self.rank}), (longest << 32) | s{peer})")
        self.segment(sent, [taken], 0)
        self.put("most = longest")
        for peer in self.peers:
            self.put(f'w{peer} = tl.load(word(b{self.rank} + now, {peer}), cache_modifier=".cg")')
            self.put(f"r{peer} = w{peer} & {_MOST}")
            self.put(f"most = tl.maximum(most, w{peer} >> 32)")
        for p in range(1, self.n):
            self.put(f"o{p} = tl.minimum({_after('o', 'r', p)}, capacity)")
        self.put(f"total = tl.minimum({_after('o', 'r', self.n)}, capacity)")
        self.put(f"most = agreed(tl.where(gave_up(b{self.rank}) == 0, most * wide, 0), offsets)")
        self.segment(taken, [], 1)
        return [*self.text, "met += 1", "start += blocks * BLOCK"]

    def ends(self, place: Place) -> tuple[int, int]:
        """The ranks that send and that receive the chunk of a place."""
        return divmod(self.chunk[place], self.n)

    def mask(self, place: Place) -> str:
        """What there is of a tile at a place."""
        source, target = self.ends(place)
        if place.space == "in":
            return f", mask=(at < s{target} * wide) & ({self.at('i', target)} < end), other=0"
        if place.space == "out":
            return f", mask=(at < r{source} * wide) & ({self.at('o', source)} < room)"
        return f", mask=at < {f's{target}' if place.rank >= 0 else f'r{source}'} * wide"

    def address(self, place: Place) -> str:
        """Pointers to a tile of a place."""
        if place.space == "stage":
            return super().address(place)
        source, target = self.ends(place)
        at = self.at("i", target) if place.space == "in" else self.at("o", source)
        return f"{'x' if place.space == 'in' else 'out'} + {at if at == 'at' else f'({at})'}"

    def at(self, first: str, p: int) -> str:
        """The elements of a tile of rank p's rows."""
        return f"{first}{p} * wide + at" if p else "at"
