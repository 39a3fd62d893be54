"""Ports that a test may listen on."""

import random
import socket
from pathlib import Path

_EPHEMERAL = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def free_port() -> int:
    """A port that nobody uses now, and that the kernel gives no connection: tests run beside each other."""
    while True:
        port = random.SystemRandom().randrange(10_000, _EPHEMERAL)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
