"""Differential diagnosis: how likely each illness is, given all signs of a run at once.

    findings, clear rules  -> signs.py      what was found, what leads, what is absent
    illnesses.json         -> illnesses.py  illnesses as data: which signs they cause, how often
    both                   -> posterior.py  how likely each illness is
    names of two illnesses -> deciding.py   the measurement or switch that tells them apart
    all of it              -> answer.py     what the doctor says

bench/differential.py fits illnesses.json on rounds of the clinic. docs/guide/differential.md says
on what, and how well it does on rounds that were not fitted.
"""
