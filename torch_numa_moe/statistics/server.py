"""Tells other processes of the same user what this one's pool has done: what ``top`` reads.

On an abstract Unix socket (unix(7)): there is no file to leave behind, and no other machine or user can ask.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable

logger = logging.getLogger("torch_numa_moe")

TIMEOUT_SECONDS = 5.0
"""Of one question and its answer."""


def address(pid: int) -> str:
    """Of the socket of a process."""
    return f"\0torch_numa_moe/{pid}"


class StatisticsServer:
    """Answers each connection with a text, until :meth:`stop`.

    Args:
        answer: makes the text.
    """

    def __init__(self, answer: Callable[[], str]) -> None:
        self._answer = answer
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(address(os.getpid()))
            self._socket.listen()
        except OSError:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="numa_moe/stats", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # stopped
            with connection, contextlib.suppress(OSError):
                connection.settimeout(TIMEOUT_SECONDS)
                if _user(connection) in (os.getuid(), 0):
                    connection.sendall(self._text().encode())

    def _text(self) -> str:
        try:
            return self._answer()
        except Exception:
            # The program that is looked at goes on, and so does this thread.
            logger.exception("statistics can't be read")
            return "{}"

    def stop(self) -> None:
        """Ends the thread, without waiting for an answer that is under way."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._socket.close()

    def forget(self) -> None:
        """In a child of a fork, which has the socket, but not the thread."""
        self._socket.close()


def _user(connection: socket.socket) -> int:
    """Who is at the other end, as the kernel says."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


def ask(pid: int) -> str:
    """What the pool of a process answers.

    Raises:
        ConnectionError: if the process has no pool that answers, or isn't this user's.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(TIMEOUT_SECONDS)
        try:
            connection.connect(address(pid))
            parts = []
            while part := connection.recv(1 << 16):
                parts.append(part)
        except OSError as error:
            raise ConnectionError(str(error)) from error
    if not parts:
        raise ConnectionError("it belongs to another user")
    return b"".join(parts).decode()
