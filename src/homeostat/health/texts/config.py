"""Error texts of the family config: settings that contradict each other, model or cluster."""

from __future__ import annotations

from homeostat.health.finding import Cause, Confidence, Family
from homeostat.health.texts.conditions import first_failures
from homeostat.health.texts.parts import advice, change, safe
from homeostat.health.texts.trouble import Trouble
from homeostat.health.view import RunView


def _nothing_was_trained(view: RunView) -> bool:
    return not view.metrics


_BATCHES = (
    Trouble(
        code="ERR400",
        name="generations-not-dividing-batch",
        family=Family.CONFIG,
        texts=(
            "evenly divisible by the number of generations per prompt",
            "must be divisible by num_generations",
            "must be divisible by the number of generations",
            "not divisible by num_generations",
            "must be divisible by n_samples_per_prompt",
            "not divisible by n_samples_per_prompt",
            "generation_batch_size * must be divisible by",
            "must be a multiple of num_generations",
            "should be divisible by num_generations",
        ),
        what=(
            "The samples of one step cannot be cut into whole groups: the batch is no "
            "multiple of the samples per prompt."
        ),
        why=(
            "Group advantages need all samples of a prompt in one step. The batch over all "
            "processes (processes x per-device batch x steps per generation) counts samples, "
            "not prompts, so it must be a multiple of the group."
        ),
        fixes=(
            change(
                "rollout.samples_per_prompt",
                "a divisor of the batch over all processes",
                "Each prompt's group must fit the batch a whole number of times.",
                trl="num_generations",
                ms_swift="--num_generations",
            ),
            advice(
                "",
                (
                    "Or raise the per-device batch or the accumulation until processes x "
                    "batch is a multiple of the group; a GPU that serves the engine does not "
                    "count."
                ),
                trl="per_device_train_batch_size",
                axolotl="micro_batch_size",
                ms_swift="--per_device_train_batch_size",
            ),
        ),
    ),
    Trouble(
        code="ERR401",
        name="group-size-one",
        family=Family.CONFIG,
        texts=(
            "number of generations per prompt (1)",
            "requires at least 2 generations per prompt",
            "num_generations must be greater than 1",
            "num_generations must be at least 2",
            "n_samples_per_prompt must be greater than 1",
            "n_samples_per_prompt > 1",
            "n_samples_per_prompt must be > 1",
            "requires num_generations > 1",
            "at least 2 samples per prompt",
        ),
        what=(
            "One sample per prompt: a group of one has no spread, so its advantage is undefined."
        ),
        why=(
            "GRPO-like methods compare the samples of a prompt with each other; with one "
            "there is nothing to compare."
        ),
        fixes=(
            change(
                "rollout.samples_per_prompt",
                "8 (at least 2)",
                "Several samples of each prompt are compared with each other.",
                trl="num_generations",
                ms_swift="--num_generations",
            ),
            advice(
                "",
                (
                    "Raise the per-device batch with it, so that groups fit the batch; or "
                    "choose a method with another baseline (REINFORCE++, PPO)."
                ),
            ),
        ),
        explains=("ERR400",),
    ),
    Trouble(
        code="ERR402",
        name="micro-batch-exceeds-mini-batch",
        family=Family.CONFIG,
        texts=(
            "normalized ppo_mini_batch_size * should be larger than",
            "normalized ppo_mini_batch_size * should be divisible by",
            "ppo_mini_batch_size * must be divisible by ppo_micro_batch_size",
            "mini_batch_size * is smaller than * micro_batch_size",
            "micro_batch_size * must be * than * mini_batch_size",
            "gradient accumulation steps * must be greater than 0",
            "gradient_accumulation_steps must be >= 1, got 0",
            "Gradient accumulation steps: 0 has to be greater than 0",
            "ppo_micro_batch_size_per_gpu * larger than",
            "should be larger than 0 after normalization",
            "train_batch_size >= config.actor_rollout_ref.actor.ppo_mini_batch_size",
            "train_batch_size * must be * ppo_mini_batch_size",
        ),
        what=(
            "The micro batch of a GPU is larger than its share of the mini batch, or does "
            "not divide it."
        ),
        why=(
            "The mini batch (times samples per prompt) is split over the GPUs; what each "
            "gets is cut into micro batches. With a micro batch above that share the "
            "accumulation count becomes 0."
        ),
        fixes=(
            safe(
                "trainer.micro_batch_rows",
                "a divisor of mini batch x samples per prompt / GPUs",
                "The update is the same; it is only cut differently.",
                verl="actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
                openrlhf="--train.micro_batch_size",
                lightrft="--micro_train_batch_size",
            ),
            change(
                "trainer.updates_per_step",
                "fewer",
                "Or a larger mini batch.",
                verl="actor_rollout_ref.actor.ppo_mini_batch_size",
            ),
        ),
        explains=("ERR404",),
    ),
    Trouble(
        code="ERR403",
        name="batch-arithmetic-inconsistent",
        family=Family.CONFIG,
        texts=(
            (
                "train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * "
                "world_size"
            ),
            "Check batch related parameters",
            "Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided",
            "Train batch size: * has to be greater than 0",
            "train_batch_size * != micro",
        ),
        what="DeepSpeed's three batch sizes do not multiply up.",
        why=(
            "train_batch_size must be the micro batch per GPU x gradient accumulation x "
            "number of processes; one was set by hand for another number of processes."
        ),
        fixes=(
            advice(
                "",
                (
                    "Set all of train_batch_size, train_micro_batch_size_per_gpu and "
                    'gradient_accumulation_steps to "auto" in the DeepSpeed config, or '
                    "recompute them for this number of processes; start with the launcher, "
                    "so that the world size is known."
                ),
            ),
        ),
        explains=("ERR411",),
    ),
    Trouble(
        code="ERR404",
        name="batch-not-divisible",
        family=Family.CONFIG,
        texts=(
            "only support equal chunk. Got size of DataProto",
            "must be divisible by minimal possible batch size",
            "real_train_batch_size * must be divisible by",
            "batch size * must be divisible by world size",
            "batch_size * must be divisible by * world_size",
            "global batch size * is not divisible by",
            "global_batch_size * is not divisible by",
            "is not divisible by data parallel size",
            "must be divisible by the number of processes",
            "must be divisible by n_gpus",
            "rollout_batch_size * must be divisible by",
            "train_batch_size * must be divisible by",
            "train_batch_size should be divisible by",
            "is not divisible by micro batch size",
            "global_batch_size must be divisible",
            "must be divisible by dp_size",
            "batch size * is not divisible by * data parallel",
        ),
        what="A batch cannot be split evenly over the processes or micro batches.",
        why=(
            "Each data-parallel rank must get the same number of rows, and each micro batch "
            "must be full."
        ),
        fixes=(
            change(
                "trainer.batch_rows",
                "a multiple of GPUs x micro batch",
                "Every rank then gets whole micro batches.",
                verl="data.train_batch_size",
                slime="--global-batch-size",
                miles="--global-batch-size",
                openrlhf="--train.batch_size",
                lightrft="--train_batch_size",
            ),
            change(
                "rollout.prompts_per_step",
                "a multiple of the ranks",
                "Prompts x samples per prompt must split over the ranks.",
            ),
        ),
    ),
    Trouble(
        code="ERR405",
        name="heads-not-dividing-tp",
        family=Family.CONFIG,
        texts=(
            "num_attention_heads * must be a multiple of tensor",
            "num_query_groups * must be a multiple of tensor",
            "is not divisible by tensor_parallel_size",
            "is not divisible by tensor parallel",
            "is not divisible by the tensor",
        ),
        what=(
            "The model's heads or width cannot be split by this tensor- or sequence-parallel "
            "degree."
        ),
        why=(
            "Each device gets whole attention heads; the degree must divide their number "
            "(and often that of the key/value heads)."
        ),
        fixes=(
            safe(
                "engine.tensor_parallel_size",
                "a divisor of the number of attention and key/value heads",
                "The heads then split evenly.",
                slime="--rollout-num-gpus-per-engine",
            ),
            advice(
                "",
                (
                    "For the trainer alike: tensor- and Ulysses degree must divide the heads "
                    "(see config.json)."
                ),
                verl="actor_rollout_ref.actor.ulysses_sequence_parallel_size",
                chatlearn="models.policy_trainer.ulysses_sequence_parallel_size",
                slime="--tensor-model-parallel-size",
            ),
        ),
    ),
    Trouble(
        code="ERR406",
        name="parallel-degrees-mismatch",
        family=Family.CONFIG,
        texts=(
            "Invalid parallel dims",
            "!= WORLD_SIZE(",
            "parallel degrees * must multiply",
            "is not equal to the world size",
        ),
        what="The parallel degrees do not multiply up to the number of processes.",
        why=(
            "Data, tensor, pipeline, context and expert degrees together must make up the "
            "world size."
        ),
        fixes=(
            safe(
                "cluster.processes",
                "",
                "Start as many processes as the degrees multiply to.",
                torchtitan="parallelism.data_parallel_shard_degree",
            ),
            advice(
                "",
                (
                    "Or leave one degree (data-parallel shard) at -1 or auto, so that it "
                    "takes what is left."
                ),
            ),
        ),
    ),
    Trouble(
        code="ERR407",
        name="replay-buffer-never-full",
        family=Family.CONFIG,
        texts=(
            "num_rollouts_per_episodes = 0",
            "num_rollouts_per_episodes=0",
            "num_rollouts_per_episodes: 0",
            "num_rollouts_per_episodes should be",
            "num_rollouts_per_episodes must be",
            "num_update_steps_per_episodes = 0",
            "num_update_steps_per_episodes: 0",
            "replay buffer * smaller than train_batch_size",
            "not enough samples in the replay buffer",
            "replay buffer && skipping train",
            "replay buffer && waiting for a full batch",
            "replay buffer is not full",
            "replay buffer && no training step",
        ),
        what=(
            "No training step would run: one rollout batch, or one training batch, is larger "
            "than what the prompts give."
        ),
        why=(
            "The number of rollouts per episode is computed by whole-number division; where "
            "the prompts (times samples and epochs) are fewer than one batch, it is 0."
        ),
        fixes=(
            change(
                "rollout.prompts_per_step",
                "at most the number of prompts",
                "So that at least one rollout fits an episode.",
                openrlhf="--rollout.batch_size",
                lightrft="--rollout_batch_size",
            ),
            change(
                "trainer.batch_rows",
                "at most prompts per rollout x samples per prompt",
                "So that one rollout fills at least one training batch.",
                openrlhf="--train.batch_size",
                lightrft="--train_batch_size",
            ),
            advice(
                "",
                "Or give more prompts (check that the dataset's limit and split are as meant).",
                openrlhf="--data.max_samples",
                lightrft="--max_samples",
            ),
        ),
        explains=("ERR430",),
    ),
    Trouble(
        code="ERR430",
        name="replay-buffer-never-full",
        family=Family.CONFIG,
        texts=("Episode [* 100%",),
        unless=("Train epoch", "Global step", "policy_loss", "act_loss", "Traceback", "Error"),
        when=_nothing_was_trained,
        what="All episodes were sampled and the job ended, but no training step was ever run.",
        why=(
            "The samples that were collected never filled one training batch: the rollout or "
            "training batch is larger than what one pass over the prompts gives."
        ),
        fixes=(
            change(
                "trainer.batch_rows",
                "at most prompts per rollout x samples per prompt",
                "So that one rollout fills a training batch.",
                openrlhf="--train.batch_size",
                lightrft="--train_batch_size",
            ),
            change(
                "rollout.prompts_per_step",
                "lower",
                "Or fewer prompts per rollout, more prompts, or more episodes.",
                openrlhf="--rollout.batch_size",
                lightrft="--rollout_batch_size",
            ),
        ),
        confidence=Confidence.INFERRED,
    ),
)

_KEYS = (
    Trouble(
        code="ERR408",
        name="unknown-setting",
        family=Family.CONFIG,
        texts=(
            "is not in struct",
            "Could not override",
            "ConfigAttributeError",
            "Extra inputs are not permitted",
            "extra fields not permitted",
            "error: unrecognized arguments",
            "Some keys are not used by the HfArgumentParser",
            "Some specified arguments are not used by the HfArgumentParser",
            "Config.__init__() got an unexpected keyword argument",
            "Arguments.__init__() got an unexpected keyword argument",
            "ConfigKeyError",
            "Unknown config key",
            "unknown configuration key",
            "No such option:",
            "ConfigCompositionException",
            "Error merging override",
        ),
        what="A setting is not known to this version of the framework.",
        why=(
            "It is misspelt, stands in the wrong section, or was added, renamed or removed "
            "in another version."
        ),
        causes=(
            Cause("unknown-setting", "the message names the key"),
            Cause(
                "library-version-mismatch",
                ("the key may belong to another version of the framework"),
            ),
        ),
        fixes=(
            advice(
                "",
                (
                    "Look the key up in the documentation of the installed version; hydra "
                    "overrides of keys that the schema lacks need a leading +."
                ),
            ),
        ),
    ),
    Trouble(
        code="ERR409",
        name="setting-missing",
        family=Family.CONFIG,
        texts=(
            "MissingMandatoryValue",
            "Missing mandatory value",
            "the following arguments are required:",
            "Field required",
            "error: the following arguments are required",
            "must be specified when using",
            "Please set at least one of",
        ),
        what="A setting that has no default was not given.",
        why="The framework cannot guess it.",
        fixes=(advice("", "Give the setting that the message names."),),
    ),
    Trouble(
        code="ERR410",
        name="settings-exclusive",
        family=Family.CONFIG,
        texts=(
            "are mutually exclusive",
            "can not be both configured at the same time",
            "cannot both be",
            "not allowed with argument",
            "At most one of fp16 and bf16 can be True",
            "You cannot specify both",
            "cannot be set at the same time",
            "cannot be used together",
            "cannot be used at the same time",
            "can't be set to True simultaneously",
            "requires the save and eval strategy to match",
            "but not both",
            "is not compatible with `",
            "are incompatible. Please",
            "option is not compatible with",
        ),
        what="Two settings exclude each other.",
        why="They ask for different things in the same place; the framework refuses to choose.",
        fixes=(
            advice(
                "",
                (
                    "Keep one of the two that the message names and drop the other, also "
                    "where a preset or a DeepSpeed/FSDP file sets it."
                ),
            ),
        ),
        confidence=Confidence.INFERRED,
    ),
    Trouble(
        code="ERR422",
        name="setting-wrong-type",
        family=Family.CONFIG,
        texts=(
            "'<=' not supported between instances of 'float' and 'str'",
            "'<' not supported between instances of 'str' and",
            "'>' not supported between instances of 'str' and",
            "must be real number, not str",
            "Input should be a valid",
            "could not convert string to float",
            "invalid literal for int()",
            "'str' object cannot be interpreted as an integer",
            "error: argument --*: invalid",
            "unsupported operand type(s) for *: 'str' and 'float'",
            "can't multiply sequence by non-int of type 'float'",
        ),
        what="A setting has the wrong type: text where a number is needed, say.",
        why=(
            "YAML reads 1e-5 as text (it wants 1.0e-5), quoted numbers stay text, and "
            "environment variables are always text."
        ),
        fixes=(
            change(
                "trainer.lr",
                "1.0e-5 rather than 1e-5",
                "YAML takes a number without a dot and with an exponent for text.",
                trl="learning_rate",
            ),
            advice(
                "",
                "Else the setting that the message or the line above names: take off its quotes.",
            ),
        ),
        confidence=Confidence.INFERRED,
    ),
    Trouble(
        code="ERR424",
        name="path-missing",
        family=Family.CONFIG,
        texts=(
            "FileNotFoundError: [Errno 2] No such file or directory",
            "FileNotFoundError: Unable to find",
            "FileNotFoundError: Couldn't find",
            "NotADirectoryError",
            "Unable to find any data file",
            "No such file or directory:",
        ),
        what="A file or folder that the settings name is not there.",
        why=(
            "The path is wrong, relative to another working directory, or exists on another "
            "node only."
        ),
        fixes=(
            advice(
                "",
                (
                    "Use absolute paths that exist on every node; check the file that the "
                    "message names."
                ),
            ),
        ),
        confidence=Confidence.HEURISTIC,
    ),
    Trouble(
        code="ERR425",
        name="max-steps-missing",
        family=Family.CONFIG,
        texts=(
            "does not implement __len__, max_steps has to be specified",
            "max_steps must be set to a positive value if dataloader does not have a length",
            "max_steps has to be specified",
        ),
        what="A streamed dataset has no length, and the number of steps was not given.",
        why="Epochs cannot be counted without a length, so the schedule has no end.",
        fixes=(
            change(
                "trainer.max_steps",
                "rows / rows per update x epochs",
                "Tell how long the run is.",
                trl="max_steps",
                axolotl="max_steps",
                transformers="max_steps",
            ),
        ),
    ),
)

_SHARDING = (
    Trouble(
        code="ERR411",
        name="deepspeed-config-mismatch",
        family=Family.CONFIG,
        texts=(
            "DeepSpeed config values that mismatch TrainingArguments values",
            "The easiest method is to set these DeepSpeed config values to 'auto'",
            "mismatch TrainingArguments",
        ),
        what="The DeepSpeed config and the trainer's arguments say different things.",
        why="Learning rate, batch sizes, precision and clipping stand in both; they must agree.",
        fixes=(
            advice(
                "",
                (
                    'Set the values that the message lists to "auto" in the DeepSpeed '
                    "config: the trainer then fills them in."
                ),
            ),
        ),
    ),
    Trouble(
        code="ERR412",
        name="deepspeed-optimizer-clash",
        family=Family.CONFIG,
        texts=(
            "You cannot create a `DummyOptim`",
            "You cannot create a `DummyScheduler`",
            "DummyOptim is not an Optimizer",
            "'DummyScheduler' object has no attribute",
            "You cannot specify an optimizer in the config file and in the code",
        ),
        what="DeepSpeed's optimizer placeholder reached code that wanted a real optimizer.",
        why=(
            "An optimizer in the DeepSpeed config and one made by the trainer exclude each "
            "other; a run started without the DeepSpeed launcher (one GPU, plain python) "
            "leaves the placeholder unfilled."
        ),
        fixes=(
            advice(
                "",
                (
                    "Start with `accelerate launch` or `deepspeed` and the same config; or "
                    "take the optimizer and scheduler sections out of the DeepSpeed config; "
                    "on one GPU, train without DeepSpeed."
                ),
            ),
        ),
    ),
    Trouble(
        code="ERR415",
        name="checkpointing-mode-mismatch",
        family=Family.CONFIG,
        texts=(
            "Checkpointing is not compatible with .grad()",
            "has been marked as ready twice. This means that multiple autograd engine hooks",
            "Unpack is being triggered for a tensor that was either never recomputed",
        ),
        what="Activation checkpointing does not fit the way the model is wrapped.",
        why=(
            "Reentrant checkpointing runs the backward of a block twice, which DDP with "
            "unused-parameter search and LoRA do not allow; the other kind needs the "
            "recomputation to repeat the forward exactly (no autocast, cache or adapter "
            "change between)."
        ),
        fixes=(
            advice(
                "",
                (
                    "Set use_reentrant to false (to true where ZeRO-3 or a quantised base "
                    "complains about recomputed values)."
                ),
                trl="gradient_checkpointing_kwargs",
                axolotl="gradient_checkpointing_kwargs",
                transformers="gradient_checkpointing_kwargs",
                openrlhf="--actor.gradient_checkpointing_reentrant",
                lightrft="--gradient_checkpointing_use_reentrant",
                llama_factory="use_reentrant_gc",
            ),
            advice(
                "",
                "Set ddp_find_unused_parameters to false, and use_cache to false in the model.",
                trl="ddp_find_unused_parameters",
                axolotl="ddp_find_unused_parameters",
            ),
        ),
    ),
    Trouble(
        code="ERR420",
        name="device-map-with-distributed",
        family=Family.CONFIG,
        texts=(
            "device_map='auto'` in any distributed mode",
            (
                "loaded in 8-bit or 4-bit precision on a different device than the one "
                "you're training on"
            ),
            (
                "DeepSpeed Zero-3 is not compatible with `low_cpu_mem_usage=True` or with "
                "passing a `device_map`"
            ),
            "with passing a `device_map`",
        ),
        what="The model was spread over the GPUs by device_map while several processes train it.",
        why=(
            'device_map="auto" makes one process use all GPUs; with one process per GPU each '
            "must hold its own copy or shard."
        ),
        fixes=(
            advice(
                "",
                (
                    'Leave device_map out, or set it to {"": local rank} for 4-bit and 8-bit '
                    "bases; start a single process if you want the model spread by layers."
                ),
            ),
        ),
    ),
    Trouble(
        code="ERR429",
        name="device-mismatch",
        family=Family.CONFIG,
        texts=(
            "Expected all tensors to be on the same device",
            "found at least two devices",
            "Input and parameter tensors are not at the same device",
            "module must have its parameters and buffers on device",
            "Pointer argument (at 0) cannot be accessed from Triton",
        ),
        what="Tensors of one operation lie on different devices.",
        why=(
            "Part of the model is on the CPU or another GPU: device_map, CPU offload without "
            "its hooks, a buffer or a batch that was not moved."
        ),
        fixes=(
            advice(
                "",
                (
                    "Check that no device_map or offload setting is left over; the traceback "
                    "names the operation whose inputs differ."
                ),
            ),
        ),
        confidence=Confidence.INFERRED,
    ),
)

_MODEL = (
    Trouble(
        code="ERR416",
        name="lora-targets-missing",
        family=Family.CONFIG,
        texts=(
            "Target modules * not found in the base model",
            "Please specify `target_modules` in `peft_config`",
            "No modules were targeted for adaptation",
            "Target module * is not supported",
            "target_modules * not found",
        ),
        what=(
            "The adapter's target modules do not exist in this model, or cannot carry an adapter."
        ),
        why=(
            "Layers have other names in each architecture (q_proj, c_attn, query_key_value), "
            "and only linear, embedding and convolution layers can be adapted."
        ),
        fixes=(
            safe(
                "lora.targets",
                "all-linear",
                "Every linear layer but the head, whatever it is called.",
                trl="lora_target_modules",
                axolotl="lora_target_modules",
                verl="actor_rollout_ref.model.target_modules",
                llama_factory="lora_target",
                ms_swift="--target_modules",
            ),
        ),
    ),
    Trouble(
        code="ERR417",
        name="quantised-base-not-trainable",
        family=Family.CONFIG,
        texts=(
            "You cannot perform fine-tuning on purely quantized models",
            "that quantization method do not support training",
            "cannot fine-tune quantized model",
            "Quantized models do not support full fine-tuning",
            "Quantization is only compatible with the LoRA",
            "only supports LoRA* quantiz",
        ),
        what=(
            "A quantised model was to be trained as a whole; only an adapter on top of it can be."
        ),
        why=(
            "4-bit and 8-bit weights have no gradient. Some quantisation methods do not even "
            "let gradients through."
        ),
        fixes=(
            change(
                "lora",
                "a section with rank and alpha",
                "Train an adapter on the quantised base.",
                axolotl="adapter=qlora",
                trl="use_peft=true",
                llama_factory="finetuning_type=lora",
            ),
            advice(
                "",
                "Or load the model unquantised in bf16.",
                axolotl="load_in_4bit",
                trl="load_in_4bit",
            ),
        ),
    ),
    Trouble(
        code="ERR418",
        name="length-limit-inconsistent",
        family=Family.CONFIG,
        texts=(
            "should be greater than total sequence length",
            "max_model_len * must be greater than",
            "must be at least prompt_length + response_length",
            "max_num_batched_tokens is smaller than max_model_len",
        ),
        what=(
            "Prompt and answer lengths, the engine's limit and the model's context do not "
            "fit together."
        ),
        why=(
            "The engine needs max prompt + max new tokens within its own length limit, which "
            "may not exceed the model's context (unless RoPE is scaled), and its token "
            "budget per batch must hold one whole sequence."
        ),
        fixes=(
            change(
                "rollout.max_new_tokens",
                "limit minus the longest prompt",
                "Prompt and answer must fit the model together.",
                trl="max_completion_length",
                verl="data.max_response_length",
            ),
            change(
                "data.max_length",
                "shorter",
                "Or drop longer prompts.",
                verl="data.max_prompt_length",
            ),
            advice(
                "",
                "Or raise the engine's limit up to the model's context.",
                verl="actor_rollout_ref.rollout.max_model_len",
                trl="vllm_max_model_length",
                vllm="--max-model-len",
                openrlhf="--data.max_len",
                lightrft="--max_len",
                slime="--sglang-context-length",
            ),
        ),
    ),
    Trouble(
        code="ERR419",
        name="token-budget-below-sequence",
        family=Family.CONFIG,
        texts=(
            "max_token_len must be greater than the sequence length",
            "max_token_len * max_seq_len",
            "exceeds max_tokens_per_gpu",
            "longer than max_tokens_per_gpu",
            "max_token_in_packing * smaller",
            "exceeds the token budget",
        ),
        what="A single sequence is longer than the token budget of a micro batch.",
        why=(
            "With dynamic batches each micro batch holds at most so many tokens per GPU "
            "(times the sequence-parallel degree); one full prompt and answer must fit."
        ),
        fixes=(
            safe(
                "trainer.max_tokens_per_device",
                "at least prompt + answer length / sequence-parallel degree",
                "So that the longest sequence fits one micro batch.",
                verl="actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
                slime="--max-tokens-per-gpu",
                miles="--max-tokens-per-gpu",
                chatlearn="models.policy_trainer.max_token_in_packing",
            ),
            advice(
                "",
                "Or split long sequences over GPUs.",
                verl="actor_rollout_ref.actor.ulysses_sequence_parallel_size",
                slime="--context-parallel-size",
                miles="--context-parallel-size",
                chatlearn="models.policy_trainer.ulysses_sequence_parallel_size",
            ),
        ),
    ),
    Trouble(
        code="ERR423",
        name="greedy-sampling",
        family=Family.CONFIG,
        texts=(
            (
                "has to be a strictly positive float, otherwise your next token scores will "
                "be invalid"
            ),
            "temperature must be positive",
            "temperature must be > 0",
            "temperature is 0: greedy decoding",
        ),
        what="The sampling temperature is 0 or negative.",
        why=(
            "RL learns from different samples of a prompt; greedy decoding gives one, and "
            "dividing by 0 is undefined."
        ),
        fixes=(change("rollout.temperature", "1.0", "Sample from the policy itself."),),
    ),
    Trouble(
        code="ERR427",
        name="attention-unsupported",
        family=Family.CONFIG,
        texts=(
            "does not support Flash Attention 2",
            "does not support Flash Attention 3",
            "does not support an attention implementation through",
            "Specified `attn_implementation=* is not supported",
            "FlashAttention* only supports head dimension",
            "forward only supports head dimension at most",
            "does not support torch.nn.functional.scaled_dot_product_attention",
            "Valid backends are",
        ),
        what="This model or GPU does not have the attention kernel that was asked for.",
        why="Kernels support certain architectures, head sizes and GPUs only.",
        fixes=(
            safe(
                "model.attention",
                "sdpa (or eager)",
                "Torch's attention works for nearly every model.",
                trl="attn_implementation",
                axolotl="attn_implementation",
                llama_factory="flash_attn",
                ms_swift="--attn_impl",
            ),
            advice("", "For the engine choose another attention backend."),
        ),
    ),
)

TROUBLES: tuple[Trouble, ...] = first_failures(_BATCHES + _KEYS + _SHARDING + _MODEL)
