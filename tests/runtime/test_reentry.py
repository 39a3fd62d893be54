"""What may interrupt a call: the flag that a thread sets while it sets it."""

import threading

from unisono.runtime.task import interruption
from unisono.runtime.worker import Flag


def test_a_flag_is_set_in_the_midst_of_being_set() -> None:
    flag, woken = Flag(), threading.Event()
    threading.Thread(target=lambda: flag.wait(10) and woken.set(), daemon=True).start()
    with flag._changed:
        flag.set()
    assert woken.wait(5)
    assert flag.is_set()
    flag.clear()
    assert not flag.wait(0.001)


def test_an_interruption_is_quoted() -> None:
    assert str(interruption(KeyboardInterrupt())) == "KeyboardInterrupt interrupted a call under way"
    assert str(interruption(TimeoutError("late\nagain"))) == "TimeoutError interrupted a call under way: late"
