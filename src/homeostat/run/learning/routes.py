"""Check the routes that the engine recorded (R3), and measure how the updates replayed them.

groups -> require_routes: every sample that is trained has routes that fit the model
reports of the step's updates -> route_metrics
"""

from __future__ import annotations

from collections.abc import Sequence

from homeostat.columns import ROUTES
from homeostat.config.moe import MoeConfig
from homeostat.errors import ReplayError
from homeostat.ops.moe_shape import MoeShape
from homeostat.train.replay import REPLAYED, why_unfit
from homeostat.types import Completion, Prompt, Role, RolloutGroup, TokenRow, UpdateReport


def require_routes(groups: Sequence[RolloutGroup], config: MoeConfig, moe: MoeShape | None) -> None:
    """Raise ReplayError if a sample lacks the routes that are to be replayed, or has others."""
    names = REPLAYED[config.router_replay]
    if not names:
        return
    if moe is None:
        raise ReplayError(
            f"model.moe.router_replay={config.router_replay} replays routes to experts, but the "
            "model has no experts. Set it to off."
        )
    for group in groups:
        for sample in group.samples:
            completion = sample.completion
            # Without a token of the policy nothing of it is computed.
            if completion.num_policy_tokens == 0:
                continue
            for name in names:
                why = _why_unusable(name, group.prompt, completion, moe)
                if why:
                    raise ReplayError(
                        f"{completion.request_id}: {name}: {why}. Routes are never guessed, so "
                        "the step was stopped before anything was computed. Set "
                        "model.moe.router_replay=off to train without them."
                    )


def _why_unusable(name: str, prompt: Prompt, completion: Completion, moe: MoeShape) -> str:
    """Return what is wrong with a completion's routes; '' if nothing."""
    of_prompt = completion.prompt_columns.get(name)
    if of_prompt is None or len(of_prompt) != len(prompt.tokens_T):
        has = 0 if of_prompt is None else len(of_prompt)
        return (
            f"the engine recorded {has} of the prompt's {len(prompt.tokens_T)} tokens (a prompt "
            "that came from a cache without its routes?)"
        )
    why = why_unfit(name, of_prompt, moe)
    for number, segment in enumerate(completion.segments):
        if not why and len(segment.tokens_T) and name not in segment.columns:
            why = f"the engine recorded nothing of segment {number} of the completion"
        elif not why and name in segment.columns:
            why = why_unfit(name, segment.columns[name], moe)
    return why


def rows_for(role: Role, rows: Sequence[TokenRow], config: MoeConfig) -> list[TokenRow]:
    """Return the rows with the routes that a role replays: the reference may choose freely."""
    if role is not Role.REFERENCE or config.replay_reference:
        return list(rows)
    return [without_routes(row) for row in rows]


def without_routes(row: TokenRow) -> TokenRow:
    columns = {name: values for name, values in row.columns.items() if name not in ROUTES}
    return TokenRow(row.row_id, row.tokens_T, row.weights_T, columns)


def route_metrics(reports: Sequence[UpdateReport]) -> dict[str, float]:
    """Return what the updates of a step saw of replayed routes; nothing if none were replayed.

    The first update computes under the weights that the step began with, so what its routers would
    have chosen is compared with the engine alone; the last one also with the updates between.
    """
    stats = [report.stats for report in reports if report.stats.get("replay_compared", 0) > 0]
    if not stats:
        return {}
    first, last = stats[0], stats[-1]
    tokens = sum(one["replay_tokens"] for one in stats)
    return {
        "moe/replayed_share": sum(one["replay_replayed"] for one in stats) / tokens,
        "moe/route_agreement": first["replay_same"] / first["replay_compared"],
        "moe/router_drift": 1.0 - last["replay_same"] / last["replay_compared"],
    }
