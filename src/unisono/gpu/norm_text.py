"""The generator for collectives fused with RMSNorm: a program's kernel whose tiles are rows of hidden elements.

The rows of the program are those of the plain collective. What a rank has summed of a row of the tensor (of an
all_gather: what it has read) is added to its residual, stored, normalised, and goes on as the value of its place: to
the output, and to the peers where the program sends it on. So `two_phase` normalises between its two steps:

    one_shot all_reduce       all_reduce, residual, norm: everything on every rank
    direct reduce_scatter     reduce_scatter, residual, norm: this rank's rows
    two_phase all_reduce      reduce_scatter, residual, norm, all_gather: the norm of all rows, the residual of the own
    direct all_gather         norm, all_gather: without a residual

Sums are rounded to the dtype before the residual is added, the residual before it is normalised, as one call after the
other would. The norm is computed in float32 and rounded once.
"""

from dataclasses import dataclass

from unisono.gpu.kernel_text import Form, Tile, assembled
from unisono.program import Place, Program, Row

__all__ = ["ARGUMENTS", "Norm", "norm_kernel", "norm_kernel_name"]

ARGUMENTS = (
    "x", "residual", "weight", "out", "residual_out", "bases", "counters", "record", "count", "header", "limit"
)  # fmt: skip
"""``count``: elements of a block of the tensor, whole rows; the rest as in `kernel_text.ARGUMENTS`."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of rows of ``hidden`` elements. ``loop``: whether a block of threads may have several rows."""

    hidden: int
    eps: float
    loop: bool = True

    @property
    def tile(self) -> int:
        """The least power of two that holds a row, 16 at least."""
        return max(16, 1 << (self.hidden - 1).bit_length())


def norm_kernel_name(program: Program) -> str:
    """``one_shot_all_reduce_rms_norm_rank1``."""
    return f"{program.schedule}_{program.collective.name}_rms_norm_rank{program.rank}"


def norm_kernel(program: Program, norm: Norm) -> str:
    """The text of a program's kernel, fused with a norm. All blocks of the tensor hold whole rows, as do its pieces."""
    pieces, hidden = program.collective.pieces, norm.hidden
    form = Form("SUM" if program.collective.reduces else "", norm.loop)
    tile = _NormTile(program, form, norm)
    head = ["inside = offsets < " + str(hidden)] if tile.masked else []
    mask = ", mask=inside" if tile.masked else ""
    return assembled(
        program, form, tile.lines(), (), name=norm_kernel_name(program), arguments=ARGUMENTS, width=str(hidden),
        part=f"count // {pieces * hidden} * {hidden}" if pieces > 1 else "",
        head=[*head, f"gain = tl.load(weight + offsets{mask})"],
    )  # fmt: skip


class _NormTile(Tile):
    """The lines for one row."""

    def __init__(self, program: Program, form: Form, norm: Norm) -> None:
        super().__init__(program, form, masked=norm.hidden != norm.tile)
        self.norm = norm

    def lines(self) -> list[str]:
        """As of any program; the residual is loaded first."""
        if self.c.reduces:
            self.put(f"res = tl.load(residual + at{self.inside})")
        return super().lines()

    @property
    def inside(self) -> str:
        """The mask of a row, ready to append to arguments."""
        return ", mask=inside" if self.masked else ""

    def mask(self, place: Place) -> str:
        """The same for every chunk: rows are whole."""
        return self.inside

    def sum(self, row: Row) -> None:
        """A sum, and what follows it."""
        super().sum(row)
        total = self.values[row.to[0]]
        self.put(f"res = (res.to(ACC) + {total}.to(ACC)).to(out.dtype.element_ty)")
        self.put(f"tl.store(residual_out + at, res{self.inside})")
        self.values.update(dict.fromkeys(row.to, self.normed("res")))

    def value(self, place: Place) -> str:
        """The norm of a row of the input, where nothing is summed."""
        place = self.origin(place)
        if place in self.values or self.c.reduces or place.space != "in":
            return super().value(place)
        name = self.values[place] = self.normed(super().value(place))
        return name

    def normed(self, row: str) -> str:
        """The name of the norm of a row."""
        name = self.name()
        wide = f"tl.where(inside, {row}.to(ACC), 0.0)" if self.masked else f"{row}.to(ACC)"
        self.put(f"wide = {wide}")
        self.put(f"scale = tl.rsqrt(tl.sum(wide * wide, 0) * {1 / self.norm.hidden!r} + {float(self.norm.eps)!r})")
        self.put(f"{name} = (wide * scale * gain.to(ACC)).to(out.dtype.element_ty)")
        return name
