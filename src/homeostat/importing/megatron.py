"""Take over settings of slime and miles that no table can hold: switches and absolute rates."""

from __future__ import annotations

from homeostat.importing.algorithms import is_rl
from homeostat.importing.draft import Draft
from homeostat.importing.recognise import fold


def set_megatron(draft: Draft) -> None:
    """Set the end of the learning rate, the scale of advantages and the form of the correction."""
    if draft.framework.name not in ("slime", "miles"):
        return
    rate = draft.value("trainer.lr")
    for given in draft:
        name = fold(given.name)
        if name == "min_lr" and isinstance(rate, int | float) and rate > 0:
            if isinstance(given.value, int | float):
                share = min(1.0, float(f"{given.value / rate:.6g}"))
                why = f"{given.value} / the peak of {rate}"
                draft.take(given, "trainer.schedule.min_lr_share", share, why=why)
        elif name == "disable_grpo_std_normalization" and given.value is True and is_rl(draft):
            draft.take(given, "algorithm.scale", "none")
    if is_rl(draft) and draft.has("algorithm.correction.weight.high"):
        # Their correction weighs tokens.
        draft.set("algorithm.correction.weight.type", "token")
