"""``python -m torch_numa_moe bench --numa-study``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from torch_numa_moe.formats import FORMATS
from torch_numa_moe.limits import read_limits
from torch_numa_moe.settings import read_settings
from torch_numa_moe.sizes import size_text
from torch_numa_moe.study.arms import ARMS, ArmSetting, set_up_arms
from torch_numa_moe.study.load import LoadShape, default_layers, parse_shape, room_bytes
from torch_numa_moe.study.machine import describe_machine
from torch_numa_moe.study.run import make_start
from torch_numa_moe.study.schedule import interleave
from torch_numa_moe.study.start import SAMPLES, StartRequest
from torch_numa_moe.study.table import Start, markdown, summarize
from torch_numa_moe.topology import read_topology

DEFAULT_STARTS = 3
DEFAULT_SECONDS = 5.0
INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options; each is checked before anything runs."""
    known = "; ".join(f"{arm.letter} {arm.title}" for arm in ARMS.values())
    parser.add_argument(
        "--numa-study",
        action="store_true",
        required=True,
        help="compare one socket, all sockets, the split, and the split without placement",
    )
    parser.add_argument(
        "--arms", type=_arms, default=list(ARMS), metavar="LETTERS", help=f"of {known} (default: all)"
    )
    parser.add_argument(
        "--starts", type=_positive, default=DEFAULT_STARTS, help="of each arm (default: %(default)s)"
    )
    parser.add_argument(
        "--layers", type=_positive, help="MoE layers (default: as many as make 16 GiB, or fit)"
    )
    parser.add_argument(
        "--shape",
        type=_shape,
        default="A",
        help="A (Qwen3-30B-A3B), B (gpt-oss-20b), C (DeepSeek-V3, 16 experts), or experts x hidden x "
        "intermediate x top-k such as 128x2048x768x8 (default: %(default)s)",
    )
    parser.add_argument("--format", choices=list(FORMATS), default="bf16", help="default: %(default)s")
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=DEFAULT_SECONDS,
        help=f"of each of the {SAMPLES} samples of a start (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every start as a JSON line")


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1000000")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0, at most 3600")
    return value


def _arms(text: str) -> list[str]:
    letters = [letter for letter in text.upper() if letter not in ", "]
    for letter in letters:
        if letter not in ARMS:
            raise argparse.ArgumentTypeError(f"{letter!r} is none of {', '.join(ARMS)}")
    if not letters or len(set(letters)) < len(letters):
        raise argparse.ArgumentTypeError(f"{text!r} must name arms of {', '.join(ARMS)}, each once")
    return letters


def _shape(text: str) -> LoadShape:
    try:
        return parse_shape(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(arguments: argparse.Namespace) -> int:
    """Runs the study; progress goes to standard error, the outcome as Markdown to standard output.

    Returns:
        The exit status: 0; 1 if a start failed; 2 if the load doesn't fit; 130 if interrupted.
    """
    topology, limits, settings = read_topology(), read_limits(), read_settings()
    shape: LoadShape = arguments.shape
    layers = arguments.layers or default_layers(shape, arguments.format, topology, limits)
    weight_bytes = layers * shape.layer_bytes(arguments.format)
    room = room_bytes(topology, limits)
    if room is not None and weight_bytes + shape.source_bytes > room:
        print(
            f"--layers {layers} of shape {shape} need {size_text(weight_bytes)}, and "
            f"{size_text(shape.source_bytes)} while they are packed; there is room for {size_text(room)}",
            file=sys.stderr,
        )
        return 2
    for line in settings.log_lines:
        print(line.text, file=sys.stderr)
    arms = set_up_arms(topology, limits, settings)
    machine = describe_machine(topology, limits)
    load = (
        f"{layers} layers of {shape} (experts x hidden x intermediate x top-k) in {arguments.format}, "
        f"{size_text(weight_bytes)} of weights, one token at a time, {SAMPLES} samples of "
        f"{arguments.seconds:g} s a start"
    )
    for setting in (arms[letter] for letter in arguments.arms):
        if setting.refusal:
            print(f"{setting.arm.letter} ({setting.arm.title}): not run, {setting.refusal}", file=sys.stderr)
    starts: list[Start] = []
    interrupted = False
    with ExitStack() as stack:
        try:
            records = None if arguments.json is None else stack.enter_context(arguments.json.open("w"))
        except OSError as error:
            print(f"--json {arguments.json} can't be written ({error.strerror})", file=sys.stderr)
            return 2
        _record(records, "machine", {**machine, "load": load})
        request = StartRequest(str(shape), arguments.format, layers, arguments.seconds)
        try:
            _make_starts(arguments.arms, arguments.starts, arms, request, starts, records)
        except KeyboardInterrupt:
            print("interrupted: this is what there is", file=sys.stderr)
            interrupted = True
        for summary in summarize(starts).values():
            _record(records, "summary", dataclasses.asdict(summary))
    token_bytes = layers * shape.active_bytes(arguments.format)
    print(markdown(machine, load, token_bytes, arms, arguments.arms, starts))
    if interrupted:
        return INTERRUPTED
    return 1 if any(start.error for start in starts) else 0


def _make_starts(
    letters: Sequence[str],
    count: int,
    arms: dict[str, ArmSetting],
    request: StartRequest,
    starts: list[Start],
    records: TextIO | None,
) -> None:
    order = interleave([letter for letter in letters if not arms[letter].refusal], count)
    with tqdm(order, unit="start", disable=None) as progress:
        for number, letter in enumerate(progress, 1):
            progress.set_description(f"{letter}, {arms[letter].arm.title}")
            start, lines = make_start(number, arms[letter], request)
            starts.append(start)
            for line in [*lines, _outcome(start)]:
                tqdm.write(f"start {number} ({letter}): {line}", file=sys.stderr)
            _record(records, "start", dataclasses.asdict(start))


def _outcome(start: Start) -> str:
    if start.result is None:
        return f"FAILED, {start.error}"
    samples = ", ".join(f"{milliseconds:.3g}" for milliseconds in start.result.token_ms)
    return f"{samples} ms a token" + (f"; DROPPED, {start.dropped}" if start.dropped else "")


def _record(file: TextIO | None, kind: str, record: dict[str, object]) -> None:
    if file is not None:
        file.write(json.dumps({"record": kind, **record}) + "\n")
        file.flush()
