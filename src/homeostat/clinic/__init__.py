"""The clinic: tiny real runs made ill on purpose, and how well that was noticed and mended.

    bodies.py      a tokenizer, a model, games with rows: what all runs are made of
    recipes.py     the recipes of healthy runs, and the base policies that RL runs start from
    rewards.py     reward functions, sound ones and those that a fault replaces them by
    injector.py    what a fault is: which run it befalls, when, how hard, and who should notice
    faults/        the faults, one file per part of a run that they befall
    ward.py        runs them all, each in a process of its own with a deadline
    verdict.py     what became of one run: noticed, by whom first, how late, cured
    summary.py     shares and medians over all of them

A fault alters the model, the data, the reward, the recipe, a process or a file. Nothing here writes
a metric or an event: these come from the run that fell ill.
"""
