"""Prints docs/models.md: which architectures of the installed transformers can be patched.

python tests/model_table.py > docs/models.md
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

import torch_numa_moe
from tiny_architectures import ARCHITECTURES, Architecture, build_architecture, is_installed

INTERFACE, ADAPTER, REFUSED = "experts interface", "adapter", "refused"


@dataclass(frozen=True)
class Row:
    """What patching a tiny model of an architecture did.

    Attributes:
        name: the architecture's.
        classes: of the modules with the experts.
        way: by what it could be patched, or "refused".
        outcome: the activation, or the reason.
    """

    name: str
    classes: tuple[str, ...]
    way: str
    outcome: str

    def __str__(self) -> str:
        classes = ", ".join(f"`{one}`" for one in self.classes)
        return f"| `{self.name}` | {classes} | {self.way} | {self.outcome} |"


def patch_row(architecture: Architecture, model: nn.Module) -> Row:
    """Patches a model of the architecture, and says what came of it."""
    try:
        report = torch_numa_moe.patch(model, progress=False)
    except torch_numa_moe.UnsupportedExpertsError as error:
        classes = [type(model.get_submodule(name)).__name__ for name in error.reasons]
        reasons = sorted(set(error.reasons.values()))
        return Row(architecture.name, tuple(sorted(set(classes))), REFUSED, "; ".join(reasons))
    modules = [model.get_submodule(module.name) for module in report.modules]
    activations = sorted({module.activation for module in report.modules})
    ways = sorted({INTERFACE if "is_transposed" in vars(one) else ADAPTER for one in modules})
    classes = sorted({type(module).__name__ for module in modules})
    return Row(architecture.name, tuple(classes), ", ".join(ways), ", ".join(activations))


_PAGE = """\
# Models

{working} of the {total} architectures of transformers {version} that carry routed experts can be patched,
{refused} are refused with the reason. Each is tested with a tiny random model: patched logits against eager's
in fp32, each layer in bf16, the parameters after `unpatch`, and this table (tests/test_models.py).

- *experts interface*: the class is decorated with `@use_experts_implementation`;
  `experts_implementation="numa_moe"` works as well as `torch_numa_moe.patch`.
- *adapter*: it isn't, but its structure is one that is known
  ([transformers.md](transformers.md#experts-outside-the-interface)); `torch_numa_moe.patch` only.

<!-- Made by tests/model_table.py: don't edit. -->

| Architecture | Experts | Patched by | Activation, or reason |
|---|---|---|---|
{rows}
"""


def describe(rows: Sequence[Row], version: str) -> str:
    """The page."""
    refused = sum(row.way == REFUSED for row in rows)
    return _PAGE.format(
        working=len(rows) - refused,
        total=len(rows),
        refused=refused,
        version=version,
        rows="\n".join(map(str, rows)),
    )


def main() -> None:
    """Prints the page."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import transformers

    installed = [one for one in ARCHITECTURES if is_installed(one)]
    rows = [patch_row(architecture, build_architecture(architecture)) for architecture in installed]
    print(describe(rows, transformers.__version__), end="")


if __name__ == "__main__":
    main()
