"""Energy-based fine-tuning is what its formulas say: energies, loss and gradient of an update.

The reference is transformers in float64, one row at a time, with loops written from the paper: no
packing, no sharing, no tree of blocks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support import tiny_rl
from transformers import AutoModelForCausalLM

from homeostat.config import RunConfig
from homeostat.data.inputs import prepare_prompt_part
from homeostat.data.loader import micro_batches
from homeostat.data.tokenizer import load_tokenizer
from homeostat.ops.branches import Branches
from homeostat.run.learning.energies import scored_groups, truth_rows
from homeostat.run.learning.updates import build_update, step_advantages, step_rows
from homeostat.train.build import local_trainer
from homeostat.train.cores import PLAIN
from homeostat.train.forward import prompt_lengths
from homeostat.train.local import LocalTrainer
from homeostat.train.runtime import resolve_runtime
from homeostat.types import Completion, Role, RolloutGroup, Sample, Segment, StopReason

SAMPLES, LENGTH, TEMPERATURE = 4, 3, 0.7
COEFFICIENTS = {"alignment_coefficient": 0.8, "diversity_coefficient": 1.3}
LOSSES = {"rl_coefficient": 0.9, "ce_coefficient": 0.2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ebft")
    start = tiny_rl.config(made)
    trainer = local_trainer(start.for_trainer, resolve_runtime(start, kept=PLAIN))
    trainer.export(Role.POLICY, made / "pretrained", start.for_export)
    rng = np.random.default_rng(0)
    lines = [json.dumps({"text": "".join(rng.choice(list("0123456789>"), 30))}) for _ in range(3)]
    (made / "texts.jsonl").write_text("\n".join(lines))
    return made


def config_of(folder: Path, mode: str, *changes: str) -> RunConfig:
    ebft = {"feature_layers": [0.5, 1.0], **COEFFICIENTS, **LOSSES, "mode": mode}
    # Whitening has a test of its own: it would magnify the rounding of features.
    ebft["whitening"] = False
    data = {"max_length": 64}
    if mode == "strided":
        ebft |= {"stride": 2, "context_length": 5, "generate_length": LENGTH}
        data["train"] = [{"type": "text", "path": str(folder / "texts.jsonl")}]
    return tiny_rl.config(
        folder,
        *changes,
        algorithm={"type": "ebft", "correction": None},
        model={
            "path": str(folder / "pretrained"),
            "init": "pretrained",
            "tokenizer": str(folder / "model"),
        },
        data=data,
        rewards=None,
        ebft=ebft,
        rollout={"samples_per_prompt": SAMPLES, "temperature": TEMPERATURE, "max_new_tokens": 8}
        | ({"max_new_tokens": LENGTH} if mode == "strided" else {}),
        trainer={"max_tokens_per_device": 4096},
    )


def random_groups(config: RunConfig, rng: np.random.Generator) -> list[RolloutGroup]:
    """Samples of random tokens: of the anchors of two texts, or of three prompts."""
    prompts = prepare_prompt_part(config.for_inputs, load_tokenizer(config.model), "train")
    rows = range(2) if config.is_strided else range(3)
    asked = [prompts.asked(number) for row in rows for number in prompts.drawn(row)]
    groups = []
    for prompt in asked:
        sizes = [LENGTH] * SAMPLES if config.is_strided else rng.integers(1, 6, SAMPLES)
        tokens = [rng.integers(3, 12, size) for size in sizes]
        # Copies occur, and must be alike.
        tokens[1] = tokens[0]
        samples = [
            Sample(
                Completion(
                    f"{prompt.prompt_id}/{number}",
                    (Segment(tokens_T, np.zeros(len(tokens_T), np.float32), 0),),
                    StopReason.LENGTH,
                ),
                "",
                {},
                None,
            )
            for number, tokens_T in enumerate(tokens)
        ]
        groups.append(RolloutGroup(prompt, tuple(samples)))
    return groups


@dataclass
class Wanted:
    energies: list[float]
    loss: float
    gradient: dict[str, torch.Tensor]


def expected(config: RunConfig, groups: list[RolloutGroup], folder: Path) -> Wanted:
    """The whole update by loops in float64."""
    model = AutoModelForCausalLM.from_pretrained(
        folder / "pretrained", dtype=torch.float64, attn_implementation="eager"
    )
    ebft, energies = config.ebft, []
    loss = torch.zeros((), dtype=torch.float64)
    num_samples = sum(len(group.samples) for group in groups)
    fixed = config.rollout.max_new_tokens
    for group in groups:
        before, texts = group.prompt.tokens_T, [s.completion.tokens_T for s in group.samples]
        with torch.no_grad():
            truth = features(model, before, group.prompt.reference_T)
            phi = [features(model, before, text_T) for text_T in texts]
        n = len(phi)
        align = [2 * float(x @ truth / (x.norm() * truth.norm())) for x in phi]
        div = [sum(2 / (n - 1) * float(phi[i] @ phi[j]) for i in range(n) if i != j)
               for j in range(n)]  # fmt: skip
        a, d = ebft.alignment_coefficient, ebft.diversity_coefficient
        for j, text_T in enumerate(texts):
            energies.append(a * align[j] - d * div[j])
            others = [i for i in range(n) if i != j]
            pairs = [2 * float(phi[i] @ phi[k]) for i in others for k in others if i != k]
            baseline = a * np.mean([align[i] for i in others]) - d * np.mean(pairs)
            logp = log_probs(model, before, text_T, TEMPERATURE)
            advantage = energies[-1] - baseline
            # The policy is the one that sampled: the ratio is 1, and its gradient that of logp.
            ratio = (logp - logp.detach()).exp()
            loss = loss - ebft.rl_coefficient * advantage * ratio.sum() / (num_samples * fixed)
    truths = imitated(config, groups)
    nll = torch.cat([-log_probs(model, before, text_T, 1.0) for before, text_T in truths])
    loss = loss + ebft.ce_coefficient * nll.mean()
    loss.backward()
    gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Wanted(energies, float(loss.detach()), gradient)


def imitated(config: RunConfig, groups: list[RolloutGroup]) -> list[tuple]:
    if not config.is_strided:
        return [(group.prompt.tokens_T, group.prompt.reference_T) for group in groups]
    whole: dict[int, np.ndarray] = {}
    for group in groups:
        text_T = np.concatenate([group.prompt.tokens_T, group.prompt.reference_T])
        whole[group.prompt.columns["text"]] = text_T
    first = config.ebft.context_length
    return [(text_T[:first], text_T[first:]) for text_T in whole.values()]


def features(model, before_T, text_T) -> torch.Tensor:
    tokens = torch.from_numpy(np.concatenate([before_T, text_T]))[None]
    states = model(tokens, output_hidden_states=True).hidden_states
    layers = [states[layer][0, -1] for layer in (1, 2)]
    return torch.cat([x / x.norm() for x in layers]) / len(layers) ** 0.5


def log_probs(model, before_T, text_T, temperature: float) -> torch.Tensor:
    tokens = torch.from_numpy(np.concatenate([before_T, text_T]))
    logits = model(tokens[None]).logits[0, len(before_T) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, tokens[len(before_T) :, None])[:, 0]


def updated(config: RunConfig, groups: list[RolloutGroup]) -> tuple[LocalTrainer, list, float]:
    """The trainer with the update's gradient, the energies and the loss; and whether as a tree."""
    trainer = local_trainer(config.for_trainer, resolve_runtime(config, kept=PLAIN))

    def run(role, rows, work, *, step):
        batches = micro_batches(rows, config.trainer, nested=config.is_strided)
        return batches, work(batches)

    scored, energies = scored_groups(groups, config.energy, trainer=trainer, run=run, step=1)
    rows = step_rows(scored, config.for_learning)
    advantages = step_advantages(rows, config.for_learning, penalty_ST=None, energies=energies)
    built = build_update(
        rows,
        advantages,
        chosen=list(range(len(rows.rows))),
        config=config.for_learning,
        sizes=config.trainer,
        kl_coefficient=None,
        step=1,
        epoch=0,
        truth=truth_rows(scored, config.energy, first_id=len(rows.rows)),
    )
    assert built.plan is not None
    for batch in built.plan.micro_batches:
        parts = (batch.tokens_N, batch.lengths_B, prompt_lengths(batch))
        tree = Branches.find(*parts, device=torch.device("cpu"))
        assert (tree is not None) == config.is_strided
    trainer.accumulate(Role.POLICY, built.plan.micro_batches, built.plan.loss, step=1)
    assert energies is not None
    loss = trainer.pending(Role.POLICY).loss
    return trainer, energies.energy_S.tolist(), loss


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        ("structured", ()),
        ("strided", ("trainer.gradient_checkpointing=true", "trainer.max_tokens_per_device=170")),
        pytest.param("structured", ("trainer.share_prompts=false",), marks=pytest.mark.slow),
        pytest.param("strided", (), marks=pytest.mark.slow),
        pytest.param("strided", ("trainer.share_prompts=false",), marks=pytest.mark.slow),
    ],
)
def test_an_update_is_that_of_the_formulas_in_float64(
    mode: str, changes: tuple[str, ...], folder: Path
) -> None:
    config = config_of(folder, mode, *changes)
    groups = random_groups(config, np.random.default_rng(7))
    want = expected(config, groups, folder)
    trainer, energies, loss = updated(config, groups)
    assert energies == pytest.approx(want.energies, abs=2e-5)
    assert loss == pytest.approx(want.loss, abs=1e-5)
    training = trainer.roles[Role.POLICY].training
    assert training is not None
    assert training.params.keys() == want.gradient.keys()
    largest = max(float(grad.abs().max()) for grad in want.gradient.values())
    assert largest > 1e-3
    for name, param in training.params.items():
        assert param.grad is not None
        torch.testing.assert_close(
            param.grad.double(), want.gradient[name], rtol=0, atol=1e-4 * largest
        )
