"""The main job on new processes of this host. Never imports torch."""

from collections.abc import Callable

from unisono.launch import local_ranks
from unisono.train.settings import Outcome, Settings, StepRecord

__all__ = ["launch"]


def launch(settings: Settings, on_steps: Callable[[list[StepRecord]], None]) -> Outcome:
    """Run the job on `settings.ranks` new processes and return rank 0's outcome.

    Args:
        settings: checked by the caller, so that a mistake costs no start of processes.
        on_steps: called in this process with the records of every few steps.

    Raises:
        PeerLostError: a rank was killed.
        UnisonoError: a rank raised; the message is one line and names rank, error and place.

    """
    outcome = None
    with local_ranks("unisono.train.job:rank_main", settings.ranks, settings) as ranks:
        for message in ranks.messages():
            if isinstance(message, Outcome):
                outcome = message
            else:
                on_steps(message)
    assert outcome is not None, "rank 0 ended well without an outcome"
    return outcome
