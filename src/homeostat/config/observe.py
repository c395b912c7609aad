"""Settings of logging, evaluation and checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from homeostat.config.base import ByteSize, PathText, Settings, key


class TensorboardSink(Settings):
    """Write metrics to TensorBoard event files."""

    type: Literal["tensorboard"]
    folder: PathText = key("tensorboard", resume="free", help="Folder inside the run directory.")


class WandbSink(Settings):
    """Send metrics to Weights & Biases."""

    type: Literal["wandb"]
    project: str = key("homeostat", resume="free", help="W&B project.")
    entity: str | None = key(None, resume="free", help="W&B user or team.")
    name: str | None = key(None, resume="free", help="Name shown in W&B. Default: the run's name.")
    run_id: str | None = key(
        None,
        resume="free",
        help="W&B run to continue. Default: the id stored in the run directory.",
    )
    mode: Literal["online", "offline"] = key(
        "online", resume="free", help="offline: write to the run directory and sync it later."
    )


class TrackioSink(Settings):
    """Send metrics to trackio."""

    type: Literal["trackio"]
    project: str = key("homeostat", resume="free", help="trackio project.")
    name: str | None = key(None, resume="free", help="Run name. Default: the run's name.")


AnySink = Annotated[TensorboardSink | WandbSink | TrackioSink, Field(discriminator="type")]


class ProfilerConfig(Settings):
    """Profile some steps with the torch profiler."""

    steps: tuple[Annotated[int, Field(ge=1)], ...] = key(
        (2, 3), min_length=1, resume="free", help="Steps to trace, counted from 1."
    )
    folder: PathText = key("trace", resume="free", help="Folder inside the run directory.")
    memory: bool = key(
        True,
        resume="free",
        help="Also record allocations; on a GPU as a snapshot for PyTorch's memory viewer.",
    )


class CompletionsConfig(Settings):
    """The sampled completions that are saved for you to read (RL)."""

    interval_steps: int = key(1, ge=1, resume="free", help="Number of steps between saved files.")
    max_per_step: int | None = key(
        None, ge=1, resume="free", help="Number of completions in a file. Default: all."
    )


class VerifyLogprobsConfig(Settings):
    """Compare engine and trainer with a float64 reference, to find out which is wrong (RL)."""

    interval_steps: int = key(
        50, ge=1, resume="free", help="Number of steps between comparisons; the first is at step 1."
    )
    rows: int = key(
        4,
        ge=1,
        resume="free",
        help="Number of sampled rows that are compared. The reference is slow, because it is "
        "computed in float64 on the CPU.",
    )


class ObserveConfig(Settings):
    """The output of a run: logs, metrics, traces and the report."""

    log_interval: int = key(1, ge=1, resume="free", help="Number of steps between metric records.")
    log_level: Literal["debug", "info", "warning", "error"] = key(
        "info",
        resume="free",
        help="Lowest level of messages in the log. HOMEOSTAT_DEBUG=1 sets debug.",
    )
    console: Literal["auto", "live", "plain", "quiet"] = key(
        "auto",
        resume="free",
        help="Output in the terminal. auto: a live view in a terminal or a notebook, otherwise "
        "plain lines.",
    )
    sinks: tuple[AnySink, ...] = key(
        (), resume="free", help="Destinations of metrics in addition to metrics.jsonl."
    )
    profiler: ProfilerConfig | None = key(None, resume="free", help="Profile some steps.")
    timeline: bool = key(
        True,
        resume="free",
        help="Write a timeline of all processes to trace/timeline.json. Open it in Perfetto "
        "(ui.perfetto.dev), which shows a row for each process. It takes at most two files of 16 "
        "MiB.",
    )
    row_losses: bool = key(
        True,
        resume="free",
        help="Save the row ids and losses of each step, so that you can find the rows that caused "
        "a spike.",
    )
    completions: CompletionsConfig = key(
        CompletionsConfig(), help="Which sampled completions are saved for you to read (RL)."
    )
    verify_logprobs: VerifyLogprobsConfig | None = key(
        None,
        resume="free",
        help="Regularly compare the log-probs of engine, trainer and a float64 reference on "
        "sampled rows, and report which one is wrong (RL).",
    )
    precision_interval: int | None = key(
        10,
        ge=1,
        resume="free",
        help="Number of steps between measurements of quantised layers (trainer.fp8, "
        "trainer.int4): their scales, the share of numbers that are clipped or rounded to 0, "
        "their error, and their gradient compared with bf16. A measured step computes a part of "
        "its rows two more times. null: never measure.",
    )
    report: bool = key(True, resume="free", help="Write report.html at the end.")


class EvalSamplingConfig(Settings):
    """Sampling of completions for held-out prompts, and when one counts as solved (RL)."""

    samples_per_prompt: int = key(
        1,
        ge=1,
        resume="warn",
        help="Number of completions for each prompt; more than one gives pass@k.",
    )
    temperature: float | None = key(
        None,
        ge=0,
        le=100,
        resume="warn",
        help="Sampling temperature; 0 means greedy decoding. Default: 0 if one sample is drawn "
        "without top_p or top_k; otherwise rollout.temperature.",
    )
    top_p: float = key(
        1.0,
        gt=0,
        le=1,
        resume="warn",
        help="Sample only from the most likely tokens whose probabilities add up to this value.",
    )
    top_k: int | None = key(
        None, ge=1, resume="warn", help="Sample only from this many of the most likely tokens."
    )
    max_new_tokens: int | None = key(
        None,
        ge=1,
        resume="warn",
        help="Largest number of tokens in a completion. Default: rollout.max_new_tokens.",
    )
    solved_at: float = key(
        1.0,
        resume="warn",
        help="A sample counts as solved for pass@k if the deciding reward gives it this value "
        "or more, before its weight is applied.",
    )
    solved_by: str | None = key(
        None,
        share=True,
        resume="warn",
        help="Name of the reward that decides whether a sample is solved. Default: the built-in "
        "rewards that compare with an expected answer; otherwise the only function, or the only "
        "reward. If several could decide, pass@k is reported for each (eval/pass@k/<name>).",
    )
    blocking: bool = key(
        True,
        resume="warn",
        help="Wait for an evaluation before the next step. false (needs rollout.max_staleness of "
        "1 or more): evaluate while the trainer continues. The metrics are then in the record of "
        "the next step, and eval/policy_version is the version of the evaluated weights.",
    )
    min_coverage: float = key(
        1.0,
        ge=0,
        le=1,
        resume="warn",
        help="An evaluation can become the best one only if at least this share of its samples "
        "was scored without a failed reward. Lower it if your judge fails now and then.",
    )


class EvalConfig(Settings):
    """The schedule of evaluations on held-out rows, and early stopping."""

    interval_steps: int = key(
        50,
        ge=1,
        resume="warn",
        help="Number of steps between evaluations. The last step is always evaluated.",
    )
    at_start: bool = key(
        False, resume="free", help="Also evaluate before the first step, as a baseline."
    )
    max_rows: int | None = key(
        None, ge=1, resume="warn", help="Largest number of held-out rows to use."
    )
    patience: int | None = key(
        None,
        ge=1,
        resume="warn",
        help="Stop the run after this many evaluations without an improvement. null: never.",
    )
    min_delta: float = key(
        0.0,
        ge=0,
        resume="warn",
        help="An evaluation is an improvement "
        "if it is better than the best one so far by more than this.",
    )
    keep_best: bool = key(True, resume="free", help="Keep the checkpoint with the best evaluation.")
    sampling: EvalSamplingConfig = key(
        EvalSamplingConfig(), help="How completions of held-out prompts are sampled (RL)."
    )


class CheckpointConfig(Settings):
    """The schedule of checkpoints, which of them to keep, and how to resume a run."""

    interval_steps: int = key(
        200,
        ge=1,
        resume="free",
        help="Number of steps between checkpoints. The last step is always saved.",
    )
    keep_last: int = key(
        2,
        ge=1,
        resume="free",
        help="Number of checkpoints to keep, counted from the newest. The best one is kept even "
        "if it is older than these.",
    )
    max_bytes: ByteSize | None = key(
        None,
        ge=1,
        resume="free",
        help="Disk space that all checkpoints together may use, for example '50GB'. The oldest "
        "are removed first; the newest and the best are always kept.",
    )
    resume: Literal["auto", "never"] = key(
        "auto",
        resume="free",
        help="auto: if the run directory holds an earlier run, continue it where it stopped. "
        "never: refuse such a directory.",
    )
    load_step: int | None = key(
        None,
        ge=1,
        resume="free",
        help="Resume from the checkpoint of this step instead of the newest.",
    )
    export: Literal["off", "final", "every"] = key(
        "final",
        resume="free",
        help="When to export weights in HF format (hf/). final: at the "
        "end of the run. every: with every checkpoint. off: never.",
    )
    max_shard_bytes: ByteSize = key(
        5 * 10**9,
        ge=1024,
        resume="free",
        help="Largest size of one safetensors file of the export.",
    )
