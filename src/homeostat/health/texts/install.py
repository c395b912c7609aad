"""Error texts of the family install: packages, versions, builds, caches and the model hub."""

from __future__ import annotations

from homeostat.health.finding import Cause, Confidence, Family, Level
from homeostat.health.texts.conditions import first_failures
from homeostat.health.texts.parts import advice, safe
from homeostat.health.texts.trouble import Trouble

_REINSTALL = (
    "Install it into the same environment that runs the training (`python -m pip`), and on "
    "every node."
)

_PACKAGES = (
    Trouble(
        code="ERR300",
        name="package-missing",
        family=Family.INSTALL,
        texts=("ModuleNotFoundError: No module named", "ImportError: No module named"),
        what="A Python module could not be imported: its package is not in this environment.",
        why=(
            "The package is not installed, was installed for another Python, or its folder "
            "is not on PYTHONPATH of the worker process."
        ),
        fixes=(
            advice("", _REINSTALL),
            advice(
                "",
                (
                    "For your own module: install it (`pip install -e .`) or put its folder "
                    "on PYTHONPATH, for Ray in runtime_env.env_vars."
                ),
            ),
        ),
        confidence=Confidence.INFERRED,
        explains=("ERR424",),
    ),
    Trouble(
        code="ERR301",
        name="framework-not-installed",
        family=Family.INSTALL,
        texts=tuple(
            f"No module named '{name}'"
            for name in (
                "lightrft",
                "verl",
                "openrlhf",
                "slime",
                "miles",
                "axolotl",
                "chatlearn",
                "trl",
                "swift",
                "llamafactory",
                "prime_rl",
                "skyrl_train",
                "nemo_rl",
                "homeostat",
                "torchtitan",
                "areal",
                "open_instruct",
            )
        ),
        what="The training framework itself is not installed in this environment.",
        why=(
            "It was cloned but not installed, or the command runs in another environment or "
            "outside the repository."
        ),
        fixes=(
            advice(
                "",
                (
                    "In its repository: `pip install -r requirements.txt` and `pip install "
                    "-e .`, with the Python that starts the run."
                ),
            ),
            advice(
                "",
                (
                    "With Ray: the workers need it as well; install it on every node or put "
                    "the repository on their PYTHONPATH."
                ),
            ),
        ),
        explains=("ERR300",),
    ),
    Trouble(
        code="ERR302",
        name="flash-attention-missing",
        family=Family.INSTALL,
        texts=(
            "No module named 'flash_attn'",
            "No module named 'flash_attn_2_cuda'",
            "No module named 'flash_attn.",
            "No module named 'flash_attn_interface'",
            "FlashAttention2 has been toggled on, but it cannot be used",
            "package flash_attn seems to be not installed",
            "FlashAttention-2 is not available",
        ),
        what="FlashAttention was asked for and is not installed.",
        why=(
            "flash-attn is a compiled package; it is not pulled in by the trainers and must "
            "fit the torch, CUDA and Python at hand."
        ),
        fixes=(
            safe(
                "model.attention",
                "sdpa",
                "Torch's own attention needs no package and computes the same.",
            ),
            advice(
                "",
                (
                    "Or install a prebuilt wheel of flash-attn for exactly this torch, CUDA "
                    "and Python; `pip install flash-attn --no-build-isolation` builds one."
                ),
            ),
        ),
        explains=("ERR300", "ERR307"),
    ),
    Trouble(
        code="ERR303",
        name="engine-not-installed",
        family=Family.INSTALL,
        texts=(
            "No module named 'vllm'",
            "No module named 'sglang'",
            "No module named 'sgl_kernel'",
            "No module named 'sglang_router'",
            "vLLM is not available and `use_vllm` is set to True",
            "vLLM is required * but is not installed",
            "vLLM is not installed",
        ),
        what="The generation engine that the settings ask for is not installed.",
        why=(
            "vLLM and SGLang are optional extras of the trainers and pin their own torch version."
        ),
        fixes=(
            advice(
                "",
                (
                    "Install the engine's version that the trainer names (for TRL: `pip "
                    "install trl[vllm]`), in one go with torch, so that the resolver sees "
                    "both."
                ),
            ),
            safe(
                "engine.type",
                "native",
                "Or sample without it, more slowly.",
                trl="use_vllm=false",
                lightrft="--engine_type",
            ),
        ),
        explains=("ERR300", "ERR307"),
    ),
    Trouble(
        code="ERR304",
        name="package-missing",
        family=Family.INSTALL,
        texts=(
            "No module named 'deepspeed'",
            "requires deepspeed: `pip install deepspeed`",
            "DeepSpeed is not installed",
            "requires `deepspeed` to be installed",
            "No module named 'deepspeed.",
        ),
        what="DeepSpeed was asked for and is not installed.",
        why="A DeepSpeed config was given, and the package is an optional extra.",
        fixes=(
            advice(
                "",
                (
                    "`pip install deepspeed`; the compiled parts are built on first use and "
                    "need nvcc of torch's CUDA version."
                ),
            ),
        ),
        explains=("ERR300", "ERR307"),
    ),
    Trouble(
        code="ERR305",
        name="package-missing",
        family=Family.INSTALL,
        texts=(
            "No module named 'apex'",
            "No module named 'transformer_engine",
            "No module named 'amp_C'",
            "No module named 'fused_layer_norm_cuda'",
            "No module named 'megatron",
            "No module named 'mbridge'",
            "gradient_accumulation_fusion* requires the custom CUDA extension",
        ),
        what=(
            "A compiled package of the Megatron stack (apex, transformer_engine, "
            "megatron-core) is missing."
        ),
        why=(
            "They are built from source with CUDA extensions; a plain pip install of apex "
            "gives an unrelated or pure-Python package."
        ),
        fixes=(
            advice(
                "",
                (
                    "Use the framework's container image, or build apex with its CUDA "
                    "extensions and install transformer_engine[pytorch] for this torch."
                ),
            ),
            advice("", "Megatron-LM must be on PYTHONPATH of the Ray workers, too."),
        ),
        explains=("ERR300",),
    ),
    Trouble(
        code="ERR306",
        name="package-missing",
        family=Family.INSTALL,
        texts=(
            "No module named 'bitsandbytes'",
            "requires the latest version of bitsandbytes",
            "quantization requires bitsandbytes",
            "No package metadata was found for bitsandbytes",
            "Using `bitsandbytes` * requires",
        ),
        what=(
            "8-bit or 4-bit loading (or an 8-bit optimiser) needs bitsandbytes, which is "
            "missing or too old."
        ),
        why=(
            "bitsandbytes is an optional package; transformers asks for a recent version of "
            "it and of accelerate."
        ),
        fixes=(
            advice("", "`pip install -U bitsandbytes accelerate`, then restart the process."),
            advice("", "Or load the model unquantised and use the plain AdamW."),
        ),
        explains=("ERR300", "ERR307", "ERR328"),
    ),
    Trouble(
        code="ERR307",
        name="package-missing",
        family=Family.INSTALL,
        texts=(
            "requires the following packages that were not found in your environment",
            "library but it was not found in your environment",
            "requires the SentencePiece library",
            "requires the * library but it was not found",
            "is not installed. Please install it with `pip install",
            "but PEFT is not installed",
            "requires peft to be installed",
            "requires you to install",
            "No module named 'peft'",
            "No module named 'accelerate'",
            "No module named 'liger_kernel",
            "No module named 'xformers",
            "No module named 'math_verify'",
            "No module named 'latex2sympy2",
            "No module named 'wandb'",
            "No module named 'tiktoken'",
            "No module named 'sentencepiece'",
            "No module named 'causal_conv1d",
            "No module named 'mamba_ssm",
            "No module named 'einops'",
            "No module named 'mergekit'",
            "No module named 'llm_blender'",
            "No module named 'qwen_vl_utils'",
            "No module named 'decord'",
        ),
        what="An optional package that these settings or this model need is not installed.",
        why=(
            "Trainers load adapters, kernels, tokenizers, verifiers and trackers on demand; "
            "the package is only missed when it is first used."
        ),
        fixes=(
            advice(
                "",
                (
                    "Install the package that the message names with the Python that runs "
                    "the training, on every node."
                ),
            ),
            advice(
                "", ("Or switch off the setting that needs it (kernel patch, tracker, adapter).")
            ),
        ),
        explains=("ERR300",),
    ),
    Trouble(
        code="ERR308",
        name="python-incomplete",
        family=Family.INSTALL,
        texts=tuple(
            f"No module named '{name}'"
            for name in (
                "distutils",
                "imp",
                "_bz2",
                "_lzma",
                "_ctypes",
                "_sqlite3",
                "pkg_resources",
                "_tkinter",
                "pip",
                "setuptools",
                "wheel",
                "packaging",
            )
        ),
        what="A module that belongs to Python or its packaging tools is missing.",
        why=(
            "distutils and imp are gone from Python 3.12, setuptools is no longer in fresh "
            "environments, and a Python built without system headers lacks _bz2, _lzma, "
            "_ctypes or _sqlite3."
        ),
        fixes=(
            advice(
                "",
                (
                    "`pip install -U setuptools wheel packaging` for distutils, "
                    "pkg_resources and wheel."
                ),
            ),
            advice(
                "",
                (
                    "For names with an underscore: install the system's -dev libraries and "
                    "rebuild Python, or take a packaged Python."
                ),
            ),
        ),
        explains=("ERR300", "ERR335"),
    ),
    Trouble(
        code="ERR309",
        name="python-version-unsupported",
        family=Family.INSTALL,
        texts=(
            "requires a different Python",
            "which requires Python",
            "depends on Python>=",
            "depends on Python<",
            "unsupported operand type(s) for |: 'type' and",
            "cannot import name 'Self' from 'typing'",
            "cannot import name 'StrEnum' from 'enum'",
            "cannot import name 'NotRequired' from 'typing'",
            "No module named 'tomllib'",
            "requires Python >=",
            "does not satisfy Python>=",
        ),
        what="This Python version is too old or too new for a package.",
        why=(
            "Packages name the Python versions that they support; compiled ones have wheels "
            "for those only."
        ),
        fixes=(
            advice(
                "",
                (
                    "Make an environment with a Python that all of them support (3.10 to "
                    "3.12 as of today): `uv venv --python 3.11`."
                ),
            ),
        ),
        explains=("ERR330", "ERR332", "ERR300"),
    ),
)

_CUDA = (
    Trouble(
        code="ERR310",
        name="gpu-architecture-unsupported",
        family=Family.INSTALL,
        texts=(
            "no kernel image is available for execution",
            "is not compatible with the current PyTorch installation",
            "The current PyTorch install supports CUDA capabilities",
            "device kernel image is invalid",
            "FlashAttention only supports Ampere GPUs or newer",
            "FlashAttention only supports * GPUs or newer",
            "is not defined for option 'gpu-name'",
            "sm_* is not compatible with",
            "no kernel image is available",
        ),
        what="The installed binaries hold no code for this GPU's architecture.",
        why=(
            "A torch wheel or compiled extension is built for a list of architectures. A GPU "
            "newer than the wheel's CUDA, or older than the kernel supports, has none."
        ),
        fixes=(
            advice(
                "",
                (
                    'Compare `python -c "import torch; print(torch.version.cuda, '
                    "torch.cuda.get_arch_list())\"` with the GPU's compute capability; "
                    "install a torch wheel for a CUDA that knows it (cu128 or later for "
                    "Blackwell)."
                ),
            ),
            advice(
                "",
                (
                    "Rebuild extensions (flash-attn, vLLM, apex) against that torch with "
                    "TORCH_CUDA_ARCH_LIST set to the GPU."
                ),
            ),
            safe(
                "model.attention",
                "sdpa",
                "FlashAttention 2 needs Ampere or newer; torch's attention runs on older GPUs.",
            ),
        ),
        explains=("ERR314", "ERR315", "ERR467"),
    ),
    Trouble(
        code="ERR311",
        name="gpu-driver-too-old",
        family=Family.INSTALL,
        texts=(
            "NVIDIA driver on your system is too old",
            "CUDA driver version is insufficient for CUDA runtime version",
            "forward compatibility was attempted on non supported HW",
            "PTX was compiled with an unsupported toolchain",
            "unsupported display driver / cuda driver combination",
            "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        ),
        what="The GPU driver is older than the CUDA version of the installed binaries.",
        why=(
            "A CUDA runtime needs a driver of at least its own release; containers bring the "
            "runtime but use the host's driver."
        ),
        fixes=(
            advice(
                "",
                "Update the host's driver (`nvidia-smi` shows the newest CUDA that it supports).",
            ),
            advice(
                "",
                (
                    "Or install torch and the engine for an older CUDA (cu121, cu124) that "
                    "the driver supports."
                ),
            ),
        ),
        explains=("ERR313", "ERR310", "ERR314"),
    ),
    Trouble(
        code="ERR312",
        name="torch-without-cuda",
        family=Family.INSTALL,
        texts=(
            "Torch not compiled with CUDA enabled",
            "torch * +cpu && CUDA",
            "PyTorch was not compiled with CUDA",
            "torch is not compiled with CUDA",
        ),
        what="The installed torch is a CPU build.",
        why=(
            "Another package's requirement, or an index without CUDA wheels, replaced the "
            "CUDA build of torch."
        ),
        fixes=(
            advice(
                "",
                (
                    "Reinstall torch from the CUDA index (`pip install torch --index-url "
                    "https://download.pytorch.org/whl/cu128`), then the packages that were "
                    "built against it."
                ),
            ),
            safe("trainer.device", "cpu", "Or run on the CPU on purpose."),
        ),
        explains=("ERR313",),
    ),
    Trouble(
        code="ERR313",
        name="gpu-not-answering",
        family=Family.INSTALL,
        texts=(
            "Found no NVIDIA driver on your system",
            "Failed to initialize NVML",
            "NVMLError_",
            "CUDA unknown error - this may be due to an incorrectly set up environment",
            "Failed to infer device type",
            "no CUDA-capable device is detected",
            "CUDA error: initialization error",
        ),
        what="The GPU or its driver does not answer in this process.",
        why=(
            "The container was started without GPUs, the driver is missing, broken or was "
            "updated without a reboot, or CUDA was initialised in a parent process."
        ),
        fixes=(
            advice(
                "",
                (
                    "Run `nvidia-smi` in the same container and shell; start containers with "
                    "`--gpus all`; check CUDA_VISIBLE_DEVICES and the number of processes "
                    "per node."
                ),
            ),
            advice(
                "",
                (
                    "In Ray workers: ask for a GPU in the actor (num_gpus) before CUDA is "
                    "used, and do not touch CUDA in the driver process."
                ),
            ),
            advice(
                "",
                (
                    "A driver/library version mismatch ends with a reboot or a reload of the "
                    "kernel module."
                ),
            ),
        ),
        confidence=Confidence.INFERRED,
    ),
    Trouble(
        code="ERR314",
        name="cuda-library-mismatch",
        family=Family.INSTALL,
        texts=(
            "libcudart.so* cannot open shared object",
            "libcublas* cannot open shared object",
            "libcublasLt* cannot open shared object",
            "libcudnn* cannot open shared object",
            "libcusparse* cannot open shared object",
            "libnvrtc* cannot open shared object",
            "libcupti* cannot open shared object",
            "libcufft* cannot open shared object",
            "libnccl.so* cannot open shared object",
            "libcusparseLt* cannot open shared object",
            "libcuda.so.1* cannot open shared object",
            "undefined symbol: __nvJitLink",
            "undefined symbol: cublas",
            "undefined symbol: cudnn",
            "undefined symbol: nccl",
            "CUDNN_STATUS_VERSION_MISMATCH",
            "CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH",
            "cuDNN version incompatibility",
            "Could not load library libcudnn",
            "Unable to load any of {libcudnn",
        ),
        what=(
            "A CUDA library (cudart, cuBLAS, cuDNN, NCCL ...) is missing or of another "
            "version than the binaries were built for."
        ),
        why=(
            "Two CUDA installations meet: torch's own nvidia-* wheels, and a system CUDA on "
            "LD_LIBRARY_PATH or an extension that was built for another major version."
        ),
        fixes=(
            advice(
                "",
                (
                    "Take the system CUDA out of LD_LIBRARY_PATH (`unset LD_LIBRARY_PATH`) "
                    "and reinstall torch with its nvidia-* wheels in one go."
                ),
            ),
            advice(
                "",
                (
                    "Reinstall the extension that the traceback names for torch's CUDA major "
                    'version (`python -c "import torch; print(torch.version.cuda)"`).'
                ),
            ),
        ),
        explains=("ERR315", "ERR300"),
    ),
    Trouble(
        code="ERR315",
        name="extension-abi-mismatch",
        family=Family.INSTALL,
        texts=(
            "undefined symbol: _ZN3c10",
            "undefined symbol: _ZNK3c10",
            "undefined symbol: _ZN2at",
            "undefined symbol: _ZNK2at",
            "undefined symbol: _ZN5torch",
            "undefined symbol: _ZNK5torch",
            "undefined symbol: _ZTIN3c10",
            "undefined symbol: _ZNR",
            "flash_attn_2_cuda* undefined symbol",
            "_C.abi3.so: undefined symbol",
            ".so: undefined symbol",
            "DLL load failed while importing",
        ),
        what=(
            "A compiled extension was built against another torch version than the one installed."
        ),
        why=(
            "Torch's C++ interface changes with each release. flash-attn, vLLM, xformers or "
            "apex loaded here was built before torch was upgraded or downgraded."
        ),
        fixes=(
            advice(
                "",
                (
                    "Reinstall the extension whose .so file the message names, for this "
                    "torch: a wheel made for it, or `pip install --no-build-isolation "
                    "--no-cache-dir --force-reinstall --no-deps <package>`."
                ),
            ),
            advice(
                "",
                (
                    "With vLLM: install vLLM first and let it choose torch, then the other "
                    "extensions."
                ),
            ),
            safe(
                "model.attention",
                "sdpa",
                "Where the extension is flash-attn: torch's attention needs none.",
            ),
        ),
        explains=("ERR300", "ERR324"),
    ),
    Trouble(
        code="ERR316",
        name="extension-abi-mismatch",
        family=Family.INSTALL,
        texts=(
            "operator torchvision::nms does not exist",
            "PyTorch and torchvision were compiled with different CUDA",
            "PyTorch has CUDA Version* and torchvision has CUDA Version",
            "libtorchaudio* undefined symbol",
            "PyTorch and TorchAudio were compiled with different CUDA",
            "module 'torchvision' has no attribute 'extension'",
        ),
        what="torchvision or torchaudio does not belong to the installed torch.",
        why=(
            "Each torchvision and torchaudio release is built for exactly one torch release "
            "and CUDA; torch was changed without them."
        ),
        fixes=(
            advice(
                "",
                (
                    "Install torch, torchvision and torchaudio in one command from one "
                    "index; or uninstall the two where nothing needs them."
                ),
            ),
        ),
        explains=("ERR315", "ERR324"),
    ),
    Trouble(
        code="ERR317",
        name="system-library-too-old",
        family=Family.INSTALL,
        texts=(
            "version `GLIBC_*' not found",
            "version `GLIBCXX_*' not found",
            "version `CXXABI_*' not found",
        ),
        what="The system's C or C++ library is older than the one that a binary was built with.",
        why=(
            "The wheel was built on a newer Linux; or conda's libstdc++ and the system's are "
            "mixed up."
        ),
        fixes=(
            advice(
                "",
                (
                    "For GLIBCXX and CXXABI: `conda install -c conda-forge libstdcxx-ng` and "
                    "let its lib folder come first; for GLIBC: a container with a newer "
                    "Linux, or a build from source on this one."
                ),
            ),
        ),
        explains=("ERR300", "ERR315"),
    ),
    Trouble(
        code="ERR318",
        name="numpy-abi-mismatch",
        family=Family.INSTALL,
        texts=(
            "compiled using NumPy 1.x cannot be run in",
            "numpy.dtype size changed, may indicate binary incompatibility",
            "_ARRAY_API not found",
            "`np.float_` was removed in the NumPy 2.0",
            "numpy.core.multiarray failed to import",
            "RuntimeError: Numpy is not available",
            "module 'numpy' has no attribute",
            "No module named 'numpy._core",
            "No module named 'numpy.core._multiarray",
        ),
        what="A package does not fit the installed NumPy (version 1 against version 2).",
        why=(
            "NumPy 2 changed its binary interface and removed old names; packages built or "
            "written for NumPy 1 fail with it, and pickles of one cannot be read by the "
            "other."
        ),
        fixes=(
            advice(
                "",
                (
                    "Upgrade the package that the traceback names, or pin `numpy<2` for the "
                    "whole environment."
                ),
            ),
        ),
        explains=("ERR300", "ERR324"),
    ),
    Trouble(
        code="ERR319",
        name="protobuf-version-incompatible",
        family=Family.INSTALL,
        texts=(
            "Descriptors cannot be created directly",
            "Descriptors cannot not be created directly",
            "requires the protobuf library but it was not found",
            "'MessageFactory' object has no attribute 'GetPrototype'",
            "Couldn't build proto file into descriptor pool",
            "google.protobuf.runtime_version.VersionError",
            "cannot import name 'runtime_version' from 'google.protobuf'",
        ),
        what=(
            "The installed protobuf does not fit the code that was generated with another version."
        ),
        why=(
            "sentencepiece, wandb, tensorboard, Ray and onnx bring generated code that is "
            "bound to a range of protobuf versions."
        ),
        fixes=(
            advice(
                "",
                (
                    "Upgrade the package that the traceback names; else pin protobuf to the "
                    "newest version that all of them allow (3.20.x for very old ones)."
                ),
            ),
        ),
        explains=("ERR300", "ERR307", "ERR324"),
    ),
)

_VERSIONS = (
    Trouble(
        code="ERR320",
        name="vllm-version-incompatible",
        family=Family.INSTALL,
        texts=(
            "cannot import name * from 'vllm",
            "cannot import name 'GuidedDecodingParams'",
            "module 'vllm* has no attribute",
            "No module named 'vllm.",
            "LLM.__init__() got an unexpected keyword argument",
            "EngineArgs.__init__() got an unexpected keyword argument",
            "EngineArgs.__init__() missing",
            "SamplingParams.__init__() got an unexpected keyword argument",
            "Unexpected keyword argument '*' && SamplingParams",
            "LLM.generate() got an unexpected keyword argument",
            "'LLM' object has no attribute",
            "'LLMEngine' object has no attribute",
            "'AsyncLLM' object has no attribute",
            "'EngineCore* object has no attribute",
            "No module named 'vllm_flash_attn",
            "please upgrade vllm",
            "vllm version * is not supported",
            "requires vllm=",
            "requires vllm>",
            "requires vllm<",
        ),
        what="The installed vLLM is not a version that the training library was written for.",
        why=(
            "vLLM moves and removes names in its Python interface with nearly every release; "
            "a trainer works with the versions that it was tested with."
        ),
        causes=(
            Cause(
                "vllm-version-incompatible",
                ("what the trainer imports or calls is not in this vLLM"),
            ),
            Cause(
                "dependency-conflict", ("the two were installed without the resolver seeing both")
            ),
        ),
        fixes=(
            advice(
                "",
                (
                    "Install the vLLM version that the trainer names (for TRL: `pip install "
                    "'trl[vllm]'`), or upgrade the trainer to one made for this vLLM; then "
                    "check `pip check`."
                ),
            ),
        ),
        explains=("ERR300", "ERR321", "ERR322", "ERR324", "ERR408", "ERR326"),
    ),
    Trouble(
        code="ERR321",
        name="vllm-version-untested",
        family=Family.INSTALL,
        texts=(
            "TRL currently only supports vLLM version",
            "TRL currently only supports vLLM versions",
            "TRL currently supports vLLM versions",
        ),
        what="This TRL was not tested with the installed vLLM; it may work.",
        why="TRL names the vLLM versions that it was tested with and only warns about others.",
        fixes=(
            advice(
                "",
                (
                    "If generation fails or behaves oddly, install the vLLM version that the "
                    "warning names, or a newer TRL."
                ),
            ),
        ),
        level=Level.INFO,
    ),
    Trouble(
        code="ERR322",
        name="vllm-version-incompatible",
        family=Family.INSTALL,
        texts=(
            "AttributeError: * object has no attribute",
            "AttributeError: module * has no attribute",
            "ImportError: cannot import name",
            "TypeError: * got an unexpected keyword argument",
        ),
        context=("TRL currently only supports vLLM", "TRL currently supports vLLM"),
        within=60,
        what=(
            "A call between TRL and vLLM failed, after TRL warned that this vLLM version was "
            "not tested."
        ),
        why=(
            "vLLM's Python interface changes between releases; the missing name or argument "
            "belongs to another version."
        ),
        fixes=(
            advice(
                "",
                "Install the vLLM version that TRL's warning names, or a TRL made for this vLLM.",
            ),
        ),
        confidence=Confidence.INFERRED,
        explains=("ERR321", "ERR324", "ERR326"),
    ),
    Trouble(
        code="ERR323",
        name="sglang-version-incompatible",
        family=Family.INSTALL,
        texts=(
            "cannot import name * from 'sglang",
            "No module named 'sglang.",
            "which is less than the minimum required version",
            "sgl-kernel is installed with version",
            "flashinfer_python is installed with version",
            "ServerArgs.__init__() got an unexpected keyword argument",
            "cannot import name * from 'sgl_kernel",
            "cannot import name * from 'flashinfer",
        ),
        what=(
            "SGLang, its kernels (sgl-kernel, flashinfer) and the training library do not "
            "fit together."
        ),
        why=(
            "SGLang checks the versions of its kernel packages, and trainers patch or call "
            "parts of it that change between releases."
        ),
        fixes=(
            advice(
                "",
                (
                    "Install the SGLang version that the trainer's documentation or image "
                    "names, with the sgl-kernel and flashinfer versions that this SGLang "
                    "asks for."
                ),
            ),
        ),
        explains=("ERR300", "ERR324", "ERR408", "ERR315"),
    ),
    Trouble(
        code="ERR324",
        name="library-version-mismatch",
        family=Family.INSTALL,
        texts=tuple(
            f"cannot import name * from '{name}"
            for name in (
                "transformers",
                "trl",
                "peft",
                "accelerate",
                "huggingface_hub",
                "datasets",
                "tokenizers",
                "deepspeed",
                "torch",
                "bitsandbytes",
                "verl",
                "megatron",
                "unsloth",
                "ray",
                "pydantic",
                "liger_kernel",
                "axolotl",
                "swift",
            )
        )
        + tuple(
            f"No module named '{name}."
            for name in (
                "transformers",
                "trl",
                "peft",
                "accelerate",
                "datasets",
                "torch",
                "verl",
                "ray",
                "megatron",
                "axolotl",
                "swift",
                "huggingface_hub",
            )
        )
        + (
            "module 'transformers' has no attribute",
            "module 'torch' has no attribute",
            "module 'trl' has no attribute",
            "Failed to import transformers.",
            "Failed to import trl.",
            "'DynamicCache' object has no attribute",
            "name 'PreTrainedConfig' is not defined",
            "partially initialized module",
        ),
        what=(
            "A name that one library imports from another is not there: their versions do "
            "not fit together."
        ),
        why=(
            "transformers, trl, peft, accelerate and torch move and remove names; one was "
            "upgraded without the others. A file of yours named like a library (trl.py, "
            "datasets.py) does the same."
        ),
        fixes=(
            advice(
                "",
                (
                    "Upgrade or pin both packages that the message names together (`pip "
                    "install -U trl transformers peft accelerate`), or install from the "
                    "trainer's own lock file; then `pip check`."
                ),
            ),
            advice(
                "",
                (
                    "Make sure that no file or folder in the working directory is named like "
                    "the library."
                ),
            ),
        ),
        explains=("ERR300",),
    ),
    Trouble(
        code="ERR325",
        name="architecture-unsupported",
        family=Family.INSTALL,
        texts=(
            "does not recognize this architecture",
            "`rope_scaling` must be a dictionary with two fields",
            "`rope_scaling` must be a dictionary with with two fields",
            "Unrecognized configuration class",
            "Unrecognized model in",
            "KeyError: 'qwen",
            "KeyError: 'llama",
            "KeyError: 'mistral",
            "KeyError: 'gemma",
            "KeyError: 'deepseek",
            "KeyError: 'phi",
            "KeyError: 'glm",
            "Tokenizer class * does not exist or is not currently imported",
        ),
        what="The installed transformers or engine does not know this model architecture.",
        why=(
            "The model is newer than the library, or the folder's config.json is missing, "
            "damaged or of another kind of model."
        ),
        causes=(
            Cause(
                "architecture-unsupported", "the library is older than the model, or never had it"
            ),
            Cause(
                "model-path-wrong", "the folder is not a complete checkpoint with its config.json"
            ),
        ),
        fixes=(
            advice(
                "",
                (
                    "Upgrade transformers (and the engine) to a release that names the "
                    "model; check that config.json in the folder has its `model_type`."
                ),
            ),
            advice(
                "",
                (
                    "Several ranks reading the same folder at once while it is written give "
                    "the same words: fill the cache first, then start the ranks."
                ),
                slime="--model-name",
            ),
        ),
    ),
    Trouble(
        code="ERR326",
        name="library-version-mismatch",
        family=Family.INSTALL,
        texts=(
            "Trainer.__init__() got an unexpected keyword argument",
            "compute_loss() got an unexpected keyword argument 'num_items_in_batch'",
            "unexpected keyword argument 'evaluation_strategy'",
            "unexpected keyword argument 'dispatch_batches'",
            "unexpected keyword argument 'tokenizer'",
            "unexpected keyword argument 'keep_torch_compile'",
            "unexpected keyword argument 'use_auth_token'",
            "unexpected keyword argument 'torch_dtype'",
            "unexpected keyword argument 'dataset_text_field'",
            "unexpected keyword argument 'max_seq_length'",
            "forward() got an unexpected keyword argument 'num_items_in_batch'",
            "Trainer' object has no attribute",
            "training_step() takes",
            "log() takes 2 positional arguments but 3 were given",
            "_prepare_inputs() got an unexpected",
            "ensure_weights_tie",
            "_is_hf_initialized",
        ),
        what="A call uses an argument that the installed version of the library does not have.",
        why=(
            "Arguments were renamed or moved between releases of transformers and TRL "
            "(tokenizer to processing_class, evaluation_strategy to eval_strategy, SFT "
            "arguments into SFTConfig), and the caller was written for another one."
        ),
        fixes=(
            advice(
                "",
                (
                    "Use the argument's new name, or pin transformers, trl and accelerate to "
                    "the versions that the script was written for."
                ),
            ),
        ),
        explains=("ERR408",),
    ),
    Trouble(
        code="ERR327",
        name="tokenizers-version-mismatch",
        family=Family.INSTALL,
        texts=(
            "data did not match any variant of untagged enum",
            "tokenizers>=* is required for a normal functioning",
            "Exception: expected `,` or `}` at line",
            "Couldn't instantiate the backend tokenizer",
            "ModelWrapper at line",
        ),
        what="tokenizer.json cannot be read by the installed tokenizers library.",
        why=(
            "The file was written by a newer tokenizers release than the one installed, or "
            "is damaged."
        ),
        fixes=(
            advice(
                "",
                (
                    "Upgrade transformers and tokenizers together; if it persists, download "
                    "the tokenizer files again (and sentencepiece or tiktoken for slow "
                    "tokenizers)."
                ),
            ),
        ),
        explains=("ERR328",),
    ),
    Trouble(
        code="ERR328",
        name="dependency-conflict",
        family=Family.INSTALL,
        texts=(
            "is required for a normal functioning of this module, but found",
            "with `PyTorch` requires `accelerate",
            "requires `accelerate>=",
            "requires the `accelerate` library",
            "pkg_resources.VersionConflict",
            "ContextualVersionConflict",
            "pkg_resources.DistributionNotFound",
            "importlib.metadata.PackageNotFoundError",
            "is incompatible with the installed version of",
        ),
        what="A library checked the version of another one and refuses it.",
        why=(
            "The environment was changed by a later install that did not look at this requirement."
        ),
        fixes=(
            advice(
                "",
                (
                    "Install the version that the message names; `pip check` lists the "
                    "others that are broken."
                ),
            ),
        ),
        explains=("ERR324",),
    ),
    Trouble(
        code="ERR330",
        name="dependency-conflict",
        family=Family.INSTALL,
        texts=(
            "No solution found when resolving dependencies",
            "your requirements are unsatisfiable",
            "ResolutionImpossible",
            "these package versions have conflicting dependencies",
            "conflicting dependencies",
            "SolverProblemError",
            "LibMambaUnsatisfiableError",
            "are incompatible with each other",
        ),
        what=(
            "The packages asked for cannot be installed together: their requirements "
            "contradict each other."
        ),
        why=(
            "Two of them demand different versions of a third (torch, transformers, numpy "
            "...). Engines such as vLLM pin torch and transformers tightly."
        ),
        causes=(
            Cause("dependency-conflict", "the resolver names the two that contradict each other"),
            Cause("vllm-version-incompatible", "the engine's pins are the usual side of it"),
        ),
        fixes=(
            advice(
                "",
                (
                    "Let the engine choose: fix its version and loosen the others, or take "
                    "the newest release of it that allows the others; put engine and trainer "
                    "into separate environments where they talk over HTTP."
                ),
            ),
        ),
        explains=("ERR331",),
    ),
    Trouble(
        code="ERR331",
        name="dependency-conflict",
        family=Family.INSTALL,
        texts=(
            "pip's dependency resolver does not currently take into account all the packages",
            "which is incompatible.",
        ),
        what=(
            "pip installed packages although others in the environment ask for different versions."
        ),
        why=(
            "pip only warns about packages that were installed earlier; what breaks shows up "
            "at import or later."
        ),
        fixes=(
            advice(
                "",
                (
                    "Install everything in one command so that the resolver sees all of it, "
                    "then run `pip check`."
                ),
            ),
        ),
        level=Level.WARN,
    ),
    Trouble(
        code="ERR332",
        name="package-version-not-found",
        family=Family.INSTALL,
        texts=(
            "Could not find a version that satisfies the requirement",
            "No matching distribution found for",
            "was not found in the package registry",
            "there are no versions of",
            "is not a supported wheel on this platform",
            "has no wheels with a matching",
        ),
        what="The index has no such package version for this Python, platform or CUDA.",
        why=(
            "The version does not exist, has wheels for other Pythons or platforms only, or "
            "lies on another index (CUDA wheels of torch)."
        ),
        fixes=(
            advice(
                "",
                (
                    "Check the version and your Python; add the right index "
                    "(`--extra-index-url https://download.pytorch.org/whl/cu128`); check "
                    "that the network reaches it."
                ),
            ),
        ),
    ),
)

_BUILDS = (
    Trouble(
        code="ERR335",
        name="build-failed",
        family=Family.INSTALL,
        texts=(
            "Failed building wheel for",
            "Failed to build installable wheels",
            "Could not build wheels for",
            "subprocess-exited-with-error",
            "metadata-generation-failed",
            "error: command * failed with exit code",
            "Failed to build `",
            "Error compiling objects for extension",
            "ninja: build stopped",
            "RuntimeError: Error building extension",
        ),
        what="A package with compiled parts could not be built from source.",
        why=(
            "No prebuilt wheel fits this Python, torch and CUDA, and the build lacks "
            "something: nvcc, ninja, headers, memory, or torch during the build."
        ),
        fixes=(
            advice(
                "",
                (
                    "Prefer a prebuilt wheel: the package's version that has one for this "
                    "Python, torch and CUDA (vLLM: `pip install vllm` in a fresh "
                    "environment)."
                ),
            ),
            advice(
                "",
                (
                    "To build: `pip install ninja packaging wheel setuptools`, torch first, "
                    "then `pip install <package> --no-build-isolation`, with MAX_JOBS=4 "
                    "where memory is short."
                ),
            ),
        ),
        confidence=Confidence.INFERRED,
        explains=("ERR300",),
    ),
    Trouble(
        code="ERR336",
        name="cuda-toolkit-missing",
        family=Family.INSTALL,
        texts=(
            "CUDA_HOME environment variable is not set",
            "CUDA_HOME does not exist",
            "nvcc was not found",
            "No such file or directory: '*nvcc'",
            "nvcc: not found",
            "nvcc: command not found",
            "MissingCUDAException",
            "Please make sure nvcc is in your PATH",
        ),
        what="The CUDA compiler (nvcc) was not found.",
        why=(
            "torch's wheels bring the CUDA libraries but not the compiler; building "
            "extensions (flash-attn, DeepSpeed ops, vLLM) needs the toolkit."
        ),
        fixes=(
            advice(
                "",
                (
                    "Install the CUDA toolkit of torch's version (`conda install -c nvidia "
                    "cuda-toolkit=12.8` or the system package) and set CUDA_HOME to it; or "
                    "use prebuilt wheels."
                ),
            ),
        ),
        explains=("ERR335", "ERR340", "ERR424", "ERR300"),
    ),
    Trouble(
        code="ERR337",
        name="build-isolation",
        family=Family.INSTALL,
        texts=("No module named 'torch'",),
        context=(
            "Getting requirements to build wheel",
            "Preparing metadata",
            "setup.py",
            "build-env",
            "build_meta",
            "get_requires_for_build_wheel",
            "flash-attn",
            "flash_attn",
        ),
        within=40,
        what=(
            "A package's build needs torch, and pip builds in an isolated environment that "
            "has none."
        ),
        why=(
            "flash-attn, apex and others import torch in setup.py without declaring it; "
            "build isolation hides the installed one."
        ),
        fixes=(
            advice(
                "",
                (
                    "Install torch first, then `pip install <package> --no-build-isolation` "
                    "(uv: `--no-build-isolation-package flash-attn`)."
                ),
            ),
        ),
        explains=("ERR300", "ERR335"),
    ),
    Trouble(
        code="ERR338",
        name="cuda-toolkit-mismatch",
        family=Family.INSTALL,
        texts=(
            "The detected CUDA version * mismatches the version that was used to compile",
            "does not match the version torch was compiled with",
            "unsupported GNU version! gcc versions later than",
            "Unsupported gpu architecture 'compute_",
            "CUDAMismatchException",
        ),
        what=(
            "The CUDA compiler on this machine does not fit torch's CUDA version, the C++ "
            "compiler or the GPU."
        ),
        why=(
            "nvcc must have torch's major CUDA version, know the GPU's architecture, and "
            "accept the installed gcc."
        ),
        fixes=(
            advice(
                "",
                (
                    "Point CUDA_HOME to a toolkit of torch's CUDA version (`python -c "
                    '"import torch; print(torch.version.cuda)"`), and CC/CXX to a gcc that '
                    "it supports."
                ),
            ),
            advice("", "Or install torch for the CUDA that is there."),
        ),
        explains=("ERR335", "ERR340"),
    ),
    Trouble(
        code="ERR340",
        name="deepspeed-op-build-failed",
        family=Family.INSTALL,
        texts=(
            "Error building extension 'cpu_adam",
            "Error building extension 'fused_adam",
            "Error building extension 'utils'",
            "Error building extension 'async_io",
            "Unable to JIT load the * op",
            "object has no attribute 'ds_opt_adam'",
        ),
        what=(
            "DeepSpeed could not build one of its compiled operations (CPUAdam, FusedAdam, "
            "async I/O)."
        ),
        why=(
            "They are compiled on first use: nvcc of torch's CUDA version, ninja, a C++ "
            "compiler, libaio for NVMe offload and a writable TORCH_EXTENSIONS_DIR are "
            "needed. Ranks that share the cache folder can also trip over each other."
        ),
        fixes=(
            advice(
                "",
                (
                    "`ds_report` shows which ops are ready. Install ninja and the toolkit, "
                    "delete the folder ~/.cache/torch_extensions, and try again."
                ),
            ),
            advice(
                "",
                "Or use torch's AdamW and no CPU offload: then the op is not needed.",
                lightrft="--adam_offload",
                openrlhf="--ds.adam_offload",
                trl="deepspeed",
            ),
        ),
        explains=("ERR335",),
    ),
    Trouble(
        code="ERR341",
        name="compiler-missing",
        family=Family.INSTALL,
        texts=(
            "fatal error: Python.h: No such file",
            "Python.h: No such file or directory",
            "Failed to find C compiler",
            "cannot find -lcuda",
            "Ninja is required to load C++ extensions",
            "fatal error: cuda_runtime.h",
            "error: command 'gcc' failed: No such file",
            "error: command 'g++' failed: No such file",
            "InvalidCxxCompiler",
            "No working C++ compiler found",
            "gcc: command not found",
        ),
        what=(
            "Triton, torch.compile or an extension wants to compile, and the compiler, its "
            "headers or ninja are missing."
        ),
        why=(
            "Kernels are compiled on the machine at run time: that takes gcc or g++, "
            "Python's headers (Python.h), ninja and a libcuda that the linker finds."
        ),
        fixes=(
            advice(
                "",
                (
                    "Install gcc, g++, python3-dev (or python3.x-devel) and ninja; for "
                    "-lcuda add the driver's lib folder (or the toolkit's lib64/stubs) to "
                    "LIBRARY_PATH."
                ),
            ),
            safe(
                "engine.enforce_eager",
                "true",
                "Where the engine's compilation is what fails: run without it, more slowly.",
            ),
        ),
        explains=("ERR335", "ERR346", "ERR340"),
    ),
)

_CACHES = (
    Trouble(
        code="ERR345",
        name="compile-cache-corrupt",
        family=Family.INSTALL,
        texts=(
            "JSONDecodeError",
            "EOFError: Ran out of input",
            "pickle data was truncated",
            "UnpicklingError",
            "FileNotFoundError",
            "Stale file handle",
            "OSError: [Errno",
            "PermissionError",
            "zlib.error",
            "Invalid cubin",
            "invalid cubin",
        ),
        context=(
            "torch_compile_cache",
            "torchinductor",
            "torch/_inductor",
            "fxgraph",
            "fx_graph_cache",
            "codecache.py",
            "autotune_cache",
            "aotautograd",
            ".triton/cache",
            "triton/runtime/cache",
            "vllm/compilation",
            "triton/compiler/compiler.py",
            "InductorError",
            "TRITON_CACHE",
        ),
        within=12,
        what=(
            "A cached compilation result (torch.compile, Inductor, Triton) is broken or "
            "half-written."
        ),
        why=(
            "Several processes write the same cache folder at once, often on a network home "
            "directory, or an earlier process was killed while writing."
        ),
        fixes=(
            advice(
                "",
                (
                    "Delete the caches: ~/.cache/vllm/torch_compile_cache, ~/.triton/cache "
                    "and the torchinductor folder under the temporary directory."
                ),
            ),
            advice(
                "",
                (
                    "Put them on a local disk per node and job: VLLM_CACHE_ROOT, "
                    "TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR; or set "
                    "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 in the workers' environment "
                    "(slower start)."
                ),
            ),
        ),
        explains=("ERR346", "ERR464", "ERR424", "ERR558", "ERR566"),
    ),
    Trouble(
        code="ERR346",
        name="torch-compile-failed",
        family=Family.INSTALL,
        texts=(
            "torch._dynamo.exc.BackendCompilerFailed",
            "BackendCompilerFailed",
            "torch._inductor.exc.",
            "InductorError:",
            "LoweringException",
            "torch._dynamo.exc.Unsupported",
            "torch._dynamo.exc.TorchRuntimeError",
            "torch._dynamo.exc.InternalTorchDynamoError",
        ),
        what="torch.compile could not compile the model.",
        why=(
            "Some operation, shape or Python construct is not supported by this torch's "
            "compiler, or Triton cannot compile for this GPU."
        ),
        fixes=(
            safe(
                "engine.enforce_eager",
                "true",
                "Where the engine's compilation fails: run it without.",
                vllm="enforce_eager",
            ),
            advice(
                "",
                (
                    "Where the trainer's fails: switch torch.compile off, or set "
                    "TORCHDYNAMO_DISABLE=1 to find out whether it is to blame."
                ),
                trl="torch_compile",
                axolotl="torch_compile",
                transformers="torch_compile",
            ),
        ),
        confidence=Confidence.INFERRED,
    ),
    Trouble(
        code="ERR347",
        name="remote-code-cache-race",
        family=Family.INSTALL,
        texts=(
            "module 'transformers_modules.* has no attribute",
            "No module named 'transformers_modules",
            "FileNotFoundError && transformers_modules",
            "FileExistsError && transformers_modules",
            "OSError && transformers_modules",
            "ImportError && transformers_modules",
            "PermissionError && transformers_modules",
            "is not a package && transformers_modules",
            "SyntaxError && transformers_modules",
        ),
        what=(
            "A model's remote code was read from the modules cache while another process was "
            "writing it."
        ),
        why=(
            "Each rank copies the model's Python files into one shared folder "
            "(HF_MODULES_CACHE) and imports them from there; without a lock, one rank sees a "
            "truncated or missing file. Workers that unpickle such a class without the cache "
            "fail alike."
        ),
        fixes=(
            advice(
                "",
                (
                    "Load the tokenizer and config once in a single process before the ranks "
                    "start, so that the cache is filled."
                ),
                slime="--model-name",
            ),
            advice(
                "",
                (
                    "Or give each rank or node a folder of its own with HF_MODULES_CACHE; "
                    "upgrade transformers, which writes these files more safely."
                ),
            ),
        ),
        explains=("ERR300", "ERR324", "ERR325", "ERR424"),
    ),
    Trouble(
        code="ERR359",
        name="remote-code-cache-race",
        family=Family.INSTALL,
        confidence=Confidence.INFERRED,
        texts=(
            "SyntaxError: ",
            "IndentationError: ",
            "FileNotFoundError: ",
            "FileExistsError: ",
            "EOFError: ",
        ),
        context=("/transformers_modules/", "transformers/dynamic_module_utils.py"),
        within=4,
        what="A model's remote code could not be read from the modules cache: a file of it is "
        "missing or half written.",
        why="Ranks copy the model's Python files into one shared folder at the same time; one of "
        "them reads a file that another is still writing.",
        fixes=(
            advice(
                "",
                "Load the tokenizer and config once in a single process before the ranks start, "
                "so that the cache is filled; delete the half-written folder first.",
            ),
            advice("", "Or give each rank or node a folder of its own with HF_MODULES_CACHE."),
        ),
        explains=("ERR300", "ERR324", "ERR325", "ERR424"),
    ),
    Trouble(
        code="ERR348",
        name="remote-code-not-allowed",
        family=Family.INSTALL,
        texts=(
            "requires you to execute the * file in that repo",
            "contains custom code which must be executed",
            "Please pass the argument `trust_remote_code=True`",
            "set the option `trust_remote_code=True`",
            "trust_remote_code=True` to allow custom code",
        ),
        what=(
            "The model or dataset comes with its own Python code, and running it was not allowed."
        ),
        why="Code from the hub is run only when asked for.",
        fixes=(
            advice(
                "",
                "Read the code, pin its revision, then allow it.",
                trl="trust_remote_code",
                axolotl="trust_remote_code",
                llama_factory="trust_remote_code",
                verl="actor_rollout_ref.model.trust_remote_code",
                vllm="--trust-remote-code",
                sglang="--trust-remote-code",
            ),
            advice("", "Or upgrade transformers: many such models are part of it by now."),
        ),
        explains=("ERR325",),
    ),
)

_HUB = (
    Trouble(
        code="ERR350",
        name="hub-access-denied",
        family=Family.INSTALL,
        texts=(
            "GatedRepoError",
            "Cannot access gated repo",
            "You are trying to access a gated repo",
            "401 Client Error",
            "403 Client Error && hugg",
            "403 Forbidden && hugg",
            "Invalid user token",
            "Invalid username or password",
            "awaiting a review from the repo authors",
            "Access to * is restricted and you are not in the authorized list",
            "HfHubHTTPError: 401",
            "HfHubHTTPError: 403",
            "LocalTokenNotFoundError",
        ),
        what=(
            "The model hub refuses access: no token, a wrong one, or the licence was not accepted."
        ),
        why=(
            "Gated and private repositories need a token of an account that was granted "
            "access, in the environment of every process."
        ),
        fixes=(
            advice(
                "",
                (
                    "Accept the licence on the model's page, then `huggingface-cli login` or "
                    "set HF_TOKEN for all workers (Ray: runtime_env.env_vars)."
                ),
            ),
            safe("model.path", "", "Or download the model once and give the folder."),
        ),
        explains=("ERR351", "ERR352"),
    ),
    Trouble(
        code="ERR351",
        name="model-path-wrong",
        family=Family.INSTALL,
        texts=(
            "is not a local folder and is not a valid model identifier",
            "RepositoryNotFoundError",
            "Repo id must be in the form",
            "HFValidationError",
            "Repo id must use alphanumeric chars",
            "404 Client Error && hugg",
            "EntryNotFoundError",
            "does not appear to have a file named",
            "DatasetNotFoundError",
            "doesn't exist on the Hub or cannot be accessed",
            "RevisionNotFoundError",
            "Incorrect path_or_model_id",
            "Can't load tokenizer for",
            "Can't load the configuration of",
            "no file named pytorch_model.bin",
            "Error no file named",
            "is not the path to a directory containing a file named config.json",
        ),
        what="The model or dataset was not found under the given name or path.",
        why=(
            "A typing error, a relative path seen from another working directory, a folder "
            "that exists on one node only, or a checkpoint folder without its config and "
            "tokenizer files. What is not a folder is taken for a name on the hub."
        ),
        fixes=(
            safe(
                "model.path",
                "",
                (
                    "Give an absolute path that exists on every node and holds config.json, "
                    "the tokenizer files and the weights; or the exact name on the hub."
                ),
            ),
        ),
        confidence=Confidence.INFERRED,
        explains=("ERR424",),
    ),
    Trouble(
        code="ERR352",
        name="hub-unreachable",
        family=Family.INSTALL,
        texts=(
            "LocalEntryNotFoundError",
            "couldn't connect to 'https://huggingface.co'",
            "couldn't connect to 'https://hf",
            (
                "Cannot find the requested files in the disk cache and outgoing traffic has "
                "been disabled"
            ),
            "OfflineModeIsEnabled",
            "host='huggingface.co'",
            "Failed to resolve 'huggingface.co'",
            "Couldn't reach * on the Hub",
            "Cannot reach https://huggingface.co",
            "Cannot reach * offline mode is enabled",
            "host='hf-mirror.com'",
            "Temporary failure in name resolution && hugg",
            "Cannot send a request, as the client has been closed",
        ),
        survivable=True,
        what="Files had to be fetched from the model hub, and it could not be reached.",
        why=(
            "The node has no way to the internet (usual for compute nodes), offline mode is "
            "set while the files are not in the cache, or the cache lies elsewhere "
            "(HF_HOME)."
        ),
        fixes=(
            safe(
                "model.path",
                "",
                (
                    "Download on a node with internet (`huggingface-cli download`) to a "
                    "shared folder and give that path."
                ),
            ),
            advice(
                "",
                (
                    "Set HF_HOME to the filled cache for every worker, then "
                    "HF_HUB_OFFLINE=1; or set HTTPS_PROXY."
                ),
            ),
        ),
        explains=("ERR351",),
    ),
    Trouble(
        code="ERR353",
        name="hub-download-failed",
        family=Family.INSTALL,
        texts=(
            "CAS service error",
            "Data processing error: CAS",
            "File reconstruction error",
            "Consistency check failed: file should be of size",
            "ChunkedEncodingError",
            "IncompleteRead(",
            "Background writer channel closed",
            "xet* && RuntimeError",
        ),
        survivable=True,
        what="A download from the model hub broke off.",
        why="The transfer service (Xet) or the connection failed in the middle of a large file.",
        fixes=(
            advice(
                "",
                (
                    "Set HF_HUB_DISABLE_XET=1 and download again (`huggingface-cli "
                    "download`); finished files are kept."
                ),
            ),
            advice("", "Check the free space of HF_HOME and the proxy's limits."),
        ),
    ),
    Trouble(
        code="ERR354",
        name="hub-rate-limit",
        family=Family.INSTALL,
        texts=(
            "429 Client Error && hugg",
            "Too Many Requests && hugg",
            "We had to rate limit",
            "HfHubHTTPError: 429",
            "reached the rate limit",
        ),
        survivable=True,
        what="The model hub refuses further requests for now: rate limit.",
        why="Many ranks or jobs ask the hub at once, often without a token.",
        fixes=(
            advice(
                "",
                (
                    "Download once to a shared folder, give that path, and set "
                    "HF_HUB_OFFLINE=1; log in with a token, which has a higher limit."
                ),
            ),
        ),
        explains=("ERR351", "ERR352"),
    ),
    Trouble(
        code="ERR355",
        name="lfs-pointer-files",
        family=Family.INSTALL,
        texts=(
            "version https://git-lfs.github.com/spec",
            "invalid load key, 'v'",
            "git-lfs* is not installed",
            "smudge filter lfs failed",
        ),
        what="The weight or data files are Git LFS pointers, not the files themselves.",
        why=(
            "The repository was cloned without git-lfs: each large file is a text of three "
            "lines that names it."
        ),
        fixes=(
            advice(
                "",
                (
                    "`git lfs install && git lfs pull` in the clone, or download with "
                    "`huggingface-cli download`; files of a few hundred bytes are pointers."
                ),
            ),
        ),
        explains=("ERR558", "ERR559"),
    ),
    Trouble(
        code="ERR356",
        name="tracker-unavailable",
        family=Family.INSTALL,
        texts=(
            "api_key not configured (no-tty)",
            "wandb.errors.UsageError",
            "wandb.errors.CommError",
            "wandb.errors.errors.CommError",
            "wandb.errors.AuthenticationError",
            "wandb.sdk.lib.service_connection.WandbServiceNotUpError",
            "wandb: ERROR Error while calling W&B API",
            "mlflow.exceptions.MlflowException",
            "swanlab* && not logged in",
        ),
        what="The experiment tracker could not be started and ended the run.",
        why=(
            "No key is configured, the key or entity is wrong, or the node cannot reach the server."
        ),
        fixes=(
            advice(
                "",
                (
                    "Set WANDB_API_KEY for the process that logs, or WANDB_MODE=offline and "
                    "upload later with `wandb sync`."
                ),
            ),
            safe(
                "observe.sinks",
                "",
                "Or log to files only.",
                trl="report_to",
                transformers="report_to",
                axolotl="wandb_mode",
                verl="trainer.logger",
                llama_factory="report_to",
            ),
        ),
    ),
    Trouble(
        code="ERR357",
        name="bitsandbytes-without-gpu",
        family=Family.INSTALL,
        texts=(
            "CUDA Setup failed despite GPU being available",
            "libbitsandbytes_cpu.so",
            "libbitsandbytes_cuda* cannot open shared object",
            "'NoneType' object has no attribute 'cget_managed_ptr'",
            "bitsandbytes was compiled without GPU support",
            "bitsandbytes library load error",
            "Configured CUDA binary not found at",
        ),
        what="bitsandbytes found no binary for this CUDA version and runs without the GPU.",
        why=(
            "Its wheels hold binaries for certain CUDA versions; the one in use is picked "
            "from torch or LD_LIBRARY_PATH and is not among them."
        ),
        fixes=(
            advice(
                "",
                (
                    "Upgrade bitsandbytes; `python -m bitsandbytes` shows what it looks for; "
                    "set BNB_CUDA_VERSION only to a version that it ships."
                ),
            ),
            advice("", "Or train without 8-bit optimisers and 4-bit loading."),
        ),
        explains=("ERR314", "ERR306", "ERR324"),
    ),
    Trouble(
        code="ERR358",
        name="triton-version-mismatch",
        family=Family.INSTALL,
        texts=(
            "cannot import name * from 'triton",
            "No module named 'triton",
            "module 'triton* has no attribute",
            "PassManager::run failed",
            "AttributeError: * && triton",
            "0 active drivers ([])",
            "triton.compiler.errors.CompilationError",
            "triton.runtime.errors.OutOfResources",
        ),
        what="Triton, or a kernel written for it, does not fit this torch or GPU.",
        why=(
            "Each torch release works with one Triton release; kernels of other packages use "
            "parts of it that change, and need resources that some GPUs lack."
        ),
        fixes=(
            advice(
                "",
                (
                    "Install the Triton that torch asks for (`pip show torch` lists it), and "
                    "upgrade the package whose kernel fails; switch that kernel off if it "
                    "does not help."
                ),
            ),
        ),
        confidence=Confidence.INFERRED,
        explains=("ERR300", "ERR324", "ERR346"),
    ),
    Trouble(
        code="ERR369",
        name="native-extension-crash",
        family=Family.INSTALL,
        texts=("Fatal Python error: Segmentation fault",),
        # The first frame that the fault handler prints is quoted beside it.
        context=('File "*.py", line * in ',),
        within=4,
        what="A native extension crashed (segmentation fault) below the Python frame that the "
        "fault handler prints first.",
        why=(
            "Compiled code touched memory that is not its own: an extension built for another "
            "torch or Python, or a fault of its own. The first frame behind `most recent call "
            "first` is the call into it; the package of that file is the one to look at."
        ),
        fixes=(
            advice(
                "",
                (
                    "Reinstall or rebuild the package of the first frame against the torch and "
                    "Python that are installed; call it alone on the same input; then ask its "
                    "owner."
                ),
            ),
        ),
        confidence=Confidence.INFERRED,
        explains=("ERR141",),
    ),
)

TROUBLES: tuple[Trouble, ...] = first_failures(
    _PACKAGES + _CUDA + _VERSIONS + _BUILDS + _CACHES + _HUB
)
