"""Object code: functions that take and give integers, let go of the interpreter's lock, and are kept whole or not."""

import re
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from unisono.runtime import object_code
from unisono.runtime.compiled import compiled
from unisono.transport.atomics import load_acquire64


def weigh(a: int, b: int, c: int) -> int:
    return a + 2 * b + 4 * c


def await_word(address: int) -> int:
    while load_acquire64(address) == 0:
        pass
    return load_acquire64(address)


@pytest.fixture(scope="module")
def loops() -> dict[str, Callable[..., int]]:
    return object_code.functions("test", compiled("test", {"weigh": weigh, "await_word": await_word}))


def test_integers_in_and_out(loops: dict[str, Callable[..., int]]) -> None:
    large = 2**62
    assert loops["weigh"](1, -2, 3) == 9
    assert loops["weigh"](large, 0, -1) == large - 4


@pytest.mark.parametrize("kind", ["float32", *object_code._OWN])
def test_code_is_made_anew_when_anything_in_it_changes(kind: str) -> None:
    sources = {file.resolve() for file in object_code._sources(kind)}
    assert all(file.is_file() for file in sources)
    root = Path(object_code.__file__).parent.parent
    names = (*object_code._COMPILED, *object_code._OWN.get(kind, ()))
    for file in (file for name in names for file in root.glob(name)):
        modules = re.findall(r"^from unisono\.([\w.]+) import", file.read_text(), re.MULTILINE)
        used = {(root / f"{module.replace('.', '/')}.py").resolve() for module in modules} - {root / "run.py"}
        needed = {each for each in used if each.is_file()} - {
            Path(object_code.__file__).resolve(),
            root / "runtime" / "reduce.py",
        }
        assert needed <= sources, file


def test_what_is_no_such_call(loops: dict[str, Callable[..., int]]) -> None:
    with pytest.raises(TypeError, match="'str' object cannot be interpreted as an integer"):
        loops["weigh"](1, "2", 3)
    with pytest.raises(OverflowError):
        loops["weigh"](1, 2, 2**64)
    with pytest.raises(SystemError):
        loops["weigh"](1, 2)


def test_other_threads_go_on_meanwhile(loops: dict[str, Callable[..., int]]) -> None:
    word = np.zeros(1, np.int64)
    timer = threading.Timer(0.05, lambda: word.__setitem__(0, 7))
    timer.start()
    assert loops["await_word"](word.ctypes.data) == 7
    timer.join()


def test_code_that_needs_numba_is_not_made() -> None:
    def allocates(size: int) -> int:
        return np.zeros(size)[0]

    with pytest.raises(RuntimeError, match="which are not there where numba is not loaded"):
        compiled("test_other", {"allocates": allocates})


def test_code_is_kept_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, cache = tmp_path / "file", tmp_path / "cache"
    broken.write_text("not a folder")
    monkeypatch.setattr(object_code, "_folders", lambda: iter([broken, cache]))
    assert object_code.kept("some") is None
    object_code.keep("some", b"names\ncode")
    assert object_code.kept("some") == b"names\ncode"
    (file,) = cache.iterdir()
    assert file.stat().st_mode & 0o777 == 0o644
    file.write_bytes(file.read_bytes()[:-1])
    assert object_code.kept("some") is None
