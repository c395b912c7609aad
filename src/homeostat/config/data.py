"""Settings of the data: the sources of rows, and how rows become tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from homeostat.config.base import PathText, Settings, key
from homeostat.config.curriculum import SourceWeight, as_label
from homeostat.config.hub_names import cached_path, is_hub_name
from homeostat.config.plugins import Pluggable, Plugged

# Names in `columns` that belong to messages: their keys, and the file's words for a role.
MESSAGE_KEYS = ("messages.role", "messages.content")
ROLE_NAMES = ("messages.system", "messages.user", "messages.assistant", "messages.tool")


class AnySourceSettings(Settings):
    """Settings that all sources share."""

    name: str | None = key(
        None,
        pattern=r"^[A-Za-z0-9_.-]{1,60}$",
        share=True,
        help="Name of the source in metrics (data/share/<name>). Default: the file's name, or the "
        "task.",
    )
    weight: SourceWeight | None = key(
        None,
        help="Sampling weight of this source: a step's rows (in RL, prompts) are divided among "
        "the sources in proportion to their weights. A number, or a schedule over steps. Default: "
        "no source has a weight, and the rows of all sources form one epoch.",
    )

    def default_name(self) -> str:
        """Return the name that is used if the recipe gives none."""
        raise NotImplementedError


class Source(AnySourceSettings):
    """Settings that all file sources share."""

    path: PathText = key(
        help="A .jsonl, .csv or .tsv file (also as .gz or .zst), a .json (one list) or .parquet "
        "file, a folder written by datasets' save_to_disk, a folder with such files, or the name "
        "of a dataset on the Hugging Face hub, for example openai/gsm8k. A path that exists on "
        "disk takes precedence over a name on the hub."
    )
    split: str | None = key(
        None,
        min_length=1,
        share=True,
        help="Split of a dataset on the hub or in a folder. Default: train, if the source is in "
        "data.train.",
    )
    config: str | None = key(
        None,
        min_length=1,
        share=True,
        help="Configuration (subset) of a dataset on the hub or in a folder, for example main. "
        "Required if the dataset has several and none is the default.",
    )
    revision: str | None = key(
        None,
        min_length=1,
        share=True,
        help="Branch, tag or commit, if `path` is a name on the hub. Default: the main branch.",
    )
    columns: dict[str, str | tuple[str, ...]] = key(
        {},
        share="all",
        help="Names in the file of the columns that this source reads, for example {prompt: "
        "question, completion: answer}. Several columns are joined by a blank line: {prompt: "
        "[instruction, input]}. For chats, messages.role and messages.content are the file's keys "
        "of a message, and messages.assistant, messages.user, messages.system and messages.tool "
        "are its names of the roles, for example {messages.assistant: [agent, bot]}.",
    )
    limit: int | None = key(
        None, ge=1, help="Use only this many rows, from the start of the source."
    )

    def default_name(self) -> str:
        held = cached_path(self.path)
        if held is not None and not held.file:
            return as_label(held.name.rpartition("/")[2])
        if is_hub_name(self.path):
            return as_label(self.path.rpartition("/")[2])
        return as_label(PurePath(self.path).stem)


class AutoSource(Source):
    """Rows whose type is recognised from their columns when the recipe is loaded."""

    type: Literal["auto"]


class MessagesSource(Source):
    """Chats: each row has a list of {role, content}; a message may carry train or weight."""

    type: Literal["messages"]
    messages_column: str = key("messages", share=True, help="Column with the list of messages.")
    tools_column: str | None = key(
        None,
        share=True,
        help="Column with the tools that are passed to the chat template: a list, its JSON "
        "text. A row without tools has null there, or no such column.",
    )
    turns: Literal["all", "last", "each"] = key(
        "all",
        help="Which assistant turns are trained, unless a message decides it with its own `train` "
        "or `weight`. all: every turn. last: only the last one. each: every trained turn becomes "
        "a separate row that ends there. The row is then exactly what the model sees when it "
        "answers, even if the template rewrites earlier turns.",
    )


class PromptCompletionSource(Source):
    """Pairs of a prompt, which is context, and a completion, which is trained.

    Both are texts or lists of messages.
    """

    type: Literal["prompt_completion"]
    prompt_column: str = key("prompt", share=True, help="Column with the prompt.")
    completion_column: str = key("completion", share=True, help="Column with the completion.")
    chat: bool = key(
        True,
        help="true: one user turn and one assistant turn of the chat template. false: the two "
        "texts are concatenated and followed by the end-of-sequence token. Lists of messages are "
        "always a chat.",
    )
    system: str | None = key(None, help="System message that is put before each row (chat only).")


class TextSource(Source):
    """Plain text: every token is trained, and each row ends with an end-of-sequence token."""

    type: Literal["text"]
    text_column: str = key("text", share=True, help="Column with the text.")


class PromptSource(Source):
    """Prompts to answer (RL): a text or a list of messages, and columns for the rewards."""

    type: Literal["prompts"]
    prompt_column: str = key(
        "prompt", share=True, help="Column with the prompt. Rewards receive all other columns."
    )
    chat: bool = key(
        True,
        help="true: a text becomes a user turn of the chat template. false: the text is used as "
        "it is. A list of messages is always a chat.",
    )
    system: str | None = key(
        None, help="System message that is put before each chat that does not begin with one."
    )


class ReasoningGymSource(AnySourceSettings):
    """Prompts generated by a reasoning-gym task (RL); score them with the reasoning_gym reward."""

    type: Literal["reasoning_gym"]
    task: str = key(min_length=1, share=True, help="Name of the task, for example chain_sum.")
    size: int = key(ge=1, help="Number of prompts to generate.")
    seed: int = key(ge=0, lt=2**31, help="Seed of the generator.")
    options: dict[str, bool | int | float | str] = key(
        {}, share=True, help="Settings of the task, for example {min_terms: 2, max_terms: 2}."
    )
    instruction: str | None = key(
        None, help="Text that is put on a new line after each question, for example how to answer."
    )
    chat: bool = key(
        True,
        help="true: the question becomes a user turn of the chat template. false: it is used as "
        "it is.",
    )
    system: str | None = key(
        None, help="System message that is put before each question (chat only)."
    )

    def default_name(self) -> str:
        return as_label(self.task)


class PreferenceSource(Source):
    """Pairs: a prompt, and two completions of which the first is better.

    Prompt and completions are texts or lists of messages. If a row has no prompt, the common
    beginning of both completions is the prompt.
    """

    type: Literal["preference"]
    prompt_column: str = key(
        "prompt", share=True, help="Column with the prompt. Rows need not have it (see above)."
    )
    chosen_column: str = key("chosen", share=True, help="Column with the better completion.")
    rejected_column: str = key("rejected", share=True, help="Column with the worse completion.")
    margin_column: str | None = key(
        None,
        share=True,
        help="Column with a number, 0 or more: the margin by which the score of the chosen "
        "completion should be higher (only with algorithm.type=reward_model).",
    )
    chat: bool = key(
        True,
        help="true: texts become a user turn and an assistant turn of the chat template. false: "
        "the texts are concatenated and followed by the end-of-sequence token. Lists of messages "
        "are always a chat.",
    )
    system: str | None = key(
        None, help="System message that is put before each chat that does not begin with one."
    )


class UnpairedPreferenceSource(Source):
    """Single completions that are labelled desirable or undesirable (kto)."""

    type: Literal["unpaired_preference"]
    prompt_column: str = key(
        "prompt", share=True, help="Column with the prompt: a text or messages."
    )
    completion_column: str = key("completion", share=True, help="Column with the completion.")
    label_column: str = key(
        "label",
        share=True,
        help="Column with the label: true for a desirable completion, false for an undesirable "
        "one.",
    )
    chat: bool = key(
        True,
        help="true: texts become a user turn and an assistant turn of the chat template. false: "
        "the texts are concatenated and followed by the end-of-sequence token. Lists of messages "
        "are always a chat.",
    )
    system: str | None = key(
        None, help="System message that is put before each chat that does not begin with one."
    )


class ScoredSource(Source):
    """Single completions with a score each (algorithm.type=reward_model, loss pointwise)."""

    type: Literal["scored"]
    prompt_column: str = key(
        "prompt", share=True, help="Column with the prompt: a text or messages."
    )
    completion_column: str = key("completion", share=True, help="Column with the completion.")
    score_column: str = key("score", share=True, help="Column with the score: a number.")
    chat: bool = key(
        True,
        help="true: texts become a user turn and an assistant turn of the chat template. false: "
        "the texts are concatenated and followed by the end-of-sequence token. Lists of messages "
        "are always a chat.",
    )
    system: str | None = key(
        None, help="System message that is put before each chat that does not begin with one."
    )


class SourcePlugin(Plugged, AnySourceSettings):
    """Base of a source of your rows. Derive from one of the classes below, which say what a
    row is: they have the columns of the built-in source of that kind."""

    # Rows come from no file that the recipe names: the keys of files do not exist here.
    path: ClassVar[Any] = property(lambda self: self.type)
    split: ClassVar[None] = None
    config: ClassVar[None] = None
    revision: ClassVar[None] = None

    @classmethod
    def noun(cls) -> str:
        return "source"

    @abstractmethod
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """Return all rows, as mappings of columns to plain values. Every call returns the same."""

    def default_name(self) -> str:
        return as_label(self.type.rpartition(":")[2])


class PromptPlugin(SourcePlugin, PromptSource):  # type: ignore[misc]
    """Base of a source of prompts for RL (homeostat.plugins.Prompts)."""


class MessagesPlugin(SourcePlugin, MessagesSource):  # type: ignore[misc]
    """Base of a source of chats for SFT (homeostat.plugins.Messages)."""


class CompletionPlugin(SourcePlugin, PromptCompletionSource):  # type: ignore[misc]
    """Base of a source of prompts with completions for SFT (homeostat.plugins.Completions)."""


class TextPlugin(SourcePlugin, TextSource):  # type: ignore[misc]
    """Base of a source of plain texts (homeostat.plugins.Texts)."""


class PreferencePlugin(SourcePlugin, PreferenceSource):  # type: ignore[misc]
    """Base of a source of pairs (homeostat.plugins.Preferences)."""


SftSource = MessagesSource | PromptCompletionSource | TextSource
LabelledSource = PreferenceSource | UnpairedPreferenceSource | ScoredSource
TrainSource = SftSource | LabelledSource
RlSource = PromptSource | ReasoningGymSource
AnySource = Annotated[
    TrainSource | RlSource | AutoSource,
    Field(discriminator="type"),
    Pluggable("source", (SourcePlugin,)),
]


class DataConfig(Settings):
    """The sources of training and held-out rows, and how rows are prepared."""

    train: tuple[AnySource, ...] = key(min_length=1, help="Sources of training rows.")
    validation: tuple[AnySource, ...] = key(
        (), help="Sources of held-out rows. Alternatively set validation_share."
    )
    validation_share: float = key(
        0.0, ge=0, le=0.5, help="Share of the training rows that is held out for evaluation."
    )
    max_length: int = key(2048, ge=2, help="Largest number of tokens in a row; in RL, in a prompt.")
    overlong: Literal["drop", "truncate", "refuse"] = key(
        "drop",
        help="Treatment of rows longer than max_length. drop: leave them out. truncate: cut them "
        "off at max_length. refuse: do not start the run. Such rows are counted.",
    )
    bad_rows: Literal["refuse", "drop"] = key(
        "refuse",
        help="Treatment of rows that cannot be used (missing column, wrong type, a template that "
        "rewrites earlier turns, nothing to train on). refuse: do not start the run. drop: leave "
        "them out. Such rows are counted, and the first ones are shown.",
    )
    shuffle: bool = key(True, help="Use a new random order in each epoch, drawn with `seed`.")
    num_processes: int = key(
        1,
        ge=1,
        le=64,
        resume="free",
        help="Number of processes that tokenise rows before the first step. Each takes seconds to "
        "start, so more than one is worthwhile from about 20,000 rows on.",
    )
    prefetch_updates: int = key(
        4,
        ge=1,
        le=64,
        resume="free",
        help="Number of updates whose rows are packed in advance, in the background.",
    )
    cache_dir: PathText | None = key(
        None,
        resume="free",
        help="Folder for tokenised rows, shared between runs. Default: inside the run directory.",
    )

    @property
    def is_mixed(self) -> bool:
        """Return whether the training sources have weights."""
        return any(source.weight is not None for source in self.train)

    @property
    def has_margin(self) -> bool:
        """Return whether any pairs to train on say by how much the better completion is better."""
        pairs = (source for source in self.train if isinstance(source, PreferenceSource))
        return any(source.margin_column for source in pairs)

    @property
    def source_names(self) -> tuple[str, ...]:
        """Return the names of the training sources in metrics, each once."""
        found: list[str] = []
        given = {source.name for source in self.train if source.name is not None}
        for source in self.train:
            label = name = source.name or source.default_name()
            number = 2
            while source.name is None and (name in found or name in given):
                name, number = f"{label[:50]}_{number}", number + 1
            found.append(name)
        return tuple(found)


def all_sources(data: DataConfig) -> Iterator[tuple[str, AnySource]]:
    """Yield every source with the name of its key."""
    for group, sources in (("train", data.train), ("validation", data.validation)):
        for index, source in enumerate(sources):
            yield f"data.{group}.{index}", source
