"""slime's questions and answers: its symptoms, and what recognises them here.

A row: section, symptom, codes of the rules that see it, what is done about it here.
"""
# ruff: noqa: E501 (a table)
# fmt: off

from __future__ import annotations

GUIDE = "slime: Q&A"
SGLANG = "With `engine.type: sglang` it is a process of the run: restarted (`engine.max_restarts`), given the weights again, and its requests are sampled again."
ROWS: tuple[tuple[str, str, str, str], ...] = (
    ("1 Garbage", "Completions are garbage because the trainer's checkpoint was not loaded", "CKP001 ERR560 ERR561", "A model that lacks a weight is refused; random weights only with `model.init: random`."),
    ("1 Garbage", "The folder has no file that names the newest checkpoint", "ERR560 ERR557", "`checkpoints/latest` is written last; `checkpoint.load_step` names another."),
    ("2 Stuck at submission", "The job waits for devices because sharing them was not asked for", "CFG013 ERR129", "The rule counts devices. With `cluster.type: ray` the sum of trainer and engines is checked first, and the way out is named: `cluster.placement: colocated`."),
    ("2 Stuck at submission", "The job waits because it asks for more devices than there are", "CFG013 ERR130", "The rule counts devices. With `cluster.type: ray` the sum is written out and the run refused before anything is placed; every wait has a limit."),
    ("3 Memory", "Memory runs out because the tokens of a micro-batch are too many", "ERR001 ERR004 MEM005", "`trainer.max_tokens_per_device`, halved by the run itself where memory ran out (`trainer.on_oom`)."),
    ("3 Memory", "The budget of tokens has no effect because dynamic batches are off", "CFG012", "There is no such pair of settings: packing always goes by the budget."),
    ("3 Memory", "Memory runs out with a small budget, because single samples are long", "ERR004 ERR002 ERR419", "A row over several ranks: `trainer.backend.context_parallel_size` (any number), or `sequence_parallel_size` (divides the heads). The losses are those of one device."),
    ("3 Memory", "Conversations of several turns get far longer than was planned", "CFG009 ERR252 ERR468", "A row that is too long is counted and dropped (`data.overlong`). pending: conversations with tools are a later stage"),
    ("4 Several nodes", "transformers does not find a model, because processes write its cache at once", "ERR347 ERR351", "A model by name is downloaded once, by the controller, under a lock; ranks and engines read the folder, which every node of a Ray proves to have. No remote code is run or written."),
    ("5 Resuming", "A run starts anew where it should go on", "CKP006 ERR557", "The same command goes on where it stopped (`checkpoint.resume: auto`)."),
    ("6 Batch size", "The sizes of rollout, group and update do not fit together", "CFG001 CFG003 ERR403 ERR404", "The update's size follows from prompts, samples and `trainer.updates_per_step`: they cannot disagree."),
    ("7 Packing", "Padding wastes the device", "PRF007", "Rows are always packed, and nothing is padded."),
    ("8 Ports", "SGLang's server does not answer: several on one machine took the same port", "ERR117 ERR115", "Seen in logs. With `engine.type: sglang` each engine takes free ports of its own, and none can be set."),
    ("9 Gradient norm", "The gradient norm is high, and training breaks down", "LRN010 LRN002 LRN009", "Clipped at `trainer.max_grad_norm`; the rate is halved (`health.heal: all`)."),
    ("9 Gradient norm", "The data was rendered with another chat template than the model's", "LRN013 ERR454 ERR458 ERR480", "`homeostat inspect` shows the tokens as trained; the template is the tokenizer's own unless `model.chat_template` is set."),
    ("10 Endless sampling", "Sampling takes forever, because no stop token is set", "GEN002 GEN001 ERR264", "The end-of-turn token always ends a completion; `rollout.stop`, `rollout.stop_token_ids`, `rollout.deadline_s`."),
    ("11 Illegal access", "SGLang stops with an illegal memory access", "ERR250", f"Seen in logs. {SGLANG}"),
    ("12 Compile cache", "torch.compile fails to decode JSON from its cache", "ERR345", "Nothing is compiled in training."),
    ("13 NaN", "Gradients are NaN or infinite", "NUM002 NUM001 NUM005 ERR650", "Such a step is skipped and named, without any check being switched off (`trainer.on_nonfinite`)."),
    ("13 NaN", "The check for NaN is switched off", "CFG017 ERR658", "It cannot be."),
)
