"""Cases of the critic's keys: PPO on saved rollouts, where only the key differs."""

from __future__ import annotations

from safetensors.torch import load_file
from tests.support.every_key.optimizers import cases_of
from tests.support.every_key.rl_workshop import SAVED, samples
from tests.support.every_key.trainer import MORE, PLAIN, WARMED, shares_of_peak
from tests.support.every_key.workshop import (
    Case,
    Run,
    Workshop,
    all_of,
    alters,
    metric,
    refuses,
    shows,
    weight_bytes,
)

from homeostat.config.optimizer import AnyOptimizer
from homeostat.config.run import RunConfig

PPO = (*SAVED, "algorithm={type: ppo}", "critic={lr: 0.01}")
# In the second step the first one's moments count, and the values are no longer 0.
TWO_STEPS = (*PPO, "trainer.max_steps=2")


def critic_bytes(run: Run) -> dict[str, bytes]:
    store = run.checkpoints
    tensors = load_file(store.path(store.steps()[-1]) / "critic.safetensors")
    return {name: tensor.contiguous().numpy().tobytes() for name, tensor in tensors.items()}


def only_the_critic(change: str) -> Case:
    """In the first step the critic learns otherwise, and the policy as before."""

    def case(workshop: Workshop) -> None:
        before, after = workshop.run(*PPO), workshop.run(*PPO, change)
        assert critic_bytes(before) != critic_bytes(after)
        assert weight_bytes(before) == weight_bytes(after)

    return case


def advantages(run: Run) -> list[float]:
    return samples(run).advantage_S.tolist()


def has_export(run: Run) -> bool:
    store = run.checkpoints
    return (store.path(store.steps()[-1]) / "hf_critic" / "config.json").is_file()


def scheduled(kind: str, change: str, *, was: list[float], now: list[float]) -> Case:
    """Four updates of a schedule of the critic, and again with one of its keys changed."""
    assert was != now, f"{change}: a change that shows nothing proves nothing"
    base = (*PPO, "trainer.max_steps=4", f"critic.schedule={{type: {kind}{MORE.get(kind, '')}}}")

    def case(workshop: Workshop) -> None:
        for overrides, wanted in ((base, was), ((*base, f"critic.schedule{change}"), now)):
            config = workshop.config(*overrides)
            assert config.critic is not None
            trained = config.critic.trained_as(config.trainer)
            rates = [trained.learning_rate(step, 4) for step in range(1, 5)]
            assert shares_of_peak(rates, config.model_copy(update={"trainer": trained})) == wanted

    return case


def the_critic_asks_for_its_rate(workshop: Workshop) -> None:
    run = workshop.run(*TWO_STEPS, "critic.schedule={type: linear, warmup_steps: 0}")
    assert run.config.critic is not None
    trained = run.config.critic.trained_as(run.config.trainer)
    rates = [trained.learning_rate(step, 2) for step in (1, 2)]
    assert run.metric("critic/lr") == rates
    assert rates[0] != rates[1]
    assert run.metric("learning_rate") != rates


def schedule_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for kind, plain in PLAIN.items():
        for name, value in (("warmup_steps", "2"), ("warmup_share", "0.5")):
            case = scheduled(kind, f".{name}={value}", was=plain, now=WARMED[kind])
            cases[f"critic.schedule.{name} ({kind})"] = case
        other = "constant" if kind != "constant" else "linear"
        change = f"={{type: {kind}{MORE.get(kind, '')}}}"
        cases[f"critic.schedule.type ({kind})"] = all_of(
            scheduled(other, change, was=PLAIN[other], now=plain), the_critic_asks_for_its_rate
        )
    floors = {
        "linear": [1.0, 1.0, 0.833333, 0.666667],
        "cosine": [1.0, 1.0, 0.875, 0.625],
        "wsd": [1.0, 1.0, 1.0, 0.833333],
    }
    for kind, now in floors.items():
        case = scheduled(kind, ".min_lr_share=0.5", was=PLAIN[kind], now=now)
        cases[f"critic.schedule.min_lr_share ({kind})"] = case
    cases["critic.schedule.decay_share (wsd)"] = scheduled(
        "wsd", ".decay_share=1.0", was=PLAIN["wsd"], now=PLAIN["linear"]
    )
    return cases


def optimizer_of(config: RunConfig) -> AnyOptimizer:
    assert config.critic is not None
    return config.critic.trained_as(config.trainer).optimizer


TYPES: dict[str, Case] = {
    "adamw": refuses("critic.optimizer.type=sgd", r"optimizer\.type"),
    "muon": alters("critic.optimizer.type=muon", critic_bytes, base=TWO_STEPS),
    "adafactor": alters("critic.optimizer.type=adafactor", critic_bytes, base=TWO_STEPS),
}
CASES: dict[str, Case] = {
    **cases_of(optimizer_of, "critic.optimizer", TYPES, *PPO),
    "critic.path": only_the_critic("critic.path=other"),
    "critic.head_init": alters("critic.head_init=random", metric("critic/value_mean"), base=PPO),
    "critic.lr": only_the_critic("critic.lr=0.003"),
    "critic.max_grad_norm": alters("critic.max_grad_norm=0.00001", critic_bytes, base=TWO_STEPS),
    "critic.clip": shows(
        "critic.clip=null",
        lambda run: run.metric("critic/clipped_share")[0] > 0,
        was=True,
        now=False,
        base=(*PPO, "critic.epochs=4", "critic.lr=0.1", "critic.clip=0.001"),
    ),
    "critic.gamma": alters("critic.gamma=0.5", metric("critic/return_mean"), base=PPO),
    "critic.gae_lambda": all_of(
        alters("critic.gae_lambda=0.5", advantages, base=PPO),
        alters("critic.gae_lambda=0.5", critic_bytes, base=PPO),
    ),
    "critic.bootstrap_truncated": alters(
        "critic.bootstrap_truncated=true",
        metric("critic/return_mean"),
        base=(*PPO, "critic.head_init=random"),
    ),
    "critic.warmup_steps": shows(
        "critic.warmup_steps=1",
        lambda run: run.steps_with("grad_norm"),
        was=[1, 2],
        now=[2],
        base=TWO_STEPS,
    ),
    "critic.epochs": only_the_critic("critic.epochs=3"),
    "critic.export": shows(
        "critic.export=true",
        has_export,
        was=False,
        now=True,
        base=(*PPO, "checkpoint.export=final"),
        same="bits",
    ),
    **schedule_cases(),
}
