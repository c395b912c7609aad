"""Tiny sequence classifiers of transformers, saved as their users save them."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from tests.support.tiny import write_model
from transformers import AutoConfig, AutoModelForSequenceClassification


def write_classifier(folder: Path, *, num_labels: int = 1, seed: int = 0) -> Path:
    """A decoder with a random head, and the tokenizer of tiny-chat with its chat template."""
    write_model(folder, pad_token_id=0)
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(folder)
    config.num_labels = num_labels
    config.architectures = ["LlamaForSequenceClassification"]
    model = AutoModelForSequenceClassification.from_config(config)
    model.score.weight.data.normal_(0.0, 1.0)
    model.save_pretrained(folder)
    return folder


def write_encoder(folder: Path) -> Path:
    """A BERT with three labels and positions for 64 tokens."""
    source = write_model(folder / "source")
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "bert",
        vocab_size=512,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
        num_labels=3,
        id2label={0: "bad", 1: "fair", 2: "good"},
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    for file in source.glob("token*"):
        shutil.copy(file, folder)
    return folder
