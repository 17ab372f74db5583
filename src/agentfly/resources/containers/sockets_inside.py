"""Program that joins the network namespace of a sandbox and creates sockets there for the process at its stdin.

It is a separate program because only a single-threaded process may join a user namespace. It needs only the standard
library. Its arguments are the uid to switch to and the descriptor of the network namespace.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import sys

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
NS_GET_USERNS = 0xB701  # ioctl_ns(2): the user namespace that a namespace belongs to


def main() -> None:
    """Answer each byte on stdin with a socket, until EOF."""
    user, network = map(int, sys.argv[1:3])
    if user != os.geteuid():  # the owner of a namespace may join it; root without all capabilities may not
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    user_namespace = fcntl.ioctl(network, NS_GET_USERNS)
    libc = ctypes.CDLL(None, use_errno=True)
    for descriptor, kind in ((user_namespace, CLONE_NEWUSER), (network, CLONE_NEWNET)):
        if libc.setns(descriptor, kind) < 0:
            sys.exit(os.strerror(ctypes.get_errno()))
        os.close(descriptor)
    with socket.socket(fileno=0) as channel:
        while channel.recv(1):
            with socket.socket() as made:
                socket.send_fds(channel, [b"s"], [made.fileno()])


if __name__ == "__main__":
    main()
