"""Error texts of the family numerics: NaN, infinities, loss scales."""

from __future__ import annotations

from homeostat.health.finding import Cause, Confidence, Family, Level
from homeostat.health.texts.conditions import first_failures
from homeostat.health.texts.parts import advice, change, safe
from homeostat.health.texts.trouble import Trouble

_KEEP_OUT = safe(
    "trainer.on_nonfinite",
    "halt",
    (
        "An update that is not finite must never reach the weights; halting shows the first "
        "bad batch."
    ),
)
_NOT_THE_CHECK = advice(
    "",
    (
        "Do not switch the check off: that does not skip the step, it lets NaN into the "
        "weights for good."
    ),
    slime="--no-check-for-nan-in-loss-and-grad=false",
    miles="--no-check-for-nan-in-loss-and-grad=false",
    megatron="--no-check-for-nan-in-loss-and-grad=false",
)
_LOWER_LR = change(
    "trainer.lr", "a half to a fifth of it", "With a longer warm-up, where the norm grew before."
)
_CLIP = change("trainer.max_grad_norm", "1.0", "Bound the gradient's norm.")

TROUBLES: tuple[Trouble, ...] = first_failures(
    (
        Trouble(
            code="ERR650",
            name="nan-loss",
            family=Family.NUMERICS,
            texts=(
                "Loss is nan",
                "loss is inf",
                "NaN loss",
                "nan loss detected",
                "Detected NaN in loss",
                "NaN detected in loss",
                "NaN or Inf found in loss",
                "found NaN in local forward loss",
                "found Inf in local forward loss",
                "found NaN in local grad norm",
                "found Inf in local grad norm",
                "non-finite loss",
                "Non-finite loss",
                "encountered NaN",
                "Unexpected result nan",
                "loss became NaN",
                "Rank *: found NaN",
                "Unexpected result inf",
                "nan in advantages",
                "NaN detected in grad",
                "loss is not finite",
            ),
            what="Loss or gradient became NaN or infinite, and the framework says so.",
            why=(
                "Overflow in fp16 or fp8, a learning rate that blew up, rows without a "
                "trained token, or a broken kernel or checkpoint; the metrics before the "
                "first bad step tell which."
            ),
            fixes=(
                _KEEP_OUT,
                _LOWER_LR,
                _CLIP,
                change(
                    "trainer.precision",
                    "bf16",
                    "fp16 overflows at 65504.",
                ),
                _NOT_THE_CHECK,
            ),
            confidence=Confidence.INFERRED,
        ),
        Trouble(
            code="ERR651",
            name="nan-loss",
            family=Family.NUMERICS,
            texts=(
                "grad_norm is not finite",
                "gradient norm is not finite",
                "grad norm is nan",
                "gradients from `parameters` is non-finite",
                "gradients contain NaN",
                "Gradient contains NaN",
                "found nan/inf in gradients",
                "non-finite gradient",
            ),
            what="The gradient is NaN or infinite; the update is left out, or the run ends.",
            why=(
                "Something in the backward pass overflowed or was already NaN; when it comes "
                "at every step, the weights or the batch arithmetic are broken."
            ),
            fixes=(
                _KEEP_OUT,
                _CLIP,
                _LOWER_LR,
                advice(
                    "",
                    (
                        "If the loss is finite while every gradient is NaN: check that the "
                        "micro batch is not larger than the mini batch's share per GPU."
                    ),
                    verl="actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
                ),
            ),
            level=Level.WARN,
            confidence=Confidence.INFERRED,
        ),
        Trouble(
            code="ERR652",
            name="benign-loss-scale-search",
            family=Family.NUMERICS,
            texts=(
                "OVERFLOW! Rank * Skipping step",
                "Gradient overflow. Skipping step",
                "Gradient overflow.  Skipping step",
                "Attempted loss scale",
                "overflow, skipping step",
            ),
            what=(
                "fp16 loss scaling skipped a step to find a scale that fits: usual at the "
                "start and now and then."
            ),
            why=(
                "Dynamic scaling raises the scale until gradients overflow, then halves it "
                "and skips that step."
            ),
            fixes=(
                change(
                    "trainer.precision",
                    "bf16",
                    "bf16 needs no loss scale.",
                ),
            ),
            level=Level.INFO,
        ),
        Trouble(
            code="ERR653",
            name="fp16-overflow",
            family=Family.NUMERICS,
            texts=(
                "Current loss scale already at minimum",
                "loss scale already at minimum",
                "Minimum loss scale reached",
                "Loss scale reached minimum",
                "cannot decrease scale anymore",
            ),
            what="Every fp16 step overflows: the loss scale has reached its minimum.",
            why=(
                "Activations or gradients exceed what fp16 can hold (65504) at any scale: "
                "the model was trained in bf16, the learning rate is too high, or the loss "
                "is NaN already."
            ),
            causes=(
                Cause("fp16-overflow", "no loss scale is small enough"),
                Cause("lr-too-high", "a run that worked before may have blown up"),
            ),
            fixes=(
                change(
                    "trainer.precision",
                    "bf16",
                    "bf16 has float32's range.",
                ),
                _LOWER_LR,
            ),
            explains=("ERR652", "ERR650", "ERR651"),
        ),
        Trouble(
            code="ERR654",
            name="sampling-from-nan-logits",
            family=Family.NUMERICS,
            texts=(
                "probability tensor contains either `inf`, `nan` or element < 0",
                "probability tensor contains either",
                "Assertion `probability",
                "invalid multinomial distribution",
                "logits contain nan",
                "NaN in logits",
                "nan in logits",
            ),
            what="Sampling failed: the model's logits are NaN or infinite.",
            why=(
                "The weights hold NaN since a bad update, the model was loaded in fp16 or "
                "quantised and overflows, or padding leaves a row without anything to attend "
                "to."
            ),
            causes=(
                Cause("sampling-from-nan-logits", "the probabilities are not numbers"),
                Cause(
                    "nan-update-poisoned-weights",
                    "after training steps: one non-finite update is enough",
                ),
            ),
            fixes=(
                _KEEP_OUT,
                change("trainer.precision", "bf16", "Load and sample in bf16, not fp16."),
                advice(
                    "",
                    (
                        "Generate once with the untouched model: if that works, go back to "
                        "the last checkpoint before the loss became NaN."
                    ),
                ),
                advice(
                    "",
                    (
                        "Replacing NaN in the logits by 0 (nan_to_num) hides the damage: "
                        "sampling goes on from a uniform distribution."
                    ),
                ),
            ),
            explains=("ERR467", "ERR650"),
        ),
        Trouble(
            code="ERR655",
            name="nan-in-backward",
            family=Family.NUMERICS,
            texts=(
                "returned nan values in its 0th output",
                "returned nan values in its",
                "Error detected in *Backward0. Traceback of forward call",
            ),
            what="Anomaly detection found where NaN enters the backward pass.",
            why=(
                "The operation named there divides by zero, takes log or sqrt of 0, or overflows."
            ),
            fixes=(
                advice(
                    "",
                    (
                        "The forward call that is printed with it is the place: guard the "
                        "argument (epsilon, clamp before log or sqrt), compute it in "
                        "float32."
                    ),
                ),
                _KEEP_OUT,
            ),
            explains=("ERR650", "ERR651"),
        ),
        Trouble(
            code="ERR659",
            name="attention-kernel-nan",
            family=Family.NUMERICS,
            texts=(
                "ScaledDotProduct*Backward* returned nan",
                "FlashAttn*Backward* returned nan",
                "FlashAttention*Backward* returned nan",
                "EfficientAttention*Backward* returned nan",
                "FlexAttention*Backward* returned nan",
                "Error detected in ScaledDotProduct",
                "Error detected in FlashAttn",
                "Error detected in FlashAttention",
                "Error detected in FlexAttention",
                "nan && output of scaled_dot_product_attention",
                "nan && output of flash_attn",
                "nan in attention output",
            ),
            what="NaN comes out of the attention kernel.",
            why=(
                "Kernels of some builds give NaN for rows that are masked entirely (padding on "
                "the left), for head sizes or GPUs that they were not made for; eager attention "
                "does not."
            ),
            fixes=(
                safe("model.attention", "eager", "No kernel in between: proves where it is from."),
                advice(
                    "",
                    "Then another kernel (flash_attention_2 for sdpa), or another build of torch "
                    "or flash-attn; no row may be masked entirely.",
                    transformers="attn_implementation",
                    trl="attn_implementation",
                ),
            ),
            explains=("ERR650", "ERR651", "ERR655", "NUM001", "NUM002", "NUM003", "NUM004"),
        ),
        Trouble(
            code="ERR656",
            name="nonfinite-metric",
            family=Family.NUMERICS,
            texts=("NaN or Inf found in input tensor",),
            what="A logged value was NaN or infinite (TensorBoard's own warning).",
            why=(
                "It can be a metric without any row in that step; the metrics show whether "
                "loss or gradient are affected."
            ),
            fixes=(
                advice(
                    "",
                    "See which curve has the gap; for loss or gradient norm follow that finding.",
                ),
            ),
            level=Level.INFO,
        ),
        Trouble(
            code="ERR657",
            name="nan-update-poisoned-weights",
            family=Family.NUMERICS,
            texts=(
                "parameters contain NaN",
                "parameter * contains NaN",
                "param * contains nan",
                "weights contain NaN",
                "weight * contains NaN",
                "NaN in weights",
                "NaN in parameter",
                "nan found in model weights",
                "Found nan in parameter",
            ),
            what="The model's weights hold NaN: nothing that follows is usable.",
            why="One non-finite update was applied; every later forward pass is NaN.",
            fixes=(
                safe(
                    "checkpoint.load_step",
                    "the last checkpoint before",
                    "Go back to weights that are still finite.",
                    slime="--ckpt-step",
                ),
                _KEEP_OUT,
                _NOT_THE_CHECK,
            ),
            explains=("ERR650", "ERR651", "ERR654"),
        ),
        Trouble(
            code="ERR658",
            name="nonfinite-check-disabled",
            family=Family.CONFIG,
            texts=(
                "--no-check-for-nan-in-loss-and-grad",
                "check_for_nan_in_loss_and_grad* False",
                "check_for_nan_in_loss_and_grad=False",
            ),
            what="The check for NaN in loss and gradient is switched off.",
            why=(
                "Without it a bad step is not skipped: it is applied, and the weights are "
                "NaN from then on."
            ),
            fixes=(
                advice(
                    "",
                    (
                        "Leave the check on, and let bad steps be skipped before the "
                        "optimizer (or halt)."
                    ),
                    slime="--no-check-for-nan-in-loss-and-grad=false",
                    miles="--no-check-for-nan-in-loss-and-grad=false",
                    megatron="--no-check-for-nan-in-loss-and-grad=false",
                ),
            ),
            level=Level.INFO,
        ),
    ),
    run_goes_on=("ERR650", "ERR657"),
)
