"""The network interfaces of this host, and which of them leads where. Sends no packet.

Source: getifaddrs(3), netdevice(7).
"""

import ctypes
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from unisono.errors import UsageError

__all__ = ["Interface", "address_for_peers", "address_towards", "interface_of", "interfaces", "own_addresses"]

_UP, _LOOPBACK = 0x1, 0x8
_ADDRESSES = {socket.AF_INET: slice(4, 8), socket.AF_INET6: slice(8, 24)}
"""Where a socket address of a family holds the bytes of the address."""
_NBYTES = 28  # of the longest of them


class Interface(NamedTuple):
    """One network interface; ``addresses`` are IPv4 and IPv6, without those of one link alone (fe80::)."""

    name: str
    addresses: tuple[str, ...]
    up: bool
    loopback: bool


class _Entry(ctypes.Structure):
    """`struct ifaddrs`: one address of one interface."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("peer", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def interfaces() -> list[Interface]:
    """All interfaces, in the kernel's order; raises `OSError` if the kernel does not list them."""
    libc, first = ctypes.CDLL(None, use_errno=True), ctypes.POINTER(_Entry)()
    if libc.getifaddrs(ctypes.byref(first)):
        number = ctypes.get_errno()
        raise OSError(number, "getifaddrs failed")
    try:
        found: dict[str, tuple[int, list[str]]] = {}
        for entry in _entries(first):
            _, addresses = found.setdefault(entry.name.decode(), (entry.flags, []))
            addresses += _address(entry.address)
        return [
            Interface(name, tuple(addresses), bool(flags & _UP), bool(flags & _LOOPBACK))
            for name, (flags, addresses) in found.items()
        ]
    finally:
        libc.freeifaddrs(first)


def _entries(entry: "ctypes._Pointer[_Entry]") -> Iterator[_Entry]:
    while entry:
        yield entry.contents
        entry = entry.contents.next


def _address(at: int | None) -> list[str]:
    """The address in the socket address at ``at``; none if it is of another family or of one link alone."""
    if not at or (family := ctypes.c_ushort.from_address(at).value) not in _ADDRESSES:
        return []
    text = socket.inet_ntop(family, ctypes.string_at(at, _NBYTES)[_ADDRESSES[socket.AddressFamily(family)]])
    return [] if text.startswith("fe80:") else [text]


def own_addresses(name: str = "") -> list[str]:
    """The addresses under which other hosts may reach this one, of interface ``name`` alone if it is given.

    Interfaces that are down and loopback are left out. Raises `UsageError` if there is no interface of that name.
    """
    listed = interfaces()
    if name and name not in (names := [each.name for each in listed]):
        raise UsageError(f"there is no network interface {name!r} on {socket.gethostname()}: it has {', '.join(names)}")
    usable = [each for each in listed if each.up and (each.name == name or not (name or each.loopback))]
    return [address for each in usable for address in each.addresses]


def address_towards(host: str, port: int = 9) -> str:
    """The own address from which packets to ``host`` leave; raises `OSError` if no route leads there."""
    family, kind, protocol, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(there)  # of a datagram socket: the kernel picks the route and sends nothing
        return str(probe.getsockname()[0])


def address_for_peers(*towards: str) -> str:
    """The own address under which peers on other hosts reach this one.

    The one on the way to the first of ``towards`` (MASTER_ADDR, say) that is neither empty, nor no name, nor an own
    loopback address; else the first of an interface, and 127.0.0.1 on a host without any. Raises `UsageError` if
    GLOO_SOCKET_IFNAME names no interface.
    """
    listed = own_addresses(os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0])
    for host in filter(None, towards):
        with suppress(OSError):
            if (found := address_towards(host)) in listed:
                return found
    return next(iter(listed), "127.0.0.1")


def interface_of(address: str) -> str:
    """The name of the interface that has an address; empty if none has."""
    return next((each.name for each in interfaces() if address in each.addresses), "")
