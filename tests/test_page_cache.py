"""Finding the file behind a tensor, and taking it out of the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import safe_open, save_file

import torch_numa_moe
from torch_numa_moe import pack_experts
from torch_numa_moe.integrations.checkpoint_files import find_checkpoint_files
from torch_numa_moe.page_cache import (
    FileRange,
    find_file_ranges,
    page_out,
    release_file_ranges,
    release_files,
)

PAGE = mmap.PAGESIZE
LARGE = 4096  # pages of a file

SLACK = 512
"""The page cache may hold up to 2 MiB in one piece, which only goes as a whole."""


def cached_pages(path: Path) -> int:
    """Pages of a file that are in memory, from mincore(2) on a mapping of our own."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        pages = -(-len(mapping) // PAGE)
        states = (ctypes.c_ubyte * pages)()
        start = ctypes.c_char.from_buffer(mapping)
        error = libc.mincore(ctypes.byref(start), ctypes.c_size_t(len(mapping)), states)
        del start
        assert error == 0, os.strerror(ctypes.get_errno())
        return sum(state & 1 for state in states)


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    """A folder whose file system has a page cache to release."""
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(64 * PAGE))
    os.sync()
    release_files([probe])
    if cached_pages(probe) != 0:
        pytest.skip("the temporary folder is in memory (tmpfs): nothing of it can be dropped")
    return tmp_path


def written(path: Path, pages: int) -> Path:
    path.write_bytes(os.urandom(pages * PAGE))
    os.sync()  # dirty pages can't be dropped
    path.read_bytes()
    return path


def test_whole_files_and_parts(on_disk: Path) -> None:
    file = written(on_disk / "weights", LARGE)
    assert cached_pages(file) == LARGE
    release_file_ranges([FileRange(str(file), LARGE // 4 * PAGE, LARGE // 2 * PAGE)])
    assert LARGE // 2 <= cached_pages(file) <= LARGE // 2 + 2 * SLACK
    release_files([file])
    assert cached_pages(file) == 0


def test_files_that_are_gone_or_have_no_pages_are_passed_over(tmp_path: Path) -> None:
    release_files([tmp_path / "none", tmp_path, "/dev/null"])
    release_file_ranges([FileRange("/proc/self/status", 0, 10)])


def test_tensors_of_a_checkpoint_are_found_in_their_file(tmp_path: Path) -> None:
    file = tmp_path / "model with space.safetensors"
    save_file({"a": torch.rand(3, PAGE), "b": torch.rand(5, PAGE)}, file)
    with safe_open(file, "pt") as checkpoint:
        second = checkpoint.get_tensor("b")
        (found,) = find_file_ranges([second])
        assert found.path == str(file)
        content = file.read_bytes()[found.offset : found.offset + found.bytes]
        assert content == second.numpy().tobytes()
        # A view that leaves the ends out, and the same with its dimensions swapped.
        for view in (second[1:3, 8:], second[1:3, 8:].transpose(0, 1)):
            (part,) = find_file_ranges([view])
            assert part.offset == found.offset + 4 * (PAGE + 8)
            assert part.bytes == 4 * (2 * PAGE - 8)
    assert find_file_ranges([torch.rand(100_000), torch.empty(0)]) == []


def test_unreadable_maps_find_nothing(tmp_path: Path) -> None:
    assert find_file_ranges([torch.rand(10)], str(tmp_path / "none")) == []


def test_paged_out_weights_leave_the_page_cache_and_keep_their_values(on_disk: Path) -> None:
    file = on_disk / "model.safetensors"
    weights = torch.rand(LARGE, PAGE // 4)
    save_file({"weights": weights}, file)
    os.sync()
    with safe_open(file, "pt") as checkpoint:
        mapped = checkpoint.get_tensor("weights")
        assert torch.equal(mapped, weights)
        assert cached_pages(file) >= LARGE
        page_out([mapped])
        assert cached_pages(file) <= 2 * SLACK
        assert torch.equal(mapped, weights)


def test_ordinary_tensors_are_not_swapped() -> None:
    weights = torch.rand(1000, 1000)
    page_out([weights])
    resident = (ctypes.c_ubyte * 1)()
    address = (weights.data_ptr() + 500_000) // PAGE * PAGE
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), resident) == 0
    assert resident[0] & 1


def test_packing_releases_the_checkpoint_it_reads(on_disk: Path) -> None:
    file = on_disk / "model.safetensors"
    gate_up, down = torch.randn(8, 1024, 512) / 16, torch.randn(8, 512, 512) / 8  # 24 MiB
    save_file({"gate_up": gate_up, "down": down}, file)
    os.sync()
    with safe_open(file, "pt") as checkpoint:
        packed = pack_experts(checkpoint.get_tensor("gate_up"), checkpoint.get_tensor("down"), format="fp32")
        assert cached_pages(file) <= 3 * SLACK  # at the ends of two tensors
    restored = packed.unpack()
    assert torch.equal(restored.gate_up_proj, gate_up)
    assert torch.equal(restored.down_proj, down)


class _Model:
    def __init__(self, name: object) -> None:
        self.config = type("Config", (), {"_name_or_path": name})()


def test_checkpoint_files_of_a_folder(tmp_path: Path) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors", "old.bin", "config.json"):
        (tmp_path / name).touch()
    assert [path.name for path in find_checkpoint_files(_Model(str(tmp_path)))] == [
        "model-1.safetensors",
        "model-2.safetensors",
        "old.bin",
    ]


@pytest.mark.parametrize("name", [None, "", 7, "no/such/model", "../x//y z", "/not/there"])
def test_checkpoint_files_of_no_folder(name: object) -> None:
    assert find_checkpoint_files(_Model(name)) == []


def test_checkpoint_files_of_something_else() -> None:
    assert find_checkpoint_files(object()) == []


def test_patching_a_loaded_model_leaves_its_files_out_of_the_page_cache(on_disk: Path) -> None:
    """What was read at loading goes before weights are placed, what packing reads goes behind it."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from tiny_models import build_model

    model = build_model("qwen3_moe", hidden_size=256, moe_intermediate_size=512, num_experts=16)
    folder = on_disk / "model"
    model.save_pretrained(folder, max_shard_size="8MB")
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 1
    os.sync()
    for file in files:
        file.read_bytes()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    sizes = [-(-file.stat().st_size // PAGE) for file in files]
    before = [cached_pages(file) for file in files]
    assert before == sizes
    torch_numa_moe.patch(loaded, format="fp32", progress=False)
    # What isn't experts may stay, since it is still read from there.
    others = sum(parameter.nbytes for name, parameter in loaded.named_parameters() if ".experts." not in name)
    assert sum(map(cached_pages, files)) <= others // PAGE + SLACK * len(files)
    assert sum(map(cached_pages, files)) < sum(sizes) // 2
