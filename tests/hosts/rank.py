"""The program of a rank on a host: joins the default group, runs one function, prints its result as one line."""

import datetime
import faulthandler
import importlib
import json
import os
import signal
import sys

import torch
import torch.distributed as dist

SECONDS = float(os.environ.get("GROUP_SECONDS", "30"))


def main() -> None:
    faulthandler.register(signal.SIGUSR2)
    torch.set_num_threads(1)
    module, name, given = json.loads(sys.argv[1])
    function = getattr(importlib.import_module(module), name)
    dist.init_process_group("unisono", timeout=datetime.timedelta(seconds=SECONDS))
    result = function(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), *given)
    dist.destroy_process_group()
    print("result", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
