"""Data, pipeline, sequence and tensor parallelism at once: one transformer cut along the axes of a DeviceMesh."""

from unisono.parallel.mesh.checkpoint import load_mesh_checkpoint, save_mesh_checkpoint
from unisono.parallel.mesh.memory import ActivationMeter, MemoryUse, memory_use
from unisono.parallel.mesh.model import MeshTransformer
from unisono.parallel.mesh.traffic import CommunicationMeter, Traffic
from unisono.parallel.mesh.transformer import Transformer
from unisono.parallel.parallel_dims import ParallelDims

__all__ = [
    "ActivationMeter",
    "CommunicationMeter",
    "MemoryUse",
    "MeshTransformer",
    "ParallelDims",
    "Traffic",
    "Transformer",
    "load_mesh_checkpoint",
    "memory_use",
    "save_mesh_checkpoint",
]
