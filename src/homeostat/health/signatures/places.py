"""Find the place of an out-of-memory error: the nearest frame that says what was being done.

The same words stand at the end of quite different tracebacks. The frames are read from the error
outward, those of torch itself skipped, until one belongs to a known place.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice

from homeostat.health.failures.code_owners import owner_of
from homeostat.health.log import Log, LogLine
from homeostat.health.signatures.unsaid import lists_settings
from homeostat.health.view import RunView
from homeostat.health.vital_signs.ending import ending_of

OOM = (
    "cuda out of memory",
    "cuda error: out of memory",
    "outofmemoryerror: hip out of memory",
    "hip out of memory",
    "npu out of memory",
    "xpu out of memory",
    "torch.outofmemoryerror",
    "torch.cuda.outofmemoryerror",
    "cudaerrormemoryallocation",
    "cuda_error_out_of_memory",
    "cuda && : out of memory",
    "hiperroroutofmemory",
    "hip error && out of memory",
    "musa out of memory",
    "mlu out of memory",
    "mps backend out of memory",
    "ur_result_error_out_of_",
    "pi_error_out_of_",
    "pt_devmem && allocation failed",
    "error code is 207001",
    "error code is 207018",
)
# Place -> what a frame's line (its file, its function or its source) holds there. A line is of the
# first place that it fits.
PLACES: dict[str, tuple[str, ...]] = {
    "logits": (
        "log_softmax",
        "from_logits",
        "cross_entropy",
        "logits.float()",
        "logits.to(",
        "logits = logits",
        "logits /",
        "logits.div",
        "lm_head(",
        "output_layer(",
        "logsumexp",
        "causallmloss",
        "vocab_parallel",
        "gather_logprobs",
        "get_batch_logps",
        "per_token_logps",
        "compute_logprobs",
        "compute_entropy",
        "entropy_loss",
        "softmax(logits",
        "log_probs(logits",
        "logits.clone()",
        "log_probs_and_entropy",
    ),
    "pinned": (".pin_memory(", "pinned_memory", "cudahostregister", "cudahostalloc"),
    # torch.load, which puts tensors where they were saved from.
    "restore": ("restore_location", "_cuda_deserialize", "torch/serialization.py"),
    # Predictions of all batches that are put together.
    "evaluation": ("nested_concat", "preds_host", "torch_pad_and_concatenate", "preds = logits if"),
    "moe": ("fused_moe", "experts", "grouped_gemm", "token_dispatch", "moe_layer", "sparsemoe"),
    "attention": (
        "eager_attention",
        "attn_weights",
        "attention_scores",
        "update_causal_mask",
        "prepare_4d",
    ),
    "wake": ("wake_up", "cumem", "resume_memory_occupation", "memory_saver", "create_and_map"),
    "capture": ("capture_model", "cuda_graph_runner", "cudagraph", "graph_capture"),
    "kv": (
        "initialize_kv_cache",
        "allocate_kv_cache",
        "initialize_cache",
        "init_memory_pool",
        "memory_pool.py",
    ),
    "profile": ("profile_run", "dummy_run", "dummy_sampler", "determine_available_memory"),
    "sync": (
        "update_weight",
        "sync_weights",
        "broadcast_to_vllm",
        "move_model_to_vllm",
        "summon_full_params",
        "gatheredparameters",
        "update_engine_weights",
    ),
    "optimizer": (
        "/optim/",
        "optimizer.step",
        "optimizer_step",
        "optimizer_states",
        "_init_group",
        "exp_avg",
        "fused_adam",
        "/optimizer/",
    ),
    "load": (
        "load_state_dict",
        "from_pretrained",
        "load_model",
        "load_weights",
        "load_pretrained",
        "create_weights",
        "after_loading",
        "initialize_model",
    ),
    "save": ("state_dict", "save_checkpoint", "save_model", "save_pretrained", "full_tensor"),
    "engine": ("vllm/", "sglang/", "lmdeploy/", "execute_model"),
    # Functions of autograd (torch/autograd/function.py) are called in the forward pass, too.
    "backward": ("in backward", "run_backward", "torch/autograd/__init__", "torch/autograd/graph"),
    "forward": ("modeling_", "/models/", "transformer_layer", "transformer_block", "decoder_layer"),
}
_TORCH = ("torch/nn/", "torch/_", "torch/utils/", "_call_impl", "autograd.function")
_SPEAKER = re.compile(r"^\s*(\([^)]*\)|\[rank\d+\]|\[\d+\])")
# Bounded, so that a line of nothing but digits is read once.
_SIZE = r"(\d{1,9}(?:\.\d{1,9})?) ([kmgt])i?b"
_TRIED = re.compile(rf"tried to allocate {_SIZE}", re.I)
_RESERVED = re.compile(rf"(?<![\d.]){_SIZE} is reserved by pytorch but unallocated", re.I)
_ALLOCATED = re.compile(rf"of the allocated memory {_SIZE} is allocated by pytorch", re.I)
_PROCESS = re.compile(rf"process \d{{1,9}} has {_SIZE} memory in use", re.I)
_FREE = re.compile(rf"of which {_SIZE} is free", re.I)
_TOTAL = re.compile(rf"total capacity of {_SIZE}", re.I)
_THIS_PROCESS = re.compile(rf"this process has {_SIZE} memory in use", re.I)
# The words of torch before 2.1: they give the card's numbers, and do not name other processes.
_OLD_TOTAL = re.compile(rf"{_SIZE} total capacity; ", re.I)
_OLD_FREE = re.compile(rf" already allocated; {_SIZE} free; ", re.I)
_OLD_OWN = re.compile(rf" free; {_SIZE} (?:reserved in total by pytorch|cached)", re.I)
_LEAST_HELD_GIB = 1.0
_GIB = {"k": 2**-20, "m": 2**-10, "g": 1.0, "t": 2.0**10}
# A buffer of compiled code: fp32, its last axis as long as a vocabulary (no layer is as wide).
_VOCABULARY = re.compile(
    r"empty_strided\w{0,40}+\(\([\w*, ]{0,80}?(?P<last>\d{5,7})\), \([^)]{0,120}\), torch\.float32"
)
_LEAST_VOCABULARY = 31_000
# Lines looked back for frames, and how many of the same speaker's are read.
_BACK, _READ = 80, 24
# Errors whose frames are read.
MAX_ERRORS = 12


def oom_at(view: RunView, names: Sequence[str]) -> bool:
    """Return whether an out-of-memory error of the log was raised at one of these places."""
    return not places(view.log).isdisjoint(names)


def oom_nowhere(view: RunView) -> bool:
    """Return whether no frame tells where memory ran out."""
    return not places(view.log)


def places(log: Log) -> set[str]:
    """Return the places of the log's out-of-memory errors, as far as their frames say."""
    return {place for line in oom_lines(log) if (place := place_of(log, line))}


def oom_lines(log: Log) -> list[LogLine]:
    """Return the first out-of-memory lines of each wording, in order.

    Later failures mostly follow from them.
    """
    found = {line.number: line for text in OOM for line in islice(log.find(text), MAX_ERRORS)}
    return [found[number] for number in sorted(found)][:MAX_ERRORS]


def place_of(log: Log, error: LogLine) -> str:
    """Return the place of the frame nearest to an error; "" if none is known.

    Where no frame tells, what the line says before the error may: what failed, or whose code warns.
    """
    for line in frames_before(log, error):
        found = _place_in(line.text.lower())
        if found:
            return found
    text = error.text.lower()
    return _place_in(text.partition("out of memory")[0])


def _place_in(text: str) -> str:
    buffer = _VOCABULARY.search(text)
    if buffer and int(buffer["last"]) > _LEAST_VOCABULARY:
        return "logits"
    names = [name for name, marks in PLACES.items() if any(mark in text for mark in marks)]
    # Except for a few functions, a frame of torch does not say what was being done.
    if names and (names[0] in ("logits", "optimizer", "backward") or not _is_torch(text)):
        return names[0]
    return ""


def frames_before(log: Log, error: LogLine) -> list[LogLine]:
    """Return the lines before an error by the same speaker, nearest first.

    They end at the head of the traceback.
    """
    end = bisect_left(log.lines, error.number, key=lambda line: line.number)
    speaker, found = _speaker(error), []
    for line in reversed(log.lines[max(0, end - _BACK) : end]):
        # An engine's list of settings has names such as enable_memory_saver; nothing ran there.
        if _speaker(line) != speaker or lists_settings(line):
            continue
        if "traceback (most recent call last)" in line.text.lower() or len(found) == _READ:
            break
        found.append(line)
    return found


def _is_torch(text: str) -> bool:
    return any(mark in text for mark in _TORCH)


def _speaker(line: LogLine) -> str:
    found = _SPEAKER.match(line.text)
    return found[1] if found else ""


def _size(pattern: re.Pattern[str], text: str) -> float | None:
    found = pattern.search(text)
    return _gib(found) if found is not None else None


def _gib(found: re.Match[str]) -> float:
    return float(found[1]) * _GIB[found[2].lower()]


def tried_at_least_gib(view: RunView, gib: float) -> bool:
    """Return whether a single allocation of at least that size failed."""
    return any((_size(_TRIED, line.text) or 0.0) >= gib for line in oom_lines(view.log))


def is_fragmented(view: RunView) -> bool:
    """Return whether much memory was reserved but unused when an allocation failed.

    It must be more than the allocation asked for.
    """
    for line in oom_lines(view.log):
        unused, tried = _size(_RESERVED, line.text), _size(_TRIED, line.text)
        total = _size(_TOTAL, line.text) or 0.0
        if unused is not None and tried is not None and unused >= max(tried, 1.0, 0.1 * total):
            return True
    return False


def is_shared(view: RunView) -> bool:
    """Return whether others held a third of the card or more when an allocation failed."""
    for line in oom_lines(view.log):
        total = _size(_TOTAL, line.text)
        if total and sum(_held_by_others(line.text)) >= total / 3:
            return True
    return False


def is_held_elsewhere(view: RunView) -> bool:
    """Return whether a third of the card is neither free nor torch's when an allocation fails.

    Then other programs hold it, although the error does not name them.
    """
    lines = islice(view.log.find("total capacity"), MAX_ERRORS)
    return any(_is_held_elsewhere(line.text) for line in lines)


def _is_held_elsewhere(text: str) -> bool:
    total, own = _size(_OLD_TOTAL, text), _size(_OLD_OWN, text)
    free = _size(_OLD_FREE, text)
    if total is None:
        total, own = _size(_TOTAL, text), _size(_THIS_PROCESS, text)
        free = _size(_FREE, text)
    if total is None or own is None:
        return False
    # "0 bytes free" has no unit that a size is read with.
    return total - own - (free or 0.0) >= max(total / 3, _LEAST_HELD_GIB)


def _held_by_others(text: str) -> list[float]:
    """Return the GiB that each other process holds, by the words of an out-of-memory error.

    Torch says "this process" where it finds its own number among those of the driver. In a
    container it does not, and names itself as "Process 12345", too: then the process that holds
    just a little more than what torch allocated here is this one, unless all that is named and what
    torch allocated fit on the card side by side.
    """
    held = sorted(map(_gib, _PROCESS.finditer(text)))
    allocated = _size(_ALLOCATED, text)
    if "this process has" in text.lower() or allocated is None:
        return held
    own = allocated + (_size(_RESERVED, text) or 0.0)
    total, free = _size(_TOTAL, text), _size(_FREE, text)
    if total is not None and sum(held) + own <= total - (free or 0.0) + 0.02:
        return held
    # Sizes are printed to two decimals.
    ours = next((size for size in held if size >= own - 0.02), None)
    if ours is not None:
        held.remove(ours)
    return held


def raised_in_library(view: RunView) -> bool:
    """Return whether the run ended in an exception that a library's code raised, not the user's."""
    return _owner_that_raised(view) not in ("", "user")


def raised_beyond_user(view: RunView) -> bool:
    """Return whether the exception that ended the run, if one did, was not raised in user code."""
    return _owner_that_raised(view) != "user"


def _owner_that_raised(view: RunView) -> str:
    """Return whose code raised the exception that ended the run; "" if no frame tells."""
    failure = ending_of(view).traceback
    frames = failure.frames if failure is not None else ()
    owners = (owner_of(frame.file) for frame in reversed(frames))
    return next((owner for owner in owners if owner != "stdlib"), "")


def not_raised_in_own_code(view: RunView, texts: Sequence[str]) -> bool:
    """Return whether no own code raised the exception, or the log has one of the patterns."""
    return raised_beyond_user(view) or view.log.has(*texts)
