"""Greedy generation with the demo model, by eager transformers and through the op, side by side."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch

import torch_numa_moe

MODEL_PATH = Path(__file__).parent / "model"
"""A Qwen3-MoE checkpoint in transformers' format; README.md in it says how it was trained."""

# Greedy text of so small a model goes round in circles; still deterministic with this.
_REPETITION_PENALTY = 1.2

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _generate(model: Any, inputs: Any, max_new_tokens: int) -> tuple[list[int], float]:
    """Token ids of a greedy continuation and its speed in tokens per second."""
    options = {"do_sample": False, "repetition_penalty": _REPETITION_PENALTY}
    with torch.inference_mode():
        model.generate(**inputs, max_new_tokens=4, **options)  # warm-up: threads start, memory is touched
        begin = time.perf_counter()
        ids = model.generate(
            **inputs, max_new_tokens=max_new_tokens, min_new_tokens=max_new_tokens, **options
        )
        seconds = time.perf_counter() - begin
    return ids[0].tolist(), max_new_tokens / seconds


def run_demo(
    *, prompt: str = "And God said", max_new_tokens: int = 96, format: str = "auto", dtype: str = "fp32"
) -> int:
    """Prints a continuation of the prompt, whether eager gives the same tokens, speeds, plan and placement.

    Args:
        prompt: what the text begins with; must not be empty.
        max_new_tokens: tokens to generate, at least 1.
        format: weight format of the packed experts; ``"auto"`` stores the model's dtype as it is.
        dtype: ``"fp32"`` or ``"bf16"``, of the model. In fp32 both ways give the same text; in bf16 eager
            rounds every product to bf16, so texts may part after a while.

    Returns:
        Exit status: 0 if the tokens agree, 1 if not.
    """
    if not prompt.strip():
        print(
            "the prompt is empty: give some words to go on from, e.g. --prompt 'And God said'",
            file=sys.stderr,
        )
        return 2
    if max_new_tokens < 1:
        print(f"--tokens must be at least 1, got {max_new_tokens}", file=sys.stderr)
        return 2
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        print(
            f"the demo needs transformers ({error}): pip install 'torch_numa_moe[transformers]'",
            file=sys.stderr,
        )
        return 2
    transformers_logging.disable_progress_bar()

    print(torch_numa_moe.plan(), end="\n\n")
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    inputs = tokenizer(prompt, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(
        MODEL_PATH, dtype=_DTYPES[dtype], experts_implementation="eager"
    )
    model.eval()

    eager_ids, eager_speed = _generate(model, inputs, max_new_tokens)
    report = torch_numa_moe.patch(model, format=format)
    print(report, end="\n\n")
    packed_ids, packed_speed = _generate(model, inputs, max_new_tokens)

    print(tokenizer.decode(packed_ids, skip_special_tokens=True), end="\n\n")
    same = packed_ids == eager_ids
    if same:
        print(f"eager transformers gives the same {max_new_tokens} tokens")
    else:
        prompt_length = inputs["input_ids"].shape[1]
        agreed = next(
            (i for i, pair in enumerate(zip(packed_ids, eager_ids, strict=False)) if pair[0] != pair[1]),
            len(eager_ids),
        )
        print(f"eager transformers gives the same tokens up to the {agreed - prompt_length}th, then parts")
    print(f"{packed_speed:.0f} tokens/s through the op, {eager_speed:.0f} tokens/s eager")
    return 0 if same or dtype == "bf16" else 1
