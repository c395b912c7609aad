"""The names that other frameworks use: metrics, settings, and marks that identify them.

Each framework has one table in one file. Its `settings` are used in both directions: a value that a
log states under the framework's name is found under our key, and a fix for our key is shown under
the framework's name.

If the evidence for two frameworks is equal, the earlier one in ALL is used. If one is built on the
other and is visible at all, it takes precedence (`Framework.built_on`).
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
    tinker,
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
        tinker.TABLE,
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
