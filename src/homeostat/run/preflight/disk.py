"""Check that the disk has room for the checkpoints of a run."""

from __future__ import annotations

import shutil
from pathlib import Path

from homeostat.config.observe import CheckpointConfig
from homeostat.models.preview import ModelPreview
from homeostat.observe import format as fmt
from homeostat.run.preflight.item import Item, Level


def disk_item(checkpoint: CheckpointConfig, preview: ModelPreview, *, run_dir: Path) -> Item:
    """Compare the size of the checkpoints that are kept with the free space; an error if less."""
    one = checkpoint_bytes(preview)
    export = preview.num_bytes if checkpoint.export != "off" else 0
    need = one * (checkpoint.keep_last + 2) + export
    free = shutil.disk_usage(existing(run_dir)).free
    facts = {"checkpoint_bytes": one, "needed_bytes": need, "free_bytes": free}
    text = (
        f"a checkpoint takes {fmt.byte_size(one)}; at most {fmt.byte_size(need)} are needed, "
        f"{fmt.byte_size(free)} are free"
    )
    level: Level = "ok" if need < free else "error"
    if level == "error":
        text += ". Lower checkpoint.keep_last, or set runs_dir to another disk"
    return Item("disk", level, text, facts)


def checkpoint_bytes(preview: ModelPreview) -> int:
    """Return the size of a checkpoint: weights and optimizer state of what is trained."""
    # Beyond the weights: two fp32 moments and, if the weights are narrower, fp32 masters.
    width = preview.bytes_per_param
    return preview.num_trainable * (width + 8 + (4 if width < 4 else 0))


def existing(path: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    while not path.exists():
        path = path.parent
    return path
