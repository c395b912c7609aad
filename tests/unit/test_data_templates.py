"""Chat templates are a model's own code: what they may cost is limited."""

from __future__ import annotations

import resource
import signal
import sys
import threading
import time

import pytest

from homeostat.data import templates
from homeostat.data.sources import BadRowError
from homeostat.data.templates import MAX_CPU_S, check_template, find_power, render
from homeostat.errors import ModelError

MESSAGES = [{"role": "user", "content": "hi"}]
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def rendered(template: str) -> str:
    return render(template, MESSAGES, add_generation_prompt=True, words={"eos_token": "</s>"})


def test_a_template_sees_messages_words_and_the_prompt_flag() -> None:
    assert rendered("{{ messages[0].content }}{{ eos_token }}{{ add_generation_prompt }}") == (
        "hi</s>True"
    )


# Jinja computes constants as it compiles, and drops an Exception that they raise.
CONSTANT = "{{ [1]|slice(1000000000)|sum(start=[])|length }}"


@pytest.mark.parametrize("template", [NESTED, CONSTANT])
def test_loops_without_an_end_are_cut_off_and_the_timer_is_put_back(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "MAX_CPU_S", 0.2)
    before = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(ModelError, match="did not finish within"):
        rendered(template)
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


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit address space")
@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10000000000 }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ 'a'.ljust(10000000000) }}",
        "{{ 'a'|center(10000000000) }}",
        "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}"
        "{% endfor %}{{ n.x|length }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = n.x + n.x %}"
        "{% endfor %}",
        "{{ (range(100000)|list * 100000)|length }}",
    ],
)
def test_one_operation_over_gigabytes_ends_at_once(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time limit cannot end it: Python acts on a signal only between two operations."""
    # A quarter of the limit, because those that double a text or a list fill the memory first.
    monkeypatch.setattr(templates, "MAX_MEMORY", templates.MAX_MEMORY // 4)
    before = resource.getrlimit(resource.RLIMIT_AS)
    started = time.process_time()
    with pytest.raises((ModelError, BadRowError)):
        render(template, [{"role": "user", "content": "a"}], add_generation_prompt=False, words={})
    assert time.process_time() - started < 2 * MAX_CPU_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2**22, "kilobytes: 4 GiB"
    assert resource.getrlimit(resource.RLIMIT_AS) == before
