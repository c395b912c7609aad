"""Write docs/reference/ from the code that it describes. Needs no torch.

    config classes, presets    -> config.md
    observe/names.py           -> metrics.md
    observe/events.py          -> events.md
    RUN_FOLDER, below          -> run_folder.md
    the Typer app              -> cli.md
    health/registry.py         -> rules.md, and rules/ with a page for each family
    coverage/                  -> coverage.md: what five troubleshooting guides name
    health/signatures/*.toml   -> compiled.json beside them
    bench/threads/open.jsonl   -> health/guesses/known_cases.json

`make docs` runs it; tests/style/test_docs.py fails while a page is stale.
"""

from __future__ import annotations

import inspect
import itertools
import re
import runpy
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import yaml
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.models import ArgumentInfo, OptionInfo

from homeostat.cli.app import EXIT_CODES
from homeostat.cli.explain import page
from homeostat.cli.rules import headline
from homeostat.cli.threads import write_known
from homeostat.cli.verbs import app
from homeostat.config.base import ByteSize, Settings
from homeostat.config.loading.presets import ON_A_GPU, PRESETS
from homeostat.config.loading.schema import has_plain_value, settings_types
from homeostat.config.run import RunConfig
from homeostat.health import remedies
from homeostat.health.finding import Family, Level
from homeostat.health.registry import BY_CODE, RULES, SIGNATURES
from homeostat.health.rule import Rule
from homeostat.health.signatures.source import write_compiled
from homeostat.health.vocabulary import WORDS
from homeostat.observe import events, names

REFERENCE = Path(__file__).resolve().parent / "reference"
COVERAGE = Path(__file__).resolve().parent / "coverage"
# In place of codes, where a symptom has none.
NO_CODE = {
    "not evaluated": "no rule can recognise it; a rule that lacks data reports which",
    "no sign": "it leaves no sign in metrics, settings or logs",
}
# Every path that a run may write; a test trains one and looks for others.
RUN_FOLDER = {
    "config.yaml": "The recipe as it was given.",
    "config.json": "The resolved config, with presets, overrides and defaults filled in.",
    "metrics.jsonl": "One record per `observe.log_interval` steps: see [metrics](metrics.md).",
    "findings.jsonl": "Findings of the health rules (`health`): a line when one opens or gets "
    "worse, a line when it closes, each with evidence, causes and fixes.",
    "events.jsonl": "Events in the order in which they happened: see [events](events.md).",
    "row_losses.jsonl": "The ids and losses of the rows of each step (`observe.row_losses`).",
    "healing.json": "The remedies that were tried when the run last went back to a checkpoint.",
    "console.log": "Everything that was shown or logged, whichever view was chosen.",
    "report.html": "A self-contained page with plots, events and the rows of highest loss, for RL "
    "with completions (`observe.report`). It is also written when a run fails.",
    "traceback.txt": "The traceback of a run that failed.",
    "checkpoints/step_N/": "Weights and optimizer state (`.safetensors`), `state.json` (step, data "
    "order), `manifest.json` (size and SHA-256 of every file).",
    "checkpoints/step_N/*.<rank>of<size>.safetensors": "The same with several ranks: the rows of "
    "each tensor that a rank holds.",
    "checkpoints/step_N/published.safetensors": "The weights that the engine had, if they were "
    "older than the trainer's (`sync.interval`).",
    "checkpoints/step_N/hf/": "HF-format weights, or a peft adapter (`checkpoint.export`).",
    "checkpoints/latest": "Name of the newest checkpoint.",
    "checkpoints/best": "Name of the checkpoint with the lowest `eval/loss`, in RL with the "
    "highest `eval/reward`.",
    "checkpoints/set_aside_*/": "Checkpoints after the step to which `checkpoint.load_step` went "
    "back.",
    "data/": "The tokenised rows, memory-mapped (`data.cache_dir` names another place). Not in RL.",
    "reference/": "Log-probs of all rows under the reference (preference training with "
    "`preference.reference_logps: precomputed`).",
    "journal/": "Scored rollouts (`groups_N.log`), written before they are trained on. Only those "
    "that a resumed run would need are kept, unless `rollout.keep_journal` is set.",
    "completions/step_N.parquet": "Prompts, completions, rewards and advantages of a step, for "
    "people to read (`observe.completions`, `homeostat inspect`).",
    "rewards.log": "The output of reward functions; beyond 64 MiB its middle is left out.",
    "engine.log": "The output of an engine in its own process.",
    "engine_model/": "The model in HF format on which vLLM is started, if `model.path` is not "
    "such a folder.",
    "workers.log": "The output of the trainer's ranks, each line with its rank, and of torchrun.",
    "homeostat-*/": "Weights that are being sent to the engine (`sync.transport.type: disk`).",
    "collective-*/": "Rendezvous of trainer and engine (`sync.transport.type: collective`).",
    "offending_rows/step_N.jsonl": "Rows of a step whose loss or gradient was not finite: id, "
    "origin, text, tokens, weights.",
    "trace/": "Profiler traces (`observe.profiler`), and `oom_step_N.json`: the largest "
    "allocations when memory ran out.",
    "tensorboard/": "The TensorBoard sink's files.",
    "sinks/": "State that the W&B and trackio sinks need after a resume.",
    "wandb/": "W&B's own files; with `mode: offline` the whole run.",
    ".lock": "Held by the process that writes here.",
}
# Keys that a base class must have for the classes below it to leave them out of their tables.
MANY_KEYS = 6
NOTE = "<!-- Generated by docs/generate.py (make docs). Do not edit. -->\n"


def pages() -> dict[str, str]:
    """File name -> content, for every page of the reference."""
    makers: dict[str, Callable[[], str]] = {
        "config.md": config_page,
        "metrics.md": metrics_page,
        "events.md": events_page,
        "run_folder.md": run_folder_page,
        "cli.md": cli_page,
        "rules.md": rules_page,
        "coverage.md": coverage_page,
    }
    for family in Family:
        makers[f"rules/{family.value}.md"] = partial(family_page, family)
    return {name: f"{NOTE}\n{make().rstrip()}\n" for name, make in makers.items()}


def config_page() -> str:
    intro = (
        "# Config keys\n\n"
        "A recipe is a YAML file with these keys. You can also set any key on the command line "
        "(`trainer.lr=1e-5`, `data.train.0.limit=100`). Unknown keys are refused.\n\n"
        "The column `resume` tells whether you may change a key when you resume a run. `free`: you "
        "may, and no result changes. `warn`: you may; the run changes from this point on, and the "
        "event `config_changed` is recorded. `forbid`: the change is refused, because it would "
        "make the run another experiment.\n"
    )
    sections = "\n".join(_sections(RunConfig, ""))
    presets = "\n".join(_preset(name) for name in PRESETS)
    return f"{intro}\n{sections}\n## Presets\n\n{_PRESETS_INTRO}\n\n{presets}"


_PRESETS_INTRO = (
    "Set `preset: low_memory`, or a list. A preset changes defaults. Keys in your recipe or on the "
    "command line always win, and keys of a preset that conflict with them are left out."
)


def _sections(
    model: type[Settings], prefix: str, heading: str = "Top level", done: set[str] | None = None
) -> Iterator[str]:
    """The table of one class, then those of the classes below it, each of them once."""
    done = set() if done is None else done
    if heading in done:
        return
    done.add(heading)
    yield f"## {heading}\n"
    if "__doc__" in vars(model) and model.__doc__:
        yield f"{inspect.cleandoc(model.__doc__)}\n"
    rows: list[tuple[str, ...]] = []
    below: dict[type[Settings], list[str]] = {}
    for name, info in _own_fields(model).items():
        path = f"{prefix}{name}"
        rows.append((f"`{path}`", _type(info), _default(info), _help(info), _resume(info)))
        is_list = get_origin(info.annotation) is tuple
        for child in _with_bases(settings_types(info.annotation)):
            below.setdefault(child, []).append(f"{path}[]" if is_list else path)
    if _large_base(model):
        yield "Its own keys, and shared keys with another default:\n"
    yield table(("key", "type", "default", "what it does", "resume"), rows)
    for child, paths in below.items():
        title = " and ".join(f"`{path}`" for path in paths)
        tags = ", ".join(filter(None, map(_tag, _with_subclasses(child))))
        title += f" with `type: {tags}`" if tags else ""
        yield from _sections(child, f"{paths[0]}.", title, done)


def _large_base(model: type[Settings]) -> type[Settings] | None:
    """The class that a choice shares most of its keys with, where it has one."""
    base = model.__base__
    is_large = base is not None and base is not Settings and issubclass(base, Settings)
    return base if is_large and len(base.model_fields) >= MANY_KEYS else None


def _with_bases(children: Iterable[type[Settings]]) -> list[type[Settings]]:
    """The classes, each behind the bases that say most of its keys."""
    chains = (_chain(child) for child in children)
    return list(dict.fromkeys(one for chain in chains for one in chain))


def _chain(model: type[Settings]) -> list[type[Settings]]:
    base = _large_base(model)
    return [*(_chain(base) if base is not None else []), model]


def _with_subclasses(model: type[Settings]) -> list[type[Settings]]:
    below = (_with_subclasses(child) for child in model.__subclasses__())
    return [model, *itertools.chain.from_iterable(below)]


def _own_fields(model: type[Settings]) -> dict[str, FieldInfo]:
    own = inspect.get_annotations(model) if _large_base(model) else model.model_fields
    # A base that cannot be chosen has no value of `type` to show.
    hidden = () if _tag(model) else ("type",)
    fields = model.model_fields.items()
    return {name: info for name, info in fields if name in own and name not in hidden}


def _tag(model: type[Settings]) -> str:
    """Return the value of `type` that chooses a class; a base that cannot be chosen has none."""
    field = model.model_fields.get("type")
    names = get_args(field.annotation) if field is not None else ()
    return names[0] if names else ""


def _type(info: FieldInfo) -> str:
    children = settings_types(info.annotation)
    if children:
        tags = [_tag(child) for child in children]
        kind = "section" if not all(tags) else " or ".join(f"`{tag}`" for tag in tags)
        if has_plain_value(info.annotation):
            plain = [part for part in get_args(info.annotation) if has_plain_value(part)]
            kind = " or ".join([*map(_type_name, plain), kind])
        text = f"list of {kind}" if get_origin(info.annotation) is tuple else kind
        return text + (" or `null`" if _may_be_null(info) else "")
    limits = _limits(info)
    return _type_name(info.annotation, info) + (f", {limits}" if limits else "")


def _may_be_null(info: FieldInfo) -> bool:
    return type(None) in get_args(info.annotation)


def _type_name(annotation: Any, info: FieldInfo | None = None) -> str:
    if _is_bytes(annotation, info):
        return "bytes (`20GB`, `512MiB`)"
    if get_origin(annotation) is Annotated:
        return _type_name(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"list of {_type_name(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return f"names with {_type_name(get_args(annotation)[1])}"
    inner = get_args(annotation)
    if inner:
        known = [_type_name(part) for part in inner if part is not type(None)]
        return " or ".join([*known, "`null`"] if type(None) in inner else known)
    words = {str: "text", int: "whole number", float: "number", bool: "`true`, `false`"}
    words[Any] = "any value"
    return words[annotation]


def _is_bytes(annotation: Any, info: FieldInfo | None) -> bool:
    """pydantic unpacks an Annotated field: what is left of ByteSize is its validator."""
    marks = get_args(ByteSize)[1:]
    return annotation is ByteSize or any(mark in marks for mark in (info.metadata if info else ()))


def _limits(info: FieldInfo) -> str:
    signs = {"ge": "at least {}", "gt": "above {}", "le": "at most {}", "lt": "below {}",
             "min_length": "not empty", "pattern": "matching `{}`"}  # fmt: skip
    found = []
    for mark in info.metadata:
        for name, text in signs.items():
            value = getattr(mark, name, None)
            if value is not None:
                found.append(text.format(value))
    return ", ".join(found)


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    assert value is not PydanticUndefined, info
    if isinstance(value, Settings):
        if _tag(type(value)):
            return f"`{_tag(type(value))}`"
        return "its defaults" if _may_be_null(info) else ""
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    words = {None: "`null`", True: "`true`", False: "`false`"}
    return words[value] if value is None or isinstance(value, bool) else f"`{value}`"


def _help(info: FieldInfo) -> str:
    return info.description or "Chooses the kind."


def _resume(info: FieldInfo) -> str:
    if len(settings_types(info.annotation)) == 1 and not _may_be_null(info):
        return ""  # a section that is always there: its keys say it
    extra = info.json_schema_extra
    return str(extra["resume"]) if isinstance(extra, dict) else "forbid"


def _preset(name: str) -> str:
    page = f"### `{name}`\n\n{_yaml_block(PRESETS[name])}"
    if name in ON_A_GPU:
        where = "With `trainer.device: cuda` or `trainer.backend.type: fsdp` also:"
        page += f"\n{where}\n\n{_yaml_block(ON_A_GPU[name])}"
    return page


def _yaml_block(values: dict[str, Any]) -> str:
    return f"```yaml\n{yaml.safe_dump(values, sort_keys=False)}```\n"


def metrics_page() -> str:
    rows = [
        (f"`{info.name}`", info.unit, info.reduce.value, info.meaning) for info in names.CATALOGUE
    ]
    return (
        "# Metrics\n\n"
        "Each line of `metrics.jsonl` is one JSON object: `step`, `time` (seconds since 1970) and "
        "the metrics of the steps since the record before it (`observe.log_interval`). The same "
        "names go to TensorBoard, W&B and trackio.\n\n"
        f"{table(('name', 'unit', 'reduced by', 'meaning'), rows)}\n"
        "A record combines the steps since the one before by `mean`; `rate` (all tokens over all "
        "seconds); `last` (the newest value); `sum`; `max`; or `min`. A value that is not finite "
        "makes the result not finite, so it is never hidden. It is written as the text `nan`, "
        "`inf` or `-inf`, because JSON has no number for it. A record is closed at each evaluation "
        "and each checkpoint, so a resumed run writes the same records as an uninterrupted one.\n"
    )


def events_page() -> str:
    rows = [
        (f"`{info.kind}`", info.meaning, ", ".join(f"`{field}`" for field in info.fields))
        for info in events.EVENTS.values()
    ]
    return (
        "# Events\n\n"
        "Each line of `events.jsonl` is one event: `kind`, `step`, `time` (seconds since 1970) and "
        "the fields below. Events are history: a resume removes metric records of steps that are "
        "computed again, but never an event. Each event is synced to disk before the run "
        "continues.\n\n"
        f"{table(('kind', 'meaning', 'fields'), rows)}"
    )


def run_folder_page() -> str:
    rows = [(f"`{name}`", meaning) for name, meaning in RUN_FOLDER.items()]
    return (
        "# The run folder\n\n"
        "A run writes everything to `<runs_dir>/<name>/`.\n\n"
        f"{table(('path', 'holds'), rows)}\n"
        "One process writes at a time: a second `homeostat train` on the same folder is refused, "
        "and the message names the process that holds it. The lock is the kernel's and is released "
        "when the process ends. Reading needs no lock.\n"
    )


def cli_page() -> str:
    codes = list(EXIT_CODES.items())
    verbs = "\n".join(_verb(info.callback) for info in app.registered_commands if info.callback)
    return f"# Command line\n\n{app.info.help}\n\n{table(('exit code', 'meaning'), codes)}\n{verbs}"


def rules_page() -> str:
    """The index of the rules, by family; then the words of a diagnosis."""
    rows = [
        (_rule_link(rule), rule.name, rule.family.value, rule.level.value, headline(rule))
        for rule in RULES
    ]
    words = [
        (f"`{name}`", family.value, meaning)
        for family, names_of in WORDS.items()
        for name, meaning in sorted(names_of.items())
    ]
    return (
        "# Rules\n\n"
        f"{len(RULES)} rules, of which {len(SIGNATURES)} recognise an error by its text. "
        "`homeostat explain CODE` shows the page of a rule. [The guide](../guide/doctor.md) "
        "describes how to use them, and [coverage](coverage.md) lists which troubleshooting guides "
        "of other projects they cover.\n\n"
        f"{table(('code', 'name', 'family', 'level', 'about'), rows)}\n"
        "## Words\n\n"
        "These are all names that a finding or a cause may have. Those that begin with `benign-` "
        "look like an illness but are harmless: their findings have level info.\n\n"
        f"{table(('name', 'family', 'meaning'), words)}"
    )


def family_page(family: Family) -> str:
    """The pages of one family's rules, each as `homeostat explain` shows it."""
    rules = [rule for rule in RULES if rule.family is family]
    sections = "\n".join(_rule_section(rule) for rule in rules)
    return f"# Rules about {family.value}\n\n[All rules](../rules.md)\n\n{sections}"


def _rule_section(rule: Rule) -> str:
    title, about, *lines = page(rule)
    # A rule's page is a page of its own; here it is a section.
    text = re.sub(r"^## ", "### ", "\n".join(lines), flags=re.M)
    text = re.sub(r"\n(### .+)\n(?=\S)", r"\n\1\n\n", text)
    return f"#{title}\n\n{about}\n\n{text.strip()}\n"


def symptom_rows() -> dict[str, tuple[tuple[str, str, str, str], ...]]:
    """Guide -> its symptoms: section, symptom, codes, what is done here."""
    files = sorted((COVERAGE / "symptoms").glob("*.py"))
    tables = [runpy.run_path(str(file)) for file in files]
    return {table["GUIDE"]: table["ROWS"] for table in tables}


def setting_rows() -> dict[str, tuple[tuple[str, str, str], ...]]:
    """Guide -> the settings that it names: their name, our place, a note."""
    return runpy.run_path(str(COVERAGE / "settings.py"))["ROWS"]


def settings_not_in_sources() -> dict[str, tuple[str, ...]]:
    """Guide -> the settings that it names and the framework's sources do not have."""
    return runpy.run_path(str(COVERAGE / "settings.py"))["NOT_IN_SOURCES"]


def sources_read() -> str:
    """The month in which the frameworks' sources were read."""
    return runpy.run_path(str(COVERAGE / "settings.py"))["READ"]


def disagreement_rows() -> tuple[tuple[str, str, str, str], ...]:
    """Guide, what it says, what is advised, codes."""
    return runpy.run_path(str(COVERAGE / "disagreements.py"))["ROWS"]


def coverage_page() -> str:
    """Return the page that compares five guides with the rules and keys of homeostat."""
    symptoms, settings, wrong = symptom_rows(), setting_rows(), disagreement_rows()
    counts = [
        (guide, str(len(rows)), str(len(settings[guide])), str(sum(w[0] == guide for w in wrong)))
        for guide, rows in symptoms.items()
    ]
    totals = [str(sum(int(row[n]) for row in counts)) for n in (1, 2, 3)]
    legend = "; ".join(f"`{word}`: {meaning}" for word, meaning in NO_CODE.items())
    parts = [
        "# Coverage\n\n"
        "This page compares homeostat with five troubleshooting guides of other frameworks. It "
        "lists every problem that they name with the rules that recognise it, every setting with "
        "the key of homeostat for it, and the statements of the guides that are wrong. `pending` "
        "means that a later version will support it. The doctor diagnoses logs of other frameworks "
        "in any case.\n\n"
        + table(("guide", "symptoms", "settings", "disagreements"), [*counts, ("all", *totals)]),
        "## Symptoms\n\n"
        'The column "before the start" names the rules that `homeostat check` can evaluate, and '
        '"remedies" the changes that a run tries by itself if `health.heal` allows them. If there '
        f"is no code, the column says why: {legend}.\n",
        *(_symptoms(guide, rows) for guide, rows in symptoms.items()),
        "## Settings\n",
        *(_settings(guide, rows) for guide, rows in settings.items()),
        "## Where a guide is wrong\n\n"
        + table(
            ("guide", "its statement", "our advice", "rules"),
            [(guide, says, better, _codes(codes)) for guide, says, better, codes in wrong],
        ),
    ]
    return "\n".join(parts)


def _symptoms(guide: str, rows: Iterable[tuple[str, str, str, str]]) -> str:
    cells = [
        (section, seen, _codes(codes), _before(codes), _remedies(codes), here)
        for section, seen, codes, here in rows
    ]
    head = ("section", "symptom", "rules", "before the start", "remedies", "in homeostat")
    return f"### {guide}\n\n{table(head, cells)}"


def _before(codes: str) -> str:
    """The rules that `homeostat check` can judge: they need no more than settings and facts."""
    rules = [] if codes in NO_CODE else [BY_CODE[code] for code in codes.split()]
    early = [
        rule.code
        for rule in rules
        if rule.family is not Family.MEMORY  # what a device holds is known when it trains
        and rule.needs
        and all(need.startswith(("setting:", "fact:")) for need in rule.needs)
    ]
    return ", ".join(early) or "-"


def _remedies(codes: str) -> str:
    """What a run may try by itself about findings of these rules, in order."""
    rules = [] if codes in NO_CODE else [BY_CODE[code] for code in codes.split()]
    found = [
        remedy.name
        for rule in rules
        if rule.level is not Level.INFO
        for remedy in remedies.TABLE.get(rule.name, ())
    ]
    return ", ".join(dict.fromkeys(found)) or "-"


def _settings(guide: str, rows: Iterable[tuple[str, str, str]]) -> str:
    missing = settings_not_in_sources().get(guide, ())
    absent = f" Not in {guide.partition(':')[0]}'s sources ({sources_read()})."
    cells = [
        (f"`{name}`", _place(place), note + (absent if name in missing else ""))
        for name, place, note in rows
    ]
    return f"### Settings of {guide}\n\n{table(('setting', 'in homeostat', 'note'), cells)}"


def _codes(codes: str) -> str:
    if codes in NO_CODE:
        return codes
    return ", ".join(_rule_link(BY_CODE[code]) for code in codes.split())


def _rule_link(rule: Rule) -> str:
    return f"[{rule.code}](rules/{rule.family.value}.md#{rule.code.lower()}-{rule.name})"


def _place(place: str) -> str:
    if place == "none":
        return place
    kind, _, keys = place.rpartition(": ")
    return (f"{kind}: " if kind else "") + ", ".join(f"`{key}`" for key in keys.split())


def _verb(function: Callable[..., Any]) -> str:
    """One verb, from its signature: what a parameter is, its Annotated type says."""
    hints = get_type_hints(function, include_extras=True)
    rows, usage = [], ["homeostat", function.__name__.rstrip("_")]
    for name, parameter in inspect.signature(function).parameters.items():
        kind, info = get_args(hints[name])
        if isinstance(info, ArgumentInfo):
            is_list = parameter.default is not inspect.Parameter.empty
            usage.append(f"[{info.metavar}]..." if is_list else str(info.metavar))
            rows.append((f"`{info.metavar}`", str(info.help)))
        else:
            rows.append((_option(name, info, kind), _option_help(info, parameter.default)))
    if any(row[0].startswith("`-") for row in rows):
        usage.append("[OPTIONS]")
    listed = table(("argument or option", "meaning"), rows) if rows else ""
    return f"## `{' '.join(usage)}`\n\n{inspect.cleandoc(function.__doc__ or '')}\n\n{listed}"


def _option(parameter: str, info: OptionInfo, kind: Any) -> str:
    is_choice = isinstance(kind, type) and issubclass(kind, StrEnum)
    is_flag = bool in (kind, *get_args(kind))
    value = "" if is_flag else " " + ("/".join(kind) if is_choice else info.metavar or "N")
    # Inside Annotated the first name of an option is where its default would be.
    first = f"--{parameter.replace('_', '-')}" if info.default is ... else str(info.default)
    return ", ".join(f"`{name}{value}`" for name in [first, *(info.param_decls or ())])


def _option_help(info: OptionInfo, default: Any) -> str:
    if default is inspect.Parameter.empty:
        return f"{info.help} Required."
    # The default of a flag is to be left out, and that of a text to be empty.
    is_said = default is not None and default is not False and default != ""
    return f"{info.help} Default: {default}." if is_said else str(info.help)


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    write_compiled()
    write_known(REFERENCE.parents[1])
    (REFERENCE / "rules").mkdir(parents=True, exist_ok=True)
    for name, content in pages().items():
        (REFERENCE / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
