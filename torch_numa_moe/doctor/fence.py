"""Lines to paste that keep everything else off the pool's cores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_numa_moe.doctor.inspection import NOTHING_LEFT, hex_mask
from torch_numa_moe.doctor.interrupts import irqbalance_commands
from torch_numa_moe.doctor.isolation import FENCED_UNITS
from torch_numa_moe.sysfs import format_list

if TYPE_CHECKING:
    from torch_numa_moe.doctor.inspection import Inspection

SLICE = "inference.slice"
"""The systemd slice that the inference program is to run in, beside those that are fenced."""


def fence_refusal(inspection: Inspection) -> str | None:
    """Why nothing can be fenced, or None."""
    if not inspection.worker_cpus:
        return "no worker is pinned to a CPU: there is nothing to fence"
    if not inspection.other_cpus:
        return f"{NOTHING_LEFT}: {inspection.advice_to_leave_a_core}"
    return None


def fence_lines(inspection: Inspection) -> list[str]:
    """A shell script, most of it alternatives in remarks; one remark if nothing can be fenced."""
    refusal = fence_refusal(inspection)
    if refusal is not None:
        return [f"# {refusal}"]
    return [
        f"# Workers: CPUs {format_list(inspection.worker_cpus)}.",
        f"# With the other threads of their cores: CPUs {format_list(inspection.core_cpus)}.",
        f"# Left to everything else, and to the calling thread: CPUs {format_list(inspection.other_cpus)}.",
        "",
        *_systemd_lines(inspection),
        "",
        *_service_lines(inspection),
        "",
        *_interrupt_lines(inspection),
        "",
        *_boot_lines(inspection),
    ]


def _systemd_lines(inspection: Inspection) -> list[str]:
    others = format_list(inspection.other_cpus)
    lines = [
        "# (a) Everything else, until the next boot (systemd 244 or later, control groups version 2).",
        "#     This shell too: what is to compute has to run in a slice of its own, as in (b).",
    ]
    lines += [f"systemctl set-property --runtime {unit} AllowedCPUs={others}" for unit in FENCED_UNITS]
    lines += ["#     Undo:"]
    lines += [f"#     systemctl set-property --runtime {unit} AllowedCPUs=" for unit in FENCED_UNITS]
    return lines


def _service_lines(inspection: Inspection) -> list[str]:
    # The CPUs that the plan was made from: of the workers' alone, the next plan would set some aside.
    limits = inspection.plan.limits
    topology = inspection.plan.topology
    cpus = format_list([cpu.id for cpu in topology.cpus] if limits.cpus is None else limits.cpus)
    nodes = limits.memory_nodes or [node.id for node in topology.nodes if node.has_memory]
    allowed = f"-p AllowedCPUs={cpus} -p AllowedMemoryNodes={format_list(nodes)}"
    return [
        "# (b) The inference program, from a shell; COMMAND is yours. So too the doctor, once (a) is done.",
        f"#     systemd-run --scope --slice={SLICE} {allowed} COMMAND",
        "#     Or as a service, with these lines in its unit:",
        "#     [Service]",
        f"#     Slice={SLICE}",
        f"#     CPUAffinity={cpus}",
        f"#     AllowedCPUs={cpus}",
        f"#     AllowedMemoryNodes={format_list(nodes)}",
    ]


def _interrupt_lines(inspection: Inspection) -> list[str]:
    return [
        "# (c) Devices' interrupts: new ones, and where irqbalance runs, all that can move.",
        f"echo {hex_mask(inspection.other_cpus)} > /proc/irq/default_smp_affinity",
        *irqbalance_commands(inspection),
    ]


def _boot_lines(inspection: Inspection) -> list[str]:
    cores, others = format_list(inspection.core_cpus), format_list(inspection.other_cpus)
    return [
        "# (d) Instead of (a) and (c), kernel parameters for good:",
        f"#     isolcpus=managed_irq,domain,{cores} irqaffinity={others}",
        "#     Isolated CPUs are left alone unless the program is put on them, and on nothing else:",
        f"#     taskset -c {cores} COMMAND",
        "#     The scheduler balances nothing among isolated CPUs: threads that aren't pinned (the calling",
        "#     thread, torch's own) stay on the CPU that they start on, perhaps a worker's. Prefer (a).",
    ]
