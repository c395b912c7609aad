"""Find settings of engines and transports that cannot work together or would have no effect."""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.config.engine import CUTS, EngineConfig
from homeostat.config.model import LoraConfig
from homeostat.config.native import NativeEngineConfig
from homeostat.config.observe import EvalSamplingConfig
from homeostat.config.rollout import RolloutConfig
from homeostat.config.run import RunConfig
from homeostat.config.sync import CudaIpcConfig, InProcessConfig
from homeostat.errors import Problem

_OWN = "Set engine.own_process=true, or remove it."


def find_engine_conflicts(config: RunConfig) -> Iterator[Problem]:
    """Yield every conflict of `engine` and `sync`, with its reason and remedy."""
    if config.engine.shares_weights:
        yield from _shared(config)
    elif isinstance(config.sync.transport, InProcessConfig):
        yield Problem(
            "sync.transport.type",
            "the engine is in its own process, where the trainer's tensors do not exist.",
            "Set it to shared_memory, or leave sync.transport out.",
        )
    elif config.sync.overlap == "always" and not isinstance(config.engine, NativeEngineConfig):
        yield Problem(
            "sync.overlap",
            f"the {config.engine.type} engine can receive weights only while it is paused.",
            "Set it to if_possible or never, or engine.type=native.",
        )
    yield from _abilities(config)
    yield from _precision(config)
    yield from _processes(config.engine)
    if config.lora is not None:
        yield from _adapter(config, config.lora)


def find_transport_conflicts(config: RunConfig, *, device: str) -> Iterator[Problem]:
    """Yield the conflicts of a transport with the device.

    `device` is 'cpu' or 'cuda', as trainer.device was resolved.
    """
    if isinstance(config.sync.transport, CudaIpcConfig) and device != "cuda":
        yield Problem(
            "sync.transport.type",
            f"cuda_ipc shares GPU memory, and the trainer is on the {device}.",
            "Set it to shared_memory, or train on a GPU (trainer.device).",
        )


def _shared(config: RunConfig) -> Iterator[Problem]:
    sync = config.sync
    if sync.interval > 1:
        yield Problem(
            "sync.interval",
            "the engine shares the trainer's weights, so it uses every update immediately.",
            _OWN,
        )
    if sync.transport is not None:
        yield Problem(
            "sync.transport",
            "the engine shares the trainer's weights: nothing is sent, so this key would have no "
            "effect.",
            _OWN,
        )
    for name in ("verify", "timeout_s", "overlap"):
        if name in sync.model_fields_set:
            yield Problem(
                f"sync.{name}",
                "the engine shares the trainer's weights: nothing is sent, so this key would "
                "have no effect.",
                _OWN,
            )


def _abilities(config: RunConfig) -> Iterator[Problem]:
    """Find what the recipe asks of the engine although the engine cannot do it."""
    engine = config.engine
    if isinstance(engine, NativeEngineConfig) and config.model.implementation == "transformers":
        yield from _through_transformers(engine)
    if config.rollout.is_cut and not engine.returns_kept_ids:
        yield Problem(
            f"rollout.{_cut_by(config.rollout)}",
            f"the {engine.type} engine does not return the set of tokens that it drew each token "
            "from, so the trainer's log-probs would belong to another distribution.",
            "Set engine.type=native, or sample from the whole distribution (top_p=1, min_p=0, no "
            "top_k).",
        )
    yield from _cuts(config)
    scores_one = engine.score_temperatures == "one" and config.rollout.temperature != 1
    if _replays(config) and scores_one:
        yield Problem(
            "debug.mode",
            f"in this mode the engine scores recorded samples, and {engine.type} can score at "
            "temperature 1 only.",
            "Set debug.mode=train_only, or rollout.temperature=1.",
        )


def _through_transformers(engine: NativeEngineConfig) -> Iterator[Problem]:
    """Find settings of our own engine that only the native decoder follows."""
    wanted = {
        "own_process": engine.own_process,
        "processes": (engine.processes or 1) > 1,
        "decode": engine.decode not in ("auto", "plain"),
        "quantization": engine.quantization is not None,
    }
    for name in (name for name, is_set in wanted.items() if is_set):
        yield Problem(
            f"engine.{name}",
            "with model.implementation=transformers the engine calls the model's own layers in "
            "the trainer's process, one step at a time.",
            "Remove it, or set model.implementation=native, or engine.type=vllm.",
        )


def _cuts(config: RunConfig) -> Iterator[Problem]:
    """Find cuts of a distribution that the engine cannot make as the others do."""
    engine, judged = config.engine, config.eval.sampling
    cut = {
        "rollout": [name for name in CUTS if name in _set_cuts(config.rollout)],
        "eval.sampling": [name for name in CUTS if name in _set_cuts(judged)],
    }
    for section, names in cut.items():
        for name in (name for name in names if name not in engine.cuts):
            yield Problem(
                f"{section}.{name}",
                f"the {engine.type} engine has no seeded noise for this key.",
                "Remove it, or set engine.type=native.",
            )
        if len(names) > 1 and not engine.combines_cuts:
            yield Problem(
                f"{section}.{names[-1]}",
                f"the {engine.type} engine applies it to the whole distribution, not to the "
                f"tokens that {names[0]} leaves.",
                f"Set one of {' and '.join(names)}, or engine.type=native.",
            )


def _precision(config: RunConfig) -> Iterator[Problem]:
    """Find precisions of the engine that contradict what the recipe promises."""
    engine, trained = config.engine, config.trainer.fp8
    if config.engine_fp8 is not None and engine.type == "sglang":
        yield Problem(
            "trainer.fp8" if trained is not None else "engine.quantization",
            "the sglang engine accepts weights only in the trainer's precision.",
            "Remove it, or set engine.type to vllm or native.",
        )
    late = trained is not None and trained.start_step > 1
    others = {
        "trainer.int4": config.trainer.int4 is not None,
        "model.quantization": config.model.quantization is not None,
    }
    for name in (name for name, is_set in others.items() if is_set and engine.quantization):
        yield Problem(
            "engine.quantization",
            f"the engine already uses the precision of {name}, and a layer can have only one.",
            f"Remove it, or remove {name}.",
        )
    if engine.quantization == "int4":
        yield from _int4(config)
    if late and engine.quantization is None and not engine.needs_native_decoder:
        yield Problem(
            "trainer.fp8.start_step",
            f"the {engine.type} engine keeps the precision that it is started in, so it cannot "
            "switch to FP8 together with the trainer.",
            "Set it to 1, or engine.quantization=fp8 (FP8 from the first step), or "
            "engine.type=native.",
        )
    if config.model.numerics != "invariant":
        return
    if engine.kv_cache_dtype == "fp8":
        yield Problem(
            "engine.kv_cache_dtype",
            "with rounded keys and values the engine's log-probs differ from the trainer's, and "
            "model.numerics=invariant guarantees that they are bitwise equal.",
            "Set it to auto, or model.numerics=fast.",
        )
    if engine.quantization == "fp8" and trained is None:
        yield Problem(
            "engine.quantization",
            "only the engine would be in FP8, and model.numerics=invariant guarantees that the "
            "log-probs of engine and trainer are bitwise equal.",
            "Set trainer.fp8, or model.numerics=fast.",
        )
    elif engine.quantization == "fp8" and late:
        yield Problem(
            "engine.quantization",
            "only the engine would be in FP8 before trainer.fp8.start_step, and "
            "model.numerics=invariant guarantees that the log-probs of engine and trainer are "
            "bitwise equal.",
            "Remove it: the engine then switches to FP8 together with the trainer.",
        )


def _adapter(config: RunConfig, lora: LoraConfig) -> Iterator[Problem]:
    """Yield what an adapter and an engine that gets its weights by copies do not agree on."""
    engine = config.engine
    is_sent = not engine.shares_weights or engine.num_helpers > 0
    if not is_sent:
        if "publish" in lora.model_fields_set:
            yield Problem(
                "lora.publish",
                "the engine shares the trainer's weights and adapter: nothing is sent, so this "
                "key would have no effect.",
                _OWN,
            )
        return
    if lora.publish == "adapter" and not isinstance(engine, NativeEngineConfig):
        yield Problem(
            "lora.publish",
            f"the {engine.type} engine accepts only weights with the adapter merged into them.",
            "Set it to merged, or engine.type=native.",
        )
    if lora.publish == "merged" and config.model.numerics == "invariant":
        yield Problem(
            "lora.publish",
            "merged weights are rounded, so the engine's log-probs would differ from the "
            "trainer's, and model.numerics=invariant guarantees that they are bitwise equal.",
            "Set it to adapter, or engine.own_process=false.",
        )
    if lora.publish == "merged" and config.model.quantization is not None:
        yield Problem(
            "lora.publish",
            "an adapter cannot be merged into weights of "
            f"model.quantization={config.model.quantization}, because rounding would remove it.",
            "Set it to adapter, or engine.own_process=false.",
        )


def _processes(engine: EngineConfig) -> Iterator[Problem]:
    if engine.data_parallel_size > 1 and engine.shares_weights:
        yield Problem(
            "engine.data_parallel_size",
            "the engine computes with the trainer's own tensors, and there is only one copy of "
            "them.",
            "Set engine.own_process=true; on a CPU engine.processes adds helpers to the trainer's "
            "process.",
        )
    if engine.num_helpers > 0 and not engine.shares_weights:
        yield Problem(
            "engine.processes",
            "helper processes are only for an engine in the trainer's process, and this engine "
            "has its own process.",
            "Remove it, or set engine.own_process=false.",
        )
    for name in ("max_restarts",) if engine.num_helpers else ("start_timeout_s", "max_restarts"):
        if name in engine.model_fields_set and engine.shares_weights:
            yield Problem(
                f"engine.{name}",
                ("the engine runs in the trainer's process, so no process is started for it."),
                _OWN,
            )


def _int4(config: RunConfig) -> Iterator[Problem]:
    """Find what an engine in INT4 beside another trainer cannot be combined with."""
    obstacles = {
        "engine.type": not config.engine.needs_native_decoder,
        "trainer.fp8": config.trainer.fp8 is not None,
        "lora": config.lora is not None,
        "model.numerics": config.model.numerics == "invariant",
    }
    reasons = {
        "engine.type": "only the native engine packs the weights that it receives; vLLM reads "
        "INT4 from an export, or receives the rounded weights of trainer.int4.",
        "trainer.fp8": "the trainer is in FP8, and a layer can have only one precision.",
        "lora": "the engine's INT4 kernels cannot apply an adapter.",
        "model.numerics": "with rounded weights the engine's log-probs differ from the "
        "trainer's, and model.numerics=invariant guarantees that they are "
        "bitwise equal.",
    }
    for name in (name for name, is_there in obstacles.items() if is_there):
        yield Problem("engine.quantization", f"int4: {reasons[name]}", f"Remove it, or {name}.")


def _cut_by(rollout: RolloutConfig) -> str:
    """Name the first key that cuts the distribution."""
    return next(name for name in CUTS if name in _set_cuts(rollout))


def _set_cuts(sampling: RolloutConfig | EvalSamplingConfig) -> set[str]:
    """Return the keys that leave a part of the vocabulary out."""
    found = {"top_k": sampling.top_k is not None, "top_p": sampling.top_p < 1}
    if isinstance(sampling, RolloutConfig):
        found["min_p"] = sampling.min_p > 0
    return {name for name, is_set in found.items() if is_set}


def _replays(config: RunConfig) -> bool:
    return config.debug is not None and config.debug.mode == "replay"
