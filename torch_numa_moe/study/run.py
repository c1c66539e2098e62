"""Makes the starts, one process each, and hands on what they say."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from torch_numa_moe.study.arms import ArmSetting
from torch_numa_moe.study.start import StartRequest, StartResult
from torch_numa_moe.study.table import Start, why_dropped

_COMMAND = (sys.executable, "-m", "torch_numa_moe.study.start")


def make_start(
    number: int,
    setting: ArmSetting,
    request: StartRequest,
    command: Sequence[str] = _COMMAND,
) -> tuple[Start, list[str]]:
    """Starts an arm once and waits for it.

    Args:
        number: of the start, from 1.
        setting: of the arm.
        request: the load; what belongs to the arm is filled in here.
        command: the process to start.

    Returns:
        The start, and the lines that its process wrote to its standard error.
    """
    filled = dataclasses.replace(
        request, cpus=None if setting.cpus is None else list(setting.cpus), placed=setting.placed
    )
    completed = subprocess.run(
        list(command),
        input=json.dumps(dataclasses.asdict(filled)),
        env=_environment(setting),
        capture_output=True,
        text=True,
        check=False,
    )
    lines = completed.stderr.splitlines()
    letter = setting.arm.letter
    if completed.returncode != 0:
        last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
        return Start(number, letter, error=f"{last.strip()} (exit status {completed.returncode})"), lines
    try:
        result = StartResult(**json.loads(completed.stdout))
    except (ValueError, TypeError) as error:
        return Start(number, letter, error=f"it said what can't be understood ({error})"), lines
    return Start(number, letter, result, dropped=why_dropped(setting, result)), lines


def _environment(setting: ArmSetting) -> Mapping[str, str]:
    """This process's, with what makes the arm."""
    environment = {**os.environ, "NUMA_MOE_SPLIT": setting.split}
    environment.pop("NUMA_MOE_WORKERS", None)
    if setting.workers is not None:
        environment["NUMA_MOE_WORKERS"] = str(setting.workers)
    return environment
