"""Read an exception's message: which argument, shape, type, device, key or name was wrong.

    mat1 and mat2 shapes cannot be multiplied (4x8 and 16x32)    shape: 4x8 and 16x32
    f() got an unexpected keyword argument 'prompts'             argument: f() does not take prompts

A form is the pattern of one library message, with its values left open. It is compiled only if the
exception contains one of its cues (cues.py), because compiling all forms takes three times as long.
"""
# ruff: noqa: E501 (a table)

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import starmap

from homeostat.health.failures.cues import cues_of
from homeostat.health.failures.forms import engines, installation, settings, trainers, validation
from homeostat.health.log import QUOTES

_MAX_CHARS = 4_000
# The number of details that are reported about one exception.
_MAX_DETAILS = 4
_MAX_KEY_WORDS = 5


@dataclass(frozen=True, slots=True)
class Detail:
    """A detail from an exception's message. `kind` is its subject, `names` are those in it."""

    kind: str
    words: str
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Form:
    kind: str
    pattern: str
    words: str


_SIZE = r"(?:torch\.Size\()?[\[(][\d, ]{1,80}[\])]\)?"
_NAME = r"[\w.\[\]-]{1,120}"
_FORMS = (
    # Shapes
    # 4-bit weights are stored as a single row.
    _Form("quantised", r"shapes cannot be multiplied \((\d{1,12}x\d{1,12}) and (1x\d{6,12})\)",
          "the weight is {1}, which is the shape of packed 4-bit values"),
    _Form("shape", r"shapes cannot be multiplied \((\d{1,12}x\d{1,12}) and (\d{1,12}x\d{1,12})\)",
          "the matrices {0} and {1} do not fit"),
    _Form("shape", r"size of tensor a \((\d{1,12})\) must match the size of tensor b \((\d{1,12})\)"
          r" at non-singleton dimension (\d{1,3})", "sizes {0} and {1} differ at dimension {2}"),
    _Form("shape", r"expanded size of the tensor \((\d{1,12})\) must match the existing size "
          r"\((\d{1,12})\)\s{1,4}at non-singleton dimension (\d{1,3})",
          "size {0} was expected at dimension {2}, but it is {1}"),
    _Form("shape", r"shape '(\[[\d, -]{1,80}\])' is invalid for input of size (\d{1,15})",
          "{1} values cannot be viewed as {0}"),
    _Form("shape", rf"size mismatch for ({_NAME}): copying a param with shape ({_SIZE}) from "
          rf"checkpoint, the shape in current model is ({_SIZE})",
          "{0} is {1} in the checkpoint and {2} in the model"),
    _Form("shape", r"[Ee]xpected size (\d{1,12}) but got size (\d{1,12}) for tensor number (\d{1,6})",
          "a size of {0} was expected, and tensor {2} has {1}"),
    _Form("shape", rf"equal size, but got ({_SIZE}) at entry (\d{{1,6}}) and ({_SIZE}) at entry"
          r" (\d{1,6})", "entry {1} is {0} and entry {3} is {2}: they cannot be stacked"),
    _Form("shape", r"could not be broadcast together with shapes (\([\d, ]{0,60}\)) (\([\d, ]{0,60}\))",
          "the arrays {0} and {1} do not fit"),
    _Form("shape", r"input batch_size \((\d{1,12})\) to match target batch_size \((\d{1,12})\)",
          "the input has {0} rows and the target {1}"),
    _Form("index", r"index (-?\d{1,12}) is out of bounds for (?:dimension|axis) (\d{1,3}) with size "
          r"(\d{1,12})", "index {0} is beyond the size {2} of dimension {1}"),
    _Form("shape", r"cannot reshape (?:array|tensor) of (?:size )?(\d{1,15})(?: elements)? into shape "
          r"([\[(][\d, -]{0,80}[\])])", "{0} values cannot take the shape {1}"),
    _Form("shape", r"split_sizes to sum exactly to (\d{1,12})", "the parts do not sum to {0}"),
    _Form("shape", rf"[Ee]xpected (?:a )?tensor of (?:shape|size) ({_SIZE}),? (?:but )?got ({_SIZE})",
          "{0} was expected, but it is {1}"),
    _Form("divide", r"([\w.()=` -]{1,80}?) (?:must be|is not|should be|to be|not)(?: evenly| an exact)? (?:divisible(?: or multiple)? by|(?:a )?multiple(?: or divisor)? of) ([\w.()=` -]{1,80})",
          "{0} is not divisible by {1}"),
    _Form("divide", r"([\w.()=/`\[\] -]{1,120}?) must be a whole number", "{0} is not a whole number"),
    _Form("shape", r"same number of dimensions: got (\d{1,3}) and (\d{1,3})",
          "one has {0} dimensions and the other {1}"),
    _Form("shape", rf"same reduction dim, but got ({_SIZE}) X ({_SIZE})", "{0} and {1} do not fit"),
    _Form("shape", rf"[Ss]hapes? ({_SIZE}) (?:and|vs\.?) ({_SIZE}) (?:cannot|can not|do not|are not|is not|don't)", "{0} and {1} do not fit"),
    _Form("shape", r"shape (\([\d, ]{1,60}\)) must match .{1,80}? shape (\([\d, ]{1,60}\))", "{0} and {1} do not fit"),
    _Form("shape", r"[Ii]ncompatible shapes(?: for \w{1,30})?:? (?:shapes=)?(.{3,120})", "{0} do not fit"),
    _Form("shape", r"same shape, (?:but )?got (\([\d, ]{1,60}\)) and (\([\d, ]{1,60}\))", "{0} and {1} do not fit"),
    _Form("shape", r"has size (\d{1,12}) for operand \d which does not broadcast with previously seen size (\d{1,12})", "sizes {0} and {1} do not fit"),
    _Form("shape", r"to have (\d{1,9}) channels, but got (\d{1,9}) channels", "{0} channels were expected, but there are {1}"),
    _Form("shape", rf"shape ({_SIZE}) doesn't match the broadcast shape ({_SIZE})", "{0} and {1} do not fit"),
    _Form("shape", rf"(?:be|is|[Ee]xpected) of (?:size|shape) ({_SIZE}),? but (?:is|got|found|was) (?:of (?:size|shape) )?({_SIZE})", "{0} was expected, but it is {1}"),
    _Form("shape", rf"[Ee]xpected \w{{1,40}} (?:of )?(?:shape|size) (?:to be )?({_SIZE}),? (?:but )?(?:got|is|found) ({_SIZE})", "{0} was expected, but it is {1}"),
    _Form("shape", rf"[Ss]hapes? (?:of )?(?:\w{{1,30}} ){{0,3}}({_SIZE})(?: at index \d{{1,2}})? (?:does not|doesn't|do not|cannot|don't) .{{1,60}}?({_SIZE})", "{0} and {1} do not fit"),
    _Form("shape", rf"has a shape of ({_SIZE}) and .{{1,40}}? has a shape of (torch\.Size\(\[.{{0,60}}?\]\))", "{0} and {1} do not fit"),
    _Form("shape", r"[Dd]imension out of range \(expected to be in range of (\[-?\d{1,3}, -?\d{1,3}\]), but got (-?\d{1,3})\)", "there is no dimension {1}"),
    _Form("shape", r"along dimension (\d{1,3}), the array at index \d{1,6} has size (\d{1,12}) and the array at index \d{1,6} has size (\d{1,12})", "sizes {1} and {2} differ at dimension {0}"),
    _Form("shape", r"dim (\d{1,3}) of tensor \d{1,3} is \[?(\d{1,12})\]?, should be equal to tensor \d{1,3} \[?(\d{1,12})\]?", "sizes {1} and {2} differ at dimension {0}"),
    _Form("shape", r"\(expected length (\d{1,12}), got (\d{1,12})\)", "a length of {0} was expected, but it is {1}"),
    _Form("shape", r"Check failed: ([^\n]{0,80}?(?:[Ss]hape|[Ss]ize|[Dd]im|numel|[Ll]en)[^\n]{0,80}?) ?\((\d{1,15}) vs\.? (\d{1,15})\)",
          "{0} does not hold: {1} and {2}"),
    _Form("shape", r"[Ii]ndex tensor must have the same number of dimensions as (\w{1,20})", "the index and the {0} have different numbers of dimensions"),
    _Form("shape", r"[Ee]xpected index (\[[\d, ]{0,60}\]) to be (?:no larger|smaller) than \w{1,20} (\[[\d, ]{0,60}\])", "the index {0} is larger than {1}"),
    # Number types
    _Form("dtype", r"expected scalar type (\w{1,30}) but found (\w{1,30})", "{0} was expected, but it is {1}"),
    _Form("dtype", r"same dtype, but got:? ([\w.:]{1,30}) (?:and|!=) ([\w.:]{1,30})", "one is {0} and the other {1}"),
    _Form("dtype", r"have the same dtype, got ([\w.]{1,30}) and ([\w.]{1,30})", "one is {0} and the other {1}"),
    _Form("dtype", r"not implemented for '(\w{1,30})'", "the operation does not exist for {0}"),
    _Form("dtype", r"[Gg]ot unsupported ScalarType (\w{1,30})", "{0} is not supported"),
    _Form("dtype", r"following scalar types: ([\w, ]{1,80}); but got ([\w.]{1,60})",
          "{0} was expected, but it is {1}"),
    _Form("dtype", r"Input type \(([\w.]{1,60})\) and (?:weight|bias) type \(([\w.]{1,60})\)",
          "the input is {0} and the weight {1}"),
    _Form("dtype", r"[Aa]ttempting to cast .{0,40}? from ([\w.]{1,30}) to ([\w.]{1,30})", "{0} cannot become {1}"),
    _Form("dtype", r"dtype[^a-z]{0,4}(?:src |expected |got )?(torch\.\w{1,30})\W{1,4}(?:and |but |dst |got |vs\.? |!= ?){0,2}(torch\.\w{1,30})",
          "one is {0} and the other {1}"),
    _Form("dtype", r"[Ee]xpected (\w{1,20}\.dtype) to be equal to (\w{1,20}\.dtype)", "{0} is not {1}"),
    _Form("dtype", r"result type (\w{1,20}) can't be cast to the desired output type (\w{1,20})", "{0} cannot become {1}"),
    _Form("dtype", r"[Gg]ot (fp\d{1,2}|bf16|int\d{1,2}|f\d{1,2}) and (fp\d{1,2}|bf16|int\d{1,2}|f\d{1,2})\b", "one is {0} and the other {1}"),
    _Form("dtype", r"(?:to be|must be|expected) (?:a )?(?:torch\.)?(bf16|fp16|fp32|float16|bfloat16|float32|half|int32|int64|long)(?: tensor)?,? (?:but )?(?:got|found|is|not) ((?:torch\.)?\w{2,20})", "{0} was expected, but it is {1}"),
    # Devices
    _Form("device", r"indices should be either on (cpu) or on the same device", "the indices are not on {0}"),
    _Form("device", r"is on (cpu|CPU|cuda:\d{1,3}|mps|meta|xpu\S{0,4}|npu\S{0,4}),? but (?:is )?expected (?:it |them )?(?:to be )?on (\w{1,8})", "it is on {0} and should be on {1}"),
    _Form("device", r"[Ee]xpected a '(\w{1,8})' device type for generator but found '(\w{1,8})'", "the generator is on {1} and should be on {0}"),
    _Form("device", r"storage has not been allocated on (\w{1,8}) device", "a tensor is not on {0}"),
    _Form("device", r"(?:must be|should be|expected to be) (?:on|a) (CUDA|cuda|GPU)\b(?: tensor| device)?", "a tensor is not on the GPU ({0})"),
    _Form("device", r"at least two devices, ([\w:]{1,20}) and ([\w:]{1,20})", "one is on {0} and the other on {1}"),
    _Form("argument", r"when checking argument for argument (\w{1,60}) in method (\w{1,80})",
          "it is the argument {0} of {1}"),
    _Form("device", r"[Cc]annot copy out of meta tensor", "a weight has no data: it is on the meta device"),
    _Form("device", r"[Pp]ointer argument \(at (\d{1,4})\) cannot be accessed from Triton",
          "argument {0} of a Triton kernel is on the CPU"),
    _Form("device", r"[Ii]nvalid device ordinal", "the requested device does not exist"),
    # Arguments
    _Form("argument", r"(?:([\w.<>]{1,120}\(\)) )?(?:got an )?unexpected keyword argument '?(\w{1,80})'?",
          "{0} does not take {1}"),
    _Form("argument", r"([\w.<>]{1,120})\(\) got multiple values for (?:keyword )?argument '(\w{1,80})'",
          "{0}() is given {1} twice"),
    _Form("argument", r"([\w.<>]{1,120})\(\) missing \d{1,3} required (?:positional|keyword-only) arguments?: "
          r"(.{1,200})", "{0}() needs {1}"),
    _Form("argument", r"([\w.<>]{1,120})\(\) takes ([\w ]{1,40}?) positional arguments? but (\d{1,4}) "
          r"(?:was|were) given", "{0}() takes {1} arguments and is given {2}"),
    _Form("argument", r"(missing) a required argument: '(\w{1,80})'", "{1} is not given"),
    _Form("argument", r"'(\w{1,80})' is an invalid keyword argument for ([\w.]{1,80})", "{1} does not take {0}"),
    _Form("setting", r"unrecognized arguments: (.{1,200})", "the command line has {0}, which is not known"),
    _Form("unset", r"[Ii]nvalid (\w{1,60}): None\b", "no {0} is given"),
    _Form("unset", r"[Cc]onfig\w{0,12}\b.{0,80}? must (?:contain|have|define|include) (?:the |a |an )?(?:key )?['\"](\w{1,60})['\"]", "the config lacks {0}"),
    _Form("setting", r"following arguments are required: (.{1,200})", "the command line lacks {0}"),
    _Form("setting", r"(?:argument|option) (--?[\w./-]{1,60}): (?:invalid|expected) (.{1,120})", "{0}: {1}"),
    _Form("setting", r"Key '([\w.]{1,80})' is not in struct", "the config has no key {0}"),
    _Form("setting", r"Could not override '([\w.@/]{1,120})'", "the config has no key {0}"),
    _Form("setting", r"ConfigAttributeError: (?:Missing )?[Kk]ey '?([\w.]{1,80})", "the config has no key {0}"),
    _Form("setting", r"Missing mandatory value: ([\w.]{1,120})", "the config gives no value for {0}"),
    _Form("setting", r"[Ss]ome keys are not used by the HfArgumentParser: (\[.{1,200}\])", "{0} are not known"),
    _Form("refused", r"(\d{1,4}) validation errors? for (\w{1,80})", "{1} is refused, in {0} places"),
    _Form("resume", r"(\w{1,80}) value from checkpoint \((.{1,60}?)\) is not equal to the input argument value \((.{1,60}?)\)",
          "{0} is {1} in the checkpoint and {2} in the settings"),
    _Form("quantised", r"(?:not supported|not possible|can't|cannot) .{0,60}?(4-bit|8-bit|quantized|quantised)", "that is not possible with {0} weights"),
    _Form("exclusive", r"([\w ().`'-]{1,80}?) (?:is|are) (?:incompatible with|not supported (?:in|with|for|when|together)|not compatible with)(?! input tensor) ([\w ().`'-]{1,80})",
          "{0} does not go together with {1}"),
    _Form("exclusive", r"([\w ().`'-]{1,80}?) (?:is|are) only (?:supported|available|allowed) (?:for|with|in|when) ([\w ().`'-]{1,80})",
          "{0} needs {1}"),
    _Form("mistyped", r"must be of type ([\w.\[\], ]{2,60}?),? (?:but|not|got|and)\b.{0,80}?<class '([\w.]{1,60})'>", "{0} was expected, but it is {1}"),
    _Form("mistyped", r"must be (?:either )?an? ([\w. ]{2,30}?) or an instance of [`'\"]?([\w.]{2,120})", "a {0} or a {1} was expected"),
    _Form("setting", r"[Uu]n(?:known|recogni[sz]ed) (?:argument|option|setting|config key|configuration key|key|flag|parameter|field)s?:? [`'\"\[]{0,2}(-{0,2}[\w./-]{1,80})", "{0} is not known"),
    _Form("setting", r"ambiguous option: (--[\w-]{1,60})", "{0} is not a whole name"),
    _Form("setting", r"[`'\"]?([\w./-]{1,60})[`'\"]? is not a valid (\w{1,60}), (?:please select|must be|choose|select) one of", "{0} is not a {1}"),
    _Form("setting", r"(?:[Uu]nsupported|[Uu]nknown|[Ii]nvalid|[Uu]nrecogni[sz]ed) ([\w -]{2,40}?):? [(\[]?[`'\"]?([\w./-]{1,60})[`'\"]?[.,;(]?[)\]]? .{0,20}?(?:[Mm]ust be one of|[Cc]hoose from|[Ss]upported|[Vv]alid|[Aa]vailable|[Ee]xpected one of|[Oo]ptions)", "{1} is not a {0} that is known"),
    _Form("setting", r"(?:[Uu]nsupported|[Uu]nknown|[Ii]nvalid) (optimizer|scheduler|lr scheduler|loss type|advantage estimator|strategy|backend|reward type|dataset type|precision|algorithm|sampler|attention implementation)(?: name| type)?:? [`'\"]?([\w./-]{2,60})", "{1} is not a {0} that is known"),
    _Form("unset", r"[Yy]ou (?:must|need to|have to|should) (?:specify|provide|set|pass|give|define) (?:a |an |the |either )?[`'\"]?(--?[\w.-]{2,60}|\w{2,60}_\w{1,60}|\w{1,60}(?=[`'\"]))", "{0} is not given"),
    _Form("unset", r"[`'\"]?(--[\w-]{2,60}|\w{2,60}_\w{1,60}|\w{1,60}(?=[`'\"]))[`'\"]? (?:must|should|has to|needs to) be (?:set|specified|provided|given|passed|defined)\b(?! to\b)", "{0} is not given"),
    _Form("unset", r"[Ee]nvironment variable [`'\"]?([A-Z][A-Z_0-9]{2,60})[`'\"]?.{0,30}?(?:not set|not defined|missing|must be set|is required)", "the variable {0} is not set"),
    _Form("unset", r"\b([A-Z][A-Z0-9]{1,30}_[A-Z_0-9]{2,40}) (?:environment variable )?(?:is|was) not (?:set|defined|found)", "the variable {0} is not set"),
    _Form("exclusive", r"(?:[Cc]annot|[Cc]an't|[Cc]an not) (?:use|set|specify|enable|pass|have) both ([\w ().`'-]{1,60}?) and ([\w ().`'-]{1,60})", "{0} does not go together with {1}"),
    _Form("exclusive", r"([\w().`'-]{2,60}) and ([\w().`'-]{2,60}) (?:are mutually exclusive|cannot (?:both )?be (?:used|set|enabled|specified|passed)|can't (?:both )?be|at the same time)", "{0} does not go together with {1}"),
    _Form("exclusive", r"([\w ().`'-]{2,60}?) can only be (?:used|enabled|set|specified) (?:with|when|if|together with|for|in) ([\w ().`'>=-]{2,60})", "{0} needs {1}"),
    _Form("exclusive", r"([\w ().`'-]{2,60}?) (?:must|should) (?:not be|be) (?:used|enabled|set|disabled|False|True) (?:with|when|if|together) ([\w ().`'>=-]{2,60})", "{0} depends on {1}"),
    # Names
    _Form("attribute", r"module '([\w.]{1,120})' has no attribute '(\w{1,120})'", "{0} has no {1}"),
    _Form("attribute", r"'NoneType' object has no attribute '(\w{1,120})'",
          "a value is None where something with {0} was expected"),
    _Form("attribute", r"(?:type object )?'(?!NoneType')([\w.]{1,120})' object has no attribute '(\w{1,120})'",
          "a {0} has no {1}"),
    _Form("attribute", r"type object '([\w.]{1,120})' has no attribute '(\w{1,120})'", "{0} has no {1}"),
    _Form("attribute", r"(?:^|\s)([A-Z]\w{1,120}) has no attribute '?(\w{1,120})", "{0} has no {1}"),
    _Form("import", r"cannot import name '(\w{1,120})'(?: from (?:partially initialized module )?'([\w.]{1,160})')?",
          "{1} has no {0}"),
    _Form("import", r"No module named '?(\w{1,80}\.[\w.]{1,160})'?", "the module {0} is not installed or not on the path"),
    _Form("name", r"name '(\w{1,120})' is not defined", "{0} is not defined"),
    _Form("name", r"local variable '(\w{1,120})'", "{0} has no value yet"),
    # Values
    _Form("none", r"'NoneType' object is not (subscriptable|iterable|callable)",
          "a value is None where something {0} was expected"),
    _Form("type", r"'(?!NoneType')([\w.]{1,80})' object is not (subscriptable|iterable|callable|an iterator)",
          "a {0} is not {1}"),
    _Form("type", r"unsupported operand type\(s\) for ([^\s:]{1,12}): '([\w.]{1,60})' and '([\w.]{1,60})'",
          "{1} {0} {2} is not possible"),
    _Form("type", r"'([^\s']{1,4})' not supported between instances of '([\w.]{1,60})' and '([\w.]{1,60})'",
          "{1} and {2} cannot be compared"),
    _Form("type", r"'([\w.]{1,80})' object does not support (item (?:assignment|deletion)|the (?:asynchronous )?context manager protocol)",
          "a {0} does not support {1}"),
    _Form("type", r"expected string or bytes-like object(?:, got '([\w.]{1,60})')?", "a text was expected, but it is {0}"),
    _Form("type", r"object of type '([\w.]{1,80})' has no len\(\)", "a {0} has no length"),
    _Form("type", r"(?:can only concatenate|must be) (\w{1,30}),? (?:\()?not \"?(\w{1,30})", "{0} was expected, but it is {1}"),
    _Form("type", r"(?:indices|index) must be ([\w ]{1,40}?),? not '?(\w{1,30})", "an index must be {0} and is {1}"),
    _Form("type", r"argument of type '([\w.]{1,60})' is not iterable", "a {0} cannot be searched"),
    _Form("type", r"Object of type ([\w.]{1,60}) is not JSON serializable", "a {0} cannot be written as JSON"),
    _Form("value", r"invalid literal for int\(\) with base \d{1,2}: '(.{0,80}?)'", "{0!r} is not a whole number"),
    _Form("value", r"could not convert string to float: '?(.{0,80}?)'?$", "{0!r} is no number"),
    _Form("value", r"(?:not enough|too many) values to unpack \(expected (\d{1,6})(?:, got (\d{1,6}))?\)",
          "{0} values were expected"),
    _Form("value", r"'?(.{1,60}?)'? is not a valid (\w{1,80})", "{0} is not a valid {1}"),
    _Form("value", r"Expecting value: line (\d{1,9}) column (\d{1,9})", "the text is not JSON"),
    _Form("value", r"division by zero", "a number is divided by 0"),
    _Form("value", r"list index out of range", "a list is shorter than the index"),
    _Form("value", r"All arrays must be of the same length", "columns have different lengths"),
    _Form("keys", r"(?:Received|Missing) (\d{1,9}) parameters(?: not in model)?:", "{0} weights do not fit the model"),
    _Form("keys", r"Missing key\(s\) in state_dict: (.{1,200})", "the weights lack {0}"),
    _Form("keys", r"Unexpected key\(s\) in state_dict: (.{1,200})", "the weights have {0}, which the model does not have"),
    _Form("keys", r"[Tt]here is no (?:module or )?parameter named '([\w.]{2,160})'", "the model has no {0}"),
    _Form("keys", r"(?:[Uu]nrecogni[sz]ed|[Uu]nexpected|[Uu]nknown) (?:weight|parameter|tensor)s?(?: names?| keys?)?:? [`'\"\[]{0,2}([\w.]{2,160})", "the model has no {0}"),
    _Form("disk", r"\[Errno (?:27|28|122)\] ([A-Z][\w ]{1,60})", "a file could not be written: {0}"),
    _Form("disk", r"\bwrite\(\): fd \d{1,9} failed with ([A-Z][\w/ ]{1,40})",
          "a file could not be written: {0}"),
    _Form("disk", r"\b(\d{1,15}) requested and (\d{1,15}) written", "only {1} of {0} values could be written"),
    _Form("file", r"[`'\"]?([^\s`'\"]{1,300})[`'\"]? must be an existing (?:directory|folder|file|path)", "{0} does not exist"),
    _Form("folder", r"\[Errno 17\] (File exists): '?([^'\n]{1,300}?)'?$", "{1} already exists"),
    _Form("writing", r"\[Errno (?:1|13|30)\] ([A-Z][\w -]{1,60}): '?([^'\n]{1,300}?)'?$", "{1}: {0}"),
    _Form("file", r"\[Errno (?!1\]|13\]|17\]|30\])\d{1,4}\] ([A-Z][\w ]{1,60}): '?([^'\n]{1,300}?)'?$", "{1}: {0}"),
    _Form("file", r"(\S{0,200}[/\\.]\S{1,100}) (?:does not exist|is not a local folder|could not be found)", "{0} does not exist"),
    _Form("pickle", r"[Cc]an(?:'t|not) pickle ([^:\n]{1,120})", "{0} cannot be sent to another process"),
    _Form("pickle", r"[Cc]ould not serialize (?:the )?(function|actor class|argument|object)\b", "the {0} cannot be sent to another process"),
    _Form("pickle", r"([\w.']{1,80})(?: objects?)? cannot be (?:pickled|serialized)", "{0} cannot be sent to another process"),
    _Form("pickle", r"Can't get (?:local )?(?:attribute|object) '([\w.<>]{1,80})' on <module", "another process does not find {0}"),
    _Form("object", r"[Cc]annot re-initialize CUDA in forked subprocess", "CUDA was used before a fork"),
)  # fmt: skip


# The name of a weight: parts with dots, and a typical last part.
_WEIGHT = re.compile(
    r"(?=.{0,80}\.)[\w.]{1,160}\.(?:weight|bias|qweight|scales|biases|lora_[AB](?:\.\w{1,20})?\.weight)"
)
# A path after words which say that something was not found.
_PATH = re.compile(
    r"(?:not found|not find|[Mm]issing|does not exist)[^/\n]{0,60}?[\s'\"`]((?:/|\./|[A-Za-z]:\\)[^\s'\"`,]{1,300})"
)
# A path anywhere in the message: at least two parts, in quotes or after a colon.
_ANY_PATH = re.compile(r"(?:['\"`]|: )((?:[\w.~-]{0,80}/){1,20}[\w.-]{1,120})(?:['\"`]|[\s.,]|$)")
# An AttributeError whose message is only a name, as compiled modules and torch's look-ups raise it.
_GONE = re.compile(r"(\w{2,120})(?: does not exist| not found)?")


# What a sentence has and a key has not: something quoted after a space, or what happened to it.
_SENTENCE = re.compile(r"\w ['\"`]\w|\w ['\"`]? ?(?:is |was )?not (?:found|in|known)\b")


# pydantic's errors: the setting, what is wrong with it, and pydantic's name for that kind of error.
_REFUSED = re.compile(
    r"^(?P<where>[A-Za-z_][\w.\[\]-]{0,120})\n\s*(?P<what>[^\n]{1,300}?) \[type=(?P<type>\w{1,60})",
    re.MULTILINE,
)
_NOT_TYPES = frozenset({"value_error", "assertion_error"})
_CHOICES = frozenset({"literal_error", "enum", "union_tag_invalid"})


@cache
def _all_forms() -> tuple[tuple[_Form, tuple[str, ...]], ...]:
    """Return every form with its cues, in the order in which the forms are tried."""
    early = (*installation.FORMS, *engines.FORMS, *trainers.FORMS)
    limits = (*validation.LENGTHS, *engines.LATE)
    late = (*settings.FORMS, *limits, *validation.FORMS)
    forms = (*starmap(_Form, early), *_FORMS, *starmap(_Form, late))
    return tuple((form, cues_of(form.pattern)) for form in forms)


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern once. The cache of `re` is smaller than the number of forms."""
    return re.compile(pattern)


def details_of(kind: str, message: str) -> tuple[Detail, ...]:
    """Return the details in an exception's message, most useful first; () if no form fits."""
    text = message[:_MAX_CHARS].translate(QUOTES)
    first = text.partition("\n")[0]
    found = [*_by_kind(kind, first), *_by_pydantic(text)]
    small = text.lower()
    for form, cues in _all_forms():
        if cues and not any(cue in small for cue in cues):
            continue
        match = _compiled(form.pattern).search(text)
        if match is None or any(match[0] in one.words for one in found):
            continue
        names = tuple(group.strip("'\"` ") for group in match.groups() if group is not None)
        found.append(Detail(form.kind, _filled(form.words, match.groups()), names))
        if len(found) >= _MAX_DETAILS:
            break
    return tuple(found)


def _filled(words: str, groups: Sequence[str | None]) -> str:
    """Return a form's sentence with the message's values, without a bracket for one it lacks."""
    for place, group in enumerate(groups):
        if group is None:
            words = words.replace(f" ({{{place}}})", "")
    return words.format(*(group if group is not None else "it" for group in groups))


def _by_pydantic(text: str) -> Iterator[Detail]:
    """Yield the detail for the first setting that pydantic refuses, by pydantic's name of the
    error.

    Errors that a validator raises itself are sentences, which the forms read.
    """
    found = _REFUSED.search(text) if "[type=" in text else None
    if found is None or found["type"] in _NOT_TYPES:
        return
    where, what, kind = found["where"], found["what"], found["type"]
    if kind == "missing":
        yield Detail("unset", f"{where} is not given", (where,))
    elif kind == "extra_forbidden":
        yield Detail("setting", f"{where} is not known", (where,))
    else:
        is_choice = kind in _CHOICES
        yield Detail("setting" if is_choice else "mistyped", f"{where}: {what}", (where,))


def _path_in(text: str) -> str:
    """Return the path in a FileNotFoundError; "" if there is none or the system wrote the message.

    The system's messages begin with a number ([Errno 2]); the forms read those.
    """
    found = _PATH.search(text)
    if found is None and "[Errno" not in text:
        found = _ANY_PATH.search(text)
    return found[1] if found is not None else ""


def _by_kind(kind: str, text: str) -> Iterator[Detail]:
    """Yield what the class of an exception means if its whole message is a name."""
    name = kind.rpartition(".")[2]
    if name == "KeyError" and 0 < len(text) <= 300:
        key = text.strip("'\" ")
        if _WEIGHT.fullmatch(key):
            yield Detail("keys", f"there is no weight {key}", (key,))
            return
        if len(key.split()) > _MAX_KEY_WORDS or _SENTENCE.search(key):
            # A sentence is not a key; the forms read it.
            return
        yield Detail("key", f"there is no key {key}", (key,))
    elif name == "FileNotFoundError" and (path := _path_in(text)):
        yield Detail("file", f"{path} does not exist", (path,))
    elif name == "AttributeError" and (gone := _GONE.fullmatch(text)) is not None:
        yield Detail("attribute", f"{gone[1]} does not exist", (gone[1],))
    elif name == "AssertionError" and not text:
        yield Detail("value", "a condition that has to hold does not")
    elif name == "NVMLError_NotSupported":
        yield Detail("system", "this GPU does not answer what NVML is asked (shared memory, vGPU)")
