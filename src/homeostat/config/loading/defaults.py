"""Fill in defaults that depend on the method, once, when a recipe is loaded.

A key that is left out is null in its class, but has a value in the config that a run works with;
`config.json` and `check` show it. The guide gives the reasons and sources
(docs/guide/reinforcement_learning.md, "Defaults that depend on the method").

    trainer.lr                       2e-5 SFT, 1e-6 RL and most preference algorithms (each names
                                     its own), 1e-5 reward models; ten times as much for an
                                     adapter
    preference.beta                  0.1; 2 for simpo
    trainer.optimizer.weight_decay   0.01; none on an adapter
    critic                           with algorithm.type=ppo: its defaults
    critic.lr                        1e-5; ten times as much for an adapter
    critic.optimizer.weight_decay    as trainer.optimizer.weight_decay
    eval.sampling.temperature        0 (greedy) for one sample; for several, as in training
    rollout.max_new_tokens           512; ebft.generate_length where text is continued in strides
"""

from __future__ import annotations

from homeostat.config.algorithm import PpoConfig
from homeostat.config.critic import CriticConfig
from homeostat.config.optimizer import AnyOptimizer
from homeostat.config.preference import PreferenceAlgorithm
from homeostat.config.reward_model import RewardModelConfig
from homeostat.config.run import RunConfig

SFT_RATE = 2e-5
RL_RATE = 1e-6
ADAPTER_FACTOR = 10.0
CRITIC_RATE = 1e-5
WEIGHT_DECAY = 0.01


def with_defaults(config: RunConfig) -> RunConfig:
    """Return the config with a value for every key whose default depends on the method."""
    trainer = config.trainer
    trainer = trainer.model_copy(update={"optimizer": _decayed(trainer.optimizer, config)})
    if trainer.lr is None:
        trainer = trainer.model_copy(update={"lr": _rate(config)})
    config = config.model_copy(update={"trainer": trainer, "critic": _critic(config)})
    if config.is_strided and "max_new_tokens" not in config.rollout.model_fields_set:
        sized = config.rollout.model_copy(update={"max_new_tokens": config.ebft.generate_length})
        config = config.model_copy(update={"rollout": sized})
    if isinstance(config.algorithm, PreferenceAlgorithm) and config.preference.beta is None:
        shared = config.preference.model_copy(update={"beta": config.algorithm.beta})
        config = config.model_copy(update={"preference": shared})
    sampling = config.eval.sampling
    # Without held-out prompts nothing is sampled, so the key stays null.
    if sampling.temperature is None and config.is_rl and config.has_validation:
        chosen = sampling.model_copy(update={"temperature": _eval_temperature(config)})
        config = config.model_copy(
            update={"eval": config.eval.model_copy(update={"sampling": chosen})}
        )
    return config


def _rate(config: RunConfig) -> float:
    rate = RL_RATE if config.is_rl else SFT_RATE
    if isinstance(config.algorithm, PreferenceAlgorithm | RewardModelConfig):
        rate = config.algorithm.lr
    return _for_adapter(rate, config)


def _for_adapter(rate: float, config: RunConfig) -> float:
    return rate if config.lora is None else round(rate * ADAPTER_FACTOR, 12)


def _decayed(optimizer: AnyOptimizer, config: RunConfig) -> AnyOptimizer:
    if optimizer.weight_decay is not None:
        return optimizer
    decay = WEIGHT_DECAY if config.lora is None else 0.0
    return optimizer.model_copy(update={"weight_decay": decay})


def _critic(config: RunConfig) -> CriticConfig | None:
    """Return the critic of PPO. One that another algorithm has is refused elsewhere."""
    if not isinstance(config.algorithm, PpoConfig):
        return config.critic
    critic = config.critic or CriticConfig()
    chosen = {"optimizer": _decayed(critic.optimizer, config)}
    rate = _for_adapter(CRITIC_RATE, config) if critic.lr is None else critic.lr
    epochs = critic.epochs or config.trainer.epochs_per_step
    return critic.model_copy(update={**chosen, "lr": rate, "epochs": epochs})


def _eval_temperature(config: RunConfig) -> float:
    sampling = config.eval.sampling
    is_drawn = sampling.samples_per_prompt > 1 or sampling.top_p < 1 or sampling.top_k is not None
    return config.rollout.temperature if is_drawn else 0.0
