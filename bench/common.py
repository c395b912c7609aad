"""Code that the benchmarks share: a workload, a tokenizer, a model folder, facts of the machine.

Nothing is downloaded. The rows are synthetic word problems with worked answers whose lengths follow
GSM8K's training split, measured once with SmolLM2's tokenizer (7473 rows, tokens of the bare text):

              mean    sd    p5  p25  p50  p75  p90  p95  p99  max   log mean  log sd
    question  60.3  21.9    33   45   56   71   90  101  130  223      4.038   0.345
    answer   124.6  54.5    58   84  113  153  199  232  292  454      4.736   0.421
    together 184.8  68.6    97  133  172  223  280  318  393  538      5.155   0.357

The two logarithms correlate with 0.548. Each row draws its two lengths from that bivariate
log-normal and is then written sentence by sentence up to the drawn number of tokens.

Data flow: `sentences` -> `build_tokenizer` -> `make_rows` -> `build_model` -> an HF folder and a
JSONL file that every side of a benchmark reads. All of it is a function of its seeds.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import random
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from homeostat.observe.processor import this_processor

BENCH_DIR = Path(__file__).resolve().parent
RESULTS_DIR = BENCH_DIR / "results"

LOG_MEANS = (4.038, 4.736)
LOG_SDS = (0.345, 0.421)
LOG_CORRELATION = 0.548
LENGTH_LIMITS = ((12, 223), (30, 454))

END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", END_OF_TURN]
# The newline stands before a turn, not after it: the last trained token of a row is END_OF_TURN.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if not loop.first %}{{ '\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n<|im_start|>assistant\n' }}{% endif %}"
)

_ONSETS = ["b", "br", "c", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "tr", "v"]
_VOWELS = ["a", "e", "i", "o", "u", "ai", "ea", "oo"]
_CODAS = ["", "n", "r", "s", "l", "m", "t", "nd", "ck"]


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A Llama shape with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int = 49152


SIZES = {
    # To compare losses in seconds; its speed says nothing.
    "tiny": ModelSize(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=128, vocab=12288),
    "small": ModelSize(hidden=384, layers=8, heads=6, kv_heads=2, intermediate=1024),
    "smollm2-135m": ModelSize(hidden=576, layers=30, heads=9, kv_heads=3, intermediate=1536),
}


def require(packages: Iterable[str], *, extra: str) -> None:
    """End with the command that installs what is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"{Path(sys.argv[0]).name} needs {', '.join(missing)}, which this Python does not "
            f"have. Install with: pip install 'homeostat[{extra}]'"
        )


def _words(rng: random.Random, count: int) -> list[str]:
    """Pronounceable made-up words, so that a tokenizer has something to learn."""
    found: dict[str, None] = {}
    while len(found) < count:
        syllables = rng.choice([1, 2, 2, 3])
        parts = [
            rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables)
        ]
        found["".join(parts)] = None
    return list(found)


class WordProblems:
    """Sentences of word problems: facts for the question, calculations for the answer."""

    def __init__(self, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.names = [word.capitalize() for word in _words(rng, 400)]
        self.things = _words(rng, 3000)
        self.verbs = ["buys", "sells", "finds", "loses", "packs", "paints", "counts", "carries"]
        self.places = ["shop", "market", "school", "farm", "station", "library", "harbour"]

    def fact(self, rng: random.Random) -> str:
        name, thing, other = rng.choice(self.names), rng.choice(self.things), rng.choice(self.names)
        number, place = rng.randint(2, 999), rng.choice(self.places)
        return rng.choice(
            [
                f"{name} {rng.choice(self.verbs)} {number} {thing}s at the {place}.",
                f"Each {thing} costs ${number} and {name} needs {rng.randint(2, 40)} of them.",
                f"{other} has {rng.randint(2, 9)} times as many {thing}s as {name}.",
                f"On Monday {name} gives a third of the {thing}s to {other} in the {place}.",
                f"How many {thing}s are left?",
            ]
        )

    def step(self, rng: random.Random) -> str:
        name, thing = rng.choice(self.names), rng.choice(self.things)
        left, right = rng.randint(2, 400), rng.randint(2, 60)
        sign, value = rng.choice([("+", left + right), ("*", left * right), ("-", left - right)])
        sum_text = f"{left}{sign}{right} = <<{left}{sign}{right}={value}>>{value}"
        return rng.choice(
            [
                f"{name} has {sum_text} {thing}s.\n",
                f"So {name} pays ${sum_text}.\n",
                f"The number of {thing}s at the {rng.choice(self.places)} is {sum_text}.\n",
                f"In total there are {sum_text}.\n",
            ]
        )


def build_tokenizer(folder: Path, *, vocab_size: int = 12288, seed: int = 0) -> Any:
    """A byte-level BPE with ChatML turns, trained on the problems themselves, saved to `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    problems, rng = WordProblems(seed), random.Random(seed + 1)
    corpus = [problems.fact(rng) + "\n" + problems.step(rng) for _ in range(20_000)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END_OF_TURN, pad_token=SPECIAL_TOKENS[0]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def draw_lengths(rng: random.Random) -> tuple[int, int]:
    """Tokens of one question and its answer."""
    first = rng.gauss(0, 1)
    second = LOG_CORRELATION * first + math.sqrt(1 - LOG_CORRELATION**2) * rng.gauss(0, 1)
    drawn = []
    for normal, mean, sd, (low, high) in zip(
        (first, second), LOG_MEANS, LOG_SDS, LENGTH_LIMITS, strict=True
    ):
        drawn.append(min(high, max(low, round(math.exp(mean + sd * normal)))))
    return drawn[0], drawn[1]


def _write(sentence: Callable[[], str], *, count: Callable[[str], int], target: int) -> str:
    """Sentences up to about `target` tokens: stop where the next one would miss by more."""
    text = sentence()
    length = count(text)
    while length < target:
        more = sentence()
        longer = length + count(more)
        if longer - target > target - length:
            break
        text, length = text + more, longer
    return text.strip()


def make_rows(tokenizer: Any, num_rows: int, *, seed: int) -> list[dict[str, str]]:
    """`num_rows` of {"prompt", "completion"}, the same for the same seed."""
    problems, rng = WordProblems(), random.Random(seed)

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    rows = []
    for _ in range(num_rows):
        question, answer = draw_lengths(rng)
        rows.append(
            {
                "prompt": _write(lambda: problems.fact(rng) + " ", count=count, target=question),
                "completion": _write(lambda: problems.step(rng), count=count, target=answer - 4)
                + f"\n#### {rng.randint(1, 99)}",
            }
        )
    return rows


def write_jsonl(rows: list[dict[str, Any]], path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def build_model(folder: Path, *, size: str, seed: int = 0) -> int:
    """Random weights in HF format. Returns the number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = SIZES[size]
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=SPECIAL_TOKENS.index(END_OF_TURN),
        pad_token_id=0,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def percentiles(lengths: list[int]) -> dict[str, float]:
    import numpy as np

    shown = {f"p{q}": float(np.percentile(lengths, q)) for q in (5, 25, 50, 75, 90, 95, 99)}
    return {"mean": round(float(np.mean(lengths)), 1), **shown, "max": max(lengths)}


def commit() -> str:
    """The commit that was measured, with '+' when the working tree differs from it.

    Where there is no git, it is what the variable BENCH_COMMIT says.
    """

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(BENCH_DIR), *arguments], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    found = git("rev-parse", "--short=12", "HEAD")
    if not found:
        return os.environ.get("BENCH_COMMIT", "unknown")
    return found + ("+" if git("status", "--porcelain", "--", "../src", ".", ":!results") else "")


def machine(packages: Iterable[str]) -> dict[str, Any]:
    """Hardware, versions, commit and date: what makes a number comparable."""
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "commit": commit(),
        "processor": this_processor().name,
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


def device_facts(device: str) -> dict[str, Any]:
    """The accelerator and what its kernels are compiled with; a CPU is described by `machine`."""
    import torch

    if device != "cuda":
        return {"device": "cpu"}
    return {
        "device": "cuda",
        "gpu": torch.cuda.get_device_name(),
        "gpu_memory_bytes": torch.cuda.get_device_properties(0).total_memory,
        "cuda": torch.version.cuda,
    }


def gpu_parser(doc: str) -> argparse.ArgumentParser:
    """Return a parser of the arguments that benchmarks on a GPU have in common."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: proves the script")
    parser.add_argument("--profile", action="store_true", help="show the longest kernels")
    add_commit(parser)
    return parser


def add_commit(parser: argparse.ArgumentParser) -> None:
    """Add the argument that `facts_of` reads."""
    parser.add_argument("--commit", help="the commit measured, where there is no git")


def facts_of(arguments: argparse.Namespace, packages: Iterable[str]) -> dict[str, Any]:
    """Facts of the machine, with the commit that was named where there is no git."""
    named = {"commit": arguments.commit} if arguments.commit else {}
    return machine(packages) | named


def write_result(name: str, result: dict[str, Any]) -> Path:
    """One JSON file per claim, and the same as the last line printed."""
    RESULTS_DIR.mkdir(parents=True, exist_ok=True)
    path = RESULTS_DIR / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return path
