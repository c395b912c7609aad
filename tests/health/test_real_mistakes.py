"""Ends of runs that were really made, each with one ordinary mistake in the script."""

from __future__ import annotations

from typing import Any

import pytest
from tests.health.markdown import named

from homeostat.health.diagnose import diagnose
from homeostat.health.formats.as_json import as_json
from homeostat.health.readers import read_text
from homeostat.health.registry import RULES

SITE = "/data/venv/lib/python3.11/site-packages"
HEAD = "Traceback (most recent call last):"
# What was done wrong -> the log's end, the name of the first finding or of its first cause, and
# words of what to do.
ENDS: dict[str, tuple[str, str, str]] = {
    "a filter removed every row": (
        f"""{HEAD}
  File "/data/train.py", line 7, in <module>
    SFTTrainer("models/tiny-llama", args=args, train_dataset=data).train()
  File "{SITE}/trl/trainer/sft_trainer.py", line 761, in __init__
    dataset_sample = next(iter(train_dataset))
                     ^^^^^^^^^^^^^^^^^^^^^^^^^
StopIteration
""",
        "dataset-empty",
        "after each filter",
    ),
    "a batched map returned more rows than it got": (
        f"""{HEAD}
  File "/data/prepare.py", line 10, in <module>
    data = data.map(chunk, batched=True)
  File "{SITE}/datasets/arrow_writer.py", line 801, in _write_batch
    pa_table = pa.Table.from_arrays(arrays, schema=schema)
  File "pyarrow/table.pxi", line 4894, in pyarrow.lib.Table.from_arrays
  File "pyarrow/error.pxi", line 92, in pyarrow.lib.check_status
pyarrow.lib.ArrowInvalid: Column 1 named input_ids expected length 60 but got length 120
""",
        "rows-unequal-length",
        "remove_columns",
    ),
    "a function for one row was mapped over batches": (
        f"""{HEAD}
  File "/data/prepare.py", line 10, in <module>
    data = data.map(encode, batched=True)
  File "{SITE}/datasets/arrow_dataset.py", line 3903, in apply_function
    processed_inputs = function(*fn_args, *additional_args, **fn_kwargs)
  File "/data/prepare.py", line 8, in encode
    return tok(row["question"] + " " + row["answer"] + tok.eos_token)
TypeError: can only concatenate list (not "str") to list
""",
        "user-code-failed",
        "batched",
    ),
    "a message holds a number": (
        f"""{HEAD}
  File "{SITE}/transformers/utils/chat_template_utils.py", line 560, in render_jinja_template
    rendered_chat = compiled_template.render(
  File "{SITE}/jinja2/environment.py", line 942, in handle_exception
    raise rewrite_traceback_stack(source=source)
  File "<template>", line 1, in top-level template code
TypeError: can only concatenate str (not "int") to str
""",
        "chat-template-mismatch",
        "Print one conversation",
    ),
    "no pad for the labels": (
        f"""{HEAD}
  File "{SITE}/transformers/tokenization_utils_base.py", line 734, in convert_to_tensors
    tensor = as_tensor(value)
ValueError: expected sequence of length 12 at dim 1 (got 9)

The above exception was the direct cause of the following exception:

{HEAD}
  File "/data/train.py", line 15, in <module>
    Trainer(model, args, train_dataset=data, data_collator=collator).train()
  File "{SITE}/transformers/tokenization_utils_base.py", line 750, in convert_to_tensors
    raise ValueError(
ValueError: Unable to create tensor, you should probably activate truncation and/or padding with
""",
        "rows-unequal-length",
        "labels",
    ),
    "a lambda as collator of spawned workers": (
        f"""{HEAD}
  File "/data/load.py", line 10, in <module>
    for batch in loader:
  File "{SITE}/torch/utils/data/dataloader.py", line 505, in __iter__
    return self._get_iterator()
  File "/usr/lib/python3.11/multiprocessing/reduction.py", line 60, in dump
    ForkingPickler(file, protocol).dump(obj)
_pickle.PicklingError: Can't pickle <function <lambda> at 0xffff7ff272e0>: attribute lookup failed
""",
        "object-not-picklable",
        "lambda",
    ),
    "a key that accelerate does not know": (
        f"""{HEAD}
  File "{SITE}/accelerate/commands/accelerate_cli.py", line 50, in main
    args.func(args)
  File "{SITE}/accelerate/commands/config/config_args.py", line 156, in from_yaml_file
    raise ValueError(
ValueError: The config file at acc.yaml had unknown keys (['gradient_clip']), please try upgrading
""",
        "unknown-setting",
        "from_yaml_file",
    ),
    "the output folder's name is that of a file": (
        f"""{HEAD}
  File "/data/train.py", line 9, in <module>
    Trainer(model, args, train_dataset=data).train()
  File "{SITE}/transformers/trainer.py", line 607, in __init__
    os.makedirs(self.args.output_dir, exist_ok=True)
  File "<frozen os>", line 225, in makedirs
FileExistsError: [Errno 17] File exists: 'results'
""",
        "output-folder-in-use",
        "another folder",
    ),
    "a reward asks for a column of another name": (
        f"""{HEAD}
  File "{SITE}/trl/trainer/grpo_trainer.py", line 1626, in _calculate_rewards
    output_reward_func = reward_func(
                         ^^^^^^^^^^^^
TypeError: correctness() missing 1 required positional argument: 'solution'
""",
        "dataset-column-missing",
        "Rename the column",
    ),
    "an adapter was loaded without being trainable": (
        f"""{HEAD}
  File "{SITE}/transformers/trainer.py", line 2094, in training_step
    self.accelerator.backward(loss, **kwargs)
RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn
""",
        "no-gradient-flow",
        "is_trainable=True",
    ),
}


def findings(log: str) -> list[dict[str, Any]]:
    view = read_text(log)
    return as_json(diagnose(view, RULES), view)["findings"]


def test_a_mistake_is_named_with_what_to_do() -> None:
    for title, (log, name, words) in ENDS.items():
        with named(title):
            first, *others = findings(log)
            assert name in (first["name"], first["causes"][0]["name"])
            assert any(words in fix["why"] for fix in first["fixes"]), first["fixes"]
            # That no rule knows the words is not said beside a rule that does.
            assert "VIT002" not in [one["code"] for one in others]


@pytest.mark.parametrize("call", ["model.enable_input_require_grads()"])
def test_a_call_is_not_taken_for_one_of_our_settings(call: str) -> None:
    log, *_ = ENDS["an adapter was loaded without being trainable"]
    assert any(call in fix["why"] for fix in findings(log)[0]["fixes"])


def test_the_line_that_is_quoted_is_the_error_and_not_the_code_that_raised_it() -> None:
    log = f"""{HEAD}
  File "{SITE}/datasets/splits.py", line 312, in _rel_to_abs_instr
    raise ValueError(f'Unknown split "{{split}}". Should be one of {{list(name2len)}}.')
ValueError: Unknown split "validation". Should be one of ['train'].
"""
    assert "validation" in findings(log)[0]["evidence"][0]


def test_remote_code_that_nobody_allowed_is_no_race_of_the_cache() -> None:
    text = (
        "Do you wish to run the custom code? [y/N] Traceback (most recent call last):\n"
        '  File "/env/site-packages/transformers/dynamic_module_utils.py", line 763, '
        "in resolve_trust_remote_code\n    answer = input(\nEOFError: EOF when reading a line\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n"
        '  File "/env/site-packages/transformers/dynamic_module_utils.py", line 775, '
        "in resolve_trust_remote_code\n    raise ValueError(\n"
        "ValueError: The repository copy contains custom code which must be executed to correctly "
        "load the model.\nPlease pass the argument `trust_remote_code=True` to allow custom code "
        "to be run.\n"
    )
    found = diagnose(read_text(text), RULES).findings
    assert [one.name for one in found] == ["remote-code-not-allowed"]
