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
    """The sampled completions that are saved for people to read (RL)."""

    interval_steps: int = key(1, ge=1, resume="free", help="Number of steps between files.")
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
    """The outputs of a run: logs, metrics, traces and the report."""

    log_interval: int = key(1, ge=1, resume="free", help="Number of steps between metric records.")
    log_level: Literal["debug", "info", "warning", "error"] = key(
        "info", resume="free", help="Lowest level that the log shows; HOMEOSTAT_DEBUG=1 sets debug."
    )
    console: Literal["auto", "live", "plain", "quiet"] = key(
        "auto",
        resume="free",
        help="auto: a live view in a terminal or a notebook, plain lines otherwise.",
    )
    sinks: tuple[AnySink, ...] = key(
        (), resume="free", help="Destinations of metrics in addition to metrics.jsonl."
    )
    profiler: ProfilerConfig | None = key(None, resume="free", help="Profile some steps.")
    timeline: bool = key(
        True,
        resume="free",
        help="Write what each process does when to trace/timeline.json, which Perfetto "
        "(ui.perfetto.dev) opens with a row per process; at most two files of 16 MiB.",
    )
    row_losses: bool = key(
        True,
        resume="free",
        help="Save the row ids and losses of each step, so that a spike can be traced to its rows.",
    )
    completions: CompletionsConfig = key(
        CompletionsConfig(), help="Which sampled completions are saved for people to read (RL)."
    )
    verify_logprobs: VerifyLogprobsConfig | None = key(
        None,
        resume="free",
        help="Regularly compare engine, trainer and a float64 reference on sampled rows, and "
        "report which one is off (RL).",
    )
    precision_interval: int | None = key(
        10,
        ge=1,
        resume="free",
        help="Number of steps between measurements of quantised layers (trainer.fp8, "
        "trainer.int4): their scales, what they cut or round to 0, their error, and their gradient "
        "against bf16. A measured step computes a part of its rows two more times. null: never.",
    )
    report: bool = key(True, resume="free", help="Write report.html at the end.")


class EvalSamplingConfig(Settings):
    """Sampling of held-out prompts, and the criterion of a solved one (RL)."""

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
        help="Sample only from the most likely tokens whose probabilities add up to this.",
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
        help="Wait for an evaluation before the next step. false, with rollout.max_staleness of 1 "
        "or more: held-out prompts are answered while the trainer continues; their metrics are in "
        "the record of the next step, and eval/policy_version says which weights they are of.",
    )
    min_coverage: float = key(
        1.0,
        ge=0,
        le=1,
        resume="warn",
        help="Share of the held-out samples that must have been scored without a failed reward "
        "for an evaluation to become the best one. Lower it for a judge that fails now and then.",
    )


class EvalConfig(Settings):
    """The schedule of evaluations on held-out rows, and early stopping."""

    interval_steps: int = key(
        50,
        ge=1,
        resume="warn",
        help="Number of steps between evaluations; the last step is always evaluated.",
    )
    at_start: bool = key(
        False, resume="free", help="Also evaluate before the first step, as a baseline."
    )
    max_rows: int | None = key(
        None, ge=1, resume="warn", help="Largest number of held-out rows to use."
    )
    patience: int | None = key(
        None, ge=1, resume="warn", help="Stop after this many evaluations without an improvement."
    )
    min_delta: float = key(
        0.0, ge=0, resume="warn", help="Smallest change that counts as an improvement."
    )
    keep_best: bool = key(True, resume="free", help="Keep the checkpoint with the best evaluation.")
    sampling: EvalSamplingConfig = key(
        EvalSamplingConfig(), help="How held-out prompts are answered (RL)."
    )


class CheckpointConfig(Settings):
    """The schedule of checkpoints, which of them are kept, and how a run is resumed."""

    interval_steps: int = key(
        200,
        ge=1,
        resume="free",
        help="Number of steps between checkpoints; the last step is always saved.",
    )
    keep_last: int = key(
        2, ge=1, resume="free", help="Number of checkpoints to keep, in addition to the best."
    )
    max_bytes: ByteSize | None = key(
        None,
        ge=1,
        resume="free",
        help="Bytes that all checkpoints together may use (for example '50GB'); older ones are "
        "removed first, the newest and the best stay.",
    )
    resume: Literal["auto", "never"] = key(
        "auto",
        resume="free",
        help="auto: resume the run directory where it stopped. never: refuse a directory that "
        "was used before.",
    )
    load_step: int | None = key(
        None,
        ge=1,
        resume="free",
        help="Resume from the checkpoint of this step instead of the newest.",
    )
    export: Literal["off", "final", "every"] = key(
        "final", resume="free", help="When weights are also written in HF format (hf/)."
    )
    max_shard_bytes: ByteSize = key(
        5 * 10**9,
        ge=1024,
        resume="free",
        help="Largest size of one safetensors file of the export.",
    )
