"""The demo and its model: trained, so that a broken kernel shows in its text and its perplexity."""

from __future__ import annotations

import math

import pytest
import torch

import torch_numa_moe
from torch_numa_moe.__main__ import main
from torch_numa_moe.demo import MODEL_PATH

transformers = pytest.importorskip("transformers")

# Nats per token that a format may differ from eager in fp32, where both see the same bf16 checkpoint.
# fp32 and fp16 keep activations and so only sum in another order; bf16 rounds activations to 8 bits.
BOUND = {"fp32": 1e-5, "fp16": 1e-5, "bf16": 5e-3}

# The same where weights are rounded to codes: docs/formats.md has what each costs.
QUANTIZED_BOUND = {
    "int8": 0.003, "int8_g128": 0.003, "fp8": 0.004, "fp8_row": 0.004, "int4": 0.01, "int4_g64": 0.01,
    "int4_g128": 0.015, "int4_zp": 0.01, "mxfp4": 0.02, "nvfp4": 0.01,
}  # fmt: skip


@pytest.fixture(scope="module")
def held_out() -> torch.Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_PATH)
    text = (MODEL_PATH / "heldout.txt").read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
    return ids[: len(ids) // 256 * 256].view(-1, 256)[:24]


def load(**options: object) -> torch.nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32, **options)
    return model.eval()


@torch.inference_mode()
def loss(model: torch.nn.Module, windows: torch.Tensor) -> float:
    total = 0.0
    for batch in windows.split(8):
        logits = model(batch, use_cache=False).logits[:, :-1]
        total += float(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
        )
    return total / (windows.shape[0] * (windows.shape[1] - 1))


def test_held_out_perplexity_is_that_of_eager(held_out: torch.Tensor) -> None:
    eager = loss(load(experts_implementation="eager"), held_out)
    assert math.exp(eager) < 30, "the demo model is not trained"
    for packed_format, bound in BOUND.items():
        model = load()
        torch_numa_moe.patch(model, format=packed_format, progress=False)
        assert abs(loss(model, held_out) - eager) < bound, packed_format


def test_held_out_perplexity_of_quantized_experts(held_out: torch.Tensor) -> None:
    """Near eager's."""
    windows = held_out[:8]
    eager = loss(load(experts_implementation="eager"), windows)
    for packed_format, bound in QUANTIZED_BOUND.items():
        model = load()
        torch_numa_moe.patch(model, format=packed_format, progress=False)
        difference = loss(model, windows) - eager
        print(
            f"{packed_format:10} perplexity {math.exp(eager + difference):.3f} ({math.exp(eager):.3f} eager)"
        )
        assert abs(difference) < bound, packed_format


def test_the_checkpoint_is_small() -> None:
    assert sum(path.stat().st_size for path in MODEL_PATH.iterdir()) <= 8_000_000


def test_demo_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--tokens", "24"]) == 0
    printed = capsys.readouterr().out
    assert "And God said" in printed
    assert "eager transformers gives the same 24 tokens" in printed
    assert "tokens/s through the op" in printed


def test_demo_refuses_an_empty_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--prompt", " "]) == 2
    assert "the prompt is empty" in capsys.readouterr().err
    assert main(["demo", "--tokens", "0"]) == 2


def test_plan_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan"]) == 0
    assert "slice" in capsys.readouterr().out
