"""Runs a function once a module has been imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

logger = logging.getLogger("torch_numa_moe")

ModuleCallback = Callable[[ModuleType], None]


class _CallingLoader(importlib.abc.Loader):
    """The module's own loader, with a call at the end."""

    def __init__(self, loader: Any, callback: ModuleCallback, on_failure: Callable[[], None]) -> None:
        self._loader = loader
        self._callback = callback
        self._on_failure = on_failure

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module must look as if nobody had stood in between: inspect and importlib.reload use its loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        try:
            self._loader.exec_module(module)
        except BaseException:
            self._on_failure()
            raise
        _call(self._callback, module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds only the modules that somebody waits for, by asking the other finders."""

    def __init__(self) -> None:
        self._callbacks: dict[str, ModuleCallback] = {}

    def expect(self, name: str, callback: ModuleCallback) -> None:
        self._callbacks[name] = callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        # Taken out while the others are asked, so that this finder answers nothing to its own question.
        callback = self._callbacks.pop(fullname, None)
        if callback is None:
            return None

        def keep_expecting() -> None:
            self._callbacks[fullname] = callback

        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            keep_expecting()
            return spec
        spec.loader = _CallingLoader(spec.loader, callback, keep_expecting)
        return spec


_finder = _Finder()


def call_after_import(name: str, callback: ModuleCallback) -> None:
    """Calls ``callback(module)`` when the module called ``name`` has been imported: now, if it has been.

    An exception in the callback is logged, not raised: it must not break an import of somebody else's module.
    """
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is not None and not getattr(spec, "_initializing", False):
        _call(callback, module)
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.expect(name, callback)


def _call(callback: ModuleCallback, module: ModuleType) -> None:
    try:
        callback(module)
    except Exception as error:  # noqa: BLE001  (told, but no reason to break the import)
        logger.warning("torch_numa_moe could not register itself with %s: %s", module.__name__, error)
