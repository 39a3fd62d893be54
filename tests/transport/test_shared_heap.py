"""Memory of shared tensors: given back when they die, kept for forked children, never more descriptors or mappings."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch

import unisono
from unisono.errors import UsageError
from unisono.transport import shared_heap as module
from unisono.transport.shared_heap import SharedHeap, place, shared_heap


def used() -> int:
    """Bytes of memory that this process's shared_heap takes."""
    made = shared_heap()
    assert made is not None
    return os.fstat(made.fd).st_blocks * 512


def test_an_ordinary_tensor_in_the_arena() -> None:
    x = unisono.empty(3, 5, dtype=torch.bfloat16)
    assert (x.shape, x.dtype, x.device.type, x.is_contiguous()) == ((3, 5), torch.bfloat16, "cpu", True)
    assert unisono.empty((2, 4)).dtype == torch.get_default_dtype()
    x.requires_grad_().sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 5, dtype=torch.bfloat16))
    assert place(x.data_ptr(), x.nbytes) > 0
    assert place(x.data_ptr(), 1 << 50) == -1
    assert place(torch.empty(1000).data_ptr(), 4000) == -1
    assert unisono.empty(0, 7).shape == (0, 7)


def test_what_torch_refuses_is_refused_in_one_line() -> None:
    for size, dtype in ((-1, None), ("wide", None), (3, "float32")):
        with pytest.raises(UsageError, match=r"^unisono\.empty: [^\n]*$"):
            unisono.empty(size, dtype=dtype)


def test_memory_ends_with_the_last_view() -> None:
    before = used()
    x = unisono.empty(1 << 20).fill_(1.0)
    view = x[5:].view(torch.int32)
    del x
    assert used() - before >= 4 << 20
    assert view[0] == 0x3F800000
    del view
    assert used() <= before


def test_a_thousand_tensors_leave_nothing() -> None:
    kept = unisono.empty(10).fill_(3.0)

    def held() -> tuple[int, int, int]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count(":tensors"), used()

    def work() -> None:
        for k in range(250):
            unisono.empty(k * 100 + 1).fill_(1.0)

    work()
    before = held()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    work()
    files, mappings, memory = held()
    assert files <= before[0]
    assert mappings == before[1] == 1
    assert memory <= before[2]
    assert kept.eq(3.0).all()


def test_ranges_are_used_again_and_joined() -> None:
    own = SharedHeap()
    blocks = [own.allocate(10_000) for _ in range(3)]
    whole = own._free[0][1]
    blocks[0] = blocks[2] = None
    last = own.allocate(4096)
    assert own._free == [(4096 + 4096, 4096 + 12288), (4096 + 2 * 12288, whole)]
    del blocks, last
    assert own.allocate(own.nbytes) is None
    assert own._free == [(4096, own.nbytes)]
    own.disown()


def test_a_forked_child_keeps_what_dies_in_its_parent() -> None:
    x = unisono.empty(1000).fill_(7.0)
    address = x.data_ptr()
    ends, child = os.pipe(), os.fork()
    if child == 0:
        os.read(ends[0], 1)
        fine = bool(x.eq(7.0).all()) and unisono.empty(10).fill_(1.0).data_ptr() != address
        os._exit(0 if fine and place(x.data_ptr(), x.nbytes) == -1 else 1)
    del x
    while_it_lives = unisono.empty(1000).fill_(8.0)
    os.write(ends[1], b"x")
    assert os.waitpid(child, 0)[1] == 0
    assert while_it_lives.data_ptr() != address
    again = unisono.empty(1000)
    assert again.data_ptr() == address
    for end in ends:
        os.close(end)


def test_without_addresses_tensors_are_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> SharedHeap:
        raise OSError("no addresses")

    monkeypatch.setattr(module, "_heap", None)
    monkeypatch.setattr(module, "SharedHeap", refused)
    start = time.monotonic()
    assert unisono.empty(1000).fill_(1.0).sum() == 1000.0
    assert time.monotonic() - start < 1.0


def test_an_interrupted_allocation_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = shared_heap()
    assert made is not None
    with made._lock:  # as a signal handler finds it
        tensor = unisono.empty(10)
    assert place(tensor.data_ptr(), tensor.nbytes) == -1
    monkeypatch.setattr(module, "_heap", None)
    with module._making:
        assert unisono.empty(10).shape == (10,)
        assert shared_heap() is None
