"""Trains the demo model in ``torch_numa_moe/demo/model``: a small Qwen3-MoE on the King James Bible.

The text is in the public domain and comes with Debian's packages bible-kjv and bible-kjv-text::

    apt-get install bible-kjv bible-kjv-text
    bible -f gen1:1-rev22:21 < /dev/null > kjv.txt
    python tools/train_demo_model.py --text kjv.txt --steps 2800 --output torch_numa_moe/demo/model

Every 40th chapter is held out: training and the tokenizer never see it, and a part of it is stored beside the
model, as heldout.txt, for perplexity tests. The folder's README.md tells the command and what it measured.

Versions used: torch 2.13.0+cpu, transformers 5.24.0, tokenizers 0.23.3, safetensors 0.8.0, tqdm 4.70.1,
bible-kjv-text 4.38. The same versions, options and kind of processor give the same model with ``--steps``;
with ``--minutes`` the machine's speed decides how many steps are made.
"""

from __future__ import annotations

import argparse
import math
import re
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

if TYPE_CHECKING:
    from collections.abc import Callable

HELD_OUT_EVERY = 40  # chapters
HELD_OUT_BYTES = 48_000  # at most, of heldout.txt
HEAD_DIM = 32
WARM_UP_STEPS = 100
FINAL_LEARNING_RATE = 0.02  # as a part of --learning-rate
END_OF_TEXT = "<|endoftext|>"  # stands before each chapter
SAMPLE_PROMPTS = ("And God said", "In the beginning", "Blessed are")
CARD = Path(__file__).with_name("demo_model_card.md")


@dataclass(frozen=True)
class Loss:
    """What a model scores on a text."""

    nats_per_token: float
    bits_per_byte: float

    def row(self, text: str, dtype: str) -> str:
        """A line of the model card's table."""
        perplexity = math.exp(self.nats_per_token)
        cells = [text, dtype, f"{self.nats_per_token:.4f}", f"{perplexity:.2f}", f"{self.bits_per_byte:.4f}"]
        return f"| {' | '.join(cells)} |"


def read_chapters(path: Path) -> list[str]:
    """The text of each chapter: its verses, each ended by a newline.

    Args:
        path: lines such as ``Ge1:1 In the beginning ...``, as the bible program prints them.
    """
    chapters: dict[str, list[str]] = {}
    for line in path.read_text(encoding="ascii").splitlines():
        match = re.match(r"(\w+?\d+):\d+ (.*)", line)
        if match is None:
            raise SystemExit(f"{path}: not a verse: {line[:60]!r}; --help says how to make the file")
        chapters.setdefault(match[1], []).append(match[2].strip() + "\n")
    if len(chapters) < HELD_OUT_EVERY:
        raise SystemExit(f"{path}: has {len(chapters)} chapters, at least {HELD_OUT_EVERY} are needed")
    return ["".join(verses) for verses in chapters.values()]


def train_tokenizer(chapters: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE, so that any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chapters, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def make_config(arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeConfig:
    """The architecture that the options describe."""
    end_of_text = tokenizer.eos_token_id
    return Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=arguments.hidden_size,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden_size // HEAD_DIM,
        num_key_value_heads=max(1, arguments.hidden_size // HEAD_DIM // 2),
        head_dim=HEAD_DIM,
        intermediate_size=4 * arguments.hidden_size,
        moe_intermediate_size=arguments.moe_intermediate_size,
        num_experts=arguments.experts,
        num_experts_per_tok=arguments.top_k,
        norm_topk_prob=True,
        initializer_range=arguments.initializer_range,
        router_aux_loss_coef=arguments.balance,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        pad_token_id=end_of_text,
    )


def encode(tokenizer: PreTrainedTokenizerFast, chapters: list[str]) -> Tensor:
    """Token ids of all chapters in one row, each begun by the end-of-text token."""
    ids: list[int] = []
    for chapter in chapters:
        ids.append(tokenizer.eos_token_id)
        ids.extend(tokenizer(chapter)["input_ids"])
    return torch.tensor(ids)


@torch.inference_mode()
def measure_loss(model: Qwen3MoeForCausalLM, ids: Tensor, length: int, text_bytes: int) -> Loss:
    """The loss over windows of ``length`` tokens; each window's first token is not predicted.

    Args:
        model: the model; is left in evaluation mode.
        ids: token ids in one row; what fills no window is left out.
        length: tokens in a window.
        text_bytes: size of the text of which ``ids`` are the tokens.
    """
    model.eval()
    windows = ids[: len(ids) // length * length].view(-1, length)
    total = 0.0
    for batch in windows.split(8):
        logits = model(batch, use_cache=False).logits[:, :-1].float()
        total += float(cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"))
    nats = total / (windows.shape[0] * (length - 1))
    return Loss(nats, nats / math.log(2) * len(ids) / text_bytes)


@torch.inference_mode()
def expert_shares(model: Qwen3MoeForCausalLM, ids: Tensor, length: int) -> list[Tensor]:
    """For each layer the share of the tokens' choices that each expert gets."""
    model.eval()
    windows = ids[: len(ids) // length * length].view(-1, length)
    experts = model.config.num_experts
    counts = [torch.zeros(experts) for _ in range(model.config.num_hidden_layers)]
    for batch in windows.split(8):
        outputs = model(batch, output_router_logits=True, use_cache=False)
        for count, logits in zip(counts, outputs.router_logits, strict=True):
            chosen = logits.float().topk(model.config.num_experts_per_tok).indices
            count.add_(torch.bincount(chosen.flatten(), minlength=experts))
    return [count / count.sum() for count in counts]


def balance_loss(router_logits: tuple[Tensor, ...], top_k: int) -> Tensor:
    """Load balancing term of Switch Transformer (Fedus et al. 2021, eq. 4), mean of the layers; 1 if even.

    transformers' own puts the tokens of all layers together: an expert idle in one layer and busy in another
    would pass for even.
    """
    terms = []
    for logits in router_logits:
        experts = logits.shape[-1]
        probabilities = logits.float().softmax(-1)
        counts = torch.bincount(logits.topk(top_k).indices.flatten(), minlength=experts)
        terms.append(experts * (counts / counts.sum() * probabilities.mean(0)).sum())
    return torch.stack(terms).mean()


def make_optimizer(model: Qwen3MoeForCausalLM, learning_rate: float) -> torch.optim.Optimizer:
    """AdamW that decays matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98), fused=True)


def train(
    model: Qwen3MoeForCausalLM,
    ids: Tensor,
    measure: Callable[[], Loss],
    arguments: argparse.Namespace,
) -> int:
    """Trains on random windows of ``ids``; returns the number of steps made."""
    optimizer = make_optimizer(model, arguments.learning_rate)
    generator = torch.Generator().manual_seed(arguments.seed)
    offsets = torch.arange(arguments.length)
    begin = time.monotonic()
    step = 0
    average = math.nan
    progress = 0.0  # of the whole training, 0 to 1
    model.train()
    with tqdm(total=arguments.steps, unit="step", mininterval=5, dynamic_ncols=True) as bar:
        while progress < 1:
            cosine = 0.5 * (1 + math.cos(math.pi * progress))
            factor = FINAL_LEARNING_RATE + (1 - FINAL_LEARNING_RATE) * cosine
            for group in optimizer.param_groups:
                group["lr"] = arguments.learning_rate * factor * min(1.0, (step + 1) / WARM_UP_STEPS)
            starts = torch.randint(len(ids) - arguments.length + 1, (arguments.batch, 1), generator=generator)
            batch = ids[starts + offsets]
            outputs = model.model(batch, output_router_logits=True, use_cache=False)
            logits = model.lm_head(outputs.last_hidden_state[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            balance = balance_loss(outputs.router_logits, arguments.top_k)
            optimizer.zero_grad(set_to_none=True)
            (loss + arguments.balance * balance).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            average = float(loss) if step == 1 else 0.98 * average + 0.02 * float(loss)
            minutes = (time.monotonic() - begin) / 60
            progress = step / arguments.steps if arguments.steps else minutes / arguments.minutes
            bar.set_postfix(loss=f"{average:.3f}", refresh=False)
            bar.update()
            if step % arguments.measure_every == 0:
                line = measure().row("held out", f"step {step}")
                model.train()
                tqdm.write(f"{line} {minutes:.1f} minutes", file=sys.stderr)
    return step


@torch.inference_mode()
def write_samples(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> list[str]:
    """A continuation of each prompt, as a Markdown quotation."""
    samples = []
    for prompt in SAMPLE_PROMPTS:
        torch.manual_seed(seed)
        inputs = tokenizer(prompt, return_tensors="pt")
        sampling = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 0}
        ids = model.generate(**inputs, **sampling, max_new_tokens=120)
        text = tokenizer.decode(ids[0], skip_special_tokens=True)
        verses = f"**{prompt}**{text.removeprefix(prompt)}".splitlines()
        samples.append("\n>\n".join(f"> {verse}" for verse in verses if verse))
    return samples


def save(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    held_out: str,
    output: Path,
) -> None:
    """Writes the checkpoint, the tokenizer and heldout.txt."""
    excerpt = held_out[:HELD_OUT_BYTES]
    excerpt = excerpt[: excerpt.rindex("\n") + 1]  # whole verses
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    (output / "heldout.txt").write_text(excerpt, encoding="utf-8")
    # safetensors makes the file for its owner alone.
    (output / "model.safetensors").chmod(0o644)


def evaluate(output: Path, held_out: str, length: int, seed: int) -> dict[str, str]:
    """The model card's measurements, of the checkpoint as a user loads it."""
    tokenizer = AutoTokenizer.from_pretrained(output)
    texts = {
        "held-out chapters": held_out,
        "heldout.txt": (output / "heldout.txt").read_text(encoding="ascii"),
    }
    rows = []
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        model = Qwen3MoeForCausalLM.from_pretrained(output, dtype=dtype)
        for title, text in texts.items():
            ids = torch.tensor(tokenizer(text)["input_ids"])
            rows.append(measure_loss(model, ids, length, len(text)).row(title, name))
    shares = expert_shares(model, torch.tensor(tokenizer(held_out)["input_ids"]), length)
    return {
        "results": "\n".join(rows),
        "shares": ", ".join(f"{share.max():.1%} and {share.min():.1%}" for share in shares),
        "samples": "\n\n".join(write_samples(model, tokenizer, seed)),
    }


def run(arguments: argparse.Namespace) -> None:
    """Trains, saves, measures and writes the model card."""
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    chapters = read_chapters(arguments.text)
    held_out = chapters[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    seen = [text for index, text in enumerate(chapters) if (index + 1) % HELD_OUT_EVERY]
    held_out_text = "".join(held_out)
    tokenizer = train_tokenizer(seen, arguments.vocabulary)
    ids, held_out_ids = encode(tokenizer, seen), encode(tokenizer, held_out)

    # grouped_mm is transformers' fastest implementation of the experts in training.
    config = make_config(arguments, tokenizer)
    model = Qwen3MoeForCausalLM._from_config(config, experts_implementation="grouped_mm")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters:,} parameters, {len(ids):,} tokens to train on, {len(held_out_ids):,} held out")
    begin = time.monotonic()
    steps = train(
        model, ids, lambda: measure_loss(model, held_out_ids, arguments.length, len(held_out_text)), arguments
    )
    minutes = (time.monotonic() - begin) / 60

    save(model.to(torch.bfloat16), tokenizer, held_out_text, arguments.output)
    measured = evaluate(arguments.output, held_out_text, arguments.length, arguments.seed)
    card = CARD.read_text(encoding="utf-8").format(
        **vars(arguments) | {"steps": steps, "minutes": minutes, "vocabulary": len(tokenizer)} | measured,
        parameters=parameters,
        heads=config.num_attention_heads,
        held_out_every=HELD_OUT_EVERY,
        held_out_chapters=len(held_out),
        chapters=len(chapters),
        train_tokens=len(ids),
        epochs=steps * arguments.batch * arguments.length / len(ids),
        command=shlex.join(["python", f"tools/{Path(__file__).name}", *sys.argv[1:]]),
        torch=torch.__version__,
        transformers=transformers.__version__,
        tokenizers=tokenizers.__version__,
        even=1 / arguments.experts,
    )
    (arguments.output / "README.md").write_text(card, encoding="utf-8")
    print(measured["results"], measured["samples"], sep="\n\n", end="\n\n")
    for path in sorted(arguments.output.iterdir()):
        print(f"{path.stat().st_size:>9,} {path.name}")


def main() -> None:
    """Reads the options."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--text", type=Path, required=True, help="the file made by the bible program")
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoint; is made")
    duration = parser.add_mutually_exclusive_group(required=True)
    duration.add_argument("--steps", type=int, help="train for so many steps (reproducible)")
    duration.add_argument("--minutes", type=float, help="train for so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of torch; 1 is best beside other work")
    parser.add_argument("--vocabulary", type=int, default=2048, help="tokens of the tokenizer")
    parser.add_argument("--hidden-size", type=int, default=128, help=f"a multiple of {HEAD_DIM}")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=16, help="in each layer")
    parser.add_argument("--top-k", type=int, default=2, help="experts per token")
    parser.add_argument("--moe-intermediate-size", type=int, default=128, help="of one expert")
    parser.add_argument("--initializer-range", type=float, default=0.02, help="of the first weights")
    parser.add_argument("--batch", type=int, default=4, help="sequences per step")
    parser.add_argument("--length", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="at its highest")
    parser.add_argument("--balance", type=float, default=0.02, help="weight of the load balancing term")
    parser.add_argument("--measure-every", type=int, default=500, help="steps between held-out losses")
    arguments = parser.parse_args()
    for name, value in vars(arguments).items():
        if isinstance(value, int | float) and value <= 0 and name != "seed":
            parser.error(f"--{name.replace('_', '-')} must be positive, got {value}")
    if arguments.hidden_size % HEAD_DIM:
        parser.error(f"--hidden-size must be a multiple of {HEAD_DIM}, got {arguments.hidden_size}")
    if arguments.top_k > arguments.experts:
        parser.error(f"--top-k must be at most --experts ({arguments.experts}), got {arguments.top_k}")
    run(arguments)


if __name__ == "__main__":
    main()
