"""vLLM itself, behind the few calls that the engine needs. Only this file uses vLLM's names.

    add(key, tokens, ...) -> step() -> Emitted(tokens, log-probs) ...

The V1 engine core runs in this process and works only inside `step`: between two steps nothing
moves, so every token belongs to the weights that are in place. With tensor_parallel_size above 1
vLLM starts one worker process per rank and talks to them through shared memory.

Log-probs are vLLM's `processed_logprobs`: after the temperature, and renormalised over what top-k
and top-p keep. Greedy requests have theirs at temperature 1.

Verified on vLLM 0.32's CPU build (model runner V1). Written to vLLM's documentation, and not run
yet: CUDA, sleep levels, CUDA graphs, tensor parallelism over NCCL, model runner V2, FP8 weights and
caches.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from homeostat.config.vllm import VllmEngineConfig
from homeostat.errors import EngineError
from homeostat.observe.processor import this_processor
from homeostat.rollout.engine import Sampling
from homeostat.rollout.native.memory import free_bytes
from homeostat.rollout.vendor import Emitted
from homeostat.rollout.vllm.options import check_options, require_computable, require_vllm

EXTENSION = "homeostat.rollout.vllm.worker.WeightWorker"
# Below this, vLLM would raise the temperature to it.
MIN_TEMPERATURE = 0.01


class Core:
    """One vLLM engine. `max_tokens` is the most that a request may have in all."""

    def __init__(
        self,
        folder: Path,
        config: VllmEngineConfig,
        *,
        dtype: str,
        max_tokens: int,
        quantization: Mapping[str, Any] | None = None,
    ) -> None:
        check_options(config.options)
        engine = require_vllm("vllm.v1.engine.llm_engine")
        executor = require_vllm("vllm.v1.executor")
        platform = require_vllm("vllm.platforms").current_platform
        if platform.is_cpu():
            require_computable(dtype, processor=this_processor())
        self.can_sleep = platform.is_sleep_mode_available()
        self._params = require_vllm("vllm.sampling_params")
        self._inputs = require_vllm("vllm.inputs.engine")
        self._counts: Any = None
        try:
            arguments = _arguments(folder, config, dtype=dtype, can_sleep=self.can_sleep)
            arguments |= quantised_arguments(config, quantization)
            if platform.is_cpu():
                # A prompt in pieces rewinds the generator of its request, which a CPU's cannot.
                arguments["enable_chunked_prefill"] = False
            settings = _settings(arguments, max_tokens)
            _give_cache(settings, config, max_tokens=max_tokens)
            self._llm = engine.LLMEngine(
                vllm_config=settings,
                executor_class=executor.Executor.get_class(settings),
                log_stats=True,
                stat_loggers=[self._counter],
                multiprocess_mode=False,
            )
        except (ValueError, RuntimeError, OSError, TypeError, AssertionError) as error:
            raise EngineError(
                f"vLLM does not start on {folder}: {error} "
                "(engine.memory_share, engine.options and its log say more)"
            ) from error

    @property
    def vocabulary(self) -> int:
        return self._llm.model_config.get_vocab_size()

    @property
    def model_type(self) -> str:
        return self._llm.model_config.hf_config.model_type

    @property
    def num_preempted(self) -> int:
        """The number of requests computed again, for lack of memory or to free it."""
        return self._counts.num_preempted

    @property
    def most_running(self) -> int:
        return self._counts.most_running

    def add(
        self,
        key: str,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        max_tokens: int,
        seed: int,
        salt: str,
    ) -> None:
        """Requests with one `salt` may share what is cached of their tokens."""
        params = self._params.SamplingParams(
            max_tokens=max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or 0,
            min_p=sampling.min_p,
            seed=seed,
            stop_token_ids=sorted(sampling.stop_ids),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=self._params.RequestOutputKind.DELTA,
        )
        self._add(key, tokens, params, salt)

    def add_scored(self, key: str, tokens: Sequence[int], *, salt: str) -> None:
        """A request for the log-probs of its own tokens, at temperature 1."""
        params = self._params.SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=self._params.RequestOutputKind.FINAL_ONLY,
        )
        self._add(key, tokens, params, salt)

    def _add(self, key: str, tokens: Sequence[int], params: Any, salt: str) -> None:
        prompt = self._inputs.tokens_input(list(tokens), cache_salt=salt)
        self._llm.add_request(key, prompt, params)

    def step(self) -> list[Emitted]:
        """One forward pass."""
        return [_emitted(output) for output in self._llm.step()]

    def abort(self, keys: Sequence[str]) -> None:
        self._llm.abort_request(list(keys))

    def forget_cache(self, *, retract: bool) -> None:
        """Drops cached prompts; `retract` also takes the cache from what runs, to be computed
        again. Without it nothing is dropped while something runs: salts keep old and new apart."""
        self._llm.engine_core.reset_prefix_cache(reset_running_requests=retract)

    def call(self, method: str, *arguments: object) -> list[Any]:
        """A method of worker.py, on every rank."""
        return self._llm.collective_rpc(method, args=arguments)

    def sleep(self) -> None:
        """Frees the cache; on a GPU the weights go to the host."""
        if self._llm.vllm_config.model_config.enable_sleep_mode:
            self._llm.sleep(level=1, mode="keep")
        elif not self.can_sleep:
            self.forget_cache(retract=True)
            self.call("homeostat_free_cache")

    def wake(self) -> None:
        if self._llm.vllm_config.model_config.enable_sleep_mode:
            self._llm.wake_up()
        elif not self.can_sleep:
            self.call("homeostat_restore_cache")

    def check_health(self) -> None:
        """Raises the error that vLLM raises if one of its workers is gone."""
        self._llm.model_executor.check_health()

    def close(self) -> None:
        self._llm.engine_core.shutdown()

    def _counter(self, vllm_config: object, engine_index: int = 0) -> object:
        base = require_vllm("vllm.v1.metrics.loggers").StatLoggerBase
        self._counts = _counter_class(base)()
        return self._counts


def _counter_class(base: type) -> type:
    class Counter(base):  # type: ignore[misc, valid-type]
        """Counts what vLLM reports after each step."""

        def __init__(self) -> None:
            self.num_preempted = self.most_running = 0

        def record(self, scheduler_stats, iteration_stats, *_: object, **__: object) -> None:
            running = 0
            if scheduler_stats is not None:
                running += scheduler_stats.num_running_reqs
            if iteration_stats is not None:
                # These requests ran in this step, but are no longer in the running list after it.
                running += len(iteration_stats.finished_requests)
                self.num_preempted += iteration_stats.num_preempted_reqs
            self.most_running = max(self.most_running, running)

        def log_engine_initialized(self) -> None:
            pass

    return Counter


def _arguments(
    folder: Path, config: VllmEngineConfig, *, dtype: str, can_sleep: bool
) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        **config.options,
        "model": str(folder),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": dtype,
        "logprobs_mode": "processed_logprobs",
        "max_num_seqs": config.max_concurrency,
        "enforce_eager": config.enforce_eager,
        "tensor_parallel_size": config.tensor_parallel_size,
        "gpu_memory_utilization": config.memory_share,
        "enable_sleep_mode": config.sleep and can_sleep,
        "worker_extension_cls": EXTENSION,
        "async_scheduling": False,
    }
    if config.max_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = config.max_batched_tokens
    if config.tensor_parallel_size > 1:
        arguments["distributed_executor_backend"] = "mp"
    return arguments


def quantised_arguments(
    config: VllmEngineConfig, quantization: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the arguments of an engine whose weights, or whose cache, are quantised.

    The folder holds weights as the trainer has them: quantised ones are sent before anything is
    sampled, so that none are loaded.
    """
    found: dict[str, Any] = {}
    if config.kv_cache_dtype != "auto":
        found["kv_cache_dtype"] = config.kv_cache_dtype
    if quantization is not None:
        overrides = {**config.options.get("hf_overrides", {})}
        found["hf_overrides"] = overrides | {"quantization_config": dict(quantization)}
        found["load_format"] = "dummy"
    return found


def _settings(arguments: dict[str, Any], max_tokens: int) -> Any:
    """Create vLLM's config. A row of `max_tokens` is scored as a prompt, which takes one position
    more than the row. The model may not have that position, but nothing is ever computed there."""
    make = require_vllm("vllm").EngineArgs
    try:
        return make(**arguments, max_model_len=max_tokens + 1).create_engine_config()
    except ValueError:
        make(**arguments, max_model_len=max_tokens).create_engine_config()
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
        return make(**arguments, max_model_len=max_tokens + 1).create_engine_config()


def _give_cache(settings: Any, config: VllmEngineConfig, *, max_tokens: int) -> None:
    """Set the cache size on a CPU: a share of the free memory, and no more than max_concurrency
    requests can fill."""
    if settings.device_config.device_type != "cpu":
        return
    model, parallel = settings.model_config, settings.parallel_config
    heads, layers = model.get_num_kv_heads(parallel), model.get_num_layers(parallel)
    block = settings.cache_config.block_size
    is_fp8 = config.kv_cache_dtype == "fp8"
    item = 1 if is_fp8 else torch.empty((), dtype=model.dtype).element_size()
    block_bytes = 2 * layers * heads * model.get_head_size() * item * block
    useful = (config.max_concurrency * (max_tokens // block + 1) + 1) * block_bytes
    share = int(config.memory_share * free_bytes(torch.device("cpu")))
    settings.cache_config.kv_cache_memory_bytes = min(useful, share)


def _emitted(output: Any) -> Emitted:
    (answer,) = output.outputs
    tokens: list[int] = list(answer.token_ids)
    logps: list[float] = [
        row[token].logprob for row, token in zip(answer.logprobs or (), tokens, strict=False)
    ]
    prompt_logps = None
    if output.prompt_logprobs is not None:
        rows = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
        prompt_logps = [row[token].logprob for row, token in rows]
    num_cached = output.num_cached_tokens or 0
    return Emitted(
        output.request_id, tokens, logps, num_cached=num_cached, prompt_logps=prompt_logps
    )
