"""Imported first by the process that ranks are forked from, so that it never outlives the launcher.

That process looks for its parent's end only after it has imported torch, seconds later; Linux can end it at once
(prctl, PR_SET_PDEATHSIG). The launcher names itself in an environment variable, for the one case that the kernel cannot
know: it was gone before it could be asked for. Imported anywhere else, this module does nothing.
"""

import ctypes
import os
import signal
import sys

__all__ = ["LAUNCHER"]

LAUNCHER = "UNISONO_LAUNCHER"
PR_SET_PDEATHSIG = 1

if (_launcher := os.environ.pop(LAUNCHER, None)) is not None and sys.platform == "linux":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(_launcher):
        os._exit(1)
