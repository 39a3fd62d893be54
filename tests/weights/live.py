"""Sides of a meeting on the pool's ranks: rank 0 is the trainer, the others are replicas, each a side of its own."""

import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unisono import weights
from unisono.weights import lineup

__all__ = ["Net", "apart", "attempt", "blank", "fill", "forked_with", "meeting", "value", "wait_for", "wrong"]


class Net(nn.Module):
    """Seven tensors."""

    def __init__(self, rows: int = 7, width: int = 4, inner: int = 6) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(rows, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)


Source = nn.Module | Mapping[str, Tensor]


def _tensors(source: Source) -> Mapping[str, Tensor]:
    return source.state_dict() if isinstance(source, nn.Module) else source


def value(name: str, shape: Any, version: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a tensor holds in a version: whole numbers from 0 to 96, exact in every dtype."""
    numbers = torch.arange(prod(shape)) * 5 + zlib.crc32(name.encode()) % 61 + 13 * version
    return (numbers % 97).reshape(tuple(shape)).to(dtype)


@torch.no_grad()
def fill(source: Any, version: int) -> Any:
    """Writes a version into a source, in place."""
    for name, tensor in _tensors(source).items():
        tensor.copy_(value(name, tensor.shape, version, tensor.dtype))
    return source


@torch.no_grad()
def blank(source: Any) -> Any:
    """Fills a source with -1."""
    for tensor in _tensors(source).values():
        tensor.fill_(-1)
    return source


def wrong(source: Source, version: int | None, wanted: Mapping[str, Tensor] | None = None) -> list[str]:
    """The names whose tensors are not those of a version, bit for bit; None: not all -1."""
    found = []
    for name, tensor in _tensors(source).items():
        want = torch.full_like(tensor, -1) if version is None else value(name, tensor.shape, version, tensor.dtype)
        want = (wanted or {}).get(name, want)
        if want.dtype != tensor.dtype or not torch.equal(tensor.detach(), want):
            found.append(name)
    return found


def attempt(call: Callable[..., Any], *given: Any, **named: Any) -> list[Any]:
    """The exception's name, its text and notes, and the seconds until it came; empty texts if there was none."""
    began = time.monotonic()
    try:
        call(*given, **named)
    except Exception as error:
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", []))
        return [type(error).__name__, f"{error}{notes}", time.monotonic() - began]
    return ["", "", time.monotonic() - began]


def meeting(folder: str, name: str = "meeting") -> str:
    """An address in a folder that all ranks have."""
    return f"file://{folder}/{name}"


def wait_for(folder: str, flag: str, limit: float = 30.0) -> None:
    """Waits until some rank has called `raise_flag`."""
    end = time.monotonic() + limit
    while not Path(folder, flag).exists():
        assert time.monotonic() < end, f"{flag} never came"
        time.sleep(0.005)


def raise_flag(folder: str, flag: str) -> None:
    """Lets the other ranks go on."""
    Path(folder, flag).touch()


class apart:
    """In its block all ranks take each other for processes of several hosts: data goes through Gloo."""

    def __init__(self, wanted: bool = True) -> None:
        self._wanted = wanted

    def __enter__(self) -> None:
        self._before = lineup.one_host
        if self._wanted:
            lineup.one_host = lambda ranks: False

    def __exit__(self, *exc: object) -> None:
        lineup.one_host = self._before


def replica(folder: str, model: Any, name: str = "gen", **given: Any) -> weights.Receiver:
    """A receiver of one process at the folder's meeting."""
    return weights.Receiver(meeting(folder), model, name=name, group="self", **{"timeout": 10.0, **given})


def trainer(folder: str, model: Any, **given: Any) -> weights.Sender:
    """A sender of one process at the folder's meeting."""
    return weights.Sender(meeting(folder), model, group="self", **{"timeout": 10.0, **given})


@contextmanager
def forked_with(source: Source, version: int) -> Iterator[None]:
    """A child of this moment, which must hold ``version`` after the block, whatever the block does here."""
    waits, go = os.pipe()
    child = os.fork()
    if not child:
        os.read(waits, 1)
        os._exit(len(wrong(source, version)))
    yield
    os.write(go, b"g")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(waits)
    os.close(go)
