"""Message patterns of frameworks that refuse settings, inputs or the way they were launched.

Training frameworks raise thousands of messages about their own settings, but word them in a few
ways: a value is unknown, a setting is missing, one requires or excludes another, a file does not
exist, rows lack a column, a process group was not created. So the wording gives the illness for any
framework. These patterns are tried after those of failures/details.py, which know single messages
better.
"""
# ruff: noqa: E501 (a table)

from __future__ import annotations

# Kind of a pattern -> the illness.
CAUSES = {
    "empty": "dataset-empty",
    "columns": "column-missing",
    "group": "process-group-state",
    "launch": "launcher-variables-missing",
    "lengths": "length-limit-inconsistent",
    "devices": "gpu-count-mismatch",
    "adapter": "adapter-not-loaded",
    "no checkpoint": "resume-checkpoint-missing",
    "writing": "path-not-writable",
    "folder": "output-folder-in-use",
    "placement": "device-mismatch",
    "template": "chat-template-mismatch",
    # Versions, GPUs and models cause it as often as settings (`is_loose` of failures/reading.py).
    "unsupported": "settings-exclusive",
    "interface": "user-code-failed",
}
# The name of a setting: quoted, a flag, or with an underscore or a dot in it.
_KEY = r"(?:[`'\"](?:--?)?[A-Za-z][\w.\[\]-]{0,60}[`'\"]|--[\w-]{2,60}|[A-Za-z][A-Za-z0-9]{0,40}(?:[_.][A-Za-z0-9]{1,40}){1,8})"
# A thing that fits another one or not: a few words.
_THING = r"[\w().,`'\"/=<>+-]{1,40}(?: [\w().`'\"/=<>+-]{1,40}){0,7}"
_SUBJECT = r"(?<![\w`'\"])[\w().`'\"/=-]{2,40}(?: [\w().`'\"/=-]{1,40}){0,5}"
# Nouns whose values are settings. Messages about files, rows and models have another meaning.
_CHOICE = (
    r"(?:[a-z]{2,20}[ _-]){0,3}(?:type|mode|name|option|method|strategy|policy|choice|format|backend|implementation"
    r"|algorithm|optimizer|scheduler|schedule|loss|activation|norm|recipe|engine|launcher|kernel|value|level|stage"
    r"|preset|flavor|variant|setting|task|reduction|aggregation|estimator|precision|kind|scheme|template)"
)
_NO_CHOICE = r"(?!(?:file|image|data|dataset|audio|video|message|token|model|device|dtype|tensor|content|role|row|archive|compression)[ _])"
_NOT = r"(?:is|are) (?:currently |temporarily |yet |still )?not (?:currently |yet |officially )?"
# Limits of lengths that contradict each other. They are tried before other pairs of settings.
LENGTHS = (
    ("lengths", r"([\w`'\"-]{0,30}(?:max_(?:len|model|new|prompt)|seq|length|context|position|token)[\w`'\"-]{0,40})(?: \([^)\n]{1,30}\))? (?:must be|should be|has to be|needs to be|is|cannot be|exceeds) (?:greater|less|smaller|larger|longer|shorter|at least|at most|>=?|<=?|no more)(?: than)?(?: or equal(?: to)?)? (?:the )?(?:\w{1,20}\.)?([\w`'\"-]{0,30}(?:max_(?:len|model|new|prompt)|seq|length|context|position|token)[\w`'\"-]{0,40})", "{0} does not fit {1}"),
)  # fmt: skip

FORMS = (
    # How the program was launched
    ("launch", r"(?:run|launch\w{0,3}|start\w{0,3}|invoke\w?|called) (?:this |the |it )?(?:[\w-]{1,30} ){0,3}?(?:via|with|using|by|through|under) (?:a |the )?(distributed launcher|[`'\"]?(?:torchrun|torch\.distributed\.(?:run|launch)|accelerate launch|mpirun|srun)[`'\"]?)", "it has to be started by {0}"),
    ("launch", r"[`'\"]?(FORCE_TORCHRUN=1)[`'\"]? to launch", "it has to be started with {0}"),
    ("group", r"((?:[\w-]{1,30} ){0,4}?(?:process|parallel|communication|default|world) groups?)(?: (?:is|are|was|has|have))? (?:already|not|never)(?: been)? (?:initiali[sz]ed|set up|created|destroyed)", "the {0} is not in the state that is needed"),
    ("group", r"[Ii]nvalid (root|source|destination|src|dst) rank:? (-?\d{1,9})", "there is no rank {1} in the group"),
    ("devices", r"(?:selected|requested|specified|asked for|got|using) more (?:devices|GPUs|gpus|processes|ranks) (\([^)\n]{1,20}\) )?than (?:are |is )?(available|there are|visible)", "more devices are requested than are {1}"),
    # Files, rows and checkpoints
    ("adapter", r"([Aa]dapter|LoRA|[Ll]ora) (?:weights?|checkpoint|config\w{0,10}|state[ _]dict|keys?)(?: \S{1,80})? (?:is |are |was |were )?(?:not found|missing|could not be found)", "the {0} does not exist"),
    ("no checkpoint", r"(?:[Nn]o (?:valid |usable |saved |such )?checkpoints? (?:files? |directory |directories |folders? )?(?:was |were |could be |is |are )?(?:found|available)|not find (?:any|a) (?:valid |usable |saved )?checkpoints?)(?: (?:in|at|under) ([^\s,]{1,200}))?", "there is no checkpoint to resume from"),
    ("columns", r"(?:[Mm]issing|lacks?|without|does not (?:have|contain)|doesn't (?:have|contain)|must (?:have|contain)) (?:the |a |any |some )?(?:required |following |expected |necessary )?columns?\b(?!-) ?[:(]? ?([\[{(]?[`'\"]?[\w, '\"-]{1,80})?", "rows have no {0}"),
    ("columns", r"[Cc]olumns? [`'\"\[]{0,2}([\w -]{1,60})[`'\"\]]{0,2} (?:is |are |was )?(?:not (?:found|present|in)|missing|does not exist|doesn't exist)", "rows have no {0}"),
    ("columns", r"[Ee]xpected a key of '(\w{1,60})' in (column_map)", "{1} has no {0}"),
    ("empty", r"[Nn]o (?:valid |usable |training |non-empty )?(records?|samples?|examples?|rows|data ?points?|documents?) (?:were |was |are |is |could be )?(?:found|left|remain\w{0,3}|loaded|available)", "there are no {0}"),
    ("empty", r"((?:[\w-]{1,20} )?(?:[Dd]atasets?|[Dd]ata ?loaders?|[Dd]ata ?source)) (?:is|are|was|were) (?:empty|of (?:size|length) 0)", "the {0} has no rows"),
    ("template", r"([Rr]oles?|[Cc]onversations?|[Mm]essages?|[Tt]urns?) (?:must|should|have to|has to|needs? to) (?:alternate|start with|begin with|end with|be one of|strictly alternate)", "the {0} are not in the order that is expected"),
    ("file", r"(?:[Nn]o|not find|not found|[Mm]issing|not locate) (?:any |the |a |such )?((?:[\w.*-]{1,40} ){0,3}?(?:files?|shards?|director(?:y|ies)|folders?|index|configs?|weights?|tokenizer\w{0,6}|safetensors)) (?:was |were |is |are )?(?:found |present |available )?(?:in|at|under|for|from) [`'\"]?(?!the |your |this |state)(\S{1,200})", "there is no {0} at {1}"),
    ("file", r"((?:[\w.-]{1,40} ){0,3}?(?:[Ff]ile|[Dd]irectory|[Ff]older|[Pp]ath)) (?:was |is |could )?not (?:be )?(?:found|exist)(?: at| in|:)? [`'\"]?(\S{1,200})", "the {0} {1} does not exist"),
    ("file", r"(?:[Cc]annot|[Cc]an not|[Uu]nable to|[Cc]ould not|[Ff]ailed to) (?:load|read|open|locate|find) (?:the )?(dataset|data|tokenizer|checkpoint|model|weights|config(?:uration)?)(?: file)? (?:from|at|in) [`'\"]?((?=[\w.~-]{0,80}[/\\.])\S{1,200})", "the {0} {1} cannot be read"),
    # Lengths
    # Two settings
    ("exclusive", rf"({_SUBJECT}) (?<! object )(?:does|do)(?: not|n't) (?:currently |yet |officially )?(?:support|work with|allow|accept) ({_THING})", "{0} does not go together with {1}"),
    ("unsupported", rf"({_SUBJECT}) {_NOT}(?:supported|compatible|allowed|implemented|possible|available) ?(?:with|for|in|when|by|on|together with|while|if|under|yet|without)? ?({_THING})?", "{0} is not supported here ({1})"),
    ("unsupported", rf"({_SUBJECT}) not (?:currently |yet )?(?:supported|compatible|implemented|allowed) (?:with|for|in|when|by|on|while) ({_THING})", "{0} does not go together with {1}"),
    ("unsupported", rf"({_SUBJECT}) (?:currently )?only (?:supports?|works? with|accepts?|allows?) ({_THING})", "{0} needs {1}"),
    ("exclusive", rf"([Oo]nly {_SUBJECT}) (?:is|are) (?:currently )?supported(?: (?:for|with|in|when|by) ({_THING}))?", "{0}"),
    ("exclusive", rf"({_SUBJECT}) (?:is|are) (?:only (?:valid|supported|meaningful|applicable|compatible|used|useful)|(?:not )?(?:valid|compatible|meaningful|applicable) only|not valid|not compatible|invalid) (?:with|when|if|for|in|unless) ({_THING})", "{0} depends on {1}"),
    ("unsupported", rf"({_SUBJECT}) (?:must|should|has to|needs to|have to|cannot|can't|can not|may not|should not|must not) be (?:used|set|enabled|disabled|combined|specified|passed|mixed|zero|0|1|None|True|False|true|false|equal|the same|identical)(?: to \S{{1,40}})? (?:with|when|if|for|together with|unless|alongside|while|as|in|and) ({_THING})", "{0} depends on {1}"),
    ("exclusive", rf"({_SUBJECT}) requires? (?:that )?({_KEY} ?(?:=|==|!=|>=?|<=?|to be|is|must|set|enabled|in \[)[^\n]{{0,60}})", "{0} needs {1}"),
    ("exclusive", rf"({_SUBJECT}) requires? (?:that )?([`'\"](?:--)?[A-Za-z][\w.-]{{1,60}} ?(?:==?|!=|>=?|<=?|: )[^\n]{{1,60}})", "{0} needs {1}"),
    ("exclusive", r"(?:[Cc]annot|[Cc]an't|[Cc]an not|[Mm]ust not|[Dd]o not|[Ss]hould not) (?:\w{1,20} )?(?:have |set |use |specify |pass |enable |combine |mix |provide )?both ([\w().`'\"=-]{1,60}) and ([\w().`'\"=-]{1,60})", "{0} does not go together with {1}"),
    ("exclusive", r"(?:[Oo]nly one|[Ee]xactly one|[Aa]t most one|[Ee]ither) of ([\w`'\" ,./()-]{3,120}?) (?:can|may|must|should|is|are|has to|needs to)", "only one of {0} may be given"),
    ("exclusive", rf"({_SUBJECT}) (?:(?:is|are) )?(?:currently )?only (?:be )?(?:supported|available|allowed|implemented|tested|valid|compatible|applicable) (?:with|for|in|when|by|on|if|under|to) ({_THING})", "{0} needs {1}"),
    ("exclusive", rf"[Mm]ust use ({_THING}?) (?:with|when|together with) ({_THING})", "{1} needs {0}"),
    ("exclusive", rf"[Dd]o not (?:use|set|combine|enable|pass) ({_THING}?) (?:with|when|together with|if) ({_THING})", "{0} does not go together with {1}"),
    ("exclusive", rf"(?:[Nn]o more than one|[Ss]pecify only one|[Ss]et only one|[Mm]ore than one) of ({_THING})", "only one of {0} may be given"),
    ("exclusive", rf"(?:^|: )[Ww]hen ({_THING}?),? ({_SUBJECT}) (?:must|should|cannot|has to|needs to) (?:also )?be\b", "{1} depends on {0}"),
    ("exclusive", rf"({_SUBJECT}) (?:must|should|has to|can only|cannot|must not|should not) (?:also )?(?:be|have) ({_THING}?) (?:when|if|unless) ({_THING})", "{0} depends on {2}"),
    ("exclusive", rf"({_KEY}[^\n.:]{{0,60}}?) (?:always )?requires? (?!PyTorch|torch\b|CUDA\b|Python|[^\n]{{0,40}}(?:>=|version|installed))({_THING})", "{0} needs {1}"),
    ("exclusive", rf"({_SUBJECT}) (?:conflicts? with|(?:is|are) in conflict with) ({_THING})", "{0} does not go together with {1}"),
    ("exclusive", rf"({_KEY}) and ({_KEY}) are (?:incompatible|exclusive|contradictory)", "{0} does not go together with {1}"),
    ("exclusive", rf"({_SUBJECT}) (?:does|do)(?: not|n't) work (?:when|if|while|for|without) ({_THING})", "{0} does not go together with {1}"),
    ("exclusive", rf"(?:^|: )[Cc]annot (?:use|enable|run|offload|combine|apply|have|set|do) ({_THING}?) (?:while|when|together with|without) ({_THING})", "{0} does not go together with {1}"),
    ("exclusive", rf"[Dd]isable ({_KEY}) (?:when|if|while) (?:enabling|using) ({_THING})", "{0} does not go together with {1}"),
    ("exclusive", rf"[Yy]ou should (?:only )?use ([\w`'\".()]{{2,60}}) only (?:with|for|when|in) ({_THING})", "{0} needs {1}"),
    # A user's class lacks what the library calls
    ("interface", r"\b[Nn]o [`'\"]?(\w{2,60})(?:\(\))?[`'\"]? method (?:is |was )?(?:defined|implemented|found)", "{0} is not defined"),
    ("interface", r"[`'\"](\w{2,60})(?:\(\))?[`'\"] (?:must|has to|needs to) be (?:implemented|overridden|defined) (?:to|by|in|for|before|when)", "{0} is not defined"),
    # A value is unknown
    ("setting", r"([\w./-]{2,60}) is not an? (?:supported|known|valid|recogni[sz]ed) (?:[\w-]{1,20} ){0,2}?((?i:optimizer|scheduler|loss|activation|backend|strategy|algorithm))\b", "{0} is not a known {1}"),
    ("setting", r"(?:does not|doesn't|do not) recogni[sz]e (?:the )?((?:[A-Za-z]{2,20} ){0,2}(?:optimizer|scheduler|loss|activation|backend|strategy|algorithm)) [`'\"]?([A-Za-z][\w./-]{1,60})", "{1} is not a known {0}"),
    ("setting", r"[`'\"]([\w./-]{1,60})[`'\"] (?:is |was )?(?:not (?:found|registered|available|supported|recogni[sz]ed)|unknown|does not exist)(?: (?:in|among|by) [\w.' ]{1,80})?[.,:;(]? {0,2}(?:[Aa]vailable|[Cc]hoose|[Vv]alid|[Ss]upported|[Oo]ptions|[Dd]id you mean|[Rr]egistered|[Kk]nown|[Mm]ust be one) ", "{0} is not known"),
    ("setting", r"\b([A-Za-z]\w{2,60})[`'\"]?(?: ?[:=] ?| )[`'\"]([\w./-]{1,60})[`'\"] (?:is )?not in (?:[\[({]|dict_keys|list of)", "{1} is not a known {0}"),
    ("setting", rf"({_KEY}(?:,? (?:and )?{_KEY}){{0,3}})(?: (?:argument|option|flag|setting)s?)? (?:is|are|has been|have been) (?:no longer (?:valid|supported|used|accepted|available)|deprecated and (?:replaced|removed)|removed|renamed)\b", "{0} is no longer known"),
    ("setting", rf"({_SUBJECT}) (?:keys|options|settings|arguments|flags) (?:have |has |were |was )?(?:been )?(?:moved|renamed|removed)\b", "{0} are no longer known"),
    ("setting", rf"(?:^|[:.] )(?:[Uu]nsupported|[Ii]nvalid) (?:choices?|values?) for ({_KEY})", "{0} has a value that is not known"),
    ("setting", rf"(?:^|[:.] )(?:[Uu]nknown|[Uu]nsupported|[Uu]nrecogni[sz]ed|[Ii]nvalid) {_NO_CHOICE}({_CHOICE}):? (?!of\b|in\b|for\b|at\b|and\b)[`'\"(]?([\w./-]{{1,60}})", "{1} is not a known {0}"),
    ("setting", rf"({_KEY})(?: ?\([^)\n]{{1,40}}\))? (?:must|should|has to|needs to|can only) be (?:either |one of |in )(?=[\[({{`'\"\w])([^\n]{{2,120}})", "{0} is none of {1}"),
    ("setting", rf"({_KEY}) (?:must|should|has to) be ((?:[`'\"][\w.-]{{1,30}}[`'\"],? ?(?:or |and )?){{2,8}})", "{0} is none of {1}"),
    ("setting", r"(?:is|are) not (?:a )?(?:valid|supported|recogni[sz]ed|known)(?: (?:option|choice|value|name|type))?[.,;:]? (?:[Pp]lease )?([Cc]hoose|[Mm]ust be one of|[Ss]elect|[Uu]se one of|[Aa]vailable|[Vv]alid|[Ss]upported|[Oo]ptions)", "the value is not known: {0}"),
    ("setting", r"(?i)\b(?:extra|unknown|unexpected|unrecogni[sz]ed) (?:config(?:uration)? )?(?:key|field|option|setting)(?:\(s\)|s)? (?:not in|in|for) (?:the )?((?:YAML |JSON |TOML )?config\w{0,20}|\w{2,40}Config)\b", "{0} has a key that is not known"),
    ("setting", r"\b(?:had|has|have|with|contains?|got|found) (?:unknown|unexpected|unrecogni[sz]ed|unsupported) (?:config(?:uration)? )?(?:keys?|fields?|options?|settings?|parameters?) ?:? ?[(\[{]{1,2}['\"]?([\w., '\"-]{1,120}?)['\"]?[)\]}]", "{0} is not known"),
    # A setting is missing
    ("unset", rf"({_KEY}) (?:is|are) (?:required|mandatory|needed|missing|not (?:set|given|specified|provided|configured|defined))\b", "{0} is not given"),
    ("unset", rf"({_KEY}) (?:must|should|has to|needs to|have to) (?:not be None|be (?:configured|supplied|non-empty|present|explicitly set|given))", "{0} is not given"),
    ("unset", rf"(?:[Pp]lease|[Mm]ust|[Nn]eeds? to|[Hh]ave to|[Rr]equires? you to) (?:manually |also |explicitly |first )?(?:specify|provide|pass(?: in)?|set|give|define|supply|add)(?: in)?(?: a| an| the| either| at least one of)?(?: valid)? ({_KEY})", "{0} is not given"),
    ("unset", rf"(?:set|assign|pass|give) (?:an? )?(?:\w{{1,20}} )?(?:value|number|path|name) (?:in|to|for|of|via) ({_KEY})", "{0} is not given"),
    ("unset", rf"requires (?:an? |the |explicit |non-empty )?({_KEY})(?:[.,]|$| (?:to be (?:set|given|specified|provided|passed)|so|in order|for|but|and))", "{0} is not given"),
    ("unset", rf"[Ee]ither ({_KEY}) or ({_KEY}) (?:must|should|has to|needs to|is|are)", "neither {0} nor {1} is given"),
    ("unset", rf"({_SUBJECT}) (?:must|should|has to|needs? to) be (?:specified|provided|supplied|configured)\b", "{0} is not given"),
    ("unset", r"requires? (?:setting |you to set )(?:the )?(?:environment variable |env(?:ironment)? var(?:iable)? )?([A-Z][A-Z0-9]{1,30}_[A-Z_0-9]{2,40})", "the variable {0} is not set"),
    # A value has the wrong type or size
    ("mistyped", rf"(?:[Ii]nvalid|[Ww]rong|[Ii]llegal|[Uu]nexpected) value (\S{{1,40}}) (?:for|of|in|given to|passed to) (?:the )?(?:\w{{1,20}} )?({_KEY})", "{1} cannot be {0}"),
    ("mistyped", rf"({_KEY})(?: ?\([^)\n]{{1,40}}\))? (?:must|should|has to|needs to|is expected to|is not|was not) (?:be )?(?:of type |a type of |type of |an instance of |a valid )?(?:an? )?(positive|non-negative|negative|integer|int|float|number|string|str|bool|boolean|list|tuple|dict|dictionary|mapping|path|callable|finite|even|odd|non-?empty|power of (?:two|2))\b", "{0} is no {1} value"),
    ("mistyped", rf"({_KEY})(?: ?\([^)\n]{{1,40}}\)|[ =]-?[\d.]{{1,12}})? (?:must|should|has to|needs to) be (greater than|less than|larger than|smaller than|at least|at most|between|in the range|in range|within|>=?|<=?|[\[(]-?\d)", "{0} is out of its range"),
    ("mistyped", rf"({_KEY})(?: ?\([^)\n]{{1,40}}\)|[ =]-?[\d.]{{1,12}})? cannot exceed ({_THING})", "{0} is out of its range"),
    ("mistyped", rf"(?:[Ll]ength of |[Nn]umber of )?({_KEY})(?: length| list)?(?: ?\([^)\n]{{1,40}}\))? (?:must|should|has to|does not|do not) (?:be equal to|equal(?: to)?|match) ({_THING})", "{0} has another length than {1}"),
    ("mistyped", r"[Ee]xpected (?:type )?[`'\"]?([\w.]{1,60})[`'\"]? to be (?:an? |of type |an instance of )?[`'\"]?([\w.\[\], ]{1,60}?)[`'\"]?,? but (?:got|found|received|is)", "{0} is no {1}"),
    # Tensors that a framework compares itself
    ("shape", r"\b((?:[\w-]{1,30} ){0,3}?(?<!vocab )(?<!vocab_)(?<!vocabulary )(?<!world )(?:[Ss]hape|[Ss]ize|[Ll]ength|numel|[Rr]ow|[Dd]im(?:ension)?)s?(?:[ -]count)?) mismatch\b", "{0} does not fit"),
)  # fmt: skip
