"""The addresses from which captured steps read a model. They must stay the same for all replays.

A captured step reads whatever lies at its addresses, even if that memory was freed and reused. Then
log-probs would silently be wrong.
"""

from __future__ import annotations

from torch import nn

from homeostat.precision.int4_packed import PackedLinear
from homeostat.rollout.native.cuda.int4_weights import int4_products


def places_of(model: nn.Module) -> tuple[int, ...]:
    """Return the addresses of a model's weights, and of the rounded copies that it has now."""
    weights = [parameter.data_ptr() for parameter in model.parameters()]
    copies = [
        rounded.data_ptr()
        for product in int4_products(model)
        if not isinstance(product, PackedLinear) and product.copies is not None
        for rounded in product.copies.rounded
    ]
    return (*weights, *copies)
