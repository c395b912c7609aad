"""Cut a run down to settings or a script that a maintainer can start.

    homeostat              the recipe as it was given, with few steps and without private values
    TRL                    a script that trains a tiny random model with the settings of the run
    every other framework  the settings that the log states, as its users write them

Nothing here was run: the text says so. A setting is taken over only if the framework's own sources
have it, so that the script does not fail for another reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from homeostat.errors import ConfigError
from homeostat.health.formats.markdown import fenced
from homeostat.health.formats.report import Report
from homeostat.health.frameworks import HOMEOSTAT
from homeostat.health.frameworks.known import known
from homeostat.health.view import Kind, RunView

# Number of steps after the first sign of the illness.
_STEPS_AFTER = 10
_MOST_SETTINGS = 60
# Settings of the trainer that name places or services, or that the script sets itself.
_NOT_COPIED = frozenset(
    (
        "output_dir", "logging_dir", "run_name", "hub_model_id", "hub_token", "report_to",
        "max_steps", "resume_from_checkpoint", "deepspeed", "fsdp", "fsdp_config", "push_to_hub",
        "bf16", "fp16", "use_vllm", "vllm_mode", "eval_strategy", "save_strategy",
        "load_best_model_at_end", "num_train_epochs", "use_cpu", "logging_steps",
    )
)  # fmt: skip
_TRAINERS = {
    Kind.RL: ("GRPOConfig", "GRPOTrainer"),
    Kind.SFT: ("SFTConfig", "SFTTrainer"),
    Kind.PREFERENCE: ("DPOConfig", "DPOTrainer"),
}
_SCRIPT = """\
# Tiny random model, no download but the tokenizer. Not run yet: change it until it shows the fault.
from datasets import Dataset
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from trl import {config}, {trainer}

tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
model = Qwen2ForCausalLM(Qwen2Config(
    vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
))
rows = Dataset.from_list({rows})
{before}args = {config}(
    output_dir="reproduction",
    max_steps={steps},
    logging_steps=1,
    report_to="none",
    save_strategy="no",
{settings}
)
trainer = {trainer}(model=model, args=args, train_dataset=rows, processing_class=tokenizer{more})
trainer.train()
"""
_ROWS = {
    Kind.RL: '[{"prompt": f"What is {n} + {n}?"} for n in range(64)]',
    Kind.SFT: '[{"text": f"{n} + {n} = {2 * n}"} for n in range(64)]',
    Kind.PREFERENCE: '[{"prompt": f"{n} + {n} =", "chosen": f" {2 * n}", "rejected": " 1"} '
    "for n in range(64)]",
}
_REWARD = """\
def reward(completions, **kwargs):
    return [float(len(text) % 2) for text in completions]  # replace it by the run's own


"""


def reproduction(report: Report) -> list[str]:
    """Return Markdown lines: a recipe, a script or settings, or why none can be made."""
    view = report.view
    if view.framework is HOMEOSTAT:
        return _recipe(report)
    settings = _settings(view)
    if not settings:
        return [
            "The log states no settings, so nothing can be cut down. Give them with "
            "`--config FILE`, or add the command that started the run."
        ]
    if view.framework.name == "trl" and view.kind in _TRAINERS:
        return [
            "A script with the settings that the log states, on a tiny model. It was written by a "
            "program and has not been run.",
            "",
            fenced(_script(report, settings).splitlines(), language="python"),
        ]
    lines = [f"{name}={_plain(value)}" for name, value in settings.items()]
    return [f"Settings that the log states ({view.framework.title}):", "", fenced(lines)]


def _script(report: Report, settings: Mapping[str, Any]) -> str:
    kind = report.view.kind
    config, trainer = _TRAINERS[kind]
    is_rl = kind is Kind.RL
    return _SCRIPT.format(
        config=config,
        trainer=trainer,
        rows=_ROWS[kind],
        before=_REWARD if is_rl else "",
        steps=_num_steps(report),
        settings="\n".join(f"    {name}={value!r}," for name, value in settings.items()),
        more=", reward_funcs=reward" if is_rl else "",
    )


def _settings(view: RunView) -> dict[str, Any]:
    """Return the stated settings that the framework's sources know, without places and secrets."""
    facts = known(view.framework.name)
    found: dict[str, Any] = {}
    for name, value in view.raw_settings.items():
        spelled = facts.spelling(str(name).lstrip("-"))
        if spelled is None or spelled in _NOT_COPIED or len(found) >= _MOST_SETTINGS:
            continue
        if isinstance(value, bool | int | float) or (isinstance(value, str) and _is_word(value)):
            found[spelled] = value
    return found


def _is_word(value: str) -> bool:
    return 0 < len(value) <= 40 and all(sign.isalnum() or sign in "_-." for sign in value)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _num_steps(report: Report) -> int:
    begun = [one.first_step for one in report.findings if one.first_step is not None]
    last = report.view.last_step or _STEPS_AFTER
    return max(1, min(last, min(begun, default=last) + _STEPS_AFTER))


def _recipe(report: Report) -> list[str]:
    """Return the recipe of a run of ours as it was given, without what may be private."""
    # The config classes take half a second to import, and only our own runs need them.
    import yaml

    from homeostat.config.loading.shareable import shared_config
    from homeostat.config.loading.yaml_file import read_yaml

    sources = report.view.facts.get("sources", ())
    file = Path(sources[0]).parent / "config.yaml" if sources else Path("config.yaml")
    try:
        given, _ = read_yaml(file)
    except ConfigError as error:
        return [f"The recipe cannot be read ({error.problems[0].message})."]
    shared = shared_config(given)
    text = yaml.safe_dump(shared, sort_keys=False, allow_unicode=True)
    command = f"homeostat train recipe.yaml trainer.max_steps={_num_steps(report)}"
    return [
        "The recipe as it was given; private values are removed. It has not been run again.",
        "",
        fenced(text.rstrip("\n").split("\n"), language="yaml"),
        "",
        fenced([command], language="bash"),
    ]
