"""The order of the starts."""

from __future__ import annotations

from collections.abc import Sequence


def interleave(arms: Sequence[str], starts: int) -> list[str]:
    """Every arm as many times, in rounds that each begin with another arm.

    A machine gets warmer, and others use it more or less, while a study runs: no arm may have the good hours
    to itself, and none always follow the same one. Two arms simply alternate, since rotating would start the
    same one twice in a row.

    Args:
        arms: letters, each once.
        starts: of each arm.
    """
    order: list[str] = []
    for index in range(starts):
        first = index % len(arms) if len(arms) > 2 else 0
        order += [*arms[first:], *arms[:first]]
    return order
