"""Remove secrets from free text: logs, tracebacks, commands, lines quoted from a log.

Config values are shared by an allow-list (config/loading/shareable.py). Free text has no keys, so a
secret is recognised in three ways, which rather remove a word too many than one too few:

    its value    it is a private value of the run's config, or of an environment variable whose
                 name says that it is secret (`Scrubber`)
    its name     it follows `password=`, `"judge_key":`, `--token`, `Bearer`
    its looks    it has the shape of known tokens and keys, of a link with a login, a query or a
                 random part, or is a long word that mixes cases and digits as no name does

Every pattern is linear in the length of the text: repeats are bounded, or cannot overlap.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

from homeostat.errors import REMOVED
from homeostat.json_text import parse_json

MASK = REMOVED

_SECRET_NAME = re.compile(
    r"KEY|TOKEN|SECRET|PASSW|PASSPHRASE|PWD|CREDENTIAL|AUTH|COOKIE|PRIVATE|SIGNATURE|WEBHOOK|DSN"
    r"|CONNECTION_STRING|(?:^|_)(?:PAT|PW|PASS|SAS)(?:_|$)",
    re.I,
)
_PEM = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}-----.*?(?:-----END [A-Z0-9 ]{0,40}-----|\Z)", re.DOTALL
)
_KNOWN_TOKEN = re.compile(
    r"\b(?:hf_|api_org_|sk-|sk_|pk_|rk_|gsk_|xai-|r8_|nvapi-|gh[pousr]_|github_pat_|glpat-|xox[abeprs]-"
    r"|xapp-|AKIA|ASIA|AIza|ya29\.|GOCSPX-|eyJ|npm_|pypi-|dop_v1_|SG\.|AC(?=[0-9a-f]{32})|shpat_|ntn_"
    r"|lin_api_|dckr_pat_|tskey-|wandb_v1_|AGE-SECRET-KEY-)[A-Za-z0-9_.\-/+=]{8,}"
)
_LIKE_A_NAME = re.compile(r"(?:hf|api_org|sk|pk|rk|gsk|r8|npm|ntn)_")
# The random part of such a token is at least that long; words of a name are shorter than the other.
_MIN_RANDOM, _MAX_NAME = 10, 30
# Names of code that begin as tokens do (hf_overrides, hf_to_mcore_config_dpskv3): short words.
_NAME_OF_CODE = re.compile(r"(?:[a-z]{1,14}\d{0,2}[_.]){1,12}[a-z]{1,14}\d{0,2}")
_CAMEL_WORD = re.compile(r"[A-Z]?[a-z]{2,}")
# Share of a name in CamelCase that is in words: AutoModelForSeq2SeqLM has 0.857, and one of 600
# random words of that length as much.
_MIN_IN_WORDS = 0.85
_URL = re.compile(r"\b([a-z][a-z0-9+.\-]{1,20}://)([^\s\"'<>`\\]+)", re.I)
_BEARER = re.compile(r"(?i)\b(bearer|basic|digest|apikey)(\s+)([A-Za-z0-9+/=_.~\-]{8,})")
_WORDS = (
    r"(?:[\w-]{0,40}(?:[_-]|api|access|account|secret|private|signing|master|license))?key"
    r"|[\w-]{0,40}(?:secret|secrets|passw(?:or)?d|passphrase|credentials?|authorization|webhook"
    r"|(?<!fn[_-])signature|cookie|connection[_-]?string)"
    r"|(?:[\w-]{0,40}[_-])?(?:pw|pwd|pass|auth|bearer|sig|sas|pat|otp|pin|dsn)"
    r"|[\w-]{0,40}(?:access|api|auth|bearer|hf|hub|id|refresh|session|bot|judge|user|my)[_-]?token"
    r"|(?:HF_|--)?token"
)
# `token=abc`, `"password": "a b, c"`, `--api-key abc`: keep the name, remove the value. Names such
# as pad_token, tokenizer and a function's signature (reward-fn-signature) are not secrets.
_NAMED_VALUE = re.compile(
    rf"(?i)(?<![\w-])(\\?[\"']?(?:--)?(?:{_WORDS})\\?[\"']?(?:\s?[=:]\s?|(?<=--)\s)|--(?:{_WORDS})\s)"
    r"(\\?\"[^\"\n]{0,4000}\"?|\\?'[^'\n]{0,4000}'?|[^\s\"';&}\])]{3,})"
)
# Every name of `_WORDS` has one of these parts, which are found ten times as fast: most texts have
# none, and are not searched for names.
_NAME_PARTS = re.compile(
    r"(?i)key|secret|pass|credential|auth|webhook|sig|cookie|connection|pw|bearer|sas|pat|otp|pin"
    r"|dsn|token"
)
_NAME_ENDS = ("=", ":", "--")
# The shortest match of `_RANDOM`; those of `_AWS_SECRET` and `_HEX` are longer.
_MIN_RANDOM_TEXT = 20
_RANDOM = re.compile(rf"[A-Za-z0-9+/_=\-]{{{_MIN_RANDOM_TEXT},}}")
_AWS_SECRET = re.compile(r"(?<![A-Za-z0-9/+=_.\-])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+_.\-])")
# Keys and UUIDs; the hash of a commit is meant to be read.
_HEX = re.compile(
    r"(?i)(?<![0-9a-z])(?=[0-9a-f-]{0,35}[0-9])[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){2,}[0-9a-f]{8,}"
)
_NO_KEY_BEFORE = ("GPU-", "MIG-", "commit ", "revision ", "sha256:", "sha256 ")
_DEVICE_ID = re.compile(r"(?:GPU|MIG)-[0-9a-f-]{36}")
_RELEVANT = re.compile(
    r"(?:CUDA|NCCL|TORCH|PYTORCH|HF|TRANSFORMERS|TOKENIZERS|OMP|MKL|OPENBLAS|WANDB|TRACKIO"
    r"|HOMEOSTAT|PYTHON|SLURM|RAY|NVIDIA|TRITON|XLA|GLOO|UCX)_?.*|LD_LIBRARY_PATH|LD_PRELOAD"
    r"|MASTER_(?:ADDR|PORT)|(?:LOCAL_|GROUP_)?RANK|(?:LOCAL_)?WORLD_SIZE|VIRTUAL_ENV|CONDA_PREFIX"
)
# Variables of the numerical libraries: their values are settings, and no vendor puts a login there.
_SETTINGS = re.compile(
    r"(?:CUDA|NCCL|TORCH|PYTORCH|OMP|MKL|OPENBLAS|TOKENIZERS|TRITON|XLA|GLOO|UCX|NVIDIA)_.*"
    r"|CUDA_VISIBLE_DEVICES"
)
_WORD_LIST = re.compile(r"[\w.,:;+\[\]=-]{1,120}")
# Removing shorter values would remove half of a text.
_MIN_PRIVATE = 4


class Scrubber:
    """Remove the secrets of one run from any text: first the known values, then by looks."""

    def __init__(self, secrets: Iterable[str] = (), *, paths: Iterable[str] = ()) -> None:
        known = {form: MASK for secret in secrets for form in _forms(secret)}
        known |= {path: PurePath(path).name for path in paths if path not in known}
        ordered = sorted(known, key=len, reverse=True)
        self._known = known
        self._values = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    @classmethod
    def of(cls, config: Any, *, environ: Mapping[str, str], shows_paths: bool = False) -> Scrubber:
        """Build a scrubber for a run with this config (JSON values) in this environment.

        With `shows_paths`, for a user's own terminal, the values of keys that hold paths are shown
        in full, and so are all files and folders that exist.
        """
        # Imported here, because the config classes take half a second and the doctor needs none of
        # them.
        from homeostat.config.loading.beside import input_paths
        from homeostat.config.loading.shareable import private_paths, private_values

        texts = [text for text in private_values(config) if len(text) >= _MIN_PRIVATE]
        secrets = [
            value
            for name, value in environ.items()
            if _SECRET_NAME.search(name) and len(value) >= 8 and not _is_harmless(value)
            and not value.startswith("/")
        ]  # fmt: skip
        paths = [text for text in texts if _is_path(text)]
        hidden = [text for text in texts if text not in paths]
        if shows_paths:
            own = private_paths(config)
            hidden = [text for text in hidden if text not in own]
            paths = [text for text in paths if text not in own and not os.path.exists(text)]
        else:
            # Errors name a relative path in full.
            paths += [os.path.abspath(text) for text in input_paths(config)]
        return cls([*secrets, *hidden], paths=paths)

    def text(self, text: str) -> str:
        """Return a text without secrets."""
        if self._values is not None:
            text = self._values.sub(lambda match: self._known[match.group(0)], text)
        return mask_text(text)

    def tree(self, value: Any) -> Any:
        """Return a JSON value with all its texts scrubbed."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {name: self.tree(item) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.tree(item) for item in value]
        return value


def _is_path(text: str) -> bool:
    return "/" in text and "://" not in text and " " not in text and bool(PurePath(text).name)


def _forms(secret: str) -> set[str]:
    """Yield the forms of a secret in a text: as it is, escaped, by lines, and inside JSON."""
    forms = {secret, json.dumps(secret)[1:-1], repr(secret)[1:-1]}
    forms |= {line.strip() for line in secret.splitlines()}
    try:
        inner = parse_json(secret)
    except ValueError:
        inner = None
    if isinstance(inner, (dict, list)):
        forms |= set(_texts(inner))
    return {form for form in forms if len(form) >= _MIN_PRIVATE}


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def relevant_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that matter for training; values only if they cannot be secrets."""
    chosen = sorted(name for name in environ if _RELEVANT.fullmatch(name))
    return {name: shared_variable(name, environ[name]) for name in chosen}


def shared_variable(name: str, value: str) -> str:
    """Return a variable's value if it is a number, a boolean or a numerical library's setting."""
    if _is_harmless(value) or not value:
        return value
    if _SETTINGS.fullmatch(name) and not _SECRET_NAME.search(name) and _WORD_LIST.fullmatch(value):
        return mask_text(value)
    return MASK


def mask_text(text: str) -> str:
    """Return free text with everything removed that looks like a secret."""
    # The searches for signs and for lengths only save time: most texts have neither.
    if "-----BEGIN" in text:
        text = _PEM.sub(MASK, text)
    if "://" in text:
        text = _URL.sub(_mask_url, text)
    text = _KNOWN_TOKEN.sub(_mask_token, text)
    text = _BEARER.sub(_mask_bearer, text)
    if may_name_a_secret(text):
        text = _NAMED_VALUE.sub(_mask_named, text)
    if len(text) < _MIN_RANDOM_TEXT:
        return text
    text = _AWS_SECRET.sub(_mask_if_random, text)
    text = _HEX.sub(_mask_hex, text)
    return _RANDOM.sub(_mask_if_random, text)


def has_known_token(text: str) -> bool:
    """Return whether a text holds a private key, or a token in the form of a known service."""
    return any(map(_is_no_name, _KNOWN_TOKEN.findall(text))) or bool(_PEM.search(text))


def _is_no_name(token: str) -> bool:
    """Return whether what begins like a token is one, not a name of code such as hf_argparser.

    A token has a digit. One whose beginning could be that of a name ends in a long part without
    underscores that has capitals, too, or is as long as no name.
    """
    if not _LIKE_A_NAME.match(token):
        return re.search(r"\d", token) is not None
    random = token.rpartition("_")[2]
    if random.islower() or random.isupper() or len(random) < _MIN_RANDOM:
        return False
    return re.search(r"\d", random) is not None or len(random) >= _MAX_NAME


def may_name_a_secret(text: str) -> bool:
    """Return False only for texts in which `_NAMED_VALUE` finds nothing."""
    return any(end in text for end in _NAME_ENDS) and _NAME_PARTS.search(text) is not None


def _mask_url(match: re.Match[str]) -> str:
    """Keep a plain link. One with a login, a query or a random part keeps scheme and host."""
    scheme, rest = match.groups()
    authority, slash, path = rest.partition("/")
    login, _, host = authority.rpartition("@")
    if not (login or "?" in rest or _has_random_part(path)):
        return match.group(0)
    return f"{scheme}{host.partition('?')[0]}{slash}{MASK}"


def _has_random_part(path: str) -> bool:
    parts = path.split("/")
    is_hook = parts[0] in ("services", "hooks") or "webhook" in path.lower()
    return is_hook or any(_is_random(part) for part in parts)


def _mask_token(match: re.Match[str]) -> str:
    word = match.group(0)
    is_name = _LIKE_A_NAME.match(word) and _NAME_OF_CODE.fullmatch(word.rstrip("."))
    return word if is_name else MASK


def _mask_bearer(match: re.Match[str]) -> str:
    word = match.group(3)
    is_word = word.isalpha() and word.islower()
    return match.group(0) if is_word else f"{match.group(1)}{match.group(2)}{MASK}"


# Names that end like those of secrets but are harmless.
_NO_SECRET = re.compile(r"(?:(?:by|sort|primary|foreign|cache|group)_)?key|pass|pin|id_token")


def _mask_named(match: re.Match[str]) -> str:
    name, value = match.groups()
    bare = value.strip("\\\"'`,.)")
    word = name.strip("-\\\"' =:\n\t").lower()
    is_plain = _is_harmless(bare) or bare == MASK or _NO_SECRET.fullmatch(word)
    return match.group(0) if is_plain or _is_prose(match) else f"{name}{MASK}"


def _is_prose(match: re.Match[str]) -> bool:
    """Return whether it is a sentence about a token of text: "every pad token: the end of ..."."""
    name, value = match.groups()
    before = match.string[max(0, match.start() - 2) : match.start()]
    is_word = value.isascii() and value.isalpha() and value.islower() and len(value) <= 12
    return name == "token: " and is_word and before[:1].isalpha() and before[1:] == " "


def _is_harmless(value: str) -> bool:
    """Return whether a value is no secret: TOKENIZERS_PARALLELISM=false, max_tokens: 8192."""
    return bool(re.fullmatch(r"(?i)true|false|null|none|on|off|-?[\d.,]{1,15}(?:e-?\d+)?", value))


def _mask_hex(match: re.Match[str]) -> str:
    before = match.string[max(0, match.start() - 10) : match.start()]
    return match.group(0) if before.endswith(_NO_KEY_BEFORE) else MASK


def _mask_if_random(match: re.Match[str]) -> str:
    word = match.group(0)
    before = match.string[max(0, match.start() - 10) : match.start()]
    if _DEVICE_ID.fullmatch(word) or before.endswith(_NO_KEY_BEFORE):
        return word
    if len(word) == 40 and "/" in word and _mixes(word) and _changes(word) >= 10:
        return MASK
    return "/".join(MASK if _is_random(part) else part for part in word.split("/"))


def _is_random(word: str) -> bool:
    """Return whether a long word alternates between cases and digits as keys do and names do not.

    In a random word about 62 % of neighbours differ in kind; in names in CamelCase with a number,
    and in mangled symbols, fewer than 45 % do.
    """
    if len(word) < 20:
        return False
    digits, changes = sum(char.isdigit() for char in word), _changes(word) / len(word)
    if _mixes(word):
        if sum(map(len, _CAMEL_WORD.findall(word))) >= _MIN_IN_WORDS * len(word):
            return False
        return changes >= 0.46 or (digits >= 3 and changes >= 0.33)
    letters = sum(char.isalpha() for char in word)
    return min(digits, letters) >= 4 and changes >= 0.25


def _mixes(word: str) -> bool:
    kinds = (str.isupper, str.islower, str.isdigit)
    return all(any(kind(char) for char in word) for kind in kinds)


def _changes(word: str) -> int:
    """Count how often the kind of character changes: capitals, small letters, digits."""
    kinds = [_kind(char) for char in word]
    return sum(a != b and "-" not in (a, b) for a, b in itertools.pairwise(kinds))


def _kind(char: str) -> str:
    return "d" if char.isdigit() else "u" if char.isupper() else "l" if char.islower() else "-"
