"""What a rank's wrong calls are told."""

from collections.abc import Callable, Sequence

import pytest

from unisono.errors import UsageError


def refused(attempts: Sequence[Callable[[], object]]) -> list[str]:
    """The text of the `UsageError` that each attempt must raise."""
    messages = []
    for attempt in attempts:
        with pytest.raises(UsageError) as error:
            attempt()
        messages.append(str(error.value))
    return messages
