"""Advice for an error that was read and not recognised: what to do about an illness in general."""

from __future__ import annotations

from collections.abc import Mapping

# The illness that the words of an exception usually are -> what to do about it.
ADVICE: Mapping[str, str] = {
    "checkpoint-keys-mismatch": "build the model with the config of the checkpoint",
    "column-missing": "print one row, and rename the field there or in the code that reads it",
    "dataset-empty": "print the number of rows after loading and after each filter",
    "device-mismatch": "move the model and all tensors of the batch to one device before that call",
    "dtype-mismatch": "print the dtypes just before that call, and cast one of the two",
    "object-not-picklable": "put the function or class at the top of a module (no lambda, nothing "
    "within a function), and make locks, clients and open files in the process that uses them",
    "output-folder-in-use": "remove what has that name, or give another folder",
    "path-missing": "look for that path on the machine that runs it; a relative one begins at the "
    "working folder",
    "path-not-writable": "give a path that the user of the run may write to",
    "setting-missing": "give the setting that the words name",
    "setting-wrong-type": "give the setting a value of the type that the words ask for; YAML reads "
    "1e-5 as text and 1.0e-5 as a number",
    "settings-exclusive": "change one of the settings that the words name",
    "shape-mismatch": "print the shapes just before that call, and find where the odd one is made",
    "unknown-setting": "compare the name with the settings of the installed version, and rename or "
    "remove it",
}
