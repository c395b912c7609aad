"""Find whose code a file in a traceback is: the user's, a framework's, a package's or Python's."""

from __future__ import annotations

import re

_INSTALLED = ("site-packages/", "dist-packages/")
_SHORTENED = (".../", "…/")
# Jinja names a template that it has as text "<template>" where it runs it, and "<unknown>" where it
# compiles it. Python's ast names texts so, too.
_GENERATED_PLACES = ("<frozen ", "<string>", "<template>", "<unknown>", "/bin/")
_STDLIB = re.compile(r"/lib(?:64)?/python3[.\d]{0,6}/(?!site-packages|dist-packages)")
# Folders of Python's own modules on Windows and in conda environments.
_STDLIB_FILE = re.compile(
    r"/(?:[Ll]ib|envs/[^/]{1,80}/[Ll]ib)/(?:runpy|threading|multiprocessing/[^/]{1,40}"
    r"|concurrent/futures/[^/]{1,40}|asyncio/[^/]{1,40}|json/[^/]{1,40}|contextlib|functools)(?:\.py|$)"
)
# Files compiled by Cython; only packages have them: pyarrow/error.pxi, numpy/mtrand.pyx.
_COMPILED = (".pxi", ".pyx", ".pxd")
# Modules inside Python's executable. importlib is left out of them because it runs packages' code.
_STDLIB_FROZEN = re.compile(r"<frozen (?!importlib|runpy)")
# Ray's compiled modules report their path in Ray's sources.
_RAY_SOURCES = "python/ray/"
# Code that a framework generates in the working directory or in a cache.
_GENERATED = (
    "unsloth_compiled_cache",
    "transformers_modules",
    "torchinductor",
    "torch_compile_cache",
)
# Folders beside a framework's package with code that users write or copy.
_OF_USERS = ("examples", "example", "recipe", "recipes", "scripts", "projects", "custom", "tests",
             "plugin", "plugins", "custom_nodes", "user_scripts")  # fmt: skip
PACKAGES = frozenset(
    (
        "accelerate", "areal", "auto_gptq", "awq", "axolotl", "bitsandbytes", "chatlearn", "coati",
        "colossalai", "cosmos_rl", "datasets", "deep_ep", "deep_gemm", "deepspeed", "diffusers",
        "easyr1", "fla", "flash_attn", "flashinfer", "gptqmodel", "homeostat", "ktransformers",
        "liger_kernel", "lighteval", "lightning", "lightrft", "litgpt", "llamafactory",
        "llmcompressor", "lm_eval", "lmdeploy", "mbridge", "megatron", "mergekit", "miles",
        "miles_plugins", "mindspeed", "mindspeed_llm", "mindspeed_rl", "mlx", "mlx_lm", "mlx_vlm",
        "mmengine", "nemo", "nemo_aligner", "nemo_automodel", "nemo_rl", "open_instruct",
        "openrlhf", "optimum", "oumi", "peft", "prime_rl", "pytorch_lightning", "ray", "rllm",
        "roll", "sentence_transformers", "sgl", "sgl_kernel", "sglang", "skyrl", "skyrl_train",
        "slime", "slime_plugins", "swift", "tensorrt_llm", "torch", "torch_npu", "torchao",
        "torchforge", "torchrl", "torchtitan", "torchtune", "torchvision", "transformer_engine",
        "transformers", "trinity", "triton", "trl", "trlx", "unsloth", "unsloth_zoo",
        "verl", "vllm", "vllm_ascend", "xformers", "xtuner",
    )
)  # fmt: skip
# Packages that consist of top-level modules.
_FLAT = frozenset(("megatron", "accelerate", "peft", "deepspeed", "trl"))


def owner_of(file: str) -> str:
    """Return whose code a file is: "user", "framework" (trainers, engines, torch), "package" or
    "stdlib".
    """
    path = _plain(file)
    parts = path.split("/")
    inside = _inside(path)
    if any(mark in parts for mark in _GENERATED):
        return "framework"
    if inside is not None:
        return "framework" if inside in PACKAGES else "package"
    if _STDLIB.search(path) or _STDLIB_FILE.search(path) or _STDLIB_FROZEN.match(path):
        return "stdlib"
    if any(mark in path for mark in _GENERATED_PLACES):
        return "package"
    if path.startswith(_RAY_SOURCES):
        return "framework"
    if _checkout(parts):
        return "framework"
    return "package" if _compiled_package(path) else "user"


def package_of(file: str) -> str:
    """Return the package that a file belongs to, such as "torch"; "" for the user's own code."""
    path = _plain(file)
    inside = _inside(path)
    if inside is not None:
        return inside
    owner = owner_of(file)
    if owner == "stdlib":
        return "Python"
    if owner == "package":
        return _compiled_package(path)
    if owner != "framework":
        return ""
    if path.startswith(_RAY_SOURCES):
        return "ray"
    parts = path.split("/")
    if framework := _checkout(parts):
        return framework
    return "unsloth" if "unsloth_compiled_cache" in parts else "generated code"


def _compiled_package(path: str) -> str:
    """Return the package of a Cython file, from its path in the package's sources; "" if none."""
    first, slash, _ = path.partition("/")
    return first if slash and path.endswith(_COMPILED) and first.isidentifier() else ""


def _plain(file: str) -> str:
    return file.replace("\\", "/").strip()


def _inside(path: str) -> str | None:
    """Return the first path part below the installed packages; None if the path is elsewhere."""
    if path.startswith(_SHORTENED):
        # Users shorten the path of the installed packages when they post a log.
        path = "site-packages/" + path.partition("/")[2]
    for mark in _INSTALLED:
        if mark in path:
            first, *rest = path.rpartition(mark)[2].split("/")
            return rest[0] if first.endswith(".egg") and rest else first.removesuffix(".py")
    return None


def _checkout(parts: list[str]) -> str:
    """Return the framework whose source checkout contains a path; "" if none does.

    A folder inside a package may be named like another package: slime/slime/ray/buffer.py is
    slime's.
    """
    places = [place for place, part in enumerate(parts[:-1]) if part in PACKAGES]
    if not places or parts[places[-1] + 1] in _OF_USERS:
        return ""
    inner = places[-1]
    # In a checkout, the package is in a folder of the same name, in src/ or in python/, or it has
    # subfolders.
    if parts[inner] in _FLAT or _is_nested(parts, inner) or len(parts) > inner + 2:
        return parts[inner]
    return next((parts[place] for place in places if _is_nested(parts, place)), "")


def _is_nested(parts: list[str], place: int) -> bool:
    """Return whether a folder is inside one of the same name, inside src/ or inside python/."""
    return place > 0 and parts[place - 1] in ("src", "python", parts[place])
