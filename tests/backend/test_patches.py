"""What unisono changes in torch: nothing when it is imported, three things at the first group, each with a switch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys
import torch, torch.distributed as dist

def places():
    from torch.nn.parallel import DistributedDataParallel
    objects = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
               "send_object_list", "recv_object_list", "init_process_group", "new_group", "get_backend",
               "monitored_barrier")
    found = {name: getattr(dist, name) for name in objects}
    found |= {f"distributed_c10d.{name}": getattr(dist.distributed_c10d, name) for name in objects}
    for name in objects:  # torch decorates its functions: what the decorator calls
        for cell in found[name].__closure__ or ():
            if hasattr(cell.cell_contents, "__wrapped__"):
                found[name] = found[f"distributed_c10d.{name}"] = cell.cell_contents
    found["SyncBatchNorm.forward"] = torch.nn.SyncBatchNorm.forward
    found["DDP"] = DistributedDataParallel._passing_sync_batchnorm_handle
    found["excepthook"] = sys.excepthook
    for cell in getattr(sys.excepthook, "__closure__", None) or ():  # torch wraps what it finds with one of its own
        if hasattr(cell.cell_contents, "__code__"):
            found["excepthook"] = cell.cell_contents
    return found

def code(value):
    return getattr(value, "__code__", None)

def changed(places):
    return sorted(name for name, value in places.items()
                  if code(value) is not None and "unisono/backend/patches" in code(value).co_filename)

at_torch = changed(places())
import unisono
at_import = changed(places())
dist.init_process_group("unisono", f"file://{sys.argv[1]}", rank=0, world_size=1)
at_group = changed(places())
dist.destroy_process_group()
print(json.dumps([at_torch, at_import, at_group]))
"""
OBJECTS = [
    "all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list", "scatter_object_list",
    "send_object_list",
]  # fmt: skip
PATCHED = {
    "objects": [*OBJECTS, *(f"distributed_c10d.{name}" for name in OBJECTS)],
    "sync_batch_norm": ["DDP", "SyncBatchNorm.forward"],
    "excepthook": ["excepthook"],
}


def run(tmp_path: Path, patches: str | None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "UNISONO_PATCHES"}
    if patches is not None:
        environment["UNISONO_PATCHES"] = patches
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "meeting")]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("patches", "applied"),
    [
        (None, list(PATCHED)),
        ("", list(PATCHED)),
        ("none", []),
        ("objects,", ["objects"]),
        ("excepthook, sync_batch_norm", list(PATCHED)[1:]),
    ],
)
def test_nothing_at_import_and_what_is_wanted_at_the_first_group(
    patches: str | None, applied: list[str], tmp_path: Path
) -> None:
    done = run(tmp_path, patches)
    assert done.returncode == 0, done.stderr
    at_torch, at_import, at_group = json.loads(done.stdout)
    assert (at_torch, at_import) == ([], [])
    assert at_group == sorted(place for name in applied for place in PATCHED[name])


def test_an_unknown_patch_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "objects,pickles")
    assert done.returncode == 1
    assert "UNISONO_PATCHES is 'objects,pickles', which names pickles: expected none, or some of objects" in done.stderr


def test_names_imported_before_the_first_group_are_served_too(tmp_path: Path) -> None:
    program = """
import sys
from torch.distributed import all_gather_object, destroy_process_group, init_process_group
init_process_group("unisono", f"file://{sys.argv[1]}", rank=0, world_size=1)
found = [None]
all_gather_object(found, {1: 2})
try:
    all_gather_object([None], lambda: 1)
except Exception as error:
    print(found, type(error).__name__, error)
destroy_process_group()
"""
    command = [sys.executable, "-c", program, str(tmp_path / "meeting")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith("[{1: 2}] UsageError all_gather_object: the object of rank 0 can not be pickled")
