"""Convert values of single settings: choices, units and switches, by our key.

A converter returns `Converted` with our value (and how it is only alike), or `Left` with the reason
why the key stays as it is.
"""

from __future__ import annotations

from typing import Any

from homeostat.importing.algorithms import is_rl
from homeostat.importing.draft import Draft
from homeostat.importing.entries import Given, Status
from homeostat.importing.outcome import (
    Converted,
    Converter,
    Left,
    Outcome,
    interval,
    plain,
    positive,
)
from homeostat.importing.recognise import fold
from homeostat.importing.sizes import is_quantised, steps_of_updates
from homeostat.importing.training_values import TRAINING

_ATTENTION = {"sdpa": "sdpa", "eager": "eager", "disabled": "eager"}


def _attention(given: Given, _: Draft) -> Outcome:
    name = str(given.value).lower()
    if name in _ATTENTION:
        return Converted(_ATTENTION[name])
    return Left("auto takes the fastest kernel that there is, FlashAttention's for one")


def _eval_interval(given: Given, draft: Draft) -> Outcome:
    if not _has_held_out(draft):
        return Left("there are no held-out rows to evaluate on")
    return _interval(given, draft)


def _interval(given: Given, draft: Draft) -> Outcome:
    outcome = interval(given, draft)
    if not isinstance(outcome, Converted) or not isinstance(outcome.value, int):
        return outcome
    steps, how = steps_of_updates(outcome.value, draft)
    return Converted(steps, how=how)


def _of_eval(given: Given, draft: Draft) -> Outcome:
    if not _has_held_out(draft):
        return Left("there are no held-out rows to evaluate on")
    return plain(given, draft)


def _has_held_out(draft: Draft) -> bool:
    share = draft.value("data.validation_share")
    return bool(draft.get("data.validation")) or (isinstance(share, float) and 0 < share <= 0.5)


def _samples(given: Given, _: Draft) -> Outcome:
    if given.value == 1:
        return Converted(2, how="a prompt has at least 2 samples here: twice as many completions")
    return plain(given, _)


def _max_length(given: Given, draft: Draft) -> Outcome:
    prompts = draft.value("rollout.max_prompt_tokens")
    if is_rl(draft) and prompts is not None and prompts != given.value:
        return Left("the largest prompt is given, and completions have a limit of their own")
    return plain(given, draft)


def _max_prompt(given: Given, draft: Draft) -> Outcome:
    if not is_rl(draft):
        return Left("rows are limited as a whole (data.max_length)")
    return Converted(given.value)


def _num_processes(given: Given, draft: Draft) -> Outcome:
    if is_rl(draft):
        return Left("prompts are prepared at once, in memory")
    if "worker" in given.name and "preprocess" not in given.name:
        return Left("rows are packed ahead in the background")
    return Converted(min(64, int(given.value)))


def _validation_share(given: Given, _: Draft) -> Outcome:
    if isinstance(given.value, int | float) and given.value <= 0:
        return Left("no rows are held out, which is the default here")
    if isinstance(given.value, int | float) and given.value > 0.5:
        why = "a number of rows: data.validation_share is a share, at most half"
        return Left(why, Status.UNKNOWN)
    return Converted(given.value)


def _overlong_rows(given: Given, draft: Draft) -> Outcome:
    name = str(given.value).lower()
    if "filter" in given.name:
        return Converted("drop") if given.value is True else Left("the other setting decides")
    if draft.value("data.overlong") is True or name == "drop":
        return Converted("drop")
    if name in ("error", "raise"):
        filters = any("filter" in one.name and one.value is True for one in draft.file.settings)
        return Converted("drop" if filters else "refuse")
    if is_rl(draft):
        return Converted("drop", how="a prompt that is cut off asks for something else")
    return Converted("truncate")


def _targets(given: Given, _: Draft) -> Outcome:
    value = given.value
    if value is True or str(value) in ("all", "all-linear"):
        return Converted(["all-linear"])
    if value is False:
        return Left("the modules are listed")
    return Converted(value if isinstance(value, list) else [x.strip() for x in value.split(",")])


def _lora_dropout(given: Given, draft: Draft) -> Outcome:
    if is_rl(draft) and given.value:
        return Converted(0.0, how="in RL the policy that samples must be the one that is trained")
    return plain(given, draft)


def _quantization(given: Given, _: Draft) -> Outcome:
    if given.value is False:
        return Left("off is the default here")
    is_int8 = "8" in given.name or given.value == 8
    return Converted("int8" if is_int8 else "nf4")


def _critic_schedule(given: Given, _: Draft) -> Outcome:
    name = str(given.value).lower()
    if name == "cosine":
        # Elsewhere the cosine ends at 0.
        return Converted("cosine", more={"critic.schedule.min_lr_share": 0.0})
    return Converted("constant", how="" if name == "constant" else f"{name} is not here")


def _engine(given: Given, draft: Draft) -> Outcome:
    if not is_rl(draft):
        return Left("nothing is sampled")
    name = str(given.value).lower()
    if is_quantised(draft) and (given.value is True or name in ("vllm", "sglang")):
        how = "an adapter on a quantised base cannot be merged, and other engines need it merged"
        return Converted("native", how=how)
    if given.value is True or name == "vllm":
        return Converted("vllm")
    if name == "sglang":
        return Converted("sglang")
    if name in ("false", "hf"):
        return Left("the native engine samples in the trainer's process")
    return Converted("native", how=f"{given.value} is not here; vllm and sglang are the other ones")


def _scale(given: Given, _: Draft) -> Outcome:
    name = str(given.value).lower()
    choices = {"true": "group", "false": "none"}
    return Converted(choices.get(name, name))


def _normalise(given: Given, _: Draft) -> Outcome:
    name = str(given.value).lower()
    choices = {"true": "token", "token-mean": "token", "seq-mean-token-mean": "sequence"}
    if name in choices:
        return Converted(choices[name])
    if name.startswith("seq-mean-token-sum"):
        return Converted("fixed", how="the sum is divided by rollout.max_new_tokens as well")
    return Left(f"no normalisation here is {given.value!r}", Status.UNKNOWN)


def _overlong(given: Given, _: Draft) -> Outcome:
    if given.value is True:
        return Converted({"type": "mask"})
    return Left("completions that are cut off are trained, which is the default here")


def _is_off(given: Given, draft: Draft) -> bool:
    """Return whether `enable`, beside a setting of verl, leaves it without effect."""
    switch = f"{fold(given.name).rpartition('.')[0]}.enable"
    on = [one.value for one in draft.file.settings if fold(one.name) == switch]
    return draft.framework.name == "verl" and on[-1:] != [True]


def _max_rounds(given: Given, draft: Draft) -> Outcome:
    if _is_off(given, draft):
        return Left("groups are not filtered: enable is not true")
    return plain(given, draft)


def _buffer(given: Given, draft: Draft) -> Outcome:
    if _is_off(given, draft):
        return Left("the length has no penalty: enable is not true")
    return Converted(given.value, more={"algorithm.overlong.type": "shape"})


def _correction(given: Given, _: Draft) -> Outcome:
    if given.value is False:
        return Converted(None)
    return Left("it is on by default here")


def _weight_type(given: Given, _: Draft) -> Outcome:
    name = str(given.value).lower()
    for choice in ("sequence", "token", "geometric"):
        if name.startswith(choice):
            more = {"algorithm.correction.weight.outside": "mask"} if "mask" in name else {}
            return Converted(choice, more=more)
    return Left(f"no weight here is {given.value!r}", Status.UNKNOWN)


def _dynamic_sampling(given: Given, _: Draft) -> Outcome:
    return Left("off") if given.value is False else Converted({})


def _is_cispo_of_trl(draft: Draft) -> bool:
    """Return whether epsilon_high bounds the weight itself, not its distance from 1."""
    of_trl = draft.framework.name in ("trl", "axolotl")
    return of_trl and draft.get("algorithm.type") == "cispo"


def _clip_low(given: Given, draft: Draft) -> Outcome:
    if _is_cispo_of_trl(draft):
        return Left("CISPO's weight has no lower bound there, as here by default")
    return plain(given, draft)


def _clip_pair(given: Given, draft: Draft) -> Outcome:
    value = given.value
    if _is_cispo_of_trl(draft) and isinstance(value, int | float):
        how = "" if value >= 1 else f"weights are bounded by {value} there, by 1 here"
        return Converted(max(0.0, value - 1), how=how)
    if isinstance(value, list) and len(value) == 2:
        return Converted(value[1], more={"algorithm.clip_low": value[0]})
    return Converted(value)


def _chat_template(given: Given, _: Draft) -> Outcome:
    if str(given.value).endswith((".jinja", ".jinja2", ".txt")):
        return Converted(str(given.value))
    if isinstance(given.value, bool) or str(given.value) in ("tokenizer_default", "default"):
        return Left("the tokenizer's chat template is used for chats")
    why = "the tokenizer's chat template is used; model.chat_template names a Jinja file instead"
    return Left(why)


def _resume(given: Given, _: Draft) -> Outcome:
    if str(given.value).lower() in ("disable", "never"):
        return Converted("never")
    return Left("the same command resumes a run by itself")


def _path(given: Given, _: Draft) -> Outcome:
    return Converted(str(given.value))


def _sinks(given: Given, _: Draft) -> Outcome:
    names = given.value if isinstance(given.value, list) else [given.value]
    found: list[dict[str, Any]] = []
    for name in ("wandb", "tensorboard", "trackio"):
        if name in given.name and given.value is not False:
            found.append({"type": name})
            if isinstance(given.value, str) and "project" in given.name:
                found[-1]["project"] = given.value
        elif name in map(str, names) or "all" in names:
            found.append({"type": name})
    if not found:
        return Left("metrics go to the run folder in any case")
    return Converted(found)


def _bytes_of_megabytes(given: Given, draft: Draft) -> Outcome:
    is_megabytes = "megabytes" in given.name
    return Converted(given.value * 2**20) if is_megabytes else plain(given, draft)


def _seconds_of_minutes(given: Given, draft: Draft) -> Outcome:
    if draft.get("cluster.type") is None:
        return Left("one process waits for no other")
    seconds = given.value * (60 if "minutes" in given.name else 1)
    return Converted(min(seconds, 86400)) if seconds <= 86400 else Left("more than a day is none")


def _beta(given: Given, draft: Draft) -> Outcome:
    if is_rl(draft) or draft.get("algorithm.type") in ("sft", "reward_model"):
        return Left("there are no preferences")
    return positive(given, draft)


def _reward_normalise(given: Given, _: Draft) -> Outcome:
    return Converted("standardise") if given.value is True else Left("off is the default here")


def _router_replay(given: Given, _: Draft) -> Outcome:
    if given.value in (False, "disabled"):
        return Left("off is the default here")
    return Converted("ids")


def _reference(given: Given, draft: Draft) -> Outcome:
    if draft.get("algorithm.kl") is None:
        return Left("nothing compares the policy with a reference")
    if draft.framework.name in ("slime", "miles"):
        return Left("the reference is the model that the run starts from")
    return Converted(given.value, more={"reference.type": "checkpoint"})


def _refresh(given: Given, draft: Draft) -> Outcome:
    if draft.get("algorithm.kl") is None:
        return Left("nothing compares the policy with a reference")
    return Converted(given.value, more={"reference.type": "initial"})


def _sampled_ahead(given: Given, _: Draft) -> Outcome:
    """Say how to sample ahead; other frameworks keep the setting in files of sync runs, too."""
    if given.value in (None, False, 0):
        return Left("off is the default here")
    why = "to sample while the trainer trains, set rollout.max_staleness, with an engine in its own"
    return Left(f"{why} process; rollout.partial continues completions", Status.APPROXIMATED)


CONVERTERS: dict[str, Converter] = {
    **TRAINING,
    "reference.path": _reference,
    "reference.refresh_steps": _refresh,
    "model.path": _path,
    "model.attention": _attention,
    "model.chat_template": _chat_template,
    "model.quantization": _quantization,
    "model.double_quantization": positive,
    "model.moe.router_replay": _router_replay,
    "model.moe.aux_loss_coefficient": positive,
    "model.moe.z_loss_coefficient": positive,
    "lora.targets": _targets,
    "lora.dropout": _lora_dropout,
    "lora.rslora": positive,
    "lora.dora": positive,
    "data.max_length": _max_length,
    "data.num_processes": _num_processes,
    "data.validation_share": _validation_share,
    "data.overlong": _overlong_rows,
    "rollout.max_prompt_tokens": _max_prompt,
    "rollout.samples_per_prompt": _samples,
    "rollout.max_staleness": _sampled_ahead,
    "rollout.partial": _sampled_ahead,
    "rollout.top_k": positive,
    "rollout.stop_token_ids": lambda given, _: Converted(
        given.value if isinstance(given.value, list) else [given.value]
    ),
    "rollout.stop": lambda given, _: Converted(
        given.value if isinstance(given.value, list) else [str(given.value)]
    ),
    "algorithm.scale": _scale,
    "algorithm.normalise": _normalise,
    "algorithm.overlong": _overlong,
    "algorithm.overlong.buffer_tokens": _buffer,
    "algorithm.overlong.penalty": _buffer,
    "algorithm.correction": _correction,
    "algorithm.correction.weight.type": _weight_type,
    "algorithm.dynamic_sampling": _dynamic_sampling,
    "algorithm.dynamic_sampling.max_rounds": _max_rounds,
    "algorithm.clip_low": _clip_low,
    "algorithm.clip_high": _clip_pair,
    "algorithm.sft_weight": positive,
    "preference.beta": _beta,
    "eval.interval_steps": _eval_interval,
    "eval.at_start": _of_eval,
    "checkpoint.interval_steps": _interval,
    "checkpoint.keep_last": positive,
    "checkpoint.resume": _resume,
    "observe.log_interval": interval,
    "observe.sinks": _sinks,
    "observe.completions.max_per_step": lambda *_: Left("completions are kept in the run folder"),
    "engine.name": _engine,
    "rewards.normalise": _reward_normalise,
    "critic.warmup_steps": positive,
    "critic.clip": positive,
    "critic.epochs": positive,
    "critic.max_grad_norm": positive,
    "critic.schedule.type": _critic_schedule,
    "critic.schedule.warmup_share": positive,
    "critic.schedule.warmup_steps": positive,
    "sync.transport.bucket_bytes": _bytes_of_megabytes,
    "cluster.timeout_s": _seconds_of_minutes,
}
