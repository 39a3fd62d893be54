import types
from collections.abc import Callable
from concurrent import futures
from pathlib import Path

import unisono
from unisono.runtime.call_site import Site
from unisono.trace.collect import place

SOURCE = Path(unisono.__file__).parent


def through(*files: Path | str) -> Site:
    """The place of a call that came from line 1 of the first file through the functions ``f`` of all the others."""
    call: Callable[[], Site] = place
    for file in reversed(files):
        module = types.ModuleType("made_up")
        exec(compile("def f(call): return lambda: call()", str(file), "exec"), vars(module))
        call = module.f(call)
    return call()


def test_the_nearest_line_of_the_program_is_the_place() -> None:
    group = SOURCE / "backend" / "process_group.py"
    assert through("main.py", "train.py", group) == ("train.py", 1, "<lambda>")
    assert through("main.py", futures.__file__, group) == ("main.py", 1, "<lambda>")


def test_programs_of_unisono_are_programs() -> None:
    learner = SOURCE / "train" / "learner.py"
    found = through("main.py", SOURCE / "train" / "job.py", learner, SOURCE / "backend" / "process_group.py")
    assert found == (str(learner), 1, "<lambda>")
