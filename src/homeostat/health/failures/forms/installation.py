"""Message patterns of libraries, compilers, loaders and shells about a broken installation.

They cover packages and versions, shared libraries, compilers, GPUs and model architectures.
Hundreds of libraries word such errors in a few ways. The kind of a form is what is missing or does
not fit. It does not matter whose code raised, because the message already names the package,
version or GPU.
"""
# ruff: noqa: E501 (a table)

from __future__ import annotations

# Kind of a form -> the illness.
CAUSES = {
    "package": "package-missing",
    "version": "library-version-mismatch",
    "python": "python-version-unsupported",
    "gpu": "gpu-architecture-unsupported",
    "driver": "gpu-driver-too-old",
    "toolkit": "cuda-toolkit-mismatch",
    "no toolkit": "cuda-toolkit-missing",
    "compiler": "compiler-missing",
    "build": "build-failed",
    "abi": "extension-abi-mismatch",
    "cuda library": "cuda-library-mismatch",
    "cpu torch": "torch-without-cuda",
    "architecture": "architecture-unsupported",
    "platform": "known-bad-version",
    "system": "environment-unfit",
}
# Names that a library defines only if an optional package is installed -> that package.
OPTIONAL = {
    "bnb": "bitsandbytes", "BitsAndBytes": "bitsandbytes", "Lora": "peft", "Peft": "peft",
    "PrefixTuning": "peft", "PromptTuning": "peft", "deepspeed": "deepspeed", "DeepSpeed": "deepspeed",
    "AutoAWQ": "autoawq", "AutoGPTQ": "auto-gptq", "flash_attn": "flash-attn", "index_first_axis": "flash-attn",
    "pad_input": "flash-attn", "unpad_input": "flash-attn", "apply_rotary_emb_func": "flash-attn",
    "Liger": "liger-kernel", "wandb": "wandb", "xformers": "xformers", "xops": "xformers", "apex": "apex",
    "FusedLayerNorm": "apex", "FusedAdam": "apex", "selective_scan": "mamba-ssm", "mamba_": "mamba-ssm",
    "causal_conv1d": "causal-conv1d", "rearrange": "einops", "SamplingParams": "vllm", "LLM": "vllm",
    "vllm": "vllm", "sentencepiece": "sentencepiece", "SentencePiece": "sentencepiece", "tiktoken": "tiktoken",
    "decord": "decord", "librosa": "librosa", "swanlab": "swanlab", "mlflow": "mlflow", "torchvision": "torchvision",
    "te": "transformer-engine", "nltk": "nltk", "pynvml": "nvidia-ml-py", "process_vision_info": "qwen-vl-utils",
    "triton": "triton", "tl": "triton", "ray": "ray", "sgl_kernel": "sgl-kernel", "timm": "timm", "av": "av",
    "cv2": "opencv-python", "sklearn": "scikit-learn", "accelerate": "accelerate", "Accelerator": "accelerate",
    "init_empty_weights": "accelerate", "torch_npu": "torch-npu", "megatron": "megatron-core",
}  # fmt: skip
_EXACT = frozenset(("te", "tl", "LLM", "ray", "av", "cv2", "timm", "bnb"))
# A version has a dot. A number without one may be the value of any setting.
_VERSION = r"v?\d{1,4}\.\d{1,4}[\w.+]{0,24}"
_COMPARED = rf"(?:[<>=~!]=?=?|at least|version)\s?{_VERSION}"
_PACKAGES = (
    r"(?:py)?torch(?:vision|audio|ao|tune|titan|data|codec)?|transformers|tokenizers|accelerate|peft|trl|datasets"
    r"|deepspeed|megatron[\w.-]{0,20}|vllm[\w-]{0,12}|sglang|sgl[-_]kernel|flash[-_ ]?attn|flash[-_ ]?attention[-_ ]?\d?"
    r"|flashinfer[\w-]{0,12}|flash[-_ ]?mla|xformers|bitsandbytes|triton|numpy|scipy|pandas|pyarrow|protobuf|huggingface[-_ ]hub"
    r"|apex|transformer[-_ ]?engine|mbridge|ray|pydantic|tensorflow|jax|flax|mlx[\w-]{0,8}|unsloth[\w-]{0,8}|liger[\w-]{0,8}"
    r"|optimum[\w-]{0,8}|auto[-_]?gptq|gptqmodel|auto[-_]?awq|llm[-_]?compressor|compressed[-_]tensors|diffusers"
    r"|sentence[-_]transformers|(?:pytorch[-_ ])?lightning|timm|wandb|nccl|cudnn|nvshmem|deep[-_]?ep|deep[-_]?gemm"
    r"|mamba[-_]ssm|causal[-_]conv1d|fla|flash[-_]linear[-_]attention|colossalai|mcore|torch[-_]npu|cann|rocm|outlines"
    r"|xgrammar|lm[-_]?eval|swanlab|mlflow|omegaconf|hydra[-_]core|openai|safetensors|sentencepiece|tiktoken|cutlass"
    r"|nemo[\w-]{0,12}|gradio|fastapi|httpx|setuptools|tensorrt[\w-]{0,8}|onnx[\w-]{0,12}|kernels|hqq|aqlm|eetq|quanto"
)
_PACKAGE = r"[`'\"]?(?:the )?[`'\"]?[A-Za-z][\w.\[\]-]{1,50}[`'\"]?"
_GPU = (
    r"(?:Volta\b|Turing\b|Ampere\b|Ada\b|Hopper\b|Blackwell\b|[AHVB]\d00\b|GB\d{2,3}\b|MI\d{3}|SM_?\d{2,3}[af]?\b|sm_?\d{2,3}[af]?\b"
    r"|(?:compute|CUDA|device) capabilit)"
)

# (kind, pattern, words): the pattern's groups are inserted into the words.
FORMS: tuple[tuple[str, str, str], ...] = (
    # Compilers and builds
    ("toolkit", r"nvcc fatal\s{0,4}:\s{0,2}(.{1,120})", "the CUDA compiler refuses: {0}"),
    ("toolkit", r"(?i)unsupported (GNU version|Microsoft Visual Studio version|clang version)", "the CUDA compiler does not know this compiler ({0})"),
    ("toolkit", r"(?i)(?:requires?|needs?|supported on|supports?|use|must be|have) (?:at least |only )?((?:CUDA|NVCC)(?: toolkit| version)?\s?(?:[<>=]=?|at least)?\s?v?\d{1,2}\.\d)",
     "{0} is wanted"),
    ("toolkit", r"(?i)((?:CUDA|NVCC)(?: toolkit)? version \S{0,12}\s?\d{1,2}\.\d\S{0,6} (?:is )?(?:too old|too low|lower than|not supported|unsupported|less than)[\w .]{0,40})", "{0}"),
    ("toolkit", r"(?i)\b((?:CUDA|NVCC)(?: toolkit| version)? ?\d{1,2}\.\d\S{0,4} or (?:later|newer|higher|above|greater)[\w ]{0,20})", "{0} is wanted"),
    ("toolkit", r"(C\+\+\d\d (?:or later )?compatible compiler is required)", "{0}"),
    ("compiler", r"(?i)unrecognized command[- ]line option ['\"`](-std=\S{1,20}?)['\"`]", "the compiler is too old for {0}"),
    ("no toolkit", r"(?i)(?:cannot|can't|could not|couldn't|unable to|failed to) (?:find|locate)[^.]{0,40}?\b(nvcc|ptxas|cuda_home|cuda toolkit|CUDA compiler|cuobjdump)\b", "{0} was not found"),
    ("no toolkit", r"(?i)\b(nvcc|ptxas|cuda_home)\b (?:is undefined|cannot be found|could not be found|is not (?:found|set|defined|installed)|not found)", "{0} was not found"),
    ("compiler", r"(?i)(?:cannot|can't|could not|couldn't|unable to|failed to) (?:find|locate) (?:a |any |the )?(?:working |suitable )?(C(?:\+\+)?|host|Rust|Fortran) compiler", "there is no {0} compiler"),
    ("no toolkit", r"(CMAKE_CUDA_COMPILER) not set|Could not find (CUDA) \(missing|Could NOT find (CUDA)", "cmake does not find the CUDA compiler"),
    ("no toolkit", r"\b(nvcc|ptxas)'?:? (?:command )?not found", "{0} was not found"),
    ("compiler", r"fatal error: ([\w./+-]{1,80}\.(?:h|hpp|cuh)): No such file", "the header {0} is not installed"),
    ("compiler", r"cannot find -l([\w+-]{1,40})", "the linker does not find lib{0}"),
    ("compiler", r"(?i)(?:^|[\s/])(gcc|g\+\+|cc|c\+\+|clang|cl|cmake|make|ninja|rustc|cargo|gfortran|protoc)(?:\.exe)?:? (?:command )?(?:is )?not found", "{0} is not installed"),
    ("compiler", r"(?i)command not found: (gcc|g\+\+|cc|clang|cmake|make|ninja|rustc|cargo)\b", "{0} is not installed"),
    ("compiler", r"No such file or directory: '(gcc|g\+\+|cc|c\+\+|clang|cmake|make|ninja|cl|rustc|cargo)'", "{0} is not installed"),
    ("compiler", r"(?i)(Microsoft Visual C\+\+ [\d.]{1,6} (?:or greater )?is required|can't find Rust compiler|No CMAKE_C(?:XX)?_COMPILER could be found|CMAKE_C(?:XX)?_COMPILER not set|(?:failed|unable) to find (?:a |any )?(?:C|C\+\+|host) compiler)", "{0}"),
    ("compiler", r"Command '?\[?'?\S{0,80}?/?(gcc|g\+\+|cc|clang)'.{0,2000}? returned non-zero exit status", "{0} failed when a kernel was built: its headers or libraries are missing, or it does not fit"),
    ("build", r"Command '?\[?'?\S{0,80}?(ninja|cmake|make|hipcc|nvcc|setup\.py)\b.{0,2000}? returned non-zero exit status", "{0} failed"),
    ("build", r"(?i)(ninja build failed|could not compile `[\w-]{1,60}`|CMake Error at \S{1,80}|'cicc' died due to signal|failed to build '?[\w.-]{1,60}'? (?:when|wheel|extension)|g?make(?:\[\d\])?: \*\*\* \[.{1,80})", "{0}"),
    ("build", r"(?:^|: )(?:fatal )?error: (identifier \"[\w:]{1,80}\" is undefined|no member named '[\w:]{1,80}'|no matching function for call to|.{1,80} has no member|.{1,80} was not declared in this scope|use of undeclared identifier.{0,60})", "the code does not compile: {0}"),
    # Shared libraries and compiled modules
    ("cuda library", r"(lib(?:cu[dbfrs]|nv|nccl|cupti)[\w.+-]{1,60}\.so[\w.]{0,20}):? .{0,60}?(?:cannot open|not found|no such file)", "{0} cannot be found"),
    ("cuda library", r"(?i)(?:failed|unable|could not|cannot|can't) (?:to )?(?:load|open|find|locate)[^.]{0,60}?(lib(?:cu[dbfrs]|nv|nccl|cupti)[\w-]{0,40}(?:\.so[\w.]{0,20})?)", "{0} cannot be loaded"),
    ("abi", r"(lib(?:torch|c10|ATen)[\w.+-]{0,60}): cannot open shared object", "a compiled package was built for another torch: {0} cannot be found"),
    ("package", r"(lib[\w.+-]{1,80}\.so[\w.]{0,20}): cannot open shared object", "the system library {0} is not installed"),
    ("abi", r"undefined symbol: (\w{1,300})", "a compiled package does not fit: it lacks {0}"),
    ("abi", r"(?i)symbol not found in flat namespace '?(\w{1,120})", "a compiled package does not fit: it lacks {0}"),
    ("abi", r"(DLL load failed(?: while importing \w{1,60})?|\[WinError (?:126|127|182|1114)\])", "a compiled package cannot be loaded: {0}"),
    ("abi", r"(?i)(ABI (?:mismatch|incompatib\w{1,8}|version mismatch)|(?:built|compiled) (?:against|for|with) (?:a different|another|a newer|an older) (?:version of )?[\w.]{1,30})", "a compiled package does not fit: {0}"),
    ("abi", r"'_OpNamespace' '(_C\w{0,40})' object has no attribute '(\w{1,120})'", "the compiled part {0} has no {1}: it was not built, or for another version"),
    ("abi", r"(?:No such operator |Could not find schema for |[Oo]perator (?=\S{1,200} does not exist))(?!aten|torchvision)(\w{1,60}::[\w.]{1,120})", "the compiled operation {0} does not exist"),
    ("abi", r"Could not run '((?!aten|c10d|prims)\w{1,60}::[\w.]{1,120})' with arguments from the '\w{1,30}' backend", "the compiled operation {0} has no code for this device"),
    ("cpu torch", r"(?i)((?:torch|pytorch)[\w ]{0,20} (?:compiled|built) without (?:CUDA|GPU)|(?:doesn't|does not) have NCCL built in|module 'torch\._C' has no attribute '_cuda_\w{1,40}')", "{0}"),
    # GPUs and drivers
    ("driver", r"(?i)((?:update|upgrade) your (?:GPU |NVIDIA |CUDA )?driver|cudaErrorInsufficientDriver|CUDA_ERROR_SYSTEM_DRIVER_MISMATCH|driver (?:version )?(?:\S{1,20} )?is (?:too old|insufficient))", "{0}"),
    ("gpu", rf"(?i)((?:requires?|required|needs?|only (?:supports?|supported|available|works?|runs?|implemented)|supports? only|unsupported|not supported|at least|minimum|too old|not compiled|newer|or (?:above|higher|later))\b[^.\n]{{0,60}}?\b{_GPU}[\w .()>=<,+/-]{{0,40}})", "{0}"),
    ("gpu", rf"(?i)({_GPU}[\w .()>=<,+/-]{{0,30}} ?(?:is|are)? ?(?:not supported|unsupported|required|not compatible|too old|or (?:above|higher|later|newer)[\w ]{{0,20}}required))", "{0}"),
    ("gpu", r"(?i)(not supported (?:on|for|by) (?:this|the current|your|these) (?:GPU|device|architecture|hardware)s?)", "{0}"),
    ("gpu", r"(?i)(cudaErrorNoKernelImageForDevice|no kernel image|hipErrorNoBinaryForGpu|invalid device function|No (?:valid|suitable|supported) [\w ]{1,40} (?:found )?for (?:device|compute) capability)", "{0}: the binaries hold no code for this GPU"),
    ("gpu", r"(exceeds device/fn maxSharedMem|(?i:unsupported (?:gpu |cuda )?arch(?:itecture)?:? '?(?:sm|compute|gfx)_?\w{1,8}))", "{0}"),
    ("gpu", r"(?i)((?:requires?|needs?) [^.\n]{0,40}?capability [<>=]=? ?\(?\d[^.\n]{0,40}|(?:device|compute|GPUs? with) (?:compute )?capability (?:\(\d{1,2}, ?\d\)|[<>]=? ?\d[\d.]{0,3}))", "{0}"),
    ("gpu", r"((?:requires?|needs?|only|unsupported|not supported (?:on|by|for)|for) [^.\n]{0,30}?\bgfx\d{3,4}\w?\b)", "{0}"),
    ("gpu", rf"(?i)(only (?:\w{{1,20}} (?:and|or|/) )?{_GPU}[^.\n]{{0,40}}? (?:is|are) supported)", "{0}"),
    ("gpu", r"(?i)((?:compiled|built) for (?:sm|compute|gfx)_?\w{2,6}\b[^.\n]{0,60})", "{0}"),
    # Python and versions
    ("python", r"(?i)((?:requires?|required|needs?|supports?|supported (?:on|for|with|by)|unsupported) (?:only )?python(?: version)?s?\s?(?:[<>=!~]=?)?\s?3\.\d{1,2}\+?)", "{0}"),
    ("python", r"(?i)(python(?: version)?\s?(?:must be )?(?:[<>=!~]=?)?\s?3\.\d{1,2}\S{0,6} (?:is |or )?(?:required|not supported|unsupported|higher|later|newer|above|greater|too old|too new))", "{0}"),
    ("platform", r"cannot import name '(SIG\w{1,12})' from 'signal'", "Windows has no {0}: this version of the library is written for Linux"),
    ("platform", r"module '(os|signal|socket|resource)' has no attribute '(getuid|geteuid|fork|setsid|killpg|getpgid|sched_getaffinity|sched_setaffinity|SIG\w{1,12}|AF_UNIX|uname|mkfifo)'", "Windows' {0} has no {1}: this version of the library is written for Linux"),
    ("platform", r"No module named '?(fcntl|resource|pwd|grp|termios|posix)\b'?", "Windows has no {0}: this version of the library is written for Linux"),
    ("system", r"(?i)((?:not supported|unsupported|does not work|not available|only supported|only available|only supports|only works|requires) (?:on )?(?:this OS|your OS|this operating system|your operating system|this platform|Windows|macOS|Mac OS|Linux)\b[\w .]{0,20})", "{0}"),
    ("python", r"module '(collections|inspect|ast|asyncio|imp|pkgutil|importlib|typing|enum|dataclasses|unittest|configparser)' has no attribute '(\w{1,60})'", "this Python's {0} has no {1}"),
    ("python", r"cannot import name '(\w{1,60})' from '(typing|collections|enum|dataclasses|inspect|asyncio|importlib[\w.]{0,20}|types|functools|contextlib)'", "this Python's {1} has no {0}"),
    ("python", r"('(?:type|ABCMeta|_GenericAlias)' object is not subscriptable)", "{0}: this Python is too old for such annotations"),
    ("python", r"(mutable default <class '[\w.]{1,120}'> for field \w{1,60} is not allowed)", "{0}: Python 3.11 and newer refuse that"),
    ("version", rf"(?i)\b(?:requires?|required?|needs?|need|depends? on|install|upgrade|use|supports?) (?:only |users to )?[`'\"]?((?:{_PACKAGES})[`'\"]?(?: version| package| library)?s?[`'\"]?(?: to)? ?\(?{_COMPARED})", "{0} is wanted"),
    ("version", rf"(?i)\b((?:{_PACKAGES})[`'\"]?(?: version)?s?[`'\"]?(?: must be| should be| needs to be| has to be| is| to be)? ?(?:{_COMPARED}|{_VERSION})[^.\n]{{0,40}}?\b(?:required|or (?:higher|later|newer|above|greater|lower|earlier)|too (?:old|new|low)|not (?:compatible|supported)|unsupported|incompatible|but|is needed|does not match|doesn't match|mismatch))", "{0}"),
    ("version", rf"(?i)\b(?:requires?|needs?) ((?:{_PACKAGES}) {_VERSION})", "{0} is wanted"),
    ("version", rf"(?i)\b((?:{_PACKAGES}|TE)(?:[- ]v?\d[\w.+]{{0,24}})? (?:must|should|needs to|has to) be (?:at least )?(?:[<>=~!]=?=?)\s?{_VERSION})", "{0} is wanted"),
    ("version", rf"(?i)\b(?:only|needed|(?:must )?have at least|at least) ((?:{_PACKAGES}|TE)(?: with)?(?: version)? ?(?:[<>=~!]=?=?)?\s?{_VERSION})", "{0} is wanted"),
    ("version", rf"(?i)\b((?:{_PACKAGES}|TE) ver(?:s)?ion ?(?:[<>=]=?)? ?{_VERSION} (?:and above |or \w{{4,8}} )?(?:is|are) (?:required|needed))", "{0}"),
    ("version", r"(?i)([\w.-]{2,50} version \(?[\w.+]{1,30}\)? (?:does not|doesn't|do not) match [\w .()+-]{1,80})", "{0}"),
    ("version", rf"(?i)\b(?:cannot|can't|not (?:supported|possible|available|compatible|work)|fails?|doesn't work|unsupported|broken)\b[^.\n]{{0,60}}? (?:with|on|in|for|under|by) [`'\"]?((?:{_PACKAGES})[`'\"]? ?(?:version )?(?:[<>=!~]=?=?)? ?{_VERSION})", "not with {0}"),
    ("version", rf"(?i)((?:installed|current|your) version of [`'\"]?(?:{_PACKAGES})[`'\"]?[^.\n]{{0,20}}{_VERSION})", "{0}"),
    ("version", rf"(?i)((?:minimum|maximum|latest supported) (?:supported )?version (?:is |of |: ?)?{_VERSION}|the version found is:? {_VERSION})", "{0}"),
    ("version", r"property '(\w{1,60})' of '(\w{1,60})' object has no setter", "{1}.{0} can no longer be set"),
    ("version", r"(can't set attribute '?\w{0,60}'?|cannot unpack non-iterable [A-Z]\w{1,60} object)", "{0}"),
    ("version", r"(?i)\b(?:unsupported|incompatible|outdated) (?!weight|policy|model|checkpoint|file|format|opset|protocol|schema|api)([\w.-]{2,40} versions?|versions? of [\w.-]{2,40})\b", "{0} does not fit"),
    ("version", rf"(?i)((?:{_PACKAGES})(?: version)?(?: {_VERSION})? (?:is|are) (?:not compatible|incompatible|too old|too new|outdated)[\w ]{{0,60}})", "{0}"),
    ("version", rf"(?i)\b((?:upgrade|downgrade|reinstall) (?:to )?(?:the )?(?:latest |newest |your )?(?:version of )?[`'\"]?(?:{_PACKAGES})\b)", "{0}"),
    ("version", r"(?i)[`'\"]([\w.]{1,80}(?:\(\))?)[`'\"] (?:(?:has been|was) (?:removed|moved|renamed|dropped)|is no longer (?:supported|available))", "{0} was removed from the installed version"),
    ("version", rf"(?i)\bonly ((?:{_PACKAGES}) versions? [^.\n]{{1,60}}?) (?:is|are) supported", "only {0} fits"),
    ("version", r"(?i)\b(?<!weight )(?<!weights )(?<!policy )(?<!model )(?<!checkpoint )(version mismatch|minimum required version|incompatible versions?)\b", "{0}"),
    ("abi", r"module '(\w{1,60}(?:_cuda|_C|_ext))' has no attribute '(\w{1,80})'", "the compiled module {0} has no {1}: it has another version"),
    ("abi", r"\b(\w{1,40}\._C) (?:was not built|is not built|not found|could not be imported|failed to)", "the compiled part {0} cannot be loaded"),
    ("version", r"'_OpNamespace' '(\w{1,60})' object has no attribute '(\w{1,120})'", "the compiled module {0} has no {1}: it has another version, or was not built"),
    # Packages
    ("package", rf"(?i)\b(?:requires?|needs?|require) ({_PACKAGE})(?: package| library| module)?,? (?:to be installed|installed|but (?:it )?(?:is|was) not|which (?:is|was|could) not)", "{0} is not installed"),
    ("package", rf"(?i)({_PACKAGE})(?: package| library| module)? (?:is|are) (?:not installed|not available|missing|required)[^\n]{{0,120}}?\binstall", "{0} is not installed"),
    ("package", rf"(?i)({_PACKAGE})(?: package| library| module)? (?:is|was|seems to be|are) not installed\b", "{0} is not installed"),
    ("package", rf"(?i)({_PACKAGE}) (?:is |was )?(?:not found|could not be imported|cannot be imported|not importable)[^\n]{{0,120}}?\binstall", "{0} is not installed"),
    ("package", rf"(?i)({_PACKAGE}) is required [\w ]{{1,60}}but (?:could not|cannot|was not|is not)", "{0} is not installed"),
    ("package", rf"(?i)(?:please|must|need to|have to|can|try to|should)(?: first| also| either| manually)? (?:pip )?install (?:the (?:following )?)?(?:packages?:? )?(?!the same|a different|the latest)({_PACKAGE})", "{0} is not installed"),
    ("package", rf"(?i)\b(?:requires?|needs?) ({_PACKAGE})\b[^.\n]{{0,60}}[;,.:(] ?(?:please )?install", "{0} is not installed"),
    ("package", rf"(?i)failed to import (?:the )?({_PACKAGE})(?: library| package| module)?[^\n]{{0,40}}\binstall\b", "{0} is not installed"),
    ("package", rf"(?i)({_PACKAGE}),? (?:which )?(?:isn't|aren't|wasn't) installed", "{0} is not installed"),
    ("package", rf"(?i)\bhave ({_PACKAGE}) installed\b", "{0} is not installed"),
    ("package", r"(?i)\b(?:package|library|module) [`'\"]([\w.-]{2,50})[`'\"] (?:is )?(?:required|needed|missing|not found)", "{0} is not installed"),
    ("package", rf"(?:^|[.;:!] )Install ({_PACKAGE}) (?:to|for|before|first|in order)", "{0} is not installed"),
    ("package", r"\b([\w.+-]{2,40}) (?:is )?not (?:found )?(?:in|on) (?:your |the )?(?:\$?PATH|system path)", "{0} is not installed or not on the path"),
    ("package", r"(?i)(?:pip3?|conda|uv(?: pip)?|apt(?:-get)?|uv add|brew)`? (?:add |install(?:ing)? )(?:-[\w-]{1,20} ){0,3}[`'\"]?([A-Za-z][\w.\[\]/:+@-]{1,80})", "{0} is not installed"),
    ("package", r"(?i)\bmissing (?:optional )?(?:dependency|dependencies|packages?):? [`'\"]?([\w.-]{2,50})", "{0} is not installed"),
    ("package", r"(?i)No module named '?(?!distutils|imp\b|pkg_resources|fcntl|resource\b)([a-z]\w{1,60})'?(?![.\w])", "{0} is not installed"),
    ("package", r"The '([\w.-]{2,60})[^']{0,40}' distribution was not found", "{0} is not installed"),
    ("package", r"No package metadata was found for '?([\w.-]{2,60})", "{0} is not installed"),
    ("package", r"(?i)Neither [`'\"]?([\w.-]{2,60})[`'\"]? nor [`'\"]?[\w.-]{2,60}[`'\"]? (?:is|are) (?:available|installed)", "{0} is not installed"),
    ("package", r"(?:^|: )(?:line \d{1,6}: )?([\w./-]{2,60}): (?:command )?not found$", "the command {0} is not installed or not on the path"),
    ("package", r"command not found: ([\w./-]{2,60})", "the command {0} is not installed or not on the path"),
    # Models
    ("architecture", r"(?i)\b(?:unsupported|unknown|unrecogni[sz]ed) (?:model (?:type|architecture|class|family)|architecture)s?:? ?[`'\"\[(]{0,3}([\w.-]{2,80})", "the library does not know the model {0}"),
    ("architecture", r"(?i)\b(?:(?:model(?:[ _]type| architecture| class)|architectures?) [`'\"\[]{0,2}|model [`'\"])([\w.-]{2,80})[`'\"\]]{0,2} (?:is |are )?(?:currently )?(?:not (?:yet )?supported|unsupported|not recogni[sz]ed|unknown)", "the library does not know the model {0}"),
    ("architecture", r"(?i)\bmodel ([\w./-]{2,80}) is not in the (?:supported|registered)", "the library does not know the model {0}"),
    ("architecture", r"\b(\w{2,60}For(?:CausalLM|ConditionalGeneration|SequenceClassification|TokenClassification|VisionText\w{0,20}))[`'\"\]]{0,2} (?:is |are )?(?:not (?:yet )?(?:supported|implemented|registered)|unsupported)", "the library does not know the model {0}"),
    ("architecture", r"'(\w{2,80})' is not a registered model", "the library does not know the model {0}"),
    ("architecture", r"\b((?!Peft|Base|Parallel)[A-Z]\w{2,60}Model)[`'\"\]]{0,2} (?:is |are )?(?:not (?:yet )?(?:supported|implemented|registered)|unsupported)", "the library does not know the model {0}"),
)  # fmt: skip


def optional_package(name: str) -> str:
    """Return the optional package without which a name is undefined; "" if none is known."""
    for start, package in OPTIONAL.items():
        if name == start or (start not in _EXACT and name.startswith(start)):
            return package
    return ""
