"""Message patterns of libraries about settings that exclude each other or have a wrong value.

Trainers, launchers and adapters word their checks in a few ways: two options that exclude each
other, an option that is missing, a value that is not on a list, a value of the wrong type. These
patterns are tried after those that name a library, a shape or a device, because those say more.
"""
# ruff: noqa: E501 (a table)

from __future__ import annotations

# An option as messages print it: `packing`, `packing=True`, max_length, --multi_gpu, args.beta.
_OPTION = r"[`'\"]?-{0,2}[A-Za-z][\w.]{1,59}(?:[=<>]{1,2}[\w'\".]{1,20})?[`'\"]?"
_QUOTED = r"`-{0,2}[A-Za-z][\w.]{1,59}(?:[=<>]{1,2}[\w'\".]{1,20})?`"
_SNAKE = r"-{0,2}[A-Za-z]\w{0,59}[_-]\w{1,60}"
_GIVE = r"(?:pass|specify|set|provide|give|define)"
_WORD = r"(?:['\"`][\w.-]{1,30}['\"`])"
# Things that lack a feature whatever else is set.
_THING = r"(?![^.\n]{0,60}(?:model|architecture|tokenizer|template|GPU|device|hardware|platform|driver|backend|operator|version|object do))"
_TYPE = (
    r"(?:bool(?:ean)?|str(?:ing)?|int(?:eger)?|float|number|list|dict(?:ionary)?|tuple|callable|function"
    r"|torch\.dtype|(?:peft|datasets|transformers|trl|accelerate)\.\w{2,60}|(?!Tensor|CUDA|GPU|PIL|NumPy|Torch|PyTorch)[A-Z][a-z]\w{2,60})"
)

# (kind, pattern, words): the pattern's groups are inserted into the words.
FORMS: tuple[tuple[str, str, str], ...] = (
    # A setting is missing
    ("unset", rf"\bbut you (?:did not|didn't) {_GIVE} (?:a |an |the |any )?({_OPTION})", "{0} is not given"),
    ("unset", rf"\b[Yy]ou (?:must|need to|have to|should) (?:manually |explicitly |also ){_GIVE}(?: in)? (?:a |an |the )?({_SNAKE}|{_OPTION})", "{0} is not given"),
    ("unset", rf"(?:^|[\s:.])([`'\"]{_OPTION}[`'\"]|{_QUOTED}) (?:is|are) (?:required|mandatory|not (?:set|specified|provided|given))\b", "{0} is not given"),
    ("unset", rf"\b(?:requires?|needs?) (?:a |an |at least one )({_SNAKE}|{_QUOTED})(?![\w=.])", "{0} is not given"),
    ("unset", r"\b[Nn]o ([a-z]\w{1,40}(?:[_ ]\w{2,40}){0,2}?) (?:(?:was|were|is) )?(?:provided|specified|given|passed)\b", "no {0} is given"),
    ("unset", r"\bmust have an? ([a-z ]{0,30}dataset)\b", "no {0} is given"),
    ("unset", rf"({_QUOTED}|{_SNAKE}) (?:is|are) necessary (?:for|to|when|in|by)\b", "{0} is not given"),
    ("unset", rf"\b[Pp]lease (?:make sure|ensure)(?: that)? (?:the )?({_SNAKE}|{_QUOTED}) (?:be|is|are) (?:provided|set|given|specified|passed)\b", "{0} is not given"),
    ("unset", rf"\b[Pp]lease enable ({_QUOTED}) (?:to|for|before|first)\b", "{0} is not switched on"),
    ("unset", r"\b[Pp]lease (?:input|explicitly specify|specify) (?:the|an?) ([a-z]{4,20}(?: [a-z]{4,20}){0,2})[.!]", "no {0} is given"),
    # A number outside its range, as optimizers, schedules and samplers refuse it
    ("mistyped", r"\b[Ii]nvalid ((?:learning[ _]rate|lr|momentum|eps(?:ilon)?|betas?|weight[ _]decay|rho|alpha|dampening|dropout|temperature|top_[pk]|warmup\w{0,12}|max_grad_norm)(?: (?:value|parameter))?(?: at index \d)?): (-?(?:\d[\w.+-]{0,30}|inf|nan))", "{1} is no valid {0}"),
    # Two settings exclude each other
    ("exclusive", rf"\b[Yy]ou (?:passed|set|specified|provided|gave|enabled|have set) (?:both )?(?:an? |the )?({_OPTION})(?: [a-z]{{1,20}}){{0,3}}?,? (?:and|together with|along with|while(?: using)?|but) (?!you\b|no\b|it\b|did)(?:also )?(?:an? |the )?({_OPTION})", "{0} does not go together with {1}"),
    ("exclusive", rf"\b(?:[Cc]annot|[Cc]an't|[Cc]an not) {_GIVE}(?: in)? (?:both )?({_OPTION}) (?:and|together with|along with) ({_OPTION})", "{0} does not go together with {1}"),
    ("exclusive", r"\b(?:[Cc]an|[Mm]ust|[Ss]hould) only (?:use|pass|specify|set|provide|have)(?: in)? one (?:of )?(.{2,80})", "only one of {0} is possible"),
    ("exclusive", rf"\b[Oo]nly one of ({_OPTION}[^.\n]{{2,80}}?) (?:can|may|should|must|is allowed)\b", "only one of {0} is possible"),
    ("exclusive", rf"({_OPTION}) and ({_OPTION}) (?:can't|cannot|can not) be both\b", "{0} does not go together with {1}"),
    ("exclusive", rf"{_THING}\b({_OPTION}(?: [A-Za-z]{{2,20}}){{0,3}}?) (?:does not|doesn't|do not|don't) (?:yet |currently )?support ([\w `'./=()-]{{2,80}})", "{0} does not go together with {1}"),
    ("exclusive", rf"{_THING}\b({_OPTION}(?: [a-z]{{2,20}}){{0,3}}?) (?:is|are) (?:yet |currently |still )?not (?:yet |currently )?(?:supported|allowed|compatible)(?: yet)? (?:for|with|when|by|in|together|if|while) ([\w `'./=()-]{{2,80}})", "{0} does not go together with {1}"),
    ("exclusive", rf"({_QUOTED}) (?:requires?|needs?) (?:that )?(?:the )?({_QUOTED})", "{0} needs {1}"),
    ("exclusive", rf"\b[Ww]hen (?:using |passing |setting )?({_OPTION})(?: [a-z]{{1,20}}){{0,4}}?, (?:the )?({_OPTION}) (?:can't|cannot|must|has to|should|is not|needs)\b", "{1} depends on {0}"),
    ("exclusive", rf"({_SNAKE}|{_QUOTED}) is (?:set|enabled|given)(?: to [\w'\".]{{1,20}})?,? but ({_SNAKE}|{_QUOTED}) is (?:not|False|None|disabled|unset|set)\b", "{0} does not go together with {1}"),
    ("exclusive", r"\b(in only one place|mutually exclusive|only one of them)\b", "two settings say the same ({0})"),
    ("exclusive", r"\b(?:[Cc]annot|[Cc]an't|[Cc]an not) (?:use|set|enable|combine|pass|specify) ([\w `'\"=.,&/-]{2,80}?) (?:together|at the same time|simultaneously|at once)\b", "{0} exclude each other"),
    ("exclusive", rf"\b(?:[Cc]annot|[Cc]an't) (?:{_GIVE}|use|enable) ({_QUOTED}|{_SNAKE}) (?:if|when|with|while|unless|without) ([\w `'./=()-]{{2,80}})", "{0} does not go together with {1}"),
    ("exclusive", rf"({_OPTION}) and ({_OPTION}) are incompatible\b", "{0} does not go together with {1}"),
    ("exclusive", rf"\b(?:{_GIVE}|Provide|Pass|Set|Specify|Use) exactly one of:? (.{{2,80}})", "only one of {0} is possible"),
    ("exclusive", rf"({_OPTION}) (?:or|and) ({_OPTION}),? (?:but )?not both\b", "{0} does not go together with {1}"),
    ("exclusive", r"\b[Cc]an only (?:use|set|enable|load in) ([\w ,]{2,60}? or \w{2,20}),? not (?:both|a combination)\b", "only one of {0} is possible"),
    ("exclusive", rf"\b[Tt]urn off ({_QUOTED}|{_SNAKE}) (?:when|if|while) ([\w `'./=()-]{{2,60}})", "{0} does not go together with {1}"),
    ("exclusive", rf"({_QUOTED}|{_SNAKE}) (?:cannot|can't|must not|should not|may not) be (?:smaller|larger|greater|less|higher|lower|bigger) than (?:the )?({_QUOTED}|{_SNAKE})", "{0} does not fit {1}"),
    ("exclusive", rf"({_QUOTED}) and ({_QUOTED}) cannot be the same\b", "{0} must not be {1}"),
    # A value is not on the list
    ("setting", rf"({_SNAKE}|{_QUOTED}|\w{{4,60}}_\w{{2,60}}) (?:must|should|has to|needs to|can only) be (?:either |one of |in )?[\[({{]?{_WORD}(?:,? (?:or|and) |, ?){_WORD}", "{0} has a value that is not known"),
    ("setting", r"(?:[Uu]nsupported|[Uu]nknown|[Ii]nvalid|[Uu]nrecogni[sz]ed) (?:value for )?[`'\"]?([A-Za-z][\w -]{1,49}?)[`'\"]?(?: \S{1,40} passed| passed)?(?: to \S{1,40})?[:.,][^\n]{0,80}?(?:[Pp]ossible values|[Ss]upported values|[Vv]alid values|[Cc]hoose (?:between|from|one)|[Mm]ust be (?:one of|either|')|[Ee]xpected (?:one of|either|')|[Ss]hould be (?:one of|either|')|\bUse ')", "this {0} is not known"),
    ("setting", r"(?:[Uu]nsupported|[Uu]nknown|[Ii]nvalid) ([a-z]\w{1,30}_(?:type|mode|strategy|implementation|method|level|backend|format|policy|name|aggregation|divergence\w{0,10}))s?:? [`'\"]?([\w./-]{1,60})", "{1} is not a {0}"),
    ("setting", r"\b(?:[Pp]ossible|[Ss]upported|[Vv]alid|[Aa]llowed|[Aa]ccepted) (?:values|options|choices) (?:are|is):? (.{1,80})", "only {0} are known"),
    # A value has the wrong type
    ("mistyped", rf"({_SNAKE}|{_QUOTED}|\w{{2,60}}_\w{{2,60}}) (?:must|should|has to|needs to) be (?:of type |an? (?:instance of )?|a valid |either an? )[`'\"]?({_TYPE})\b", "{0} must be a {1}"),
)  # fmt: skip
