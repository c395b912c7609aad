"""Options of `homeostat estimate` that plan a recipe on many GPUs."""

from __future__ import annotations

from typing import Annotated

import typer

Gpus = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Plan the RL loop on this many GPUs. Only the sizes of the model and "
        "the settings are read.",
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option(min=1, help="With --gpus: number of machines. Default: 8 GPUs in each."),
]
GpuKind = Annotated[
    str,
    typer.Option(
        "--gpu", help="With --gpus: h200, h100, h20, or a .toml file with the rates of another GPU."
    ),
]
Shape = Annotated[
    str | None,
    typer.Option(
        help="With --gpus: a config.json, its folder, or a known name such as qwen2.5-7b, "
        "llama3.1-70b or qwen3-235b-a22b. Default: the recipe's model. Weights are not needed."
    ),
]
PromptTokens = Annotated[
    int, typer.Option(min=1, help="With --gpus: mean number of tokens of a prompt.")
]
MeanTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="With --gpus: mean number of tokens of a completion. Default: half of "
        "rollout.max_new_tokens.",
    ),
]
Spread = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="With --gpus: standard deviation of the logarithm of completion lengths.",
    ),
]
RewardSeconds = Annotated[
    float, typer.Option("--reward-s", min=0.0, help="With --gpus: seconds to score one group.")
]
