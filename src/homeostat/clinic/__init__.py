"""The clinic injects faults into tiny real runs and measures how well they are detected and cured.

    bodies.py      a tokenizer, a model and games with rows: the parts of all runs
    recipes.py     the recipes of healthy runs, and the base policies from which RL runs start
    rewards.py     reward functions: sound ones, and those by which a fault replaces them
    injector.py    the definition of a fault: its run, its onset and strength, who should notice
    faults/        the faults, one file per part of a run that they alter
    ward.py        runs them all, each in its own process with a deadline
    verdict.py     the result of one run: noticed, by which finding first, how late, cured
    summary.py     shares and medians over all of them

A fault alters the model, the data, the reward, the recipe, a process or a file. Nothing here writes
a metric or an event: these come from the run that fell ill.
"""
