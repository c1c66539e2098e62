"""docs/operations.md keeps up with the code: what the doctor tells of, and the lines of the log."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs/operations.md").read_text(encoding="utf-8")


def source(folder: str) -> str:
    """The Python code of a folder, literals that continue on the next line joined."""
    files = sorted((ROOT / folder).rglob("*.py"))
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return re.sub(r'"\s*\n\s*f?"', "", code)


def log_lines() -> list[str]:
    """The lines in the tables of the section about the log."""
    section = TEXT.partition("## What the log says")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \| (?:INFO|WARNING|ERROR) \|", section, re.MULTILINE)


def test_log_lines_are_found() -> None:
    assert len(log_lines()) >= 19


@pytest.mark.parametrize("line", log_lines())
def test_a_line_of_the_log_is_in_the_code(line: str) -> None:
    code = source("torch_numa_moe")
    missing = [part for part in line.split("…") if part.strip() and part.strip() not in code]
    assert missing == []


def topics() -> list[str]:
    call = r'(?:report\.problem|report\.hint|tell)\(\s*"([^"]+)"'
    return sorted(set(re.findall(call, source("torch_numa_moe/doctor"))))


def test_topics_are_found() -> None:
    assert {"fence", "intruder", "setting", "CPU quota"} <= set(topics())


@pytest.mark.parametrize("topic", topics())
def test_a_topic_of_the_doctor_is_in_the_table(topic: str) -> None:
    rows = re.findall(r"^\| ([^|]+) \|", TEXT, re.MULTILINE)
    assert topic in {name.strip() for row in rows for name in row.split(",")}
