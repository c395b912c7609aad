"""Message patterns of inference engines, kernels, quantisers and converters that refuse something.

They cover limits of length, attention kernels, quantisation, draft models, parallel sizes, grammars
and weight files. Engines check these when they start, and word the errors alike. `FORMS` name the
cause themselves. `LATE` only show that settings do not fit together, so they are tried after all
other patterns.
"""
# ruff: noqa: E501 (a table)

from __future__ import annotations

# Kind of a pattern -> the illness.
CAUSES = {
    "context": "prompt-exceeds-context",
    "lengths": "length-limit-inconsistent",
    "attention": "attention-unsupported",
    "quantisation": "quantisation-method-mismatch",
    "groups": "quant-group-not-dividing",
    "draft": "draft-settings-wrong",
    "draft vocabulary": "draft-vocabulary-mismatch",
    "speculation": "speculation-unsupported",
    "devices": "gpu-count-mismatch",
    "world": "parallel-sizes-inconsistent",
    "weight update": "weight-group-state",
    "media": "image-token-count-mismatch",
    "tool call": "tool-call-parse-failed",
    "grammar": "guided-decoding-failed",
    "slow start": "engine-failed-to-start",
    "slow step": "engine-step-timeout",
    "vocabulary": "token-id-beyond-vocabulary",
    "weight file": "checkpoint-file-damaged",
    "no weights": "model-path-wrong",
    "adapter": "adapter-not-loaded",
    "few rows": "dataset-empty",
    "data format": "data-file-unreadable",
    "other device": "environment-unfit",
    "group": "process-group-state",
    "half": "operation-without-bf16",
    "one device": "device-mismatch",
    "dimensions": "shape-mismatch",
}
_SETTING = r"(?:--[\w.-]{2,60}|[a-z]\w{0,60}_\w{1,60})"
_NO = r"(?:(?:does not|doesn't|do not|hasn't|cannot) (?:yet |currently )?support|(?:not|isn't|aren't) (?:yet |currently )?supported|unsupported|only supports?|cannot be used|is incompatible)"
_ODD = r"(?:unsupported|unknown|invalid|unrecogni[sz]ed|unexpected)"
_ATTENTION = r"(?:attention (?:backend|implementation|kernel)|flash[-_ ]?attention\S{0,3}|flashmla|sliding window|attention sinks?|soft-?cap\w{0,5})"
_SPECULATES = r"(?:speculative (?:decoding|model|method|algorithm|config)|speculation|spec[-_ ]decode|draft[-_ ]model|\beagle\d?\b|\bmtp\b|medusa)"
_LENGTH = r"max[-_ ](?:\w{1,20}[-_ ])?(?:len|length|tokens|position)\w{0,12}"

# (kind, pattern, words): the pattern's groups are inserted into the words.
FORMS: tuple[tuple[str, str, str], ...] = (
    # Lengths
    ("context", r"(?i)((?:prompt|input|request)[^.\n]{0,60}?(?:is longer than|exceeds?|is too long|larger than|greater than)[^.\n]{0,40}?(?:max(?:imum)?[ _](?:model|context|sequence|input|position)|context (?:length|window|size)|supported length)[\w ]{0,20})", "{0}"),
    ("lengths", rf"(?i)({_LENGTH}[^.\n]{{0,30}}?(?:must be|cannot be|can't be|should be|is) (?:[<>]=?|greater|larger|smaller|less|at least|at most)[^.\n]{{0,40}}?{_LENGTH})", "{0}"),
    # Attention
    ("attention", rf"(?i)(\bhead[-_ ]?(?:size|dim(?:ension)?)s?\b[^.\n]{{0,40}}?(?:{_NO}|must be|should be|at most|up to))", "{0}"),
    ("attention", rf"(?i)({_NO}[^.\n]{{0,30}}?\bhead[-_ ]?(?:size|dim(?:ension)?)s?\b[\w .]{{0,20}})", "{0}"),
    ("attention", rf"(?i)({_ATTENTION}[^.\n]{{0,50}}?{_NO}[\w ]{{0,40}})", "{0}"),
    ("attention", rf"(?i)({_NO}[^.\n]{{0,30}}?{_ATTENTION})", "{0}"),
    ("attention", rf"(?i)(no (?:valid|supported|suitable) {_ATTENTION}[\w '\"]{{0,30}})", "{0}"),
    # Quantisation
    ("groups", r"(?i)((?:divisible by|multiple of|not aligned with)[^.\n]{0,30}?(?:group[-_ ]?size|quant\w{0,10} (?:groups?|blocks?|weights?))[\w =]{0,20})", "{0}"),
    ("quantisation", r"(?i)(quanti[sz]ation (?:method|type|scheme|config|format|algorithm|mode)[^.\n]{0,60}?(?:does not match|is not supported|unsupported|unknown|not recogni[sz]ed|invalid|mismatch|not compatible|is not (?:yet )?implemented))", "{0}"),
    ("quantisation", rf"(?i)({_ODD}[^.\n]{{0,20}}?quanti[sz](?:ation|er)[\w ]{{0,30}})", "{0}"),
    ("quantisation", r"(?i)((?:de)?quanti[sz]ation (?:for|of|to) [\w' -]{1,40} is not (?:yet )?(?:supported|implemented))", "{0}"),
    ("quantisation", r"(?i)(\b(?:bits|num_bits|w_?bits?|group_?size|quant_?type|quant_?method)\b[^.\n]{0,30}?(?:must be|not supported|unsupported|should be|only supports?)[^.\n]{0,40})", "{0}"),
    ("quantisation", r"(?i)(only (?:supports? )?(?:\d[- ]?bits?|bits ?= ?\d|(?:int|uint|fp|nf)\d)[^.\n]{0,40}?(?:is|are)? ?(?:supported|allowed|quanti[sz]ation))", "{0}"),
    # Drafts
    ("draft vocabulary", r"(?i)((?:target|draft)[^.\n]{0,60}?same (?:vocabulary|vocab)[\w ]{0,20}|draft[^.\n]{0,30}?tokenizer (?:does not|doesn't) match[\w ]{0,30})", "{0}"),
    ("speculation", rf"(?i)({_SPECULATES}[^.\n]{{0,40}}?{_NO}[\w ]{{0,40}})", "{0}"),
    ("speculation", rf"(?i)({_NO}[^.\n]{{0,30}}?{_SPECULATES})", "{0}"),
    ("draft", rf"(?i)((?:num_speculative_tokens|speculative_\w{{1,40}}|draft_\w{{1,40}}|{_SPECULATES})[^.\n]{{0,60}}?(?:must|requires?|should|cannot|not provided|was not|without|invalid|must be present))", "{0}"),
    ("draft", rf"(?i)((?:{_ODD}|requires?) [^.\n]{{0,30}}?{_SPECULATES}[\w ]{{0,20}})", "{0}"),
    # Devices and ranks
    ("devices", r"(?i)((?:larger|greater|more|exceeds?|higher)(?: than)?[^.\n]{0,40}?(?:available|visible|number of) (?:GPUs?|devices|\w{2,4}s)\b[\w ]{0,20})", "{0}"),
    ("world", r"(?i)(\bworld[-_ ]?size\b[^.\n]{0,30}?(?:must|is not|should|does not|doesn't|!=|not equal|smaller than|less than)[^.\n]{0,60})", "{0}"),
    ("group", r"(?i)((?:parallel|process|model) groups?[^.\n]{0,20} (?:is|are|was|has) (?:not (?:been )?initiali[sz]ed|already (?:been )?initiali[sz]ed))", "{0}"),
    ("half", r"(?i)((?:does not|doesn't) support (?:torch\.)?(?:bfloat16|float16|bf16|fp16|half)\b)", "{0}"),
    ("one device", r"(?i)(must (?:all )?be on the same (?:device|GPU))", "{0}"),
    ("dimensions", r"(?i)((?:must be|expected|expects) (?:an? )?[1-5](?:-?D|[- ]dimensional)\b[^\n]{0,30}?(?:,|but) ?(?:but )?(?:got|is|found)[^\n]{0,20})", "{0}"),
    ("other device", r"(?i)((?:current )?platform \S{0,20} ?(?:does not|doesn't) support [\w -]{1,40}|not supported on (?:the )?current platform|only (?:supported|available|supports?|works) (?:on |for )?(?:NVIDIA |AMD )?(?:CUDA|ROCm|XPU|HPU|TPU|MPS|Metal|CPU)(?: (?:and|or) \w{2,8})? (?:platforms?|devices?|GPUs?|backends?))", "{0}"),
    # Weights
    ("weight update", r"(?i)(\bweight[-_ ](?:update|transfer|sync)\w{0,12}[^.\n]{0,40}?(?:already|not (?:been )?(?:configured|initiali[sz]ed|started)|must be called|without a matching|is (?:still )?active|in flight))", "{0}"),
    ("weight file", r"(?i)((?:unexpected|invalid|bad|wrong) (?:file )?magic[\w ]{0,20}|(?:doesn't|does not) look like an? \w{2,20} (?:format )?file|not a valid (?:GGUF|GGML|safetensors?|checkpoint|zip|model) file|(?:could not|failed to|cannot) (?:read|parse|deserialize)[^.\n]{0,30}?(?:metadata|header|safetensors?|checkpoint|weight index)|already in GGUF format)", "{0}"),
    ("no weights", r"(?i)(\bno (?:[\w.*-]{1,30} ){0,2}(?:weights?|checkpoints?|tokenizer|safetensors?|\.bin|\.gguf)(?: files?)? (?:has been |have been |were |was |could be )?found (?:in|for|at|under|with|inside)[\w ]{0,20})", "{0}"),
    ("adapter", r"(?i)((?:adapter|lora)[^.\n]{0,60}?(?:incompatible tensors|is not compatible|(?:does not|doesn't) match the base|ignored in base|not found in (?:the )?(?:base )?model|expected target modules))", "{0}"),
    # Requests
    ("media", r"(?i)((?:number of )?(?:image|video|audio|multi-?modal|placeholder)s?[^.\n]{0,40}?(?:tokens?|placeholders?|sentinels?|items|features|embeddings)[^.\n]{0,60}?(?:does not match|do not match|doesn't match|mismatch|but found|but got|to \d{1,9} placeholders))", "{0}"),
    ("media", r"(?i)(mismatch (?:between|in) [^.\n]{0,40}?(?:images?|videos?|audios?|placeholders?)[\w ]{0,40})", "{0}"),
    ("tool call", r"(?i)((?:could not|cannot|failed to|unable to|error (?:in )?)(?: ?)(?:parse|parsing|extract|extracting|decode)[^.\n]{0,20}?(?:tool|function)[-_ ]calls?)", "{0}"),
    ("grammar", r"(?i)((?:invalid|unsupported|failed to (?:compile|parse|convert|build)|cannot (?:compile|parse|convert)|could not (?:compile|parse))[^.\n]{0,40}?(?:grammar|json[-_ ]?schema|structured[-_ ]outputs?|structural[-_ ]tag))", "{0}"),
    ("vocabulary", r"(?i)(token[-_ ]?ids? -?\d{0,9} ?(?:is |are )?(?:out of (?:vocab\w{0,8}|range)|not (?:within|valid|in the vocab\w{0,8})))", "{0}"),
    ("slow start", r"(?i)(timed? ?out (?:while )?waiting for[^.\n]{0,30}?(?:engine|worker|server|core)[^.\n]{0,40}?(?:start|ready|initiali[sz]e|launch))", "{0}"),
    ("slow step", r"(?i)(RPC call to \S{1,60} timed out|(?:engine|scheduler|worker)[^.\n]{0,30}?(?:step|forward|batch)[^.\n]{0,20}?timed out)", "{0}"),
    # Data
    ("few rows", r"(?i)((?:data ?set|training set|calibration (?:data|set))[^.\n]{0,40}?(?:must have at least \d{1,9}|is empty|has no (?:rows|examples|samples)|only has \d{1,9}|not found or empty))", "{0}"),
    ("data format", r"(?i)((?:unsupported|unknown|unrecogni[sz]ed) (?:data(?:set)?|file) (?:format|type)[\w ]{0,20})", "{0}"),
)  # fmt: skip
LATE: tuple[tuple[str, str, str], ...] = (
    ("exclusive", rf"({_SETTING})(?:=\S{{1,20}})?[`'\"]? (?:requires?|needs) [`'\"]?({_SETTING})", "{0} needs {1}"),
    ("exclusive", rf"({_SETTING})\S{{0,20}} (?:conflicts? with|contradicts?|overrides?) [`'\"]?({_SETTING})", "{0} does not go together with {1}"),
    ("exclusive", rf"[`'\"]?({_SETTING})[`'\"]? (?:is|was) (?:set|provided|given|specified)[^.\n]{{0,40}}? but ([^.\n]{{1,60}}?) (?:is not|was not|isn't|are not)", "{0} is given, and {1} is not"),
    ("exclusive", r"(?i)((?:choose|specify|set|use|provide|pass)?\s?(?:either|only one of|exactly one of|at most one of) [^.\n]{1,80}?(?:,? (?:but )?not both|(?:can|may|must|should) be (?:set|specified|used|provided|given)))", "{0}"),
    ("exclusive", rf"({_SETTING}) ?[=(:]{{1,2}}\d{{1,12}}\)? (?:must be|should be|cannot be|can't be|has to be|is) (?:[<>]=?|greater than|larger than|smaller than|less than|at least|at most|equal to)[^.\n]{{0,40}}?({_SETTING}) ?[=(:]{{1,2}}\d", "{0} and {1} contradict each other"),
    ("exclusive", r"([\w().`'-]{2,60}(?: [\w().`'-]{1,40}){0,3}?) (?:does not|doesn't|do not|cannot) (?:yet |currently |natively )?support ([\w().`'-]{2,60}(?: [\w().`'-]{1,40}){0,3})", "{0} does not go together with {1}"),
    ("unset", rf"(?i)\b(?:must|please) (?:provide|specify|pass|set|give)(?: at least| exactly)?(?: one of| either)? [`'\"]?({_SETTING})", "{0} is not given"),
    ("unset", rf"[`'\"]?({_SETTING})[`'\"]? (?:is|are) required (?:when|if|for|to|with|in)\b", "{0} is not given"),
    ("mistyped", rf"[`'\"]?({_SETTING})[`'\"]?(?: \([^)\n]{{0,30}}\))? (?:must be|should be|has to be|must contain|must have) (positive|non-negative|greater than (?:0|zero)|at least \d|in (?:the range )?[\[(]|between \d|one of|an? (?:positive |non-negative )?(?:integer|int|number|string|str|float|bool\w{{0,3}}|list|dict)\b|[<>]=? ?\d)", "{0} must be {1}"),
)  # fmt: skip
