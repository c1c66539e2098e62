"""The extension module: what it links to, that its stub is true, and what an unfit one says at import."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import torch_numa_moe
from torch_numa_moe import _C

PACKAGE = Path(torch_numa_moe.__file__).parent
EXTENSION = Path(_C.__file__)


def names_in_stub() -> set[str]:
    """Top-level names and Class.member of the stub."""
    names: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(prefix + node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(prefix + node.target.id)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                names.add(prefix + node.targets[0].id)
            if isinstance(node, ast.ClassDef):
                collect(node.body, node.name + ".")

    collect(ast.parse((PACKAGE / "_C.pyi").read_text()).body, "")
    return {name for name in names if not re.search(r"(^|\.)__\w+__$", name)}


def names_in_module() -> set[str]:
    """The same of the module itself."""
    names: set[str] = set()
    for name, value in vars(_C).items():
        if name.startswith("_"):
            continue
        names.add(name)
        if isinstance(value, type):
            # pybind11's enumerations have two properties of their own.
            members = {member for member in vars(value) if not member.startswith("_")} - {"name", "value"}
            names |= {f"{name}.{member}" for member in members}
    return names


def test_stub_names_what_the_module_has() -> None:
    assert names_in_stub() == names_in_module()


def test_links_to_no_library_of_torch_for_python() -> None:
    """The ops keep to LibTorch's stable ABI: with libtorch_python they would be tied to one release."""
    libraries = set(re.findall(rb"lib[\w+-]+\.so(?:\.\d+)*", EXTENSION.read_bytes()))
    assert b"libtorch_cpu.so" in libraries
    assert not [name for name in libraries if name.startswith((b"libtorch_python", b"libnuma", b"libgomp"))]


def test_tells_nothing_of_the_folder_it_was_built_in() -> None:
    """Error messages carry __FILE__, which must not differ from machine to machine."""
    sources = re.findall(rb"[\w/.-]*csrc/\w+/\w+\.(?:cpp|h|inl)", EXTENSION.read_bytes())
    assert [name for name in sources if name.startswith(b"/")] == []


def import_copy(folder: Path, *, version: str, extension: bool) -> subprocess.CompletedProcess[str]:
    """Imports a copy of the package whose Python says another version, or that has no extension."""
    copy = folder / "torch_numa_moe"
    copy.mkdir()
    for file in PACKAGE.iterdir():
        if file.name.startswith("_C.") and not extension:
            continue
        if file.name != "_version.py":
            (copy / file.name).symlink_to(file)
    (copy / "_version.py").write_text(f'__version__ = "{version}"\n')
    # -S: an editable install's import hook would find what the copy lacks.
    return subprocess.run(
        [sys.executable, "-S", "-c", "import torch_numa_moe; print('imported', torch_numa_moe.__version__)"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_extension_of_this_version_is_taken(tmp_path: Path) -> None:
    """The copy works as such, so that the two tests below fail for their own reasons."""
    done = import_copy(tmp_path, version=torch_numa_moe.__version__, extension=True)
    assert done.stdout == f"imported {torch_numa_moe.__version__}\n", done.stderr


def test_extension_of_another_version_is_refused(tmp_path: Path) -> None:
    """An extension left over from before an update would compute by other rules than the Python expects."""
    done = import_copy(tmp_path, version="99.1", extension=True)
    assert done.returncode != 0
    assert re.search(
        rf"ImportError: .*{re.escape(torch_numa_moe.__version__)}.*99\.1.*pip install", done.stderr
    )


def test_missing_extension_says_how_to_build_it(tmp_path: Path) -> None:
    done = import_copy(tmp_path, version=torch_numa_moe.__version__, extension=False)
    assert done.returncode != 0
    assert re.search(r"ImportError: the extension of torch_numa_moe .*pip install", done.stderr)
