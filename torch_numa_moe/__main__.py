"""``python -m torch_numa_moe``: the demo; what the pool would do here, what hinders it, what it does."""

from __future__ import annotations

import argparse
import os
import sys

from torch_numa_moe._version import __version__
from torch_numa_moe.doctor.command import add_arguments as add_doctor_arguments
from torch_numa_moe.statistics.top import add_arguments as add_top_arguments
from torch_numa_moe.study.command import add_arguments as add_study_arguments


def _demo(arguments: argparse.Namespace) -> int:
    from torch_numa_moe.demo import run_demo

    return run_demo(
        prompt=arguments.prompt,
        max_new_tokens=arguments.tokens,
        format=arguments.format,
        dtype=arguments.dtype,
    )


def _plan(arguments: argparse.Namespace) -> int:
    import torch_numa_moe

    print(torch_numa_moe.plan())
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from torch_numa_moe.doctor import command

    return command.run(arguments)


def _bench(arguments: argparse.Namespace) -> int:
    from torch_numa_moe.study import command

    return command.run(arguments)


def _top(arguments: argparse.Namespace) -> int:
    from torch_numa_moe.statistics import top

    return top.run(arguments)


def main(argv: list[str] | None = None) -> int:
    """Runs a subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m torch_numa_moe", description=__doc__)
    parser.add_argument("--version", action="version", version=f"torch_numa_moe {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo", help="generate text with a small trained MoE model, eager and through the op"
    )
    demo.add_argument(
        "--prompt", default="And God said", help="what the text begins with (default: %(default)r)"
    )
    demo.add_argument("--tokens", type=int, default=96, help="tokens to generate (default: %(default)s)")
    demo.add_argument(
        "--format",
        default="auto",
        help="weight format: auto (nothing is rounded), or one of docs/formats.md (default: %(default)s)",
    )
    demo.add_argument(
        "--dtype", default="fp32", choices=("fp32", "bf16"), help="dtype of the rest (default: %(default)s)"
    )
    demo.set_defaults(run=_demo)

    plan = commands.add_parser("plan", help="show which workers and NUMA nodes would be used, and why")
    plan.set_defaults(run=_plan)

    doctor = commands.add_parser("doctor", help="find what keeps the pool from running at full speed here")
    add_doctor_arguments(doctor)
    doctor.set_defaults(run=_doctor)

    bench = commands.add_parser("bench", help="measure what the split across NUMA nodes is worth here")
    add_study_arguments(bench)
    bench.set_defaults(run=_bench)

    top = commands.add_parser("top", help="show what the pool of a running program does, live")
    add_top_arguments(top)
    top.set_defaults(run=_top)

    arguments = parser.parse_args(argv)
    try:
        status = int(arguments.run(arguments))
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has read enough (head). The interpreter would try to flush once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # as if SIGPIPE had ended it
    return status


if __name__ == "__main__":
    sys.exit(main())
