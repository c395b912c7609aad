"""Labels are exact on templates of the kinds in use, or the row is refused with the reason."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.chat import CHATML, TINY, Style, chat, encode, make_tokenizer, trained_text
from tokenizers import Tokenizer

from homeostat.config.data import PromptCompletionSource, TextSource
from homeostat.config.model import ModelConfig
from homeostat.data.rows import encode_row, truncate
from homeostat.data.sources import BadRowError
from homeostat.data.tokenizer import ChatTokenizer, load_tokenizer

STYLES = {
    "chatml": Style(CHATML, (), eos="<|im_end|>", end="<|im_end|>"),
    "llama3": Style(
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n"
        "{% endif %}",
        ("<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        eos="<|eot_id|>",
        end="<|eot_id|>",
        trims=True,
        bos="<|begin|>",
    ),
    "gemma": Style(
        "{{ bos_token }}{% if messages and messages[0].role == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        eos="<eos>",
        stops=("<eos>", "<end_of_turn>"),
        end="<end_of_turn>",
        trims=True,
        bos="<bos>",
    ),
    "mistral": Style(
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}"
        " [/INST]{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}",
        ("<s>", "</s>", "[INST]", "[/INST]"),
        eos="</s>",
        end="</s>",
        trims=True,
        lead=" ",
        bos="<s>",
    ),
}
QWEN3_LIKE = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 < ns.last %}"
    "{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ChatTokenizer]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: make_tokenizer(root / name, style) for name, style in STYLES.items()}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    style = Style(QWEN3_LIKE, (), eos="<|im_end|>", end="<|im_end|>")
    return make_tokenizer(tmp_path_factory.mktemp("thinker"), style)


contents = st.text(max_size=40) | st.text(alphabet=" the\n[<|>]", max_size=12)
conversations = st.lists(st.tuples(contents, contents, st.booleans()), min_size=1, max_size=4)


@pytest.mark.parametrize("name", sorted(STYLES))
@given(turns=conversations)
def test_each_trained_turn_is_the_answer_and_its_end(name, tokenizers, turns):
    tokenizer, style = tokenizers[name], STYLES[name]
    messages: list[dict[str, object]] = []
    for number, (question, answer, train) in enumerate(turns):
        messages.append({"role": "user", "content": question})
        weight = number + 1 if train else 0
        messages.append({"role": "assistant", "content": answer, "weight": weight})
    if not any(train for _, _, train in turns):
        with pytest.raises(BadRowError, match="trains on nothing"):
            encode({"messages": messages}, tokenizer)
        return
    tokens_T, weights_T = encode({"messages": messages}, tokenizer)
    for number, (_, answer, train) in enumerate(turns):
        chosen = tokens_T[weights_T == number + 1]
        shown = style.lead + (answer.strip() if style.trims else answer) + style.end
        assert tokenizer.decode(chosen) == (shown if train else "")
    full = tokenizer.render(
        [{"role": m["role"], "content": m["content"]} for m in messages],
        add_generation_prompt=False,
    )
    assert tokenizer.decode(tokens_T) == full
    assert style.bos is None or full.count(style.bos) == 1


def test_tokens_equal_those_of_transformers(tokenizers):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(str(TINY))
    messages = chat(("user", "the other one, wörld 🙂"), ("assistant", " and\n\nso on"))["messages"]
    expected = reference.apply_chat_template(messages, tokenize=True)["input_ids"]
    tokens_T, _ = encode({"messages": messages}, load_tokenizer(ModelConfig(path=str(TINY))))
    assert tokens_T.tolist() == list(expected)


def test_history_rewritten_by_the_template_is_refused(thinker):
    row = chat(("user", "a"), ("assistant", "<think>x</think>b"), ("user", "c"), ("assistant", "d"))
    with pytest.raises(BadRowError, match=r"rewrites earlier turns.*turns: last") as caught:
        encode(row, thinker)
    assert caught.value.reason == "the chat template rewrites earlier turns"
    encoded = encode(row, thinker, turns="last")
    assert trained_text(encoded, thinker) == "d<|im_end|>"
    row["messages"][1]["train"] = False  # type: ignore[index]
    assert trained_text(encode(row, thinker), thinker) == "d<|im_end|>"


def test_history_that_happens_not_to_change_is_trained(thinker):
    row = chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "<think></think>d"))
    assert trained_text(encode(row, thinker), thinker) == "b<|im_end|><think></think>d<|im_end|>"


def test_a_generation_prompt_unlike_the_turn_is_refused(tmp_path):
    template = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    tokenizer = make_tokenizer(tmp_path, Style(template, (), eos="<|im_end|>", end=""))
    with pytest.raises(BadRowError, match=r"generation prompt is not how.*<think>"):
        encode(chat(("user", "a"), ("assistant", "b")), tokenizer)
    row = chat(("user", "a"), ("assistant", "<think>\nx</think>b"))
    assert trained_text(encode(row, tokenizer), tokenizer) == "x</think>b<|im_end|>"


def test_a_turn_without_stop_token_is_refused(tmp_path):
    """The marker is text to this template's tokenizer: it has no token for it."""
    template = CHATML.replace("<|im_end|>", "[END]")
    tokenizer = make_tokenizer(tmp_path, Style(template, (), eos="<|endoftext|>", end=""))
    with pytest.raises(BadRowError, match=r"no end-of-turn token.*<\|endoftext\|>"):
        encode(chat(("user", "a"), ("assistant", "b")), tokenizer)
    with pytest.raises(BadRowError, match="no end-of-turn token"):
        encode(chat(("user", "a"), ("assistant", "b<|endoftext|>c")), tokenizer)


def test_a_token_across_the_border_is_refused(tmp_path):
    template = CHATML.replace("assistant\n{% endif", "assistant\n{{ ' ' }}{% endif").replace(
        "\n{{ m.content }}", "\n {{ m.content }}"
    )
    tokenizer = make_tokenizer(tmp_path, Style(template, (), eos="<|im_end|>", end=""))
    with pytest.raises(BadRowError, match="the token ' the' spans"):
        encode(chat(("user", "a"), ("assistant", "the end")), tokenizer)
    row = chat(("user", "a"), ("assistant", "xx"))
    assert trained_text(encode(row, tokenizer), tokenizer) == "xx<|im_end|>"


def test_offsets_of_a_trimming_tokenizer_still_show_the_border(tmp_path):
    """GPT-2's post-processor leaves the space of ' the' out of its offsets."""
    description = json.loads((TINY / "tokenizer.json").read_text())
    description["post_processor"]["trim_offsets"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"})
    )
    tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path)))
    source = PromptCompletionSource(type="prompt_completion", path="x", chat=False)
    with pytest.raises(BadRowError, match="straddles"):
        encode_row({"prompt": "on ", "completion": "the"}, source=source, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ({"train": "yes"}, "train must be true or false"),
        ({"weight": -1}, "weight must be 0, or from"),
        ({"weight": float("nan")}, "weight must be 0, or from"),
        ({"weight": 10**400}, "weight must be 0, or from"),
        ({"weight": True}, "weight must be a number"),
        ({"weight": 0, "train": True}, "contradict"),
        ({"content": None}, "has no content"),
        ({"content": [{"type": "image"}]}, "not text"),
        ({"content": "\ud800"}, "surrogate"),
        ({"role": 3}, "has no role"),
    ],
)
def test_a_bad_message_is_refused_with_its_defect(tokenizers, last, message):
    with pytest.raises(BadRowError, match=message):
        encode(chat(("user", "a"), ("assistant", "b"), **last), tokenizers["chatml"])


def test_only_the_assistant_can_be_trained(tokenizers):
    row = chat(("assistant", "b"), ("user", "a"), train=True)
    with pytest.raises(BadRowError, match="only messages of the assistant"):
        encode(row, tokenizers["chatml"])
    row = chat(("assistant", "b"), ("user", "a"), train=False)
    assert trained_text(encode(row, tokenizers["chatml"]), tokenizers["chatml"]) == "b<|im_end|>"


def test_the_templates_own_refusal_is_shown(tokenizers):
    with pytest.raises(BadRowError, match="System role not supported"):
        encode(chat(("system", "s"), ("assistant", "b")), tokenizers["gemma"])


@pytest.mark.parametrize("value", [None, [], "text", {}, [1], [[]], [{"content": "x"}]])
def test_what_is_no_chat_is_refused(tokenizers, value):
    with pytest.raises(BadRowError):
        encode({"messages": value}, tokenizers["chatml"])


def test_text_parts_are_joined_and_tool_calls_reach_the_template(tmp_path):
    template = CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls | tojson }}")
    tokenizer = make_tokenizer(tmp_path, Style(template, (), eos="<|im_end|>", end=""))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    row = {
        "messages": [
            {"role": "user", "content": parts, "tool_calls": []},
            {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
        ]
    }
    encoded = encode(row, tokenizer)
    assert trained_text(encoded, tokenizer) == '[{"name": "f"}]<|im_end|>'
    assert "user\nab[]" in tokenizer.decode(encoded[0])


def test_pairs_and_texts_end_with_eos(tokenizers):
    tokenizer = tokenizers["chatml"]
    plain = PromptCompletionSource(type="prompt_completion", path="x", chat=False)
    row = {"prompt": "on the", "completion": " other", "text": "it is"}
    (encoded,) = encode_row(row, source=plain, tokenizer=tokenizer)
    assert trained_text(encoded, tokenizer) == " other<|im_end|>"
    assert tokenizer.decode(encoded[0]) == "on the other<|im_end|>"
    spoken = PromptCompletionSource(type="prompt_completion", path="x", system="S")
    (encoded,) = encode_row(row, source=spoken, tokenizer=tokenizer)
    assert trained_text(encoded, tokenizer) == " other<|im_end|>"
    assert tokenizer.decode(encoded[0]).startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>u")
    ((tokens_T, weights_T),) = encode_row(
        row, source=TextSource(type="text", path="x"), tokenizer=tokenizer
    )
    assert tokenizer.decode(tokens_T) == "it is<|im_end|>"
    assert weights_T.tolist() == [0.0] + [1.0] * (len(tokens_T) - 1)


def test_bos_and_eos_are_never_doubled(tmp_path):
    from tokenizers import processors

    backend = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path)))
    source = TextSource(type="text", path="x")
    whole = "<|im_start|>ab<|im_end|>"
    for text in ("ab", "<|im_start|>ab", "ab<|im_end|>", whole):
        ((tokens_T, weights_T),) = encode_row({"text": text}, source=source, tokenizer=tokenizer)
        assert tokenizer.decode(tokens_T) == whole
        assert weights_T[0] == 0
        assert weights_T[1:].all()


def test_rows_of_one_token_and_cut_rows_that_train_on_nothing_are_refused(tokenizers):
    tokenizer = tokenizers["chatml"]
    source = TextSource(type="text", path="x")
    with pytest.raises(BadRowError, match="trains on nothing"):
        encode_row({"text": ""}, source=source, tokenizer=tokenizer)
    encoded = encode(chat(("user", "a" * 50), ("assistant", "b")), tokenizer)
    with pytest.raises(BadRowError, match=r"data\.max_length=40"):
        truncate(encoded, 40)
    cut = truncate(encoded, len(encoded[0]) - 2)
    assert trained_text(cut, tokenizer) == "b"
    assert np.array_equal(cut[0], encoded[0][:-2])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=12,
)
near_messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool"]) | json_values},
        optional=dict.fromkeys(("content", "train", "weight", "tool_calls"), json_values),
    )
    | json_values,
    max_size=3,
)


@example(value=[{"role": "assistant", "tool_calls": True}], surrogate=False)
@given(value=near_messages | json_values, surrogate=st.booleans())
def test_any_value_gives_tokens_or_a_bad_row(tokenizers, value, surrogate):
    row = {"messages": value, "\ud800" if surrogate else "x": 1}
    for name in ("chatml", "gemma"):
        try:
            tokens_T, weights_T = encode(row, tokenizers[name])
        except BadRowError as error:
            assert str(error).encode()  # noqa: PT017
            assert str(error).isprintable()  # noqa: PT017
        else:
            assert tokens_T.shape == weights_T.shape
            assert weights_T.any()
