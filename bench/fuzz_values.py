"""Tables of values, templates, YAML texts and names that nobody meant, for fuzz_kinds."""

from __future__ import annotations

import math
from typing import Any

# What a type, a size or a character may be that nobody meant.
HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**63, 10**12, 10**30, -(10**30), 10**400, 0.5,
    -0.0, 1e-320, 1e308, math.nan, math.inf, -math.inf, "", " ", "x", "0", "-1", "nan", "null",
    "x" * 5000, "../../etc/passwd", "/dev/null", "/dev/zero", "/nowhere/at/all", ".", "..", "~",
    "\0", "a\0b", "\u202eabc", "\ud800", "\udfff\ud800", "\x1b[31mred", "\x7f\x85\u2028", "[bold]",
    "[/red]", "{x}", "%s", "a\nb", "caf\u00e9 \U0001f600", "\u00b2", "\u0663", "<|im_end|>",
    [], {}, [[]], [None], [{}], ["x", 1], {"": 1}, {"type": "x"}, {"type": None}, {"type": []},
    {"x": {"y": [1, {"z": None}]}}, [0] * 2000, ["\0"], "q_proj", "all-linear", "transformers",
)  # fmt: skip
TEMPLATES = (
    "{% for", "{{ messages[", "{% endfor %}", "{{ 1 / 0 }}", "{{ raise_exception('no') }}", "",
    "{{ messages }}", "{{ undefined.x.y }}", "{{ messages[99].content }}", "{% generation %}",
    "{% for i in range(10 ** 9) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 10 ** 10 ** 8 }}", "{{ 'x' * 10000000000 }}", "{{ ''.__class__.__mro__ }}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "{{ '%1000000000000d' % 1 }}",
    "{% include 'x' %}", "{% extends '/etc/passwd' %}", "{% import 'os' as os %}",
    "{{ '\u202e\0' }}", "{{ messages[0].content }}<|im_end|>", "{% set x = messages.clear() %}",
)  # fmt: skip
YAML_TEXTS = (
    "a: &x [*x]\n", "a: !!python/object/apply:os.system ['true']\n", "a: !!binary aGk=\n",
    "? [1]\n: 2\n", "a: " + "[" * 2000 + "\n", "a: " + "{a: " * 300 + "\n", "---\na: 1\n---\nb: 2",
    "%YAML 9.9\n---\n", "\ta: 1\n", "&a name: *a\n", "<<: {name: a}\n", "name: !!int x\n",
    "'\\uD800': 1\n", '"\\uD800": 1\n', "trainer: !!float nan\n", "1: 2\n", "null: 1\n", "- name\n",
    "a: &a [1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b]\n"
    "d: &d [*c,*c,*c,*c,*c,*c,*c]\ne: [*d,*d,*d,*d,*d,*d,*d]\n", "name: |\n", "? \n", "!\n",
)  # fmt: skip
OVERRIDES = (
    "=", "x", "=1", ".=1", "a..b=1", "trainer.=1", "data.train.0=", "data.train.-1.path=x",
    "data.train.\u00b2.path=x", "data.train.\u0660.limit=1", "data.train.9.path=x", "name.x=1",
    "trainer=", "trainer={", "trainer.lr=[", "trainer.lr=!!x", "trainer.lr=&a", "trainer.lr=*a",
    "trainer.lr=1e400", "\udcff=1", "name=\udcff", "data.train=[]", "data.train.0.type=\u00b2",
    "trainer.lr='", "trainer.lr=1: 2", "lora.rank=1000000000000", "preset=[1]", "preset={a: 1}",
    "preset=[[x]]", "\u00b2=1", "a.0.\u00b2=1", "model.path=", "lora.targets=[q_proj, q_proj]",
)  # fmt: skip
ROW_NAMES = (
    "a\nb.jsonl", "rows.txt", "ROWS.JSONL", "\u202erows.jsonl", "rows.parquet", "[red].jsonl",
    "rows", " .jsonl", "r" * 240 + ".jsonl", "rows.json",
)  # fmt: skip
