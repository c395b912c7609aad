"""Claim: the ranks of one host read a model in about the memory of one model, not one for each.

    python bench/meta_init.py

A model of about 400 MB is written to a file. Then 1, 2 and 4 ranks are started at one time, each of
which builds the model on the meta device and reads its rows of each tensor. Every rank samples its
own anonymous memory (RssAnon: what it allocated; pages of the file are shared by all, and can be
dropped) from before it loads until all weights are there. The table holds the sum of the ranks'
peaks, beyond what each had before, as a multiple of the model's bytes. Adam's moments, which are
split alike, come on top afterwards.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ASSETS = Path(__file__).resolve().parents[1] / "recipes" / "assets"
DEADLINE_S = 300.0
SIZES = (1, 2, 4)
MODEL = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
LIMIT = 1.3
SMALL = "small_model"


def anonymous_bytes() -> int:
    """Return the bytes of this process's own pages, without those of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def peak_growth(work: Callable[[], Any]) -> int:
    """Return by how much the process's own memory grew at most while `work` ran."""
    before, done = anonymous_bytes(), threading.Event()
    peak = [before]

    def sample() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], anonymous_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        work()
    finally:
        done.set()
        thread.join()
    return max(peak[0], anonymous_bytes()) - before


def write_model(folder: Path, *, layers: int) -> int:
    """Write random weights in the Hugging Face format; return their bytes in fp32."""
    from homeostat.config.model import ModelConfig
    from homeostat.models.build import load_model
    from homeostat.models.hf import save_hf
    from homeostat.models.lora import merged_state

    folder.mkdir(parents=True, exist_ok=True)
    for file in (ASSETS / "tiny-chat").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = {**json.loads((folder / "config.json").read_text()), **MODEL}
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    loaded = load_model(
        ModelConfig(path=str(folder), init="random"),
        None,
        dtype=torch.float32,
        device=torch.device("cpu"),
        seed=0,
        gradient_checkpointing=False,
    )
    save_hf(merged_state(loaded.module), folder, source_config=loaded.sheet.source_config)
    return loaded.sheet.num_params * 4


def run_rank(rank: int, size: int, folder: Path) -> int:
    """Load one rank's share of the model; return by how much its memory grew."""
    from homeostat.config.cluster import LOOPBACK, FsdpBackend
    from homeostat.config.mesh import Mesh
    from homeostat.config.model import ModelConfig
    from homeostat.train.fsdp.mesh import join
    from homeostat.train.fsdp.model import load_sharded
    from homeostat.train.runtime import Runtime
    from homeostat.workers.context import WorkerContext

    device = torch.device("cpu")
    ranks = join(
        WorkerContext(rank, size, rank, "trainer", LOOPBACK),
        Mesh(shard=size),
        device=device,
        timeout_s=DEADLINE_S,
        rendezvous=f"file://{folder / f'meeting_{size}'}",
    )
    kept: list[Any] = []

    def load(name: str) -> None:
        kept.append(
            load_sharded(
                ModelConfig(path=str(folder / name), init="pretrained"),
                None,
                FsdpBackend(type="fsdp"),
                ranks=ranks,
                runtime=Runtime(device, torch.float32, threads=1, pin_memory=False),
                seed=0,
                gradient_checkpointing=False,
                trained=True,
            )
        )
        # Whoever is done first waits: all of them hold their share at one time.
        ranks.gather(None)

    if (folder / SMALL).exists():
        # The first model imports what loading needs.
        load(SMALL)
    growth = peak_growth(lambda: load("model"))
    ranks.close()
    return growth


def measure(size: int, folder: Path) -> int:
    """Return the sum of the peaks of so many ranks."""
    places = [str(part) for part in (Path(__file__).resolve(), "--folder", folder, "--size", size)]
    ranks = [
        subprocess.Popen([sys.executable, *places, "--rank", str(rank)], stdout=subprocess.PIPE)
        for rank in range(size)
    ]
    try:
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    if any(process.returncode for process in ranks):
        sys.exit(f"a rank of {size} failed")
    return sum(int(output.split()[-1]) for output in outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int)
    parser.add_argument("--size", type=int)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--layers", type=int, default=24)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        print(run_rank(arguments.rank, arguments.size, arguments.folder))
        return
    import common

    rows = []
    with tempfile.TemporaryDirectory(prefix="homeostat-meta-") as place:
        folder = Path(place)
        write_model(folder / SMALL, layers=1)
        model_bytes = write_model(folder / "model", layers=arguments.layers)
        print(f"model {model_bytes / 1e6:.0f} MB\nranks  all ranks  of one model")
        for size in SIZES:
            total = measure(size, folder)
            rows.append({"ranks": size, "bytes": total, "of_one_model": total / model_bytes})
            print(f"{size:5d}  {total / 1e6:6.0f} MB  {total / model_bytes:.2f}", flush=True)
    worst = max(row["of_one_model"] for row in rows)
    result = {**common.machine(("torch",)), "model_bytes": model_bytes, "limit": LIMIT}
    common.write_result("meta_init", {**result, "rows": rows, "within": worst <= LIMIT})
    if worst > LIMIT:
        sys.exit("the ranks hold more than one model together")


if __name__ == "__main__":
    main()
