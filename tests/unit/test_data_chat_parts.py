"""Tools, tool calls, reasoning and template options: what a row holds is trained, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.chat import CHATML, Style, chat, encode, make_tokenizer, trained_text

from homeostat.config.data import MessagesSource
from homeostat.data.chat import encode_prompt, parse_prompt
from homeostat.data.rows import encode_row
from homeostat.data.sources import BadRowError
from homeostat.data.tokenizer import ChatTokenizer
from homeostat.errors import ModelError

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
# Shows tools, calls and reasoning, each in its own way.
WHOLE = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}" + CHATML.replace(
    "{{ m.content }}",
    "{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}",
)
AS_TEXT = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.arguments SHOWN }}</call>{% endfor %}",
)
PHI_LIKE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
SWITCH = CHATML.replace(
    "assistant\n{% endif",
    "assistant\n{% if not think %}<think></think>{% endif %}{% endif",
).replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' and '<think>' not in m.content %}<think></think>{% endif %}"
    "{{ m.content }}",
)


def of(folder: Path, template: str, **settings: object) -> ChatTokenizer:
    style = Style(template, ("<|end|>",), eos="<|im_end|>", end="", stops=("<|end|>",))
    return make_tokenizer(folder, style, **settings)


def calling(arguments: object, **more: object) -> dict[str, object]:
    calls = [{"type": "function", "function": {"name": "look", "arguments": arguments}}]
    return chat(("user", "q"), ("assistant", ""), tool_calls=calls, **more)


def test_arguments_are_shown_once_quoted_whether_object_or_json_text(tmp_path):
    tokenizer = of(tmp_path, WHOLE)
    for arguments in ({"at": "here"}, json.dumps({"at": "here"})):
        row = calling(arguments)
        expected = '<call>{"name": "look", "arguments": {"at": "here"}}</call><|im_end|>'
        assert trained_text(encode(row, tokenizer), tokenizer) == expected


@pytest.mark.parametrize("shown", ["", "+ ''"], ids=["prints", "joins"])
def test_a_template_made_for_json_texts_gets_them(tmp_path, shown):
    tokenizer = of(tmp_path, AS_TEXT.replace("SHOWN", shown))
    encoded = encode(calling('{"at":"here"}'), tokenizer)
    assert trained_text(encoded, tokenizer) == '<call>{"at":"here"}</call><|im_end|>'
    with pytest.raises(BadRowError, match="refuses the messages"):
        encode(calling({"at": "here"}), tokenizer)


@pytest.mark.parametrize(
    ("part", "more"),
    [
        ("tool_calls", {"tool_calls": [{"function": {"name": "look", "arguments": {}}}]}),
        ("reasoning", {"reasoning_content": "hm"}),
        ("reasoning", {"thinking": "hm"}),
    ],
)
def test_what_the_template_leaves_out_of_a_trained_turn_is_refused(tmp_path, part, more):
    tokenizer = of(tmp_path, CHATML)
    row = chat(("user", "q"), ("assistant", "a"), **more)
    with pytest.raises(BadRowError, match=rf"message 1: the template leaves out its {part}"):
        encode(row, tokenizer)
    first, *_ = row["messages"]  # type: ignore[misc]
    context = {"messages": [*row["messages"], first, {"role": "assistant", "content": "b"}]}  # type: ignore[misc]
    assert trained_text(encode(context, tokenizer, turns="last"), tokenizer) == "b<|im_end|>"


SOME_ROLES = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}"
    "<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("role", ["developer", "tool", "human", "User"])
def test_a_message_that_the_template_leaves_out_is_refused(tmp_path, role):
    tokenizer = of(tmp_path, SOME_ROLES)
    lost = {"role": role, "content": "in French"}
    asked = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "salut"}]
    encode({"messages": asked}, tokenizer)
    encode({"messages": [{**lost, "content": " "}, *asked]}, tokenizer)
    for place in (0, 1):
        row = {"messages": [*asked[:place], lost, *asked[place:]]}
        with pytest.raises(BadRowError, match=f"message {place}, of the role '{role}', leaves no"):
            encode(row, tokenizer)
    with pytest.raises(BadRowError, match="leaves no trace"):
        encode_prompt(parse_prompt([lost, asked[0]]), tokenizer)


def test_reasoning_of_white_space_alone_is_nothing_lost(tmp_path):
    tokenizer = of(tmp_path, CHATML)
    row = chat(("user", "q"), ("assistant", "a"), reasoning_content="\n ", tool_calls=[])
    assert trained_text(encode(row, tokenizer), tokenizer) == "a<|im_end|>"


def test_content_that_a_tool_call_pushes_out_is_refused(tmp_path):
    template = WHOLE.replace(
        "{{ m.content }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}"
    )
    tokenizer = of(tmp_path, template)
    with pytest.raises(BadRowError, match="the template leaves out its content"):
        encode(calling({}, content="let me look"), tokenizer)
    assert trained_text(encode(calling({}), tokenizer), tokenizer).startswith("<call>")


def test_reasoning_under_the_templates_own_key_is_trained(tmp_path):
    tokenizer = of(tmp_path, WHOLE)
    row = chat(("user", "q"), ("assistant", "a"), thinking="hm")
    assert trained_text(encode(row, tokenizer), tokenizer) == "<think>hm</think>a<|im_end|>"


def test_tools_reach_the_template_and_are_not_lost(tmp_path):
    tokenizer, row = of(tmp_path, WHOLE), chat(("user", "q"), ("assistant", "a"))
    for without in ({**row, "tools": None}, row):
        bare = encode(without, tokenizer, tools_column="tools")
        assert tokenizer.decode(bare[0]).startswith("<|im_start|>user")
    for tools in (TOOLS, json.dumps(TOOLS)):
        encoded = encode({**row, "tools": tools}, tokenizer, tools_column="tools")
        assert tokenizer.decode(encoded[0]).startswith('<tools>[{"type": "function"')
        assert trained_text(encoded, tokenizer) == "a<|im_end|>"
    deaf = of(tmp_path / "deaf", CHATML)
    with pytest.raises(BadRowError, match="the template does not render them"):
        encode({**row, "tools": TOOLS}, deaf, tools_column="tools")


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("[", "not JSON"),
        ({}, "list of objects"),
        ([1], "list of objects"),
        ("3", "list of objects"),
    ],
)
def test_what_are_no_tools_is_refused(tmp_path, tools, message):
    tokenizer, row = of(tmp_path, WHOLE), chat(("user", "q"), ("assistant", "a"))
    with pytest.raises(BadRowError, match=message):
        encode({**row, "tools": tools}, tokenizer, tools_column="tools")


def test_a_stop_token_that_closes_the_whole_chat_is_no_part_of_a_turn(tmp_path):
    """Phi-3's template ends every text with eos_token, which the next turn takes away."""
    tokenizer = of(tmp_path, PHI_LIKE)
    row = chat(("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b"))
    encoded = encode(row, tokenizer)
    assert trained_text(encoded, tokenizer) == "a<|end|>b<|end|>"
    assert tokenizer.decode(encoded[0]).endswith("b<|end|>\n<|im_end|>")


def test_an_option_of_the_template_makes_prompt_and_turn_agree(tmp_path):
    row = chat(("user", "q"), ("assistant", "<think>hm</think>a"))
    with pytest.raises(BadRowError, match=r"generation prompt.*model\.chat_template_options"):
        encode(row, of(tmp_path / "off", SWITCH))
    thinker = of(tmp_path / "on", SWITCH, chat_template_options={"think": True})
    assert trained_text(encode(row, thinker), thinker) == "<think>hm</think>a<|im_end|>"
    plain = of(tmp_path / "plain", SWITCH)
    row = chat(("user", "q"), ("assistant", "a"))
    assert trained_text(encode(row, plain), plain) == "a<|im_end|>"
    assert plain.fingerprint != thinker.fingerprint


@pytest.mark.parametrize(
    ("name", "message"), [("thinking", "never reads 'thinking'"), ("messages", "set by each row")]
)
def test_an_option_without_effect_is_refused(tmp_path, name, message):
    with pytest.raises(ModelError, match=rf"model\.chat_template_options: .*{message}"):
        of(tmp_path, SWITCH, chat_template_options={name: True})


def test_each_turn_is_a_row_that_sees_what_inference_would(tmp_path):
    """A template that strips reasoning from earlier turns: exact labels for all of them."""
    shown = "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
    tokenizer = of(tmp_path, CHATML.replace("{{ m.content }}", shown))
    row = chat(
        ("user", "q"), ("assistant", "<think>x</think>a"), ("user", "r"),
        ("assistant", "<think>y</think>b"),
    )  # fmt: skip
    with pytest.raises(BadRowError, match="turns: each"):
        encode(row, tokenizer)
    source = MessagesSource(type="messages", path="x", turns="each")
    first, second = encode_row(row, source=source, tokenizer=tokenizer)
    assert trained_text(first, tokenizer) == "<think>x</think>a<|im_end|>"
    assert trained_text(second, tokenizer) == "<think>y</think>b<|im_end|>"
    assert "assistant\na<|im_end|>" in tokenizer.decode(second[0])
    row["messages"][1]["train"] = False  # type: ignore[index]
    assert len(encode_row(row, source=source, tokenizer=tokenizer)) == 1
    row["messages"][3]["train"] = False  # type: ignore[index]
    with pytest.raises(BadRowError, match="trains on nothing"):
        encode_row(row, source=source, tokenizer=tokenizer)


def test_a_message_without_role_is_refused_with_its_keys(tmp_path):
    row = {"messages": [{"from": "human", "value": "q"}]}
    with pytest.raises(BadRowError, match=r"has no role \(its keys: from, value\)"):
        encode(row, of(tmp_path, CHATML))
