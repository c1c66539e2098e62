"""The files on this machine that a transformers model was loaded from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")


def find_checkpoint_files(model: Any) -> list[Path]:
    """The weight files of the folder, or of the hub's cache, that the model's config names; none if unknown.

    Nothing is downloaded.
    """
    config = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", None) or getattr(model, "name_or_path", None)
    if not isinstance(name, str) or not name:
        return []
    folder = Path(name)
    if not folder.is_dir():
        cached = _cached_folder(name, getattr(config, "_commit_hash", None))
        if cached is None:
            return []
        folder = cached
    return sorted({path.resolve() for pattern in _WEIGHT_FILES for path in folder.glob(pattern)})


def _cached_folder(name: str, revision: str | None) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except HFValidationError:  # a path that is gone, for instance, is no name on the hub
        return None
    return Path(found).parent if isinstance(found, str) else None
