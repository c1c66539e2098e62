"""Sizes in words."""

from __future__ import annotations

_MIB = 1 << 20
_GIB = 1 << 30


def size_text(size: int) -> str:
    """``"1.5 GiB"``, below one GiB ``"64 MiB"``, below ten MiB ``"0.5 MiB"``; size in bytes."""
    if size >= _GIB:
        return f"{size / _GIB:.1f} GiB"
    return f"{size / _MIB:.0f} MiB" if size >= 10 * _MIB else f"{size / _MIB:.1f} MiB"
