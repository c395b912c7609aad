"""Differential diagnosis: how likely each illness is, given all signs of a run together.

    findings, clear rules  -> signs.py      which signs are present, absent, or leading
    illnesses.json         -> illnesses.py  illnesses as data: which signs they cause, how often
    both                   -> posterior.py  how likely each illness is
    names of two illnesses -> deciding.py   the measurement or switch that distinguishes them
    all of it              -> answer.py     the doctor's answer

bench/differential.py fits illnesses.json to rounds of the clinic. docs/guide/differential.md
describes these rounds, and the accuracy on rounds that were not used for fitting.
"""
