"""Puts each fault of MUTATIONS.md into a copy of csrc/pool and runs the tests that must notice it.

    python tests/cpp/pool/run_mutations.py [--only TEXT] [--limit SECONDS] [--work FOLDER]

Status 0 if every fault was noticed by every test named for it, and none of these tests fails without a
fault. Takes some tens of minutes on two cores; needs CMake and GoogleTest, like the tests themselves.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[2] / "csrc" / "pool"
PROGRAMS = ("pool_parts_test", "pool_test", "pool_interleavings_test")


@dataclass
class Edit:
    """Lines of one file, and what stands in their place."""

    file: str
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


@dataclass
class Mutation:
    """A fault: its edits, the tests that must fail or hang under it, the sanitizer to build with."""

    what: str
    tests: list[str] = field(default_factory=list)
    edits: list[Edit] = field(default_factory=list)
    sanitizer: str = ""


def read_mutations(text: str) -> list[Mutation]:
    """The faults described in MUTATIONS.md, in its order."""
    mutations = []
    for section in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        heading, rest = section.split("\n", 1)
        named, block = rest.split("```diff\n", 1)
        mutation = Mutation(heading, tests=re.findall(r"`([^`]+)`", named))
        mutation.sanitizer = "thread" if "With ThreadSanitizer" in named else ""
        for line in block.split("```", 1)[0].splitlines():
            if line.startswith("-"):
                mutation.edits[-1].before.append(line[1:])
            elif line.startswith("+"):
                mutation.edits[-1].after.append(line[1:])
            else:
                mutation.edits.append(Edit(line))
        mutations.append(mutation)
    return mutations


def mutate(sources: dict[str, str], mutation: Mutation) -> dict[str, str]:
    """Sources (by file name) with the fault in them; ValueError if the lines aren't there exactly once."""
    mutated = dict(sources)
    for edit in mutation.edits:
        before = "\n".join(edit.before)
        if mutated[edit.file].count(before) != 1:
            times = mutated[edit.file].count(before)
            raise ValueError(f"{mutation.what}: {times} times in {edit.file}:\n{before}")
        mutated[edit.file] = mutated[edit.file].replace(before, "\n".join(edit.after))
    return mutated


class Builds:
    """A copy of the sources, and builds of the tests against it."""

    def __init__(self, work: Path, limit: int) -> None:
        self.work = work
        self.limit = limit
        self.copy = work / "csrc" / "pool"
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(SOURCES, self.copy, copy_function=shutil.copyfile)  # newer than any build
        self.sources = {path.name: path.read_text() for path in sorted(self.copy.iterdir())}

    def build(self, sources: dict[str, str], sanitizer: str, programs: Iterable[str]) -> Path:
        """Builds these programs with these sources; returns the folder where they are."""
        for name, text in sources.items():
            path = self.copy / name
            if path.read_text() != text:
                path.write_text(text)
        folder = self.work / (sanitizer or "release")
        if not (folder / "CMakeCache.txt").exists():
            options = [f"-DSANITIZE={sanitizer}", f"-DNUMA_MOE_CSRC={self.copy.parent}"]
            options += ["-DNUMA_MOE_TEST_PARTS=pool", "-DNUMA_MOE_WERROR=OFF"]
            # Most of the time goes into builds, so these are made fast.
            options += ["-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1"]
            run(["cmake", "-S", str(HERE.parent), "-B", str(folder), *options])
        run(["cmake", "--build", str(folder), "--parallel", "--target", *programs])
        return folder / "pool"

    def fails(self, folder: Path, program: str, test: str) -> bool:
        """Whether a test (a GoogleTest filter) of a program fails or hangs."""
        environment = {
            **os.environ,
            "NUMA_MOE_TEST_LIMIT": str(self.limit),
            "TSAN_OPTIONS": "halt_on_error=1",
        }
        command = [str(folder / program), f"--gtest_filter={test}"]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return result.returncode != 0


def program_of(folder: Path, test: str) -> str:
    """The program that has the test; ValueError if none has."""
    for program in PROGRAMS:
        command = [str(folder / program), "--gtest_list_tests", f"--gtest_filter={test}"]
        if subprocess.run(command, capture_output=True, text=True, check=True).stdout:
            return program
    raise ValueError(f"no such test: {test}")


def run(command: list[str]) -> None:
    """Runs a command; ends the program with its output if it fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{result.stdout[-4000:]}{result.stderr[-4000:]}")


def main() -> int:
    """Tries the faults; see the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="faults with this text in their heading")
    parser.add_argument("--limit", type=int, default=60, help="seconds after which a test hangs")
    parser.add_argument("--work", type=Path, help="where to build, kept; otherwise a temporary folder")
    arguments = parser.parse_args()
    mutations = [
        mutation
        for mutation in read_mutations((HERE / "MUTATIONS.md").read_text())
        if arguments.only.lower() in mutation.what.lower()
    ]
    all_noticed = True
    with tempfile.TemporaryDirectory() as temporary:
        builds = Builds(arguments.work or Path(temporary), arguments.limit)
        mutated = {mutation.what: mutate(builds.sources, mutation) for mutation in mutations}
        for sanitizer in sorted({mutation.sanitizer for mutation in mutations}):
            chosen = [mutation for mutation in mutations if mutation.sanitizer == sanitizer]
            folder = builds.build(builds.sources, sanitizer, PROGRAMS)
            tests = sorted({test for mutation in chosen for test in mutation.tests})
            programs = {test: program_of(folder, test) for test in tests}
            for test in tests:
                if builds.fails(folder, programs[test], test):
                    all_noticed = False
                    print(f"FAILS WITHOUT A FAULT  {test}", flush=True)
            for mutation in chosen:
                needed = sorted({programs[test] for test in mutation.tests})
                builds.build(mutated[mutation.what], sanitizer, needed)
                missed = [test for test in mutation.tests if not builds.fails(folder, programs[test], test)]
                all_noticed = all_noticed and not missed
                outcome = f"MISSED by {', '.join(missed)}:" if missed else "caught"
                print(f"{outcome}  {mutation.what}", flush=True)
    return 0 if all_noticed else 1


if __name__ == "__main__":
    sys.exit(main())
