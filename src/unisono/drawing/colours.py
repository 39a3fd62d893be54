"""One colour per chunk, the same in every drawing: evenly spaced hues of equal lightness (the OKLCH colour space).

The lightness reads on white and on black. With many chunks neighbours also alternate between two lightnesses.
Source of the conversion: Björn Ottosson, "A perceptual color space for image processing", 2020.
"""

from functools import lru_cache
from math import cos, radians, sin

__all__ = ["chunk_colour"]

_FIRST_HUE, _CHROMA, _LIGHTNESS = 250.0, 0.15, 0.64
_MANY, _STEP = 9, 0.09


@lru_cache(maxsize=4096)
def chunk_colour(chunk: int, num_chunks: int) -> str:
    """The colour of a chunk as `#rrggbb`; chunks that do not exist borrow one."""
    lightness = _LIGHTNESS - (_STEP if num_chunks >= _MANY and chunk % 2 else 0.0)
    return _hex(lightness, _CHROMA, radians(_FIRST_HUE + 360.0 * (chunk % num_chunks) / num_chunks))


def _hex(lightness: float, chroma: float, hue: float) -> str:
    a, b = chroma * cos(hue), chroma * sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    return "#" + "".join(f"{round(255 * _gamma(min(max(x, 0.0), 1.0))):02x}" for x in linear)


def _gamma(linear: float) -> float:
    """Linear light to sRGB, both from 0 to 1."""
    return 12.92 * linear if linear <= 0.0031308 else float(1.055 * linear ** (1 / 2.4) - 0.055)
