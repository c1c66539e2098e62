"""The NUMA_MOE_* variables, and the same from code."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from torch_numa_moe.settings import (
    INSTRUCTION_SETS,
    MAX_DISPATCHER_YIELDS,
    MAX_SPIN_US,
    MAX_TEST_SLICES,
    MAX_WORKERS,
    Settings,
    override,
    read_settings,
)

INTEGERS = {
    "NUMA_MOE_WORKERS": ("workers", 1, MAX_WORKERS),
    "NUMA_MOE_SPIN_US": ("spin_us", 0, MAX_SPIN_US),
    "NUMA_MOE_DISPATCHER_YIELDS": ("dispatcher_yields", 0, MAX_DISPATCHER_YIELDS),
}


def test_nothing_set() -> None:
    settings = read_settings({})
    assert settings == Settings(None, 2, None, None, None, None)
    assert settings.log_lines == ()
    assert read_settings({"NUMA_MOE_OTHER": "x", "PATH": "/bin"}) == settings


@pytest.mark.parametrize(
    ("text", "split", "test_slices"),
    [
        ("0", "0", 2),
        ("1", "1", 2),
        ("test", "test", 2),
        ("test:1", "test", 1),
        ("test:3", "test", 3),
        (f"test:{MAX_TEST_SLICES}", "test", MAX_TEST_SLICES),
        (" test:5\n", "test", 5),
    ],
)
def test_split(text: str, split: str, test_slices: int) -> None:
    settings = read_settings({"NUMA_MOE_SPLIT": text})
    assert (settings.split, settings.test_slices) == (split, test_slices)
    assert settings.log_lines == ()


@pytest.mark.parametrize("variable", INTEGERS)
def test_numbers(variable: str) -> None:
    name, lowest, highest = INTEGERS[variable]
    for text, expected in ((str(lowest), lowest), (str(highest), highest), (" 2 ", 2), ("007", 7)):
        settings = read_settings({variable: text})
        assert getattr(settings, name) == expected
        assert settings.log_lines == ()


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_instruction_sets(name: str) -> None:
    assert read_settings({"NUMA_MOE_ISA": f" {name}"}).isa == name


@pytest.mark.parametrize("text", ["normal", "fifo", " rr\n"])
def test_sched(text: str) -> None:
    assert read_settings({"NUMA_MOE_SCHED": text}).sched == text.strip()
    assert override(Settings(), sched=text.strip()).sched == text.strip()


@pytest.mark.parametrize(("text", "watch"), [("0", False), (" 1", True)])
def test_watch(text: str, watch: bool) -> None:
    assert read_settings({"NUMA_MOE_WATCH": text}).watch is watch
    assert override(Settings(), watch=watch).watch is watch


@pytest.mark.parametrize("text", ["explicit", "transparent ", "none"])
def test_huge_pages(text: str) -> None:
    assert read_settings({"NUMA_MOE_HUGE_PAGES": text}).huge_pages == text.strip()


def assert_ignored(variable: str, value: str, accepted: str) -> None:
    settings = read_settings({variable: value})
    assert settings == Settings()
    ((level, text),) = settings.log_lines
    assert level == logging.WARNING
    assert text.startswith(f"{variable} is ")
    assert ascii(value)[:20] in text
    assert text.endswith(f", ignored: it takes {accepted}")
    assert len(text) < 250
    assert text.isprintable()


JUNK = [
    "",
    " ",
    "abc",
    "-1",
    "1e9",
    "0x10",
    "9" * 20,
    "1.5",
    "2 3",
    "1_0",
    "٣",
    "²",
    "+1",
    "\0",
    "1\n2",
    "x" * 10000,
]


@pytest.mark.parametrize("variable", INTEGERS)
@pytest.mark.parametrize("value", JUNK)
def test_junk_numbers(variable: str, value: str) -> None:
    _, lowest, highest = INTEGERS[variable]
    assert_ignored(variable, value, f"a whole number from {lowest} to {highest}")


@pytest.mark.parametrize("variable", INTEGERS)
def test_numbers_out_of_bounds(variable: str) -> None:
    _, lowest, highest = INTEGERS[variable]
    accepted = f"a whole number from {lowest} to {highest}"
    assert_ignored(variable, str(highest + 1), accepted)
    assert_ignored(variable, str(lowest - 1), accepted)


@pytest.mark.parametrize(
    "value",
    [*JUNK, "2", "on", "true", "Test", "test:", "test:0", "test:-1", "test:x", "test:65", "test:2:3", "0:2"],
)
def test_junk_split(value: str) -> None:
    assert_ignored("NUMA_MOE_SPLIT", value, "0, 1, test or test:N with N from 1 to 64")


@pytest.mark.parametrize("value", [*JUNK, "AVX2", "sse", "avx", "avx2,avx512", "avx512-bf16"])
def test_junk_instruction_set(value: str) -> None:
    assert_ignored("NUMA_MOE_ISA", value, "one of portable, neon, neonbf16, avx2, avx512, avx512bf16, amx")


@pytest.mark.parametrize("value", [*JUNK, "2", "on", "00"])
def test_junk_watch(value: str) -> None:
    assert_ignored("NUMA_MOE_WATCH", value, "0 or 1")


@pytest.mark.parametrize("value", [*JUNK, "0", "Explicit", "explicit,none"])
def test_junk_huge_pages(value: str) -> None:
    assert_ignored("NUMA_MOE_HUGE_PAGES", value, "one of explicit, transparent, none")


@pytest.mark.parametrize("value", ["", "FIFO", "SCHED_FIFO", "1", "fifo:2"])
def test_junk_sched(value: str) -> None:
    assert_ignored("NUMA_MOE_SCHED", value, "one of normal, fifo, rr")
    with pytest.raises(ValueError, match=r"sched must be one of normal, fifo, rr, got "):
        override(Settings(), sched=value)


@pytest.mark.parametrize("watch", [0, 1, "1"])
def test_override_takes_no_number_for_watch(watch: Any) -> None:
    with pytest.raises(TypeError, match=r"watch must be True or False, got "):
        override(Settings(), watch=watch)


def test_one_line_each_and_the_others_count() -> None:
    settings = read_settings(
        {"NUMA_MOE_SPLIT": "yes", "NUMA_MOE_WORKERS": "3", "NUMA_MOE_SPIN_US": "long", "NUMA_MOE_ISA": "avx2"}
    )
    assert settings == Settings(workers=3, isa="avx2")
    assert [line.text.split()[0] for line in settings.log_lines] == ["NUMA_MOE_SPLIT", "NUMA_MOE_SPIN_US"]


def test_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMA_MOE_WORKERS", "5")
    assert read_settings().workers == 5


def test_override() -> None:
    settings = Settings(split="1", workers=3)
    assert override(settings) == settings
    assert override(settings, workers=4) == Settings(split="1", workers=4)
    everything = override(settings, split="test:3", workers=1, spin_us=0, dispatcher_yields=7, isa="neon")
    assert everything == Settings("test", 3, 1, 0, 7, "neon")
    assert override(everything, split="0") == Settings("0", 2, 1, 0, 7, "neon")


def test_override_keeps_what_was_wrong_in_the_environment() -> None:
    settings = override(read_settings({"NUMA_MOE_ISA": "sse"}), workers=2)
    assert len(settings.log_lines) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, f"workers must be a whole number from 1 to {MAX_WORKERS}, got 0"),
        ({"workers": -1}, f"workers must be a whole number from 1 to {MAX_WORKERS}, got -1"),
        ({"workers": MAX_WORKERS + 1}, f"workers must be a whole number from 1 to {MAX_WORKERS}, got 8193"),
        ({"spin_us": -1}, f"spin_us must be a whole number from 0 to {MAX_SPIN_US}, got -1"),
        ({"dispatcher_yields": 10**20}, "dispatcher_yields must be a whole number from 0 to"),
        ({"split": "2"}, "split must be 0, 1, test or test:N with N from 1 to 64, got '2'"),
        ({"split": ""}, "split must be 0, 1, test or test:N with N from 1 to 64, got ''"),
        ({"split": "test:0"}, "split must be 0, 1, test or test:N with N from 1 to 64, got 'test:0'"),
        (
            {"isa": "sse"},
            "isa must be one of portable, neon, neonbf16, avx2, avx512, avx512bf16, amx, got 'sse'",
        ),
    ],
)
def test_override_refuses_values(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        override(Settings(), **arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        {"workers": "2"},
        {"workers": 2.0},
        {"workers": True},
        {"spin_us": "50"},
        {"spin_us": False},
        {"dispatcher_yields": [1]},
        {"split": 1},
        {"split": True},
        {"isa": 512},
    ],
)
def test_override_refuses_types(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(TypeError, match=f"^{name} must be .*, got .* of type "):
        override(Settings(), **arguments)
