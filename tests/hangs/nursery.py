"""A program that has imported torch and unisono and forks the programs of tests, each at the top level, as scripts are.

Orders come as lines of JSON: a program to fork, whose pid is answered, or one to wait for and reap, whose exit code is.
Until it is reaped, a program that has ended is a zombie, as it is below a launcher that looks after its ranks now and
then.
"""

import ctypes
import gc
import json
import os
import signal
import sys

import torch.distributed
import torch.distributed.distributed_c10d

import unisono.backend.device_group
import unisono.runtime.loaded  # noqa: F401

torch.set_num_threads(1)
gc.freeze()
for line in sys.stdin:
    order = json.loads(line)
    if "reap" in order:
        _, status = os.waitpid(order["reap"], 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        break
    print(pid, flush=True)
else:
    sys.exit()

ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
os.dup2(os.open(order["errors"], os.O_WRONLY | os.O_CREAT), 2)
os.dup2(os.open(os.devnull, os.O_RDWR), 1)
os.dup2(1, 0)
with open(order["program"]) as file:
    program = compile(file.read(), order["program"], "exec")
exec(program, {"__name__": "__main__"})
