"""The doctor beside runs of other trainers, while they run.

    transformers   HealthCallback: for Trainer, TRL, axolotl and LLaMA-Factory
    axolotl        a plug-in that adds the callback
    verl           a logger backend
    watching       follows a log, a run folder or a command; the verb `homeostat watch`

Nothing here imports torch, and importing a module changes nothing in another library.
"""
