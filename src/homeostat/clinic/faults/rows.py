"""Faults of rows and templates that no error tells: other turns, leaks, cuts, and bad batches."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from torch import Tensor

from homeostat.clinic import bodies
from homeostat.clinic.injector import FROM_START, SORT_SFT, Injector
from homeostat.clinic.recipes import FEW_PROMPTS, Body, Raw, put
from homeostat.health.finding import Family
from homeostat.ops.attention import PackedLayout
from homeostat.run.session.session import Session
from homeostat.types import Role

# Rows have room for the words of any template.
CHAT_SFT = Body("sort", "sft", rows="messages", steps=30, changes={"data.max_length": 64})
CHAT_RL = Body("sort", rows="messages", steps=16, changes=FEW_PROMPTS)
# Turns in the words of another family: none of them is in the alphabet.
OTHER_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)


class _Silent(Injector):
    family, onset = Family.DATA, FROM_START


class _Template(_Silent):
    """The recipe names a chat template that the model does not know."""

    expects = ("chat-template-mismatch",)
    template: str

    def prepare(self, raw: Raw, folder: Path) -> None:
        file = folder / "template.jinja"
        file.write_text(self.template, encoding="utf-8")
        raw["model"]["chat_template"] = str(file)


class TemplateOfAnotherFamily(_Template):
    """The template marks turns with words that this tokenizer does not know."""

    name, body, template = "template_of_another", CHAT_SFT, OTHER_TEMPLATE


class TemplateSwapsRoles(_Template):
    """The template marks the user's turns as the assistant's, and the reverse."""

    name, body = "template_swaps_roles", CHAT_RL
    template = bodies.CHAT_TEMPLATE.translate(
        str.maketrans({bodies.USER: bodies.ASSISTANT, bodies.ASSISTANT: bodies.USER})
    )


class PromptsWithoutTemplate(_Silent):
    """A model that was taught chats is given plain prompts."""

    name, body = "prompts_without_template", CHAT_RL
    expects = ("prompt-not-chat-formatted",)

    def prepare(self, raw: Raw, folder: Path) -> None:
        raw["data"]["train"][0]["chat"] = False


class RowsCut(_Silent):
    """data.max_length is below what rows have, and they are cut: no answer has its end."""

    name, body, strength = "rows_cut", SORT_SFT, (8.0, 10.4)
    expects = ("rows-truncated",)

    def prepare(self, raw: Raw, folder: Path) -> None:
        raw["data"] |= {"max_length": round(self.dose.strength), "overlong": "truncate"}


class _Leaks(_Silent):
    """The trainer's attention ignores where a packed row ends: rows see those before them."""

    expects = ("packing-cross-contamination",)
    onset = (4, 9)

    def started(self, parts: Any, session: Session) -> None:
        model = parts.trainer.roles[Role.POLICY].model
        hidden = model.hidden

        def leaking(
            tokens_N: Tensor, positions_N: Tensor, layout: PackedLayout, **how: Any
        ) -> Tensor:
            if not self.is_ill(parts.state.step + 1):
                return hidden(tokens_N, positions_N, layout, **how)
            one = PackedLayout.of([layout.num_tokens], device=tokens_N.device)
            return hidden(tokens_N, positions_N, one, **how | {"sharing": None})

        model.hidden = leaking


class PackingLeaks(_Leaks):
    """Packed rows of SFT attend to one another."""

    name, body = "packing_leaks", SORT_SFT


class PackingLeaksInRl(_Leaks):
    """Packed samples attend to one another in the trainer, while the engine keeps them apart."""

    name, body = "packing_leaks_rl", Body("sort", steps=16, changes=FEW_PROMPTS)


class HeldOutAreTrainedOn(_Silent):
    """The held-out rows are taken from the training rows."""

    name, strength = "eval_on_training_rows", (0.5, 1.0)
    expects, body = ("validation-overlap",), Body("sort", "sft", steps=30)

    def prepare(self, raw: Raw, folder: Path) -> None:
        rows, held_out = (bodies.read_rows(folder / f"{n}.jsonl") for n in ("train", "eval"))
        count = round(self.dose.strength * len(held_out))
        chosen = random.Random(self.dose.seed).sample(rows, count)
        bodies.write_rows(folder / "eval.jsonl", chosen + held_out[count:])


class HeldOutPromptsAreTrainedOn(_Silent):
    """The evaluation of RL is on prompts of the training set."""

    name, strength = "eval_on_training_prompts", (0.5, 1.0)
    expects = ("validation-overlap",)
    body = Body("sort", steps=10, changes=FEW_PROMPTS)

    def prepare(self, raw: Raw, folder: Path) -> None:
        rows = bodies.read_rows(folder / "train.jsonl")
        fresh = bodies.prompt_rows("sort", bodies.NUM_HELD_OUT, seed=self.dose.seed + 10**6)
        count = round(self.dose.strength * len(fresh))
        file = bodies.write_rows(folder / "eval.jsonl", rows[:count] + fresh[count:])
        source = {"type": "prompts", "path": str(file), "chat": False}
        put(raw, "data.validation", [source])
        put(raw, "eval.interval_steps", 8)


class BadBatches(_Silent):
    """Blocks of rows, as one broken file of many, have answers in another script."""

    name, family, strength = "bad_batches", Family.LEARNING, (5.0, 8.0)
    expects = ("loss-spikes", "bad-batch")
    body, onset = Body("sort", "sft", steps=50), (12, 18)

    def prepare(self, raw: Raw, folder: Path) -> None:
        rng, every = random.Random(self.dose.seed), round(self.dose.strength)
        rows, size = bodies.read_rows(folder / "train.jsonl"), raw["trainer"]["batch_rows"]
        for step in range(self.dose.onset, len(rows) // size, every):
            for row in rows[(step - 1) * size : step * size]:
                row["completion"] = "".join(rng.choices("abcdefgh", k=len(row["completion"])))
        bodies.write_rows(folder / "train.jsonl", rows)
        raw["data"]["shuffle"] = False


class AnswersMisaligned(_Silent):
    """The answers belong to other rows, as after a join by position."""

    name, family = "answers_misaligned", Family.REWARD
    body = Body("sort", steps=24, changes=FEW_PROMPTS)
    expects = ("reward-always-zero", "task-too-hard")

    def prepare(self, raw: Raw, folder: Path) -> None:
        rows = bodies.read_rows(folder / "train.jsonl")
        answers = [row["answer"] for row in rows]
        for row, answer in zip(rows, [*answers[1:], answers[0]], strict=True):
            row["answer"] = answer
        bodies.write_rows(folder / "train.jsonl", rows)


FAULTS: tuple[type[Injector], ...] = (
    TemplateOfAnotherFamily,
    TemplateSwapsRoles,
    PromptsWithoutTemplate,
    RowsCut,
    PackingLeaks,
    PackingLeaksInRl,
    HeldOutAreTrainedOn,
    HeldOutPromptsAreTrainedOn,
    BadBatches,
    AnswersMisaligned,
)
