"""setuptools' build backend, made to build against the torch that is already installed.

pip builds in an isolated environment. Listing torch as a build requirement would download a second torch,
several gigabytes of it, only to compile against its headers. Here the environment that runs pip lends its
torch instead, and torch becomes a build requirement only where that environment has none.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import PathFinder
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_TORCH_REQUIREMENT = "torch>=2.13"


def _import_path_outside_isolation() -> list[str]:
    """What this interpreter would have on sys.path, had pip not isolated the build from it."""
    # pip isolates by these two variables and runs the caller's interpreter; other front ends make a virtual
    # environment of their own, which has no torch.
    isolating = ("PYTHONPATH", "PYTHONNOUSERSITE")
    environment = {name: value for name, value in os.environ.items() if name not in isolating}
    command = [sys.executable, "-c", "import sys; print('\\n'.join(sys.path[1:]))"]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def _lend_torch() -> bool:
    """Makes the caller's packages importable, behind those of the build; returns whether there is a torch."""
    for path in _import_path_outside_isolation():
        if path and path not in sys.path:
            sys.path.append(path)
    return PathFinder.find_spec("torch") is not None


_TORCH_IS_INSTALLED = _lend_torch()


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """What setuptools requires, and torch if the caller has none."""
    requirements = build_meta.get_requires_for_build_wheel(config_settings)
    return requirements if _TORCH_IS_INSTALLED else [*requirements, _TORCH_REQUIREMENT]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """The same for an editable install."""
    requirements = build_meta.get_requires_for_build_editable(config_settings)
    return requirements if _TORCH_IS_INSTALLED else [*requirements, _TORCH_REQUIREMENT]
