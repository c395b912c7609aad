"""torchtune: PyTorch's fine-tuning recipes, configured by YAML files."""

from __future__ import annotations

from homeostat.health.frameworks.table import Framework

GIB = 2.0**30

TABLE = Framework(
    name="torchtune",
    title="torchtune",
    metrics={
        "loss": "train/loss",
        "Loss": "train/loss",
        "lr": "learning_rate",
        "grad_norm": "grad_norm",
        "tokens_per_second_per_gpu": "throughput/tokens_per_s",
        "peak_memory_active": "memory/max_active",
        "peak_memory_alloc": "memory/max_alloc",
        "peak_memory_reserved": "memory/max_reserved",
        "val_loss": "eval/loss",
        "rewards/chosen": "preference/chosen_reward",
        "rewards/rejected": "preference/rejected_reward",
        "rewards/accuracies": "preference/accuracy",
        "rewards/margins": "preference/margin",
    },
    scales={"memory/max_active": GIB, "memory/max_alloc": GIB, "memory/max_reserved": GIB},
    settings={
        "model.path": ("checkpointer.checkpoint_dir",),
        "seed": ("seed",),
        "trainer.lr": ("optimizer.lr",),
        "trainer.optimizer.weight_decay": ("optimizer.weight_decay",),
        "trainer.schedule.warmup_steps": ("lr_scheduler.num_warmup_steps",),
        "trainer.epochs": ("epochs",),
        "trainer.max_steps": ("max_steps_per_epoch",),
        "trainer.micro_batch_rows": ("batch_size",),
        "trainer.gradient_accumulation_steps": ("gradient_accumulation_steps",),
        "trainer.max_grad_norm": ("clip_grad_norm",),
        "trainer.precision": ("dtype",),
        "trainer.gradient_checkpointing": ("enable_activation_checkpointing",),
        "trainer.packing": ("dataset.packed",),
        "data.max_length": ("tokenizer.max_seq_len",),
        "checkpoint.keep_last": ("checkpointer.keep_last_n_checkpoints",),
        "lora.rank": ("model.lora_rank",),
        "lora.alpha": ("model.lora_alpha",),
        "lora.dropout": ("model.lora_dropout",),
        "lora.targets": ("model.lora_attn_modules",),
    },
    marks=(
        "torchtune.utils._logging",
        "_component_: torchtune.",
        "/torchtune/",
        "tune run",
        "with resolved config:",
        "_finetune_distributed.py",
        "_finetune_single_device.py",
    ),
)
