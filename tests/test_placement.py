"""What is measured of packed weights' memory, and what is said of it."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import torch_numa_moe
from reference import random_layer
from sys_tree import GIB, MACHINES, write, write_tree
from tiny_models import build_model
from torch_numa_moe import SlicePlacement, pack_experts, placement, runtime, verify_placement
from torch_numa_moe.limits import read_limits
from torch_numa_moe.placement import (
    describe_failure,
    describe_lack_of_huge_pages,
    measure_placements,
    report_placement,
    sum_placements,
)
from torch_numa_moe.room import ShortageLog

GOOD = SlicePlacement(1, 2, 64 << 20, 1000, {0: 20, 2: 980}, 0, 0, 1.0)
BAD = replace(GOOD, pages_on_node={0: 60, 2: 940})


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is logged from INFO on, nothing having been said before."""
    monkeypatch.setattr(placement, "_logged", set())
    monkeypatch.setattr(runtime, "_shortages", ShortageLog())
    collector = _Collector()
    placement.logger.addHandler(collector)
    yield collector.lines
    placement.logger.removeHandler(collector)


def test_shares() -> None:
    assert GOOD.local_share == 0.98 and not GOOD.failed
    assert BAD.local_share == 0.94 and BAD.failed
    assert not replace(GOOD, pages_on_node={2: 950, 0: 50}).failed  # 95 % is enough
    for unknown in (
        replace(BAD, node=None),
        replace(BAD, error=errno.EPERM),
        replace(BAD, pages_sampled=0, pages_on_node={}),
    ):
        assert unknown.local_share is None and not unknown.failed


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (GOOD, "slice 1: 64 MiB for node 2, 98.0% on it, 100% in huge pages"),
        (replace(GOOD, node=None, huge_page_share=None), "slice 1: 64 MiB, no node asked for"),
        (
            replace(GOOD, error=errno.EPERM, huge_page_share=0.0),
            "slice 1: 64 MiB for node 2, unverified (EPERM), 0% in huge pages",
        ),
    ],
)
def test_words(shown: SlicePlacement, text: str) -> None:
    assert str(shown) == text


def test_sums() -> None:
    other = SlicePlacement(0, 0, 1, 10, {0: 10}, 0, 0, None)
    larger = SlicePlacement(1, 2, 192 << 20, 500, {2: 400, 3: 100}, 0, errno.EPERM, 0.0)
    first, second = sum_placements([GOOD, other, larger])
    assert first == SlicePlacement(
        1, 2, 256 << 20, 1500, {0: 20, 2: 1380, 3: 100}, 0, errno.EPERM, pytest.approx(0.25)
    )
    assert second == other
    assert sum_placements([other, other])[0].huge_page_share is None


def test_good_placement_is_silent(messages: list[str]) -> None:
    report_placement([GOOD, replace(BAD, node=None)])
    assert messages == []


def test_failure_is_loud_each_time(messages: list[str], caplog: pytest.LogCaptureFixture) -> None:
    report_placement([GOOD, BAD])
    report_placement([BAD])
    assert len(messages) == 2
    assert {record.levelno for record in caplog.records} == {logging.ERROR}
    assert messages[0].startswith(
        "placement FAILED: only 94.0 % of slice 1 is on NUMA node 2 (the rest on node 0). "
        "The node is likely full"
    )


def test_refusals_are_said_once_and_in_one_line(messages: list[str]) -> None:
    refused = replace(GOOD, error=errno.EPERM, bind_error=errno.EPERM)
    for _ in range(3):
        report_placement([refused, refused])
    (line,) = messages
    assert "can't be bound to their NUMA nodes (EPERM)" in line
    assert "unverified: the kernel refused to say where pages are (EPERM)" in line
    assert line.endswith(
        "containers need CAP_SYS_NICE, or a seccomp profile that allows mbind and move_pages"
    )
    report_placement([replace(GOOD, bind_error=errno.ENOSYS)])
    assert "(ENOSYS)" in messages[1] and "unverified" not in messages[1]


def causes(tmp_path: Path, numa_balancing: str) -> tuple[Path, Path]:
    root, proc = write_tree(MACHINES["nodes 0 and 2"], tmp_path)
    write(proc / "sys/kernel/numa_balancing", numa_balancing)
    return root, proc


@pytest.mark.parametrize(
    ("before", "balancing", "bind_error", "said"),
    [
        (None, "1", 0, "The node is likely full (16.0 GiB free, 3.0 MiB page cache): "),
        (BAD, "1", 0, "The node is likely full (16.0 GiB free, 3.0 MiB page cache): "),
        (GOOD, "1", 0, "It was 98.0 %: automatic NUMA balancing moves pages. "),
        (GOOD, "0", 0, "It was 98.0 %: something moved its pages since "),
        (
            None,
            "0",
            errno.EPERM,
            "The memory couldn't be bound to the node (EPERM), and the node was",
        ),
    ],
)
def test_likely_cause(
    before: SlicePlacement | None, balancing: str, bind_error: int, said: str, tmp_path: Path
) -> None:
    root, proc = causes(tmp_path, balancing)
    text = describe_failure(replace(BAD, bind_error=bind_error), before, root=root, proc=proc)
    assert said in text
    # Something to do next.
    assert any(command in text for command in ("drop_caches", "sysctl", "Load the model again"))


@pytest.mark.parametrize(
    ("mode", "share", "size", "said"),
    [
        ("always madvise [never]", 0.0, 64, "transparent huge pages are off; echo madvise"),
        ("always [madvise] never", 0.4, 64, "free memory is in small pieces"),
        (None, 0.0, 64, "this kernel has no transparent huge pages"),
        ("always madvise [never]", 0.5, 64, None),
        ("always madvise [never]", None, 64, None),
        ("always madvise [never]", 0.0, 15, None),
    ],
)
def test_lack_of_huge_pages(
    mode: str | None, share: float | None, size: int, said: str | None, tmp_path: Path
) -> None:
    if mode is not None:
        write(tmp_path / "kernel/mm/transparent_hugepage/enabled", mode)
    slices = [GOOD, replace(GOOD, bytes=size << 20, huge_page_share=share)]
    text = describe_lack_of_huge_pages(slices, root=tmp_path)
    assert (said in text) if said else text == ""


def test_lack_of_huge_pages_is_said_once_and_only_if_wanted(messages: list[str]) -> None:
    bare = replace(GOOD, huge_page_share=0.0)
    report_placement([bare], huge_pages_wanted=False)
    assert messages == []
    report_placement([bare])
    report_placement([bare])
    (line,) = messages
    assert line.startswith("weights lie in small pages")


def test_packed_weights_are_measured(fresh_runtime: None) -> None:
    torch_numa_moe.configure(split="test:2")
    layer = random_layer(4, 1024, 1024)  # 12 MiB a slice
    packed = pack_experts(layer.gate_up_proj, layer.down_proj)
    assert [one.slice for one in packed.placement] == [0, 1]
    for index, one in enumerate(packed.placement):
        tensors = (packed.gate_up_proj, packed.down_proj)
        assert one.bytes == sum(tensor[index].numel() * tensor.element_size() for tensor in tensors)
        assert one.node is None and one.error == 0
        assert one.pages_sampled == sum(one.pages_on_node.values()) > 0


@pytest.mark.parametrize(("kind", "share"), [("none", 0.0), ("transparent", 1.0)])
def test_share_in_huge_pages(kind: str, share: float, fresh_runtime: None) -> None:
    modes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if kind == "transparent" and (not modes.exists() or "[never]" in modes.read_text()):
        pytest.skip("this kernel gives no transparent huge pages")
    torch_numa_moe.configure(huge_pages=kind)
    layer = random_layer(4, 1024, 1024)
    packed = pack_experts(layer.gate_up_proj, layer.down_proj)
    for one in packed.placement:
        assert one.huge_page_share == pytest.approx(share, abs=0.1)


def test_layers_are_measured_together() -> None:
    layers = [random_layer(2, 64, 64), random_layer(3, 96, 64)]
    packed = [pack_experts(layer.gate_up_proj, layer.down_proj) for layer in layers]
    measured = measure_placements([one.placed_tensors for one in packed])
    assert [sum(one.bytes for one in placements) for placements in measured] == [
        one.gate_up_proj.numel() * 2 + one.down_proj.numel() * 2 for one in packed
    ]
    assert measure_placements([]) == []


def test_verification_can_be_left_out() -> None:
    layer = random_layer(2, 64, 64)
    packed = pack_experts(layer.gate_up_proj, layer.down_proj, verify_placement=False)
    assert packed.placement == ()
    assert verify_placement(packed) == packed.placement != ()


def test_a_patched_model_is_verified_again(messages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("qwen3_moe")
    report = torch_numa_moe.patch(model)
    total = verify_placement(model)
    assert [one.bytes for one in total] == [one.bytes for one in report.placement]
    assert messages == []
    experts = next(module for module in model.modules() if hasattr(module, "_numa_moe"))
    assert verify_placement(experts)[0].bytes == report.modules[0].placement[0].bytes

    # As if its pages had been on their node, and were found elsewhere.
    packed = [vars(module)["_numa_moe"].packed for module in model.modules() if hasattr(module, "_numa_moe")]
    away = len(packed[0].placement[0].pages_on_node) + 7
    for one in packed:
        one.nodes = (away,)
        one.placement = tuple(
            replace(part, node=away, pages_on_node={away: part.pages_sampled}) for part in one.placement
        )
    (moved,) = verify_placement(model)
    assert moved.failed
    (line,) = messages
    assert f"only 0.0 % of slice 0 is on NUMA node {away}" in line
    assert "It was 100.0 %" in line


def test_a_model_without_packed_layers() -> None:
    assert verify_placement(torch.nn.Linear(2, 2)) == ()


@pytest.mark.parametrize("wrong", [None, "model", [torch.nn.Linear(2, 2)]])
def test_what_cannot_be_verified(wrong: object) -> None:
    with pytest.raises(
        TypeError, match=r"^model must be a torch\.nn\.Module or torch_numa_moe\.PackedExperts, got"
    ):
        verify_placement(wrong)  # type: ignore[arg-type]


def test_patching_warns_once_of_too_little_room(
    messages: list[str], monkeypatch: pytest.MonkeyPatch, fresh_runtime: None
) -> None:
    """Of all layers together, before anything is packed; and not again for each layer."""
    limits = replace(read_limits(), memory_bytes=GIB, memory_source="/x/memory.max", memory_left_bytes=1000)
    monkeypatch.setattr(runtime, "read_limits", lambda: limits)
    torch_numa_moe.patch(build_model("qwen3_moe"))
    # This machine's nodes may be small as well.
    (line,) = [message for message in messages if "the memory limit of /x/memory.max leaves" in message]
    assert "placement at risk" in line
