"""Cases of the keys that spread the trainer over ranks."""

from __future__ import annotations

import os
import re

import pytest
from tests.support import ranks
from tests.support.every_key.workshop import (
    Case,
    Run,
    Workshop,
    all_of,
    assert_same,
    metric,
    names_the_default,
    refuses,
    shows,
)

from homeostat.errors import ConfigError
from homeostat.train import sharded

ALONE = ("cluster={type: torchrun, processes: 1}", "trainer.backend={type: fsdp}")
TWO_RANKS = (*ALONE, "cluster.processes=2")
HYBRID = "trainer.backend={type: fsdp, shard: hybrid, replicas: 2}"
NO_PATIENCE = "cluster={type: torchrun, processes: 1, timeout_s: 0.005, max_restarts: 0}"
OFFLOADED = "trainer.backend={type: fsdp, offload_optimizer: true, offload_params: true}"
DIVIDED = "trainer.backend.expert_parallel_size=2"
PROBE = "tests.support.every_key.rank_probe:make_trainer"
WORD_PROBE = "tests.support.every_key.rank_probe:make_telling_trainer"


def shards(run: Run) -> list[str]:
    """Files that the model's weights are in."""
    newest = run.checkpoints.path(run.checkpoints.steps()[-1])
    return sorted(file.name for file in newest.glob("model.*"))


def of(num_shards: int) -> list[str]:
    return [f"model.{rank}of{num_shards}.safetensors" for rank in range(num_shards)]


WHOLE = ["model.safetensors"]


def gathers(run: Run) -> list[int]:
    """All-gathers of each update's forward and backward pass, which the probe counts."""
    log = (run.dir / "workers.log").read_text()
    return [int(count) for count in re.findall(r"\[trainer 0\] all-gathers: (\d+)", log)]


def layers_are_gathered_again_for_the_backward_pass(workshop: Workshop) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sharded, "FACTORY", PROBE)
        one_step = (*TWO_RANKS, "trainer.max_steps=1")
        again = workshop.again(*one_step)
        kept = workshop.again(*one_step, "trainer.backend.reshard_after_forward=false")
    # Two layers and the rest of the model; the layers once more.
    assert gathers(kept) == [3]
    assert gathers(again) == [5]


def told(run: Run, what: str) -> list[str]:
    """Return what the probe of rank 0 prints in each update."""
    log = (run.dir / "workers.log").read_text()
    return re.findall(rf"\[trainer 0\] {what}: (\w+)", log)


def ranks_keep_weights_and_state_in_host_memory(workshop: Workshop) -> None:
    """Host and device are both the CPU: only the path is another one, and the bits are the same."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sharded, "FACTORY", PROBE)
        plain = workshop.run(*TWO_RANKS)
        state = workshop.again(*TWO_RANKS, "trainer.backend.offload_optimizer=true")
        both = workshop.again(*TWO_RANKS, OFFLOADED)
    assert told(state, "streamed state") == told(both, "streamed state") == ["True"] * 3
    assert told(state, "offloaded weights") == ["False"] * 3
    assert told(both, "offloaded weights") == ["True"] * 3
    for run in (state, both):
        assert_same(plain, run, "losses")


def experts_are_divided_over_ranks(workshop: Workshop) -> None:
    experts = ("model.path=experts", *TWO_RANKS)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sharded, "FACTORY", PROBE)
        divided = workshop.again(*experts, DIVIDED)
    # In each of two layers: counts, tokens there and back, and both once more for the gradient.
    assert told(divided, "all-to-alls") == ["10"] * 3
    assert_same(workshop.run(*experts), divided, "losses")


def sharded_run_is_the_local_one(workshop: Workshop) -> None:
    one, two = workshop.run(), workshop.run(*TWO_RANKS)
    assert (shards(one), shards(two)) == (WHOLE, of(2))
    assert_same(one, two, "losses")


def shares_rows(key: str) -> Case:
    """Two ranks make one data group: one micro-batch at a time, and the losses of one device."""

    def case(workshop: Workshop) -> None:
        one = workshop.run()
        apart, shared = workshop.run(*TWO_RANKS), workshop.run(*TWO_RANKS, f"{key}=2")
        batches = metric("data/micro_batches")
        assert (batches(apart), batches(shared)) == ([2] * 3, [1] * 3)
        assert_same(one, shared, "losses")
        refuses(f"{key}=3", "no multiple of", base=TWO_RANKS)(workshop)

    return case


def a_rank_that_is_late_is_named_and_none_is_left(workshop: Workshop) -> None:
    """No update is that fast; a busy machine may not even let the ranks meet in that time."""
    before = ranks.descendants(os.getpid())
    refuses(NO_PATIENCE, r"within 0\.005 s|timed out after 5ms", base=ALONE)(workshop)
    assert ranks.all_gone(ranks.descendants(os.getpid()) - before, timeout_s=0.0)


def variables_reach_the_ranks(base: tuple[str, ...]) -> Case:
    def case(workshop: Workshop) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sharded, "FACTORY", WORD_PROBE)
            run = workshop.again(*base, "trainer.max_steps=1", "cluster.env={SOME_WORD: hello}")
        assert "[trainer 0] SOME_WORD is hello" in (run.dir / "workers.log").read_text()
        with pytest.raises(ConfigError, match="MASTER_ADDR is set by the launcher"):
            workshop.again(*base, "cluster.env={MASTER_ADDR: here}")

    return case


CASES: dict[str, Case] = {
    "cluster.type (in_process)": all_of(
        names_the_default("cluster={type: in_process}"),
        refuses("trainer.backend={type: fsdp}", "cluster.type=in_process there are no ranks"),
    ),
    "cluster.type (torchrun)": refuses(ALONE[0], "the ranks would have nothing to do"),
    "cluster.processes (torchrun)": all_of(
        shows("cluster.processes=2", shards, was=of(1), now=of(2), base=ALONE),
        shows("cluster.processes=2", metric("data/micro_batches"), was=[1] * 3, now=[2] * 3,
              base=ALONE),
    ),
    "cluster.nodes (torchrun)": all_of(
        refuses("cluster.nodes=3", r"2 = 0 x 3 \+ 2", base=TWO_RANKS),
        refuses(
            "trainer.backend.sequence_parallel_size=2",
            "must be on one machine",
            base=(*TWO_RANKS, "cluster.nodes=2"),
        ),
    ),
    "cluster.start_timeout_s (torchrun)": refuses(
        "cluster.start_timeout_s=0.05", r"within 0\.05 s", base=ALONE
    ),
    "cluster.max_restarts (torchrun)": refuses(
        NO_PATIENCE, "restarted 0 times in a row", base=ALONE
    ),
    "cluster.timeout_s (torchrun)": a_rank_that_is_late_is_named_and_none_is_left,
    "cluster.backend (torchrun)": refuses("cluster.backend=nccl", "NCCL connects GPUs", base=ALONE),
    "cluster.env (torchrun)": variables_reach_the_ranks(ALONE),
    "trainer.backend.type (local)": names_the_default("trainer.backend={type: local}"),
    "trainer.backend.type (fsdp)": sharded_run_is_the_local_one,
    "trainer.backend.shard (fsdp)": shows(HYBRID, shards, was=of(2), now=of(1), base=TWO_RANKS),
    "trainer.backend.replicas (fsdp)": all_of(
        refuses("trainer.backend.replicas=2", "there are no replicas", base=TWO_RANKS),
        refuses("trainer.backend.replicas=3", "multiple of replicas 3", base=(*TWO_RANKS, HYBRID)),
    ),
    "trainer.backend.context_parallel_size (fsdp)": all_of(
        shares_rows("trainer.backend.context_parallel_size"),
        refuses(
            "trainer.share_prompts=true",
            "ring attention splits each whole row",
            base=(*TWO_RANKS, "trainer.backend.context_parallel_size=2"),
        ),
    ),
    "trainer.backend.sequence_parallel_size (fsdp)": all_of(
        shares_rows("trainer.backend.sequence_parallel_size"),
        refuses(
            "trainer.backend.sequence_parallel_size=3",
            r"4 query heads \(4 = 1 x 3 \+ 1\)",
            base=(*ALONE, "cluster.processes=3"),
        ),
    ),
    "trainer.backend.offload_optimizer (fsdp)": ranks_keep_weights_and_state_in_host_memory,
    "trainer.backend.offload_params (fsdp)": refuses(
        "trainer.backend.offload_params=true", "must be in host memory too", base=ALONE
    ),
    "trainer.backend.expert_parallel_size (fsdp)": all_of(
        refuses("trainer.backend.expert_parallel_size=3", "2 % 3 = 2", base=TWO_RANKS),
        refuses(DIVIDED, "has no experts", base=TWO_RANKS),
        experts_are_divided_over_ranks,
    ),
    "trainer.backend.reshard_after_forward (fsdp)": layers_are_gathered_again_for_the_backward_pass,
}  # fmt: skip
