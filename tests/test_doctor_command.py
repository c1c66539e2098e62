"""``python -m torch_numa_moe doctor``: settings, the fence, what is printed, exit statuses."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sys_tree import Machine, Node, read_machine
from torch_numa_moe import _C, __version__, runtime, settings
from torch_numa_moe.__main__ import main
from torch_numa_moe.doctor import diagnosis as diagnosis_module
from torch_numa_moe.doctor import probes
from torch_numa_moe.doctor.affinity import KernelAnswers
from torch_numa_moe.doctor.diagnosis import Diagnosis, run_checks
from torch_numa_moe.doctor.fence import fence_lines
from torch_numa_moe.doctor.findings import HINT, PROBLEM, Finding, Report
from torch_numa_moe.doctor.inspection import Inspection
from torch_numa_moe.doctor.knobs import FIELDS, Knob, check_settings, choose_instruction_set, list_knobs
from torch_numa_moe.doctor.text import to_json, to_text
from torch_numa_moe.plan import Plan, make_plan
from torch_numa_moe.settings import Settings, read_settings

TWO_NODES = Machine(
    {0: Node("0-1,4-5", distances="10 21"), 1: Node("2-3,6-7", distances="21 10")},
    "0-7",
    cores=("0,4", "1,5", "2,6", "3,7"),
)
SUPPORTED = ("portable", "avx2", "avx512")
ORDER = ("portable", "avx2", "avx512", "avx512bf16", "amx")

PlanOf = Callable[..., Plan]


@pytest.fixture
def plan_of(tmp_path: Path) -> PlanOf:
    def make(chosen: Settings | None = None, machine: Machine = TWO_NODES, **limits) -> Plan:
        topology, read = read_machine(machine, tmp_path)
        return make_plan(topology, replace(read, **limits), chosen or Settings())

    return make


# --- Settings


def test_all_variables_are_shown() -> None:
    assert FIELDS.keys() == settings._VARIABLES.keys()
    assert all(hasattr(Settings(), name) for name in FIELDS.values())


def test_knobs_by_default(plan_of: PlanOf) -> None:
    knobs = list_knobs(Settings(), Settings(), plan_of(), "avx2")
    assert knobs == (
        Knob("NUMA_MOE_SPLIT", "split", "plan", "split across NUMA nodes 0-1: 1 + 1 workers"),
        Knob("NUMA_MOE_WORKERS", "2", "plan", "a worker per core, but for 2 that are left to others"),
        Knob("NUMA_MOE_SPIN_US", "50", "default"),
        Knob("NUMA_MOE_DISPATCHER_YIELDS", "512", "default"),
        Knob("NUMA_MOE_ISA", "avx2", "default", "the best that this CPU offers"),
        Knob("NUMA_MOE_HUGE_PAGES", "explicit", "default", "transparent ones where too few are reserved"),
        Knob("NUMA_MOE_WATCH", "on", "default", "names intruders in the log"),
        Knob("NUMA_MOE_SCHED", "normal", "default"),
    )


def test_knobs_that_are_set(plan_of: PlanOf) -> None:
    environment = Settings(workers=100, spin_us=7, isa="amx", huge_pages="none", watch=False, sched="fifo")
    chosen = replace(environment, split="0", spin_us=9, dispatcher_yields=128)
    knobs = list_knobs(chosen, environment, plan_of(chosen), "avx512")
    assert knobs == (
        Knob("NUMA_MOE_SPLIT", "0 (no split)", "code", "no split: NUMA_MOE_SPLIT=0"),
        Knob("NUMA_MOE_WORKERS", "8", "environment", "100 asked for"),
        Knob("NUMA_MOE_SPIN_US", "9", "code"),
        Knob("NUMA_MOE_DISPATCHER_YIELDS", "128", "code"),
        Knob("NUMA_MOE_ISA", "avx512", "environment", "amx asked for"),
        Knob("NUMA_MOE_HUGE_PAGES", "none", "environment"),
        Knob("NUMA_MOE_WATCH", "off", "environment"),
        Knob("NUMA_MOE_SCHED", "fifo", "environment"),
    )


def test_knobs_of_a_test_split(plan_of: PlanOf) -> None:
    chosen = Settings(split="test", test_slices=3)
    split, *_ = list_knobs(chosen, chosen, plan_of(chosen), "avx2")
    assert (split.value, split.source) == ("test:3 (no split)", "environment")


def test_workers_within_a_quota(plan_of: PlanOf) -> None:
    plan = plan_of(machine=Machine({0: Node("0-7")}, "0-7"), cpu_quota=3.0, cpu_quota_source="/x/cpu.max")
    _, workers, *_ = list_knobs(Settings(), Settings(), plan, "avx2")
    assert workers.value == "2"
    assert workers.why == "the CPU quota of 3 (/x/cpu.max) pays for 3 of 8 cores"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [(None, "avx512"), ("avx2", "avx2"), ("amx", "avx512"), ("portable", "portable"), ("neon", "avx512")],
)
def test_instruction_set(asked: str | None, expected: str) -> None:
    assert choose_instruction_set(Settings(isa=asked), SUPPORTED, ORDER) == expected


@pytest.mark.parametrize("asked", [None, *_C.instruction_set_names()])
def test_instruction_set_is_the_one_that_will_run(asked: str | None) -> None:
    chosen = Settings(isa=asked)
    mine = choose_instruction_set(chosen, _C.supported_instruction_sets(), _C.instruction_set_names())
    assert mine == runtime._choose_instruction_set(chosen)


def test_settings_that_cannot_be_understood(plan_of: PlanOf) -> None:
    environ = {"NUMA_MOE_WORKERS": "many", "NUMA_MOE_SPLIT": "1"}
    chosen = read_settings(environ)
    (finding,) = check_settings(chosen, environ, plan_of(chosen), SUPPORTED).findings
    assert finding == Finding(
        PROBLEM,
        "setting",
        "NUMA_MOE_WORKERS is 'many', ignored: it takes a whole number from 1 to 8192",
        "it counts as not set",
        ("unset NUMA_MOE_WORKERS  # or set it to a value it takes",),
    )


def test_settings_that_are_not_met(plan_of: PlanOf) -> None:
    environ = {"NUMA_MOE_WORKERS": "9", "NUMA_MOE_ISA": "amx"}
    chosen = read_settings(environ)
    lowered, isa = check_settings(chosen, environ, plan_of(chosen), SUPPORTED).findings
    assert (lowered.severity, isa.severity) == (HINT, HINT)
    assert lowered.seen == "NUMA_MOE_WORKERS=9 is lowered to 8: this process may use 8 CPUs"
    assert isa.seen == "NUMA_MOE_ISA is amx, which this CPU doesn't offer (portable, avx2, avx512)"


def test_misspelt_variables(plan_of: PlanOf) -> None:
    environ = {"NUMA_MOE_WORKER": "3", "NUMA_MOE_WERROR": "1", "NUMA_MOE_ISA": "avx2", "PATH": "/bin"}
    plan = plan_of()
    (finding,) = check_settings(Settings(isa="avx2"), environ, plan, SUPPORTED).findings
    assert finding.severity == HINT
    assert finding.seen == "'NUMA_MOE_WORKER' is set, and no variable of that name is read"
    assert finding.why == "it has no effect; perhaps NUMA_MOE_WORKERS was meant"
    assert finding.commands == ("unset NUMA_MOE_WORKER",)
    (strange,) = check_settings(Settings(), {"NUMA_MOE_\u00e9;x": ""}, plan, SUPPORTED).findings
    assert strange.commands == () and strange.seen.isascii()


def test_good_settings(plan_of: PlanOf) -> None:
    environ = {"NUMA_MOE_WORKERS": "4", "NUMA_MOE_SPLIT": "1", "NUMA_MOE_ISA": "avx2"}
    chosen = read_settings(environ)
    assert check_settings(chosen, environ, plan_of(chosen), SUPPORTED) == Report()


# --- The fence


def test_fence(plan_of: PlanOf) -> None:
    lines = fence_lines(Inspection(plan_of()))
    text = "\n".join(lines)
    banned = "IRQBALANCE_BANNED_CPULIST=1,3,5,7"
    commands = [line for line in lines if line and not line.startswith("#")]
    assert commands == [
        "systemctl set-property --runtime system.slice AllowedCPUs=0,2,4,6",
        "systemctl set-property --runtime user.slice AllowedCPUs=0,2,4,6",
        "systemctl set-property --runtime init.scope AllowedCPUs=0,2,4,6",
        "echo 55 > /proc/irq/default_smp_affinity",
        f"echo {banned} >> /etc/default/irqbalance  # Fedora, RHEL: /etc/sysconfig/irqbalance",
        "systemctl restart irqbalance",
    ]
    assert "# Workers: CPUs 1,3." in lines
    assert "#     Slice=inference.slice\n#     CPUAffinity=0-7\n#     AllowedCPUs=0-7\n" in text
    assert "#     AllowedMemoryNodes=0-1" in lines
    assert "-p AllowedCPUs=0-7 -p AllowedMemoryNodes=0-1 COMMAND" in text
    assert "#     isolcpus=managed_irq,domain,1,3,5,7 irqaffinity=0,2,4,6" in lines
    assert "#     taskset -c 1,3,5,7 COMMAND" in lines


def test_fence_of_some_cpus(plan_of: PlanOf) -> None:
    """What this process may not use belongs to the others."""
    text = "\n".join(fence_lines(Inspection(plan_of(machine=replace(TWO_NODES, allowed="2-3,6-7")))))
    assert "system.slice AllowedCPUs=0-2,4-6\n" in text
    assert "#     AllowedCPUs=2-3,6-7\n" in text


def test_fence_keeps_to_the_memory_that_may_be_used(plan_of: PlanOf) -> None:
    lines = fence_lines(Inspection(plan_of(machine=replace(TWO_NODES, memory_nodes="1"))))
    assert "#     AllowedMemoryNodes=1" in lines


def test_nothing_is_left(plan_of: PlanOf) -> None:
    assert fence_lines(Inspection(plan_of(Settings(workers=4)))) == [
        "# there is a worker on every core, so no CPU is left to others: NUMA_MOE_WORKERS=3 leaves one"
    ]


def test_nothing_to_fence(plan_of: PlanOf) -> None:
    plan = plan_of(machine=Machine({0: Node("0")}, "0"))
    assert fence_lines(Inspection(plan)) == ["# no worker is pinned to a CPU: there is nothing to fence"]


# --- What is printed


@pytest.fixture
def example(plan_of: PlanOf) -> Diagnosis:
    return Diagnosis(
        versions={"torch_numa_moe": "1.2.3", "Python": "3.10"},
        plan=plan_of(),
        knobs=(
            Knob("NUMA_MOE_SPLIT", "split", "plan", "two nodes"),
            Knob("NUMA_MOE_WORKERS", "2", "environment"),
            Knob("NUMA_MOE_ISA", "avx2", "code"),
            Knob("NUMA_MOE_SPIN_US", "50", "default"),
        ),
        findings=(
            Finding(PROBLEM, "huge pages", "/x is never", "it is slow", ("echo madvise > /x", "# done")),
            Finding(HINT, "swap", "1 GiB", "it is slow too"),
        ),
        facts=("SMT is on",),
        not_checked=("the weather",),
    )


def test_text(example: Diagnosis) -> None:
    lines = to_text(example).splitlines()
    plan = [f"  {line}" for line in str(example.plan).splitlines()]
    assert lines == [
        "versions",
        "  torch_numa_moe  1.2.3",
        "  Python          3.10",
        "",
        "plan",
        *plan,
        "",
        "settings",
        "  NUMA_MOE_SPLIT    split (from the plan: two nodes)",
        "  NUMA_MOE_WORKERS  2 (from the environment)",
        "  NUMA_MOE_ISA      avx2 (from configure())",
        "  NUMA_MOE_SPIN_US  50 (default)",
        "",
        "also seen",
        "  SMT is on",
        "",
        "findings: 1 problem, 1 hint; commands are for a root shell and last until the next boot",
        "  problem: huge pages: /x is never",
        "    it is slow",
        "      echo madvise > /x",
        "      # done",
        "  hint: swap: 1 GiB",
        "    it is slow too",
        "",
        "not checked",
        "  the weather",
    ]
    assert any("H. W." in line for line in plan)


def test_json(example: Diagnosis) -> None:
    read = json.loads(to_json(example))
    assert read.keys() == {
        "healthy",
        "versions",
        "plan",
        "settings",
        "findings",
        "facts",
        "not_checked",
    }
    assert read["healthy"] is False
    assert read["versions"] == example.versions
    assert read["plan"]["groups"] == [{"node": 0, "worker_cpus": [1]}, {"node": 1, "worker_cpus": [3]}]
    assert (read["plan"]["split"], read["plan"]["host_cpu"], read["plan"]["spare_cpus"]) == (True, 0, [2])
    assert read["plan"]["reasons"] == ["split across NUMA nodes 0-1: 1 + 1 workers"]
    assert read["plan"]["text"] == str(example.plan).splitlines()
    assert read["settings"][0] == {
        "name": "NUMA_MOE_SPLIT",
        "value": "split",
        "source": "plan",
        "why": "two nodes",
    }
    assert read["findings"][0] == {
        "severity": "problem",
        "topic": "huge pages",
        "seen": "/x is never",
        "why": "it is slow",
        "commands": ["echo madvise > /x", "# done"],
    }
    assert (read["facts"], read["not_checked"]) == (["SMT is on"], ["the weather"])


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_exit_status(
    option: list[str],
    example: Diagnosis,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Problems count, hints don't."""
    given = []

    def diagnose(*, interval_seconds: float) -> Diagnosis:
        given.append(interval_seconds)
        return example

    monkeypatch.setattr(diagnosis_module, "diagnose", diagnose)
    assert main(["doctor", *option]) == 1
    example = replace(example, findings=example.findings[1:])
    assert example.healthy
    assert main(["doctor", "--seconds", "0.25", *option]) == 0
    assert given == [1.0, 0.25]
    assert "it is slow too" in capsys.readouterr().out


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "x", "3601"])
def test_seconds_are_checked(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--seconds", seconds])
    assert caught.value.code == 2
    assert f"must be a number above 0 and up to 3600, got '{seconds}'" in capsys.readouterr().err


def test_fence_and_json_exclude_each_other() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--fence", "--json"])
    assert caught.value.code == 2


@pytest.mark.parametrize(("workers", "status"), [(4, 1), (2, 0)])
def test_exit_status_of_the_fence(
    workers: int, status: int, plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(Settings(workers=workers))
    monkeypatch.setattr("torch_numa_moe.plan", lambda: plan)
    assert main(["doctor", "--fence"]) == status


# --- All of it


def test_all_checks_on_a_machine_that_tells_little(plan_of: PlanOf, tmp_path: Path) -> None:
    inspection = Inspection(plan_of(), tmp_path / "none", tmp_path / "neither")
    report = run_checks(
        inspection,
        Settings(),
        answers=KernelAnswers(),
        torch_threads=1,
        ignore=set(),
        sleep=lambda _seconds: None,
    )
    assert [finding.topic for finding in report.findings] == ["fence"]
    topics = [line.partition(":")[0] for line in report.not_checked]
    assert topics == [
        "threads of others",
        "interrupts",
        "frequency governor",
        "transparent huge pages",
        "automatic NUMA balancing",
    ]


def test_a_check_that_fails_does_not_hide_the_others(
    plan_of: PlanOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_arguments: object) -> Report:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(diagnosis_module, "check_affinity", broken)
    report = run_checks(
        Inspection(plan_of(), tmp_path, tmp_path),
        Settings(),
        answers=KernelAnswers("EPERM"),
        torch_threads=1,
        ignore=set(),
        sleep=lambda _seconds: None,
    )
    assert report.not_checked[0] == "affinity: ZeroDivisionError: oh"
    assert "pinning" in [finding.topic for finding in report.findings]


def test_pinning_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases affinity-lies and affinity-eperm."""
    cpu = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    assert probes.try_to_pin(cpu) is None
    assert os.sched_getaffinity(0) == before  # the caller stays as it was

    def refuse(_pid: int, _cpus: set[int]) -> None:
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert probes.try_to_pin(cpu) == "sched_setaffinity: EPERM"
    monkeypatch.setattr(os, "sched_setaffinity", lambda _pid, _cpus: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {cpu, cpu + 1})
    assert probes.try_to_pin(cpu) == "the kernel reads back another mask"


def test_the_kernel_is_asked_about_every_node_with_memory() -> None:
    plan = runtime.plan()
    answers = probes.ask_kernel(plan)
    allowed = plan.limits.memory_nodes
    nodes = [n.id for n in plan.topology.nodes if n.memory_bytes and (allowed is None or n.id in allowed)]
    assert list(answers.bind_errors) == nodes
    assert all(error == "" or error in errno.errorcode.values() for error in answers.bind_errors.values())


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NUMA_MOE_")}
    return subprocess.run(
        [sys.executable, "-m", "torch_numa_moe", "doctor", *arguments],
        env={**clean, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_this_machine() -> None:
    result = run("--seconds", "0.1", PYTHONIOENCODING="ascii")
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    sections = ["versions", "plan", "settings", "also seen"]
    assert [line for line in lines if line in sections] == sections
    (findings,) = [line for line in lines if line.startswith("findings: ")]
    assert result.returncode == int(not findings.startswith("findings: 0 problems"))
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in FIELDS)
    assert not any(
        line.startswith("  ") and "Error:" in line for line in lines[lines.index("also seen") :]
    ), "a check has failed"


def test_this_machine_as_json_with_a_setting_that_is_wrong() -> None:
    result = run("--seconds", "0.1", "--json", NUMA_MOE_SPIN_US="long", NUMA_MOE_WORKERS="1")
    read = json.loads(result.stdout)
    assert result.returncode == 1
    assert read["healthy"] is False
    assert read["findings"][0]["seen"].startswith("NUMA_MOE_SPIN_US is 'long', ignored")
    knobs = {knob["name"]: knob for knob in read["settings"]}
    assert (knobs["NUMA_MOE_WORKERS"]["value"], knobs["NUMA_MOE_WORKERS"]["source"]) == ("1", "environment")
    assert read["versions"]["instruction set"] == _C.supported_instruction_sets()[-1]


def test_the_pool_is_not_started(fresh_runtime: None, caplog: pytest.LogCaptureFixture) -> None:
    runtime.stop()
    with caplog.at_level(logging.DEBUG, "torch_numa_moe"):
        found = diagnosis_module.diagnose(interval_seconds=0.01)
    assert not _C.is_running()
    assert caplog.records == []
    severities = [finding.severity for finding in found.findings]
    assert severities == sorted(severities, reverse=True)  # problems first


def test_a_reader_that_has_read_enough() -> None:
    """`| head` ends the command without a traceback."""
    command = [sys.executable, "-m", "torch_numa_moe", "plan"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.stderr == ""
    assert done.returncode == 141


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"torch_numa_moe {__version__}\n"
