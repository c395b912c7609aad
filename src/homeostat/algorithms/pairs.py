"""Parts that all losses over pairs of completions share: sums of a pair, and measurements.

    loss = sum_p loss_p / pairs + sft_weight * sum_m -logp_m / chosen tokens

over all pairs p of the update and all tokens m of their chosen completions. Both denominators are
known before the update is split into micro-batches, and a pair is never split, so the gradient does
not depend on the split. In a micro-batch the rows of a pair are neighbours, the chosen one first.

Suffixes: `_P` pairs, `_B` rows, `_M` trained tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from homeostat.types import TokenRow

if TYPE_CHECKING:
    from torch import Tensor

Params = Mapping[str, float | str]


@dataclass(frozen=True, slots=True)
class Side:
    """The chosen or the rejected completions of the pairs: sums over their trained tokens.

    `log_ratio_P` is that of policy to reference; None if the algorithm has no reference.
    """

    logp_P: Tensor
    length_P: Tensor
    log_ratio_P: Tensor | None

    @property
    def ratio_P(self) -> Tensor:
        assert self.log_ratio_P is not None, "the loss table asks for the column ref_logp"
        return self.log_ratio_P

    @property
    def mean_logp_P(self) -> Tensor:
        return self.logp_P / self.length_P


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of a micro-batch."""

    chosen: Side
    rejected: Side


@dataclass(frozen=True, slots=True)
class PairLosses:
    """The loss of each pair, and the implicit rewards that are measured with it."""

    loss_P: Tensor
    chosen_reward_P: Tensor
    rejected_reward_P: Tensor


def row_sums(values_M: Tensor, row_of_M: Tensor, num_rows: int) -> Tensor:
    """Return the sum of each row's values."""
    return values_M.new_zeros(num_rows).index_add(0, row_of_M, values_M)


def pairs_of(logp_B: Tensor, length_B: Tensor, ratio_B: Tensor | None) -> Pairs:
    """Take rows apart into pairs; the chosen one of a pair comes first."""
    sides = [
        Side(
            logp_P=logp_B[first::2],
            length_P=length_B[first::2],
            log_ratio_P=None if ratio_B is None else ratio_B[first::2],
        )
        for first in (0, 1)
    ]
    return Pairs(*sides)


def pair_sums(pairs: Pairs, found: PairLosses) -> dict[str, Tensor]:
    """Return raw sums over the pairs, from which the metrics of the update are made."""
    chosen_P, rejected_P = found.chosen_reward_P.detach(), found.rejected_reward_P.detach()
    count = chosen_P.new_full((), len(chosen_P))
    return {
        "examples": count,
        "chosen": count,
        "rejected": count,
        "correct": (chosen_P > rejected_P).to(chosen_P.dtype).sum(),
        "chosen_reward": chosen_P.sum(),
        "rejected_reward": rejected_P.sum(),
        "chosen_logp": pairs.chosen.logp_P.detach().sum(),
        "rejected_logp": pairs.rejected.logp_P.detach().sum(),
    }


def chosen_tokens(rows: Sequence[TokenRow]) -> float:
    """Return the trained tokens of the chosen completions, by their weights."""
    return sum(float(row.weights_T[1:].sum()) for row in rows[::2])
