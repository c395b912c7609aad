"""Questions that several rules ask of a run: how a metric moved, whether the task is solved, what
kind of model it is.

All are pure functions of a view. They return None where the run does not give the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from homeostat.arrays import FloatArray64
from homeostat.health.rules.readings import mean_since
from homeostat.health.series.medians import median, running_medians
from homeostat.health.series.noise import between_neighbours, noise_of, robust_scale
from homeostat.health.view import RunView, Series

# Words that a model writes when it runs on into somebody else's turn.
_NEXT_TURN = (
    "<|im_start|>",
    "<|user|>",
    "<|start_header_id|>",
    "\nuser:",
    "\nhuman:",
    "\nquestion:",
)


# Traces of a chat template in a prompt, with its special tokens or without.
_TEMPLATE_MARKS = (
    "<|im_start|>",
    "<|start_header_id|>",
    "<start_of_turn>",
    "<|user|>",
    "[inst]",
    "assistant",
    "user\n",
    "human:",
    "### instruction",
)
# Frameworks that print prompts as they were tokenised; others print the rows' own text.
_PRINTS_WHAT_WAS_SENT = ("verl", "openrlhf", "slime", "miles", "skyrl", "areal", "nemo_rl",
                         "lightrft")  # fmt: skip
# Words of logs whose prompts are passed on without a chat template.
_PLAIN_PROMPTS = (
    "type=str",
    "not in conversational format",
    "chat template not applied",
    "chat template is not applied",
    "without chat template",
    "without a chat template",
    "no chat template is applied",
    "raw string prompt",
    "apply_chat_template=false",
    "apply_chat_template: false",
)


@dataclass(frozen=True, slots=True)
class Trend:
    """The means of the first and last part of a series, and the standard error of their change."""

    start: float
    end: float
    chance: float

    @property
    def change(self) -> float:
        return self.end - self.start

    @property
    def is_real(self) -> bool:
        """Return whether the change is larger than the noise of single records explains."""
        return abs(self.change) > 3.0 * self.chance

    @property
    def rises(self) -> bool:
        return self.is_real and self.change > 0.03 * abs(self.start)

    @property
    def falls(self) -> bool:
        return self.is_real and -self.change > 0.03 * abs(self.start)


def trend(series: Series | None, *, share: float = 0.25) -> Trend | None:
    """Return the trend of a series; None with fewer than four finite values."""
    return series.once(_trend, share) if series is not None else None


def _trend(series: Series, share: float) -> Trend | None:
    values = series.finite().values
    if len(values) < 4:
        return None
    num = max(2, int(len(values) * share))
    # Neighbours differ by noise alone where the metric moves slowly.
    differences = np.abs(np.diff(values))
    noise = between_neighbours(values)
    # The median is less where most neighbours are alike and some differ by much: rewards of all or
    # nothing, means over the last episodes.
    with np.errstate(over="ignore"):
        noise = max(noise, float(differences.mean()) * math.sqrt(math.pi) / 2.0)
    start, end = float(values[:num].mean()), float(values[-num:].mean())
    return Trend(start, end, noise * math.sqrt(2.0 / num))


def gains(reward: Series | None) -> bool:
    """Return whether a reward has risen, and not in the first third of the run alone."""
    moved = trend(reward)
    if reward is None or moved is None or not moved.rises:
        return False
    late = trend(reward.tail(2 * len(reward) // 3))
    return late is None or late.rises


def moves(series: Series) -> bool:
    """Return whether the finite values of a series are not all the same."""
    values = series.finite().values
    return len(values) > 0 and float(np.ptp(values)) > 0.0


def last_crossing(series: Series) -> int | None:
    """Return the step at which a series fell; None if it is too short to say.

    From this step on it stays below the middle between its highest running median and its end.
    """
    finite, (medians, _) = series.finite(), smooth(series)
    if len(medians) < 3:
        return None
    middle = 0.5 * (float(medians.values.max()) + float(medians.values[-1]))
    above = np.flatnonzero(finite.values > middle)
    at = int(above[-1]) + 1 if len(above) else 0
    return int(finite.steps[at]) if at < len(finite) else None


def answers_changed(view: RunView, step: int) -> bool:
    """Return whether completions differ from a step on in length, ending, variety or entropy.

    Also true if too little was logged to say that they do not.
    """
    names = ("completions/mean_length", "completions/clipped_ratio", "completions/distinct_share",
             "entropy")  # fmt: skip
    found = [series for name in names if (series := view.series(name)) is not None]
    pairs = [(s.before(step).finite().values[-10:], s.since(step).finite().values) for s in found]
    known = [(before, since) for before, since in pairs if len(before) > 3 and len(since) > 3]
    return not known or any(_moved(before, since) for before, since in known)


def _moved(before: FloatArray64, since: FloatArray64) -> bool:
    """Return whether the median moved by more than a quarter and beyond the spread before."""
    usual, spread = robust_scale(before)
    distance = abs(median(since) - usual)
    return distance > 4.0 * spread and distance > max(0.05, 0.25 * abs(usual))


def newest(view: RunView, *names: str, count: int = 5) -> float | None:
    """Return the mean of a metric's newest finite values; None if there are none."""
    found = view.series(*names)
    tail = found.finite().tail(count) if found is not None else None
    return float(tail.values.mean()) if tail is not None and len(tail) else None


def smoothing_window(count: int) -> int:
    """Return the number of values that a running median over so many values is taken of."""
    return min(max(count // 6, 3), 15)


def smooth(series: Series) -> tuple[Series, int]:
    """Return running medians over a window that suits the length, and the window's length.

    The start, where no full window fits, is left out.
    """
    finite = series.finite()
    window = smoothing_window(len(finite))
    if len(finite) < window:
        return Series(finite.steps[:0], finite.values[:0]), window
    return Series(finite.steps[window - 1 :], running_medians(finite.values, window)), window


def turned_down(reward: Series) -> int | None:
    """Return the step at which a reward was best, if it has fallen since; None if it has not.

    A fall is a tenth of the best running median, and more than the noise of a record explains; or a
    fifth of the best third's mean, and more than the noise of such means explains.
    """
    finite, (medians, _) = reward.finite(), smooth(reward)
    if len(medians) < 5:
        return None
    noise = noise_of(finite.values)
    top = int(np.argmax(medians.values))
    best, since = float(medians.values[top]), medians.values[top:]
    lost = best - float(since[-1])
    # Medians of a reward that is mostly 0 only tell whether most records are 0.
    is_sparse = 2 * np.count_nonzero(finite.values == finite.values.min()) > len(finite)
    least = max(0.1 * abs(best), 3.0 * noise.scatter)
    if len(since) >= 3 and lost >= least and not is_sparse:
        return int(medians.steps[top])
    parts = np.array_split(finite.values, 3)
    means = [float(part.mean()) for part in parts]
    top, error = int(np.argmax(means)), math.sqrt(2.0) * noise.of_mean(len(parts[-1]))
    if means[top] - means[-1] < max(0.2 * abs(means[top]), 4.0 * error) or error == 0.0:
        return None
    return int(np.array_split(finite.steps, 3)[top][-1])


def is_zero(view: RunView, name: str, values: FloatArray64) -> np.ndarray:
    """Return a mask of the values that are 0 in the decimals that were printed."""
    decimals = view.decimals.get(name)
    return np.abs(values) < (1e-12 if decimals is None else 0.5 * 10.0**-decimals)


def reward_functions(view: RunView) -> dict[str, Series]:
    """Return the mean of each reward function over time, by its name."""
    return {name: s for name, s in view.matching("rewards/", "/mean").items() if "/" not in name}


def highest_reward(view: RunView) -> float | None:
    """Return the most that an answer can earn; None if it is not known."""
    seen = view.series("reward/max")
    if seen is not None and len(seen.finite()):
        return float(seen.finite().values.max())
    reward, functions = view.series("reward"), reward_functions(view)
    if reward is None or not len(reward.finite()) or _has_logits(view):
        return None
    parts = [s.finite().values for s in functions.values()] or [reward.finite().values]
    if any(len(part) and (part.min() < 0.0 or part.max() > 1.0 + 1e-9) for part in parts):
        return None
    weights = _weights(view, len(functions))
    top = sum(weights) if weights else float(max(1, len(functions)))
    return top if float(reward.finite().values.max()) <= top * 1.0001 else None


def is_top_known(view: RunView) -> bool:
    """Return whether more than one unchanging number says what the highest reward is.

    That is a reward that was lower before, single answers that earn less, or functions of known
    range.
    """
    reward, lowest = view.series("reward"), view.series("reward/min")
    if reward is not None and moves(reward):
        return True
    if lowest is not None and reward is not None and lowest.finite().values.size:
        if float(lowest.finite().values.min()) < float(reward.finite().values.max()):
            return True
    spread, alike = view.series("reward_std"), view.series("frac_reward_zero_std")
    if spread is not None and not is_zero(view, "reward_std", spread.finite().values).all():
        return True
    if alike is not None and float(alike.finite().values.min(initial=1.0)) < 1.0:
        return True
    found = view.setting("rewards.functions", default=())
    types = [f.get("type") for f in found if isinstance(f, dict)] if found else []
    return bool(types) and "function" not in types


def _trained_functions(view: RunView) -> list[object]:
    """Return the settings of the rewards that are trained on, where they are known."""
    found = view.setting("rewards.functions", default=())
    given = found if isinstance(found, list | tuple) else ()
    return [f for f in given if not (isinstance(f, dict) and f.get("role") == "eval")]


def _has_logits(view: RunView) -> bool:
    """Return whether a reward is the logit of a reward model, of which none is the highest."""
    return any(
        isinstance(f, dict) and f.get("type") == "reward_model" and f.get("score") != "probability"
        for f in _trained_functions(view)
    )


def _weights(view: RunView, num: int) -> list[float] | None:
    found = _trained_functions(view)
    if len(found) != num or not num:
        return None
    weights = [f.get("weight", 1.0) if isinstance(f, dict) else 1.0 for f in found]
    return [float(w) for w in weights] if all(isinstance(w, int | float) for w in weights) else None


def solved_share(view: RunView, *, since: int | None = None) -> float | None:
    """Return the mean reward as a share of the most that can be earned."""
    top = highest_reward(view)
    reward = newest(view, "reward") if since is None else mean_since(view, "reward", step=since)
    return reward / top if top and reward is not None else None


def samples_per_step(view: RunView) -> float | None:
    prompts = view.number("rollout.prompts_per_step")
    samples = view.number("rollout.samples_per_prompt")
    return prompts * samples if prompts and samples else None


def text_of_settings(view: RunView, *words: str) -> str:
    """Return the values of all settings whose name has one of the words, as searchable text."""
    return view.once_of_settings(_text_of_settings, *words)


def _text_of_settings(
    settings: Mapping[str, Any], raw_settings: Mapping[str, Any], *words: str
) -> str:
    both = [*settings.items(), *raw_settings.items()]
    return " ".join(str(v) for k, v in both if any(word in str(k).lower() for word in words))


def has_lora(view: RunView) -> bool:
    return view.once_of_settings(_names_lora)


def _names_lora(settings: Mapping[str, Any], raw_settings: Mapping[str, Any]) -> bool:
    names = [str(key).lower() for key in (*settings, *raw_settings)]
    return any("lora" in name or "peft" in name for name in names)


def is_sequence_level(view: RunView) -> bool:
    """Return whether ratios are of whole completions (GSPO).

    Their clip range is a thousand times narrower.
    """
    clip = view.number("algorithm.clip_high", "algorithm.clip_low")
    words = text_of_settings(
        view, "loss_mode", "loss_type", "importance_sampling_level", "algorithm"
    )
    return "gspo" in words.lower() or (clip is not None and 0.0 < clip < 0.01)


def is_multi_turn(view: RunView) -> bool:
    turns = newest(view, "rollout/num_turns/mean")
    if turns is not None:
        return turns > 1.05
    return view.once_of_settings(_sets_multi_turn)


def _sets_multi_turn(settings: Mapping[str, Any], raw_settings: Mapping[str, Any]) -> bool:
    both = [*settings.items(), *raw_settings.items()]
    return any("multi_turn" in str(k).lower() and str(v).lower() == "true" for k, v in both)


def is_nonfinite(view: RunView, *names: str) -> bool:
    """Return whether one of these metrics was ever NaN or infinite."""
    found = [view.metrics[name] for name in names if name in view.metrics]
    return any(not np.isfinite(series.values).all() for series in found)


def plain_prompts(view: RunView) -> str:
    """Return the evidence that a chat model is given prompts without its template; "" if none.

    A model's name says what it is, never what it was sent: that is known from the settings, from
    the log's words, and from printed prompts where the framework prints what was sent.
    """
    model = text_of_settings(view, "model").lower()
    is_chat = any(word in model for word in ("instruct", "chat", "-it"))
    kind = text_of_settings(view, "prompt_type", "apply_chat_template").lower().split()
    is_plain = "str" in kind or "false" in kind or _sources_are_plain(view)
    if (is_chat and is_plain) or view.log.has(*_PLAIN_PROMPTS):
        return "prompts are plain text for a chat model"
    if view.framework.name not in _PRINTS_WHAT_WAS_SENT:
        return ""
    prompts = [sample.prompt.lower() for sample in view.samples if sample.prompt.strip()]
    marked = [any(mark in prompt for mark in _TEMPLATE_MARKS) for prompt in prompts]
    if is_chat and len(prompts) >= 2 and not any(marked):
        return "the prompts that are printed show no chat template"
    return ""


def _sources_are_plain(view: RunView) -> bool:
    """Return whether one of our own runs has set every source of prompts to `chat = false`."""
    sources = view.setting("data.train", default=())
    if not isinstance(sources, list | tuple):
        return view.setting("data.train.chat") is False
    flags = [source.get("chat", True) for source in sources if isinstance(source, dict)]
    return bool(flags) and not any(flags)


def runs_on(texts: Iterable[str]) -> bool:
    """Return whether most of the texts run on into a turn that is not theirs to write."""
    lowered = [text.lower() for text in texts if text.strip()]
    hits = [any(mark in text for mark in _NEXT_TURN) for text in lowered]
    return len(hits) > 0 and sum(hits) * 2 > len(hits)


def repeats_itself(text: str) -> bool:
    """Return whether a text repeats one character, or a few words, over and over."""
    body = text.strip()
    if len(body) < 24:
        return False
    if len(set(body.replace(" ", ""))) <= 2:
        return True
    words = body.split()
    if len(words) < 12:
        return False
    triples = list(zip(words, words[1:], words[2:], strict=False))
    return len(set(triples)) * 3 < len(triples)
