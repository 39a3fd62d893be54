"""The ranks of a job on other hosts, for `unisono ps`: asked for through one of its ranks here.

`unisono ps` rings the bell of a rank of this host; that asks one rank of each other host, over the network of its
largest group, for what `unisono ps` would show there. Never imports torch.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from os import getpid
from typing import TYPE_CHECKING, Any

from unisono.transport.process import stopped
from unisono.watch.status import Job, RankStatus, remarks, snapshot
from unisono.watch.status_page import find_page

if TYPE_CHECKING:
    from unisono.runtime.network import Network

__all__ = ["PS", "answer_ps", "gather", "with_other_hosts"]

PS = "ps"
"""The name of the question."""
_PATIENCE = 0.4  # s for the first rank of each host, and again for the others of one that does not answer
_ASKING = 1.5  # s


def answer_ps(body: bytes) -> bytes:
    """What the ranks of this host do, of the job that this process is in."""
    jobs = snapshot(getpid())
    return json.dumps([asdict(rank) for job in jobs for rank in job.ranks if rank.pid]).encode()


def gather(network: "Network") -> str:
    """The same of all other hosts, in JSON: the host's name, its ranks; None for one that does not answer."""
    hosts = network.hosts
    elsewhere = [ranks for host, ranks in enumerate(hosts.hosts) if host != hosts.mine]
    found = network.questions.ask_all([ranks[0] for ranks in elsewhere], PS, b"", _PATIENCE)
    silent = [rank for ranks in elsewhere if ranks[0] not in found for rank in ranks[1:]]
    found |= network.questions.ask_all(silent, PS, b"", _PATIENCE) if silent else {}
    answers = []
    for ranks in elsewhere:
        answer = next((found[rank] for rank in ranks if found.get(rank)), b"null")
        names = [network.global_ranks[rank] for rank in ranks]
        answers.append([hosts.places[ranks[0]].hostname, names, json.loads(answer)])
    return json.dumps([hosts.places[hosts.rank].hostname, answers])


def with_other_hosts(job: Job) -> Job:
    """The job with its ranks on other hosts, if it has any."""
    if all(rank.pid for rank in job.ranks):
        return job
    for who in job.identities.values():
        page = None if stopped(who) else find_page(who)
        if page is not None and (answer := page.others(_ASKING)):
            return _merged(job, *json.loads(answer))
    return job


def _merged(job: Job, here: str, others: list[tuple[str, list[int], list[Mapping[str, Any]] | None]]) -> Job:
    ranks = {rank.rank: replace(rank, host=here) for rank in job.ranks if rank.pid}
    for host, names, found in others:
        for name in names:
            ranks[name] = RankStatus(name, 0, "absent", words="does not answer, nor does its host", host=host)
        for plain in found or ():
            ranks[plain["rank"]] = RankStatus(**{**plain, "waits_for": tuple(plain["waits_for"]), "host": host})
    for rank in job.ranks:
        ranks.setdefault(rank.rank, rank)
    every = tuple(ranks[name] for name in sorted(ranks))
    return replace(job, ranks=every, remarks=remarks(every, job.groups[0].compared))
