"""A process to which the kernel refuses some system calls, as a container's profile does.

    python tests/system_call_filter.py mbind,move_pages -- COMMAND [ARGUMENT...]

A seccomp filter answers the calls with an error (EPERM unless --errno says otherwise); it holds for COMMAND
and all it starts.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import platform
import struct
from collections.abc import Sequence

# asm/unistd_64.h and asm-generic/unistd.h
_NUMBERS = {
    "x86_64": {
        "madvise": 28,
        "mbind": 237,
        "set_mempolicy": 238,
        "get_mempolicy": 239,
        "migrate_pages": 256,
        "move_pages": 279,
        "sched_setaffinity": 203,
        "sched_getaffinity": 204,
        "fadvise64": 221,
        "mlock": 149,
        "sched_setscheduler": 144,
    },
    "aarch64": {
        "madvise": 233,
        "mbind": 235,
        "set_mempolicy": 237,
        "get_mempolicy": 236,
        "migrate_pages": 238,
        "move_pages": 239,
        "sched_setaffinity": 122,
        "sched_getaffinity": 123,
        "fadvise64": 223,
        "mlock": 228,
        "sched_setscheduler": 119,
    },
}

# linux/filter.h, linux/seccomp.h, linux/prctl.h
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2


def supported() -> bool:
    """Whether the numbers of this machine's system calls are known here."""
    return platform.machine() in _NUMBERS


def deny_system_calls(names: Sequence[str], error: int = errno.EPERM) -> None:
    """Has the kernel answer system calls of this process with an error from now on.

    Args:
        names: of the calls.
        error: what they fail with; 0: they seem to succeed, and do nothing.
    """
    numbers = [_NUMBERS[platform.machine()][name] for name in names]
    program = [(_LOAD_WORD, 0, 0, 0)]  # seccomp_data.nr
    for index, number in enumerate(numbers):
        program.append((_JUMP_IF_EQUAL, len(numbers) - index, 0, number))
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | error)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    libc = ctypes.CDLL(None, use_errno=True)
    header = Program(len(program), ctypes.addressof(code))
    if (
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
        or libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(header), 0, 0) != 0
    ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def main() -> None:
    """The command line; becomes the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--errno", type=int, default=errno.EPERM, help="default: %(default)s (EPERM)")
    parser.add_argument("names", help="system calls, separated by commas")
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    arguments = parser.parse_args()
    deny_system_calls(arguments.names.split(","), arguments.errno)
    os.execvp(arguments.command[0], arguments.command)  # noqa: S606


if __name__ == "__main__":
    main()
