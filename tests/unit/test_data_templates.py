"""Chat templates are a model's own code: what they may cost is limited."""

from __future__ import annotations

import signal
import threading

import pytest

from homeostat.data import templates
from homeostat.data.sources import BadRowError
from homeostat.data.templates import check_template, find_power, render
from homeostat.errors import ModelError

MESSAGES = [{"role": "user", "content": "hi"}]
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def rendered(template: str) -> str:
    return render(template, MESSAGES, add_generation_prompt=True, words={"eos_token": "</s>"})


def test_a_template_sees_messages_words_and_the_prompt_flag() -> None:
    assert rendered("{{ messages[0].content }}{{ eos_token }}{{ add_generation_prompt }}") == (
        "hi</s>True"
    )


def test_loops_without_an_end_are_cut_off_and_the_timer_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(templates, "MAX_CPU_S", 0.2)
    before = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(ModelError, match="came to no end"):
        rendered(NESTED)
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_another_thread_renders_too() -> None:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(rendered("x")))
    thread.start()
    thread.join()
    assert found == ["x"]


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{{ raise_exception('no') }}", "{{ messages[9].content }}",
                 "{% for i in range(10000000) %}{% endfor %}", "{% include 'x' %}"],
)  # fmt: skip
def test_what_a_template_raises_belongs_to_the_row(template: str) -> None:
    with pytest.raises(BadRowError):
        rendered(template)


def test_powers_are_found_by_line_and_keyword_arguments_are_none() -> None:
    assert find_power("a\n{{ 2 ** 3 }}") == 2
    assert find_power("{{ f(**x) }}{{ f(1, **x) }} 2 ** 3") is None


@pytest.mark.parametrize("template", ["{% for", "{{ 10 ** 10 ** 8 }}", 3, ["x"]])
def test_a_template_that_cannot_be_used_is_refused_by_its_setting(template: object) -> None:
    with pytest.raises(ModelError, match="model\\.path: the chat template"):
        check_template(template, setting="model.path")
