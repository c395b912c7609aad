"""The functions of `import homeostat`, which imports each of them when it is first used.

recipes    recipe
runs       check, train, steps, evaluate
health     diagnose
models     Model, generate, score
"""
