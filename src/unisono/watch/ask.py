"""What a running job is asked from outside: its Python stacks, its flight record. Never imports torch.

A thread of each rank answers; the rank's own work goes on. A rank that is stopped, or holds the interpreter lock, does
not answer in time, and nothing else happens.
"""

import time

from unisono.transport.process import stopped
from unisono.watch.page import Page, find_page
from unisono.watch.status import Job

__all__ = ["records", "stacks"]

_SILENT = "it does not answer: it is stopped, or busy outside Python with the interpreter lock held"


def _pages(job: Job) -> dict[int, Page]:
    found = {rank: find_page(who) for rank, who in job.identities.items() if not stopped(who)}
    return {rank: page for rank, page in found.items() if page is not None}


def stacks(job: Job, seconds: float = 1.0) -> dict[int, str]:
    """Every rank's Python stacks, in text, asked for at once and waited for at most ``seconds``."""
    asked = {rank: (page, page.request()) for rank, page in _pages(job).items()}
    deadline = time.monotonic() + seconds
    answers = {rank: page.answer(number, deadline) for rank, (page, number) in asked.items()}
    return {rank: answers.get(rank, "").partition("\n")[2] or _SILENT for rank in job.identities}


def records(job: Job, folder: str, seconds: float = 5.0) -> dict[int, str]:
    """Asks every rank to write its flight record into ``folder``; the files, or ``! `` and why there is none."""
    asked = {rank: (page, page.request_record(folder)) for rank, page in _pages(job).items()}
    deadline = time.monotonic() + seconds
    answers = {rank: page.record_answer(number, deadline) for rank, (page, number) in asked.items()}
    return {rank: answers.get(rank, "") or f"! {_SILENT}" for rank in job.identities}
