"""Mutated inputs: one case is a folder with a recipe and its files, one of them damaged.

    write_base  -> a sound folder: recipe, rows in three formats, model folders, adapter, used run
    make_case   -> a copy of it with one mutation, the command to run on it, and the places of which
                   a refusal must name one

A case is a function of (seed, index) alone; kinds take turns, so that each gets the same number.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from homeostat.config import RunConfig
from homeostat.config.schema import known_keys

# What a type, a size or a character may be that nobody meant.
HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**63, 10**12, 10**30, -(10**30), 10**400, 0.5,
    -0.0, 1e-320, 1e308, math.nan, math.inf, -math.inf, "", " ", "x", "0", "-1", "nan", "null",
    "x" * 5000, "../../etc/passwd", "/dev/null", "/dev/zero", "/nowhere/at/all", ".", "..", "~",
    "\0", "a\0b", "\u202eabc", "\ud800", "\udfff\ud800", "\x1b[31mred", "\x7f\x85\u2028", "[bold]",
    "[/red]", "{x}", "%s", "a\nb", "caf\u00e9 \U0001f600", "\u00b2", "\u0663", "<|im_end|>",
    [], {}, [[]], [None], [{}], ["x", 1], {"": 1}, {"type": "x"}, {"type": None}, {"type": []},
    {"x": {"y": [1, {"z": None}]}}, [0] * 2000, ["\0"], "q_proj", "all-linear", "transformers",
)  # fmt: skip
TEMPLATES = (
    "{% for", "{{ messages[", "{% endfor %}", "{{ 1 / 0 }}", "{{ raise_exception('no') }}", "",
    "{{ messages }}", "{{ undefined.x.y }}", "{{ messages[99].content }}", "{% generation %}",
    "{% for i in range(10 ** 9) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 10 ** 10 ** 8 }}", "{{ 'x' * 10000000000 }}", "{{ ''.__class__.__mro__ }}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "{{ '%1000000000000d' % 1 }}",
    "{% include 'x' %}", "{% extends '/etc/passwd' %}", "{% import 'os' as os %}",
    "{{ '\u202e\0' }}", "{{ messages[0].content }}<|im_end|>", "{% set x = messages.clear() %}",
)  # fmt: skip
YAML_TEXTS = (
    "a: &x [*x]\n", "a: !!python/object/apply:os.system ['true']\n", "a: !!binary aGk=\n",
    "? [1]\n: 2\n", "a: " + "[" * 2000 + "\n", "a: " + "{a: " * 300 + "\n", "---\na: 1\n---\nb: 2",
    "%YAML 9.9\n---\n", "\ta: 1\n", "&a name: *a\n", "<<: {name: a}\n", "name: !!int x\n",
    "'\\uD800': 1\n", '"\\uD800": 1\n', "trainer: !!float nan\n", "1: 2\n", "null: 1\n", "- name\n",
    "a: &a [1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b]\n"
    "d: &d [*c,*c,*c,*c,*c,*c,*c]\ne: [*d,*d,*d,*d,*d,*d,*d]\n", "name: |\n", "? \n", "!\n",
)  # fmt: skip
OVERRIDES = (
    "=", "x", "=1", ".=1", "a..b=1", "trainer.=1", "data.train.0=", "data.train.-1.path=x",
    "data.train.\u00b2.path=x", "data.train.\u0660.limit=1", "data.train.9.path=x", "name.x=1",
    "trainer=", "trainer={", "trainer.lr=[", "trainer.lr=!!x", "trainer.lr=&a", "trainer.lr=*a",
    "trainer.lr=1e400", "\udcff=1", "name=\udcff", "data.train=[]", "data.train.0.type=\u00b2",
    "trainer.lr='", "trainer.lr=1: 2", "lora.rank=1000000000000", "preset=[1]", "preset={a: 1}",
    "preset=[[x]]", "\u00b2=1", "a.0.\u00b2=1", "model.path=", "lora.targets=[q_proj, q_proj]",
)  # fmt: skip
ROW_NAMES = (
    "a\nb.jsonl", "rows.txt", "ROWS.JSONL", "\u202erows.jsonl", "rows.parquet", "[red].jsonl",
    "rows", " .jsonl", "r" * 240 + ".jsonl", "rows.json",
)  # fmt: skip
MODEL_PLACES = ("model.path", "model.tokenizer", "model.chat_template", "config.json", "rows.jsonl")


@dataclass(frozen=True, slots=True)
class Case:
    """One mutated input. `what` says how it was made."""

    index: int
    kind: str
    what: str
    command: list[str]
    places: tuple[str, ...]


@dataclass(slots=True)
class World:
    """A case being made: its folder and random numbers, and what comes out."""

    folder: Path
    rng: random.Random
    recipe: dict[str, Any]
    what: str = ""
    verb: str = "check"
    arguments: tuple[str, ...] = ()
    places: tuple[str, ...] = ()

    def pick(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def hostile(self) -> Any:
        """A value that nobody meant. A message about a path names the path."""
        value = self.rng.choice(HOSTILE)
        if isinstance(value, str) and len(value) > 2 and value.isprintable():
            self.places += (value[:30],)
        return value

    def write_recipe(self) -> None:
        (self.folder / "recipe.yaml").write_text(to_json(self.recipe), encoding="utf-8")


def base_recipe() -> dict[str, Any]:
    return {
        "name": "run",
        "model": {"path": "model", "init": "random"},
        "data": {"train": [{"type": "messages", "path": "rows.jsonl"}], "max_length": 128},
        "trainer": {
            "max_steps": 2, "batch_rows": 4, "max_tokens_per_device": 256, "threads": 1, "lr": 1e-3,
            "schedule": {"type": "linear", "warmup_steps": 1},
        },
        "checkpoint": {"interval_steps": 1, "export": "off"},
        "observe": {"console": "quiet"},
    }  # fmt: skip


def to_json(value: Any) -> str:
    """JSON is YAML too. Surrogates stay escapes, so that the file itself is sound UTF-8."""
    return json.dumps(value, indent=1)


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
    # Last and beyond any mutation: a run of many steps would show nothing more.
    last = ["trainer.max_steps=3"] if world.verb == "train" else []
    command = [world.verb, "recipe.yaml", *world.arguments, *last]
    return Case(index, kind, world.what, command, world.places)


def damage_bytes(world: World, data: bytes) -> bytes:
    """Flip, delete, insert, double, cut or swap a few bytes or a line."""
    how = world.pick("flip", "delete", "insert", "double", "cut", "lines", "zero")
    at = world.rng.randrange(len(data) + 1)
    size = world.pick(1, 2, 7, 40)
    world.what += f"{how} {size} at byte {at}; "
    if how == "flip":
        flipped = bytes(byte ^ world.rng.randrange(1, 256) for byte in data[at : at + size])
        return data[:at] + flipped + data[at + size :]
    if how == "insert":
        noise = world.pick(b"\0", b"\xff\xfe", b"\t", b"\r\n", b"\xed\xa0\x80", b"{", b'"', b": ")
        return data[:at] + noise * world.pick(1, 1, size) + data[at:]
    if how == "double":
        return data[:at] + data[at : at + size] * 2 + data[at + size :]
    if how == "lines":
        lines = data.splitlines(keepends=True)
        lines.insert(world.rng.randrange(len(lines) + 1), world.rng.choice(lines or [b"\n"]))
        return b"".join(lines)
    if how == "cut":
        return data[:at]
    if how == "zero":
        return data[:at] + bytes(size) + data[at + size :]
    return data[:at] + data[at + size :]


def tree_places(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = enumerate(value) if isinstance(value, list) else ()
    items = value.items() if isinstance(value, dict) else items
    found = [place] if place else []
    for name, child in items:
        found += tree_places(child, (*place, name))
    return found


def damage_tree(world: World, value: Any, *, place: tuple[Any, ...] | None = None) -> Any:
    """Replace, remove, rename, move or wrap one value of a JSON tree, in place."""
    place = place or world.rng.choice(tree_places(value))
    *path, last = place
    here = value
    for part in path:
        here = here[part]
    how = world.pick("set", "set", "set", "remove", "rename", "move", "wrap")
    new = world.hostile()
    world.what += f"{how} {'.'.join(map(str, place))} (to {new!r:.60}); "
    if how == "set" or isinstance(here, list):
        here[last] = new
    elif how == "wrap":
        here[last] = world.pick([here[last]], {"x": here[last]}, {last: here[last]})
    else:
        moved = here.pop(last)
        if how == "rename":
            here[world.pick(last[1:], last + "s", last.upper(), "", last + "\0", "type")] = moved
        elif how == "move":
            value[last] = moved
    return value


def damage_json(world: World, path: Path) -> None:
    text = to_json(damage_tree(world, json.loads(path.read_bytes())))
    path.write_text(text, encoding="utf-8")


def damage_file(world: World, path: Path) -> None:
    """The bytes of a file, or what stands in its place."""
    how = world.pick("bytes", "bytes", "bytes", "bytes", "empty", "gone", "folder", "link", "pipe")
    world.what += f"{path.name}: {how}; "
    if how == "bytes":
        path.write_bytes(damage_bytes(world, path.read_bytes()))
        return
    path.unlink()
    if how == "empty":
        path.touch()
    elif how == "folder":
        path.mkdir()
    elif how == "link":
        path.symlink_to(world.pick("nowhere", path.name, "/dev/null"))
    elif how == "pipe":
        os.mkfifo(path)


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
    """Each number of config.json at absurd values."""
    if world.rng.random() < 0.3:
        world.recipe["model"]["implementation"] = "transformers"
    world.write_recipe()
    path, world.places = world.folder / "model" / "config.json", MODEL_PLACES
    config = json.loads(path.read_bytes())
    names = [name for name, value in config.items() if type(value) in (int, float)]
    for name in world.rng.sample(names, world.pick(1, 1, 2)):
        config[name] = world.pick(0, -1, 1, 3, 10**4, 10**6, 10**9, 10**12, 10**18, 10**30,
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
    elif path.suffix == ".jsonl" and world.rng.random() < 0.5:
        lines = path.read_bytes().splitlines(keepends=True)
        number = world.rng.randrange(len(lines))
        lines[number] = json.dumps(damage_tree(world, json.loads(lines[number]))).encode() + b"\n"
        path.write_bytes(b"".join(lines))
    else:
        damage_file(world, path)


def run_state(world: World) -> None:
    """The state of a checkpoint, sealed anew: its checksums hold, its content does not."""
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
    "run_state": run_state,
}  # fmt: skip
