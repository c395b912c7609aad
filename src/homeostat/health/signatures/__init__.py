"""Signatures: errors that are recognised by their words. Each is a stanza of <family>.toml.

    [[signature]]
    code = "ERR675"             three letters and three digits; never used again for another one
    name = "kl-negative"        the illness, by its name in health/vocabulary.py
    family = "policy"           only where it differs from the file's name
    level = "warn"              info, warn or error (the default)
    confidence = "inferred"     measured (the default), inferred or heuristic
    texts = ["negative KL"]     its own words: any of these patterns (see health/log.py)
    context = ["in generate"]   further words, one of which must stand near them
    within = 30                 how many lines away; 0 is anywhere in the log (default: 80)
    unless = ["dry run"]        words anywhere in the log that speak against it
    when = { is_shared = true } predicates of predicates.py that must hold, with their arguments
    notes = true                the words are ordinary notes of a logger, and `when` decides what
                                they mean: a mild line counts as much as an error
    survivable = true           it is retried or done without: at most a warning if the log
                                continues to a traceback of something else (in family install:
                                or to training), and a note if it only warns anyway
    passing = true              a run may recover from it: a note if only a few mild lines say it,
                                and many steps follow
    ends_run = true             the process ends there: it counts only if hardly a step follows, and
                                it explains what other processes say when they lose this one
    what = "..."                one sentence for the user: what happened
    why = "..."                 why it happens, in two or three sentences
    explains = ["ERR001"]       codes that are symptoms of this one and are folded into it

    [[signature.cause]]         likely causes in order; without any, `name` and `why` are the cause
    name = "lr-too-high"
    why = "..."

    [[signature.fix]]           what to do, in order; at least one
    setting = "trainer.lr"      our key; left out for advice that no setting of ours gives
    value = "lower"
    why = "..."
    grade = "safe"              safe, unsafe or advice (the default): see Grade in health/finding.py
    theirs = { trl = "..." }    framework -> its setting, where our key does not map to one

`use = "recompute"` in place of a fix's other keys takes a fix that a table `[fixes.recompute]` of
the same file or of shared.toml holds. `"@name"` in a list of patterns or codes stands for a list:
one of the file's own table `[lists]`, or one of lists.py, which Python code reads as well.
Line breaks inside `what`, `why` and `value` count as spaces.

Every *.toml of this folder is read: load.py makes objects of the stanzas, source.py says what is
wrong with one. compiled.json holds the same as JSON, because TOML takes 0.15 s to parse; it is used
only if its checksums are those of the files (`make docs` writes it).
"""
