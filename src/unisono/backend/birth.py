"""What the ranks of a default group check when it is made: that all run the same versions."""

import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

from unisono.errors import MismatchError
from unisono.units import name_ranks

__all__ = ["check_versions", "publish_versions", "versions"]

_PACKAGES = ("unisono", "torch")


class _Store(Protocol):
    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


def versions() -> dict[str, str]:
    """The versions that must be equal on all ranks; a build (``+cpu``) is none of them."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package).partition("+")[0]
        except PackageNotFoundError:
            found[package] = "of a source tree"
    return found


def publish_versions(store: _Store, rank: int) -> None:
    """Publishes this rank's versions, before it joins: those of an earlier attempt over the same store are replaced."""
    store.set(f"versions/{rank}", json.dumps(versions()))


def check_versions(store: _Store, global_ranks: Sequence[int], label: str) -> None:
    """Compares the versions of all ranks, which have joined. Raises `MismatchError`, on every rank, if they differ."""
    found: list[dict[str, str]] = [json.loads(store.get(f"versions/{rank}")) for rank in range(len(global_ranks))]
    wrong = [package for package in _PACKAGES if len({each[package] for each in found}) > 1]
    if wrong:
        lines = [
            f"{_who(package, found, global_ranks)}: pip install {package}=={found[0][package]}" for package in wrong
        ]
        raise MismatchError(f"the ranks of {label} run different versions of {'; of '.join(lines)} everywhere")


def _who(package: str, found: Sequence[dict[str, str]], global_ranks: Sequence[int]) -> str:
    """A package, and which ranks have which version of it."""
    ranks: dict[str, list[int]] = {}
    for name, each in zip(global_ranks, found, strict=True):
        ranks.setdefault(each[package], []).append(name)
    return f"{package} ({', '.join(f'{name_ranks(names)}: {text}' for text, names in ranks.items())})"
