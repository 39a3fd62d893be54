"""Labels of arrows, each where it covers neither a node nor another label, if there is such a place."""

from collections.abc import Iterable

from unisono.draw.svg import text

__all__ = ["Labels"]

_HEIGHT, _CHARACTER = 10.0, 6.2


class Labels:
    """Labels placed so far. Points are complex numbers x + y·j."""

    def __init__(self, nodes: Iterable[complex] = (), radius: float = 0.0) -> None:
        self.parts: list[str] = []
        self._taken = [(at, radius, radius) for at in nodes]

    def add(self, words: str, places: Iterable[complex]) -> None:
        """Put a label at the first free place, or at the one where it covers least."""
        half = len(words) * _CHARACTER / 2, _HEIGHT / 2
        at = min(places, key=lambda place: round(sum(self._covered(place, *half, taken) for taken in self._taken)))
        self._taken.append((at, *half))
        self.parts.append(text(at.real, at.imag, words, "label"))

    @staticmethod
    def _covered(at: complex, width: float, height: float, taken: tuple[complex, float, float]) -> float:
        """The area that a label around `at` shares with what is there; width and height are halves."""
        other, other_width, other_height = taken
        across = width + other_width - abs(at.real - other.real)
        down = height + other_height - abs(at.imag - other.imag)
        return max(across, 0.0) * max(down, 0.0)
