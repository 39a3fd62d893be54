"""All hosts of a job, or this one and the peers it was given: their facts, and the links between them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from ipaddress import ip_address

from unisono.backend.launchers import RankPlace, master_address
from unisono.errors import UsageError
from unisono.topo.exchange import Exchange, Values, why
from unisono.topo.facts import Facts, host_facts, resolve
from unisono.topo.links import LinkCost, link_server, measure_link
from unisono.transport.interfaces import interfaces

__all__ = ["PORT", "Survey", "is_here", "measured", "survey"]

PORT = 29501
"""The port over which hosts exchange facts, unless another is given: the one after torch's usual port."""


@dataclass(frozen=True)
class Survey:
    """What was found. ``hosts`` by their first rank; ``ports``: that of each one's `link_server`.

    ``failures``: why this host could not reach a server of facts, by its address.
    """

    mine: Facts
    hosts: list[Facts]
    exchange: Exchange
    ports: dict[str, int]
    expected: int
    failures: dict[str, str]

    @property
    def others(self) -> list[Facts]:
        """All hosts but this one."""
        return [each for each in self.hosts if each.key != self.mine.key]

    @property
    def absent(self) -> int:
        """How many ranks, or peers, have not come."""
        return max(0, self.expected - _count(self.hosts, self.mine.launcher != ""))

    def names(self) -> dict[str, str]:
        """What to call each host in a report, by its key: its name, and its address or pid where several have one."""
        names = [each.hostname for each in self.hosts]
        return {
            each.key: each.hostname if names.count(each.hostname) == 1 else f"{each.hostname} (pid {each.pid})"
            for each in self.hosts
        }

    def links(self) -> dict[str, dict[str, LinkCost | str]]:
        """The cost of the link from each host to each other one, or why it was not measured, by their keys.

        In turns, in which every host sends to one other and receives from one.
        """
        found: dict[str, LinkCost | str] = {}
        order = [each.key for each in self.hosts]
        at = order.index(self.mine.key)
        for turn in range(1, len(order)):
            peer = self.hosts[(at + turn) % len(order)]
            found[peer.key] = measured(peer, self.ports[peer.key])
            self.exchange.gather(f"turn {turn}", None)
        plain = {key: asdict(cost) if isinstance(cost, LinkCost) else cost for key, cost in found.items()}
        rows = self.exchange.gather("links", plain)
        return {
            key: {to: cost if isinstance(cost, str) else LinkCost(**cost) for to, cost in row.items()}
            for key, row in rows.items()
        }


def measured(peer: Facts, port: int) -> LinkCost | str:
    """The cost of the link to a host by the first of its addresses that answers, or why none does."""
    words = "it has no address"
    for address in peer.addresses[:3]:
        try:
            return measure_link(address, port)
        except OSError as error:
            words = f"{address} port {port}: {why(error)}"
    return words


def _count(hosts: Sequence[Facts], ranks: bool) -> int:
    return sum(each.local_world_size for each in hosts) if ranks else len(hosts)


@contextmanager
def survey(place: RankPlace | None, peers: Sequence[str], port: int, seconds: float) -> Iterator[Survey]:
    """The facts of all hosts of ``place``'s job, or of this one and ``peers``; servers run while the context lasts.

    Under a launcher one process per host takes part, local rank 0's. Hosts that do not come within ``seconds`` are
    absent. Raises `UsageError` if the port is taken, or where the others are can not be learned.
    """
    if place is not None and peers:
        raise UsageError(f"--peer is for hosts without a launcher, but this is {place.words}")
    master = peers[0] if peers else master_address(place) if place else "localhost"
    mine = host_facts(master, place)
    expected = place.world_size if place else 1 + len(peers)
    keys: set[str] = set()

    def complete(step: str, values: Values) -> bool:
        if step != "facts":
            return bool(keys) and keys <= values.keys()  # a post may come before the keys are known here
        return _count(list(_facts(values)), place is not None) >= expected

    with ExitStack() as ends:
        own_port = ends.enter_context(link_server())
        servers = [] if not peers and is_here(master) else list(peers or [master])
        exchange = ends.enter_context(Exchange(mine.key, port, servers, complete, seconds))
        posted = exchange.gather("facts", {"facts": asdict(mine), "port": own_port})
        hosts = sorted(_facts(posted), key=lambda each: (each.rank, each.key))
        ports = {each.key: int(posted[each.key]["port"]) for each in hosts}
        keys |= ports.keys()
        yield Survey(mine, hosts, exchange, ports, expected, dict(exchange.failures))


def _facts(values: Values) -> Iterator[Facts]:
    """The facts that were posted; what is none is left out."""
    for key, value in values.items():
        with suppress(KeyError, TypeError, AttributeError):
            facts = Facts.from_data(value["facts"])
            if facts.key == key:
                yield facts


def is_here(name: str) -> bool:
    """True if a name or an address is this host's."""
    own = {address for each in interfaces() for address in each.addresses}
    return any(address in own or ip_address(address.partition("%")[0]).is_loopback for address in resolve(name))
