"""Takes secrets out of what people paste into bug reports. Better one value too many than too few.

Two ways to know a secret: by the name it goes under, and by its looks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

MASK = "<removed>"

_SECRET_NAME = re.compile(
    r"KEY|TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|COOKIE|PRIVATE|SIGNATURE|WEBHOOK", re.I
)
_KNOWN_TOKEN = re.compile(
    r"\b(?:hf_|sk-|sk_|pk_|rk_|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|AIza|ya29\.|eyJ)"
    r"[A-Za-z0-9_.\-]{8,}"
)
_URL_LOGIN = re.compile(r"(?<=://)[^/\s@'\"]+@")
_LONG_WORD = re.compile(r"[A-Za-z0-9+_=\-]{32,}")
_WORDS = (
    r"[\w-]*(?:api[_-]?key|(?:access|secret|private)[_-]?key|secret|passw(?:or)?d|passphrase"
    r"|credentials?|authorization|(?:access|api|auth|bearer|hf|hub|id|refresh|session)[_-]?token)"
    r"|(?<![\w-])(?:--)?(?:HF_)?token"
)
# `token=abc`, `"password": "abc"`, `--api-key abc`: the name stays, the value goes. Names such as
# pad_token and tokenizer are no secrets.
_NAMED_VALUE = re.compile(
    rf"(?i)((?:(?:{_WORDS})[\"']?\s*[=:]\s*|--(?:{_WORDS}|token)\s+)[\"']?(?:bearer\s+)?)"
    r"([^\s\"',;&}]{6,})"
)
_DEVICE_ID = re.compile(r"(?:GPU|MIG)-[0-9a-f-]{36}")
_RELEVANT = re.compile(
    r"(?:CUDA|NCCL|TORCH|PYTORCH|HF|TRANSFORMERS|TOKENIZERS|OMP|MKL|OPENBLAS|WANDB|TRACKIO"
    r"|HOMEOSTAT|PYTHON|SLURM|RAY|NVIDIA|TRITON|XLA|GLOO|UCX)_?.*|LD_LIBRARY_PATH|LD_PRELOAD"
    r"|MASTER_(?:ADDR|PORT)|(?:LOCAL_|GROUP_)?RANK|(?:LOCAL_)?WORLD_SIZE|VIRTUAL_ENV|CONDA_PREFIX"
)


def relevant_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter for training, by name, with secrets masked."""
    chosen = sorted(name for name in environ if _RELEVANT.fullmatch(name))
    return {name: mask_value(name, environ[name]) for name in chosen}


def mask_value(name: str, value: str) -> str:
    """A variable's value; masked whole when its name or its looks say that it is secret."""
    if value and _SECRET_NAME.search(name) and not _is_harmless(value):
        return MASK
    return _LONG_WORD.sub(_mask_if_random, mask_text(value))


def mask_text(text: str) -> str:
    """Free text (a command, a config, a traceback) with recognisable secrets masked."""
    text = _URL_LOGIN.sub(f"{MASK}@", text)
    text = _KNOWN_TOKEN.sub(MASK, text)
    return _NAMED_VALUE.sub(_mask_named, text)


def _mask_named(match: re.Match[str]) -> str:
    return match.group(0) if _is_harmless(match.group(2)) else f"{match.group(1)}{MASK}"


def _is_harmless(value: str) -> bool:
    """TOKENIZERS_PARALLELISM=false, max_tokens: 8192, pad_token: null are no secrets."""
    return bool(re.fullmatch(r"(?i)true|false|null|none|[\d.,]{1,15}(?:e-?\d+)?", value))


def _mask_if_random(match: re.Match[str]) -> str:
    """Long words that mix digits and letters look like keys; names and paths do not."""
    word = match.group(0)
    if _DEVICE_ID.fullmatch(word):
        return word
    digits = sum(char.isdigit() for char in word)
    return MASK if digits >= 4 and digits < len(word) else word
