"""For a guest: prints the plans that its topology leads to, as JSON, and one of them in words.

Reads the package's pure modules alone, without importing torch, which takes long in an emulated machine.
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # in the guest; tests import the names below, with the real package loaded
    _package = types.ModuleType("torch_numa_moe")
    _package.__path__ = [str(Path(__file__).resolve().parent.parent / "torch_numa_moe")]
    sys.modules["torch_numa_moe"] = _package

from torch_numa_moe.limits import read_limits
from torch_numa_moe.plan import Plan, make_plan
from torch_numa_moe.settings import read_settings
from torch_numa_moe.topology import read_topology

SPLITS = ("unset", "0", "1", "test")
MASKS = {"all CPUs": (0, 1, 2, 3), "CPUs 0-1": (0, 1)}


def plan_now(split: str) -> Plan:
    """The plan of this process as it is."""
    environment = {} if split == "unset" else {"NUMA_MOE_SPLIT": split}
    return make_plan(read_topology(), read_limits(), read_settings(environment))


def as_json(plan: Plan) -> dict[str, Any]:
    """What tests compare."""
    return {
        "groups": [[group.node, list(group.worker_cpus)] for group in plan.groups],
        "split": plan.split,
        "host": plan.host_cpu,
        "reasons": plan.reasons,
        "log": plan.log_lines,
    }


def main() -> None:
    """Prints a line of JSON per mask and setting, then the plan without any in words."""
    words = plan_now("unset").describe()
    for name, cpus in MASKS.items():
        os.sched_setaffinity(0, cpus)
        for split in SPLITS:
            print(json.dumps({"mask": name, "setting": split, **as_json(plan_now(split))}))
    print(words)


if __name__ == "__main__":
    main()
