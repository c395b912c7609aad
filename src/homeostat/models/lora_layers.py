"""The layers of low-rank adapters: a frozen linear map and what is trained beside it.

models/lora.py has the formulae, and adds these layers to a model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from homeostat.config.model import LoraConfig
from homeostat.errors import ModelError
from homeostat.ops.adapters import AdaptedLinear, Factors, adapted_linear, added_update
from homeostat.ops.dropout import DropoutKeys, dropout
from homeostat.ops.held import HeldLinear, HeldWeight, held_linear
from homeostat.ops.linear import Linear, Numerics, is_plain_product, plain_product

# Turns a parameter, of which only a shard may be on this rank, into the whole tensor.
Whole = Callable[[Tensor], Tensor]


class LoraLinear(AdaptedLinear):
    """A frozen linear map with an adapter. It takes over the parameters of `base`."""

    def __init__(
        self, base: nn.Linear, config: LoraConfig, *, number: int, keys: DropoutKeys
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.numerics: Numerics = base.numerics if isinstance(base, Linear) else "fast"
        self.product = base.product if isinstance(base, Linear) else plain_product(self.numerics)
        self._take_weight(base)
        self.bias = base.bias
        place = weight_place(base)
        self.lora_A = self._map(base.in_features, config.rank, **place)
        self.lora_B = self._map(config.rank, base.out_features, **place)
        self.rank, self.scaling = config.rank, config.scaling
        self.rate = config.dropout
        self.number = number
        self.keys = keys

    def _take_weight(self, base: nn.Linear) -> None:
        self.weight = base.weight

    def _map(self, *sizes: int, **place: Any) -> Linear:
        return Linear(*sizes, bias=False, numerics=self.numerics, **place)

    @property
    def frozen(self) -> Tensor | HeldWeight:
        """Return the base's weight as it is held."""
        return self.weight

    @property
    def adapter(self) -> dict[str, Tensor]:
        """Return the trained tensors by their names within the module."""
        return {"lora_A.weight": self.lora_A.weight, "lora_B.weight": self.lora_B.weight}

    def forward(self, x: Tensor) -> Tensor:
        if self.scaling == 0:
            return self._base(x)
        return self._adapted(x, self._dropped(x), self.bias)

    def _base(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)

    def _adapted(self, x: Tensor, dropped: Tensor | None, bias_O: Tensor | None) -> Tensor:
        # The adapter stays unmerged, so that trainer and native engine compute the same.
        a_RK, b_OR = self.lora_A.weight, self.lora_B.weight
        how = {"scale": self.scaling, "numerics": self.numerics, "dropped": dropped}
        if is_plain_product(self.product):
            return adapted_linear(x, Factors(self.frozen, bias_O, a_RK, b_OR), **how)
        return added_update(self.product(x, self.weight, bias_O), x, a_RK, b_OR, **how)

    def factors(self) -> Factors | None:
        has_dropout = self.rate > 0 and self.keys.keys_N is not None
        is_watched = self._forward_hooks or self._forward_pre_hooks or self._backward_hooks
        if has_dropout or is_watched or self.scaling == 0 or self.numerics != "fast":
            return None
        if not is_plain_product(self.product):
            return None
        return Factors(self.frozen, self.bias, self.lora_A.weight, self.lora_B.weight)

    def _dropped(self, x: Tensor) -> Tensor | None:
        """Return the input of A; None if it is x itself."""
        keys_N = self.keys.keys_N
        if self.rate == 0 or keys_N is None:
            return None
        if x.shape[:-1].numel() != keys_N.shape[0]:
            raise ModelError(
                f"lora.dropout: a target module sees {x.shape[:-1].numel()} of {keys_N.shape[0]} "
                "tokens, so that it cannot tell which they are. Set lora.dropout=0 or leave the "
                "module out of lora.targets."
            )
        flat_NC = x.reshape(-1, x.shape[-1])
        return dropout(flat_NC, keys_N, module=self.number, rate=self.rate).view_as(x)

    @torch.no_grad()
    def merged_weight(self, whole: Whole = Tensor.detach) -> Tensor:
        """Return the weight with the adapter added, summed in fp32 and rounded once."""
        return self.merged_exactly(whole).to(self.weight.dtype)

    @torch.no_grad()
    def merged_exactly(self, whole: Whole = Tensor.detach) -> Tensor:
        """Return the weight with the adapter added, in fp32."""
        # A bf16 product and sum would round the small update away.
        return self._merged(whole(self.weight).float(), whole)

    def _merged(self, weight: Tensor, whole: Whole) -> Tensor:
        update = whole(self.lora_B.weight).float() @ whole(self.lora_A.weight).float()
        return weight + update * self.scaling


class DoraLinear(LoraLinear):
    """A frozen linear map with a DoRA adapter: directions by LoRA, and the rows' lengths."""

    def __init__(self, base: nn.Linear, config: LoraConfig, **how: Any) -> None:
        super().__init__(base, config, **how)
        place = weight_place(base)
        self.lora_magnitude_vector = nn.Parameter(torch.empty(base.out_features, **place))
        # Squares of the frozen rows' norms, once they are known.
        self._squares_O: Tensor | None = None

    def factors(self) -> None:
        """A row's length is no part of a low-rank update."""

    @property
    def adapter(self) -> dict[str, Tensor]:
        return {**super().adapter, "lora_magnitude_vector": self.lora_magnitude_vector}

    def _adapted(self, x: Tensor, dropped: Tensor | None, bias_O: Tensor | None) -> Tensor:
        scale_O = self.lora_magnitude_vector / self.norms().to(self.lora_magnitude_vector.dtype)
        if dropped is None:
            out = super()._adapted(x, None, None) * scale_O
        else:
            # As in peft: what is dropped is dropped from the turned map, not from the base.
            kept = self._base_without_bias(x) - self._base_without_bias(dropped)
            out = kept + super()._adapted(dropped, None, None) * scale_O
        return out if bias_O is None else out + bias_O

    def _base_without_bias(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, None)

    @torch.no_grad()
    def norms(self) -> Tensor:
        """Return the norms of the rows of W + scale * B A, fp32 [O], without making that matrix."""
        weight, b_OR = self.weight, self.lora_B.weight.float()
        if self._squares_O is None:
            self._squares_O = squares_of_rows(weight)
        mixed_OR = (weight @ self.lora_A.weight.t()).float()
        a_RK = self.lora_A.weight.float()
        turned = 2 * (mixed_OR * b_OR).sum(1)
        added = self.scaling * ((b_OR @ (a_RK @ a_RK.t())) * b_OR).sum(1)
        return (self._squares_O + self.scaling * (turned + added)).clamp_(min=0).sqrt_()

    def _merged(self, weight: Tensor, whole: Whole) -> Tensor:
        turned = super()._merged(weight, whole)
        return turned * (whole(self.lora_magnitude_vector).float() / turned.norm(dim=1))[:, None]


class _OverHeld:
    """The part of an adapted map whose base is held in another format."""

    def _take_weight(self, base: HeldLinear) -> None:
        self.held = base.held

    @property
    def weight(self) -> Tensor:
        return self.held.tensor()

    @property
    def frozen(self) -> HeldWeight:
        return self.held

    def _base(self, x: Tensor) -> Tensor:
        return held_linear(x, self.held, self.bias, numerics=self.numerics)

    def _base_without_bias(self, x: Tensor) -> Tensor:
        return held_linear(x, self.held, None, numerics=self.numerics)


class HeldLoraLinear(_OverHeld, LoraLinear):
    """An adapter over a held weight."""


class HeldDoraLinear(_OverHeld, DoraLinear):
    """A DoRA adapter over a held weight."""


# By (whether the base is held, whether it is DoRA).
ADAPTED_LAYERS: dict[tuple[bool, bool], type[LoraLinear]] = {
    (False, False): LoraLinear,
    (False, True): DoraLinear,
    (True, False): HeldLoraLinear,
    (True, True): HeldDoraLinear,
}


def weight_place(base: nn.Linear) -> dict[str, Any]:
    """Return the dtype of a map's weight, and its device."""
    if isinstance(base, HeldLinear):
        device = next(base.held.parameters()).device
        return {"dtype": base.held.dtype, "device": device}
    return {"dtype": base.weight.dtype, "device": base.weight.device}


def squares_of_rows(weight_OK: Tensor) -> Tensor:
    """Return the sums of squares of the rows, fp32 [O]."""
    return torch.linalg.vector_norm(weight_OK, dim=1, dtype=torch.float32).square_()
