"""Builds the extension module torch_numa_moe._C; everything else about the package is in pyproject.toml.

Environment: CXX chooses the compiler, MAX_JOBS the number of parallel compilations, and NUMA_MOE_WERROR=1
turns warnings into errors (CI does; elsewhere the warnings of an unknown compiler shouldn't stop a build).
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
VERSION = runpy.run_path(str(ROOT / "torch_numa_moe" / "_version.py"))["__version__"]

TORCH_MINIMUM = (2, 13)
# LibTorch's stable ABI as of that release: the binary loads on it and on every later one.
TORCH_TARGET_VERSION = f"0x{TORCH_MINIMUM[0]:02x}{TORCH_MINIMUM[1]:02x}000000000000"

# The oldest compilers whose C++20 the sources keep to.
COMPILER_MINIMUM = {"g++": 11, "clang++": 14}

_torch_error: ImportError | None = None
_BuildExtension: Any = build_ext
try:
    from torch.utils.cpp_extension import BuildExtension as _BuildExtension
except ImportError as error:  # A source distribution can be made without torch.
    _torch_error = error


def _fail(message: str) -> None:
    sys.exit(f"\ntorch_numa_moe can't be built: {message}\n")


def _check_platform() -> None:
    if not sys.platform.startswith("linux"):
        _fail(f"it places memory by Linux system calls, and this is {sys.platform}; only Linux is supported.")


def _check_torch() -> None:
    minimum = ".".join(map(str, TORCH_MINIMUM))
    if _torch_error is not None:
        _fail(
            f"torch can't be imported by the build ({_torch_error}). Install torch {minimum} or newer first; "
            "with --no-build-isolation it has to be in the same environment."
        )
    import torch

    found = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if found < TORCH_MINIMUM:
        _fail(f"torch {minimum} or newer is needed, and {torch.__version__} is installed.")


def _check_compiler() -> None:
    command = shlex.split(os.environ.get("CXX", "c++"))
    shown = " ".join(command)
    advice = f"Install g++ {COMPILER_MINIMUM['g++']} or newer, or set CXX to such a compiler."
    try:
        macros = subprocess.run(
            [*command, "-dM", "-E", "-x", "c++", os.devnull], check=True, capture_output=True, text=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        _fail(f"the C++ compiler '{shown}' doesn't run ({error}). {advice}")
    for name, macro in (("clang++", "__clang_major__"), ("g++", "__GNUC__")):
        match = re.search(rf"^#define {macro} (\d+)$", macros, re.MULTILINE)
        if match:
            if int(match[1]) < COMPILER_MINIMUM[name]:
                _fail(f"'{shown}' is {name} {match[1]}, which is too old for C++20. {advice}")
            return


class BuildExtension(_BuildExtension):  # type: ignore[misc]
    """torch's build command (ninja, C++20), with checks before it and the paths of torch added late."""

    def run(self) -> None:
        """Checks what the build needs, then builds."""
        _check_platform()
        _check_torch()
        _check_compiler()
        self._use_torch_and_pybind11()
        super().run()

    def _use_torch_and_pybind11(self) -> None:
        import pybind11
        from torch.utils import cpp_extension

        (extension,) = self.extensions
        # pybind11's own headers before torch's copy of them; as system headers, so that their warnings
        # aren't ours.
        system_includes = [pybind11.get_include(), *cpp_extension.include_paths()]
        extension.extra_compile_args += [f"-isystem{path}" for path in system_includes]
        # __FILE__ ends up in error messages: no paths of the machine that built it.
        hidden = [ROOT, cpp_extension.include_paths()[0]]
        extension.extra_compile_args += [f"-ffile-prefix-map={path}/=" for path in hidden]
        extension.library_dirs += cpp_extension.library_paths()


def _extension() -> Extension:
    # Optimization and code generation are the same everywhere: no -march, so that one binary serves every
    # CPU (kernels choose at run time), and no contraction of a * b + c, so that results don't depend on the
    # compiler's choice.
    compile_args = ["-O3", "-g0", "-pthread", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra"]
    if os.environ.get("NUMA_MOE_WERROR", "0") not in ("", "0"):
        compile_args.append("-Werror")
    return Extension(
        "torch_numa_moe._C",
        sources=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp")),
        include_dirs=[str(ROOT / "csrc")],
        define_macros=[
            ("NUMA_MOE_VERSION", f'"{VERSION}"'),
            ("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION),
        ],
        # Not libtorch_python: the ops keep to the stable ABI, the control surface to pybind11.
        libraries=["torch_cpu", "c10"],
        extra_compile_args=compile_args,
        extra_link_args=["-pthread", "-Wl,--as-needed"],
        language="c++",
    )


os.chdir(ROOT)
setup(ext_modules=[_extension()], cmdclass={"build_ext": BuildExtension})
