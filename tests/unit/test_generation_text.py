"""Text that is streamed is the text of the whole answer, whatever the pieces are."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from homeostat.generation.openai_answers import Choice, Envelope, whole_answer
from homeostat.generation.scoring import TokenScores
from homeostat.generation.text_stream import TextStream
from homeostat.types import StopReason

# A tokenizer of bytes: characters beyond ASCII are spread over several tokens.
STOP_ID = 256


def decode(tokens) -> str:
    return bytes(tokens).decode("utf-8", errors="replace")


def pieces(tokens: list[int], rng: random.Random) -> list[list[int]]:
    parts, at = [], 0
    while at < len(tokens):
        size = rng.randint(1, 4)
        parts.append(tokens[at : at + size])
        at += size
    return parts


@pytest.mark.parametrize("seed", range(20))
def test_pieces_add_up_to_the_text(seed):
    rng = random.Random(seed)
    text = "".join(rng.choices("abc \n\u00e4\u20ac\U0001f600", k=60))
    stream, shown = TextStream(decode), ""
    for part in pieces(list(text.encode()), rng):
        shown += stream.push(part)
        assert text.startswith(shown)
    shown += stream.finish()
    assert shown == text == stream.text


@pytest.mark.parametrize("seed", range(20))
def test_nothing_after_a_stop_string_is_shown(seed):
    rng = random.Random(seed)
    before = "".join(rng.choices("ab\u00e4E", k=rng.randint(0, 30)))
    text = before + "END" + "".join(rng.choices("xy", k=5))
    stream, shown = TextStream(decode, stop_strings=("END", "never")), ""
    for part in pieces(list(text.encode()), rng):
        shown += stream.push(part)
    shown += stream.finish()
    assert shown == text[: text.index("END")]


def test_a_stop_token_ends_the_text_and_is_no_part_of_it():
    stream = TextStream(lambda tokens: decode(tokens), stop_ids={STOP_ID})
    assert stream.push(list(b"ab")) == "ab"
    assert stream.finish([*b"c", STOP_ID]) == "c"


def test_bytes_that_are_no_character_are_shown_at_the_end_only():
    stream = TextStream(decode)
    assert stream.push(list("\u20ac".encode())[:2]) == ""
    assert stream.finish() == "\ufffd"


def decode_with_byte_fallback(tokens) -> str:
    """Decode as Llama 2's tokenizer does: bytes in a row are text together, or none of them is."""
    text, run = "", b""
    for token in [*tokens, None]:
        if token is not None and token < 256:
            run += bytes([token])
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError:
            text += "\ufffd" * len(run)
        text, run = text + ("" if token is None else chr(token - 256)), b""
    return text


@pytest.mark.parametrize("seed", range(20))
def test_pieces_add_up_where_bytes_in_a_row_are_decoded_together(seed):
    rng = random.Random(seed)
    text = "".join(rng.choices("ab\u00e4\u20ac\U0001f600\U0001f680", k=60))
    tokens = [t for c in text for t in ([256 + ord(c)] if c in "ab" else c.encode())]
    stream, shown = TextStream(decode_with_byte_fallback), ""
    for part in pieces(tokens, rng):
        shown += stream.push(part)
        assert text.startswith(shown)
    assert shown + stream.finish() == text


def test_of_likely_tokens_with_one_text_the_likeliest_has_its_log_prob():
    scores = TokenScores([-0.1], [{0xF0: -0.1, ord("x"): -2.5, 0xE2: -5.0}])
    choice = Choice(0, "", StopReason.LENGTH, [ord("a"), 0xF0], scores)
    envelope = Envelope("id", 0, "model", is_chat=False)
    tokenizer = SimpleNamespace(decode=decode)
    found = whole_answer(envelope, [choice], tokenizer, {})["choices"][0]["logprobs"]
    assert found["top_logprobs"] == [None, {"\ufffd": -0.1, "x": -2.5}]
