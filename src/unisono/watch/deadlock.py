"""Deadlock detection: a cycle in the graph of waits between processes.

Every process that is blocked in unisono publishes, at each check of its peers, the processes without which its wait can
never end (watch/status_page.py). An edge is published only if it is certain: the peer has not issued what is waited
for, and nothing that would do is on its way. A process publishes edges only if no other thread of its own could issue
calls.

Pages are read one after another, so a cycle seen once may be made of moments that never met. It is believed only when
every process in it is still in the same wait and has looked around at least twice since: then each of them was blocked
throughout, and each edge was certain at a time when all were blocked. No process in such a cycle can ever act again.
What another host answers is as old as the question (remote_page.py): it counts if that was asked after the cycle was
seen, and a look counts if all of its peers there have answered since the one before.
"""

import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType

from unisono.transport.host import own_mark
from unisono.transport.process import Identity, OwnThread
from unisono.watch.remote_page import RemotePage, remote_page
from unisono.watch.status_page import OwnPage, PeerPage

__all__ = ["CycleFinder", "LongWait", "others_could_call"]

_TOGETHER, _ALONE = (
    "these ranks wait for each other, and none can go on",
    "this rank waits for itself, and can not go on",
)

_HARMLESS = (
    "logging.handlers.",
    "multiprocessing.queues.",  # feeds a queue's pipe; every DataLoader with workers has some
    "multiprocessing.resource_sharer.",
    "rich.",
    "tensorboard.",
    "tensorboardX.",
    "torch._inductor.",
    "torch.utils.data._utils.pin_memory.",
    "tqdm.",
    "wandb.",
)
"""Modules and packages whose threads write, draw or fetch, and communicate nothing."""

_State = tuple[int, int]  # number of the wait, looks


@dataclass
class CycleFinder:
    """Looks for a cycle through this process, and remembers the one seen last until it is certain."""

    own: OwnPage
    suspect: list[Identity] = field(default_factory=list)
    states: list[_State] = field(default_factory=list)
    since: float = 0.0
    based: bool = False  # all states were read after the cycle was seen

    def check(self) -> str:
        """Words on a deadlock that this process is in, or empty. Publishes them to the others in it."""
        wait, _ = self.own.wait()
        judged, words = self.own.verdict()
        if judged == wait:
            return words
        if self.suspect:
            now = self._states(self.suspect)
            if not now or any(a[0] != b[0] for a, b in zip(now, self.states, strict=True)):
                self.suspect = []
            elif not self.based:
                self.states, self.based = now, self._as_of(self.suspect) > self.since
            elif all(a[1] >= b[1] + 2 for a, b in zip(now, self.states, strict=True)) and self._holds(self.suspect):
                return self._judge()
            return ""
        self.suspect, self.since = self._search(), time.monotonic()
        self.states = self._states(self.suspect)
        if not self.states:
            self.suspect = []
        self.based = self._as_of(self.suspect) >= self.since
        return ""

    def _page(self, who: Identity) -> PeerPage | RemotePage | None:
        return remote_page(who) if who.host else self.own.peer(who)

    def _as_of(self, cycle: list[Identity]) -> float:
        """The moment after which all that is known of those of these processes that are elsewhere was so."""
        return min((remote_page(who).as_of() for who in cycle if who.host), default=math.inf)

    def _states(self, cycle: list[Identity]) -> list[_State]:
        """The wait of each process of the cycle; empty if one does not wait."""
        pages = [self._page(identity) for identity in cycle]
        states = [page.wait() for page in pages if page is not None]
        return states if len(states) == len(cycle) and all(wait for wait, _ in states) else []

    def _holds(self, cycle: list[Identity]) -> bool:
        for here, there in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            page = self._page(here)
            if page is None or there not in page.edges():
                return False
        return True

    def _search(self) -> list[Identity]:
        """A shortest cycle through this process, starting with it."""
        me = self.own.me
        before: dict[Identity, Identity] = {}
        frontier = [me]
        while frontier:
            following = []
            for here in frontier:
                page = self._page(here)
                if page is None or not page.wait()[0]:
                    continue
                for there in page.edges():
                    if there == me:
                        path = [here]
                        while path[-1] != me:
                            path.append(before[path[-1]])
                        return path[::-1]
                    if there not in before:
                        before[there] = here
                        following.append(there)
            frontier = following
        return []

    def _judge(self) -> str:
        """Publishes the verdict, in words, to all processes of the cycle."""
        mine = own_mark()
        first = min(range(len(self.suspect)), key=lambda k: (self.suspect[k].host or mine, self.suspect[k].pid))
        cycle = self.suspect[first:] + self.suspect[:first]
        pages = [page for page in (self._page(identity) for identity in cycle) if page is not None]
        texts = [page.text() for page in pages]
        lines = [f"  {text}\n    which waits for" for text in texts]
        who = _TOGETHER if len(pages) > 1 else _ALONE
        words = f"{who}:\n" + "\n".join(lines) + f"\n  {texts[0]}"
        for page in sorted(pages, key=lambda page: isinstance(page, PeerPage)):  # first those that are far
            page.set_verdict(page.wait()[0], words)
        return words


class LongWait:
    """One long wait of this process. ``text`` describes it; ``reacts``: True if the end of a call may issue others."""

    def __init__(self, own: OwnPage, text: Callable[[], str], reacts: Callable[[], bool]) -> None:
        self._own_page, self._text, self._reacts = own, text, reacts
        self._last_text = text()
        self._published = own.begin(self._last_text)
        self._finder = CycleFinder(own)
        self._checked = time.monotonic()  # what processes of other hosts answered before is not counted

    def check(self, needs: Sequence[Identity]) -> str:
        """Publishes the processes the wait needs now; returns words on a deadlock, if it is in one."""
        if not self._published:
            return ""
        if (text := self._text()) != self._last_text:
            self._last_text = text
            self._own_page.set_text(text)
        certain = [] if others_could_call() or self._reacts() else needs
        asked = {who: remote_page(who).as_of() for who in certain if who.host}
        whole = all(moment > self._checked for moment in asked.values())
        self._own_page.publish_edges([who for who in certain if asked.get(who, 1.0)], whole)
        self._checked = time.monotonic() if whole else self._checked
        return self._finder.check()

    def end(self) -> None:
        """Ends the publication of the wait."""
        if self._published:
            self._own_page.end()


def others_could_call() -> bool:
    """True if another thread than this one could issue calls."""
    frames, threads = sys._current_frames(), threading.enumerate()
    me = threading.get_ident()
    del frames[me]  # a frame that refers to itself would keep all of this stack's variables
    own = {thread.ident for thread in threads if isinstance(thread, OwnThread)}
    others = {thread.ident for thread in threads} | frames.keys()  # threading does not know those of other languages
    return not all(_harmless(frames.get(ident or 0)) for ident in others - own - {me})


def _harmless(frame: FrameType | None) -> bool:
    """True if the thread that is in ``frame`` could not issue a call; None: it runs no Python, and nothing is known."""
    return frame is not None and (_idle(frame) or f"{_root(frame)}.".startswith(_HARMLESS))


def _root(frame: FrameType) -> str:
    """The module of the function that a thread was made for."""
    module = ""
    at: FrameType | None = frame
    while at is not None:
        name = at.f_globals.get("__name__", "")
        module = module if name == "threading" else name
        at = at.f_back
    return module


def _idle(frame: FrameType) -> bool:
    """True if it is a ThreadPoolExecutor's thread that waits for work, and there is none."""
    if frame.f_globals.get("__name__") != "concurrent.futures.thread" or frame.f_code.co_name != "_worker":
        return False
    queue = frame.f_locals.get("work_queue")
    return queue is not None and bool(queue.empty())
