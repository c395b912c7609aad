"""What our own errors say, by the illness that each of them names.

A run of ours that ends by an error leaves its message in traceback.txt; `homeostat.errors` is the
tree that it comes from. The texts are those of the places that raise: a change there is one here.
"""

from __future__ import annotations

import re

from homeostat.health.finding import Cause, Family
from homeostat.health.texts.conditions import first_failures
from homeostat.health.texts.parts import (
    FEWER_TOKENS,
    LARGER_ENGINE,
    RECOMPUTE,
    SHORTER,
    advice,
    change,
    safe,
)
from homeostat.health.texts.trouble import Trouble
from homeostat.health.view import RunView

_REFUSED = ("rows cannot be used:", "no rows are left to train on")
_COUNT = re.compile(r"(?<!\d)(\d{1,15}) of (\d{1,15}) rows cannot be used")
# Findings of metrics that follow from weights which are not finite, or from other ones than the
# trainer's in the engine.
_AFTER_NAN = (
    "NUM002", "NUM004", "NUM005", "NUM006", "LRN002", "LRN003", "LRN008", "LRN009", "LRN010",
    "RWD001", "RWD002", "RWD004", "RWD006", "POL002", "POL013", "GEN001", "GEN002",
)  # fmt: skip
_AFTER_ODD_ENGINE = (
    "OFF001", "OFF002", "OFF008", "SYN001", "SYN002", "RWD001", "RWD002", "RWD004", "RWD006",
    "GEN001", "GEN002", "GEN004", "POL002", "POL011", "POL013",
)  # fmt: skip


def _all_rows(view: RunView) -> bool:
    """Every row that was seen is among those that cannot be used."""
    lines = view.log.find(_REFUSED[0])
    counts = [match for line in lines if (match := _COUNT.search(line.text)) is not None]
    return all(match[1] == match[2] for match in counts)


def _some_rows(view: RunView) -> bool:
    return not _all_rows(view)


_DATA = (
    Trouble(
        code="ERR800",
        name="all-labels-masked",
        family=Family.DATA,
        texts=_REFUSED,
        context=("trains on nothing",),
        within=8,
        when=_all_rows,
        what="No row has a token with a loss: there is nothing to train on.",
        why=(
            "Messages are marked as not to be trained, completions are empty, or what is trained "
            "lies behind data.max_length."
        ),
        fixes=(
            advice("true, or left out", "The `train` of the messages that should be learned."),
            change("data.max_length", "longer", "Prompts alone fill the rows."),
        ),
        explains=("ERR801", "ERR802", "ERR803"),
    ),
    Trouble(
        code="ERR801",
        name="rows-without-training",
        family=Family.DATA,
        texts=_REFUSED,
        context=("trains on nothing",),
        within=8,
        when=_some_rows,
        what="Some rows have no token with a loss, and data.bad_rows refuses them.",
        why="Their completion is empty, marked as not to be trained, or behind data.max_length.",
        fixes=(
            change("data.bad_rows", "drop", "Trains without them; how many is written down."),
            change("data.max_length", "longer", "Where their prompts alone fill it."),
        ),
        explains=("ERR803",),
    ),
    Trouble(
        code="ERR802",
        name="data-file-unreadable",
        family=Family.DATA,
        texts=(": not JSON: ", ": not UTF-8 text: "),
        context=_REFUSED,
        within=8,
        what="Lines of a data file are broken: cut in the middle, or in another encoding.",
        why="A copy or a writer broke off, or the file is not what its name says.",
        fixes=(
            advice("write the file again", "The message names file and line."),
            change("data.bad_rows", "drop", "Trains without the broken rows."),
        ),
        explains=("ERR803",),
    ),
    Trouble(
        code="ERR810",
        name="data-file-unreadable",
        family=Family.DATA,
        texts=(
            "DataError: *: this is UTF-16 text",
            "DataError: *: the file is empty",
            "DataError: *: the list is empty",
            "DataError: *: cannot be read:",
            "DataError: *: the file holds a JSON list",
        ),
        what="A data file cannot be read: it is empty, or of another format than its name says.",
        why="A copy or a writer broke off, or the file was renamed.",
        fixes=(advice("write the file again", "The message says what it is."),),
    ),
    Trouble(
        code="ERR803",
        name="dataset-empty",
        family=Family.DATA,
        texts=("DataError: no rows are left to train on",),
        what="Nothing is left of the rows: all are broken or too long.",
        why="The message lists the first of them, and why each was left out.",
        fixes=(
            change("data.max_length", "longer", "Where they are too long."),
            advice("the columns of the source", "Where they cannot be read."),
        ),
    ),
    Trouble(
        code="ERR804",
        name="column-missing",
        family=Family.DATA,
        texts=("rows cannot be used:",),
        context=("missing column: ",),
        within=8,
        what="Rows lack the column that the source reads.",
        why="The column has another name in these files, or only some rows have it.",
        fixes=(
            advice("the name that the files use", "The source's settings that end in _column."),
            change("data.bad_rows", "drop", "Where only some rows lack it."),
        ),
    ),
    Trouble(
        code="ERR805",
        name="chat-template-mismatch",
        family=Family.DATA,
        texts=("rows cannot be used:", "no rows are left to train on"),
        context=(
            "the chat template refuses the messages",
            "the chat template leaves out part of the row",
            "the generation prompt is not how the template renders",
            "the turn has no end-of-turn token",
        ),
        within=8,
        what="The chat template does not fit the conversations, or the model's end of turn.",
        why=(
            "It is another model's, or made for one turn: it raises on these rows, leaves parts "
            "of them out, or ends turns by a token that generation does not stop at."
        ),
        fixes=(
            change("model.chat_template", "the template of this model", "A Jinja file."),
            advice("look at rendered rows", "`homeostat inspect` shows what is trained."),
        ),
        explains=("ERR803", "ERR801"),
    ),
    Trouble(
        code="ERR806",
        name="rows-over-length",
        family=Family.DATA,
        texts=("rows are longer than data.max_length=",),
        what="Rows are longer than data.max_length, and data.overlong refuses them.",
        why="A row that is cut teaches answers without an end, so nothing is cut unasked.",
        fixes=(
            change("data.max_length", "longer", "What the longest rows need."),
            change("data.overlong", "drop", "Trains without them."),
        ),
    ),
    Trouble(
        code="ERR807",
        name="token-id-out-of-range",
        family=Family.DATA,
        texts=(
            "the tokenizer gives token * and the model knows tokens below",
            "is beyond the model's vocab_size of",
        ),
        what="The tokenizer has tokens that the model's embedding has no row for.",
        why="Tokenizer and model do not belong together, or tokens were added to one of them only.",
        fixes=(
            change("model.tokenizer", "the one of this model", "Both of one checkpoint."),
            advice("resize the embedding", "Where tokens were added on purpose."),
        ),
    ),
    Trouble(
        code="ERR808",
        name="chat-template-missing",
        family=Family.DATA,
        texts=("the tokenizer has no chat template, so messages cannot become",),
        what="Conversations are to be trained on, and the tokenizer has no chat template.",
        why="A base model has none.",
        fixes=(change("model.chat_template", "a Jinja file", "How turns become text."),),
    ),
    Trouble(
        code="ERR809",
        name="missing-stop-token",
        family=Family.GENERATION,
        texts=("neither the tokenizer nor generation_config.json names an end-of-sequence",),
        what="Nothing names the token that ends a text: no row could teach the model to stop.",
        why="The tokenizer's files are incomplete.",
        fixes=(advice("eos_token in tokenizer_config.json", "The token that ends a text."),),
    ),
)

_NUMERICS = (
    Trouble(
        code="ERR820",
        name="nan-update-poisoned-weights",
        family=Family.NUMERICS,
        texts=(
            "give log-probs that are not finite, so that",
            "It first went wrong in the stored weights",
        ),
        what="The weights themselves are not finite: nothing can be computed with them.",
        why=(
            "An update that was not finite, a damaged file or faulty memory has left NaN in them. "
            "No later step repairs that."
        ),
        fixes=(
            safe("checkpoint.load_step", "a step before it", "Weights that are whole."),
            change("trainer.lr", "a third of it", "Where an update threw them there."),
        ),
        explains=_AFTER_NAN,
    ),
    Trouble(
        code="ERR821",
        name="nan-loss",
        family=Family.NUMERICS,
        texts=("NonFiniteHaltError: step ",),
        unless=("It first went wrong in the stored weights",),
        what="Loss or gradient was not finite, and the run halted before it was applied.",
        why="Rows that overflow, a rate that is too high, or a precision that is too narrow.",
        causes=(
            Cause("nan-loss", "the run halted for it"),
            Cause("bad-batch", "the rows of the step are written down: look at them"),
        ),
        fixes=(
            advice("look at the rows that were written down", "Are they sound?"),
            change("trainer.lr", "a third of it", "Where the rows are sound."),
            safe("trainer.precision", "fp32", "Shows whether the numbers overflow."),
        ),
        explains=_AFTER_NAN,
    ),
)

_SYNC = (
    Trouble(
        code="ERR830",
        name="engine-weights-differ",
        family=Family.SYNC,
        texts=("the engine does not serve the weights that were published",),
        what="Weights were sent and taken, and the engine computes with others.",
        why=(
            "Tensors were lost, mixed up, damaged or converted wrongly on the way: sync.verify "
            "scored a few tokens in both and found them apart."
        ),
        causes=(
            Cause("engine-weights-differ", "probe tokens or checksums differ"),
            Cause("weight-conversion-wrong", "names, layouts or shards may be converted wrongly"),
        ),
        fixes=(
            safe("health.heal", "safe", "Weights that arrive damaged are sent again."),
            safe("sync.transport.type", "disk", "The plainest way to send them."),
        ),
        explains=_AFTER_ODD_ENGINE,
    ),
    Trouble(
        code="ERR831",
        name="engine-weights-differ",
        family=Family.SYNC,
        texts=("was altered on its way by",),
        what="A tensor arrived in the engine with another checksum than it was sent with.",
        why="Memory or disk is faulty, or something else writes to the same place.",
        fixes=(safe("sync.transport.type", "disk", "Another way; suspect memory or disk."),),
        explains=(*_AFTER_ODD_ENGINE, "ERR832"),
    ),
    Trouble(
        code="ERR832",
        name="weights-half-updated",
        family=Family.SYNC,
        texts=(
            "was not published by * The engine was left without commit",
            "is not whole: * tensors * It is not served",
            "of the model's parameters * the engine would sample with old ones",
        ),
        what="A publication of weights broke off half-way.",
        why="What follows the version's number in the message says why.",
        fixes=(advice("start again", "The same command goes on from the newest checkpoint."),),
    ),
    Trouble(
        code="ERR833",
        name="weight-conversion-wrong",
        family=Family.SYNC,
        texts=(
            "the engine's model has no * the weights are of another model",
            "was sent, and the engine's is * the weights are of another model",
            "vLLM serves * from * and the trainer has",
        ),
        what="The engine's model has other tensors than the trainer's.",
        why="The engine loaded another checkpoint, or another precision, than is trained.",
        fixes=(change("model.path", "the checkpoint that is trained", "One for both."),),
        explains=("ERR832",),
    ),
)

_ENGINE = (
    Trouble(
        code="ERR840",
        name="engine-step-timeout",
        family=Family.GENERATION,
        texts=(
            "engine finished none of * requests",
            "engine's process did not answer * within",
            "the engine's process started, and does not answer",
        ),
        unless=("log-probs that are not finite", "engine's process is gone"),
        what="The engine stopped answering: requests are in it, and none comes back.",
        why=(
            "Its process hangs, was stopped, or waits for a device or another process. Where it "
            "is only slow, engine.stall_s is too short."
        ),
        fixes=(
            advice("start again", "The same command goes on from the newest checkpoint."),
            safe("engine.stall_s", "longer", "Where single answers take that long."),
        ),
    ),
    Trouble(
        code="ERR841",
        name="engine-died",
        family=Family.GENERATION,
        texts=("The engine was started anew * times before", "homeostat.errors.EngineDiedError:"),
        unless=("out of memory while * completions were on their way",),
        what="The engine's process died, more often than engine.max_restarts allows.",
        why="The machine's memory ran out, it crashed, or somebody ended it.",
        fixes=(
            advice("read its last words in the message", "Exit by signal 9: memory, mostly."),
            safe("engine.max_concurrency", "lower", "Less memory at one time."),
        ),
        explains=("DST002",),
    ),
    Trouble(
        code="ERR842",
        name="engine-failed-to-start",
        family=Family.GENERATION,
        texts=("the engine's process did not start:", "vLLM does not start on"),
        what="The engine did not start.",
        why="The message and its log say why; memory and versions are the usual reasons.",
        fixes=(safe("engine.start_timeout_s", "longer", "Where it only needs longer."),),
    ),
    Trouble(
        code="ERR843",
        name="kv-cache-no-room",
        family=Family.MEMORY,
        texts=("cannot be served: the cache of its up to",),
        what="The cache of a single completion does not fit what the engine may have.",
        why="engine.memory_share is small, or the completion may become very long.",
        fixes=(LARGER_ENGINE, SHORTER),
    ),
    Trouble(
        code="ERR844",
        name="engine-oom-at-run-time",
        family=Family.MEMORY,
        texts=(
            "out of memory while * completions were on their way",
            "the engine's cache cannot grow to",
        ),
        what="The engine ran out of memory while it sampled.",
        why="Too many completions at one time, or a cache that leaves no room for a forward pass.",
        fixes=(
            safe("engine.max_concurrency", "lower", "Fewer at one time."),
            safe("engine.memory_share", "lower", "Room for the forward pass."),
        ),
        explains=("ERR001", "ERR841"),
    ),
)

_MACHINE = (
    Trouble(
        code="ERR850",
        name="activation-oom",
        family=Family.MEMORY,
        texts=("OutOfMemoryHaltError:", "OutOfMemoryHaltError: out of memory at step"),
        what="Memory ran out, and smaller micro-batches did not help any more.",
        why="A single row, the weights or the optimizer's state need more than there is.",
        fixes=(RECOMPUTE, FEWER_TOKENS, SHORTER),
        explains=("ERR001", "MEM005", "MEM003"),
    ),
    Trouble(
        code="ERR851",
        name="disk-full-or-quota",
        family=Family.CHECKPOINT,
        texts=("was not saved: the disk of * is full", "DiskFullError:"),
        what="A checkpoint was not saved: the disk, or the quota on it, is full.",
        why="A checkpoint holds weights and optimizer state: 12 bytes a parameter and more.",
        fixes=(
            safe("checkpoint.keep_last", "1 or 2", "Fewer of them; the newest stays."),
            safe("checkpoint.max_bytes", "what the disk can spare", "Old ones go in time."),
            safe("runs_dir", "another disk", "More room."),
        ),
        explains=("CKP002", "CKP003", "ERR550"),
    ),
    Trouble(
        code="ERR852",
        name="checkpoint-file-damaged",
        family=Family.CHECKPOINT,
        texts=("checkpoints in * is whole; the newest", "checkpoint.load_step=* is broken:"),
        what="No checkpoint of the run is whole.",
        why="Their files do not fit the checksums that were written with them.",
        fixes=(
            advice("restore them from a copy", "The message says which file is damaged."),
            advice("move the folder away", "The run then starts afresh."),
        ),
    ),
    Trouble(
        code="ERR853",
        name="checkpoint-keys-mismatch",
        family=Family.CHECKPOINT,
        texts=("in the checkpoint belongs to another model or precision",),
        what="The checkpoint is of another model or precision than the settings name.",
        why="model.path, the adapter or trainer.precision changed since.",
        fixes=(
            advice("another `name` for the run", "It then starts afresh."),
            change("model.path", "as it was", "To go on."),
        ),
    ),
    Trouble(
        code="ERR854",
        name="output-folder-in-use",
        family=Family.CHECKPOINT,
        texts=("was used before and checkpoint.resume=never",),
        what="The run directory holds another run, and checkpoint.resume forbids to go on.",
        why="Two runs have one name.",
        fixes=(
            change("name", "another one", "A folder of its own."),
            change("checkpoint.resume", "auto", "Goes on with that run."),
        ),
    ),
    Trouble(
        code="ERR855",
        name="vocabulary-size-mismatch",
        family=Family.CHECKPOINT,
        texts=("has a vocabulary of * and the policy one of",),
        what="Policy and reference have different vocabularies and cannot be compared.",
        why="They are not of one family.",
        fixes=(change("reference.path", "a model with the same tokenizer", "One vocabulary."),),
    ),
    Trouble(
        code="ERR856",
        name="reward-fn-failing",
        family=Family.REWARD,
        texts=("RewardError: reward workers do not stay alive",),
        what="The processes of the rewards die as soon as they are started.",
        why="Memory runs out, or a library that a reward imports crashes.",
        fixes=(advice("read what they printed", "The message names the file."),),
    ),
    Trouble(
        code="ERR857",
        name="reward-fn-not-importable",
        family=Family.REWARD,
        texts=(
            "RewardError: rewards do not load within",
            "there is no module * start homeostat in the folder that holds it",
            "there is no file * (relative paths start at the working folder)",
        ),
        what="A reward function cannot be loaded.",
        why="Its module or file is not where the recipe says, or its import never ends.",
        fixes=(change("rewards.functions", "path: folder/file.py:function", "Where it is."),),
    ),
    Trouble(
        code="ERR858",
        name="package-missing",
        family=Family.INSTALL,
        texts=("which is not installed. Install it with: pip install 'homeostat[",),
        what="An optional package is missing.",
        why="It belongs to an extra that was not installed.",
        fixes=(advice("pip install 'homeostat[...]'", "The message holds the command."),),
        explains=("ERR300",),
    ),
    Trouble(
        code="ERR859",
        name="model-path-wrong",
        family=Family.INSTALL,
        texts=(
            "does not exist. Name a folder or a .gguf file",
            "has no tokenizer.json. Name the folder of a whole HF",
        ),
        what="The model's folder is not there, or not a whole checkpoint.",
        why="A typing error, or a download that broke off.",
        fixes=(change("model.path", "the folder of a whole checkpoint", "Where it is."),),
    ),
)

# The same words stand in the console of a run that got over it: only what ended the run counts.
TROUBLES: tuple[Trouble, ...] = first_failures((*_DATA, *_NUMERICS, *_SYNC, *_ENGINE, *_MACHINE))
