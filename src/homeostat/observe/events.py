"""The event catalogue: every kind of event in events.jsonl, and its meaning.

An event has `kind`, `step`, `time` (seconds since 1970) and the fields listed here. Its mood is the
colour in which it is shown. Emitting a kind that is not in the catalogue fails an assertion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mood = Literal["", "good", "warn", "bad"]


@dataclass(frozen=True, slots=True)
class EventInfo:
    """One entry of the catalogue."""

    kind: str
    meaning: str
    fields: tuple[str, ...] = ()
    mood: Mood = ""


_LIST: tuple[EventInfo, ...] = (
    EventInfo("run_started", "A run started in a new run directory.", ("command", "environment")),
    EventInfo(
        "run_resumed",
        "The run was resumed from a checkpoint.",
        ("command", "checkpoint", "environment"),
    ),
    EventInfo(
        "config_changed",
        "A key differs from the run's saved config in a way that changes the run from here on.",
        ("path", "old", "new"),
        "warn",
    ),
    EventInfo(
        "checkpoint_skipped_invalid",
        "A broken checkpoint was skipped, and an older intact one is used.",
        ("name", "why"),
        "warn",
    ),
    EventInfo(
        "records_set_aside",
        "Lines of a log file in the run directory were damaged from outside. They were "
        "moved to another file, and the run continues without them.",
        ("file", "lines", "kept_in"),
        "warn",
    ),
    EventInfo(
        "data_prepared",
        "Rows were tokenised or found in the cache. The fields count the rows that were kept, "
        "dropped and truncated.",
        (
            "which",
            "seen",
            "kept",
            "dropped_overlong",
            "truncated",
            "bad",
            "tokens",
            "trained_tokens",
        ),
    ),
    EventInfo(
        "model_loaded",
        "The model is on its device. `precision`: how layers in another precision compute, if any.",
        (
            "implementation",
            "attention",
            "meta_init",
            "lora_modules",
            "bytes",
            "seconds",
            "precision",
        ),
    ),
    EventInfo(
        "reference_scored",
        "The rows were scored under the reference model, or the scores were found in the run "
        "folder.",
        ("what", "rows", "is_new"),
    ),
    EventInfo(
        "tokenizer_compared",
        "model.tokenizer was compared with the model's own tokenizer: number of shared "
        "pieces, how many of them have another id, the size of the smaller vocabulary, and "
        "examples.",
        ("shared", "moved", "known", "examples"),
    ),
    EventInfo(
        "rows_compared",
        "Share of training rows that are copies of others, and share of the held-out rows that are "
        "among the training rows.",
        ("duplicate_rows", "validation_overlap"),
    ),
    EventInfo(
        "chat_template_probed",
        "The chat template's own text was tokenised: number of tokens, how many of them the "
        "tokenizer does not know, markers that are split into several tokens, and the share of "
        "the text that the model's own template also has.",
        ("tokens", "unknown", "split", "alike"),
    ),
    EventInfo(
        "compile_cache_damaged",
        "A cache folder of compiled kernels contained entries that were half-written, "
        "corrupt or owned by another user. They were removed, unless you chose the folder "
        "yourself.",
        ("folder", "entries", "removed"),
        "warn",
    ),
    EventInfo(
        "logprobs_verified",
        "Engine and trainer agree with a float64 reference up to rounding.",
        ("verdict", "rows"),
        "good",
    ),
    EventInfo(
        "logprobs_off",
        "The log-probs of engine or trainer are further from a float64 reference than "
        "rounding explains.",
        ("verdict", "rows"),
        "bad",
    ),
    EventInfo(
        "precision_switched",
        "From this step on layers are computed in low precision: the format, the number of "
        "quantised layers, and which of them are heads, embeddings or routers.",
        ("format", "layers", "sensitive"),
    ),
    EventInfo("training", "The setup is complete, and the first step follows.", ("total_steps",)),
    EventInfo(
        "rules_watching",
        "Number of health rules that have all the data they need to judge the run from here on.",
        ("rules",),
    ),
    EventInfo(
        "eval_done",
        "The held-out rows (in RL: prompts) were evaluated, and the result is not a new best one.",
        ("loss", "reward"),
    ),
    EventInfo(
        "new_best",
        "The held-out rows or prompts gave the best result so far.",
        ("loss", "reward"),
        "good",
    ),
    EventInfo(
        "eval_incomplete",
        "Rewards failed on held-out samples, so this evaluation cannot become the best one "
        "(eval.sampling.min_coverage).",
        ("reward", "coverage", "needed"),
        "warn",
    ),
    EventInfo(
        "filter_failed",
        "A function of rollout.filters failed on a group (it raised, hung or returned an invalid "
        "value), so the group is dropped. At most 20 of each kind are recorded.",
        (
            "filter",
            "failure",
            "message",
            "prompt_id",
            "prompt",
            "traceback",
            "calls_in_a_row",
        ),
        "warn",
    ),
    EventInfo(
        "reward_trouble",
        "A reward gave no usable value: which one, why, and the input that caused it. A "
        "sample on which a reward failed is not trained; a sample for which it returned None "
        "keeps its other rewards. Only the first events of each kind are written; the metrics "
        "count all.",
        (
            "reward",
            "failure",
            "message",
            "num_samples",
            "prompt_id",
            "prompt",
            "completion",
            "traceback",
            "calls_in_a_row",
        ),
        "warn",
    ),
    EventInfo(
        "early_stop",
        "eval.patience consecutive evaluations brought no improvement, so the run ends.",
        ("best", "patience"),
    ),
    EventInfo(
        "step_skipped",
        "Loss or gradient was not finite, so the update was not applied. `origin` names "
        "the module and direction, and `rows_file` contains the rows.",
        ("loss", "grad_norm", "origin", "rows", "rows_file"),
        "warn",
    ),
    EventInfo(
        "worst_tokens",
        "Engine and trainer differ on some tokens by more than rounding. The fields "
        "describe the worst token, and `tokens` lists the worst of the step with the text around "
        "them. Not written at every step.",
        ("text", "engine_logp", "trainer_logp", "tokens"),
        "warn",
    ),
    EventInfo(
        "oom_retry",
        "Memory ran out. The step is retried with fewer tokens per micro-batch; the "
        "gradient is unchanged.",
        ("tokens_before", "tokens_now", "error", "snapshot"),
        "warn",
    ),
    EventInfo(
        "update_unmeasured",
        "An update was applied, but memory ran out while its invariants were measured, so "
        "its update/* and probe/* metrics are missing.",
        ("error",),
        "warn",
    ),
    EventInfo(
        "weights_published",
        "The weights were sent to the engine, which samples with them from here on.",
        ("version", "bytes", "sent_bytes", "seconds", "transport", "checksum"),
    ),
    EventInfo(
        "overlap_not_used",
        "The weights could not be sent while the engine sampled (sync.overlap), so it was paused "
        "while they were sent.",
        ("version", "cause"),
        "warn",
    ),
    EventInfo(
        "weights_sent_whole",
        "A transport that sends differences sent all weights, because trainer and engine have no "
        "last version in common.",
        ("version", "cause"),
    ),
    EventInfo(
        "engine_restarted",
        "The engine's process died. A new one was started and received the weights; the "
        "round is sampled again from its start.",
        ("error", "restarts"),
        "warn",
    ),
    EventInfo(
        "trainer_restarted",
        "A rank of the trainer died, hung or lost its connection to the others. All ranks were "
        "restarted from the last checkpoint; rollouts sampled since then are replayed from the "
        "journal.",
        ("error", "restarts", "from_step"),
        "warn",
    ),
    EventInfo(
        "node_lost",
        "A machine of the Ray cluster is gone, and the whole run does not fit on the others. The "
        "run waits until the time in `until`, or shrinks.",
        ("nodes", "missing", "action", "until"),
        "warn",
    ),
    EventInfo(
        "cluster_shrunk",
        "The run continues with fewer trainer ranks or engines, because a machine was lost. "
        "Gradients are still those of the whole batch.",
        ("ranks_before", "ranks_now", "engines_before", "engines_now"),
        "warn",
    ),
    EventInfo(
        "cluster_restored",
        "The whole run fits on the cluster again, after it waited or shrank.",
        ("ranks", "engines", "waited_s"),
        "good",
    ),
    EventInfo(
        "engine_lost",
        "One of several engines died. The others continue its requests, and a new one is "
        "started in its place while restarts are left.",
        ("error", "left"),
        "warn",
    ),
    EventInfo(
        "engine_joined",
        "A new engine was started in place of one that died. It has the current weights and "
        "samples together with the others.",
        ("name", "version"),
    ),
    EventInfo(
        "helper_lost",
        "A helper process of the engine died and is not replaced in this run. The other processes "
        "restart its requests.",
        ("error",),
        "warn",
    ),
    EventInfo("checkpoint_saved", "A checkpoint was saved.", ("path", "seconds", "best")),
    EventInfo(
        "checkpoint_failed",
        "A checkpoint could not be written, for example because the disk is full. Earlier "
        "ones are untouched.",
        ("error",),
        "bad",
    ),
    EventInfo("checkpoint_pruned", "Old checkpoints were removed.", ("removed",)),
    EventInfo("export_written", "Weights were written in HF format.", ("path",)),
    EventInfo(
        "remedy_applied",
        "A remedy was applied to a finding. `code` is the finding's code (empty if the run acted "
        "without a finding), `cause` the reason, `remedy` the action. For a config edit, `path` "
        "changed from `old` to `new`. The remedy is judged after `window` steps.",
        ("code", "cause", "remedy", "path", "old", "new", "grade", "window"),
        "warn",
    ),
    EventInfo(
        "remedy_judged",
        "The window of a remedy is over: `helped` says whether the finding closed or "
        "`metric` improved.",
        ("code", "cause", "remedy", "helped", "metric", "before", "after"),
    ),
    EventInfo(
        "remedy_reverted",
        "A remedy was reverted, because it did not help or is no longer wanted.",
        ("code", "cause", "remedy", "path", "old", "new", "why"),
        "warn",
    ),
    EventInfo(
        "rolled_back",
        "The run went back to a healthy checkpoint; later records were cut.",
        ("code", "cause", "from_step", "to_step", "path", "old", "new"),
        "warn",
    ),
    EventInfo(
        "rule_failed",
        "A health rule raised an error and is disabled from here on. Please report it.",
        ("code", "error"),
        "warn",
    ),
    EventInfo(
        "allowance_unused",
        "health.allow names a finding that never occurred: remove it.",
        ("code", "reason"),
    ),
    EventInfo(
        "health_halted",
        "A finding of level error opened, and health.on_error is halt.",
        ("code", "name", "message"),
        "bad",
    ),
    EventInfo("profiler_trace", "A step was profiled.", ("folder", "files")),
    EventInfo(
        "sink_failed",
        "A metric sink failed and is disabled from here on; metrics.jsonl is still written.",
        ("sink", "error"),
        "warn",
    ),
    EventInfo(
        "run_stopped",
        "A signal ended the run, or the Python code that called it did (`signal`: the caller). "
        "Everything that was saved is kept.",
        ("signal",),
        "warn",
    ),
    EventInfo("run_finished", "The run is complete.", mood="good"),
    EventInfo(
        "run_failed", "The run ended with an error; see traceback.txt.", ("error", "message"), "bad"
    ),
)

EVENTS: dict[str, EventInfo] = {info.kind: info for info in _LIST}


def mood_of(kind: str) -> Mood:
    """Return the colour of an event; unknown kinds (of other versions) have none."""
    return EVENTS[kind].mood if kind in EVENTS else ""
