"""The small text files of /sys and /proc."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

HIGHEST_NUMBER = 1 << 20
"""CPU and node numbers above this are taken for damage, lest a range in a made-up file fills the memory."""


def read_text(path: Path) -> str | None:
    """A file's text without surrounding white space, or None if it can't be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except (OSError, ValueError):
        return None


def read_number(path: Path) -> int | None:
    """A file that holds a whole number (perhaps negative), or None."""
    text = read_text(path)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def parse_list(text: str) -> list[int] | None:
    """The numbers of a list such as ``0-3,8,10-11``, ascending; None if it isn't one."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.strip().partition("-")
        if not first and not dash:
            continue
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()) or int(last) > HIGHEST_NUMBER:
            return None
        numbers.update(range(int(first), int(last) + 1))
    return sorted(numbers)


def read_list(path: Path) -> list[int] | None:
    """A file that holds such a list (an empty file is an empty one), or None."""
    text = read_text(path)
    return None if text is None else parse_list(text)


def format_list(numbers: Iterable[int]) -> str:
    """The numbers as a list such as ``0-3,8,10-11``; ``none`` if there are none."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts) or "none"
