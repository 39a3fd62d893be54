"""A topology as JSON, to be kept: as a group measured it at its birth, or written by hand.

    {"topology": "measured", "hosts": [[0, 1], [2]], "gamma": 1e-10,
     "intra": {"name": "shared_memory", "alpha": 2e-06, "beta": 1e-10},
     "between": [[null, {"name": "eth0", "alpha": 3e-04, "beta": 8.5e-09, "announcement": 1e-04}], [..., null]],
     "memory": {"call": 1e-05, "meeting": 2e-06, "copy": 1e-10, "cores": 2}}

`between` has a row per host of the sender, with a link per host of the receiver; `memory` may be missing. The one last
measured lies in the user's cache directory ($XDG_CACHE_HOME or ~/.cache), one file per machine.
"""

import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unisono.errors import UsageError, file_errors
from unisono.schedule.hosts import as_hosts
from unisono.schedule.topology import Link, Memory, Topology, joined

__all__ = ["MEASURED", "keep", "kept_path", "load_topology", "save_topology", "to_json", "topology_path"]

MEASURED = "measured"
"""The name of the topology last measured on this machine."""


def kept_path(what: str) -> Path:
    """The file in which this machine keeps something from run to run."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "unisono" / f"{what}-{platform.node() or 'here'}.json"


def keep(path: Path, text: str, what: str) -> Path:
    """Write a file as a whole, or not at all; its path. Raises UsageError if it cannot be written."""
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    with file_errors(f"keep {what} in {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    return path


def topology_path() -> Path:
    """The path of the topology last measured on this machine."""
    return kept_path("topology")


def to_json(topology: Topology) -> dict[str, Any]:
    """Plain dictionaries and lists, ready for json.dumps."""
    n = range(topology.hosts)
    first = [ranks[0] for ranks in topology.ranks_of_hosts]
    between = [[None if a == b else asdict(topology.link(first[a], first[b])) for b in n] for a in n]
    return {
        "topology": topology.name,
        "hosts": [list(ranks) for ranks in topology.ranks_of_hosts],
        "gamma": topology.gamma,
        "intra": asdict(topology.intra),
        "between": between,
        "memory": asdict(topology.memory) if topology.memory is not None else None,
    }


def _from_json(data: dict[str, Any]) -> Topology:
    """The topology that `to_json` described. Raises UsageError if a field is missing or wrong."""
    try:
        rows = data.get("between") or [[None]]
        intra, memory = Link(**data["intra"]), data.get("memory")
        between = tuple(tuple(intra if link is None else Link(**link) for link in row) for row in rows)
        hosts = as_hosts(data["hosts"], sum(map(len, data["hosts"])))
        made = joined(
            hosts, intra, between, float(data.get("gamma", 0.0)), Memory(**memory) if memory else None, data["topology"]
        )
    except UsageError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise UsageError(f"not a topology in JSON ({problem}): expected topology, hosts, intra, between") from None
    return made


def save_topology(topology: Topology, path: Path | None = None) -> Path:
    """Write it to a file, by default the one of the topology last measured; the path. Raises UsageError as `keep`."""
    return keep(path or topology_path(), json.dumps(to_json(topology), indent=1) + "\n", "the topology")


def load_topology(path: Path | None = None) -> Topology:
    """The topology in a file, by default the one last measured. Raises UsageError if there is none, or it is wrong."""
    path = path or topology_path()
    with file_errors(f"read the topology in {path}"):
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            words = f"no topology in {path}: a group that spans hosts measures one, `unisono topo` keeps it"
            raise UsageError(words) from None
    try:
        return _from_json(json.loads(text))
    except UsageError as problem:
        raise UsageError(f"{path}: {problem}") from None
    except ValueError as problem:
        raise UsageError(f"{path} is not JSON: {problem}") from None
