"""Turn messages into tokens, with labels that are exact; otherwise refuse the row.

A trained assistant turn i is what the model would have to write: the text between

    render(messages[:i], add_generation_prompt=True)   and   render(messages[:i + 1])

Both must be prefixes of the whole rendering; a template that rewrites earlier turns violates this,
and the row is then refused rather than labelled by a guess. The whole text is tokenised once, and
turns are mapped to tokens by character offsets; no token may span the border of a turn. A turn is
trained up to the stop token where generation would end; what a template puts after that (white
space, one more stop token that closes the chat) is not trained. If the template leaves out a part
of a trained turn (tool calls, reasoning) or a message of its context, the row is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np

from homeostat.arrays import FloatArray, IntArray
from homeostat.data.messages import parse_messages, parse_tools, with_objects
from homeostat.data.sources import BadRowError
from homeostat.data.templates import REFUSES
from homeostat.data.tokenizer import ChatTokenizer

REWRITES = "the chat template rewrites earlier turns"
LOST = "the chat template leaves out part of the row"
# A text that no row contains.
_OTHER_TEXT = "qzjx vkwy"
Result = TypeVar("Result")
# Keys of a message besides its content; templates have three names for reasoning.
REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages and tools as the template takes them, and the loss weight of each message."""

    messages: list[dict[str, Any]]
    weights: list[float]
    tools: list[dict[str, Any]] | None = None

    def render(self, tokenizer: ChatTokenizer, count: int, *, prompt: bool = False) -> str:
        """Return the first `count` messages as text; with `prompt`, also the opening of a turn."""
        messages = self.messages[:count]
        return tokenizer.render(messages, tools=self.tools, add_generation_prompt=prompt)


def parse_chat(value: Any, *, turns: Literal["all", "last", "each"], tools: Any = None) -> Chat:
    """Check a list of messages and remove `train` and `weight` from them."""
    parsed = parse_messages(value)
    messages = [message for message, _ in parsed]
    is_assistant = [message["role"] == "assistant" for message in messages]
    if True not in is_assistant:
        raise BadRowError("trains on nothing", "no message has the role 'assistant'")
    last = len(messages) - 1 - is_assistant[::-1].index(True)
    weights = []
    for number, (_, own) in enumerate(parsed):
        # A message's own `train` or `weight` takes precedence over the source's `turns`.
        default = float(is_assistant[number] and (turns != "last" or number == last))
        weights.append(default if own is None else own)
    return Chat(messages, weights, parse_tools(tools))


def parse_prompt(value: Any) -> Chat:
    """Check a list of messages that is to be answered; nothing of it is trained."""
    messages = [message for message, _ in parse_messages(value)]
    if messages[-1]["role"] == "assistant":
        raise BadRowError(
            "nothing to answer", "the last message is the assistant's. Take it out of the prompt"
        )
    if not any(message["content"].strip() for message in messages):
        raise BadRowError("empty prompt", "no message holds any text")
    return Chat(messages, [0.0] * len(messages))


def with_system(messages: list[Any], system: str | None) -> list[Any]:
    """Put the source's system message before a chat that does not begin with its own."""
    first = messages[0] if messages else None
    has_own = isinstance(first, dict) and first.get("role") == "system"
    if system is None or has_own or not messages:
        return messages
    return [{"role": "system", "content": system}, *messages]


def split_turns(chat: Chat) -> list[Chat]:
    """Return one chat for each trained turn, which is its last."""
    trained = [number for number, weight in enumerate(chat.weights) if weight > 0]
    return [
        Chat(chat.messages[: number + 1], [0.0] * number + [chat.weights[number]], chat.tools)
        for number in trained
    ]


def encode_chat(chat: Chat, tokenizer: ChatTokenizer) -> tuple[IntArray, FloatArray]:
    """Return the tokens of the whole chat, and the weight of predicting each."""
    return _objects_first(chat, lambda chat: _encode(chat, tokenizer))


def encode_prompt(chat: Chat, tokenizer: ChatTokenizer) -> IntArray:
    """Return the tokens of the whole chat and of the opening of the assistant's turn."""
    return _objects_first(chat, lambda chat: _encode_prompt(chat, tokenizer))


def _objects_first(chat: Chat, encode: Callable[[Chat], Result]) -> Result:
    """Try the arguments of tool calls as objects first, then as JSON text.

    Most templates expect objects, and some would quote a JSON text once more; templates that expect
    a text refuse objects, and then get the text as it is.
    """
    parsed = replace(chat, messages=[with_objects(message) for message in chat.messages])
    if parsed != chat:
        try:
            return encode(parsed)
        except BadRowError as error:
            # Only a refusal by the template is a reason to try text; other defects stay defects.
            if error.reason != REFUSES:
                raise
    return encode(chat)


def _encode_prompt(chat: Chat, tokenizer: ChatTokenizer) -> IntArray:
    text = chat.render(tokenizer, len(chat.messages), prompt=True)
    _refuse_lost_messages(chat, text, tokenizer, prompt=True)
    _refuse_python_text(chat, text)
    return tokenizer.encode(text)[0]


def _encode(chat: Chat, tokenizer: ChatTokenizer) -> tuple[IntArray, FloatArray]:
    text = chat.render(tokenizer, len(chat.messages))
    _refuse_lost_messages(chat, text, tokenizer)
    _refuse_lost_tools(chat, text, tokenizer)
    _refuse_python_text(chat, text)
    tokens_T, offsets_T2, known = tokenizer.encode_head(text)
    weights_T = np.zeros(len(tokens_T), dtype=np.float32)
    for number, weight in enumerate(chat.weights):
        if weight > 0:
            start, end = _turn_span(chat, number, text, tokenizer)
            _refuse_lost_parts(chat, number, tokenizer)
            if end > known:
                first, stop = _cut_turn(number, start, text, offsets_T2)
            else:
                first, stop = _turn_tokens(
                    number, start, end, text, tokens_T, offsets_T2, tokenizer
                )
            weights_T[first : stop + 1] = weight
    return tokens_T, weights_T


def _refuse_python_text(chat: Chat, text: str) -> None:
    """Refuse a template for JSON texts that prints an object in Python's notation."""
    for message in chat.messages:
        for call in message.get("tool_calls") or ():
            function = call.get("function", call) if isinstance(call, dict) else {}
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(arguments, dict) and arguments and str(arguments) in text:
                raise BadRowError(
                    REFUSES, "it prints tool-call arguments unchanged: give them as JSON text"
                )


def _refuse_lost_messages(
    chat: Chat, text: str, tokenizer: ChatTokenizer, *, prompt: bool = False
) -> None:
    """Require that what others than the assistant say makes a difference to the text.

    Many templates leave out a message whose role they do not know.
    """
    place = 0
    for number, message in enumerate(chat.messages):
        said = message["content"].strip()
        if message["role"] == "assistant" or not said:
            continue
        # Nearly always it is there as it is, in order, and nothing needs to be rendered again.
        found = text.find(said, place)
        if found >= 0:
            place = found + len(said)
            continue
        others = list(chat.messages)
        others[number] = {**message, "content": f"{said} {_OTHER_TEXT}"}
        try:
            other = replace(chat, messages=others).render(tokenizer, len(others), prompt=prompt)
        except BadRowError:
            continue  # a template that fails on it does read it
        if other == text:
            raise BadRowError(
                LOST,
                f"message {number}, of the role {message['role']!r:.60}, leaves no trace in the "
                "text, so the model would learn to answer without it. Map the role to one that "
                "the template knows (for example columns: {messages.system: [developer]}), name "
                "another template in model.chat_template, or remove the message",
            )


def _refuse_lost_tools(chat: Chat, text: str, tokenizer: ChatTokenizer) -> None:
    # Render without the tools: if nothing changes, the template ignores them.
    if chat.tools and replace(chat, tools=None).render(tokenizer, len(chat.messages)) == text:
        raise BadRowError(
            LOST,
            "the row has tools, but the template does not render them. Set model.chat_template "
            "to a template that supports tools, or give the source `type: messages` without "
            "tools_column",
        )


def _refuse_lost_parts(chat: Chat, number: int, tokenizer: ChatTokenizer) -> None:
    """Require that every part of a trained turn makes a difference to the text."""
    message = chat.messages[number]
    parts = {"tool_calls": ("tool_calls",), "reasoning": REASONING}
    # A template may strip white space, so a part of only white space need not show.
    said = {name for name, field in message.items() if field and str(field).strip()}
    held = {part: names for part, names in parts.items() if said.intersection(names)}
    if held and "content" in said:
        held["content"] = ("content",)
    for part, names in held.items():
        less = {name: field for name, field in message.items() if name not in names}
        without = replace(chat, messages=[*chat.messages[:number], {"content": "", **less}])
        try:
            is_lost = without.render(tokenizer, number + 1) == chat.render(tokenizer, number + 1)
        except BadRowError:
            continue  # a template that fails without the part does use it
        if is_lost:
            raise BadRowError(
                LOST,
                f"message {number}: the template leaves out its {part}, so the model would learn "
                "a turn without it. Set model.chat_template to a template that renders it "
                f"(templates read reasoning from one of {', '.join(REASONING)}), or remove it",
            )


def _turn_span(chat: Chat, number: int, text: str, tokenizer: ChatTokenizer) -> tuple[int, int]:
    """Return where turn `number` is in the whole text."""
    head = chat.render(tokenizer, number, prompt=True)
    is_last = number == len(chat.messages) - 1
    through = text if is_last else chat.render(tokenizer, number + 1)
    if not text.startswith(through):
        through = _without_close(through, tokenizer)
    if not text.startswith(through):
        raise _rewritten(number, "the turn itself is rendered differently once the chat continues")
    if not through.startswith(head):
        before = chat.render(tokenizer, number)
        if not text.startswith(before):
            raise _rewritten(number, "adding it changes how the template renders the earlier text")
        raise BadRowError(
            "the generation prompt is not how the template renders a turn",
            f"message {number}: the template starts the assistant's turn with "
            f"{head[len(before) :][:60]!r} in the generation prompt, but not in a finished chat. "
            "Set an option of the template in model.chat_template_options (for example "
            "enable_thinking), or fix it and name the file in model.chat_template",
        )
    return len(head), len(through)


def _without_close(through: str, tokenizer: ChatTokenizer) -> str:
    """Remove the stop token with which a template closes a whole chat after the last turn."""
    stops = tuple(tokenizer.decode([token]) for token in tokenizer.stop_ids)
    bare = through.rstrip()
    for word in stops:
        turn = bare.removesuffix(word)
        if turn != bare and turn.rstrip().endswith(stops):
            return turn
    return through


def _rewritten(number: int, how: str) -> BadRowError:
    return BadRowError(
        REWRITES,
        f"message {number}: {how}, so its labels would be wrong. Make a row of each turn (turns: "
        "each on the source), or train the last one only (turns: last, or train: false on the "
        "earlier messages)",
    )


def _turn_tokens(
    number: int,
    start: int,
    end: int,
    text: str,
    tokens_T: IntArray,
    offsets_T2: IntArray,
    tokenizer: ChatTokenizer,
) -> tuple[int, int]:
    """Return the first trained token of a turn, and the stop token that ends it."""
    starts_T, ends_T = offsets_T2[:, 0], offsets_T2[:, 1]
    touching = np.flatnonzero((ends_T > start) & (starts_T < end))
    stop = None
    # Go back through white space and stop tokens: generation ends at the first of them.
    for n in touching[::-1].tolist():
        if int(tokens_T[n]) in tokenizer.stop_ids:
            stop = n
        elif text[starts_T[n] : min(ends_T[n], end)].strip():
            break
    if stop is None:
        known = sorted(tokenizer.decode([token]) for token in tokenizer.stop_ids)
        raise BadRowError(
            "the turn has no end-of-turn token",
            f"message {number}: the template ends the turn with {text[start:end][-20:]!r}, and "
            f"generation stops at {', '.join(known)} only, so the model would never learn to "
            "stop. Set eos_token_id in generation_config.json to the template's end of turn, "
            "or name a template in model.chat_template that ends turns with eos_token",
        )
    first = int(touching[0])
    if starts_T[first] < start:
        raise straddles(f"the start of message {number}", text, offsets_T2[first])
    if ends_T[stop] > end:
        raise straddles(f"the end of message {number}", text, offsets_T2[stop])
    return first, stop


def _cut_turn(number: int, start: int, text: str, offsets_T2: IntArray) -> tuple[int, int]:
    """Return the first and last token of a turn that continues past the given tokens.

    There may be no token of it at all.
    """
    first = int(np.searchsorted(offsets_T2[:, 1], start, side="right"))
    if first < len(offsets_T2) and offsets_T2[first, 0] < start:
        raise straddles(f"the start of message {number}", text, offsets_T2[first])
    return first, len(offsets_T2) - 1


def straddles(border: str, text: str, offset: IntArray) -> BadRowError:
    """Return the error for a token that spans the border of a turn."""
    shown = text[int(offset[0]) : int(offset[1])]
    return BadRowError(
        "a token straddles the border of a trained span",
        f"the token {shown!r} spans {border}, so it belongs neither to the context nor to the "
        "answer. Move the white space at the border to the other side",
    )
