"""Find settings of mixing, filters and curricula that cannot work together or have no effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from homeostat.config.algorithm import EbftPolicyConfig, PolicyGradientConfig
from homeostat.config.curriculum import (
    AllFailedFilter,
    FunctionFilter,
    WeightSchedule,
    ZeroSpreadFilter,
    weight_at,
)
from homeostat.config.rewards import FunctionReward, RewardsConfig
from homeostat.config.run import RunConfig
from homeostat.errors import Problem


def find_mixing_conflicts(config: RunConfig) -> Iterator[Problem]:
    """Yield every conflict of the sources' names and weights, with its reason and remedy."""
    data = config.data
    for index, source in enumerate(data.validation):
        for name in sorted({"name", "weight"} & source.model_fields_set):
            yield Problem(
                f"data.validation.{index}.{name}",
                "this key is for sources of training rows only; an evaluation uses all held-out "
                "rows.",
                "Remove it.",
            )
    counts = Counter(source.name for source in data.train if source.name is not None)
    for index, source in enumerate(data.train):
        if source.name is not None and counts[source.name] > 1:
            yield Problem(
                f"data.train.{index}.name",
                f"{counts[source.name]} sources are named {source.name!r}, so metrics could not "
                "distinguish them.",
                "Give each another name.",
            )
        if data.is_mixed and source.weight is None:
            yield Problem(
                f"data.train.{index}.weight",
                "other sources have a weight, so this one needs one, too.",
                "Set it, for example to 1.0.",
            )
    if data.is_mixed:
        yield from _empty_steps(config)


def _empty_steps(config: RunConfig) -> Iterator[Problem]:
    """Refuse weights that are all 0 at some step."""
    weights = [source.weight for source in config.data.train if source.weight is not None]
    schedules = [weight for weight in weights if isinstance(weight, WeightSchedule)]
    # Between two points weights stay or are linear, so a step without any rows shows at a point.
    steps = sorted({1, *(point.step for one in schedules for point in one.points)})
    empty = [step for step in steps if not any(weight_at(w, step) > 0 for w in weights)]
    if empty:
        yield Problem(
            "data.train.0.weight",
            f"the weights of all sources are 0 at step {empty[0]}, so this step would have no "
            "rows.",
            "Set one of them above 0.",
        )


def find_late_points(config: RunConfig, *, total_steps: int) -> Iterator[Problem]:
    """Yield the points of weight schedules that the run does not reach."""
    for index, source in enumerate(config.data.train):
        if not isinstance(source.weight, WeightSchedule):
            continue
        late = [point.step for point in source.weight.points if point.step > total_steps]
        if late:
            yield Problem(
                f"data.train.{index}.weight.points",
                f"step {late[0]} comes after the last step of the run ({total_steps}), so its "
                "weight is never reached.",
                "Name earlier steps.",
            )


def find_filter_conflicts(config: RunConfig) -> Iterator[Problem]:
    """Yield every conflict of filters and curricula in RL, with its reason and remedy."""
    assert isinstance(config.algorithm, PolicyGradientConfig), "RL has an algorithm of RL"
    if isinstance(config.algorithm, EbftPolicyConfig):
        yield from _energy(config)
        return
    yield from _rounds(config)
    yield from _solved(config)
    rollout, dynamic = config.rollout, config.algorithm.dynamic_sampling
    labels = Counter(one.label for one in rollout.filters if isinstance(one, FunctionFilter))
    for index, one in enumerate(rollout.filters):
        if isinstance(one, ZeroSpreadFilter) and dynamic is not None:
            yield Problem(
                f"rollout.filters.{index}",
                "algorithm.dynamic_sampling is the same filter.",
                "Remove one of the two.",
            )
        if isinstance(one, FunctionFilter) and labels[one.label] > 1:
            yield Problem(
                f"rollout.filters.{index}.path",
                "another filter calls the same function, and their verdicts could not be "
                "distinguished.",
                "Call it once.",
            )
    curriculum = rollout.curriculum
    if curriculum is None:
        return
    if config.debug is not None and config.debug.rollouts is not None:
        yield Problem(
            "rollout.curriculum",
            "the prompts of debug.rollouts were already drawn, so a curriculum would have no "
            "effect.",
            "Remove it.",
        )
    if curriculum.difficulty is not None and "shuffle" in config.data.model_fields_set:
        yield Problem(
            "data.shuffle",
            "rollout.curriculum.difficulty draws prompts by their solve rate, so there is no order "
            "to shuffle.",
            "Remove one of the two.",
        )


def _energy(config: RunConfig) -> Iterator[Problem]:
    for name in ("filters", "max_rounds", "curriculum", "solved_by", "solved_at"):
        if name in config.rollout.model_fields_set:
            yield Problem(
                f"rollout.{name}",
                "ebft computes energies only when all groups of a step are complete, which is "
                "too late to choose groups by them.",
                "Remove it.",
            )


def _rounds(config: RunConfig) -> Iterator[Problem]:
    assert isinstance(config.algorithm, PolicyGradientConfig), "RL has an algorithm of RL"
    if "max_rounds" not in config.rollout.model_fields_set:
        return
    if config.algorithm.dynamic_sampling is not None:
        yield Problem(
            "rollout.max_rounds",
            "algorithm.dynamic_sampling.max_rounds sets the limit for all filters.",
            "Set that instead.",
        )
    elif not config.rollout.filters:
        yield Problem(
            "rollout.max_rounds",
            "without filters every group is kept, so each step has only one round of sampling.",
            "Remove it, or set rollout.filters.",
        )


def _solved(config: RunConfig) -> Iterator[Problem]:
    rollout, rewards = config.rollout, config.rewards
    if not rollout.judges_samples:
        for name in sorted({"solved_by", "solved_at"} & rollout.model_fields_set):
            yield Problem(
                f"rollout.{name}",
                "only rollout.curriculum and the filter all_failed need to know which samples "
                "are solved.",
                "Remove it; for evaluation, set eval.sampling." + name + ".",
            )
        return
    if rewards is None:
        return
    names = [reward.label for reward in rewards.trained]
    if rollout.solved_by is not None and rollout.solved_by not in names:
        yield Problem(
            "rollout.solved_by",
            f"no reward that is trained on is called {rollout.solved_by!r}.",
            f"Known: {', '.join(sorted(names))}.",
        )
    elif rollout.solved_by is None and not _one_decides(rewards):
        who = "rollout.curriculum" if rollout.curriculum is not None else _place(config)
        yield Problem(
            "rollout.solved_by",
            f"{who} needs to know which samples are solved, and several rewards could decide that.",
            f"Name one of: {', '.join(sorted(names))}.",
        )


def _place(config: RunConfig) -> str:
    found = (n for n, f in enumerate(config.rollout.filters) if isinstance(f, AllFailedFilter))
    return f"rollout.filters.{next(found)}"


def _one_decides(rewards: RewardsConfig) -> bool:
    """Return whether it is clear which reward decides, as rewards/solved.py has it."""
    functions = rewards.trained
    own = sum(isinstance(reward, FunctionReward) for reward in functions)
    return len(functions) == 1 or own == 1 or any(reward.verifies for reward in functions)
