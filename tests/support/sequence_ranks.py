"""Checks of trainers whose ranks share micro-batches, beside a local trainer of the same recipe.

Like tests/support/fsdp_ranks.py, whose parts they use: a process runs all checks of its number of
ranks. Run as a module: rank, size, folder, names.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support import fsdp_ranks, tiny_rl
from tests.support.fsdp_ranks import (
    POLICY,
    SMOOTH,
    VOCABULARY,
    Place,
    assert_same_gradients,
    assert_same_report,
    assert_same_weights,
    batches_of,
    local,
    policy_rows,
    random_rows,
    sft_spec,
)
from tests.support.tiny_moe import with_routes

from homeostat.algorithms.policy import policy_spec
from homeostat.algorithms.value import value_spec
from homeostat.columns import KEPT_IDS, Ragged
from homeostat.config import RunConfig
from homeostat.data.dealing import deal, in_order
from homeostat.train.fsdp.trainer import FsdpTrainer
from homeostat.train.local import LocalTrainer
from homeostat.types import Computed, LossSpec, Outputs, Role, StepPlan, TokenRow, TrainBatch

# Backends by the number of ranks: (context_parallel_size, sequence_parallel_size).
SPLITS = {2: ((2, 1), (1, 2)), 4: ((4, 1), (1, 4), (2, 2), (2, 1), (1, 2))}
EVERY_KIND = {2: ((2, 1), (1, 2)), 4: ((2, 2),)}


# The rows of these tests are made, not read.
REWARD_MODEL = {"type": "reward_model"}
PAIRS = {"train": [{"type": "preference", "path": "rows.jsonl"}], "max_length": 128}


def backend(cp: int, sp: int) -> dict[str, Any]:
    return {"type": "fsdp", "context_parallel_size": cp, "sequence_parallel_size": sp}


def rl_config(place: Place, cp: int, sp: int, **algorithm: Any) -> RunConfig:
    trainer = {"backend": backend(cp, sp), "optimizer": SMOOTH, "max_grad_norm": None}
    return tiny_rl.config(
        place.folder,
        model={"path": str(place.folder / "llama"), "init": "pretrained"},
        algorithm=algorithm or {"type": "grpo", "kl": {"coefficient": 0.1}},
        trainer={**trainer, "max_steps": 2, "threads": 1, "device": "cpu"},
        cluster={"type": "torchrun", "processes": place.size, "timeout_s": 60},
        engine={"type": "native", "own_process": True},
    )


def dealt(place: Place, config: RunConfig, batches: Sequence[TrainBatch]) -> list:
    return deal(batches, config.mesh)[place.rank]


def assert_parity(
    place: Place,
    config: RunConfig,
    *,
    steps: int = 1,
    rows: Callable[[int], list[TokenRow]] = lambda step: random_rows(seed=step),
    spec: Callable[[list[TokenRow]], LossSpec] = sft_spec,
    rel: float = 1e-6,
) -> tuple[FsdpTrainer, LocalTrainer]:
    """Loss, gradient, report and weights over some updates."""
    ranks, whole = place.trainer(config), local(config)
    for step in range(1, steps + 1):
        some = rows(step)
        batches = batches_of(some)
        ranks.accumulate(POLICY, dealt(place, config, batches), spec(some), step=step)
        whole.accumulate(POLICY, batches, spec(some), step=step)
        if step == 1:
            assert_same_gradients(ranks, whole, rel=10 * rel)
        found, expected = (t.apply(POLICY, step=step, learning_rate=1e-2) for t in (ranks, whole))
        assert_same_report(found, expected, rel=rel)
        told = ranks.ranks.gather((found.loss, found.grad_norm))
        assert len(set(told)) == 1, told
    assert_same_weights(ranks, whole, rtol=10 * rel, atol=10 * rel)
    return ranks, whole


def check_sft(place: Place) -> None:
    """Also with fewer key heads than ranks, and tied embeddings."""
    for cp, sp in SPLITS[place.size]:
        model = "llama_tied" if sp == 4 or cp == 2 else "qwen3"
        assert_parity(place, place.config(model, backend=backend(cp, sp)), steps=2)


def check_checkpointed_activations_and_dropout(place: Place) -> None:
    for cp, sp in EVERY_KIND[place.size]:
        how = {"trainer": {"gradient_checkpointing": True}, "backend": backend(cp, sp)}
        assert_parity(place, place.config("qwen3", **how))
        assert_parity(place, place.config(lora={"rank": 3, "dropout": 0.4}, **how))
        how["trainer"] = {"gradient_checkpointing": "selective"}
        assert_parity(place, place.config("qwen3", **how))


def check_policy_loss(place: Place) -> None:
    """Columns per token, entropies, sampled sequences whole, and prompts that rows share."""
    for cp, sp in SPLITS[place.size]:
        config = rl_config(place, cp, sp)
        for bonus in (0.0, 0.02):
            how = {"denominator": 40.0, "temperature": 0.9, "kl_coefficient": 0.1}
            made = policy_spec(config.algorithm, **how)
            made = replace(made, params={**made.params, "entropy_bonus": bonus})
            ranks, whole = assert_parity(
                place, config, rows=policy_rows, spec=lambda _, made=made: made
            )
        rows = policy_rows(5)
        batches = batches_of(rows)
        mine = ranks.measure(POLICY, dealt(place, config, batches), made)
        expected = whole.measure(POLICY, batches, made)
        if config.mesh.num_data_groups == 1:
            for name, value in {**expected.sums, **expected.maxima}.items():
                found = {**mine.sums, **mine.maxima}[name]
                assert found == pytest.approx(value, rel=1e-4, abs=1e-5), name


def check_sequence_ratios(place: Place) -> None:
    """GSPO needs whole rows, which no rank has alone."""
    for cp, sp in EVERY_KIND[place.size]:
        config = rl_config(place, cp, sp, type="gspo", kl={"coefficient": 0.1})
        how = {"denominator": 8.0, "temperature": 1.0, "kl_coefficient": 0.1}
        made = policy_spec(config.algorithm, **how)
        assert_parity(place, config, rows=policy_rows, spec=lambda _, made=made: made)


def check_kept_sets_and_truth(place: Place) -> None:
    """Some tokens were drawn from a part of the vocabulary, and some rows were not sampled."""

    def rows(step: int) -> list[TokenRow]:
        return [_drawn_from_some(row) for row in policy_rows(step)]

    for cp, sp in EVERY_KIND[place.size]:
        config = rl_config(place, cp, sp)
        how = {"denominator": 40.0, "temperature": 0.9, "kl_coefficient": 0.1}
        made = replace(policy_spec(config.algorithm, **how), name="policy_and_truth")
        assert_parity(place, config, rows=rows, spec=lambda _, made=made: made)


def _drawn_from_some(row: TokenRow) -> TokenRow:
    rng = np.random.default_rng(row.row_id)
    is_truth = row.row_id % 3 == 0
    sets = [
        sorted({int(token), *rng.integers(0, VOCABULARY, 5).tolist()})
        if weight and not is_truth and rng.random() < 0.7
        else []
        for token, weight in zip(row.tokens_T, row.weights_T, strict=True)
    ]
    columns = {"truth": np.full(len(row), is_truth, dtype=np.float32)}
    kept = {KEPT_IDS: Ragged.of(sets, np.int32)}
    return replace(row, columns={**row.columns, **columns, **kept})


def check_experts(place: Place) -> None:
    """Their load, losses of routers, and replayed routes; a token's copies are never counted."""
    for cp, sp in EVERY_KIND[place.size]:
        for model in ("qwen3_moe", "dots1"):
            config = place.config(
                model,
                backend=backend(cp, sp),
                trainer={"gradient_checkpointing": model == "dots1"},
            )
            ranks, whole = place.trainer(config), local(config)
            policy = whole.roles[POLICY].model
            rows = with_routes(policy, random_rows(), "routed_experts", "routed_weights", shift=1)
            for some in (random_rows(), rows):
                batches = batches_of(some)
                loads = computed(place, config, ranks, POLICY, batches, Outputs(load=True))
                wanted = whole.forward(POLICY, batches, Outputs(load=True))
                for one, other in zip(loads, wanted, strict=True):
                    np.testing.assert_array_equal(one.load_LE, other.load_LE)
                ranks.accumulate(POLICY, dealt(place, config, batches), sft_spec(some), step=1)
                whole.accumulate(POLICY, batches, sft_spec(some), step=1)
                assert_same_gradients(ranks, whole)
                reports = [t.apply(POLICY, step=1, learning_rate=0.0) for t in (ranks, whole)]
                assert_same_report(*reports)
                for name in ("replay_same", "replay_compared", "replay_replayed"):
                    assert reports[0].stats.get(name) == reports[1].stats.get(name)
                load, expected = (report.load for report in reports)
                assert load is not None
                assert expected is not None
                np.testing.assert_array_equal(load.load_LE, expected.load_LE)


def all_outputs(layers: tuple[int, ...], reducer: str) -> Outputs:
    return Outputs(logp=True, entropy=True, hidden=layers, reducer=reducer, temperature=0.7)


def computed(
    place: Place, config: RunConfig, trainer: FsdpTrainer, role: Role, batches: list, what: Outputs
) -> list[Computed]:
    mine = trainer.forward(role, dealt(place, config, batches), what)
    return in_order(trainer.ranks.gather(mine), config.mesh, count=len(batches))


def check_scores_and_hidden_states(place: Place) -> None:
    rows = [replace(row, weights_T=_last(len(row), 2)) for row in random_rows(5, seed=4)]
    batches = [TrainBatch.of(rows[:3]), TrainBatch.of(rows[3:])]
    for cp, sp in SPLITS[place.size]:
        config = place.config("qwen3", backend=backend(cp, sp))
        ranks, whole = place.trainer(config), local(config)
        reducers = ("mean_of_trained", "last_of_row", "mean_of_row", "concat_of_trained")
        for reducer in reducers:
            what = all_outputs((0, 1, 2), reducer)
            found = computed(place, config, ranks, POLICY, batches, what)
            for one, other in zip(found, whole.forward(POLICY, batches, what), strict=True):
                close = {"rtol": 1e-5, "atol": 1e-5}
                np.testing.assert_allclose(one.logp_M, other.logp_M, **close)
                np.testing.assert_allclose(one.entropy_M, other.entropy_M, **close)
                for layer, state in other.hidden.items():
                    np.testing.assert_allclose(one.hidden[layer], state, **close)


def _last(length: int, count: int) -> np.ndarray:
    return (np.arange(length) >= length - count).astype(np.float32)


def check_values_and_pairs(place: Place) -> None:
    """A critic's values of tokens, and a reward model's of whole rows."""
    for cp, sp in EVERY_KIND[place.size]:
        config = place.config("llama", backend=backend(cp, sp), algorithm=REWARD_MODEL, data=PAIRS)
        rows = [
            replace(row, columns={"label": np.full(len(row), row.row_id % 2, np.float32)})
            for row in random_rows(6, seed=2)
        ]
        batches = [TrainBatch.of(rows[:2]), TrainBatch.of(rows[2:])]
        ranks, whole = place.trainer(config), local(config)
        spec = LossSpec("bradley_terry", 3.0, {"centre": 0.01})
        for trainer, mine in ((ranks, dealt(place, config, batches)), (whole, batches)):
            trainer.accumulate(POLICY, mine, spec, step=1)
        assert_same_gradients(ranks, whole)
        values = np.random.default_rng(0).standard_normal
        tokens = [
            replace(
                row,
                columns={n: values(len(row)).astype(np.float32) for n in ("value", "return")},
            )
            for row in rows
        ]
        batches = [TrainBatch.of(tokens[:2]), TrainBatch.of(tokens[2:])]
        spec = value_spec(denominator=10.0, clip=0.2)
        for trainer, mine in ((ranks, dealt(place, config, batches)), (whole, batches)):
            trainer.discard(POLICY)
            trainer.accumulate(POLICY, mine, spec, step=1)
        assert_same_gradients(ranks, whole)
        assert_same_report(*(t.apply(POLICY, step=1, learning_rate=1e-2) for t in (ranks, whole)))
        found = computed(place, config, ranks, POLICY, batches, Outputs(value=True))
        for one, other in zip(
            found, whole.forward(POLICY, batches, Outputs(value=True)), strict=True
        ):
            np.testing.assert_allclose(one.value_M, other.value_M, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(one.value_B, other.value_B, rtol=1e-4, atol=1e-5)


def check_a_row_that_is_not_finite_is_found(place: Place) -> None:
    for cp, sp in EVERY_KIND[place.size]:
        config = place.config("qwen3", backend=backend(cp, sp))
        ranks, whole = place.trainer(config), local(config)
        rows = random_rows(seed=5)
        sick = replace(rows[4], weights_T=np.full(len(rows[4]), math.inf, dtype=np.float32))
        batches = batches_of([*rows[:4], sick, *rows[5:]])
        ranks.accumulate(POLICY, dealt(place, config, batches), sft_spec(rows), step=1)
        assert not ranks.apply(POLICY, step=1, learning_rate=1e-2).applied
        plan = StepPlan(1, 0, tuple(batches), sft_spec(rows))
        (bad, origin), (_, expected) = ranks.trace_nonfinite(plan), whole.trace_nonfinite(plan)
        assert [row.row_id for row in bad] == [sick.row_id]
        assert (origin.direction, origin.module) == (expected.direction, expected.module)


def check_a_token_that_is_not_finite_is_found(place: Place) -> None:
    """It is on one rank alone, which is not the first."""
    for cp, sp in EVERY_KIND[place.size]:
        config = place.config("qwen3", backend=backend(cp, sp))
        ranks, whole = place.trainer(config), local(config)
        rows = [replace(row, tokens_T=row.tokens_T % 90) for row in random_rows(3, seed=6)]
        rows[1] = replace(rows[1], tokens_T=np.append(rows[1].tokens_T[:-3], [96, 1, 2]))
        for trainer in (ranks, whole):
            embed = trainer.roles[POLICY].model.model.embed_tokens

            def spoil(module: torch.nn.Module, args: tuple, out: torch.Tensor) -> torch.Tensor:
                return out * torch.where(args[0] == 96, math.nan, 1.0)[:, None]

            embed.register_forward_hook(spoil, prepend=True)
        plan = StepPlan(1, 0, (TrainBatch.of(rows),), sft_spec(rows))
        (bad, origin), (_, expected) = ranks.trace_nonfinite(plan), whole.trace_nonfinite(plan)
        assert [row.row_id for row in bad] == [rows[1].row_id]
        assert (origin.direction, origin.module) == (expected.direction, expected.module)


def check_invariant_numerics_keep_their_bits(place: Place) -> None:
    """Heads are computed by themselves, so that exchanging them changes no bit."""
    at = {"numerics": "invariant"}
    config = place.config("qwen3", backend=backend(1, place.size), at=at)
    ranks, whole = place.trainer(config), local(config)
    batches, what = batches_of(random_rows(seed=3)), Outputs(logp=True)
    found = computed(place, config, ranks, POLICY, batches, what)
    for one, other in zip(found, whole.forward(POLICY, batches, what), strict=True):
        np.testing.assert_array_equal(one.logp_M, other.logp_M)


def check_going_on_over_another_mesh(place: Place) -> None:
    """Every mesh resumes what a local trainer saved, which resumes what each of them saves."""
    losses = json.loads((place.folder / "losses_of_local.json").read_text())
    for cp, sp in SPLITS[place.size]:
        config = place.config("narrow", backend=backend(cp, sp), trainer={"max_grad_norm": 1.0})
        folder = place.folder / "saved_by_local"
        for turn in range(2):
            ranks = place.trainer(config)
            ranks.load(folder)
            later = [_update(place, config, ranks, step) for step in (3, 4)]
            assert later == pytest.approx(losses[2:], rel=1e-6), (cp, sp, turn)
            ranks.load(folder)
            folder = place.folder / f"mesh_{cp}_{sp}_of_{place.size}"
            fsdp_ranks.save(place, ranks, folder)
        alone = local(config)
        alone.load(folder)
        found = [fsdp_ranks.update(place, alone, step=step).loss for step in (3, 4)]
        assert found == pytest.approx(losses[2:], rel=1e-6)


def _update(place: Place, config: RunConfig, trainer: FsdpTrainer, step: int) -> float:
    rows = random_rows(seed=step)
    trainer.accumulate(POLICY, dealt(place, config, batches_of(rows)), sft_spec(rows), step=step)
    return trainer.apply(POLICY, step=step, learning_rate=1e-2).loss


CHECKS: dict[str, Callable[[Place], None]] = {
    name.removeprefix("check_"): function
    for name, function in globals().items()
    if name.startswith("check_")
}

if __name__ == "__main__":
    rank, size, folder, *names = sys.argv[1:]
    here = Place(int(rank), int(size), Path(folder))
    torch.set_num_threads(1)
    result = fsdp_ranks.run_checks(here, names, CHECKS)
    (here.folder / f"result_{rank}_of_{size}.json").write_text(json.dumps(result))
