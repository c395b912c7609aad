"""All rules, in the order of their codes. A package per family lists its own.

A code is never used again: what went away is in RETIRED, with the reason.
"""

from __future__ import annotations

from homeostat.health.rule import Rule
from homeostat.health.rules import (
    agents,
    checkpoint,
    config,
    data,
    distributed,
    generation,
    install,
    learning,
    memory,
    moe,
    numerics,
    offpolicy,
    performance,
    policy,
    precision,
    reward,
    speculative,
    sync,
    vital,
)
from homeostat.health.texts import (
    agents as agents_texts,
)
from homeostat.health.texts import (
    checkpoint as checkpoint_texts,
)
from homeostat.health.texts import (
    config as config_texts,
)
from homeostat.health.texts import (
    data as data_texts,
)
from homeostat.health.texts import (
    distributed as distributed_texts,
)
from homeostat.health.texts import (
    generation as generation_texts,
)
from homeostat.health.texts import (
    install as install_texts,
)
from homeostat.health.texts import (
    learning as learning_texts,
)
from homeostat.health.texts import (
    memory as memory_texts,
)
from homeostat.health.texts import (
    moe as moe_texts,
)
from homeostat.health.texts import (
    numerics as numerics_texts,
)
from homeostat.health.texts import (
    offpolicy as offpolicy_texts,
)
from homeostat.health.texts import (
    own as own_texts,
)
from homeostat.health.texts import (
    performance as performance_texts,
)
from homeostat.health.texts import (
    policy as policy_texts,
)
from homeostat.health.texts import (
    precision as precision_texts,
)
from homeostat.health.texts import (
    reward as reward_texts,
)
from homeostat.health.texts import (
    speculative as speculative_texts,
)
from homeostat.health.texts import (
    sync as sync_texts,
)
from homeostat.health.texts.trouble import Trouble, rule_of

_FAMILIES = (
    agents.RULES,
    checkpoint.RULES,
    config.RULES,
    data.RULES,
    distributed.RULES,
    generation.RULES,
    install.RULES,
    learning.RULES,
    memory.RULES,
    moe.RULES,
    numerics.RULES,
    offpolicy.RULES,
    performance.RULES,
    policy.RULES,
    precision.RULES,
    reward.RULES,
    speculative.RULES,
    sync.RULES,
    vital.RULES,
)
TROUBLES: tuple[Trouble, ...] = (
    *agents_texts.TROUBLES,
    *checkpoint_texts.TROUBLES,
    *config_texts.TROUBLES,
    *data_texts.TROUBLES,
    *distributed_texts.TROUBLES,
    *generation_texts.TROUBLES,
    *install_texts.TROUBLES,
    *learning_texts.TROUBLES,
    *memory_texts.TROUBLES,
    *moe_texts.TROUBLES,
    *numerics_texts.TROUBLES,
    *offpolicy_texts.TROUBLES,
    *own_texts.TROUBLES,
    *performance_texts.TROUBLES,
    *policy_texts.TROUBLES,
    *precision_texts.TROUBLES,
    *reward_texts.TROUBLES,
    *speculative_texts.TROUBLES,
    *sync_texts.TROUBLES,
)

RULES: tuple[Rule, ...] = tuple(
    sorted(
        [*(rule for family in _FAMILIES for rule in family), *map(rule_of, TROUBLES)],
        key=lambda rule: rule.code,
    )
)
BY_CODE: dict[str, Rule] = {rule.code: rule for rule in RULES}
RETIRED: dict[str, str] = {}
assert len(BY_CODE) == len(RULES), "a code is used twice"
