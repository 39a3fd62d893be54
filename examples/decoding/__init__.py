"""A model to decode with: a small random Llama, split over ranks, and ways to sum over them."""

from decoding.llama import Llama, Shape
from decoding.ways import apart, summed, symmetric

__all__ = ["Llama", "Shape", "apart", "summed", "symmetric"]
