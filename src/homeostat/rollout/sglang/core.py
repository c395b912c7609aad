"""SGLang itself, behind the few calls that the engine needs. Only this file uses SGLang's names.

    add(key, tokens, ...) -> step() -> Emitted(tokens, log-probs) ...

SGLang's `Engine` computes in separate scheduler processes, one per tensor-parallel rank, and runs
on whether it is asked or not; requests are tasks on its event loop, which runs only inside of a
verb. Tokens come in the order in which they were sampled.

Noise: with deterministic inference SGLang adds to each logit a hash of (seed, position, token), so
that a sample does not depend on its batch, and one that resumes draws what it would have drawn.
Where greedy or cut requests are in a batch, it hashes the ranks of all its tokens instead.

Log-probs of sampled tokens are at the request's temperature and over the whole vocabulary; those
of given tokens at temperature 1. Where top-k or top-p cut the distribution, SGLang returns the set
that a token was drawn from, and the log-prob within it. Its top-p is a share of the whole
distribution, also after a top-k, and min-p has no seeded noise: both are refused.

Verified with SGLang 0.5.23 on a CPU, with stand-ins for the kernels that it lacks there
(tests/support/sglang_cpu). Written to SGLang's sources, and not run yet: CUDA, memory release, CUDA
graphs, tensor parallelism, FP8 caches.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from homeostat.config.ranks import LOOPBACK
from homeostat.config.sglang import SglangEngineConfig
from homeostat.errors import EngineError
from homeostat.models.hf import read_config
from homeostat.rollout.engine import Sampling
from homeostat.rollout.native.memory import free_bytes
from homeostat.rollout.sglang.options import check_options, require_sglang
from homeostat.rollout.vendor import Emitted
from homeostat.workers.network import free_port

T = TypeVar("T")

# SGLang keeps this many places of its context free.
RESERVED_TOKENS = 8
# The longest that one step waits for a token, where its caller has no time left.
STEP_SECONDS = 1.0
CPU_ATTENTION = "torch_native"


class Core:
    """One SGLang engine. `max_tokens` is the most that a request may have in all."""

    def __init__(
        self,
        folder: Path,
        config: SglangEngineConfig,
        *,
        device: str,
        dtype: str,
        max_tokens: int,
        vocabulary: int,
        host: str = LOOPBACK,
    ) -> None:
        check_options(config.options)
        _require_no_mlp_biases(folder)
        self._can_sleep = config.sleep and device == "cuda"
        self._io = require_sglang("sglang.srt.managers.io_struct")
        if device == "cpu":
            _allow_seeds_on_a_cpu()
        arguments = server_arguments(
            folder, config, device=device, dtype=dtype, max_tokens=max_tokens, vocabulary=vocabulary
        )
        if device == "cpu":
            arguments["max_total_tokens"] = cache_tokens(
                folder, config, dtype=dtype, max_tokens=max_tokens
            )
        make = require_sglang("sglang.srt.entrypoints.engine").Engine
        try:
            self._engine = make(**arguments, nccl_port=free_port(host))
        except (ValueError, RuntimeError, OSError, TypeError, AssertionError) as error:
            raise EngineError(
                f"SGLang does not start on {folder}: {error} "
                "(engine.memory_share, engine.options and its log say more)"
            ) from error
        self._manager = self._engine.tokenizer_manager
        self._loop = self._engine.loop
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._emitted: list[Emitted] = []
        self._news = asyncio.Event()
        self._has_session = False
        self._dtype = dtype if config.kv_cache_dtype == "auto" else "float8_e4m3fn"

    @property
    def vocabulary(self) -> int:
        return self._manager.model_config.vocab_size

    @property
    def model_type(self) -> str:
        return self._manager.model_config.hf_config.model_type

    @property
    def cache_bytes(self) -> int:
        (info, *_) = self._engine._scheduler_init_result.scheduler_infos
        config = self._manager.model_config.hf_config
        return int(info["max_total_num_tokens"]) * token_bytes(config.to_dict(), self._dtype)

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
        cut = {"return_sampling_mask": True} if sampling.is_cut else {}
        top_k = sampling.top_k or (self.vocabulary if sampling.is_cut else -1)
        params = {
            "max_new_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": min(top_k, self.vocabulary),
            "sampling_seed": seed,
            "stop_token_ids": sorted(sampling.stop_ids) or None,
            "ignore_eos": True,
        }
        self._add(key, tokens, params, salt=salt, stream=True, **cut)

    def add_scored(self, key: str, tokens: Sequence[int], *, salt: str) -> None:
        """A request for the log-probs of its own tokens, at temperature 1."""
        params = {"max_new_tokens": 0, "temperature": 0.0, "ignore_eos": True}
        self._add(key, tokens, params, salt=salt, logprob_start_len=0)

    def step(self, until: float) -> list[Emitted]:
        """Wait for the next tokens, until a time or for one step."""
        patience_s = max(until - time.monotonic(), STEP_SECONDS)
        return self._run(self._next(patience_s))

    def collect(self) -> list[Emitted]:
        """Return what has come meanwhile, without waiting for more."""
        return self._run(self._next(0.0))

    def abort(self, keys: Sequence[str]) -> None:
        """End requests. What they still emit is dropped by whoever asked for them."""
        for key in keys:
            if key in self._tasks:
                self._manager.abort_request(key)

    def settle(self) -> None:
        """Wait until no request is left in SGLang. Those that are left have been aborted."""
        if self._tasks:
            self._run(asyncio.wait(list(self._tasks.values())))

    def pause(self) -> None:
        """Stop sampling where it is, and take in all that was sampled before."""
        self._run(self._manager.pause_generation(self._io.PauseGenerationReqInput(mode="in_place")))
        # Tokens and answers come by two sockets: the second answer is after all tokens.
        for _ in range(2):
            self._run(self._manager.get_internal_state())

    def resume(self) -> None:
        self._run(self._manager.continue_generation(self._io.ContinueGenerationReqInput()))

    def forget_cache(self) -> None:
        """Drop cached prompts. Nothing is dropped while something runs: salts keep old and new
        apart."""
        if not self._tasks:
            self._run(self._manager.flush_cache())

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Take in some tensors, under their HF names. Raises EngineError."""
        if not self._has_session:
            self._require(self._engine.begin_weight_update())
            self._has_session = True
        self._require(self._engine.update_weights_from_tensor(weights, flush_cache=False))

    def finish_loading(self) -> None:
        """End an update, whole or not."""
        if self._has_session:
            self._has_session = False
            self._require(self._engine.end_weight_update())

    def sleep(self) -> None:
        """On a GPU: free the cache, and move the weights to the host. Nothing may run."""
        self.forget_cache()
        if self._can_sleep:
            self._engine.release_memory_occupation()

    def wake(self) -> None:
        if self._can_sleep:
            self._engine.resume_memory_occupation()

    def is_alive(self) -> bool:
        """Return whether all of SGLang's processes are there."""
        return all(os.path.exists(f"/proc/{pid}") for pid in self._engine.get_all_child_pids())

    def close(self) -> None:
        self._engine.shutdown()

    def _add(
        self, key: str, tokens: Sequence[int], params: Mapping[str, Any], *, salt: str, **more: Any
    ) -> None:
        request = self._io.GenerateReqInput(
            rid=key,
            input_ids=list(tokens),
            sampling_params=dict(params),
            return_logprob=True,
            cache_salt=salt,
            **more,
        )
        self._tasks[key] = self._loop.create_task(self._follow(key, request))

    async def _follow(self, key: str, request: Any) -> None:
        """Take in the answers to one request until its end."""
        try:
            async for answer in self._manager.generate_request(request, None):
                self._emitted.append(_emitted(key, answer))
                self._news.set()
        except ValueError as error:
            self._emitted.append(Emitted(key, [], [], error=str(error)))
        finally:
            del self._tasks[key]
            self._news.set()

    async def _next(self, patience_s: float) -> list[Emitted]:
        if not self._emitted:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), patience_s)
        # The tokens of one batch arrive request by request.
        await asyncio.sleep(0)
        found, self._emitted = self._emitted, []
        return found

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def _require(self, answer: tuple[bool, str]) -> None:
        is_good, words = answer[:2]
        if not is_good:
            raise EngineError(f"SGLang did not take new weights: {words}")


def server_arguments(
    folder: Path,
    config: SglangEngineConfig,
    *,
    device: str,
    dtype: str,
    max_tokens: int,
    vocabulary: int,
) -> dict[str, Any]:
    """Return the arguments of SGLang's Engine."""
    arguments: dict[str, Any] = {
        "log_level": "warning",
        **config.options,
        "model_path": str(folder),
        "skip_tokenizer_init": True,
        "sampling_defaults": "openai",
        "dtype": dtype,
        "device": device,
        "context_length": max_tokens + RESERVED_TOKENS,
        "max_running_requests": config.max_concurrency,
        "mem_fraction_static": config.memory_share,
        "tp_size": config.tensor_parallel_size,
        "disable_cuda_graph": config.enforce_eager or device == "cpu",
        "enable_memory_saver": config.sleep and device == "cuda",
        "enable_weights_cpu_backup": config.sleep and device == "cuda",
        "enable_deterministic_inference": True,
        "disable_overlap_schedule": True,
        "stream_interval": 1,
        "incremental_streaming_output": True,
        "sampling_mask_max_tokens": vocabulary,
    }
    if config.max_batched_tokens is not None:
        arguments["chunked_prefill_size"] = config.max_batched_tokens
    if config.kv_cache_dtype != "auto":
        arguments["kv_cache_dtype"] = "fp8_e4m3"
    if device == "cpu":
        arguments.setdefault("attention_backend", CPU_ATTENTION)
    return arguments


def cache_tokens(folder: Path, config: SglangEngineConfig, *, dtype: str, max_tokens: int) -> int:
    """Return the size of the cache on a CPU: a share of what is free, and no more than
    max_concurrency requests can fill."""
    settings = require_sglang("transformers").AutoConfig.from_pretrained(folder).to_dict()
    share = config.memory_share * free_bytes(torch.device("cpu"))
    useful = config.max_concurrency * (max_tokens + RESERVED_TOKENS)
    return min(useful, math.floor(share / token_bytes(settings, dtype)))


def token_bytes(config: Mapping[str, Any], dtype: str) -> int:
    """Return the bytes of one token's keys and values."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return 2 * config["num_hidden_layers"] * kv_heads * head_dim * getattr(torch, dtype).itemsize


def _require_no_mlp_biases(folder: Path) -> None:
    """Refuse a model whose MLP has biases: SGLang would leave them out, and say nothing."""
    if read_config(folder).get("mlp_bias"):
        raise EngineError(
            f"SGLang computes MLPs without biases, and the model in {folder} has them (mlp_bias in "
            "its config.json). Set engine.type to vllm or native."
        )


def _allow_seeds_on_a_cpu() -> None:
    """SGLang lists the attention kernels with which it lets requests have seeds, and gives others
    this way to be added. Torch's own computes each request alone."""
    choices = require_sglang("sglang.srt.server_args")
    for add in (
        choices.add_deterministic_attention_backend_choices,
        choices.add_radix_supported_deterministic_attention_backend_choices,
    ):
        add([CPU_ATTENTION])


def _emitted(key: str, answer: Mapping[str, Any]) -> Emitted:
    facts = answer["meta_info"]
    reason = facts.get("finish_reason") or {}
    if reason.get("type") == "abort":
        return Emitted(key, [], [], error=str(reason.get("message")))
    prompt = facts.get("input_token_logprobs")
    return Emitted(
        key,
        tokens=list(answer["output_ids"]),
        logps=[logp for logp, *_ in facts.get("output_token_logprobs") or ()],
        num_cached=facts.get("cached_tokens") or 0,
        num_retracted=facts.get("num_retractions") or 0,
        prompt_logps=None if prompt is None else [logp for logp, *_ in prompt[1:]],
        kept=facts.get("output_token_sampling_mask"),
        sampled_logps=facts.get("output_token_sampling_logprobs"),
    )
