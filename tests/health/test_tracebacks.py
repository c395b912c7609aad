"""Tracebacks of logs: whose code raised, in every form that launchers give them."""

from __future__ import annotations

import json

import pytest

from homeostat.health.diagnose import diagnose
from homeostat.health.failures.code_owners import owner_of
from homeostat.health.failures.tracebacks import tracebacks, untangled
from homeostat.health.formats.as_json import Verdict, as_json, verdict
from homeostat.health.log import Log, LogLine
from homeostat.health.readers import read_text
from homeostat.health.registry import RULES
from homeostat.health.words import shortened

PLAIN = """Traceback (most recent call last):
  File "/data/ana/proj/train.py", line 88, in <module>
    trainer.train()
  File "/opt/venv/lib/python3.11/site-packages/trl/trainer/grpo_trainer.py", line 1081, in _rewards
    output = reward_func(prompts=prompts, completions=completions)
             ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/data/ana/proj/rewards.py", line 41, in accuracy
    return json.loads(text)["answer"]
  File "/usr/lib/python3.11/json/__init__.py", line 346, in loads
    return _default_decoder.decode(s)
json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"""
BOXED = """\u256d\u2500\u2500\u2500 Traceback (most recent call last) \u2500\u2500\u2500\u256e
\u2502 /data/ana/proj/train.py:88 in <module>                        \u2502
\u2502 /opt/venv/lib/python3.11/site-packages/trl/trainer/x.py:9 in f \u2502
\u2502   8 \u2502   return function(x)                                    \u2502
\u2502 /data/ana/proj/rewards.py:41 in accuracy                      \u2502
\u2570\u2500\u2500\u2500\u2500\u2500\u2500\u256f
KeyError: 'answer'"""


def log_of(text: str) -> Log:
    lines = text.splitlines()
    return Log([LogLine(number, line) for number, line in enumerate(lines, start=1)])


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "[rank0]: ",
        "(TaskRunner pid=412, ip=10.0.0.4) ",
        "(EngineCore_DP0 pid=9) ERROR 03-26 22:47:24 [core.py:712] ",
        "2026-03-01 10:00:00,123 ERROR worker: ",
        "[2026-03-01 10:00:00][rank3]: ",
    ],
)
def test_the_users_frame_is_found_behind_any_prefix(prefix: str) -> None:
    text = "\n".join(prefix + line for line in PLAIN.splitlines())
    [found] = tracebacks(log_of(text))
    assert str(found.user_frame) == "/data/ana/proj/rewards.py:41 in accuracy"
    assert found.error == "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"


def test_the_boxes_of_rich_are_read() -> None:
    [found] = tracebacks(log_of(BOXED))
    assert str(found.user_frame) == "/data/ana/proj/rewards.py:41 in accuracy"
    assert (found.error, len(found.frames)) == ("KeyError: 'answer'", 3)


def test_the_form_of_notebooks_is_read() -> None:
    text = """---------------------------------------------------------------------------
KeyError                                  Traceback (most recent call last)
Cell In[6], line 1
----> 1 trainer.train()

File ~/envs/a/lib/python3.11/site-packages/transformers/trainer.py:2206, in Trainer.train(self)
   2204 else:
-> 2206     return inner_training_loop(

Cell In[4], line 12, in score_answers(completions, **kwargs)
     10 for text in completions:
---> 12     found.append(kwargs["answer"])

KeyError: 'answer'"""
    [found] = tracebacks(log_of(text))
    assert str(found.user_frame) == "Cell In[4]:12 in score_answers"
    assert found.error == "KeyError: 'answer'"


def test_notebooks_name_no_function_where_a_module_is_imported() -> None:
    text = """ImportError                               Traceback (most recent call last)
Cell In[2], line 1
----> 1 from gizmo import Gizmo

File /opt/venv/lib/python3.11/site-packages/gizmo/__init__.py:34
     33 except Exception:
---> 34     raise ImportError("no whirl")

ImportError: no whirl"""
    [found] = tracebacks(log_of(text))
    assert str(found.frames[-1]).endswith("gizmo/__init__.py:34 in <module>")


def test_what_ray_repeats_of_a_task_names_the_tasks_own_error() -> None:
    text = """Traceback (most recent call last):
  File "/data/ana/verl/verl/trainer/main_ppo.py", line 4, in main
    ray.get(runner.run.remote(config))
ray.exceptions.RayTaskError(KeyError): ray::TaskRunner.run() (pid=412, ip=10.0.0.4)
  File "/data/ana/verl/verl/workers/reward_manager/naive.py", line 61, in __call__
    score = self.compute_score(data_source)
  File "/data/ana/scores/mine.py", line 7, in compute_score
    return table[data_source]
KeyError: 'gsm8k'"""
    found = tracebacks(log_of(text))[-1]
    assert (str(found.user_frame), found.error) == (
        "/data/ana/scores/mine.py:7 in compute_score",
        "KeyError: 'gsm8k'",
    )


@pytest.mark.parametrize(
    ("file", "owner"),
    [
        ("/opt/venv/lib/python3.11/site-packages/trl/trainer/grpo_trainer.py", "framework"),
        ("/opt/venv/lib/python3.11/site-packages/sympy/core/expr.py", "package"),
        ("/usr/lib/python3.11/json/decoder.py", "stdlib"),
        ("<frozen importlib._bootstrap>", "package"),
        ("<frozen os>", "stdlib"),
        ("<template>", "package"),
        ("<unknown>", "package"),
        ("pyarrow/table.pxi", "package"),
        ("/data/ana/kernels.pyx", "user"),
        ("/data/ana/verl/verl/trainer/main_ppo.py", "framework"),
        ("/data/ana/verl/my_reward.py", "user"),
        ("./slime/slime/ray/buffer.py", "framework"),
        ("/data/ana/ray/verl/recipe/score.py", "user"),
        ("/data/ana/verl/examples/rewards/mine.py", "user"),
        ("/app/LLaMA-Factory/src/llamafactory/train/tuner.py", "framework"),
        ("/app/OpenRLHF/openrlhf/cli/train_ppo_ray.py", "framework"),
        ("/data/ana/proj/unsloth_compiled_cache/UnslothGRPOTrainer.py", "framework"),
        ("train.py", "user"),
        ("C:\\Users\\ana\\proj\\rewards.py", "user"),
    ],
)
def test_whose_code_a_file_is(file: str, owner: str) -> None:
    assert owner_of(file) == owner


ROWS = "".join(
    f"{{'loss': 0.0012, 'grad_norm': 0.31, 'learning_rate': 1e-06, 'reward': {0.3 + 0.01 * n:.2f}, "
    f"'reward_std': 0.41, 'kl': 0.0004, 'epoch': {0.01 * n:.2f}}}\n"
    f"  {n}%|#    | {n}/150 [00:{n:02d}<10:00, 3.00s/it]\n"
    for n in range(1, 8)
)
LAUNCHER = """
E0312 10:00:00 api.py:874] failed (exitcode: 1) local_rank: 0 (pid: 4242) of binary: python
Traceback (most recent call last):
  File "/opt/venv/bin/torchrun", line 8, in <module>
    sys.exit(main())
  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/run.py", line 918, in main
    run(args)
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
"""


@pytest.mark.parametrize("after", ["", LAUNCHER])
def test_a_run_that_died_in_the_users_reward_names_the_line_first(after: str) -> None:
    view = read_text(ROWS + PLAIN + "\n" + after)
    found = as_json(diagnose(view, RULES), view)
    first = found["findings"][0]
    assert (found["healthy"], found["verdict"]) == (False, "ill")
    assert (first["name"], first["level"], first["family"]) == (
        "user-code-failed",
        "error",
        "reward",
    )
    assert "accuracy at /data/ana/proj/rewards.py:41" in first["message"]
    assert found["vital_signs"]["ending"] == "exception"
    assert "Nothing in this log says why" not in str(found)


def test_a_librarys_exception_that_no_rule_knows_is_not_called_healthy() -> None:
    library = PLAIN.replace("/data/ana/proj/rewards.py", "/v/site-packages/trl/rewards.py").replace(
        "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        "trl.FlurbError: the gizmo is out of flurb",
    )
    view = read_text(ROWS + library + "\n" + LAUNCHER)
    diagnosis = diagnose(view, RULES)
    assert verdict(diagnosis, view) is Verdict.NOT_KNOWN
    assert "ended-in-exception" in [one.name for one in diagnosis.findings]
    assert "Nothing in this log says why" not in str(as_json(diagnosis, view))


def test_a_launchers_summary_is_told_with_the_exception_that_the_log_shows() -> None:
    text = ROWS + "(EngineCore pid=9) EngineCore encountered a fatal error.\n" + LAUNCHER
    shown = read_text(text + PLAIN.replace("/data/ana/proj/", "/v/site-packages/vllm/"))
    silent = read_text(text)
    assert "Nothing in this log says why" in str(as_json(diagnose(silent, RULES), silent))
    said = str(as_json(diagnose(shown, RULES), shown))
    assert "Nothing in this log says why" not in said
    assert "JSONDecodeError" in said


def test_long_texts_are_cut_between_words() -> None:
    text = "the reward function took longer than it may"
    assert shortened(text, 100) == text
    assert shortened(text, 30) == "the reward function took ..."
    assert all(len(shortened(text, most)) <= most for most in range(10, 60))
    assert shortened("x" * 50, 20) == "x" * 16 + " ..."


def test_a_traceback_printed_behind_a_progress_bar_is_read() -> None:
    """tqdm leaves the cursor behind its bar: what Python prints next begins no line of its own."""
    rows = "".join(
        f"\r  {n}%|         | {n}/150 [00:0{n}<04:59,  2.03s/it]"
        f"{{'loss': 0.01, 'grad_norm': 0.5, 'reward': 0.{n}, 'reward_std': 0.2, 'epoch': 0.0{n}}}\n"
        for n in range(1, 8)
    )
    bar = "\r  5%|4        | 7/150 [00:16<05:29,  2.31s/it]"
    frames = (
        PLAIN.replace("in _rewards", "in _calculate_rewards")
        .replace("in accuracy", "in <listcomp>")
        .replace(
            '  File "/data/ana/proj/rewards.py"',
            '  File "/data/ana/proj/rewards.py", line 41, in accuracy\n'
            "    return [f(x) for x in y]\n"
            '  File "/data/ana/proj/rewards.py"',
        )
    )
    view = read_text(f"{rows}{bar}{frames}\n{bar}\n")
    found = diagnose(view, RULES)
    assert [one.code for one in found.findings][:1] == ["VIT001"]
    first = found.findings[0]
    assert "in accuracy at /data/ana/proj/rewards.py:41" in first.message
    assert first.causes[0].name == "reward-fn-failing"
    assert verdict(found, view) is Verdict.ILL


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("KeyErrorKeyError: : 'input_ids_j'", "KeyError: 'input_ids_j'"),
        ("ValueErrorValueErrorValueError: : : no rowno rowno row", "ValueError: no row"),
        ("torch.OutOfMemoryErrortorch.OutOfMemoryError: : a", "torch.OutOfMemoryError: a"),
        ("KeyError: 'x'", "KeyError: 'x'"),
        ("RuntimeError: KeyErrorKeyError", "RuntimeError: KeyErrorKeyError"),
    ],
)
def test_an_error_that_several_processes_wrote_into_one_line_is_read_once(
    written: str, meant: str
) -> None:
    assert untangled(written) == meant


def test_a_traceback_of_two_ranks_in_one_line_has_one_class() -> None:
    (found,) = tracebacks(log_of(BOXED.replace("KeyError: ", "KeyErrorKeyError: : ")))
    assert (found.kind, found.message) == ("KeyError", "'answer'")


@pytest.mark.parametrize(
    "record",
    [
        {"severity": "ERROR", "textPayload": PLAIN},
        {"log.level": "error", "message": "it failed", "error.stack_trace": PLAIN},
        {"level": "ERROR", "stack": PLAIN.splitlines()},
        {"severity": "ERROR", "jsonPayload": {"message": PLAIN}},
    ],
)
def test_a_traceback_in_a_record_of_a_log_collector_is_read(record: dict[str, object]) -> None:
    [found] = tracebacks(log_of(json.dumps(record)))
    assert str(found.user_frame) == "/data/ana/proj/rewards.py:41 in accuracy"
    assert found.error == "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"


def test_a_record_for_each_line_of_a_traceback_is_read() -> None:
    text = "\n".join(json.dumps({"textPayload": line}) for line in PLAIN.splitlines())
    [found] = tracebacks(log_of(text))
    assert found.error == "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"
