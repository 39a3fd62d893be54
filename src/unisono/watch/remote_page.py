"""The pages of processes on other hosts: their waits, asked for over the network of a group that they are in.

A question costs a frame each way, and is asked only while this process waits for one of that host, directly or through
others. The answer is as old as the question; it comes with the calls that its process has issued in each group, for
what is on its way here is not missing. A process that has something to send on says that it does not wait.
"""

import json
import threading
import time
import weakref
from collections.abc import Callable

from unisono.runtime.network import Network
from unisono.transport.host import own_mark
from unisono.transport.process import Identity
from unisono.watch.other_hosts import PS, answer_ps, gather
from unisono.watch.status_page import OwnPage, own_page, save_record

__all__ = ["RemotePage", "over_hosts", "remote_page", "serve"]

_PAUSE, _PATIENCE = 0.1, 0.5  # s from one question to the next; if the first is not answered
_PAGE, _VERDICT = "wait", "deadlock"

_networks: "weakref.WeakSet[Network]" = weakref.WeakSet()
_pages: dict[Identity, "RemotePage"] = {}
_making = threading.RLock()


class RemotePage:
    """What is known of one process of another host; the same reading methods as `PageView`."""

    def __init__(self, who: Identity) -> None:
        self._who = who
        self._asked = self._answered = 0.0  # when it was last asked, and when it was asked what it has answered last
        self._wait, self._checks, self._edges, self._text = 0, 0, list[Identity](), ""

    def look(self) -> None:
        """Asks anew, if it is time."""
        now = time.monotonic()
        if now >= self._asked + (_PAUSE if self._answered >= self._asked else _PATIENCE):
            self._asked = now
            self._ask(_PAGE, b"", lambda answer: self._take(now, answer))

    def _ask(self, name: str, body: bytes, then: Callable[[bytes], None]) -> None:
        for network in list(_networks):
            for rank in network.hosts.remote:
                if network.process(rank) == self._who:
                    network.questions.ask(rank, name, body, then)
                    return

    def _take(self, asked: float, answer: bytes) -> None:
        if not answer:
            return
        found = json.loads(answer)
        for network in list(_networks):
            network.note_issued(self._who, found["issued"].get(network.nonce, 0))
        mine = own_mark()
        self._edges = [Identity(pid, started, 0 if mark == mine else mark) for pid, started, mark in found["edges"]]
        self._wait, self._checks, self._text = found["wait"], found["checks"], found["text"]
        self._answered = asked

    def as_of(self) -> float:
        """The moment (``time.monotonic``) after which this was so; 0 if nothing is known."""
        return self._answered

    def wait(self) -> tuple[int, int]:  # noqa: D102
        return self._wait, self._checks

    def edges(self) -> list[Identity]:  # noqa: D102
        return self._edges

    def text(self) -> str:  # noqa: D102
        return self._text

    def set_verdict(self, wait: int, text: str) -> None:
        """Publishes to the process that its wait can never end."""
        self._ask(_VERDICT, json.dumps([wait, text]).encode(), lambda answer: None)


def remote_page(who: Identity) -> RemotePage:
    """The page of a process of another host, asked anew if it is time."""
    with _making:
        page = _pages.get(who) or _pages.setdefault(who, RemotePage(who))
    page.look()
    return page


def over_hosts() -> bool:
    """True if this process is in a group over several hosts."""
    return bool(_networks)


def serve(network: Network) -> None:
    """Answers what ranks of other hosts ask about this process, and asks over ``network``."""
    _networks.add(network)
    network.closing.append(lambda deadline: _networks.discard(network))
    own = own_page()
    own.find_others = _find_others
    network.questions.answers[_PAGE] = lambda body: _answer(own)
    network.questions.answers[PS] = answer_ps
    network.questions.answers["record"] = lambda folder: save_record(folder.decode()).encode()
    network.questions.answers[_VERDICT] = lambda body: _judged(own, body)


def _answer(own: OwnPage) -> bytes:
    wait, checks = own.wait()
    if any(network.unsent() for network in list(_networks)):
        wait = 0
    mine = own_mark()
    edges = [(each.pid, each.started, each.host or mine) for each in own.edges()]
    issued = {network.nonce: network.issued_here() for network in list(_networks)}
    return json.dumps({"wait": wait, "checks": checks, "edges": edges, "text": own.text(), "issued": issued}).encode()


def _find_others() -> str:
    widest = max(_networks, key=lambda network: len(network.hosts.of), default=None)
    return gather(widest) if widest is not None else ""


def _judged(own: OwnPage, body: bytes) -> bytes:
    wait, words = json.loads(body)
    own.set_verdict(wait, words)
    return b""
