"""vLLM as an Engine, in the process that creates it (host.py creates it in a separate one).

Noise: vLLM draws from a generator per request, seeded by (seed, id, tokens begun). What a request
samples does not depend on the rest of its batch, but one that resumes from `begun` is another draw
(`resumes_exactly` is False). Where top-k or top-p cut the distribution, vLLM gives log-probs of
what was left: `engine_logp_T` is not known then, and NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from homeostat.config.vllm import VllmEngineConfig
from homeostat.errors import EngineError
from homeostat.rollout.engine import Capabilities, EngineStats, Quiesce, Request
from homeostat.rollout.flight import Flight
from homeostat.rollout.served import Served
from homeostat.rollout.vendor import Emitted, VendorEngine, hashed_seed
from homeostat.rollout.vllm.core import MIN_TEMPERATURE, Core
from homeostat.sync.bucket import Bucket, Transport
from homeostat.types import POLICY_ID

_NO_ROUTES = (
    "vLLM 0.32 returns them from its model runner V2 alone, which needs Triton and which this "
    "engine does not use. Set engine.type=native, or model.moe.router_replay=off"
)
_NO_KEPT_IDS = (
    "vLLM 0.32 returns no sets: its log-probs are of what its filters left, and of a fixed number "
    "of tokens. Set engine.type=native, or rollout.top_p=1, rollout.min_p=0 and no rollout.top_k"
)


def vllm_capabilities(config: VllmEngineConfig, *, max_tokens: int) -> Capabilities:
    """Return what the engine can do; known without vLLM."""
    return Capabilities(
        name="vllm",
        shares_weights=False,
        batch_invariant=False,
        quiesce=frozenset(Quiesce),
        max_tokens=max_tokens,
        resumes_exactly=False,
        score_temperatures=config.score_temperatures,
        cut_logp=False,
        num_receivers=config.tensor_parallel_size,
        why_no_routes=_NO_ROUTES,
        why_no_kept_ids=_NO_KEPT_IDS,
    )


class VllmEngine(VendorEngine[Core]):
    """Samples with vLLM. `folder` is an HF checkpoint; `max_tokens` is the most that a request may
    have in all; `decode` turns tokens into the text that stop strings are looked for in.
    `quantization`: the `quantization_config` of the weights that it will be sent."""

    vendor = "vLLM"

    def __init__(
        self,
        folder: Path,
        config: VllmEngineConfig,
        *,
        served: Served,
        max_tokens: int,
        decode: Callable[[Sequence[int]], str] | None,
        policy_id: str = POLICY_ID,
        policy_version: int = 0,
        quantization: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        dtype = served.dtype if config.dtype == "auto" else config.dtype
        how = {"dtype": dtype, "max_tokens": max_tokens, "quantization": quantization}
        super().__init__(
            Core(folder, config, **how),
            vllm_capabilities(config, max_tokens=max_tokens),
            folder=folder,
            served=served,
            decode=decode,
            policy_id=policy_id,
            policy_version=policy_version,
        )

    def connect(self, transport: Transport) -> None:
        self.core.call("homeostat_connect", transport)
        self.life.is_connected = True

    def health(self) -> str | None:
        if self.life.health() is None:
            try:
                self.core.check_health()
            except (RuntimeError, TimeoutError, OSError) as error:
                self.life.problem = f"vLLM's workers do not answer: {error}"
        return self.life.health()

    def stats(self) -> EngineStats:
        has_cache = not (self.life.is_closed or self.life.is_asleep)
        return EngineStats(
            prompt_tokens=self._num_prompt,
            prompt_tokens_shared=self._num_shared,
            new_tokens=self._num_new,
            forward_passes=self._num_steps,
            preemptions=self.core.num_preempted,
            max_running=self.core.most_running,
            cache_bytes=sum(self.core.call("homeostat_cache_bytes")) if has_cache else 0,
        )

    def _require_servable(self, request: Request) -> None:
        super()._require_servable(request)
        if 0 < request.sampling.temperature < MIN_TEMPERATURE:
            raise EngineError(
                f"request {request.id!r} cannot be served: vLLM has no temperature between 0 and "
                f"{MIN_TEMPERATURE}, and rollout.temperature is {request.sampling.temperature}."
            )

    def _seed(self, flight: Flight) -> int:
        request = flight.request
        return hashed_seed(f"{request.seed}/{request.id}/{flight.num_new}")

    def _emitted(self, until: float) -> Sequence[Emitted]:
        self._num_steps += 1
        return self.core.step()

    def _load(self, bucket: Bucket) -> None:
        self.core.call("homeostat_apply", bucket)

    def _end_loading(self) -> None:
        self.core.call("homeostat_finish")

    def _before_commit(self, version: int) -> None:
        missing = sorted(set().union(*self.core.call("homeostat_finish")))
        if missing:
            self._break_off()
            raise EngineError(
                f"version {version} came without {len(missing)} of the model's parameters "
                f"({missing[0]} and others): the engine would sample with old ones."
            )
        super()._before_commit(version)

    def _forget_old_weights(self) -> None:
        self.core.forget_cache(retract=False)

    def _retract(self) -> None:
        self.core.forget_cache(retract=True)

    def _free_memory(self) -> None:
        self.core.sleep()

    def _restore_memory(self) -> None:
        self.core.wake()

    def _shut_down(self) -> None:
        self.core.call("homeostat_close")
        self.core.close()
