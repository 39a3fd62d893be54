"""What unisono changes in torch: how ranks of launchers meet, three things at the first group, each with a switch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import agents

PROGRAM = """
import json, os, sys
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
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    found |= {f"{scheme}://": handler for scheme, handler in handlers.items()}
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
folder, codes = sys.argv[1], []
import unisono.backend.process_group  # what a first group imports
for patches in json.loads(sys.argv[2]):  # each in a child of its own
    if os.fork() == 0:
        break
    codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
else:
    print(json.dumps(codes))
    sys.exit()
for stream in (1, 2):
    os.dup2(os.open(f"{folder}/{len(codes)}-{stream}", os.O_WRONLY | os.O_CREAT), stream)
if patches is not None:
    os.environ["UNISONO_PATCHES"] = patches
import unisono
at_import = changed(places())
dist.init_process_group("unisono", f"file://{folder}/{len(codes)}-meeting", rank=0, world_size=1)
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


AT_TORCH = ["env://", "file://", "launcher://"]  # launchers asks when a rank without a number comes: test_launchers.py
UNKNOWN = "objects,pickles"
APPLIED = {
    None: list(PATCHED),
    "": list(PATCHED),
    "none": [],
    "objects,": ["objects"],
    "excepthook, sync_batch_norm": list(PATCHED)[1:],
}


class Done(NamedTuple):
    """How the program ended with a value of the variable, and what it printed."""

    code: int
    output: str
    errors: str


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Done]:
    """The program with every value of UNISONO_PATCHES, None: without the variable."""
    folder, wanted = tmp_path_factory.mktemp("patches"), [*APPLIED, UNKNOWN]
    environment = {k: v for k, v in os.environ.items() if k != "UNISONO_PATCHES"}
    command = [sys.executable, "-c", PROGRAM, str(folder), json.dumps(wanted)]
    codes = json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    return {
        patches: Done(code, (folder / f"{k}-1").read_text(), (folder / f"{k}-2").read_text())
        for k, (patches, code) in enumerate(zip(wanted, codes, strict=True))
    }


@pytest.mark.parametrize("patches", APPLIED)
def test_launchers_at_import_and_what_is_wanted_at_the_first_group(
    patches: str | None, done: dict[str | None, Done]
) -> None:
    assert done[patches].code == 0, done[patches].errors
    at_torch, at_import, at_group = json.loads(done[patches].output)
    assert at_torch == at_import == AT_TORCH
    assert at_group == sorted(AT_TORCH + [place for name in APPLIED[patches] for place in PATCHED[name]])


def test_an_unknown_patch_is_refused(done: dict[str | None, Done]) -> None:
    assert done[UNKNOWN].code == 1
    words = f"UNISONO_PATCHES is '{UNKNOWN}', which names pickles: expected none, or some of objects"
    assert words in done[UNKNOWN].errors


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
    (tmp_path / "program.py").write_text(program)
    printed = tmp_path / "printed"
    process = agents.python([f"{tmp_path}/program.py", f"{tmp_path}/meeting"], printed)
    assert agents.end(process) == 0, printed.read_text()
    said = printed.read_text()
    assert said.startswith("[{1: 2}] UsageError all_gather_object: the object of rank 0 can not be pickled")
