"""The event catalogue: every kind that events.jsonl may hold, and what it means.

An event has `kind`, `step` and `time` (seconds since 1970), and the fields named here. Its mood
colours it wherever it is shown. Whoever emits a kind that is not here is stopped by an assertion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mood = Literal["", "good", "warn", "bad"]


@dataclass(frozen=True, slots=True)
class EventInfo:
    """One line of the catalogue."""

    kind: str
    meaning: str
    fields: tuple[str, ...] = ()
    mood: Mood = ""


_LIST: tuple[EventInfo, ...] = (
    EventInfo("run_started", "A new run directory is in use.", ("command", "environment")),
    EventInfo(
        "run_resumed",
        "The run goes on after a checkpoint.",
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
        "A broken checkpoint was passed over for an older one that is whole.",
        ("name", "why"),
        "warn",
    ),
    EventInfo(
        "records_set_aside",
        "Lines of a log file of the run directory were damaged from outside. They were moved to "
        "another file, and the run goes on without them.",
        ("file", "lines", "kept_in"),
        "warn",
    ),
    EventInfo(
        "data_prepared",
        "Rows were tokenised, or found in the cache: how many were kept, dropped and cut.",
        ("which", "seen", "kept", "dropped_overlong", "truncated", "bad", "tokens",
         "trained_tokens"),
    ),
    EventInfo(
        "model_loaded",
        "The model is on its device.",
        ("implementation", "attention", "meta_init", "lora_modules", "bytes", "seconds"),
    ),
    EventInfo(
        "tokenizer_compared",
        "model.tokenizer against the model's own: pieces that both know, how many of them have "
        "another number, the size of the smaller one, and examples.",
        ("shared", "moved", "known", "examples"),
    ),
    EventInfo(
        "compile_cache_damaged",
        "A folder of compiled kernels held entries that were half-written, corrupt or another "
        "user's; they were removed unless the folder is one that you chose.",
        ("folder", "entries", "removed"),
        "warn",
    ),
    EventInfo(
        "logprobs_verified",
        "Engine and trainer agree with a float64 reference to rounding.",
        ("verdict", "rows"),
        "good",
    ),
    EventInfo(
        "logprobs_off",
        "Engine or trainer is further from a float64 reference than rounding explains.",
        ("verdict", "rows"),
        "bad",
    ),
    EventInfo("training", "Everything is set up; the first step follows.", ("total_steps",)),
    EventInfo(
        "rules_watching",
        "How many health rules have all that they need to judge the run, from here on.",
        ("rules",),
    ),
    EventInfo(
        "eval_done",
        "The held-out rows (in RL: prompts) were scored, and were better before.",
        ("loss", "reward"),
    ),
    EventInfo(
        "new_best", "The held-out rows or prompts never scored better.", ("loss", "reward"), "good"
    ),
    EventInfo(
        "eval_incomplete",
        "Rewards failed on held-out samples, so that this evaluation cannot become the best one "
        "(eval.sampling.min_coverage).",
        ("reward", "coverage", "needed"),
        "warn",
    ),
    EventInfo(
        "reward_trouble",
        "A reward gave no usable value: which, why, and the input that caused it. A sample on "
        "which a reward failed is not trained; one that it returned None for does without it. Of "
        "each kind only the first are written down; the metric counts all.",
        ("reward", "failure", "message", "num_samples", "prompt_id", "prompt", "completion",
         "traceback", "calls_in_a_row"),
        "warn",
    ),
    EventInfo(
        "early_stop",
        "eval.patience evaluations in a row were no better; the run ends.",
        ("best", "patience"),
    ),
    EventInfo(
        "step_skipped",
        "Loss or gradient was not finite. Nothing was applied; `origin` names module and "
        "direction, `rows_file` holds the rows.",
        ("loss", "grad_norm", "origin", "rows", "rows_file"),
        "warn",
    ),
    EventInfo(
        "worst_tokens",
        "Engine and trainer differ on tokens by more than rounding: the first is the worst, "
        "`tokens` has the worst of the step with the text around them. Not at every step.",
        ("text", "engine_logp", "trainer_logp", "tokens"),
        "warn",
    ),
    EventInfo(
        "oom_retry",
        "Memory ran out. The step is done again with fewer tokens per micro-batch, to the same "
        "gradient.",
        ("tokens_before", "tokens_now", "error", "snapshot"),
        "warn",
    ),
    EventInfo(
        "update_unmeasured",
        "An update was applied, but memory ran out when its invariants were measured: its "
        "update/* and probe/* metrics are missing.",
        ("error",),
        "warn",
    ),
    EventInfo(
        "weights_published",
        "The weights were sent to the engine, which samples with them from here on.",
        ("version", "bytes", "seconds", "transport", "checksum"),
    ),
    EventInfo(
        "engine_restarted",
        "The engine's process died. Another one was started and sent the weights; the round is "
        "sampled from its start.",
        ("error", "restarts"),
        "warn",
    ),
    EventInfo(
        "helper_lost",
        "A process that sampled beside the trainer's died. Its requests begin again in the "
        "trainer's, which samples alone from here on.",
        ("error",),
        "warn",
    ),
    EventInfo("checkpoint_saved", "A checkpoint is in place.", ("path", "seconds", "best")),
    EventInfo(
        "checkpoint_failed",
        "A checkpoint could not be written (a full disk, say). Earlier ones are untouched.",
        ("error",),
        "bad",
    ),
    EventInfo("checkpoint_pruned", "Old checkpoints were removed.", ("removed",)),
    EventInfo("export_written", "Weights were written in HF format.", ("path",)),
    EventInfo(
        "remedy_applied",
        "Something was done about an illness: `code` is the finding's (empty where a guard of the "
        "run acted on its own), `cause` what it is about, `remedy` what was done; of an "
        "edit `path` was `old` and is `new`. Judged after `window` steps.",
        ("code", "cause", "remedy", "path", "old", "new", "grade", "window"),
        "warn",
    ),
    EventInfo(
        "remedy_judged",
        "A remedy had its time: did the illness end, or did `metric` get better?",
        ("code", "cause", "remedy", "helped", "metric", "before", "after"),
    ),
    EventInfo(
        "remedy_reverted",
        "A remedy did not help, or is no longer wanted, and was taken back.",
        ("code", "cause", "remedy", "path", "old", "new", "why"),
        "warn",
    ),
    EventInfo(
        "rolled_back",
        "The run went back to a healthy checkpoint; records after it were cut.",
        ("code", "cause", "from_step", "to_step", "path", "old", "new"),
        "warn",
    ),
    EventInfo(
        "rule_failed",
        "A health rule has a mistake and is left out from here on: worth a report.",
        ("code", "error"),
        "warn",
    ),
    EventInfo(
        "allowance_unused",
        "health.allow names a finding that never came up: remove it.",
        ("code", "reason"),
    ),
    EventInfo(
        "health_halted",
        "A finding of level error opened, and health.on_error=halt.",
        ("code", "name", "message"),
        "bad",
    ),
    EventInfo("profiler_trace", "A step was profiled.", ("folder", "files")),
    EventInfo(
        "sink_failed",
        "A metric sink failed and is left out from here on; metrics.jsonl goes on.",
        ("sink", "error"),
        "warn",
    ),
    EventInfo(
        "run_stopped", "A signal ended the run. What was saved stays.", ("signal",), "warn"
    ),
    EventInfo("run_finished", "The run is complete.", mood="good"),
    EventInfo(
        "run_failed", "The run ended by an error; see traceback.txt.", ("error", "message"), "bad"
    ),
)  # fmt: skip

EVENTS: dict[str, EventInfo] = {info.kind: info for info in _LIST}


def mood_of(kind: str) -> Mood:
    """How an event is coloured; kinds of other versions have no colour."""
    return EVENTS[kind].mood if kind in EVENTS else ""
