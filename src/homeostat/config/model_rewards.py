"""Settings of the rewards that ask a model: a sequence classifier, or a judge over the network.

Each of them has its own process, next to the workers of the other rewards.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from homeostat.config.base import PathText, Settings, key
from homeostat.config.reward_base import Pattern, Reward

# What a judge's texts may refer to. Other braces, of JSON say, stay as they are.
PLACEHOLDERS = ("prompt", "completion", "reference", "rubric")
_LOOKS_LIKE_ONE = re.compile(r"\{([A-Za-z_]+)\}")

JUDGE_PROMPT = """Rate how well the answer responds to the question, from 1 (useless) to 10
(perfect). {rubric}

Question:
{prompt}

Answer:
{completion}

Explain in one sentence, then end with a line of the form "Score: N"."""


class ClassifierReward(Reward):
    """The score of a reward model: any HF sequence classifier, for example one that homeostat
    trained.
    """

    type: Literal["reward_model"]
    path: PathText = key(
        help="Folder of the classifier: config.json, safetensors and tokenizer, as "
        "transformers' AutoModelForSequenceClassification loads it."
    )
    output: int | str | None = key(
        None,
        help="The output that is the score: its number, or its name in the model's id2label. "
        "Required if the model has several outputs.",
    )
    score: Literal["logit", "probability"] = key(
        "logit",
        help="logit: the output as it is. probability: its softmax over the outputs, or its "
        "sigmoid if there is only one.",
    )
    format: Literal["template", "pair"] = key(
        "template",
        help="template: join prompt and completion into one text, with the classifier's own chat "
        "template if the prompt is a chat. pair: pass them to its tokenizer as two texts, as "
        "encoders such as DeBERTa expect.",
    )
    normalise: Literal["none", "standardise"] = key(
        "none",
        help="standardise: subtract the mean and divide by the standard deviation of all its "
        "scores in the run so far, before the weight is applied. none, the default, is enough "
        "for algorithms that scale advantages by the group, unless several rewards are summed. "
        "Metrics and evaluations show the raw scores.",
    )
    device: str = key(
        "auto",
        pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?)$",
        resume="warn",
        share=True,
        help="cpu, cuda or cuda:1. auto: the first GPU, if there is one.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto", help="Precision of the weights. auto: that of the checkpoint."
    )
    batch_size: int = key(
        16,
        ge=1,
        le=4096,
        help="Number of completions in a forward pass. The completions of a whole step are "
        "scored together, sorted by length.",
    )
    max_length: int = key(
        4096,
        ge=2,
        help="Largest number of tokens of prompt and completion together; a model with fewer "
        "positions has its own limit.",
    )
    overlong: Literal["fail", "truncate"] = key(
        "fail",
        help="fail: for longer texts the reward counts as failed, and they are not trained on. "
        "truncate: cut off the beginning of the prompt.",
    )
    timeout_s: float = key(
        60.0,
        gt=0,
        le=86400,
        resume="free",
        help="Time limit for each forward pass, in seconds. If it is exceeded, the process is "
        "restarted, and the completions of this call are not trained on.",
    )

    load_timeout_s: float = key(
        1800.0,
        gt=0,
        le=86400,
        resume="free",
        help="Time limit for loading the model, in seconds, also when its process is restarted.",
    )

    @property
    def standardises(self) -> bool:
        return self.normalise == "standardise"

    def default_label(self) -> str:
        return self.type


class RegexReading(Settings):
    """The score is what a regular expression finds."""

    type: Literal["regex"] = "regex"
    pattern: Pattern = key(
        r"(?i)score\W{0,10}(-?\d+(?:\.\d+)?)",
        help="The score is the first group (or the whole match) of the last match.",
    )


class JsonReading(Settings):
    """The score is a field of a JSON object in the answer."""

    type: Literal["json"]
    field: str = key("score", min_length=1, help="Name of the field. The last object counts.")


AnyReading = Annotated[RegexReading | JsonReading, Field(discriminator="type")]


def check_url(text: str) -> str:
    """Refuse an address that cannot be called, or that holds a secret."""
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"{text!r} is not an address: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{text!r} is not an http or https address")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            "the address contains a login, a query or a fragment. Give only the base address; "
            "the API key is read from the environment variable that api_key_env names"
        )
    return text


class JudgeReward(Reward):
    """The score that a language model gives. The model is called over an OpenAI-compatible
    endpoint.
    """

    type: Literal["judge"]
    url: Annotated[str, AfterValidator(check_url)] = key(
        help="Base address of the endpoint, for example http://localhost:8000/v1; "
        "/chat/completions is appended."
    )
    model: str = key(min_length=1, share=True, help="Name of the model at the endpoint.")
    api_key_env: str | None = key(
        None,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        share=True,
        help="Name of the environment variable that holds the API key. Default: no key is sent.",
    )
    system: str | None = key(
        None, help="System message. It may contain the same placeholders as `prompt`."
    )
    prompt: str = key(
        JUDGE_PROMPT,
        min_length=1,
        help="User message. The placeholders {prompt}, {completion}, {reference} and {rubric} are "
        "filled in.",
    )
    rubric: str = key("", help="Text for the placeholder {rubric}.")
    reference_column: str = key(
        "answer", share=True, help="Column of the row for the placeholder {reference}."
    )
    read: AnyReading = key(RegexReading(), help="How the score is found in the answer.")
    lowest: float = key(1.0, help="The score that becomes a reward of 0.")
    highest: float = key(10.0, help="The score that becomes a reward of 1.")
    temperature: float = key(0.0, ge=0, le=2, help="Sampling temperature of the judge.")
    max_tokens: int = key(512, ge=1, help="Largest number of tokens in the judge's answer.")
    concurrency: int = key(
        8, ge=1, le=256, resume="free", help="Largest number of calls at the same time."
    )
    call_timeout_s: float = key(
        60.0, gt=0, le=86400, resume="free", help="Time limit for one call, in seconds."
    )
    total_timeout_s: float = key(
        300.0,
        gt=0,
        le=86400,
        resume="free",
        help="Time limit for one completion with all its retries and waits, in seconds.",
    )
    max_retries: int = key(
        5,
        ge=0,
        le=100,
        resume="free",
        help="How many times a call is repeated after a time-out, a broken connection, or status "
        "408, 429 or 5xx.",
    )
    backoff_s: float = key(
        1.0,
        gt=0,
        le=60,
        resume="free",
        help="Wait before the first retry, in seconds. It doubles with each retry up to a minute, "
        "and is shortened at random by up to half. If the server sends Retry-After, that time is "
        "waited.",
    )
    cache: bool = key(
        True,
        resume="free",
        help="Keep the judge's answers in the run folder (judge/), so that no call is made twice, "
        "not even by a resumed run.",
    )

    @model_validator(mode="after")
    def check_texts(self) -> JudgeReward:
        """Refuse texts that do not show the completion, and placeholders that do not exist."""
        texts = f"{self.system or ''}\n{self.prompt}"
        found = set(_LOOKS_LIKE_ONE.findall(texts))
        if unknown := sorted(found - set(PLACEHOLDERS)):
            raise ValueError(
                f"prompt: {{{unknown[0]}}} is not a placeholder. There are {{prompt}}, "
                "{completion}, {reference} and {rubric}"
            )
        if "completion" not in found:
            raise ValueError("prompt: without {completion} the judge does not see the completion")
        if self.rubric and "rubric" not in found:
            raise ValueError(
                "rubric: neither prompt nor system contains {rubric}, so the rubric would not be "
                "sent"
            )
        if "reference_column" in self.model_fields_set and "reference" not in found:
            raise ValueError(
                "reference_column: neither prompt nor system contains {reference}, so no "
                "reference would be sent"
            )
        return self

    @model_validator(mode="after")
    def check_limits(self) -> JudgeReward:
        """Refuse limits that contradict each other."""
        if self.highest <= self.lowest:
            raise ValueError(
                f"highest ({self.highest:g}) must be above lowest ({self.lowest:g}): the reward "
                "rises between them"
            )
        if self.total_timeout_s < self.call_timeout_s:
            raise ValueError(
                f"total_timeout_s ({self.total_timeout_s:g}) must be at least call_timeout_s "
                f"({self.call_timeout_s:g}): the total includes every call"
            )
        return self

    def default_label(self) -> str:
        return self.type
