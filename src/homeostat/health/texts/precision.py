"""Error texts of the family precision: dtypes, fp16, bf16, fp8, int4 and 8-bit weights."""

from __future__ import annotations

from homeostat.health.finding import Cause, Family, Level
from homeostat.health.texts.conditions import first_failures
from homeostat.health.texts.parts import advice, change, safe
from homeostat.health.texts.trouble import Trouble

_DTYPES_DIFFER = (
    "expected scalar type * but found",
    "expected mat1 and mat2 to have the same dtype",
    "mat1 and mat2 must have the same dtype",
    "expected m1 and m2 to have the same dtype",
    "self and mat2 must have the same dtype",
    "Input type * and bias type * should be the same",
    "Input type * and weight type * should be the same",
    "expected dtype * but got dtype",
    "Index put requires the source and destination dtypes match",
    "query and key must have the same dtype",
    "Expected query, key, and value to have the same dtype",
    "query, key, and value must have the same dtype",
    "expected input to have * dtype",
    "Found dtype * but expected",
)

_HALF = (
    Trouble(
        code="ERR600",
        name="bf16-numpy-unsupported",
        family=Family.PRECISION,
        texts=(
            "Got unsupported ScalarType BFloat16",
            "unsupported ScalarType BFloat16",
            "can't convert * bfloat16 * numpy",
        ),
        what="A bf16 tensor was converted to NumPy, which has no such type.",
        why="NumPy knows float16 and float32 only.",
        fixes=(advice("", "Cast first: tensor.float().cpu().numpy()."),),
    ),
    Trouble(
        code="ERR601",
        name="value-head-dtype-mismatch",
        family=Family.PRECISION,
        texts=_DTYPES_DIFFER,
        context=(
            "value_head",
            "v_head",
            "valuehead",
            "modeling_value_head",
            "critic",
            "value_model",
        ),
        within=8,
        what="The value head and the model below it have different dtypes.",
        why=(
            "The head is added in float32 while the backbone runs in bf16 or fp16, and "
            "nothing casts between."
        ),
        fixes=(
            advice(
                "",
                (
                    "Cast the head (and norms kept in fp32) to the backbone's dtype, or run "
                    "under autocast; newer versions of the trainer do it."
                ),
            ),
            change(
                "trainer.precision",
                "bf16",
                "Use bf16 for both, not fp16: fp16 turns the error into NaN.",
            ),
        ),
        explains=("ERR602",),
    ),
    Trouble(
        code="ERR602",
        name="dtype-mismatch",
        family=Family.PRECISION,
        texts=_DTYPES_DIFFER,
        what="Tensors of different dtypes meet in one operation.",
        why=(
            "Part of the model (adapter, head, norm, a module kept in fp32 for quantised "
            "training) has another dtype, and no autocast stands around it."
        ),
        fixes=(
            advice(
                "",
                (
                    "Load the model in the dtype that is trained in, cast added modules to "
                    "it, or run the forward under torch.autocast; the traceback names the "
                    "module."
                ),
            ),
            change(
                "trainer.precision",
                "bf16",
                "One dtype for all compute.",
                transformers="bf16",
            ),
        ),
    ),
    Trouble(
        code="ERR603",
        name="flash-attention-needs-half",
        family=Family.PRECISION,
        texts=(
            "FlashAttention only support fp16 and bf16 data type",
            "FlashAttention only supports fp16 and bf16",
            "Flash Attention only supports fp16 and bf16",
            "ValueError: Flash Attention 2.0 only supports torch.float16 and torch.bfloat16",
            "FlashAttention only support fp16, bf16",
        ),
        what="FlashAttention was given float32 tensors.",
        why=(
            "Its kernels exist for fp16 and bf16 only; the model was loaded in float32, or a "
            "layer (norm, rotary, adapter) returned float32."
        ),
        fixes=(
            change("trainer.precision", "bf16", "Train in bf16."),
            safe(
                "model.attention",
                "sdpa",
                "Torch's attention works in float32, too.",
                trl="attn_implementation",
            ),
            advice(
                "",
                "Or load the model with torch_dtype=bfloat16 and keep autocast on in evaluation.",
            ),
        ),
        explains=("ERR602",),
    ),
    Trouble(
        code="ERR605",
        name="fp16-weights-with-scaler",
        family=Family.PRECISION,
        texts=("Attempting to unscale FP16 gradients",),
        what="The gradient scaler met fp16 gradients: the trained weights themselves are fp16.",
        why=(
            "Mixed fp16 keeps trained weights in float32 and scales the loss; here the model "
            "was loaded in fp16 and its weights (or the adapter's) are trained as they are."
        ),
        fixes=(
            change(
                "trainer.precision",
                "bf16",
                "bf16 needs no scaler.",
                transformers="bf16",
            ),
            advice(
                "",
                (
                    "Or load trained weights in float32 (adapters: cast their parameters to "
                    "float32) and leave fp16 to autocast."
                ),
            ),
        ),
    ),
    Trouble(
        code="ERR609",
        name="bf16-unsupported-gpu",
        family=Family.PRECISION,
        texts=(
            "Your setup doesn't support bf16/gpu",
            "Bfloat16 is only supported on GPUs with compute capability",
            "Current CUDA Device does not support bfloat16",
            "bf16 is not supported on this",
            "does not support bfloat16",
            "BF16 is not supported",
            "bf16 requested, but AMP is not supported on this GPU",
        ),
        what="This GPU (or build) does not support bf16.",
        why=(
            "bf16 needs Ampere or newer; T4, V100 and older lack it. A CPU-only torch says "
            "the same."
        ),
        fixes=(
            change(
                "trainer.precision",
                "fp32 (or fp16 with loss scaling where the framework has it)",
                "The older GPUs compute in fp16 and fp32.",
                trl="fp16",
                axolotl="fp16",
                llama_factory="fp16",
                transformers="fp16",
                vllm="--dtype=half",
            ),
            advice("", "Check that torch sees the GPU at all (torch.cuda.is_available())."),
        ),
    ),
    Trouble(
        code="ERR618",
        name="half-precision-on-cpu",
        family=Family.PRECISION,
        texts=(
            "not implemented for 'Half'",
            "FP16 Mixed precision training with AMP or APEX * can only be used on CUDA devices",
            "can only be used on CUDA devices",
            "fp16 mixed precision requires a GPU",
        ),
        what="fp16 is used on the CPU, or by an operation that has no fp16 version.",
        why="Most CPU kernels have no fp16 version; the GPU may not have been found.",
        fixes=(
            change(
                "trainer.precision",
                "fp32 (or bf16)",
                "Both work on the CPU.",
                trl="fp16",
                axolotl="fp16",
                transformers="fp16",
            ),
            advice("", "If there should be a GPU: torch.cuda.is_available() tells."),
        ),
    ),
    Trouble(
        code="ERR619",
        name="operation-without-bf16",
        family=Family.PRECISION,
        texts=(
            "not implemented for 'BFloat16'",
            "not implemented for 'Float8_e4m3fn'",
            "not implemented for 'Float8",
        ),
        what="An operation has no version for bf16 (or fp8) in this torch.",
        why="Some kernels exist for float32 only, or came with a later torch.",
        fixes=(
            advice(
                "",
                ("Upgrade torch, or cast to float32 around the operation that the message names."),
            ),
        ),
    ),
)

_FP8 = (
    Trouble(
        code="ERR606",
        name="fp8-unsupported-layer",
        family=Family.PRECISION,
        texts=(
            "requires quantizable tensor",
            "Float8BlockQuantizer",
            "is not quantizable",
            "Float8CurrentScalingQuantizer",
            "MXFP8Quantizer",
            "does not support FP8",
            "not supported with FP8",
            "not supported in FP8",
            "FP8 is not supported for this layer",
        ),
        context=("Error:", "AssertionError"),
        within=3,
        what="A layer cannot be quantised to FP8, and the recipe tries to.",
        why=(
            "Small or odd projections (indexers, routers, gates, heads) do not fit the block "
            "scaling, or their collectives have no FP8 version."
        ),
        fixes=(
            advice(
                "",
                "Keep that layer (and head, embeddings, router) in bf16.",
                miles="--te-precision-config-file",
                slime="--te-precision-config-file",
            ),
            advice(
                "",
                "Or use another FP8 recipe, or bf16 for training.",
                miles="--fp8-recipe",
                slime="--fp8-recipe",
            ),
        ),
        explains=("ERR607",),
    ),
    Trouble(
        code="ERR607",
        name="fp8-shape-not-divisible",
        family=Family.PRECISION,
        texts=(
            "FP8 execution requires",
            "divisible by 8 and width divisible by 16",
            "is not divisible by weight quantization block",
            "not divisible by weight quantization block_n",
            "Expected * to be divisible by 16",
            "_scaled_mm* && divisible",
            "must be divisible by 128 && fp8",
            "divisible by 16 && fp8",
            "dimensions are not compatible with block size",
        ),
        what="A matrix's size is no multiple of what FP8 kernels need.",
        why=(
            "FP8 products want sizes that are multiples of 16, and block scaling multiples "
            "of 128; a tensor-parallel split or an odd number of tokens breaks that."
        ),
        causes=(
            Cause("fp8-shape-not-divisible", "the message names the sizes"),
            Cause("fp8-unsupported-layer", "a layer of this shape cannot run in FP8 as it is"),
        ),
        fixes=(
            safe(
                "engine.tensor_parallel_size",
                "smaller",
                "So that each device's part stays a multiple of the block.",
            ),
            advice(
                "",
                (
                    "Pad the batch's tokens to a multiple of 16 (128 for block scaling), or "
                    "keep that layer in bf16."
                ),
                miles="--te-precision-config-file",
                slime="--te-precision-config-file",
            ),
        ),
    ),
    Trouble(
        code="ERR608",
        name="fp8-unsupported-gpu",
        family=Family.PRECISION,
        texts=(
            "compute capability 8.9 or higher required for FP8",
            "fp8e4nv data type is not supported on CUDA arch",
            "type fp8e4nv not supported in this architecture",
            "torch._scaled_mm is only supported on CUDA devices with compute capability",
            "FP8 is only supported on",
            "FP8 * is only supported on * Hopper",
            "fp8 quantization is not supported on this GPU",
            "Minimum capability: 89",
            "The quantization method fp8 is not supported for the current GPU",
        ),
        what="This GPU has no FP8 units.",
        why=(
            "FP8 needs Ada or Hopper and newer (compute capability 8.9 or 9.0); block-scaled "
            "and MX formats need still newer ones."
        ),
        fixes=(
            change("trainer.precision", "bf16", "Train in bf16 on this GPU."),
            advice(
                "",
                "For the engine: load bf16 weights or an INT8/INT4 version.",
                vllm="--quantization",
                verl="actor_rollout_ref.rollout.quantization",
            ),
        ),
    ),
)

_QUANTISED = (
    Trouble(
        code="ERR610",
        name="merge-gptq-unsupported",
        family=Family.PRECISION,
        texts=(
            "Cannot merge LORA layers when the model is gptq quantized",
            "Cannot merge LORA layers when",
            "Cannot merge adapters to a quantized model",
            "Please merge adapters before quantizing the model",
            "Cannot merge * quantized",
            "merging is not supported for * quantized",
            "merge_and_unload* && not supported",
            "does not support merging",
        ),
        what="An adapter cannot be merged into quantised (GPTQ, AWQ, 4-bit) weights.",
        why="The quantised weights cannot hold the sum; it would have to be quantised anew.",
        fixes=(
            advice(
                "",
                (
                    "Serve the base with the adapter beside it, or load the bf16 base, merge "
                    "there, and quantise the result."
                ),
            ),
            safe("lora.export", "adapter", "Export the adapter alone."),
        ),
    ),
    Trouble(
        code="ERR611",
        name="merge-into-quantised-base",
        family=Family.PRECISION,
        texts=(
            "Merge lora module to 4-bit linear may get different generations",
            "Merge lora module to 8-bit linear may get different generations",
        ),
        what="The adapter was merged into quantised weights, which rounds much of it away.",
        why=(
            "After the sum the weights are quantised again; the small change of the adapter "
            "falls partly below the step size."
        ),
        fixes=(
            advice(
                "", "Merge into the bf16 base instead: load it unquantised, then merge and save."
            ),
        ),
        level=Level.WARN,
    ),
    Trouble(
        code="ERR612",
        name="quantised-weights-misused",
        family=Family.PRECISION,
        texts=(
            "Blockwise quantization only supports 16/32-bit floats",
            "`.to` is not supported for `4-bit` or `8-bit`",
            "FP4 quantization state not initialized",
            "Some modules are dispatched on the CPU or the disk",
            "only Tensors of floating point dtype can require gradients",
            "only Tensors of floating point and complex dtype can require gradients",
            "Only Tensors of floating point",
            "Params4bit",
            "Int8Params",
        ),
        context=("Error:", "Traceback"),
        what="4-bit or 8-bit weights were moved, cast, trained or offloaded like ordinary ones.",
        why=(
            "They are packed integers with scales beside them: they cannot be cast or "
            "require gradients, and must lie on the GPU as a whole."
        ),
        fixes=(
            advice(
                "",
                (
                    "Leave .to() and dtype casts away, train an adapter only, and make room "
                    "so that the whole model fits the GPU."
                ),
            ),
            advice(
                "",
                "Or load the model unquantised.",
                axolotl="load_in_4bit",
                trl="load_in_4bit",
                llama_factory="quantization_bit",
            ),
        ),
    ),
    Trouble(
        code="ERR613",
        name="quantisation-method-mismatch",
        family=Family.PRECISION,
        texts=(
            "Quantization method specified in the model config * does not match",
            "Unknown quantization method",
            "Unknown quantization type, got",
            "is not supported for quantization method",
            "has no `quant_method` attribute",
            "Cannot find the config file for awq",
            "Cannot find the config file for gptq",
            "quantization_config * conflict",
            "already quantized with",
        ),
        what=(
            "The checkpoint's quantisation and the one that was asked for, or its dtype, do "
            "not fit."
        ),
        why=(
            "A quantised checkpoint names its method in config.json; another one, or a dtype "
            "that the method lacks, cannot be applied to it."
        ),
        fixes=(
            advice(
                "",
                (
                    "Take the quantisation setting out (the checkpoint says it itself) or "
                    "use the unquantised model; AWQ and GPTQ kernels often want --dtype "
                    "half."
                ),
                vllm="--quantization",
                sglang="--quantization",
                llama_factory="quantization_method",
            ),
        ),
    ),
    Trouble(
        code="ERR614",
        name="quant-group-not-dividing",
        family=Family.CONFIG,
        texts=(
            "group_size * must divide",
            "not divisible by group_size",
            "is not divisible by group size",
            "must be divisible by group_size",
            "is not divisible by min_thread_k",
            "The input size is not aligned with the quantized weight shape",
            "The output size is not aligned with the quantized weight shape",
            "not divisible by the group size",
        ),
        what=(
            "The quantisation group does not divide the layer's width (or its "
            "tensor-parallel part)."
        ),
        why=(
            "Each group of weights shares a scale; a layer's input width must be a whole "
            "number of groups on each device."
        ),
        fixes=(
            advice(
                "",
                (
                    "Use a smaller group that divides the width (64 or 32): smaller groups "
                    "also lose less accuracy; larger ones lose more."
                ),
            ),
            safe(
                "engine.tensor_parallel_size",
                "smaller",
                "So that each part is a whole number of groups.",
            ),
        ),
    ),
)

TROUBLES: tuple[Trouble, ...] = first_failures(_HALF + _FP8 + _QUANTISED)
