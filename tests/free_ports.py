"""Ports for a whole stack of services."""

import socket


def free_port_base(begin: int, end: int) -> int:
    """A base in [begin, end) whose ports for the services of one machine are free."""
    for base in range(begin, end, 100):
        try:
            for port in (*range(base, base + 5), base + 9, base + 10):
                with socket.socket() as s:
                    s.bind(("127.0.0.1", port))
        except OSError:
            continue
        return base
    raise AssertionError("no free ports")
