"""Releases the page cache of the files that weights are loaded from.

A checkpoint that was just read fills a node's memory with its pages. What is then placed on that node finds
no free page and goes elsewhere, unless the kernel is made to give the cache up first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch_numa_moe import _C

if TYPE_CHECKING:
    import torch

__all__ = ["FileRange", "find_file_ranges", "page_out", "release_file_ranges", "release_files"]


@dataclass(frozen=True)
class FileRange:
    """A part of a file that is mapped into memory.

    Attributes:
        path: the file.
        offset: where the part begins in it, in bytes.
        bytes: its length.
    """

    path: str
    offset: int
    bytes: int


def find_file_ranges(tensors: Iterable[torch.Tensor], maps: str = "/proc/self/maps") -> list[FileRange]:
    """The parts of files that some tensors' memory is mapped from; none for ordinary memory.

    Args:
        tensors: CPU tensors (others have none).
        maps: the list of this process's mappings.
    """
    spans = [_span(tensor) for tensor in tensors if tensor.device.type == "cpu" and tensor.numel() > 0]
    found = []
    for begin, end, offset, path in _file_mappings(maps):
        for address, size in spans:
            first, last = max(begin, address), min(end, address + size)
            if first < last:
                found.append(FileRange(path, offset + first - begin, last - first))
    return found


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor begins, and the bytes from there to its last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


def _file_mappings(maps: str) -> list[tuple[int, int, int, str]]:
    mappings = []
    try:
        lines = Path(maps).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    for line in lines:
        # Such as 7f0000000000-7f0000001000 r--p 00002000 08:01 1234   /path with spaces
        fields = line.split(None, 5)
        if len(fields) == 6 and fields[5].startswith("/"):
            begin, end = (int(number, 16) for number in fields[0].split("-"))
            mappings.append((begin, end, int(fields[2], 16), fields[5]))
    return mappings


def page_out(tensors: Iterable[torch.Tensor]) -> None:
    """Takes tensors that are mapped from files out of memory; reading them again reads the file again.

    Tensors in ordinary memory are left alone: they would be swapped.
    """
    for tensor in tensors:
        if find_file_ranges([tensor]):
            _C.page_out(*_span(tensor))


def release_file_ranges(ranges: Iterable[FileRange]) -> None:
    """Drops the page cache of parts of files, as far as nobody has them mapped. Never raises for a file."""
    for part in ranges:
        _drop(part.path, part.offset, part.bytes)


def release_files(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Drops the page cache of whole files, as far as nobody has them mapped. Never raises for a file."""
    for path in paths:
        _drop(path, 0, 0)


def _drop(path: str | os.PathLike[str], offset: int, length: int) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return  # gone or unreadable: it is somebody else's to release
    try:
        # Whole pages only; a length of 0 reaches to the end of the file.
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)
    except OSError:
        pass  # a kind of file that has no page cache
    finally:
        os.close(descriptor)
