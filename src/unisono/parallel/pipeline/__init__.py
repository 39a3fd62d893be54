"""Pipeline parallelism: the layers of a model as stages on ranks, trained by a schedule; and layers over devices.

Schedules are data, built by `unisono.algorithms.pipelines` and proved before anything runs.
"""

from unisono.parallel.pipeline.clip import clip_grad_norm_
from unisono.parallel.pipeline.runtime import Pipeline
from unisono.parallel.pipeline.shapes import meta_forward
from unisono.parallel.pipeline.stages import (
    ModelParallel,
    distribute_parts,
    divide_layers,
    split_model,
    stages_from_layers,
)

__all__ = [
    "ModelParallel",
    "Pipeline",
    "clip_grad_norm_",
    "distribute_parts",
    "divide_layers",
    "meta_forward",
    "split_model",
    "stages_from_layers",
]
