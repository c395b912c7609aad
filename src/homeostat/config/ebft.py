"""Settings of energy-based fine-tuning (arXiv:2603.12248): features, energy, and strided blocks.

Whatever else belongs to sampling and updates is where every RL algorithm has it: `rollout` has the
number of samples and the temperature, `algorithm` has clipping, normalisation and KL.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from homeostat.config.base import Settings, key

Depth = Annotated[float, Field(gt=0, le=1)]
Estimator = Literal["rloo", "group_norm", "reinforce"]


class EbftConfig(Settings):
    """The energy of a sample: how similar its features are to the reference, and how different from
    other samples.

    Features are hidden states of the initial model, which stays frozen.
    """

    mode: Literal["structured", "strided"] = key(
        "structured",
        help="structured: the policy answers prompts, and an answer is compared with the reference "
        "answer of the row. strided: the policy continues raw text at every `stride`-th position, "
        "and a continuation is compared with the text itself.",
    )
    reference_column: str = key(
        "answer",
        share=True,
        min_length=1,
        help="Column with the reference answer (structured).",
    )
    stride: int = key(
        8, ge=1, help="Number of tokens from one continued position to the next (strided)."
    )
    context_length: int = key(
        8,
        ge=1,
        help="Number of tokens before the first continued position. A continuation sees all of "
        "the text before its position, not only this many tokens (strided).",
    )
    generate_length: int = key(
        8,
        ge=1,
        help="Number of tokens in each continuation; none ends earlier. It replaces "
        "rollout.max_new_tokens (strided).",
    )
    feature_layers: tuple[Depth, ...] = key(
        (0.25, 0.5, 0.75),
        min_length=1,
        help="Depths of the layers whose hidden states are the features: 0.5 is the layer in the "
        "middle of the model, 1 the last one.",
    )
    embed_method: Literal["last_token", "completion_mean", "mean_pooling", "concat"] = key(
        "last_token",
        help="How the hidden states of a text become its features. last_token: take that of the "
        "last token. completion_mean: their mean over the completion. mean_pooling: their mean "
        "over prompt and completion. concat: concatenate those of all tokens of the completion "
        "(strided only, because all its completions are equally long).",
    )
    whitening: bool = key(
        True,
        help="Decorrelate the features of a prompt's samples, layer by layer, before they are "
        "compared: multiply by (X X^T)^(-1/2). Only the differences between the samples remain. "
        "Without whitening, the hidden states of any two texts are nearly the same.",
    )
    alignment_coefficient: float = key(
        1.0, ge=0, help="Weight in the energy of the similarity to the reference."
    )
    diversity_coefficient: float = key(
        1.0,
        ge=0,
        help="Weight in the energy of the similarity among the samples of a prompt, "
        "which is subtracted.",
    )
    advantage_estimator: Estimator = key(
        "rloo",
        help="rloo: subtract a baseline that does not depend on the sample itself. group_norm: "
        "also divide by the standard deviation in the group. reinforce: use the energy as it is.",
    )
    rl_coefficient: float = key(1.0, ge=0, help="Weight of the policy-gradient loss.")
    ce_coefficient: float = key(
        0.0,
        ge=0,
        help="Weight of the cross-entropy on the reference answers (structured), or on the text "
        "from the first continued position on (strided).",
    )

    @property
    def is_strided(self) -> bool:
        return self.mode == "strided"

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers of a model that the depths mean, as transformers numbers them."""
        chosen = (max(1, round(depth * num_layers)) for depth in self.feature_layers)
        return tuple(sorted(set(chosen)))

    def anchors(self, num_tokens: int) -> range:
        """Return the positions at which a text of so many tokens is continued."""
        return range(self.context_length, num_tokens - self.generate_length + 1, self.stride)
