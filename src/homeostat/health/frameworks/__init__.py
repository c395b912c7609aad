"""The names that other frameworks use: metrics, settings, and marks that identify them.

A framework's table is one file. Its `settings` are used in both directions: a value that a log
states under their name is looked up under ours, and a fix that we know under our key is shown under
theirs.

If a log has equal evidence for two, the earlier in ALL is taken. One that is built on another takes
precedence wherever it is visible at all (`Framework.built_on`).
"""

from __future__ import annotations

from homeostat.health.frameworks import (
    areal,
    axolotl,
    chatlearn,
    deepspeed,
    engines,
    lightrft,
    llama_factory,
    megatron,
    miles,
    ms_swift,
    nemo_rl,
    openrlhf,
    prime_rl,
    roll,
    skyrl,
    slime,
    small,
    torchforge,
    torchtitan,
    torchtune,
    transformers,
    trl,
    unsloth,
    verl,
)
from homeostat.health.frameworks.table import Framework

HOMEOSTAT = Framework(name="homeostat", title="homeostat")
UNKNOWN = Framework(name="unknown", title="an unknown framework")
ALL: dict[str, Framework] = {
    table.name: table
    for table in (
        HOMEOSTAT,
        verl.TABLE,
        slime.TABLE,
        miles.TABLE,
        openrlhf.TABLE,
        lightrft.TABLE,
        chatlearn.TABLE,
        prime_rl.TABLE,
        nemo_rl.TABLE,
        skyrl.TABLE,
        areal.TABLE,
        roll.TABLE,
        torchforge.TABLE,
        axolotl.TABLE,
        llama_factory.TABLE,
        ms_swift.TABLE,
        unsloth.TABLE,
        small.OPEN_R1,
        small.OPEN_INSTRUCT,
        small.FASTCHAT,
        small.XTUNER,
        small.LITGPT,
        torchtune.TABLE,
        torchtitan.TABLE,
        trl.TABLE,
        megatron.TABLE,
        transformers.TABLE,
        deepspeed.TABLE,
        engines.VLLM,
        engines.SGLANG,
        engines.RAY,
        UNKNOWN,
    )
}
