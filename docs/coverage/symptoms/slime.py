"""slime's questions and answers: its symptoms, and the rules that recognise them.

A row: section, symptom, codes of the rules that recognise it, what homeostat does about it.
"""
# ruff: noqa: E501 (a table)
# fmt: off

from __future__ import annotations

GUIDE = "slime: Q&A"
SGLANG = "With `engine.type: sglang` it is a process of the run: restarted (`engine.max_restarts`), given the weights again, and its requests are sampled again."
ROWS: tuple[tuple[str, str, str, str], ...] = (
    ("1 Garbage", "Completions are garbage because the trainer's checkpoint was not loaded", "CKP001 ERR560 ERR561", "A model that lacks a weight is refused; random weights only with `model.init: random`."),
    ("1 Garbage", "The folder lacks the file that names the newest checkpoint", "ERR560 ERR557", "`checkpoints/latest` is written last; `checkpoint.load_step` names another."),
    ("2 Stuck at submission", "The job waits for devices because sharing them was not configured", "CFG013 ERR129", "The rule counts devices. With `cluster.type: ray` the number of devices of trainer and engines is checked first, and the message names the remedy: `cluster.placement: colocated`."),
    ("2 Stuck at submission", "The job waits because it requests more devices than exist", "CFG013 ERR130", "The rule counts devices. With `cluster.type: ray` the run is refused before anything is placed, and the message shows the calculation; every wait has a limit."),
    ("3 Memory", "Memory runs out because the tokens of a micro-batch are too many", "ERR001 ERR004 MEM005", "Lower `trainer.max_tokens_per_device`; after running out of memory, the run halves it by itself (`trainer.on_oom`)."),
    ("3 Memory", "The token budget has no effect because dynamic batches are off", "CFG012", "This cannot happen: packing always uses the token budget."),
    ("3 Memory", "Memory runs out with a small budget, because single samples are long", "ERR004 ERR002 ERR419", "Split a row over several ranks with `trainer.backend.context_parallel_size` (any number) or `sequence_parallel_size` (divides the heads). The losses are those of one device."),
    ("3 Memory", "Conversations of several turns get far longer than planned", "CFG009 ERR252 ERR468", "A row that is too long is counted and dropped (`data.overlong`). pending: conversations with tools are a later stage"),
    ("4 Several nodes", "transformers does not find a model, because processes write its cache at once", "ERR347 ERR351", "A model by name is downloaded once, by the controller, under a lock; ranks and engines read the folder. On a Ray cluster, each node is checked to have it. No remote code is run or written."),
    ("5 Resuming", "A run starts from the beginning instead of resuming", "CKP006 ERR557", "The same command resumes where the run stopped (`checkpoint.resume: auto`)."),
    ("6 Batch size", "The sizes of rollout, group and update do not fit together", "CFG001 CFG003 ERR403 ERR404", "The update's size follows from prompts, samples and `trainer.updates_per_step`: they cannot disagree."),
    ("7 Packing", "Padding wastes compute", "PRF007", "Rows are always packed, and nothing is padded."),
    ("8 Ports", "SGLang's server does not answer: several on one machine took the same port", "ERR117 ERR115", "Seen in logs. With `engine.type: sglang` each engine uses its own free ports, and ports cannot be set."),
    ("9 Gradient norm", "The gradient norm is high, and training breaks down", "LRN010 LRN002 LRN009", "Clipped at `trainer.max_grad_norm`; the rate is halved (`health.heal: all`)."),
    ("9 Gradient norm", "The data was rendered with another chat template than the model's", "LRN013 ERR454 ERR458 ERR480", "`homeostat inspect` shows the tokens as trained; the template is the tokenizer's own unless `model.chat_template` is set."),
    ("10 Endless sampling", "Sampling takes forever, because no stop token is set", "GEN002 GEN001 ERR264", "The end-of-turn token always ends a completion; `rollout.stop`, `rollout.stop_token_ids`, `rollout.deadline_s`."),
    ("11 Illegal access", "SGLang stops with an illegal memory access", "ERR250", f"Seen in logs. {SGLANG}"),
    ("12 Compile cache", "torch.compile fails to decode JSON from its cache", "ERR345", "Nothing is compiled in training."),
    ("13 NaN", "Gradients are NaN or infinite", "NUM002 NUM001 NUM005 ERR650", "Such a step is skipped and reported, without switching off a check (`trainer.on_nonfinite`)."),
    ("13 NaN", "The NaN check is switched off", "CFG017 ERR658", "It cannot be switched off."),
)
