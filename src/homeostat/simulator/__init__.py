"""Simulate the loop of trainer, engines, rewards and transports, and plan runs on many GPUs.

    ModelShape + Workload + Layout -> work of each stage (bytes, FLOPs, calls) x Rates of a machine
        -> loop.simulate: a discrete-event model of some steps -> seconds by stage, what binds

Every stage's seconds are linear in the rates (rates.py), so rates can be fitted to measured steps
(fit.py). No torch, no clock and no randomness: the same inputs give the same plan.
"""
