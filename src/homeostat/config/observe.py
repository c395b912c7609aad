"""What a run shows and writes down, how often it is evaluated, and what it saves."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from homeostat.config.base import ByteSize, PathText, Settings, key


class TensorboardSink(Settings):
    type: Literal["tensorboard"]
    folder: PathText = key("tensorboard", resume="free", help="Folder inside the run directory.")


class WandbSink(Settings):
    type: Literal["wandb"]
    project: str = key("homeostat", resume="free", help="W&B project.")
    entity: str | None = key(None, resume="free", help="W&B user or team.")
    name: str | None = key(None, resume="free", help="Name shown in W&B. Default: the run's name.")
    run_id: str | None = key(
        None, resume="free", help="W&B run to continue. Default: kept with the run directory."
    )
    mode: Literal["online", "offline"] = key(
        "online", resume="free", help="offline: written to the run directory, sync it later."
    )


class TrackioSink(Settings):
    type: Literal["trackio"]
    project: str = key("homeostat", resume="free", help="trackio project.")
    name: str | None = key(None, resume="free", help="Run name. Default: the run's name.")


AnySink = Annotated[TensorboardSink | WandbSink | TrackioSink, Field(discriminator="type")]


class ProfilerConfig(Settings):
    steps: tuple[Annotated[int, Field(ge=1)], ...] = key(
        (2, 3), min_length=1, resume="free", help="Steps that are traced, counted from 1."
    )
    folder: PathText = key("trace", resume="free", help="Folder inside the run directory.")
    memory: bool = key(
        True,
        resume="free",
        help="Also record allocations: on a GPU a snapshot for PyTorch's memory viewer.",
    )


class CompletionsConfig(Settings):
    """What is kept of the sampled completions, for people to read (RL)."""

    interval_steps: int = key(1, ge=1, resume="free", help="Steps between files.")
    max_per_step: int | None = key(
        None, ge=1, resume="free", help="Completions in a file. Default: all."
    )


class VerifyLogprobsConfig(Settings):
    """Engine, trainer and a float64 reference on the same tokens: which one is off? (RL)"""

    interval_steps: int = key(
        50, ge=1, resume="free", help="Steps between comparisons; the first is at step 1."
    )
    rows: int = key(
        4,
        ge=1,
        resume="free",
        help="Sampled rows that are compared. The reference takes its time: float64, on the CPU.",
    )


class ObserveConfig(Settings):
    log_interval: int = key(1, ge=1, resume="free", help="Steps between metric records.")
    log_level: Literal["debug", "info", "warning", "error"] = key(
        "info", resume="free", help="What the log shows; HOMEOSTAT_DEBUG=1 sets debug."
    )
    console: Literal["auto", "live", "plain", "quiet"] = key(
        "auto", resume="free", help="auto: a live view in a terminal, plain lines elsewhere."
    )
    sinks: tuple[AnySink, ...] = key(
        (), resume="free", help="Where metrics go besides metrics.jsonl."
    )
    profiler: ProfilerConfig | None = key(None, resume="free", help="Profile some steps.")
    row_losses: bool = key(
        True, resume="free", help="Keep row ids and losses of each step, to trace a spike."
    )
    completions: CompletionsConfig = key(
        CompletionsConfig(), help="Which sampled completions are kept to be read (RL)."
    )
    verify_logprobs: VerifyLogprobsConfig | None = key(
        None,
        resume="free",
        help="Now and then compare engine, trainer and a float64 reference on sampled rows, and "
        "say which one is off (RL).",
    )
    report: bool = key(True, resume="free", help="Write report.html at the end.")


class EvalSamplingConfig(Settings):
    """How held-out prompts are answered, and what counts as solved (RL)."""

    samples_per_prompt: int = key(
        1, ge=1, resume="warn", help="Completions of each prompt; more than one gives pass@k."
    )
    temperature: float | None = key(
        None,
        ge=0,
        le=100,
        resume="warn",
        help="0: the likeliest token (greedy). Default: 0 where one sample is drawn and the "
        "distribution is not cut; else rollout.temperature.",
    )
    top_p: float = key(1.0, gt=0, le=1, resume="warn", help="Keep the likeliest tokens up to this.")
    top_k: int | None = key(None, ge=1, resume="warn", help="Keep so many of the likeliest tokens.")
    max_new_tokens: int | None = key(
        None, ge=1, resume="warn", help="Default: rollout.max_new_tokens."
    )
    solved_at: float = key(
        1.0,
        resume="warn",
        help="A sample counts as solved for pass@k where the deciding reward gives it this or "
        "more, before its weight.",
    )
    solved_by: str | None = key(
        None,
        resume="warn",
        help="Name of the reward that decides what is solved. Default: the built-in rewards that "
        "compare with an expected answer; else the only function, or the only reward. Where "
        "several could be meant, pass@k is reported for each (eval/pass@k/<name>).",
    )
    min_coverage: float = key(
        1.0,
        ge=0,
        le=1,
        resume="warn",
        help="Share of the held-out samples that no reward may have failed on for an evaluation to "
        "become the best one. Lower it for a judge that fails now and then.",
    )


class EvalConfig(Settings):
    interval_steps: int = key(
        50, ge=1, resume="warn", help="Steps between evaluations; the last step is always one."
    )
    at_start: bool = key(
        False, resume="free", help="Also evaluate before the first step, to know where one starts."
    )
    max_rows: int | None = key(None, ge=1, resume="warn", help="Held-out rows used, at most.")
    patience: int | None = key(
        None, ge=1, resume="warn", help="Stop after this many evaluations without a better one."
    )
    min_delta: float = key(
        0.0, ge=0, resume="warn", help="How much better an evaluation must be to count."
    )
    keep_best: bool = key(True, resume="free", help="Keep the checkpoint with the best evaluation.")
    sampling: EvalSamplingConfig = key(
        EvalSamplingConfig(), help="How held-out prompts are answered (RL)."
    )


class CheckpointConfig(Settings):
    interval_steps: int = key(
        200, ge=1, resume="free", help="Steps between checkpoints; the last step is always one."
    )
    keep_last: int = key(2, ge=1, resume="free", help="Checkpoints kept, besides the best.")
    max_bytes: ByteSize | None = key(
        None,
        ge=1,
        resume="free",
        help="Bytes that all checkpoints may take ('50GB'); older ones go first, the newest and "
        "the best stay.",
    )
    resume: Literal["auto", "never"] = key(
        "auto",
        resume="free",
        help="auto: continue the run directory where it stopped. never: refuse one that was used.",
    )
    load_step: int | None = key(
        None, ge=1, resume="free", help="Continue from this checkpoint, not from the newest."
    )
    export: Literal["off", "final", "every"] = key(
        "final", resume="free", help="When weights are also written in HF format (hf/)."
    )
    max_shard_bytes: ByteSize = key(
        5 * 10**9, ge=1024, resume="free", help="Size of one safetensors file of the export."
    )
