"""Cases of the keys of prompt sources, to train on and held out.

The reward is a checksum of prompt and completion: whatever changes in either is seen.
"""

from __future__ import annotations

from tests.support.every_key.inputs import names_cases
from tests.support.every_key.rl_workshop import evaluated, samples
from tests.support.every_key.workshop import Case, Run, See, all_of, alters, metric, prepares

# The model has a chat template; a group is small, since only the prompts matter.
BASE = (
    "model.path=chat",
    "data.max_length=128",
    "rollout={prompts_per_step: 4, samples_per_prompt: 2, max_new_tokens: 8}",
    "rewards.functions=[{type: function, path: 'rewards.py:checksum'}]",
    "data.shuffle=false",
)
FIRST = {
    "prompts": "{type: prompts, path: asked.jsonl}",
    "reasoning_gym": "{type: reasoning_gym, task: chain_sum, size: 6, seed: 0}",
}
# Of each type of source: key -> the change that is seen.
CHANGES = {
    "prompts": {
        "path": "others.jsonl", "limit": "5", "prompt_column": "question", "chat": "false",
        "system": "Be brief.",
    },
    "reasoning_gym": {
        "task": "gcd", "size": "5", "seed": "1", "options": "{min_terms: 3}",
        "instruction": "A number.", "chat": "false", "system": "Be brief.",
    },
}  # fmt: skip
NUM_ROWS = {"limit": (12, 5), "size": (6, 5)}
GRAD_NORM = metric("grad_norm")
OTHER = {"prompts": "reasoning_gym", "reasoning_gym": "prompts"}


def base_of(group: str, kind: str) -> tuple[str, ...]:
    others = "data.train=[{type: prompts, path: asked.jsonl}]" if group == "validation" else ""
    # Greedy answers of random weights are often the same, whatever was asked.
    drawn = "eval.sampling.temperature=1.0" if group == "validation" else ""
    return tuple(filter(None, (*BASE, others, drawn, f"data.{group}=[{FIRST[kind]}]")))


def prepared(group: str) -> See:
    def see(run: Run) -> dict[str, int]:
        (event,) = [e for e in run.events("data_prepared") if e["which"] == group]
        return {name: event[name] for name in ("seen", "kept", "tokens")}

    return see


def asked(run: Run) -> list[str]:
    return samples(run).prompts


def source_case(group: str, kind: str, name: str, value: str) -> Case:
    """Other prompts are prepared. A run on other ones shows that they are what it learns from."""
    base, change = base_of(group, kind), f"data.{group}.0.{name}={value}"
    prompts = prepares(change, group, base=base, num_rows=NUM_ROWS.get(name))
    if name not in ("path", "task"):
        return prompts
    if group == "validation":
        return all_of(prompts, alters(change, evaluated, base=base, same="bits"))
    learnt = (alters(change, see, base=base) for see in (asked, prepared(group), GRAD_NORM))
    return all_of(prompts, *learnt)


def another_type(group: str, kind: str) -> Case:
    return prepares(f"data.{group}=[{FIRST[kind]}]", group, base=base_of(group, OTHER[kind]))


def cases_of(group: str) -> dict[str, Case]:
    cases: dict[str, Case] = {}
    of_files = base_of(group, "prompts")
    cases |= names_cases(group, "prompts", "{prompt: question}", file="asked.jsonl", base=of_files)
    for kind, changes in CHANGES.items():
        cases[f"data.{group}[].type ({kind})"] = another_type(group, kind)
        for name, value in changes.items():
            case = source_case(group, kind, name, value)
            cases[f"data.{group}[].{name} ({kind})"] = case
    return cases


CASES: dict[str, Case] = {**cases_of("train"), **cases_of("validation")}
