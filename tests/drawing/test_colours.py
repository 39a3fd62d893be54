import pytest

from unisono.drawing.colours import chunk_colour


def _luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("num_chunks", [1, 2, 8, 16, 64])
def test_every_colour_reads_on_white_and_on_black(num_chunks: int) -> None:
    for chunk in range(num_chunks):
        light = _luminance(chunk_colour(chunk, num_chunks))
        assert 1.05 / (light + 0.05) >= 2.5, "on white"
        assert (light + 0.05) / 0.05 >= 3.5, "on black"


@pytest.mark.parametrize("num_chunks", [2, 8, 16])
def test_colours_of_chunks_differ(num_chunks: int) -> None:
    colours = [chunk_colour(chunk, num_chunks) for chunk in range(num_chunks)]
    parts = [[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in colours]
    for i in range(num_chunks):
        for j in range(i):
            assert max(abs(a - b) for a, b in zip(parts[i], parts[j], strict=True)) >= 24


def test_a_chunk_that_does_not_exist_has_a_colour() -> None:
    assert chunk_colour(9, 4) == chunk_colour(1, 4)
