"""Error texts of the family checkpoint: saving, loading, resuming, exporting weights."""

from __future__ import annotations

from homeostat.health.finding import Cause, Confidence, Family, Level
from homeostat.health.texts.conditions import first_failures
from homeostat.health.texts.parts import advice, safe
from homeostat.health.texts.trouble import Trouble

_SAVING = (
    Trouble(
        code="ERR550",
        name="disk-full-or-quota",
        family=Family.CHECKPOINT,
        texts=(
            "No space left on device",
            "Disk quota exceeded",
            "PytorchStreamWriter failed writing",
            "inline_container.cc* file write failed",
            "inline_container.cc* unexpected pos",
            "[Errno 28]",
            "[Errno 122]",
            "Not enough free disk space",
            "not enough disk space",
            "Cannot save checkpoint",
            "File too large",
            "I/O error: StorageFull",
            "StorageFull",
        ),
        unless=("/dev/shm", "shared memory segment"),
        what="Writing failed: the disk, or the quota on it, is full.",
        why=(
            "A training checkpoint holds weights, master weights and two optimizer moments: "
            "12 to 16 bytes per parameter, many times the size of the exported model. A "
            "write that breaks off in the middle of a file is the same trouble."
        ),
        fixes=(
            safe(
                "checkpoint.keep_last",
                "1 or 2",
                "Fewer checkpoints on disk; the newest stays.",
                trl="save_total_limit",
                axolotl="save_total_limit",
                transformers="save_total_limit",
                llama_factory="save_total_limit",
                verl="trainer.max_actor_ckpt_to_keep",
                openrlhf="--ckpt.max_num",
                lightrft="--max_ckpt_num",
            ),
            safe(
                "checkpoint.max_bytes",
                "what the disk can spare",
                "Old checkpoints go before the disk is full.",
                lightrft="--max_ckpt_mem",
                openrlhf="--ckpt.max_mem",
            ),
            safe("checkpoint.interval_steps", "longer", "Save less often."),
            advice(
                "",
                (
                    "Free space (`df -h`, quota of the home folder, caches), or save to a "
                    "larger volume; weights without optimizer state take far less where no "
                    "resume is needed."
                ),
                trl="save_only_model",
                axolotl="save_only_model",
                llama_factory="save_only_model",
                transformers="save_only_model",
                openrlhf="--ckpt.output_dir",
                lightrft="--save_path",
            ),
        ),
        explains=("ERR345", "ERR353", "ERR558"),
    ),
    Trouble(
        code="ERR563",
        name="tied-weights-save",
        family=Family.CHECKPOINT,
        texts=(
            "Some tensors share memory, this will lead to duplicate memory on disk",
            "The weights trying to be saved contained shared tensors",
            "A potential way to correctly save your model is to use `save_model`",
        ),
        what=(
            "Saving was refused: tensors share memory (tied embeddings) in a way that the "
            "format does not allow."
        ),
        why=(
            "safetensors writes each tensor once; shared ones must be known as tied by the model."
        ),
        fixes=(
            advice(
                "",
                (
                    "Save with save_pretrained of the unwrapped model, which knows its tied "
                    "weights; or untie or clone the head before. As a last resort write the "
                    "older format (safe_serialization: false)."
                ),
                axolotl="save_safetensors",
            ),
        ),
    ),
    Trouble(
        code="ERR564",
        name="sharded-state-dict-unmerged",
        family=Family.CHECKPOINT,
        texts=(
            "FSDP state dict type 'SHARDED_STATE_DICT'",
            "SHARDED_STATE_DICT* not supported",
            "SHARDED_STATE_DICT* is not compatible",
            "LOCAL_STATE_DICT* not supported",
            "'ShardedTensor' object has no attribute",
            "full state dict is required",
            "requires FULL_STATE_DICT",
        ),
        what="A sharded FSDP state was used where the whole model's weights are needed.",
        why=(
            "With SHARDED_STATE_DICT each rank writes its own part; exports and some options "
            "need the full state."
        ),
        fixes=(
            advice(
                "",
                (
                    "Set the FSDP state dict type to FULL_STATE_DICT for the export, or "
                    "merge the shards afterwards (`accelerate merge-weights`, `axolotl "
                    "merge-sharded-fsdp-weights`, verl's model merger)."
                ),
                axolotl="fsdp_config.state_dict_type",
                trl="fsdp_config.state_dict_type",
            ),
        ),
        explains=("ERR410",),
    ),
    Trouble(
        code="ERR566",
        name="path-not-writable",
        family=Family.CHECKPOINT,
        texts=(
            "PermissionError: [Errno 13]",
            "Permission denied: '",
            "Read-only file system",
            "[Errno 30]",
            "Operation not permitted: '",
        ),
        what="A file or folder could not be written or read: no permission.",
        why=(
            "The folder belongs to another user (often root, from a container), or the file "
            "system is mounted read-only."
        ),
        fixes=(
            advice(
                "",
                (
                    "Change its owner or save elsewhere; set HF_HOME, TRITON_CACHE_DIR and "
                    "TMPDIR to folders that the user may write."
                ),
            ),
        ),
        confidence=Confidence.INFERRED,
    ),
    Trouble(
        code="ERR570",
        name="zero3-save-unconsolidated",
        family=Family.CHECKPOINT,
        texts=(
            "stage3_gather_16bit_weights_on_model_save=false",
            "use zero_to_fp32.py to recover weights",
        ),
        what=(
            "The exported folder holds ZeRO-3 shards, not a model that can be loaded; the "
            "weights can be recovered."
        ),
        why="Gathering the weights on save is switched off in the DeepSpeed config.",
        fixes=(
            advice(
                "",
                (
                    "Run zero_to_fp32.py in the checkpoint folder, or set "
                    "stage3_gather_16bit_weights_on_model_save to true for the next save."
                ),
            ),
        ),
        level=Level.INFO,
    ),
    Trouble(
        code="ERR571",
        name="output-folder-in-use",
        family=Family.CHECKPOINT,
        texts=(
            "already exists and is not empty",
            "--overwrite_output_dir",
            "output directory * is not empty",
        ),
        context=("Error:", "exception:"),
        within=2,
        what="The output folder holds another run, and overwriting it was not allowed.",
        why="The trainer protects earlier results.",
        fixes=(
            safe(
                "name",
                "a new name",
                "Give this run a folder of its own.",
                trl="output_dir",
                axolotl="output_dir",
                llama_factory="overwrite_output_dir",
            ),
            safe(
                "checkpoint.resume",
                "auto",
                "Or continue what is there.",
                trl="resume_from_checkpoint",
                axolotl="auto_resume_from_checkpoints",
                verl="trainer.resume_mode",
            ),
        ),
    ),
)

_RESUMING = (
    Trouble(
        code="ERR552",
        name="checkpoint-world-size-change",
        family=Family.CHECKPOINT,
        texts=(
            "Missing key in checkpoint state_dict: dataloader.dp_rank_",
            "dataloader.dp_rank_",
            "The checkpoint being loaded used a DP world size of",
            "new world size is not currently supported",
            "Zero checkpoint* world size",
            "was saved with * world size",
            "checkpoint * different world size",
            "No such file or directory* world_size_* rank_",
            "FileNotFoundError* mp_rank_",
            "FileNotFoundError* zero_pp_rank_",
            "zero_pp_rank_* No such file",
            "number of ranks * checkpoint * does not match",
            "saved with a different number of processes",
            "checkpoint* different parallel",
            "ckpt* world size mismatch",
            "dp_world_size* mismatch",
        ),
        what=(
            "The checkpoint was written by another number of processes than the one that loads it."
        ),
        why=(
            "Optimizer and data-loader state are kept per rank; with another data-parallel "
            "degree the parts do not match, or some ranks find none."
        ),
        fixes=(
            safe("cluster.processes", "as when it was saved", "The state then fits rank by rank."),
            advice(
                "",
                (
                    "Or load the weights without optimizer and data-loader state, or convert "
                    "to a universal/resharded checkpoint (DeepSpeed ds_to_universal, torch "
                    "distributed checkpoint)."
                ),
                torchtitan="checkpoint.exclude_from_loading",
                deepspeed="checkpoint.load_universal=true",
                megatron="--ckpt-fully-parallel-load",
                slime="--no-load-optim",
            ),
        ),
        explains=("ERR553", "ERR557", "ERR556", "ERR424"),
    ),
    Trouble(
        code="ERR553",
        name="checkpoint-keys-mismatch",
        family=Family.CHECKPOINT,
        texts=(
            "Error(s) in loading state_dict for",
            "Missing key(s) in state_dict",
            "Unexpected key(s) in state_dict",
            "Missing key in checkpoint state_dict",
            "size mismatch for",
            "copying a param with shape",
            "CheckpointingException",
            "CheckpointException",
            "is not a distributed checkpoint",
            "Unexpected keys in state_dict",
            "ignore_mismatched_sizes=True",
        ),
        what="The checkpoint's tensors do not fit the model: names or shapes differ.",
        why=(
            "It belongs to another model, size or library version, was saved with a "
            "wrapper's prefix (module., base_model., _orig_mod.), or the model was changed "
            "(vocabulary, heads, adapter) between."
        ),
        fixes=(
            advice(
                "",
                (
                    "Compare the names that the message lists with the model's: a common "
                    "prefix must be stripped, other shapes mean another config or tokenizer."
                ),
            ),
            advice(
                "",
                (
                    "Load adapters as adapters, and full checkpoints with the config that "
                    "they were saved with."
                ),
            ),
        ),
        confidence=Confidence.INFERRED,
    ),
    Trouble(
        code="ERR554",
        name="zero3-shards-loaded-plainly",
        family=Family.CHECKPOINT,
        texts=(
            "size mismatch for * torch.Size([0])",
            "copying a param with shape torch.Size([0])",
            "the shape in current model is torch.Size([0])",
        ),
        what=(
            "Weights of size 0 meet full ones: ZeRO-3 shards were saved or loaded without "
            "being gathered."
        ),
        why=(
            "Under ZeRO-3 each rank holds an empty placeholder outside the forward pass; a "
            "plain state_dict of it, or a plain load into it, has shape [0]."
        ),
        fixes=(
            advice(
                "",
                (
                    "Gather before saving (stage3_gather_16bit_weights_on_model_save: true) "
                    "or recover with zero_to_fp32.py; load through the trainer's own resume."
                ),
            ),
        ),
        explains=("ERR553", "ERR555"),
    ),
    Trouble(
        code="ERR555",
        name="vocabulary-size-mismatch",
        family=Family.CHECKPOINT,
        texts=(
            "size mismatch for * embed_tokens",
            "size mismatch for *embed_tokens",
            "size mismatch for *lm_head",
            "size mismatch for *wte",
            "size mismatch for *embed_in",
            "size mismatch for *word_embeddings",
            "size mismatch* && embedding",
        ),
        what=(
            "The embedding or head of the checkpoint has another vocabulary size than the model."
        ),
        why=(
            "Tokens were added and the embeddings resized (or padded to a multiple) in one "
            "of the two only; adapters trained that way carry the resized layers."
        ),
        fixes=(
            advice(
                "",
                (
                    "Load the tokenizer saved with the checkpoint and resize the model's "
                    "embeddings to it before loading weights or adapter."
                ),
            ),
        ),
        explains=("ERR553",),
    ),
    Trouble(
        code="ERR556",
        name="optimizer-state-mismatch",
        family=Family.CHECKPOINT,
        texts=(
            (
                "loaded state dict contains a parameter group that doesn't match the size of "
                "optimizer's group"
            ),
            "loaded state dict has a different number of parameter groups",
            "optimizer.pt* No such file",
            "Unable to load optimizer state",
            "optimizer state * not found",
            "KeyError: 'optimizer",
            "state dict * optimizer * mismatch",
            "incompatible optimizer state",
        ),
        what="The saved optimizer state does not fit the optimizer of this run, or is missing.",
        why=(
            "Another optimizer, other trained parameters (adapter, frozen layers), or a "
            "checkpoint that was saved without optimizer state."
        ),
        fixes=(
            advice(
                "",
                (
                    "Resume with the settings of the saved run; or start a new run from the "
                    "weights alone, with a short warm-up, because the moments begin at zero."
                ),
                trl="resume_from_checkpoint",
                slime="--no-load-optim",
                megatron="--no-load-optim",
            ),
        ),
    ),
    Trouble(
        code="ERR557",
        name="resume-checkpoint-missing",
        family=Family.CHECKPOINT,
        texts=(
            "Can't find a valid checkpoint at",
            "No valid checkpoint found in output directory",
            "Can't find a checkpoint index",
            "checkpoint does not exist",
            "No checkpoint found in",
            "Checkpoint directory * does not exist",
            "Unable to find latest file at",
            "There is no checkpoint in",
            "resume_from_checkpoint* not found",
        ),
        what="There is nothing to resume from at the given place.",
        why=(
            "No checkpoint was finished yet, the path points to the model export rather than "
            "the training state, or the step does not exist (any more)."
        ),
        fixes=(
            safe(
                "checkpoint.load_step",
                "a step that exists",
                "List the checkpoint folder.",
                slime="--ckpt-step",
                megatron="--ckpt-step",
            ),
            safe(
                "checkpoint.resume",
                "never",
                "Or start anew in a fresh folder.",
                trl="resume_from_checkpoint",
                verl="trainer.resume_mode",
                axolotl="resume_from_checkpoint",
            ),
        ),
    ),
    Trouble(
        code="ERR567",
        name="resume-randomness-lost",
        family=Family.CHECKPOINT,
        texts=(
            "Didn't find an RNG file",
            "RNG state was not",
            "Warning: Data loader state not found",
            "dataloader state not found",
            "Dataloader state not found",
            "No dataloader state found",
            "There were missing keys in the checkpoint model loaded",
        ),
        what=(
            "Resumed without some of the saved state (random numbers, data order, or tied keys)."
        ),
        why=(
            "The data may be repeated or ordered differently after the resume; the weights "
            "are as saved. A missing lm_head.weight is normal for tied embeddings."
        ),
        fixes=(
            advice(
                "",
                (
                    "Resume with the same number of processes and a checkpoint that holds "
                    "these files, if exact continuation matters."
                ),
            ),
        ),
        level=Level.INFO,
    ),
)

_LOADING = (
    Trouble(
        code="ERR558",
        name="checkpoint-file-damaged",
        family=Family.CHECKPOINT,
        texts=(
            "Error while deserializing header",
            "HeaderTooLarge",
            "HeaderTooSmall",
            "InvalidHeader",
            "MetadataIncompleteBuffer",
            "InvalidHeaderDeserialization",
            "incomplete metadata, file not fully covered",
            "PytorchStreamReader failed",
            "failed finding central directory",
            "The file might be corrupted",
            "unexpected EOF, expected",
            "pickle data was truncated",
            "invalid load key",
            "EOFError: Ran out of input",
            "SafetensorError",
            "Trying to resize storage that is not resizable",
        ),
        what="A weight file is incomplete or is not what its name says.",
        why=(
            "The download or the save broke off (full disk, killed job), several ranks wrote "
            "one file, or the file is a Git LFS pointer or an error page."
        ),
        causes=(
            Cause("checkpoint-file-damaged", "the file's header or end is missing"),
            Cause("lfs-pointer-files", "a file of a few hundred bytes is a pointer"),
        ),
        fixes=(
            advice(
                "",
                (
                    "Look at the file's size; delete it and download or copy it again "
                    "(`huggingface-cli download --force-download`)."
                ),
            ),
            safe(
                "checkpoint.load_step",
                "the checkpoint before",
                "For a run's own checkpoint: the last one that was finished.",
                slime="--ckpt-step",
            ),
        ),
        explains=("ERR353",),
    ),
    Trouble(
        code="ERR559",
        name="weights-only-refused",
        family=Family.CHECKPOINT,
        texts=(
            "Weights only load failed",
            "WeightsUnpickler error",
            "Unsupported global: GLOBAL",
            "torch.serialization.add_safe_globals",
            "Due to a serious vulnerability issue in `torch.load`",
            "require users to upgrade torch to at least v2.6",
        ),
        what="torch.load refused a file because it holds more than tensors.",
        why=(
            "Since torch 2.6 files are loaded with weights_only=True; optimizer, argument "
            "and random-state files of older checkpoints hold Python objects. Newer "
            "transformers refuse .bin files with an older torch."
        ),
        fixes=(
            advice(
                "",
                (
                    "For a file that you trust: upgrade the trainer, or allow the class that "
                    "the message names (torch.serialization.add_safe_globals), or load with "
                    "weights_only=False."
                ),
            ),
            advice("", "Convert .bin weights to safetensors, or upgrade torch."),
        ),
        explains=("ERR558",),
    ),
    Trouble(
        code="ERR560",
        name="weights-not-loaded",
        family=Family.CHECKPOINT,
        texts=(
            "could not find the metadata file",
            "will not load any checkpoints and will start from random",
            "latest_checkpointed_iteration.txt* not found",
            "No such file or directory* latest_checkpointed_iteration.txt",
            "latest_checkpointed_iteration.txt* does not exist",
            "will start from random",
        ),
        what="Megatron found no checkpoint in the folder and starts from random weights.",
        why=(
            "It only loads folders that hold latest_checkpointed_iteration.txt (or the step "
            "that is asked for). Training goes on with random weights: loss near "
            "ln(vocabulary), gibberish when the engine gets them."
        ),
        fixes=(
            advice(
                "",
                (
                    "Point the load path to the folder that holds "
                    "latest_checkpointed_iteration.txt: the parent of iter_*/release, "
                    "converted from the HF model."
                ),
                slime="--load, --ref-load",
                miles="--load, --ref-load",
                megatron="--load",
            ),
            advice(
                "",
                "Or name the step.",
                slime="--ckpt-step",
                miles="--ckpt-step",
                megatron="--ckpt-step",
            ),
        ),
        explains=("ERR424", "ERR557"),
    ),
    Trouble(
        code="ERR561",
        name="weights-not-loaded",
        family=Family.CHECKPOINT,
        texts=(
            "Some weights of *ForCausalLM were not initialized from the model checkpoint",
            (
                "Some weights of *ForConditionalGeneration were not initialized from the "
                "model checkpoint"
            ),
            "Some weights of *LMHeadModel were not initialized from the model checkpoint",
            "Some weights of *ForCausalLM* newly initialized",
        ),
        unless=("newly initialized: ['lm_head.weight']",),
        what=(
            "Part of the language model's weights was not found in the checkpoint and starts "
            "at random."
        ),
        why=(
            "Names in the files do not match the model: another architecture or library "
            "version, a wrapper's prefix, an adapter or ZeRO-3 shard saved as if it were the "
            "model."
        ),
        fixes=(
            advice(
                "",
                (
                    "Compare the names in the warning with those in the files "
                    "(model.safetensors.index.json); train on only after the list is empty "
                    "or expected."
                ),
            ),
        ),
        level=Level.WARN,
    ),
    Trouble(
        code="ERR562",
        name="benign-new-head",
        family=Family.CHECKPOINT,
        texts=(
            (
                "Some weights of *ForSequenceClassification were not initialized from the "
                "model checkpoint"
            ),
            (
                "Some weights of *ForTokenClassification were not initialized from the model "
                "checkpoint"
            ),
            "Some weights of the model checkpoint at * were not used when initializing",
            "newly initialized: ['score.weight']",
            "newly initialized: ['lm_head.weight']",
            "No v_head weight is found",
            "v_head* newly initialized",
        ),
        what=(
            "A new head was added, or extra weights were left out: usual for reward, value "
            "and classification models."
        ),
        why=(
            "A head for scores is not in a language model's checkpoint and starts at random, "
            "to be trained."
        ),
        fixes=(
            advice(
                "",
                (
                    "Nothing, if this model is to be trained. A reward model that is only "
                    "used must bring its head: then this means the wrong checkpoint."
                ),
            ),
        ),
        level=Level.INFO,
    ),
    Trouble(
        code="ERR565",
        name="weights-not-loaded",
        family=Family.CHECKPOINT,
        texts=(
            "Cannot copy out of meta tensor; no data",
            "Tensor on device meta is not on the expected device",
            "Tensor.item() cannot be called on meta tensors",
            "is on the meta device",
            "some parameters are on the meta device",
        ),
        unless=("some parameters are on the meta device because they were offloaded",),
        what="Weights are still placeholders without data (meta device) where values are needed.",
        why=(
            "The model was built empty to save memory, and the weights were not read into it "
            "afterwards (or only on rank 0), or it was offloaded and moved by hand."
        ),
        fixes=(
            advice(
                "",
                (
                    "Load the checkpoint into the sharded model before use "
                    "(sync_module_states with rank-0 loading), or switch the empty start "
                    "off."
                ),
                chatlearn="models.policy_trainer.meta_init",
                axolotl="fsdp_config.cpu_ram_efficient_loading",
                trl="fsdp_config.cpu_ram_efficient_loading",
            ),
            safe(
                "model.meta_init",
                "false",
                "Build with weights on every rank; takes more host memory.",
            ),
            advice("", "Do not call .to() on a model with device_map or CPU offload."),
        ),
    ),
    Trouble(
        code="ERR568",
        name="adapter-not-loaded",
        family=Family.CHECKPOINT,
        texts=(
            "Can't find 'adapter_config.json' at",
            "Found missing adapter keys while loading the checkpoint",
            "found missing adapter keys",
            "Found unexpected keys in the adapter",
            "No adapter_config.json",
            "Adapter * not found",
            "Loading adapter weights from * led to unexpected keys",
            "Loading adapter weights from * led to missing keys",
            "must be the same as the adapter's base model",
        ),
        what="The adapter's weights were not found, or not all of them fit the base model.",
        why=(
            "The folder is not an adapter, belongs to another base model, or its keys carry "
            "other names (library version, wrapper prefix); what is missing stays at its "
            "start value."
        ),
        fixes=(
            safe(
                "lora.path",
                "a folder with adapter_config.json and adapter_model.safetensors",
                "As peft saves it.",
                axolotl="lora_model_dir",
                llama_factory="adapter_name_or_path",
                ms_swift="--adapters",
            ),
            advice(
                "",
                (
                    "Use the base model that adapter_config.json names, and the peft version "
                    "that wrote it or a newer one."
                ),
            ),
        ),
        level=Level.WARN,
    ),
    Trouble(
        code="ERR569",
        name="checkpoint-device-mismatch",
        family=Family.CHECKPOINT,
        texts=(
            "Attempting to deserialize object on a CUDA device but",
            "Attempting to deserialize object on CUDA device",
        ),
        what="A checkpoint was saved from a GPU that this process does not have.",
        why="torch.load puts tensors back to the device that they were saved from.",
        fixes=(advice("", 'Load with map_location="cpu", or make the GPU visible.'),),
        explains=("ERR313",),
    ),
)

TROUBLES: tuple[Trouble, ...] = first_failures(
    _SAVING + _RESUMING + _LOADING, run_goes_on=("ERR550", "ERR560")
)
