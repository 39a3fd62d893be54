"""A model to decode with: a small random Llama, split over ranks."""

from decoding.llama import AddAndNorm, Llama, Shape

__all__ = ["AddAndNorm", "Llama", "Shape"]
