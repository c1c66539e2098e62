r"""Predicts decode speed of MoE experts on a box with several NUMA nodes, from its bandwidths.

python benchmarks/numa_model.py                     # check against a published study, then 2, 4, 8 nodes
python benchmarks/numa_model.py --plot docs/numa_model.svg
python benchmarks/numa_model.py --box mine.json     # your own box, or with options:
python benchmarks/numa_model.py --nodes 2 --cores 32 --memory-gbs 200 --link-gbs 90 \
    --shape 2048x768x8 --layers 48

The formulas are in numa_cost/layer_time.py, what the study published and where the inputs are from in
numa_cost/published.py. Exit status: 0, or 1 when a figure of the study is missed.

A description has the sections box, experts and engine, whose keys are the fields of Box, Experts and Engine
in numa_cost/box.py; experts may give hidden_size, intermediate_size, top_k and bits_per_weight instead of
layer_bytes:

{"box": {"nodes": 2, "cores": 32, "memory_bandwidth": 200, "link_bandwidth": 90},
 "experts": {"layers": 48, "hidden_size": 2048, "intermediate_size": 768, "top_k": 8}}
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from numa_cost.box import DEFAULT_CORE_BANDWIDTH, Box, Engine, Experts, read_description
from numa_cost.figure import draw
from numa_cost.layer_time import make_arms
from numa_cost.published import calibrate, compare, other_models
from numa_cost.scaling import scale
from numa_cost.tables import box_lines, comparison_lines, scaling_lines

EXAMPLE = Experts.of_shape(layers=48, hidden_size=2048, intermediate_size=768, top_k=8)
EXAMPLE_TITLE = "Qwen3-30B-A3B in bf16, CPU experts alone"

LINKS = "Three links a node: all to one other, one to each of three others, or along the edges of a cube."

# Option -> where it goes: section, key.
BOX_OPTIONS = {
    "nodes": "nodes",
    "cores": "cores",
    "memory_gbs": "memory_bandwidth",
    "link_gbs": "link_bandwidth",
    "all_links_gbs": "all_links_bandwidth",
    "core_gbs": "core_bandwidth",
}
EXPERTS_OPTIONS = {
    "layers": "layers",
    "bits": "bits_per_weight",
    "outside_ms": "outside_ms",
    "fixed_us": "fixed_us",
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw check and scaling (needs matplotlib)")
    own = parser.add_argument_group("your own box (options override --box)")
    own.add_argument("--box", type=Path, metavar="FILE", help="a description, as above")
    own.add_argument("--nodes", type=int, help="NUMA nodes")
    own.add_argument("--cores", type=int, help="cores of a node")
    own.add_argument("--memory-gbs", type=float, help="GB/s read from a node's memory by its own cores")
    own.add_argument("--link-gbs", type=float, help="GB/s read from one other node's memory")
    own.add_argument(
        "--all-links-gbs", type=float, help="from all other nodes together (default: from each --link-gbs)"
    )
    own.add_argument(
        "--core-gbs",
        type=float,
        help=f"GB/s of weights that a core gets through (default: {DEFAULT_CORE_BANDWIDTH:.2f})",
    )
    own.add_argument("--shape", type=_shape, metavar="HxIxK", help="hidden x intermediate size x top-k")
    own.add_argument("--layers", type=int, help="MoE layers")
    own.add_argument("--bits", type=float, help="of a weight, scales included (default: 16)")
    own.add_argument("--outside-ms", type=float, help="of a step, outside of CPU experts (default: 0)")
    own.add_argument("--fixed-us", type=float, help="of a layer, whatever the number of cores (default: 0)")
    return parser.parse_args(argv)


def _shape(text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if match is None or "0" in match.groups():
        raise argparse.ArgumentTypeError(f"{text!r} is not like 2048x768x8")
    hidden_size, intermediate_size, top_k = map(int, match.groups())
    return hidden_size, intermediate_size, top_k


def describe(arguments: argparse.Namespace) -> tuple[Box, Experts, Engine] | None:
    """The reader's box, or None if there is nothing of it.

    Raises:
        ValueError, OSError: naming what doesn't fit.
    """
    box: dict[str, Any] = {}
    experts: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    if arguments.box is not None:
        box, experts, engine = read_description(arguments.box)
    given = vars(arguments)
    box |= {key: given[name] for name, key in BOX_OPTIONS.items() if given[name] is not None}
    experts |= {key: given[name] for name, key in EXPERTS_OPTIONS.items() if given[name] is not None}
    if arguments.shape is not None:
        experts |= dict(zip(("hidden_size", "intermediate_size", "top_k"), arguments.shape, strict=True))
    if not (box or experts or engine):
        return None
    made = _make("box", Box, box)
    kind = Experts if "layer_bytes" in experts else Experts.of_shape
    return made, _make("experts", kind, experts), _make("engine", Engine, engine)


def _make(section: str, kind: Any, values: dict[str, Any]) -> Any:
    parameters = inspect.signature(kind).parameters.values()
    known = [parameter.name for parameter in parameters]
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    missing = [name for name in required if name not in values]
    unknown = [name for name in values if name not in known]
    if missing:
        raise ValueError(f"{section}: {', '.join(missing)} must be given")
    if unknown:
        raise ValueError(f"{section}: {', '.join(unknown)} can't be given along with {', '.join(required)}")
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{section}: {error}") from None


def check_study() -> int:
    """Prints the check and the scaling; returns the exit status."""
    model = calibrate()
    assert model is not None, "the inputs taken allow a calibration"
    comparisons = compare(model, other_models())
    print("\n".join(comparison_lines(model, comparisons)))
    print()
    arms = make_arms(model.box)
    print("\n".join(scaling_lines("The study's load on more of its nodes", study_scaling(), arms)))
    print()
    title = f"{EXAMPLE_TITLE}, on the study's nodes"
    print("\n".join(scaling_lines(title, example_scaling(), arms)))
    print()
    print(LINKS)
    return 0 if all(comparison.within for comparison in comparisons) else 1


def study_scaling() -> dict[str, dict[int, float]]:
    """The study's own load, calibrated, by arm and number of nodes."""
    model = calibrate()
    assert model is not None, "the inputs taken allow a calibration"
    return scale(model.box, model.experts["passthrough"], model.engine)


def example_scaling() -> dict[str, dict[int, float]]:
    """A model in bf16 on the study's nodes with this project's barriers."""
    model = calibrate()
    assert model is not None, "the inputs taken allow a calibration"
    box = dataclasses.replace(model.box, core_bandwidth=DEFAULT_CORE_BANDWIDTH)
    return scale(box, EXAMPLE, Engine())


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    arguments = parse_arguments(argv)
    try:
        described = describe(arguments)
    except (ValueError, OSError) as error:
        print(f"numa_model.py: {error}", file=sys.stderr)
        return 2
    if described is not None:
        if arguments.plot is not None:
            print("--plot draws the study's check: leave your box out", file=sys.stderr)
            return 2
        box, experts, engine = described
        print("\n".join(box_lines(box, experts, engine, make_arms(box))))
        return 0
    if arguments.plot is not None and find_spec("matplotlib") is None:
        print("--plot needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    status = check_study()
    if arguments.plot is not None:
        model = calibrate()
        assert model is not None, "the inputs taken allow a calibration"
        draw(compare(model), example_scaling(), make_arms(model.box), EXAMPLE_TITLE, arguments.plot)
    return status


if __name__ == "__main__":
    sys.exit(main())
