"""The methods of a process group other than operations: its members, its name, its end."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unisono.backend.caller_frame import keep_from_dynamo
from unisono.backend.group import Group

__all__ = ["Membership"]


class Membership(dist.ProcessGroup):
    """One rank's part in a group, under torch's names."""

    def __init__(self, group: Group, store: Any, timeout: timedelta) -> None:
        super().__init__(group.rank, group.size)  # type: ignore[call-arg]  # the stub knows the C++ form alone
        self._group, self._store = group, store
        self._name = ""
        self._timeout = timeout

    def __repr__(self) -> str:
        """Quoted by torch when a rank is no member: torch's ``src`` and ``dst`` are global ranks, often mistaken."""
        return (
            f"{self._group.label}: global ranks {self._group.global_ranks} (src and dst are global ranks; for a rank "
            f"within the group, 0 to {self._group.size - 1}, use group_src or group_dst)"
        )

    def rank(self) -> int:
        """Asked for often, as is `size`: by FSDP2 dozens of times a step; torch's own goes through C++ and back."""
        return self._group.rank

    def size(self) -> int:
        return self._group.size

    def getBackendName(self) -> str:
        return "unisono"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    _set_group_name = setGroupName

    def _set_group_desc(self, description: str) -> None:
        """What a program calls the group is said in its errors too; torch calls it so right after it was made."""
        super()._set_group_desc(description)
        if not self._group.joined and description != "undefined":  # torch's word for none
            self._group.label += f" ({description})"
        if self._group.joins_described:
            self._group.joins_described = False
            self._group.wait_for_all()

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> "Membership":
        return self

    @property
    def supports_splitting(self) -> bool:
        return False

    def get_group_store(self) -> Any:
        """None once the group is left."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the group's timeout for calls from now on."""
        self._timeout, self._group.timeout = timeout, timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to agree on: calls are numbered from the first."""

    def _get_sequence_number_for_group(self) -> int:
        return self._group.collectives.calls if self._group.joined else 0

    def shutdown(self) -> None:
        """Leaves the group; called by ``destroy_process_group``."""
        self._group.close()
        self._store = None

    def abort(self) -> None:
        """Leaves the group at once; calls under way end with an error."""
        self._group.close("was aborted")
        self._store = None


keep_from_dynamo(Membership)
