"""How fast this process's connections of TCP carry what it sends: notes Links.

The kernel counts that for each connection. It is read from there: nothing is sent, and nothing of a
connection is changed. What goes by InfiniBand or shared memory is not in these figures.
"""

import contextlib
import os
import socket
import struct
import sys

from ..records.process import Link, Links
from .notebook import note

MOST = 2000  # open files that are looked at
FAMILIES = socket.AF_INET, socket.AF_INET6
# Places in the kernel's struct tcp_info, which only grows at its end (linux/tcp.h).
BYTES_ACKED, BUSY_TIME, RWND_LIMITED, SIZE = 120, 168, 176, 184
EACH = 5000  # steps; before that, after 16, 32, 64 and so on


def step_ended(number):
    """Note the connections after some steps: at the end, others may have closed theirs."""
    steps = number + 1
    is_power_of_two = steps & (steps - 1) == 0
    if steps % EACH == 0 or (is_power_of_two and 16 <= steps < EACH):
        note_links()


def note_links():
    """Note how much went from each address of this machine to each other one, and how fast."""
    if not sys.platform.startswith("linux") or socket.getdefaulttimeout() is not None:
        return  # a timeout would be set on a connection that is only looked at
    sums, names = {}, []
    with contextlib.suppress(OSError):  # there is no /proc
        names = sorted(os.listdir("/proc/self/fd"))[:MOST]
    for name in names:
        with contextlib.suppress(OSError, ValueError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            link = _link_of(int(name))
            if link is not None:
                known = sums.setdefault((link.local, link.peer), Link(link.local, link.peer, 0, 0))
                known.sent += link.sent
                known.seconds = round(known.seconds + link.seconds, 6)
    if sums:
        note(Links, links=[*sums.values()])


def _link_of(descriptor):
    """Return the Link of an open file, or None: it is no connection to another address."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.type != socket.SOCK_STREAM or connection.family not in FAMILIES:
            return None
        local, peer = _plain(connection.getsockname()[0]), _plain(connection.getpeername()[0])
        if local == peer:
            return None
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, SIZE)
    if len(info) < SIZE:
        return None  # an older kernel
    sent, busy, no_room = (
        struct.unpack_from("=Q", info, place)[0] for place in (BYTES_ACKED, BUSY_TIME, RWND_LIMITED)
    )
    return Link(local, peer, sent, max(0, busy - no_room) / 1e6)


def _plain(address):
    """Return an address of IPv4 as such: "10.0.0.1" for "::ffff:10.0.0.1"."""
    return address.removeprefix("::ffff:")
