"""The generator: a program of one rank, as the text of a Triton kernel.

A block of threads walks over tiles: BLOCK elements at one offset of every chunk. For each it runs the program's rows,
in an order that hides latency:

* between two meetings all loads go before the stores: a store to a peer could alias a later load, so that the compiler
  would let every load wait for its answer;
* what peers wait for is stored first; own results are stored, and the input of the next rows loaded, between raising
  the own flags and waiting for those of the peers;
* a value stays in registers from its first use on: temporary places and results read again cost nothing.

Sums are taken in the order of the row's parts, accumulated in ACC (float32 for 16 bits) and rounded once, as the
interpreters of CPUs do. Slots are numbered through the steps of a program; a step's slots lie in the half of its
meeting's parity. A chunk is `part` elements of a block of the tensor, the last one shorter.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, takewhile

from unisono.errors import UsageError
from unisono.gpu.device_text import MODULE_HEAD
from unisono.gpu.layout import WORLD_SIZE_MAX
from unisono.program import Place, Program, Row, Unfit

__all__ = [
    "ARGUMENTS",
    "REDUCE_OPS",
    "Form",
    "Tile",
    "assembled",
    "held",
    "indented",
    "kernel",
    "kernel_name",
    "module",
    "tensors_of",
]

ARGUMENTS = ("x", "out", "bases", "counters", "record", "count", "header", "limit")
"""Input, output, table of workspaces, meetings by row, failure record, elements of a block, header, nanoseconds."""
REDUCE_OPS = {"": "", "SUM": "{0} + {1}", "AVG": "{0} + {1}", "PRODUCT": "{0} * {1}"} | {
    op: f"tl.{op.lower()}imum({{0}}, {{1}}, propagate_nan=tl.PropagateNan.ALL)" for op in ("MIN", "MAX")
}
"""How two values are combined, by reduce op."""
_UNDER_WAY = 4  # values loaded before the stores of a segment: more would spill registers
_HELD = 4  # ranks up to which the bases of peers are held in registers


@dataclass(frozen=True, slots=True)
class Form:
    """What a kernel is made for besides its program.

    ``op``: the reduce op. ``loop``: whether a block may have several tiles. ``ragged``: counts are no multiples of 16:
    whole tiles then go without masks, which would make their accesses narrow, and the last ones with. ``listed``: every
    block of input and output lies in a tensor of its own.
    """

    op: str = ""
    loop: bool = True
    ragged: bool = False
    listed: bool = False

    @property
    def suffix(self) -> str:
        """As kernels of this form are called."""
        words = [self.op.lower(), "listed" if self.listed else "", "" if self.loop else "one_tile"]
        words.append("ragged" if self.ragged else "")
        return "".join(f"_{word}" for word in words if word)


def kernel_name(program: Program, form: Form) -> str:
    """``two_phase_all_reduce_sum_rank1``."""
    return f"{program.schedule}_{program.collective.name}{form.suffix}_rank{program.rank}"


def module(kernels: Iterable[str]) -> str:
    """The text of a module of kernels."""
    return "\n\n".join([MODULE_HEAD, *kernels])


def kernel(program: Program, form: Form) -> str:
    """The text of a program's kernel. Raises `Unfit` for what kernels do not run."""
    c = program.collective
    if program.placement not in ("staged", "put"):
        raise Unfit(f"{program.name}, {program.placement}: kernels move data through staging memory: staged or put")
    if program.partial:
        raise Unfit(f"{program.name} keeps partial sums: kernels take them in rank order, of all contributions at once")
    if c.world_size > WORLD_SIZE_MAX or c.name == "barrier":
        raise Unfit(f"{program.name} over {c.world_size} ranks: kernels serve up to {WORLD_SIZE_MAX}, and no barrier")
    if form.op not in REDUCE_OPS or bool(form.op) != c.reduces:
        raise UsageError(f"{program.name} has no kernel for reduce op {form.op!r}")
    masked = Tile(program, form, masked=True).lines()
    whole = Tile(program, form, masked=False).lines() if form.ragged else []
    return assembled(program, form, masked, whole, arguments=(*tensors_of(program, form), *ARGUMENTS[2:]))


def tensors_of(program: Program, form: Form) -> list[str]:
    """The tensors that a kernel takes: input and output; of lists all of both, by block, and one of each at least."""
    if not form.listed:
        return ["x", "out"]
    sides = {"x": program.blocks_in[program.rank], "out": program.blocks_out[program.rank]}
    return [f"{name}{block or ''}" for name, blocks in sides.items() for block in range(max(1, len(blocks)))]


class Tile:
    """The lines for one tile."""

    def __init__(self, program: Program, form: Form, masked: bool) -> None:
        self.program, self.c, self.form, self.masked = program, program.collective, form, masked
        self.rank, self.pieces = program.rank, program.collective.pieces
        self.text: list[str] = []
        self.values: dict[Place, str] = {}
        self.same: dict[Place, Place] = {}  # a place that a copy fills, and where the value comes from
        self.masks: dict[int, str] = {}
        self.numbers = count()
        self.first = [sum(program.slots[:step]) for step in range(len(program.slots))]
        self.chunk: dict[Place, int] = {p: row.chunk for row in program.rows for p in (*row.to, *row.parts)}

    def lines(self) -> list[str]:
        """The rows, segment by segment: what lies between two meetings."""
        segments: list[list[Row]] = [[]]
        for row in self.program.rows:
            if row.kind == "meet":
                segments.append([])
            elif not (self.c.name == "broadcast" and row.parts[0].space == "in" and row.to[0].space == "out"):
                segments[-1].append(row)  # a broadcast is in place
        for number, rows in enumerate(segments):
            self.segment(rows, segments[number + 1 :], number)
        return self.text

    def segment(self, rows: list[Row], later: list[list[Row]], number: int) -> None:
        """Values first, then what peers wait for; the flags; own results; the wait."""
        for row in rows:
            if row.kind == "copy" and not self.foreign(row.to[0]):
                self.same[row.to[0]] = self.origin(row.parts[0])
        self.load(self.origin(part) for row in rows for part in row.parts)
        for row in rows:
            if row.kind == "sum":
                self.sum(row)
        for row in rows:
            for place in filter(self.foreign, row.to):
                self.store(place, self.value(row.to[0] if row.kind == "sum" else row.parts[0]))
        peers = self.c.world_size > 1
        if later and peers:
            self.put(f"arrive(bases, block, met + {number + 1}, header, {self.rank}, {self.c.world_size})")
        self.own(rows, later)
        if later and peers:
            arguments = f"met + {number + 1}, header, record, limit, {self.rank}, {self.c.world_size}"
            self.put(f"await_peers(bases, b{self.rank}, block, {arguments})")

    def own(self, rows: list[Row], later: list[list[Row]]) -> None:
        """Stores to own memory, after the loads that they or the time of the wait call for."""
        stored = {place.index for row in rows for place in row.to if place.space == "out"}
        sources = [self.origin(part) for row in rows if row.kind == "copy" for part in row.parts]
        coming = [self.origin(part) for segment in later for row in segment for part in row.parts]
        soon = [self.origin(part) for row in (later[0] if later else ()) for part in row.parts]
        for place in [*sources, *coming]:
            if place.space == "in" and place.index in stored:  # in place, it would be overwritten
                self.value(place)
        self.load(place for place in soon if place.space == "in")
        for row in rows:
            for place in row.to:
                if self.foreign(place):
                    continue
                name = self.value(place)
                if place.space == "out":
                    self.store(place, name)

    # Values

    def foreign(self, place: Place) -> bool:
        """True for staging memory, the own included: it is written for others to read."""
        return place.space == "stage"

    def origin(self, place: Place) -> Place:
        """Where the value of a place came from."""
        return self.same.get(place, place)

    def put(self, line: str) -> None:
        """Appends a line."""
        self.text.append(line)

    def name(self) -> str:
        """A name for a value."""
        return f"v{next(self.numbers)}"

    def load(self, places: Iterable[Place]) -> None:
        """Loads as many of these as may be under way before stores."""
        missing = [p for p in dict.fromkeys(places) if p not in self.values and p.space in ("in", "stage")]
        for place in missing[:_UNDER_WAY]:
            self.value(place)

    def value(self, place: Place) -> str:
        """The name of a place's value, loaded if it is not at hand."""
        place = self.origin(place)
        if place not in self.values:
            assert place.space in ("in", "stage"), f"{self.program.name}: nothing has filled {place}"
            mask = self.mask(place)
            name = self.values[place] = self.name()
            hint = ', cache_modifier=".cg"' if place.space == "stage" else ""
            self.put(f"{name} = tl.load({self.address(place)}{mask}{hint})")
        return self.values[place]

    def sum(self, row: Row) -> None:
        """The lines of a sum: parts in order, as many loads under way as may be."""
        todo, total, name = [self.origin(part) for part in row.parts], "", self.name()
        while todo:
            self.load(todo)
            now = list(takewhile(self.values.__contains__, todo))
            del todo[: len(now)]
            for part in now:
                term = f"{self.values[part]}.to(ACC)"
                total = REDUCE_OPS[self.form.op].format(total, term) if total else term
            self.put(f"{name} = {total}")
            total = name
        if self.form.op == "AVG" and row.complete:
            self.put(f"{name} = tl.div_rn({name}, tl.full((BLOCK,), {self.c.world_size}, ACC))")
        self.put(f"{name} = {name}.to(out.dtype.element_ty)")
        self.values.update(dict.fromkeys(row.to, name))

    # Addresses

    def mask(self, place: Place) -> str:
        """The mask of a chunk's accesses, ready to append to arguments."""
        if not self.masked:
            return ""
        piece = self.chunk[place] % self.pieces
        if piece not in self.masks:
            self.masks[piece] = name = f"m{piece}"
            inside = "at < count" if piece == 0 else f"(at < part) & ({piece} * part + at < count)"
            if piece == 0 and self.pieces > 1:
                inside = f"(at < part) & ({inside})"
            self.put(f"{name} = {inside}")
        return f", mask={self.masks[piece]}"

    def address(self, place: Place) -> str:
        """Pointers to a tile of a place."""
        if place.space == "stage":
            step = max(s for s, first in enumerate(self.first) if first <= place.index)
            half = ("now", "other")[step & 1]
            rank = place.rank if place.rank >= 0 else self.rank
            offset = place.index - self.first[step]
            return f"slot({self.base(rank)} + {half}, {offset} * BLOCK, out, offsets)"
        blocks = (self.program.blocks_in if place.space == "in" else self.program.blocks_out)[self.rank]
        block, piece = blocks.index(place.index // self.pieces), place.index % self.pieces
        tensor = "x" if place.space == "in" else "out"
        if self.form.listed and block:
            tensor, block = f"{tensor}{block}", 0
        terms = ["count64" if block == 1 else f"{block} * count64" if block else "", f"{piece} * part" if piece else ""]
        terms.append("at")
        at = " + ".join(term for term in terms if term)
        return f"{tensor} + {at if at == 'at' else f'({at})'}"

    def base(self, rank: int) -> str:
        """The workspace of a rank."""
        return f"b{rank}" if rank in held(self.program) else f"tl.load(bases + {rank})"

    def store(self, place: Place, name: str) -> None:
        """A line."""
        self.put(f"tl.store({self.address(place)}, {name}{self.mask(place)})")


def assembled(
    program: Program, form: Form, masked: Sequence[str], whole: Sequence[str], *, name: str = "",
    arguments: Sequence[str] = ARGUMENTS, width: str = "BLOCK", part: str = "", head: Sequence[str] = (),
) -> str:  # fmt: skip
    """The kernel around the lines of a tile, which is ``width`` elements wide. ``part``: how a chunk's elements are
    counted, where it is another way than for plain programs; ``head``: lines before the first tile.
    """
    c, meetings = program.collective, program.meetings
    words = ", ".join(arguments)
    by_pieces = f"((count + {c.pieces - 1}) // {c.pieces} + 15) // 16 * 16"
    lines = [
        "block, blocks = tl.program_id(0), tl.num_programs(0)",
        "met = tl.load(counters + block)",
        "offsets = tl.arange(0, BLOCK)",
        "count64 = count.to(tl.int64)",
        f"part = {part or ('count' if c.pieces == 1 else by_pieces)}",
        *[f"b{rank} = tl.load(bases + {rank})" for rank in held(program)],
        *head,
    ]
    begin = f"block * {width}"
    body = ["now, other = half_of(block, met + 1), half_of(block, met)"]
    body += [f"at = {'start' if form.loop else begin} + offsets"]
    if whole:
        start = "start" if form.loop else begin
        inside = f"{start} + BLOCK <= part"
        if c.pieces > 1:
            inside = f"({inside}) & ({start} + {c.pieces - 1} * part + BLOCK <= count)"
        body += [f"if {inside}:", *indented(whole), "else:", *indented(masked)]
    else:
        body += masked
    body.append(f"met += {meetings}")
    if form.loop:
        body = [f"for start in range({begin}, part, blocks * {width}):", *indented(body)]
    text = [
        "@triton.jit",
        f"def {name or kernel_name(program, form)}(",
        f"    {words}, ACC: tl.constexpr, BLOCK: tl.constexpr",
        "):",
        f'    """{program.name}, rank {program.rank} of {c.world_size}, {program.placement}: '
        f'{max(program.slots, default=0)} slots, {meetings} meetings a tile."""',
        *indented([*lines, *body, "tl.store(counters + block, met)"]),
    ]
    return "\n".join(text) + "\n"


def held(program: Program) -> list[int]:
    """The ranks whose bases are held in registers: all, the own one alone if they are many."""
    n = program.collective.world_size
    return list(range(n)) if n <= _HELD else [program.rank]


def indented(lines: Iterable[str]) -> list[str]:
    """Lines one level deeper."""
    return [f"    {line}" for line in lines]
