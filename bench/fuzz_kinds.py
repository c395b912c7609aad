"""Mutated inputs: one case is a folder with a recipe and its files, one of them damaged.

    make_case   a copy of the sound folder (fuzz_base.py) with one mutation, the command to run on
                it, and the places of which a refusal must name one

A case is a function of (seed, index) alone; kinds take turns, so that each gets the same number.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from fuzz_mutations import (
    World,
    base_recipe,
    damage_bytes,
    damage_file,
    damage_json,
    damage_tree,
    to_json,
)
from fuzz_values import HOSTILE, OVERRIDES, ROW_NAMES, TEMPLATES, YAML_TEXTS

from homeostat.config import RunConfig
from homeostat.config.loading.schema import known_keys

MODEL_PLACES = ("model.path", "model.tokenizer", "model.chat_template", "config.json", "rows.jsonl")


@dataclass(frozen=True, slots=True)
class Case:
    """One mutated input. `what` says how it was made."""

    index: int
    kind: str
    what: str
    command: list[str]
    places: tuple[str, ...]


def make_case(base: Path, folder: Path, *, seed: int, index: int) -> Case:
    """Write case `index` into a fresh folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder, symlinks=True)
    names = list(KINDS)
    kind = names[index % len(names)]
    world = World(folder, random.Random(f"{seed}:{index}"), base_recipe())
    world.verb = world.rng.choices(("check", "inspect", "train"), weights=(5, 2, 3))[0]
    if not kind.startswith("run_"):
        shutil.rmtree(folder / "runs", ignore_errors=True)
    KINDS[kind](world)
    # Last and beyond any mutation: a run of many steps would show nothing more. A used run has
    # two steps behind it.
    steps = 3 if kind.startswith("run_") else 2
    last = [f"trainer.max_steps={steps}"] if world.verb == "train" else []
    form = ["--format", "json"] if world.rng.random() < 0.2 else []
    command = [world.verb, "recipe.yaml", *world.arguments, *last, *form]
    return Case(index, kind, world.what, command, world.places)


def recipe_places() -> tuple[str, ...]:
    keys = {key.partition("[]")[0] for key in known_keys(RunConfig)}
    return ("recipe.yaml", *sorted(key for key in keys if "." in key))


def recipe_bytes(world: World) -> None:
    path, world.places = world.folder / "recipe.yaml", recipe_places()
    data = yaml.safe_dump(world.recipe, sort_keys=False).encode()
    for _ in range(world.pick(1, 1, 2, 5)):
        data = damage_bytes(world, data) or data
    # A flipped byte of a path makes another path, and that is what a message then names.
    world.places += ("row", "json", "mod")
    path.write_bytes(data)


def recipe_syntax(world: World) -> None:
    path, world.places = world.folder / "recipe.yaml", recipe_places()
    text = yaml.safe_dump(world.recipe, sort_keys=False)
    how = world.pick("text", "text", "tabs", "crlf", "bom", "utf-16", "latin-1", "file", "append")
    world.what = how
    extra = world.rng.choice(YAML_TEXTS)
    if how == "file":
        damage_file(world, path)
        return
    encoding = how if how in ("utf-16", "latin-1") else "utf-8-sig" if how == "bom" else "utf-8"
    text = {
        "text": extra, "tabs": text.replace("  ", "\t"), "crlf": text.replace("\n", "\r\n"),
        "latin-1": text + "# caf\u00e9", "append": text + extra,
    }.get(how, text)  # fmt: skip
    world.what += f" {extra!r:.50}"
    path.write_bytes(text.encode(encoding))


def recipe_tree(world: World) -> None:
    world.places = recipe_places()
    for _ in range(world.pick(1, 1, 2, 4)):
        damage_tree(world, world.recipe)
    world.write_recipe()


def recipe_value(world: World) -> None:
    """Any key of the schema, present or not, at a value of any kind."""
    world.places = recipe_places()
    key = world.rng.choice(known_keys(RunConfig)).replace("[]", ".0")
    value = world.hostile()
    world.what = f"{key} = {value!r:.60}"
    here: Any = world.recipe
    for part, following in zip(key.split(".")[:-1], key.split(".")[1:], strict=True):
        inner: Any = [] if following == "0" else {}
        if isinstance(here, list):
            here[:] = here or [inner]
            here = here[0]
        else:
            here = here.setdefault(part, inner)
    here[key.split(".")[-1]] = value
    world.write_recipe()


def override(world: World) -> None:
    world.places = (*recipe_places(), "override")
    world.write_recipe()
    key = world.rng.choice(known_keys(RunConfig)).replace("[]", ".0")
    value = str(world.rng.choice(HOSTILE)).replace("\0", "")[:300]
    texts = [f"{key}={value}", world.rng.choice(OVERRIDES)]
    if world.verb == "inspect":
        texts += [f"--row-id={world.pick(-1, 3, 999, 10**30, 'x')}"]
    chosen = world.rng.sample(texts, world.pick(1, 1, len(texts)))
    world.arguments = tuple(text.encode("utf-8", "replace").decode() for text in chosen)
    if "\udcff" in "".join(chosen):
        world.arguments = tuple(chosen)
    world.places += tuple(text.partition("=")[0] for text in chosen if text.partition("=")[0])
    world.places += (value[:20],) if len(value) > 3 else ("''",)
    world.what = repr(chosen)[:150]


def rows_bytes(world: World) -> None:
    world.places = ("rows.jsonl",)
    world.write_recipe()
    damage_file(world, world.folder / "rows.jsonl")


def rows_tree(world: World) -> None:
    path, world.places = world.folder / "rows.jsonl", ("rows.jsonl",)
    world.recipe["data"]["bad_rows"] = world.pick("refuse", "refuse", "drop")
    world.write_recipe()
    lines = path.read_text(encoding="utf-8").splitlines()
    for number in world.rng.sample(range(len(lines)), world.pick(1, 3, len(lines))):
        lines[number] = json.dumps(damage_tree(world, json.loads(lines[number])))
    path.write_text("\n".join(lines), encoding="utf-8")


def rows_name(world: World) -> None:
    """The rows under another name, or another kind of file under theirs."""
    name = world.rng.choice(ROW_NAMES)
    source = world.pick("rows.jsonl", "rows.jsonl", "pairs.parquet")
    shutil.move(world.folder / source, world.folder / name)
    world.recipe["data"]["train"][0]["path"] = name
    world.what, world.places = repr(name), ("rows", "jsonl", "data.train", "parquet")
    world.write_recipe()


def columns(world: World) -> None:
    """Parquet and Arrow files, and the JSON beside the latter."""
    source = {"type": "prompt_completion", "path": "pairs.parquet", "chat": world.pick(True, False)}
    path = world.folder / "pairs.parquet"
    if world.rng.random() < 0.5:
        source = {"type": "text", "path": "saved"}
        path = world.folder / "saved" / world.pick("data-00000-of-00001.arrow", "state.json")
    world.recipe["data"]["train"] = [source]
    world.write_recipe()
    world.places = (path.name, "pairs.parquet", "saved")
    if path.suffix == ".json" and world.rng.random() < 0.5:
        damage_json(world, path)
    else:
        damage_file(world, path)


def model_json(world: World) -> None:
    """config.json, tokenizer.json and their like: values, or bytes."""
    name = world.pick("config.json", "config.json", "tokenizer.json", "tokenizer_config.json",
                      "generation_config.json")  # fmt: skip
    world.places = (name, *MODEL_PLACES)
    world.recipe["model"]["path"] = world.pick("model", "weights")
    world.recipe["model"]["init"] = world.pick("random", "pretrained")
    if world.recipe["model"]["path"] == "model":
        world.recipe["model"]["init"] = "random"
    if world.rng.random() < 0.3:
        world.recipe["model"]["implementation"] = "transformers"
    world.write_recipe()
    path = world.folder / world.recipe["model"]["path"] / name
    if world.rng.random() < 0.7:
        for _ in range(world.pick(1, 1, 2)):
            damage_json(world, path)
    else:
        damage_file(world, path)


def model_sizes(world: World) -> None:
    """Each number of config.json at absurd values; none that makes a sound model which takes
    minutes to train."""
    if world.rng.random() < 0.3:
        world.recipe["model"]["implementation"] = "transformers"
    world.write_recipe()
    path, world.places = world.folder / "model" / "config.json", MODEL_PLACES
    config = json.loads(path.read_bytes())
    names = [name for name, value in config.items() if type(value) in (int, float)]
    for name in world.rng.sample(names, world.pick(1, 1, 2)):
        config[name] = world.pick(0, -1, 1, 3, 10**4, 10**5, 10**9, 10**12, 10**18, 10**30,
                                  math.nan, math.inf, 1e-30, 1.5, "8", None)  # fmt: skip
        world.what += f"{name} = {config[name]!r}; "
    if world.rng.random() < 0.3:
        rope = {
            "rope_type": world.pick("yarn", "llama3", "linear", "x", None),
            "factor": world.pick(4.0, 1, 0, -1, 1e-30, 1e29, "x", math.nan),
            "original_max_position_embeddings": world.pick(64, 1, 0, 10**30, None),
            "rope_theta": world.pick(10000.0, 1, 1.0, 1e-30, 1e29, None),
            **{name: world.pick(1.0, 4.0, 1e-30, 1e29, 0, None)
               for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")},
        }  # fmt: skip
        config["rope_scaling"] = rope
        world.what += f"rope_scaling = {rope!r}"
    path.write_text(to_json(config), encoding="utf-8")


def template(world: World) -> None:
    text = world.rng.choice(TEMPLATES)
    world.what, world.places = f"{text!r:.80}", ("chat template", *MODEL_PLACES)
    if world.rng.random() < 0.5:
        (world.folder / "chat.jinja").write_text(text, encoding="utf-8")
        world.recipe["model"]["chat_template"] = "chat.jinja"
    else:
        path = world.folder / "model" / "tokenizer_config.json"
        config = json.loads(path.read_bytes())
        config["chat_template"] = world.pick(text, text, [text], {"default": text}, {"a": text}, 3)
        path.write_text(to_json(config), encoding="utf-8")
    world.write_recipe()


def weights(world: World) -> None:
    """Shards, their index, a GGUF file, an adapter."""
    model = world.recipe["model"]
    model.update(path="weights", init="pretrained")
    world.places = ("model.path", "lora.path", "lora.rank", "lora.alpha", "model.tokenizer")
    what = world.pick("shard", "index", "index", "gguf", "adapter")
    folder = world.folder / "weights"
    if what == "gguf":
        model.update(path="tiny.gguf", tokenizer="model")
        folder = world.folder
    elif what == "adapter":
        world.recipe["lora"] = {"rank": 2, "path": "adapter"}
        folder, world.verb = world.folder / "adapter", "train"
    world.write_recipe()
    pattern = {"shard": "*.safetensors", "index": "*.index.json", "gguf": "*.gguf", "adapter": "*"}
    path = world.rng.choice(sorted(folder.glob(pattern[what])))
    outside = world.pick("../../etc/passwd", "/etc/passwd", "../rows.jsonl", "model.bin", "..", 3)
    if what == "index" and world.rng.random() < 0.4:
        index = json.loads(path.read_bytes())
        name = world.rng.choice(list(index["weight_map"]))
        index["weight_map"][name] = outside
        world.what = f"{name} in {outside!r}"
        path.write_text(to_json(index), encoding="utf-8")
    elif path.suffix == ".json" and world.rng.random() < 0.6:
        damage_json(world, path)
    else:
        damage_file(world, path)


def gguf(world: World) -> None:
    """A GGUF file with its own tokenizer: cut short, or with a wrong number in its header."""
    world.recipe["model"] = {"path": "tiny.gguf"}
    if world.rng.random() < 0.3:
        world.recipe["model"]["tokenizer"] = "model"
    world.places = ("tiny.gguf", "model.path", "model.tokenizer", "chat template")
    world.write_recipe()
    path = world.folder / "tiny.gguf"
    data, how = path.read_bytes(), world.pick("cut", "number", "number", "number", "file")
    header = data.index(b"blk.0.ffn_down.weight") + 60
    if how == "file":
        damage_file(world, path)
        return
    at = world.rng.randrange(len(data) if how == "cut" else header)
    value = world.pick(0, 1, 7, 255, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)
    size = world.pick(1, 4, 8)
    number = (value % 256**size).to_bytes(size, "little")
    world.what = f"cut at {at}" if how == "cut" else f"{value} in {size} bytes at {at}"
    path.write_bytes(data[:at] if how == "cut" else data[:at] + number + data[at + size :])


def adapter(world: World) -> None:
    """An adapter's config and weights: values, bytes, and what stands in their place."""
    world.recipe["model"].update(path="weights", init="pretrained")
    world.recipe["lora"] = {"rank": 2, "path": "adapter"}
    world.places = ("lora.path", "lora.rank", "lora.alpha", "lora.targets", "adapter", "model.path")
    world.verb = world.pick("train", "train", "check")
    world.write_recipe()
    folder = world.folder / "adapter"
    path = folder / world.pick("adapter_config.json", "adapter_model.safetensors")
    if path.suffix == ".json" and world.rng.random() < 0.7:
        damage_json(world, path)
    else:
        damage_file(world, path)


def tokenizer(world: World) -> None:
    """Parts of a tokenizer: vocabulary, added and special tokens, template, their settings."""
    world.write_recipe()
    folder, name = world.folder / "model", world.pick("tokenizer.json", "tokenizer_config.json")
    world.places = (name, "special_tokens_map.json", "chat_template.jinja", *MODEL_PLACES)
    how = world.pick("tree", "tree", "special", "template", "bytes")
    if how == "special":
        words = {
            f"{word}_token": world.pick("</s>", "", None, 3, [], {}, "x" * 5000, {"content": "a"})
            for word in world.rng.sample(["eos", "pad", "bos", "unk", "cls"], 2)
        }
        world.what = f"special_tokens_map {words!r:.100}"
        path = folder / world.pick("special_tokens_map.json", "added_tokens.json")
        path.write_text(to_json(words), encoding="utf-8")
        name = "tokenizer_config.json"
        settings = json.loads((folder / name).read_bytes())
        (folder / name).write_text(to_json(settings | world.pick({}, words)), encoding="utf-8")
    elif how == "template":
        text = world.rng.choice(TEMPLATES)
        world.what = f"chat_template.jinja {text!r:.80}"
        (folder / "chat_template.jinja").write_text(text, encoding="utf-8")
    elif how == "tree":
        for _ in range(world.pick(1, 2, 4)):
            damage_json(world, folder / name)
    else:
        damage_file(world, folder / name)


def run_files(world: World) -> None:
    """A used run directory, damaged before it is continued."""
    world.verb = world.pick("train", "train", "train", "check")
    world.write_recipe()
    root = world.folder / "runs" / "run"
    files = sorted(path for path in root.rglob("*") if path.is_file())
    top = [path for path in files if path.parent == root]
    path = world.rng.choice(world.pick(top, files))
    world.places = (path.name, str(path.relative_to(world.folder)), "runs/run", "checkpoint.")
    if path.suffix == ".json" and world.rng.random() < 0.5:
        damage_json(world, path)
    elif path.suffix == ".jsonl" and path.stat().st_size and world.rng.random() < 0.5:
        lines = path.read_bytes().splitlines(keepends=True)
        number = world.rng.randrange(len(lines))
        lines[number] = json.dumps(damage_tree(world, json.loads(lines[number]))).encode() + b"\n"
        path.write_bytes(b"".join(lines))
    else:
        damage_file(world, path)


def run_state(world: World) -> None:
    """The state of a checkpoint, sealed again: its checksums are right, its content is not."""
    world.verb = world.pick("train", "train", "train", "check")
    world.write_recipe()
    newest = sorted((world.folder / "runs/run/checkpoints").glob("step_*"))[-1]
    path = newest / world.pick("state.json", "state.json", "model.safetensors", "manifest.json")
    world.places = ("step_", "runs/run", "checkpoint")
    if path.suffix == ".json":
        damage_json(world, path)
    else:
        path.write_bytes(damage_bytes(world, path.read_bytes()))
    if path.name != "manifest.json":
        manifest = json.loads((newest / "manifest.json").read_bytes())
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        manifest[path.name] = {"bytes": path.stat().st_size, "sha256": digest}
        (newest / "manifest.json").write_text(json.dumps(manifest))


KINDS: dict[str, Callable[[World], None]] = {
    "recipe_bytes": recipe_bytes, "recipe_syntax": recipe_syntax, "recipe_tree": recipe_tree,
    "recipe_value": recipe_value, "override": override, "rows_bytes": rows_bytes,
    "rows_tree": rows_tree, "rows_name": rows_name, "columns": columns, "model_json": model_json,
    "model_sizes": model_sizes, "template": template, "weights": weights, "run_files": run_files,
    "run_state": run_state, "gguf": gguf, "adapter": adapter, "tokenizer": tokenizer,
}  # fmt: skip
