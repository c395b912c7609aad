"""Prompt and answer together do not fit into the model's context length.

## What it sees
Longest prompt plus new tokens above the engine's or the model's length (facts or settings).

## Why it matters
Long prompts get fewer new tokens than configured, or the engine refuses them.

## Likely causes
- context-too-short: the limits were set one by one.

## What to do
Lower rollout.max_new_tokens, or raise the engine's length.

## Known false alarms
Prompts that are never as long as their limit.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Grade, Level, Sighting
from homeostat.health.rule import NoOptions, Rule
from homeostat.health.rules.readings import raw_number
from homeostat.health.view import Kind, RunView


def check(view: RunView, _: NoOptions) -> Iterator[Sighting]:
    new = view.number("rollout.max_new_tokens")
    prompt = raw_number(view, "max_prompt_length", "prompt_max_len", "rollout_max_prompt_len")
    prompt = prompt or view.facts.get("longest_prompt")
    length = raw_number(view, "max_model_len", "vllm_max_model_length", "rollout_max_context_len")
    length = length or view.facts.get("model_length")
    if new is None or prompt is None or length is None or prompt + new <= length:
        return
    yield Sighting(
        message=f"Prompts of up to {prompt:g} tokens and {new:g} new ones do not fit a length of "
        f"{length:g}: answers are cut. Set rollout.max_new_tokens to {max(1, length - prompt):g}.",
        causes=(Cause("context-too-short", f"{prompt:g} + {new:g} > {length:g}"),),
        fixes=(
            Fix(
                "rollout.max_new_tokens", f"{max(1, length - prompt):g}", "what fits", Grade.UNSAFE
            ),
        ),
        value=prompt + new,
        limit=float(length),
    )


RULE = Rule(
    code="CFG009",
    name="context-too-short",
    family=Family.CONFIG,
    level=Level.WARN,
    confidence=Confidence.MEASURED,
    check=check,
    needs=("setting:rollout.max_new_tokens",),
    kinds=(Kind.RL,),
)
