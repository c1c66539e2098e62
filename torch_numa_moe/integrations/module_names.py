"""Module names for messages, with the numbers of layers put together."""

from __future__ import annotations

import re
from collections.abc import Iterable

_INDEX = r"(?<![^.])(\d+)(?![^.])"


def without_indices(name: str) -> str:
    """The name with ``*`` for every index: ``model.layers.*.mlp``."""
    return re.sub(_INDEX, "*", name)


def summarise_names(names: Iterable[str]) -> str:
    """Module names with layer numbers joined: ``model.layers.{0-47}.mlp.experts``."""
    groups: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for name in names:
        parts = re.split(_INDEX, name)
        groups.setdefault(tuple(parts[::2]), []).append(tuple(int(number) for number in parts[1::2]))
    texts = []
    for fixed, numbers in groups.items():
        text = fixed[0]
        for position, following in enumerate(fixed[1:]):
            text += _ranges(sorted({number[position] for number in numbers})) + following
        texts.append(text)
    return ", ".join(texts)


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return texts[0] if len(numbers) == 1 else "{" + ",".join(texts) + "}"
