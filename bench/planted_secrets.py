"""Claim: no secret that a run was given reaches what leaves the machine.

A real tiny RL run on the CPU gets 60 secrets of many kinds: as options of its reward, on its
command line, in environment variables, and in exceptions that the reward raises, prints and logs.
They are then looked for in the bug-report sheet, report.html, events.jsonl, findings.jsonl,
console.log, what the terminal showed, `check --format json`, and the doctor's answers to the run
and to a foreign log. config.json must hold them (a resumed run needs them) and be readable by its
owner alone.

    python bench/planted_secrets.py --seed 0
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import stat
import string
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import common

ASSETS = Path(__file__).resolve().parents[1] / "recipes" / "assets" / "tiny-sort"
SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
REWARD = '''
import json, logging, os, sys

def score(completions, **options):
    """Fails with the secrets in its message, as a client that echoes its request does."""
    given = {k: v for k, v in options.items() if k.startswith("opt_")}
    told = json.loads(open(os.path.join(os.path.dirname(__file__), "told.json")).read())
    names = sorted(given)
    count = int(open(os.path.join(os.path.dirname(__file__), "count")).read())
    open(os.path.join(os.path.dirname(__file__), "count"), "w").write(str(count + 1))
    print("request", json.dumps(given), file=sys.stderr)
    logging.getLogger("judge").warning("asked with %s", given)
    # Another few of them each time, in the forms in which clients show their requests.
    if count % 3 == 0:
        raise RuntimeError("401 for " + "; ".join(told[count % len(told):][:4]))
    if count % 3 == 1:
        raise ValueError(f"bad request {given[names[count % len(names)]]!r} and {given!r}")
    return [float(len(text) % 3) for text in completions]
'''


def secrets(rng: random.Random) -> dict[str, dict[str, str]]:
    """The secrets by how the run is given them, each by a name; `told` are whole lines."""

    def word(count: int, letters: str = string.ascii_letters + string.digits) -> str:
        return "".join(rng.choices(letters, k=count))

    hexadecimal = "0123456789abcdef"
    pem = "\n".join(word(64) for _ in range(3))
    connection = f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={word(86)}==;"
    options = {
        "judge_key": word(12), "pw": f"{word(5)} {word(4)}", "auth": f"{word(4)},{word(6)}",
        "bearer": word(16), "password": f"{word(3)}!#{word(4)}", "passphrase":
        " ".join(word(5, string.ascii_lowercase) for _ in range(5)), "url":
        f"https://{word(5)}:{word(9)}@judge.example/v1", "endpoint":
        f"https://x.blob.example/c?sv=1&sig={word(20)}%2F{word(8)}", "hook":
        f"https://hooks.slack.com/services/T{word(8)}/B{word(8)}/{word(24)}", "discord":
        f"https://discord.com/api/webhooks/{word(18, string.digits)}/{word(40)}", "pem":
        f"-----BEGIN PRIVATE KEY-----\n{pem}\n-----END PRIVATE KEY-----", "aws":
        word(40, string.ascii_letters + string.digits + "/+"), "hex40": word(40, hexadecimal),
        "connection": connection, "blob": json.dumps({"api": {"key": f"{word(4)} {word(5)}"}}),
        "headers": json.dumps({"Authorization": f"Bearer {word(30)}"}), "dsn":
        f"postgres://u:{word(10)}@db.example/x", "pin": word(6, string.digits), "otp":
        word(16, "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"), "cookie": f"sid={word(22)}; path=/",
        "umlaut": f"{word(4)}\u00e4\u00f6{word(4)}", "quoted": f"{word(4)}\"{word(3)}'{word(4)}",
        "customer": f"{word(6)} Ltd", "note": f"{word(9, string.ascii_lowercase)}", "uuid":
        "-".join(word(n, hexadecimal) for n in (8, 4, 4, 4, 12)), "jwt":
        f"eyJ{word(20)}.{word(40)}.{word(30)}", "b64": base64.b64encode(word(24).encode()).decode(),
    }  # fmt: skip
    environment = {
        "OPENAI_API_KEY": f"sk-{word(40)}", "HF_TOKEN": f"hf_{word(34)}", "WANDB_API_KEY":
        word(40, hexadecimal), "AWS_SECRET_ACCESS_KEY": word(40), "JUDGE_PASSWORD": word(12),
        "RAY_ODD": word(9), "HF_ENDPOINT": f"https://{word(6)}@hub.example", "SLURM_COMMENT":
        f"{word(6)} {word(5)}", "TRACKIO_PAT": word(14), "DB_DSN": f"mysql://r:{word(8)}@h/d",
    }  # fmt: skip
    told = {
        "github": f"ghp_{word(36)}", "gitlab": f"glpat-{word(20)}", "slack": f"xoxb-{word(30)}",
        "google": f"AIza{word(35)}", "aws_id": f"AKIA{word(16, string.ascii_uppercase)}",
        "bearer": f"Authorization: Bearer {word(32)}", "basic": f"Basic {word(24)}",
        "sas": f"https://s.example/b?sig={word(30)}&se=1", "named": f'"client_secret": "{word(8)}"',
        "spaced": f'password="{word(4)} {word(4)}"', "flag": f"--judge-key {word(11)}",
        "key": f"AccountKey={word(40)}==", "header": f"x-api-key: {word(12)}",
        "hex": word(40, hexadecimal), "long": word(44), "npm": f"npm_{word(36)}", "login": f"redis://:{word(9)}@cache.example/0",
    }  # fmt: skip
    overrides = {name: word(13) for name in ("over_key", "over_auth", "pattern", "stop", "more")}
    overrides["folder"] = f"{word(8)}"
    return {"option": options, "environment": environment, "told": told, "override": overrides}


def needle(kind: str, value: str) -> list[str]:
    """The parts of a value that must not be found: for a whole line, its last long word."""
    if kind != "told":
        parts = [value, *value.splitlines(), json.dumps(value)[1:-1]]
        return [part for part in parts if len(part) > 3 and not part.startswith("-----")]
    if value.startswith(("http", "redis")):
        return [value.split("sig=")[-1].split("&")[0].split(":")[-1].split("@")[0]]
    return [value.split('"')[-2] if value.endswith('"') else value.replace("=", " ").split()[-1]]


def write_run(folder: Path, planted: dict[str, dict[str, str]]) -> list[str]:
    """The recipe, its files, and the overrides of the command line."""
    (folder / "model").mkdir()
    for file in ASSETS.iterdir():
        (folder / "model" / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps({**config, **SIZES}))
    data = folder / planted["override"]["folder"]
    data.mkdir()
    rows = [json.dumps({"prompt": f"{n}{n + 1}>", "answer": str(n)}) for n in range(12)]
    (data / "prompts.jsonl").write_text("\n".join(rows))
    (folder / "judge.py").write_text(REWARD)
    (folder / "count").write_text("0")
    (folder / "told.json").write_text(json.dumps(list(planted["told"].values())))
    options = {f"opt_{name}": value for name, value in planted["option"].items()}
    recipe: dict[str, Any] = {
        "name": "run", "algorithm": {"type": "grpo"}, "model": {"path": "model", "init": "random"},
        "data": {"max_length": 16, "train": [
            {"type": "prompts", "path": f"{data.name}/prompts.jsonl", "chat": False}]},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 6,
                    "stop": [planted["override"]["stop"], planted["override"]["more"]]},
        "rewards": {"functions": [
            {"type": "function", "path": "judge.py:score", "options": options, "name": "judge"},
            {"type": "regex_format", "pattern": planted["override"]["pattern"]}]},
        "trainer": {"max_steps": 4, "max_tokens_per_device": 128, "threads": 1},
        "observe": {"console": "plain"},
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(json.dumps(recipe, indent=1))
    chosen = planted["override"]
    return [f"rewards.functions.0.options.opt_{n}={chosen[n]}" for n in ("over_key", "over_auth")]


def homeostat(folder: Path, environ: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-c", "from homeostat.cli.main import main; main()", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=600, check=False,
    )  # fmt: skip
    return done.stdout.decode("utf-8", errors="replace")


def gather(folder: Path, environ: dict[str, str], overrides: list[str]) -> dict[str, str]:
    """Everything that may leave the machine, by what it is."""
    found = {"terminal": homeostat(folder, environ, "train", "recipe.yaml", *overrides)}
    found["check"] = homeostat(folder, environ, "check", "recipe.yaml", *overrides, "--format=json")
    found["sheet"] = homeostat(folder, environ, "env", "--run", "runs/run")
    run = folder / "runs" / "run"
    names = ("report.html", "events.jsonl", "findings.jsonl", "console.log", "metrics.jsonl")
    for name in names:
        found[name] = (run / name).read_text(encoding="utf-8", errors="replace")
    found["doctor"] = homeostat(folder, environ, "doctor", "runs/run")
    return found


def foreign_log(folder: Path, environ: dict[str, str], told: dict[str, str]) -> str:
    """The doctor on another framework's log in which every line of an error holds a secret."""
    lines = ["{'loss': 1.5, 'learning_rate': 1e-5, 'epoch': 0.1}"] * 5
    lines += ["Traceback (most recent call last):", '  File "train.py", line 3, in <module>']
    lines += [f"RuntimeError: 401 Client Error: Unauthorized for {text}" for text in told.values()]
    (folder / "foreign.log").write_text("\n".join(lines))
    return homeostat(folder, environ, "doctor", "foreign.log", "--verbose")


def measure(folder: Path, *, seed: int) -> dict[str, Any]:
    planted = secrets(random.Random(seed))
    overrides = write_run(folder, planted)
    fixed = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "PYTHONUTF8": "1"}
    environ = {**os.environ, **planted["environment"], **fixed}
    texts = gather(folder, environ, overrides)
    texts["doctor, foreign log"] = foreign_log(folder, environ, planted["told"])
    leaks = [
        f"{kind} {name} in {where}"
        for kind, values in planted.items()
        for name, value in values.items()
        for where, text in texts.items()
        if any(part in text for part in needle(kind, value))
    ]
    saved = folder / "runs" / "run" / "config.json"
    events = [json.loads(line) for line in texts["events.jsonl"].splitlines()]
    return {
        "seed": seed,
        "planted": sum(map(len, planted.values())),
        "searched": sorted(texts),
        "leaks": leaks,
        "config_holds_options": all(
            json.dumps(value)[1:-1] in json.dumps(json.loads(saved.read_text()))
            for value in planted["option"].values()
        ),
        "config_mode": oct(stat.S_IMODE(saved.stat().st_mode)),
        "reward_failures_told": sum(event["kind"] == "reward_trouble" for event in events),
        "finished": any(event["kind"] == "run_finished" for event in events),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="planted-secrets-") as folder:
        found = measure(Path(folder), seed=arguments.seed)
    holds = not found["leaks"] and found["config_mode"] == "0o600" and found["finished"]
    result = common.machine(("torch", "transformers")) | {"claim_holds": holds, **found}
    common.write_result("planted_secrets", result)


if __name__ == "__main__":
    main()
