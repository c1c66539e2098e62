"""The protocol that compares ways to use several NUMA nodes: arms, order, what is dropped, outcome."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sys_tree import MACHINES, read_machine
from torch_numa_moe.settings import Settings
from torch_numa_moe.study.arms import ARMS, ArmSetting, set_up_arms
from torch_numa_moe.study.load import LoadShape, make_routings, make_source, parse_shape
from torch_numa_moe.study.run import make_start
from torch_numa_moe.study.schedule import interleave
from torch_numa_moe.study.start import StartRequest, StartResult
from torch_numa_moe.study.table import Start, markdown, summarize, why_dropped


def arms_of(machine: str, folder: Path, settings: Settings | None = None) -> dict[str, ArmSetting]:
    topology, limits = read_machine(MACHINES[machine], folder)
    return set_up_arms(topology, limits, settings or Settings())


def result(*token_ms: float, shares: tuple[float | None, ...] = (1.0, 1.0)) -> StartResult:
    return StartResult(
        token_ms=list(token_ms),
        tokens=[10] * len(token_ms),
        workers=[3, 3],
        caller_helps=False,
        nodes=[0, 1],
        pages_on_node=[{"0": 100}, {"0": 25, "1": 75}],
        local_shares=list(shares),
        unverified="",
        huge_page_share=1.0,
        weight_bytes=1 << 30,
        pack_seconds=1.0,
        instruction_set="avx2",
        plan="the plan in words",
    )


def test_arms_of_two_nodes(tmp_path: Path) -> None:
    arms = arms_of("dual Genoa", tmp_path)
    assert list(arms) == list(ARMS) == list("DXFSN")
    assert not [arm.refusal for arm in arms.values() if arm.refusal]
    again = tmp_path / "again"
    again.mkdir()
    topology, _ = read_machine(MACHINES["dual Genoa"], again)
    first, second = topology.nodes
    # The default has one node's CPUs, all others those that the process has.
    assert arms["D"].cpus in {first.cpus, second.cpus}
    assert [arms[letter].cpus for letter in "XFSN"] == [None] * 4
    assert [arms[letter].split for letter in "DXFSN"] == ["0", "0", "1", "1", "1"]
    # Few workers: as many as the cores of a node, dealt out evenly.
    cores = len({cpu.siblings for cpu in topology.cpus if cpu.node == first.id})
    assert arms["F"].workers == cores // 2 * 2
    assert [arms[letter].placed for letter in "DXFSN"] == [True, True, True, True, False]


def test_arms_of_one_node(tmp_path: Path) -> None:
    arms = arms_of("single socket", tmp_path)
    assert [letter for letter, arm in arms.items() if not arm.refusal] == ["D"]
    assert arms["D"].cpus is None
    assert arms["S"].refusal == "this machine has one NUMA node"


def test_slices_for_a_trial_on_any_machine(tmp_path: Path) -> None:
    arms = arms_of("single socket", tmp_path, Settings(split="test", test_slices=3))
    assert [arm.split for letter, arm in arms.items() if letter in "FSN"] == ["test:3"] * 3
    assert not arms["S"].refusal
    assert arms["X"].refusal


@pytest.mark.parametrize(("letters", "starts"), [("D", 3), ("DS", 4), ("DXFSN", 5), ("DXS", 2)])
def test_order_of_the_starts(letters: str, starts: int) -> None:
    order = interleave(list(letters), starts)
    assert Counter(order) == dict.fromkeys(letters, starts)
    rounds = [order[begin : begin + len(letters)] for begin in range(0, len(order), len(letters))]
    assert all(sorted(round_) == sorted(letters) for round_ in rounds)
    if len(letters) > 2:
        firsts = [round_[0] for round_ in rounds]
        assert len(set(firsts)) == min(starts, len(letters))
    if len(letters) == 2:  # they alternate
        assert all(one != other for one, other in itertools.pairwise(order))


@pytest.mark.parametrize(
    ("share", "placed", "dropped"),
    [(0.949, True, True), (0.95, True, False), (0.5, False, False), (None, True, False)],
)
def test_starts_with_misplaced_weights_do_not_count(share: float | None, placed: bool, dropped: bool) -> None:
    setting = replace(ArmSetting(ARMS["S"]), placed=placed)
    why = why_dropped(setting, result(1.0, shares=(1.0, share)))
    assert bool(why) == dropped
    if dropped:
        assert why == "only 94.9% of a slice on its node, less than 95%"


def test_medians_of_the_starts_that_count() -> None:
    starts = [
        Start(1, "D", result(10.0, 11.0, 12.0)),
        Start(2, "S", result(5.0, 5.5, 9.0)),
        Start(3, "S", result(1.0, 1.0, 1.0), dropped="elsewhere"),
        Start(4, "N", error="no memory"),
        Start(5, "D", result(20.0, 11.0, 9.0)),
    ]
    summaries = summarize(starts)
    assert set(summaries) == {"D", "S"}
    default, split = summaries["D"], summaries["S"]
    assert (default.token_ms, default.lowest_ms, default.highest_ms) == (11.0, 9.0, 20.0)
    assert (split.starts, split.made, split.token_ms, split.ratio) == (1, 2, 5.5, 2.0)


def test_outcome_in_markdown(tmp_path: Path) -> None:
    arms = arms_of("dual Genoa", tmp_path)
    starts = [
        Start(1, "D", result(10.0, 10.0, 10.0)),
        Start(2, "S", result(5.0, 4.0, 6.0)),
        Start(3, "S", result(1.0), dropped="only 50.0% of a slice on its node, less than 95%"),
        Start(4, "N", error="a | b"),
    ]
    text = markdown({"CPU": "made up"}, "a load", 2e6, arms, list("DSN"), starts)
    lines = text.splitlines()
    assert "- CPU: made up" in lines
    # 2 MB in 5 ms: 0.4 GB/s; twice the default's speed.
    assert "| S: split | 3 + 3 | 1 of 2 | 5 (4-6) | 0.4 | at least 100.0% on their node | 2.00 |" in lines
    assert "| N: split, not placed | - | 0 of 1 | - | - | - | - |" in lines
    assert (
        "| 3 | S | 1 | 100.0%, 100.0% | DROPPED: only 50.0% of a slice on its node, less than 95% |" in lines
    )
    assert "| 4 | N | - | - | FAILED: a \\| b |" in lines


def test_the_load_differs_from_call_to_call_and_not_from_start_to_start() -> None:
    shape = LoadShape(16, 8, 4, 3)
    routings, again = make_routings(shape, 2, tokens=5), make_routings(shape, 2, tokens=5)
    assert routings.topk_ids.shape == (5, 2, 1, 3)
    assert torch.equal(routings.topk_ids, again.topk_ids)
    assert len({tuple(sorted(ids.flatten().tolist())) for ids in routings.topk_ids.flatten(0, 1)}) > 1
    assert all(len(set(ids.flatten().tolist())) == 3 for ids in routings.topk_ids.flatten(0, 1))
    gate_up, down = make_source(shape)
    assert gate_up.shape == (16, 8, 8) and down.shape == (16, 8, 4)
    assert torch.equal(gate_up[1, 1:], gate_up[0, :-1]) and torch.equal(gate_up[1, 0], gate_up[0, -1])
    # 3 matrices of 8 x 4 numbers in 2 bytes each.
    assert (shape.layer_bytes("bf16"), shape.active_bytes("bf16")) == (16 * 96 * 2, 3 * 96 * 2)


@pytest.mark.parametrize("text", ["", "D", "2x3x4", "2x3x4x0", "2x3x4x3", "0x1x1x1", "axbxcxd"])
def test_shapes_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="top-k"):
        parse_shape(text)


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import sys; sys.exit('it broke')", "it broke (exit status 1)"),
        ("import sys; sys.exit(3)", "it said nothing (exit status 3)"),
        ("print('no JSON')", "it said what can't be understood"),
    ],
)
def test_a_start_that_fails_is_reported(program: str, error: str) -> None:
    request = StartRequest("2x8x8x1", "bf16", 1, 0.1)
    start, _ = make_start(7, ArmSetting(ARMS["D"]), request, [sys.executable, "-c", program])
    assert (start.number, start.arm, start.result) == (7, "D", None)
    assert start.error.startswith(error)


def run_bench(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch_numa_moe", "bench", *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_command_on_this_machine(tmp_path: Path) -> None:
    """With slices that may lie anywhere the whole protocol runs here: processes, order, table, records."""
    records = tmp_path / "study.jsonl"
    done = run_bench(
        *("--numa-study", "--arms", "DS", "--starts", "2", "--layers", "2", "--shape", "8x64x32x2"),
        *("--seconds", "0.05", "--json", str(records)),
        NUMA_MOE_SPLIT="test:2",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("### NUMA study\n")
    assert "With NUMA_MOE_SPLIT=test slices lie anywhere" in done.stdout
    read = [json.loads(line) for line in records.read_text().splitlines()]
    assert read[0]["record"] == "machine"
    starts = [record for record in read if record["record"] == "start"]
    assert [start["arm"] for start in starts] == ["D", "S", "D", "S"]
    for start in starts:
        assert len(start["result"]["token_ms"]) == 3
        assert all(0 < milliseconds < 1000 for milliseconds in start["result"]["token_ms"])
        assert len(start["result"]["workers"]) == (2 if start["arm"] == "S" else 1)
    assert {record["arm"] for record in read if record["record"] == "summary"} == {"D", "S"}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), "--numa-study"),
        (("--numa-study", "--arms", "DQ"), "'Q' is none of D, X, F, S, N"),
        (("--numa-study", "--arms", "DD"), "each once"),
        (("--numa-study", "--starts", "0"), "'0' is not a whole number from 1"),
        (("--numa-study", "--seconds", "nan"), "'nan' is not a number above 0"),
        (("--numa-study", "--shape", "7"), "'7' is neither one of A, B, C nor sizes"),
        (("--numa-study", "--layers", "900000"), "there is room for"),
        (("--numa-study", "--layers", "1", "--shape", "2x8x8x1", "--json", "/nowhere/x"), "can't be written"),
    ],
)
def test_what_does_not_fit_is_named(arguments: tuple[str, ...], error: str) -> None:
    done = run_bench(*arguments)
    assert done.returncode == 2
    assert error in done.stderr
