"""Templates of a new rule or signature, for its author to fill in.

The tests of what is laid out pass: a rule fires above a limit, a signature on its words. All else
says PLACEHOLDER, which tests/health/test_rules.py does not let through.
"""

from __future__ import annotations

PLACEHOLDER = "PLACEHOLDER"

SIGNATURE = f"""\
[[signature]]
code = "{{code}}"
name = "{{name}}"
texts = [{{text}}]
what = "{PLACEHOLDER}: what happened, in one sentence."
why = "{PLACEHOLDER}: why it happens, in two or three sentences."

[[signature.fix]]
why = "{PLACEHOLDER}: what to do; add setting, value and theirs where a setting does it."
"""

SIGNATURE_CASES = f"""\
[[case]]
code = "{{code}}"
title = "{PLACEHOLDER}: what the log shows"
log = '''
Traceback (most recent call last):
RuntimeError: {{text}}
'''

[[case]]
code = "{{code}}"
title = "{PLACEHOLDER}: a log that only looks like it"
not = true
log = '''
Loading the model.
'''
"""

RULE = f'''\
"""{PLACEHOLDER}: the illness in one sentence.

## What it sees
`{{metric}}` is above `limit` in at least `fire` records in a row.

## Why it matters
{PLACEHOLDER}.

## Likely causes
- {{name}}: {PLACEHOLDER}.

## What to do
{PLACEHOLDER}.

## Known false alarms
{PLACEHOLDER}.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Cause, Confidence, Family, Fix, Level, Sighting
from homeostat.health.rule import Rule, RuleOptions, option
from homeostat.health.rules.readings import needed
from homeostat.health.view import RunView
from homeostat.health.series.windows import held_mean, newest_spell


class Options(RuleOptions):
    limit: float = option(1.0, "{PLACEHOLDER}: why values above it are ill.")
    fire: int = option(3, "Records above the limit in a row before it fires.")


def check(view: RunView, options: Options) -> Iterator[Sighting]:
    series = needed(view, "{{metric}}").finite()
    held = series.values > options.limit
    spell = newest_spell(held, fire=options.fire)
    if spell is None or not spell.is_open:
        return
    mean = held_mean(series.values, held, spell)
    yield Sighting(
        message=f"{PLACEHOLDER}: {{metric}} is {{{{mean:.3g}}}}.",
        causes=(Cause("{{name}}", f"it is above {{{{options.limit:.3g}}}}"),),
        fixes=(Fix("", "", "{PLACEHOLDER}: what to do."),),
        first_step=int(series.steps[spell.start]),
        last_step=int(series.steps[spell.end]),
        value=mean,
        limit=options.limit,
    )


RULE = Rule(
    code="{{code}}",
    name="{{name}}",
    family=Family.{{family}},
    level=Level.WARN,
    confidence=Confidence.HEURISTIC,
    check=check,
    needs=("{{metric}}",),
    options=Options,
)
'''

RULE_CASES = f"""\
# {{code}} {{name}}

## Fires: {PLACEHOLDER}
```csv
step, {{metric}}
1..2, 0.5
3..8, 2.0
```
```expect
level = "warn"
first_step = 3
causes = ["{{name}}"]
```

## Near miss: {PLACEHOLDER}
```csv
step, {{metric}}
1..6, 0.5
7..8, 2.0
```
```expect
clear = true
```

## Healthy: {PLACEHOLDER}
```csv
step, {{metric}}
1..8, 0.5
```
```expect
clear = true
```
"""
