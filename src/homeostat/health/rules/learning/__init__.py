"""Rules of the family learning."""

from __future__ import annotations

from homeostat.health.rule import Rule
from homeostat.health.rules.learning import (
    lrn001_overfitting,
    lrn002_loss_divergence,
    lrn003_loss_spikes,
    lrn004_loss_plateau,
    lrn005_lr_too_high,
    lrn006_lr_too_low,
    lrn007_lr_schedule,
    lrn008_no_gradient_flow,
    lrn009_grad_norm_spikes,
    lrn010_grad_norm_explosion,
    lrn011_grad_norm_vanishing,
    lrn012_loss_times_accumulation,
    lrn013_initial_loss,
    lrn014_dpo_over_optimisation,
    lrn015_benign_grpo_loss_zero,
    lrn016_benign_loss_tracks_kl,
    lrn017_benign_gradnorm_version,
    lrn018_eval_missing,
    lrn019_trained_weights_unmoved,
    lrn020_frozen_weights_moved,
    lrn021_ebft_alignment,
)

RULES: tuple[Rule, ...] = (
    lrn001_overfitting.RULE,
    lrn002_loss_divergence.RULE,
    lrn003_loss_spikes.RULE,
    lrn004_loss_plateau.RULE,
    lrn005_lr_too_high.RULE,
    lrn006_lr_too_low.RULE,
    lrn007_lr_schedule.RULE,
    lrn008_no_gradient_flow.RULE,
    lrn009_grad_norm_spikes.RULE,
    lrn010_grad_norm_explosion.RULE,
    lrn011_grad_norm_vanishing.RULE,
    lrn012_loss_times_accumulation.RULE,
    lrn013_initial_loss.RULE,
    lrn014_dpo_over_optimisation.RULE,
    lrn015_benign_grpo_loss_zero.RULE,
    lrn016_benign_loss_tracks_kl.RULE,
    lrn017_benign_gradnorm_version.RULE,
    lrn018_eval_missing.RULE,
    lrn019_trained_weights_unmoved.RULE,
    lrn020_frozen_weights_moved.RULE,
    lrn021_ebft_alignment.RULE,
)
