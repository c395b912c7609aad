"""Error texts of the family learning: gradients that do not flow, optimizers without parameters."""

from __future__ import annotations

from homeostat.health.finding import Cause, Confidence, Family, Level
from homeostat.health.texts.conditions import first_failures
from homeostat.health.texts.parts import advice, safe
from homeostat.health.texts.trouble import Trouble
from homeostat.health.view import RunView


def _no_gradient_seen(view: RunView) -> bool:
    """No gradient norm was logged, or none above zero: the warning may be true."""
    norms = view.series("grad_norm")
    return norms is None or not bool((norms.values > 0).any())


TROUBLES: tuple[Trouble, ...] = first_failures(
    (
        Trouble(
            code="ERR665",
            name="no-gradient-flow",
            family=Family.LEARNING,
            texts=(
                "does not require grad and does not have a grad_fn",
                "No inf checks were recorded for this optimizer",
            ),
            what="The loss has no gradient path to any trained weight.",
            why=(
                "All weights are frozen, the adapter was not attached or is not trainable, "
                "or the inputs of a checkpointed, frozen model do not require gradients."
            ),
            fixes=(
                advice(
                    "",
                    (
                        "Call model.enable_input_require_grads() (or use non-reentrant "
                        "checkpointing) for an adapter on a frozen base."
                    ),
                    trl="gradient_checkpointing_kwargs",
                    axolotl="gradient_checkpointing_kwargs",
                ),
                advice(
                    "",
                    (
                        "Check that parameters require gradients "
                        "(print_trainable_parameters), and that the forward is not under "
                        "no_grad or inference_mode."
                    ),
                ),
            ),
            explains=("ERR666",),
        ),
        Trouble(
            code="ERR666",
            name="no-gradient-flow",
            family=Family.LEARNING,
            texts=("None of the inputs have requires_grad=True. Gradients will be None",),
            when=_no_gradient_seen,
            what=(
                "Checkpointed blocks get inputs without gradient: nothing below the head can learn."
            ),
            why=(
                "Reentrant checkpointing needs an input that requires gradients; a frozen "
                "embedding gives none."
            ),
            fixes=(
                advice(
                    "",
                    "Use non-reentrant checkpointing, or model.enable_input_require_grads().",
                    trl="gradient_checkpointing_kwargs",
                    axolotl="gradient_checkpointing_kwargs",
                    transformers="gradient_checkpointing_kwargs",
                ),
                safe("trainer.gradient_checkpointing", "false", "Or none, where memory allows."),
            ),
            level=Level.WARN,
            confidence=Confidence.INFERRED,
        ),
        Trouble(
            code="ERR667",
            name="no-trainable-parameters",
            family=Family.LEARNING,
            texts=(
                "trainable params: 0 ||",
                "Number of trainable parameters = 0",
                "optimizer got an empty parameter list",
                "No trainable parameters",
                "no trainable parameters",
                "There are no parameters that require gradients",
            ),
            what="No parameter of the model is trained.",
            why=(
                "Everything is frozen: an adapter was loaded for inference only, its target "
                "names matched nothing, or a freeze pattern was too wide."
            ),
            causes=(
                Cause("no-trainable-parameters", "the optimizer has nothing to update"),
                Cause("no-gradient-flow", "so no gradient either"),
            ),
            fixes=(
                safe(
                    "lora.targets",
                    "all-linear",
                    "Make sure that the adapter has targets.",
                    trl="lora_target_modules",
                    axolotl="lora_target_modules",
                ),
                advice(
                    "",
                    "Load an existing adapter with is_trainable=True; check freeze patterns.",
                    axolotl="unfrozen_parameters",
                ),
            ),
            explains=("ERR665", "ERR666"),
        ),
        Trouble(
            code="ERR668",
            name="benign-scheduler-order",
            family=Family.LEARNING,
            texts=(
                "Detected call of `lr_scheduler.step()` before `optimizer.step()`",
                "tried to get lr value before scheduler/optimizer started stepping",
            ),
            what="The schedule stepped before the first update: harmless.",
            why=(
                "The first update was skipped (loss scaling) or has not happened yet when "
                "the rate is read."
            ),
            fixes=(advice("", "Nothing, unless every update is skipped."),),
            level=Level.INFO,
        ),
        Trouble(
            code="ERR670",
            name="inference-mode-in-training",
            family=Family.LEARNING,
            texts=(
                "Inference tensors cannot be saved for backward",
                "Inplace update to inference tensor outside InferenceMode",
                "Cannot set version_counter for inference tensor",
            ),
            what="Tensors made in inference mode are used for training.",
            why=(
                "Rollout or reference code ran under torch.inference_mode, and its tensors "
                "(or weights loaded there) reach the backward pass."
            ),
            fixes=(
                advice(
                    "",
                    (
                        "Use torch.no_grad in place of inference_mode there, or clone the "
                        "tensors outside it."
                    ),
                ),
            ),
        ),
        Trouble(
            code="ERR671",
            name="autograd-graph-broken",
            family=Family.LEARNING,
            texts=(
                "has been modified by an inplace operation",
                "Trying to backward through the graph a second time",
                (
                    "a view of a leaf Variable that requires grad is being used in an "
                    "in-place operation"
                ),
            ),
            what="The backward pass needs values that were overwritten or freed.",
            why=(
                "A tensor of the forward pass was changed in place, or one graph is used for "
                "two backward passes (a loss that is kept over steps)."
            ),
            fixes=(
                advice(
                    "",
                    (
                        "torch.autograd.set_detect_anomaly(True) names the operation; "
                        "replace the in-place change, detach what is carried over steps, and "
                        "compute each loss anew."
                    ),
                ),
            ),
        ),
    ),
    run_goes_on=("ERR667",),
)
