"""Where rows come from and how they become tokens: with weights (SFT), or to be answered (RL)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from homeostat.config.base import PathText, Settings, key


class Source(Settings):
    """What all sources share."""

    path: PathText = key(
        help="A .jsonl, .json (one list) or .parquet file, or a folder written by datasets' "
        "save_to_disk."
    )
    limit: int | None = key(None, ge=1, help="Use only the first rows.")


class MessagesSource(Source):
    """Chats: each row has a list of {role, content}; a message may carry train or weight."""

    type: Literal["messages"]
    messages_column: str = key("messages", help="Column that holds the list of messages.")
    tools_column: str | None = key(
        None,
        help="Column that holds the tools the chat template is given: a list, its JSON text, or "
        "null for a row without.",
    )
    turns: Literal["all", "last", "each"] = key(
        "all",
        help="Which assistant turns are trained, where a message does not say itself. each: a row "
        "of its own for every trained turn, which ends there: what the model sees when it answers, "
        "also where the template rewrites earlier turns.",
    )


class PromptCompletionSource(Source):
    """Pairs: the prompt is context, the completion is trained."""

    type: Literal["prompt_completion"]
    prompt_column: str = key("prompt", help="Column of the prompt.")
    completion_column: str = key("completion", help="Column of the completion.")
    chat: bool = key(
        True,
        help="true: one user and one assistant turn of the chat template. false: the two texts "
        "end to end, closed by the end-of-sequence token.",
    )
    system: str | None = key(None, help="System message put before each row (chat only).")


class TextSource(Source):
    """Plain text: every token is trained, an end-of-sequence token closes each row."""

    type: Literal["text"]
    text_column: str = key("text", help="Column of the text.")


class PromptSource(Source):
    """Prompts to be answered (RL): a text, or a list of messages, and columns for the rewards."""

    type: Literal["prompts"]
    prompt_column: str = key(
        "prompt", help="Column of the prompt. Rewards are given all the other columns."
    )
    chat: bool = key(
        True,
        help="true: a text becomes a user turn of the chat template. false: it is taken as it is. "
        "A list of messages is always a chat.",
    )
    system: str | None = key(
        None, help="System message put before each chat that does not begin with one."
    )


class ReasoningGymSource(Settings):
    """Prompts made by a reasoning-gym task (RL), which the reasoning_gym reward can score."""

    type: Literal["reasoning_gym"]
    task: str = key(min_length=1, share=True, help="Name of the task: chain_sum, say.")
    size: int = key(ge=1, help="How many prompts are made.")
    seed: int = key(ge=0, lt=2**31, help="What they are drawn from.")
    options: dict[str, bool | int | float | str] = key(
        {}, share=True, help="Settings of the task: {min_terms: 2, max_terms: 2}, say."
    )
    instruction: str | None = key(
        None, help="Text put on a new line after each question: how to answer, say."
    )
    chat: bool = key(
        True,
        help="true: the question becomes a user turn of the chat template. false: it is taken as "
        "it is.",
    )
    system: str | None = key(None, help="System message put before each question (chat only).")


SftSource = MessagesSource | PromptCompletionSource | TextSource
RlSource = PromptSource | ReasoningGymSource
AnySource = Annotated[SftSource | RlSource, Field(discriminator="type")]


class DataConfig(Settings):
    train: tuple[AnySource, ...] = key(min_length=1, help="The sources of training rows.")
    validation: tuple[AnySource, ...] = key(
        (), help="Sources of held-out rows. Or set validation_share."
    )
    validation_share: float = key(
        0.0, ge=0, le=0.5, help="Share of the training rows that is held out instead."
    )
    max_length: int = key(2048, ge=2, help="Tokens a row may have.")
    overlong: Literal["drop", "truncate", "refuse"] = key(
        "drop", help="What happens to rows longer than max_length. Each is counted."
    )
    bad_rows: Literal["refuse", "drop"] = key(
        "refuse",
        help="What happens to rows that cannot be used (missing column, wrong type, a template "
        "that rewrites earlier turns, nothing to train on). Each is counted, the first are shown.",
    )
    shuffle: bool = key(True, help="A new order each epoch, drawn from `seed`.")
    num_processes: int = key(
        1,
        ge=1,
        le=64,
        resume="free",
        help="Processes that tokenise rows before the first step. Starting one takes seconds: more "
        "than one pays off from some 20,000 rows.",
    )
    prefetch_updates: int = key(
        4, ge=1, le=64, resume="free", help="Updates packed ahead in the background."
    )
    cache_dir: PathText | None = key(
        None,
        resume="free",
        help="Folder for tokenised rows, shared between runs. Default: inside the run directory.",
    )
