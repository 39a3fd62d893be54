"""A model to decode with: a small random Llama, split over ranks."""

from decoding.llama import Llama, Shape

__all__ = ["Llama", "Shape"]
