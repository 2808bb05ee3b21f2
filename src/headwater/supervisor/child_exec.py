"""Replace this process by a command that gets a signal when its parent dies: child_exec.py PARENT_PID SIGNAL COMMAND…

A separate program, because code between fork and exec is not safe in a parent that has threads. Standard library only.
"""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel for the signal (Linux only), make sure that the parent is still there, and become the command."""
    parent, number, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the supervisor is gone")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
