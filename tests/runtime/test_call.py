"""A call as bytes and as words, and whose line it came from."""

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks import ranks
from unisono.runtime.call import Call, Site, call_site, name_of_dtype, piece, piece_numel, site_text
from unisono.runtime.header import DTYPES, SIGNATURE, read_header


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_has_its_name_and_size(name: str) -> None:
    dtype = getattr(torch, name)
    header = read_header(Call("broadcast", dtype, (3, 4), root=1).header(2, 256))
    assert name_of_dtype(dtype) == name
    assert dtype.itemsize == DTYPES[name]
    assert header is not None
    assert (header.op, header.dtype, header.shape, header.root, header.numel) == ("broadcast", name, (3, 4), 1, 12)
    assert header.nbytes == 12 * dtype.itemsize


CALLS = [
    Call("barrier"),
    Call("all_reduce", torch.float32, (), "SUM"),
    Call("all_reduce", torch.float32, (0,), "SUM"),
    Call("all_reduce", torch.float32, (1, 0), "SUM"),
    Call("all_reduce", torch.float32, (1, 1, 1, 1, 1, 1, 1, 2, 3), "SUM"),
    Call("all_reduce", torch.float32, (1, 1, 1, 1, 1, 1, 1, 3, 2), "SUM"),
    Call("all_reduce", torch.float32, (5,), "SUM", extra_signature="2.0"),
    Call("all_reduce", torch.float32, (5,), "SUM", algorithm="ring"),
    Call("all_reduce", torch.float32, (5,), "MAX"),
    Call("reduce", torch.float32, (5,), "MAX", root=0),
    Call("reduce", torch.float32, (5,), "MAX", root=1),
    Call("broadcast", torch.float32, (5,), root=1),
    Call("broadcast", torch.int32, (5,), root=1),
    Call("broadcast", refused="a mistake"),
    Call("broadcast", refused="another mistake"),
]


def test_different_calls_have_different_signatures() -> None:
    signatures = [call.signature for call in CALLS]
    assert len(set(signatures)) == len(CALLS)
    assert {len(signature) for signature in signatures} == {SIGNATURE.size} == {96}


def test_equal_calls_have_equal_headers() -> None:
    one, two = (Call("reduce", torch.bfloat16, (2, 7), "SUM", root=3) for _ in range(2))
    assert one.header(4, 192) == two.header(4, 192)
    assert len(one.header(4, 192)) == 192


@pytest.mark.parametrize(
    ("shape", "numel"), [((), 1), ((0,), 0), ((3,), 3), ((2, 5), 10), ((2**20, 2**20), 2**40), ((4, 0, 9), 0)]
)
def test_pieces_keep_their_count_and_tell_shapes_apart(shape: tuple[int, ...], numel: int) -> None:
    assert piece_numel(piece(shape)) == numel
    assert piece(shape) != piece((*shape, 1))
    assert piece(shape) < 2**63


def test_words() -> None:
    assert Call("barrier").describe() == "barrier()"
    assert Call("all_reduce", torch.float32, (2, 3), "SUM").describe() == "all_reduce(float32 [2, 3], SUM)"
    assert Call("broadcast", torch.int8, (), root=1).describe([4, 7]) == "broadcast(int8 [], root 7)"
    assert Call("scatter", refused="no list").describe() == "scatter() refused: no list"


def test_a_header_that_was_never_written_is_none() -> None:
    assert read_header(bytes(192)) is None


def test_sites() -> None:
    file, line, function = call_site()
    assert (file, function) == (__file__, "test_sites")
    assert site_text((file, line, function)).endswith(f"{os.path.join('runtime', 'test_call.py')}:{line} in test_sites")
    assert site_text(("", 0, "")) == "no user code on the stack"
    assert site_text(("/elsewhere/a.py", 3, "f")) == "/elsewhere/a.py:3 in f"


def test_a_site_in_a_working_directory_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> str:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "getcwd", gone)
    assert site_text(("/elsewhere/a.py", 3, "f")) == "/elsewhere/a.py:3 in f"


def on_a_thread(function: Callable[[], Site]) -> Site:
    with ThreadPoolExecutor(1, "pool") as pool:
        return pool.submit(function).result()


def test_sites_on_other_threads() -> None:
    """With the user's own code on the thread's stack, and without: then it is the line that waits for it."""

    def code_of_its_own() -> Site:
        return call_site()

    file, _, function = on_a_thread(code_of_its_own)
    assert (file, function) == (__file__, "code_of_its_own (thread pool_0)")
    file, _, function = on_a_thread(call_site)
    assert (file, function) == (__file__, "on_a_thread of the main thread (called by thread pool_0)")


def on_threads(rank: int, world_size: int) -> str:
    with ThreadPoolExecutor(1, "pool") as pool:
        return str(pool.submit(dist.all_reduce, torch.zeros(2 + rank)).exception())


def test_a_mistake_on_a_thread_names_it_and_the_users_line() -> None:
    for text in ranks(2).run(on_threads):
        assert (
            len(re.findall(r"test_call\.py:\d+ in on_threads of the main thread \(called by thread pool_0\)", text))
            == 2
        )


def sites(rank: int, world_size: int) -> list[str]:
    """Mistakes in many kinds of calls: the line that is named is always the one in this function."""
    x, group = torch.zeros(2 + rank), dist.group.WORLD
    calls: list[Any] = [
        lambda: dist.all_reduce(x),
        lambda: dist.all_gather_into_tensor(torch.zeros(2, 2 + rank), x),
        lambda: dist.reduce_scatter_tensor(x, torch.zeros(4 + 2 * rank)),
        lambda: dist.all_reduce_coalesced([x, x]),
        lambda: dist.all_reduce(x, async_op=True).wait(),
        lambda: group and group.allreduce([x]).wait(),
    ]
    texts = []
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            texts.append(f"{call.__code__.co_firstlineno} {error}")
    return texts


@pytest.mark.filterwarnings("ignore")
def test_the_users_line_is_found_through_all_of_torch() -> None:
    for texts in ranks(2).run(sites):
        assert len(texts) == 6
        for text in texts:
            line = text.partition(" ")[0]
            assert text.count(f"test_call.py:{line} in ") == 2, text
