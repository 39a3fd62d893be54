import pytest

from unisono.bench.settings import Contender, Settings, cores
from unisono.errors import UsageError


def test_sizes_grow_by_the_factor() -> None:
    assert Settings(least=8, most=64).sizes("all_reduce") == [8, 16, 32, 64]
    assert Settings(least=1, most=10, factor=1.5).sizes("all_reduce") == [1, 2, 3, 5, 8]
    assert Settings(least=100, most=100).sizes("broadcast") == [100]
    assert Settings().sizes("barrier") == [0]
    assert Settings(listed=(64, 8, 64)).sizes("gather") == [8, 64]
    assert (Settings(listed=(64, 8)).largest, Settings(most=99).largest) == (64, 99)


def test_pins_only_ranks_that_fit() -> None:
    assert Settings(ranks=len(cores()), pin=True).pins() == cores()
    assert Settings(ranks=len(cores()) + 1, pin=True).pins() == []
    assert Settings(ranks=1).pins() == []


def test_gloo_must_be_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_REPLACES", "gloo")
    with pytest.raises(UsageError, match="UNISONO_REPLACES is set, so that nothing here could measure Gloo: unset it"):
        Settings(contenders=(Contender("unisono"), Contender("gloo"))).validate()
    Settings().validate()  # nothing here measures Gloo


def test_sums_need_to_be_exact_only_if_they_are_checked() -> None:
    Settings(ranks=65, check=False).validate()


MPI = (Contender("unisono"), Contender("mpi"))


def test_an_op_that_mpi_lacks_matters_only_to_calls_that_reduce() -> None:
    Settings(("all_gather",), contenders=MPI, op="avg").validate()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(collectives=("all_reduc",)), "unknown collective 'all_reduc': expected one of all_reduce,"),
        (Settings(op="mean"), "unknown --op 'mean'"),
        (Settings(dtype="half"), "unknown --dtype 'half'"),
        (Settings(op="bor"), "--op bor is for whole numbers"),
        (Settings(op="avg", dtype="bool"), "--op avg is for numbers"),
        (Settings(op="premul_sum", dtype="int8"), "--op premul_sum is for floating point"),
        (Settings(ranks=0), "--ranks is 0"),
        (Settings(ranks=65), "--ranks is 65"),
        (Settings(root=2), "--root is 2, expected a rank from 0 to 1"),
        (Settings(runs=0), "--runs is 0"),
        (Settings(warm_up=-1), "--warm-up is -1"),
        (Settings(seconds=0), "--seconds is 0"),
        (Settings(least=0), "sizes from 0 B"),
        (Settings(least=2, most=1), "sizes from 2 B to 1 B"),
        (Settings(factor=1), "-f is 1"),
        (Settings(listed=(0, 1)), "--bytes lists 0 B"),
        (Settings(collectives=("all_reduce", "gather"), place="in"), "gather has no in-place form"),
        (Settings(place="below"), "unknown place 'below'"),
        (Settings(contenders=(Contender("ucc"),)), "unknown backend 'ucc'"),
        (Settings(contenders=(Contender("nccl"),)), "nccl is not measured on tensors of --device cpu"),
        (Settings(contenders=(Contender("gloo"),), device="cuda"), "gloo is not measured on tensors of --device cuda"),
        (Settings(contenders=(Contender("symm_mem", "ring"),), device="cuda"), "unknown algorithm 'ring'"),
        (Settings(device="tpu"), "unknown --device 'tpu'"),
        (Settings(device="cuda", timings=("graphs",)), "unknown --timing 'graphs'"),
        (Settings(device="cuda", asynchronous=True), "--async is of CPUs: on GPUs give --timing async"),
        (Settings(device="cuda", memory="shared"), "--memory shared is memory of the host"),
        (Settings(contenders=(Contender("unisono", "rings"),)), "unknown algorithm 'rings'"),
        (Settings(contenders=MPI, dtype="bfloat16"), "mpi has no --dtype bfloat16: those that it has are uint8, "),
        (Settings(contenders=MPI, dtype="float8_e4m3fn"), "mpi has no --dtype float8_e4m3fn"),
        (Settings(contenders=MPI, op="avg"), "mpi has no --op avg: those that it has are sum, product, min, max, band"),
        (Settings(("barrier", "reduce"), contenders=MPI, op="premul_sum"), "mpi has no --op premul_sum"),
        (Settings(contenders=(Contender("gloo"), Contender("gloo"))), "the contenders are gloo, gloo"),
    ],
)
def test_mistakes_are_refused_in_one_line(settings: Settings, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        settings.validate()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
