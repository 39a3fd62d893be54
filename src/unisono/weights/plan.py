"""Plans: which rank sends which bytes to which, as a pure function of layouts and rules, compiled to a Schedule."""

from collections.abc import Iterable, Sequence
from functools import cached_property, partial

from unisono.drawing import draw
from unisono.errors import MismatchError, UsageError
from unisono.schedule import Redistribution, Schedule, Topology, preset
from unisono.simulation import Timeline, simulate
from unisono.verification import Report
from unisono.weights.arguments import whole_number
from unisono.weights.bound import bound_of
from unisono.weights.chunks import Chunk, chunks_of, demand_of
from unisono.weights.explain import explain
from unisono.weights.fit import Fit, fit
from unisono.weights.forwarding import FORWARDS, sends, steps_of
from unisono.weights.layout import Layout
from unisono.weights.packing import Move
from unisono.weights.prediction import Prediction, predict
from unisono.weights.proof import prove
from unisono.weights.regions import Cast, Op, Region, cut
from unisono.weights.rules import Rule
from unisono.weights.side import check_rules

__all__ = ["Plan", "make_plan", "plan"]

BUCKET = 32 << 20


class Plan:
    """What an update moves: chunks with one source and targets each, and the schedule that moves them.

    Ranks are numbered senders first, then replica by replica. Two plans of equal layouts and rules are equal.
    """

    def __init__(
        self, sender: Layout, receivers: Sequence[Layout], fits: Sequence[Fit], chunks: Sequence[Chunk], forward: str
    ) -> None:
        self.sender = sender
        self.receivers = tuple(receivers)
        self.fits = tuple(fits)
        self.chunks = list(chunks)
        self.forward = forward
        self.world_size = sender.world_size + sum(each.world_size for each in receivers)
        owner = [(i, rank) for i, each in enumerate(receivers) for rank in range(each.world_size)]
        self._replica = dict(enumerate(owner, sender.world_size))
        collective = Redistribution(
            self.world_size, [c.source for c in chunks], [c.targets for c in chunks], [c.nbytes for c in chunks]
        )
        self.schedule = Schedule("weights", collective, steps_of(self.chunks, forward))

    @cached_property
    def sent(self) -> list[int]:
        """Bytes that each rank sends."""
        return self._by_rank(0)

    @cached_property
    def received(self) -> list[int]:
        """Bytes that each rank receives."""
        return self._by_rank(1)

    def _by_rank(self, end: int) -> list[int]:
        total = [0] * self.world_size
        for step in self.schedule.steps:
            for transfer in step:
                moved = sum(c.nbytes for c in self.chunks[transfer.chunk : transfer.chunk + transfer.count])
                total[(transfer.src, transfer.dst)[end]] += moved
        return total

    def side(self, rank: int) -> str:
        """`sender`, or the number of the replica."""
        return f"replica {self._replica[rank][0]}" if rank in self._replica else "sender"

    @property
    def nbytes(self) -> int:
        """Bytes in all that receivers receive."""
        return sum(self.received)

    def moves(self, rank: int, chunk: int) -> list[Move]:
        """Where the blocks of a chunk lie in the tensors of a rank: of its source as it packs, of a target, unpacks."""
        source, found, start = self.chunks[chunk].source == rank, [], 0
        receiver, own = self._replica[self.chunks[chunk].targets[0] if source else rank]
        values = self.fits[receiver].tensors
        for name, offsets, shape in self.chunks[chunk].pieces:
            value = values[name]
            if source:
                move = self._from_sender(rank, self.fits[receiver], name, offsets, shape)._replace(start=start)
            else:
                at = _local(self.receivers[receiver][name].parts[own], offsets, shape)
                move = Move(start, shape, value.dtype, name, at, tuple(range(len(shape))))
            found.append(move._replace(offsets=offsets, whole=value.shape))
            start += move.nbytes
        return found

    def _from_sender(self, rank: int, fit: Fit, name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Move:
        value = fit.tensors[name]
        region = next(r for each in value.regions if (r := cut(each, offsets, shape)) is not None)
        at = region.at
        if region.source not in fit.scales:
            at = _local(self.sender[region.source].parts[rank], region.at, region.extent)
        ops = _needed(region, fit, self.sender)
        return Move(0, shape, value.dtype, region.source, at, region.dims, ops)

    def verify(self) -> Report:
        """Prove that every receiver gets every byte of its layout, once; as `unisono.verify` reports it."""
        return prove(self)

    def simulate(self, topology: str | Topology = "shared_memory") -> Timeline:
        """When every chunk travels, and the time in all, on a topology or one by name."""
        return simulate(self.schedule, topology)

    def bound(self, topology: str | Topology = "shared_memory") -> float:
        """Seconds that no plan for these layouts can do without."""
        return bound_of(self, preset(topology, self.world_size))

    def predict(self, topology: str | Topology | None = None) -> Prediction:
        """Seconds of a push on a topology; None: on this host, as `unisono tune weights` measured it, if it has."""
        return predict(self, topology)

    def draw(self) -> str:
        """The schedule as a grid of text: what every rank sends and receives in every step."""
        return str(draw(self.schedule))

    def explain(self, topology: str | Topology | None = None) -> str:
        """Bytes by rank, buckets, who forwards, the time as `predict` has it, the bound and its share, the drawing."""
        return explain(self, self.predict(topology))


def _local(
    part: Sequence[tuple[tuple[int, ...], ...]], offsets: Sequence[int], shape: Sequence[int]
) -> tuple[int, ...]:
    """Where a box of the whole lies in a rank's own tensor."""
    for low, length, at in part:
        inside = zip(offsets, shape, low, length, strict=True)
        if all(b <= a and a + n <= b + m for a, n, b, m in inside):
            return tuple(o + a - b for o, a, b in zip(at, offsets, low, strict=True))
    raise AssertionError("a chunk has a piece that its rank does not hold")


def _needed(region: Region, fit: Fit, sender: Layout) -> tuple[Op, ...]:
    """The operations of a region without casts to the dtype that is there already."""
    if region.source in fit.scales:
        return region.ops
    dtype, ops = sender[region.source].dtype, list[Op]()
    for op in region.ops:
        if not (isinstance(op, Cast) and op.dtype == dtype):
            ops.append(op)
        dtype = op.dtype or dtype
    return tuple(ops)


def plan(
    sender: Layout,
    receivers: Layout | Sequence[Layout],
    rules: Sequence[Rule] = (),
    *,
    bucket: int = BUCKET,
    forward: str = "auto",
) -> Plan:
    """Plan an update of one or several replicas; a pure function, which needs neither processes nor the tensors.

    bucket: bytes of a chunk, at most. forward: how a chunk for several ranks gets to them: `direct`, `chain` or `tree`
    over these ranks, or `auto`, what simulates best on shared memory.

    Raises UsageError for a rule that does not suit or a number out of range, MismatchError with every difference
    between what is sent and what is wanted.
    """
    rules = check_rules(rules)
    layouts = list(receivers) if isinstance(receivers, Iterable) and not isinstance(receivers, Layout) else [receivers]
    for each in (sender, *layouts):
        if not isinstance(each, Layout):
            raise UsageError(f"a plan is made of layouts, as layout(model) gives, got {type(each).__name__}")
    found: list[Fit] = []
    wrong: list[str] = []
    for i, each in enumerate(layouts):
        try:
            alike = next((k for k in range(i) if not wrong and layouts[k] == each), None)
            found.append(fit(sender, each, rules, _named(i, len(layouts))) if alike is None else found[alike])
        except MismatchError as problem:
            wrong.append(str(problem))
    if wrong:
        raise MismatchError("\n".join(wrong))
    return make_plan(sender, layouts, found, bucket, forward)


def _named(index: int, count: int) -> str:
    return "the receiver" if count == 1 else f"receiver {index}"


def make_plan(
    sender: Layout,
    receivers: Sequence[Layout],
    fits: Sequence[Fit],
    bucket: int = BUCKET,
    forward: str = "auto",
    topology: str | Topology = "shared_memory",
) -> Plan:
    """Plan an update from layouts and how they fit, which may differ from replica to replica."""
    whole_number(bucket, "bucket", 1)
    if forward not in (*FORWARDS, "auto"):
        raise UsageError(f"unknown forward {forward!r}: expected auto, {', '.join(FORWARDS)}")
    if not receivers:
        raise UsageError("a plan needs at least one receiver")
    demand, made = demand_of(sender, receivers, fits), []
    for name in FORWARDS if forward == "auto" else (forward,):
        chunks = chunks_of(demand, sender.world_size, bucket, partial(sends, name))
        made.append(Plan(sender, receivers, fits, chunks, name))
        if all(len(chunk.targets) == 1 for chunk in chunks):
            break  # nothing to forward
    return min(made, key=lambda each: each.simulate(topology).time)
