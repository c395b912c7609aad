"""Message patterns of RL trainers, and of libraries that run under them, about what is wrong.

verl and the trainers built on it, ROLL, OpenRLHF and AReaL word their checks of batches, GPUs and
servers in a few ways. A "slip" is a message that only a programming error causes, such as a tuple
that is unpacked into too few names. What it means depends on whose program it is.
"""
# ruff: noqa: E501 (a table)

from __future__ import annotations

# Kind of a pattern -> the illness.
CAUSES = {
    "bug": "known-bad-version",
    "prompt": "prompt-too-long",
    "budget": "token-budget-below-sequence",
    "masked": "rows-without-training",
    "server": "inference-server-unresponsive",
    "ray": "ray-cluster-unreachable",
    "placement": "placement-group-unschedulable",
    "degrees": "parallel-degrees-mismatch",
    "single": "group-size-one",
    "rocm": "rocm-visible-devices",
    "cache": "compile-cache-corrupt",
    "triton": "triton-version-mismatch",
}
# A kind of component that trainers look up by its name.
_PART = (
    r"(?:[a-z]{2,20}[ _-]){0,3}?(?:reward manager|tool parser|agent loop|dispatcher|executor|interaction"
    r"|sampler|checkpoint manager|sharding manager|worker class|environment|env|pipeline|rollout\w{0,16})"
)

# (kind, pattern, words): the pattern's groups are inserted into the words.
FORMS: tuple[tuple[str, str, str], ...] = (
    # Limits
    ("prompt", r"[Pp]rompt (?:length \(\d{1,9}\) exceeds|produced \d{1,9} tokens, exceeding) (?:the )?((?:max_|rollout\.)[\w.]{2,60})", "a prompt exceeds {0}"),
    ("budget", r"(\d{1,9}) tokens,? (?:but|exceeds?|which exceeds) (?:the )?max(?:imum)? micro[ _-]?batch size (?:is |of )?(\d{1,9})", "a row of {0} tokens is longer than a micro-batch of {1}"),
    ("single", r"(requires at least 2 samples per group)", "{0}"),
    # GPUs and nodes
    ("devices", r"\b[Nn]ot? enough (GPUs|gpus|nodes|devices) (?:to run|for)\b", "there are too few {0}"),
    ("devices", r"cannot meet the required number of (nodes|GPUs)", "there are too few {0}"),
    ("devices", r"\bnum_gpus (\d{1,6}) > available", "{0} GPUs are requested"),
    ("devices", r"\bused (gpus) are more than num_nodes", "more {0} are requested than exist"),
    ("devices", r"requesting (\S{1,12}) processes, bundle count cannot satisfy", "there is no room for {0} processes"),
    ("degrees", r"new group's (world size|rank) should be (?:less or equal to|within) the world[ _]size", "a group names more ranks than run ({0})"),
    ("placement", r"[Pp]lacement[ _]?[Gg]roup\b[^\n]{0,120}?\b(not (?:yet )?ready|timed out|(?:could not|cannot) be (?:created|placed|scheduled))", "Ray cannot place the bundles of a placement group: {0}"),
    ("rocm", r"(same HIP_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES|don't set ROCR_VISIBLE_DEVICES)", "the lists of visible devices differ ({0})"),
    # Servers
    ("server", r"(?:Router|Server|Engine) health check failed after (\S{1,12})", "a server did not answer within {0} s"),
    ("server", r"[Ii]nference (server|pool) (?:is|was) not ready after", "the inference {0} was not ready in time"),
    ("server", r"Failed to complete (?:async )?request to (\S{1,120}) after \d{1,4} attempts", "{0} does not answer"),
    ("ray", r"Ray head node at (\S{1,80}) did not become available", "{0} does not answer"),
    # Components that are looked up by name
    ("package", r"Checkpoint engine (\w{1,40}) not registered", "the package that the checkpoint engine {0} needs could not be imported"),
    ("setting", rf"(?:^|[:.] )((?i:{_PART})) [`'\"]?([\w./-]{{1,60}})[`'\"]? (?:is )?not (?:registered|found in registry)", "{1} is not a known {0}"),
    ("setting", rf"(?:^|[:.] )(?:[Uu]nknown|[Uu]nsupported|[Ii]nvalid) ({_PART})(?: source| name| type)?:? [`'\"]?([\w./-]{{1,60}})", "{1} is not a known {0}"),
    ("unset", r"(?:require\w?|requiring) setting (?:the )?environment variable [`'\"]?([A-Z][A-Z_0-9]{2,60})", "the variable {0} is not set as it should be"),
    ("unset", r"Recursion limit of (\d{1,6}) reached without hitting a stop", "no limit of turns ended the agent before {0} steps"),
    ("unset", r"Interpolation key '([\w.]{1,120})' not found", "the config lacks {0}"),
    ("unset", r"Environment variable '(\w{1,60})' not found", "the variable {0} is not set"),
    ("setting", r"(\w{1,60}) raised while resolving interpolation", "a value of the config refers to a part that does not exist ({0})"),
    # Errors that a library causes by itself
    ("bug", r"Expected a (cached item) for mm_hash", "vLLM's cache of processed images lost a {0}"),
    ("bug", r"Unknown device: (\w{1,12}) for model_type: (\w{1,40}) and backend", "there is no {1} for {0}"),
    ("system", r"CPU number (\d{1,5}) is not eligible", "CPU {0} is not among those that the process may use"),
    ("triton", r"(no allocator was set)", "a kernel needs memory and {0}"),
    ("cache", r"\b(\w{1,80}\.(?:llir|ttir|ttgir))\b", "a compiled kernel is missing in the cache: {0}"),
    ("python", r"unsupported operand type\(s\) for \|: '(type|\w{0,40}Meta|_\w{1,20}Alias|types\.GenericAlias)' and '", "this Python does not join types by | ({0})"),
    ("device", r"set the storage of a tensor on device \"?([\w:]{1,12})\"?\s{1,40}to a storage on different device \"?([\w:]{1,12})", "a tensor is on {0} and its storage on {1}"),
    ("masked", r"(response_mask must contain at least one valid token|[Aa]t least one valid token in response_mask)", "no token of the batch counts ({0})"),
    ("shape", r"same number of dimensions, but the array at index \d{1,6} has (\d{1,3}) dimension\(s\) and the array at index \d{1,6} has (\d{1,3})", "one has {0} dimensions and the other {1}"),
    # Programming errors
    ("slip", r"((?:not enough|too many) values to unpack)", "{0}"),
    ("slip", r"(cannot unpack non-iterable \w{1,40})", "{0}"),
    ("slip", r"(view size is not compatible with input tensor's size and stride)", "{0}"),
    ("slip", r"(received an invalid combination of arguments)", "a function {0}"),
    ("slip", r"(local variable '\w{1,80}' (?:referenced before|is not associated|where it is not))", "{0}"),
    ("slip", r"(expected a non-empty list of Tensors)", "{0}"),
    ("slip", r"(dictionary changed size during iteration)", "{0}"),
    ("slip", r"(string indices must be integers)", "{0}"),
    ("slip", r"(?:in )?(\w{1,20}_dict)1 and \w{1,20}_dict2 are not the same", "two parts of a batch disagree about a field ({0})"),
    ("slip", r"[Tt]wo tensor dict (must have identical batch size)", "parts of a batch {0}"),
    ("slip", r"\bkey \w{1,60} length \d{1,9} is (not equal to batch size) \d{1,9}", "a field's length is {0}"),
    ("slip", r"(nested tensor must have \d dimensions)", "{0}"),
)  # fmt: skip
