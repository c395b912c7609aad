"""Refuses requests that can never be served, with the reason and the setting to change."""

from __future__ import annotations

import math

from homeostat.arrays import IntArray
from homeostat.errors import EngineError
from homeostat.rollout import kept
from homeostat.rollout.engine import Capabilities, Request, Sampling
from homeostat.rollout.flight import num_by_others
from homeostat.rollout.routes import why_not_resumable

# Logits of any model, over this, are numbers that fp32 holds.
MIN_TEMPERATURE = 1e-5


def require_servable(
    request: Request, capabilities: Capabilities, *, vocabulary: int, can_decode: bool
) -> None:
    """Raise EngineError if no engine with these limits could ever sample the request."""
    max_tokens = capabilities.max_tokens
    assert max_tokens is not None, capabilities
    problem = (
        _length_problem(request, max_tokens)
        or token_problem(request.tokens_T, vocabulary)
        or next(filter(None, (token_problem(s.tokens_T, vocabulary) for s in request.begun)), None)
        or _sampling_problem(request.sampling, can_decode)
        or _session_problem(request)
        or _routing_problem(request, capabilities)
        or _cut_problem(request.sampling, capabilities)
        or _kept_problem(request, capabilities)
    )
    if problem:
        raise EngineError(f"request {request.id!r} cannot be served: {problem}.")


def _session_problem(request: Request) -> str | None:
    if request.keep_cache and request.session_key is None:
        return "keep_cache is for the next request of its session, and it has no session_key"
    return None


def _routing_problem(request: Request, capabilities: Capabilities) -> str | None:
    if not request.routed_experts:
        return None
    if not capabilities.routed_experts:
        return f"it asks for routed experts, and {capabilities.why_no_routes}"
    if request.routed_weights and not capabilities.routed_weights:
        return f"it asks for the weights of experts, and {capabilities.name} records no weights"
    return why_not_resumable(request)


def _cut_problem(sampling: Sampling, capabilities: Capabilities) -> str | None:
    cuts, name = sampling.cuts, capabilities.name
    unknown = [cut for cut in cuts if cut not in capabilities.cuts]
    if unknown:
        return f"{unknown[0]} cuts its distribution, which the {name} engine cannot do"
    if len(cuts) > 1 and not capabilities.combines_cuts:
        return (
            f"{' and '.join(cuts)} cut its distribution, and the {name} engine can do one of them "
            "at a time"
        )
    return None


def _kept_problem(request: Request, capabilities: Capabilities) -> str | None:
    if not (request.kept_ids and request.sampling.is_cut):
        return None
    if not capabilities.kept_ids:
        return (
            f"it asks for the sets that tokens are drawn from, and {capabilities.why_no_kept_ids}"
        )
    return kept.why_not_resumable(request)


def _length_problem(request: Request, max_tokens: int) -> str | None:
    prompt = len(request.tokens_T) + num_by_others(request.begun)
    new = request.sampling.max_new_tokens
    if len(request.tokens_T) == 0:
        return "it has no tokens, so there is nothing that predicts the first one"
    if new < 1:
        return f"rollout.max_new_tokens is {new}; it must be at least 1"
    if prompt + new > max_tokens:
        return (
            f"its {prompt} prompt tokens and up to {new} new ones are more than the engine's "
            f"{max_tokens}. Lower rollout.max_new_tokens, or raise data.max_length"
        )
    return None


def token_problem(tokens_T: IntArray, vocabulary: int) -> str | None:
    """Return why the model cannot read the tokens; None if it can."""
    outside = tokens_T[(tokens_T < 0) | (tokens_T >= vocabulary)]
    if len(outside) == 0:
        return None
    return (
        f"token {outside[0]} lies outside the model's vocabulary of {vocabulary}. "
        "Does the tokenizer belong to the model (model.path, model.tokenizer)?"
    )


def _sampling_problem(sampling: Sampling, can_decode: bool) -> str | None:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        return f"rollout.temperature is {sampling.temperature}; it must be 0 or above"
    if 0 < sampling.temperature < MIN_TEMPERATURE:
        return (
            f"rollout.temperature is {sampling.temperature}, and logits over it may be larger than "
            f"fp32 can hold; it must be {MIN_TEMPERATURE:g} or above, or 0 for the likeliest token"
        )
    if not 0 < sampling.top_p <= 1:
        return f"top_p is {sampling.top_p}; it must be above 0 and at most 1"
    if sampling.top_k is not None and sampling.top_k < 1:
        return f"top_k is {sampling.top_k}; it must be at least 1, or none"
    if not 0 <= sampling.min_p <= 1:
        return f"min_p is {sampling.min_p}; it must be at least 0 and at most 1"
    if sampling.stop_strings and not can_decode:
        return "rollout.stop has texts, and this engine was given no tokenizer to find them with"
    if "" in sampling.stop_strings:
        return "rollout.stop has an empty text, which every completion ends with"
    return None
