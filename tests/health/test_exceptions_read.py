"""Exceptions that no rule recognises are taken apart: call, user frame, first cause."""

from __future__ import annotations

import pytest

from homeostat.health.diagnose import diagnose
from homeostat.health.failures.details import details_of
from homeostat.health.failures.reading import ExceptionReading
from homeostat.health.formats.as_json import as_json
from homeostat.health.readers import read_text
from homeostat.health.registry import RULES
from homeostat.health.vital_signs.last_exception import last_exception

SITE = "/v/lib/python3.11/site-packages"
HEAD = "Traceback (most recent call last):"
SHAPES = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 16x32)"
FRAMES = [
    '  File "/data/a/train.py", line 5, in <module>',
    "    trainer.train()",
    f'  File "{SITE}/transformers/models/qwen2/modeling_qwen2.py", line 90, in forward',
    "    return self.proj(x)",
    f'  File "{SITE}/torch/nn/modules/linear.py", line 125, in forward',
    "    return F.linear(input, self.weight, self.bias)",
]


def reading(text: str) -> ExceptionReading:
    found = last_exception(read_text(text))
    assert found is not None
    return found


def test_the_library_its_call_the_users_line_and_what_was_wrong_are_named() -> None:
    found = reading("\n".join([HEAD, *FRAMES, SHAPES]))
    assert (found.library, found.call.function if found.call else "") == ("torch", "forward")
    assert str(found.user) == "/data/a/train.py:5 in <module>"
    assert found.details[0].kind == "shape"
    assert "4x8 and 16x32" in found.wrong
    assert found.likely is not None
    assert found.likely[0] == "shape-mismatch"


def test_what_was_read_is_a_warning_that_says_so_and_the_end_stays_unknown() -> None:
    view = read_text("\n".join([HEAD, *FRAMES, SHAPES.replace("mat1 and mat2", "a and b")]))
    found = as_json(diagnose(view, RULES), view)
    first = found["findings"][0]
    assert (found["verdict"], first["code"], first["level"]) == ("not_known", "VIT002", "warn")
    assert first["causes"][0]["name"] == "shape-mismatch"
    assert "read, not recognised" in first["causes"][0]["why"]
    assert found["vital_signs"]["exception"]["library"] == "torch"


def test_a_recognised_error_goes_before_what_was_read() -> None:
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    view = read_text("\n".join([HEAD, *FRAMES, error]))
    first, *others = diagnose(view, RULES).findings
    assert first.code.startswith("ERR")
    assert "VIT002" not in [one.code for one in others]
    # It says that no rule knows the words, which would be no evidence for one that does.
    assert not any("VIT002" in text for text in first.evidence)


LOST = "torch.distributed.DistBackendError: NCCL error: remote process exited"


def test_of_eight_interleaved_ranks_the_one_that_failed_by_itself_is_first() -> None:
    errors = [LOST] * 8
    errors[5] = SHAPES
    lines = [
        f"[rank{rank}]: {line}"
        for place, line in enumerate([HEAD, *FRAMES, ""])
        for rank, error in enumerate(errors)
        for line in ([line] if place <= len(FRAMES) else [error])
    ]
    found = reading("\n".join(lines))
    assert found.failure.speaker == "rank 5"
    assert "the first to fail was rank 5" in found.others
    assert any("7 other processes only lost the connection" in one for one in found.others)


def test_the_table_of_torchrun_says_which_rank_was_first() -> None:
    one = [
        f"[rank{r}]: {line}" for r in (0, 1, 2) for line in (HEAD, *FRAMES, f"ValueError: odd {r}")
    ]
    table = ["Root Cause (first observed failure):", "[0]:", "  rank      : 2 (local_rank: 2)"]
    assert reading("\n".join([*one, *table])).failure.message == "odd 2"
    assert reading("\n".join(one)).failure.message == "odd 0"


@pytest.mark.parametrize("link", ["was the direct cause of the following exception:", ""])
def test_of_chained_exceptions_the_original_is_first(link: str) -> None:
    words = f"The above exception {link}" if link else (
        "During handling of the above exception, another exception occurred:"
    )  # fmt: skip
    outer = "RuntimeError: the step could not be completed"
    found = reading("\n".join([HEAD, *FRAMES, SHAPES, "", words, "", HEAD, *FRAMES[:2], outer]))
    assert found.failure.error == SHAPES
    assert any("could not be completed" in one for one in found.others)


LOADER = f"""{HEAD}
  File "/data/a/train.py", line 9, in <module>
    main()
  File "{SITE}/torch/_utils.py", line 434, in reraise
    raise exception
RuntimeError: Caught KeyError in DataLoader worker process 0.
Original {HEAD}
  File "{SITE}/torch/utils/data/_utils/worker.py", line 287, in _worker_loop
    data = fetcher.fetch(index)
  File "/data/a/rows.py", line 114, in collate
    return row["text"]
KeyError: 'text'
"""
BOX = f"""\u256d\u2500\u2500\u2500\u2500 {HEAD[:-1]} \u2500\u2500\u2500\u2500\u256e
\u2502 /data/a/monkeypatch/a_very_long_name_of_a_patch      \u2502
\u2502 .py:77 in forward                                    \u2502
\u2502 {SITE}/torch/utils/data/loader.py:634   \u2502
\u2502 in __next__                                          \u2502
\u2570\u2500\u2500\u2500\u2500\u256f
RuntimeError: The size of tensor a (1024) must match the size of tensor b (8192)
at non-singleton dimension 2
"""
NOTEBOOK = f"""KeyError                            {HEAD[:-1]}
<ipython-input-25-8cd5d6cded3e> in <module>
      1 # a sample
----> 2 trainer.train()

[{SITE}/torch/nn/module.py](https://localhost:8080/#) in _call(self, *args)
-> 1532             return self._call_impl(*args, **kwargs)

KeyError: 'source'
"""
GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "/data/a/train.py", line 5, in <module>
  |     main()
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/data/a/rollout.py", line 12, in step
    |     return x["y"]
    | KeyError: 'y'
    +------------------------------------
"""
RAY = f"""The actor died because of an error raised in its creation task, ray::PPO.__init__()
  File "{SITE}/ray/rllib/worker_set.py", line 229, in _setup
    self.add_workers(
  File "/data/a/env.py", line 31, in reset
    return self.obs
AttributeError: 'Env' object has no attribute 'obs'
"""
HEADLESS = "\n".join(
    f"(VllmWorker rank=3 pid=10) ERROR 06-05 06:18:1{n % 10} [executor.py:470] {line}"
    for n, line in enumerate([*FRAMES[3:], SHAPES])
)


@pytest.mark.parametrize(
    ("text", "error", "user"),
    [
        (LOADER, "KeyError: 'text'", "/data/a/rows.py:114 in collate"),
        (BOX, "RuntimeError: The size of", "a_very_long_name_of_a_patch.py:77 in forward"),
        (NOTEBOOK, "KeyError: 'source'", "<ipython-input-25-8cd5d6cded3e>:2 in <module>"),
        (GROUP, "KeyError: 'y'", "/data/a/rollout.py:12 in step"),
        (RAY, "AttributeError: 'Env'", "/data/a/env.py:31 in reset"),
        (HEADLESS, SHAPES, "None"),
        ("ImportError: cannot import name 'foo' from 'bar.baz'", "ImportError: cannot", "None"),
    ],
    ids=["loader", "box", "notebook", "group", "ray", "headless", "alone"],
)
def test_a_form_of_a_traceback_is_read(text: str, error: str, user: str) -> None:
    found = reading(text)
    assert found.failure.error.startswith(error)
    assert str(found.user).endswith(user)


def test_a_traceback_that_ends_in_mid_frame_is_an_end_of_which_the_frames_are_known() -> None:
    found = reading("\n".join([HEAD, *FRAMES[:5]]))
    assert not found.failure.has_tail
    assert found.library == "torch"


CRASH = f"""Fatal Python error: Segmentation fault

Current thread 0x00007fcf597eb640 (most recent call first):
  File "{SITE}/flashinfer/decode.py", line 514 in begin_forward
  File "{SITE}/vllm/attention/flashinfer.py", line 149 in begin_forward
  File "/data/a/train.py", line 88 in <module>
"""


def test_a_crash_of_compiled_code_names_the_call_that_crashed() -> None:
    found = reading(CRASH)
    assert (found.failure.kind, found.library) == ("SIGSEGV", "flashinfer")
    assert str(found.user) == "/data/a/train.py:88 in <module>"
    thrown = reading(
        "terminate called after throwing an instance of 'c10::Error'\n"
        "  what():  CUDA error: an illegal memory access was encountered\n"
    )
    assert thrown.failure.kind == "c10::Error"
    assert "illegal memory access" in thrown.failure.message


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            "TypeError: f() got an unexpected keyword argument 'x'",
            "argument",
            "f() does not take x",
        ),
        (
            "TypeError: f() missing 1 required positional argument: 'a'",
            "argument",
            "f() needs",
        ),
        ("AttributeError: module 'torch' has no attribute 'foo'", "attribute", "torch has no foo"),
        ("AttributeError: 'NoneType' object has no attribute 'group'", "attribute", "None where"),
        ("RuntimeError: expected scalar type Half but found Float", "dtype", "it is Float"),
        ("KeyError: 'answer'", "key", "no key answer"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/x/y'", "file", "/x/y"),
        ("ValueError: n_experts=256 must be divisible by ep_size=3", "divide", "by ep_size=3"),
        ("IndexError: index 9 is out of bounds for dimension 0 with size 4", "index", "size 4"),
        (
            "RuntimeError: mat1 and mat2 shapes cannot be multiplied (64x2048 and 1x4194304)",
            "quantised",
            "packed 4-bit",
        ),
        ("ValueError: `heads` must be divisible by `shards` (got 71 and 2", "divide", "`shards`"),
        ("AssertionError: rows 30 not a multiple of 4", "divide", "by 4"),
        ("AttributeError: SomeTokenizer has no attribute pad_to", "attribute", "has no pad_to"),
        ("TypeError: cannot pickle 'generator' object", "pickle", "generator"),
    ],
)
def test_the_words_of_an_exception_are_taken_apart(error: str, kind: str, words: str) -> None:
    name, _, message = error.partition(": ")
    found = details_of(name, message)
    assert found[0].kind == kind
    assert words in found[0].words


def test_nothing_is_said_twice() -> None:
    words = "The number of GPUs per node is not divisible by the flurbs."
    view = read_text(f"ValueError: {words}\n")
    (found,) = as_json(diagnose(view, RULES), view)["findings"]
    assert found["message"].count(words.rstrip(".")) == 1
    assert ".." not in found["message"]
    assert len(found["evidence"]) == 1
    names = [cause["name"] for cause in found["causes"]]
    assert names[0] == "parallel-degrees-mismatch"
    assert "ended-in-exception" not in names


@pytest.mark.parametrize("what", ["world size (6)", "The number of GPUs per node"])
def test_gpus_that_a_degree_does_not_divide_are_no_heads(what: str) -> None:
    view = read_text(f"ValueError: {what} is not divisible by the tensor parallel size (4)\n")
    (found,) = as_json(diagnose(view, RULES), view)["findings"]
    assert found["name"] == "parallel-sizes-inconsistent"


def test_a_batch_that_gpus_do_not_divide_is_a_batch() -> None:
    found = reading("ValueError: batch of flurbs (30) is not divisible by 4 gpus\n").likely
    assert found is not None
    assert found[0] == "batch-not-divisible"


def test_forms_that_say_the_same_of_a_name_are_told_once() -> None:
    told = reading("ValueError: Invalid backend: None, expected sglang or vllm\n").wrong
    assert told == "no backend is given; None is not a backend that is known"


ELASTIC = (
    "ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) local_rank: 0 "
    "(pid: 9) of binary: /usr/bin/python"
)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (f"AssertionError: flurbs must be even\n{ELASTIC}", "AssertionError"),
        (
            f"ValueError: flurbs must be even\n{ELASTIC}\n{HEAD}\n"
            f'  File "{SITE}/torch/distributed/launcher/api.py", line 9, in launch_agent\n'
            "    raise ChildFailedError(\n"
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n",
            "ValueError",
        ),
        (
            "torch._inductor.exc.InductorError: CalledProcessError: Command '['gcc']' returned "
            "non-zero exit status 1.",
            "torch._inductor.exc.InductorError",
        ),
        ("KeyError: 'flurb'\n[ERROR] [launch.py:325] exits with return code = 1", "KeyError"),
    ],
)  # fmt: skip
def test_an_error_without_frames_is_read_in_place_of_the_launchers_report(
    text: str, kind: str
) -> None:
    assert reading(text).failure.kind == kind


def test_a_launchers_own_error_is_not_taken_for_the_reason() -> None:
    text = "INFO start\nERROR Error: Trainer failed with exit code 1"
    assert last_exception(read_text(text)) is None


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ('self.cfg["obs_groups"] = resolve(obs, self.cfg["obs_groups"])', "setting-missing"),
        ('actor = resolve(cfg["actor"].pop("obs_groups"))', "setting-missing"),
        ('return row["obs_groups"]', ""),
    ],
)
def test_a_key_that_a_library_looks_up_in_its_settings_is_a_setting(
    code: str, expected: str
) -> None:
    frames = [
        '  File "/data/a/train.py", line 5, in <module>',
        "    runner = Runner(env, cfg)",
        f'  File "{SITE}/rsl_rl/runners/on_policy_runner.py", line 50, in __init__',
        f"    {code}",
    ]
    found = reading("\n".join([HEAD, *frames, "KeyError: 'obs_groups'"]))
    likely = found.likely[0] if found.likely is not None else ""
    assert (likely == "setting-missing") == (expected == "setting-missing")
