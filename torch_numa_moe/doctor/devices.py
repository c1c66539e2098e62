"""The way to the GPUs: IOMMU, PCIe link, node."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch_numa_moe.doctor.findings import Report
from torch_numa_moe.sysfs import read_number, read_text

if TYPE_CHECKING:
    from torch_numa_moe.doctor.inspection import Inspection

_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
# PCI base classes: display controllers, and processing accelerators (AMD Instinct).
_CLASSES = ("0x03", "0x12")
_IOMMU_OPTIONS = ("iommu", "intel_iommu", "amd_iommu", "iommu.passthrough", "iommu.strict")


def check_gpus(inspection: Inspection) -> Report:
    """Looks at what is between the GPUs and memory. Hints only: many a model runs without one."""
    report = Report()
    for folder in _gpus(inspection.root / "bus/pci/devices"):
        name = f"{_VENDORS[read_text(folder / 'vendor') or '']} GPU {folder.name}"
        node = read_number(folder / "numa_node")
        if node is not None:
            where = f"at NUMA node {node}" if node >= 0 else "at a NUMA node that the firmware doesn't tell"
            report.facts.append(f"{name} is {where}")
        _tell_of_iommu(report, inspection, folder, name)
        _tell_of_link(report, folder, name)
    return report


def _gpus(folder: Path) -> list[Path]:
    try:
        devices = sorted(folder.iterdir())
    except OSError:
        return []
    return [
        device
        for device in devices
        if (read_text(device / "class") or "").startswith(_CLASSES)
        and read_text(device / "vendor") in _VENDORS
    ]


def _tell_of_iommu(report: Report, inspection: Inspection, folder: Path, name: str) -> None:
    try:
        number = (folder / "iommu_group").readlink().name
    except OSError:
        report.facts.append(f"{name}: no IOMMU")
        return
    path = inspection.root / f"kernel/iommu_groups/{number}/type"
    mode = read_text(path)
    if mode is None:
        report.not_checked.append(f"IOMMU of the {name}: {path} can't be read")
        return
    words = (read_text(inspection.proc / "cmdline") or "").split()
    options = [word for word in words if word.partition("=")[0] in _IOMMU_OPTIONS]
    if mode == "identity":
        report.facts.append(f"{name}: its IOMMU passes addresses through")
        return
    seen = f"{name}: {path} is {mode}" + (f" ({' '.join(options)})" if options else "")
    if not mode.startswith("DMA"):
        report.facts.append(seen)
        return
    report.hint(
        "IOMMU",
        seen,
        "the IOMMU translates every transfer between memory and the GPU, of which there are some per layer",
        "# the kernel parameter iommu=pt, then boot again; it lets devices reach all memory",
        "grubby --update-kernel=ALL --args=iommu=pt  # Fedora, RHEL",
        "sed -i 's/^GRUB_CMDLINE_LINUX=\"/&iommu=pt /' /etc/default/grub && update-grub  # Debian, Ubuntu",
    )


def _tell_of_link(report: Report, folder: Path, name: str) -> None:
    width, most_lanes = read_number(folder / "current_link_width"), read_number(folder / "max_link_width")
    speed, top_speed = read_text(folder / "current_link_speed"), read_text(folder / "max_link_speed")
    if width and most_lanes and 0 < width < most_lanes:
        report.hint(
            "PCIe link",
            f"{name}: {folder / 'current_link_width'} is {width} of {most_lanes} lanes",
            "transfers between memory and the GPU take longer: it sits in a narrower slot, or not firmly",
        )
    if speed and top_speed and 0 < _transfers(speed) < _transfers(top_speed):
        report.hint(
            "PCIe link",
            f"{name}: {folder / 'current_link_speed'} is {speed} of {top_speed}",
            "an idle GPU slows its link down to save power; if it stays so under load, the slot or the "
            "firmware's settings hold it back",
            f"cat {folder / 'current_link_speed'}  # again while the GPU is busy",
        )


def _transfers(speed: str) -> float:
    """The number of ``16.0 GT/s PCIe``; 0 if there is none."""
    try:
        return float(speed.split(maxsplit=1)[0])
    except (ValueError, IndexError):
        return 0.0
