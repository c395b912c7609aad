"""Give advice on an illness that was found from an exception's message or place.

A signature has its own advice. If no signature recognises an exception, only the kind of mistake is
known. One sentence of general advice then helps more than the name alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from homeostat.health.finding import Fix

_ADVICE = {
    "batch-not-divisible": "choose a batch that is a multiple of the number that has to divide it",
    "checkpoint-file-damaged": "check the size of the file; download or save it again, or use the "
    "checkpoint before it",
    "checkpoint-keys-mismatch": "compare the names and shapes in the file with those of the model",
    "column-missing": "print one row, and use the names of its fields",
    "dataloader-worker-failed": "run once with num_workers=0, which shows the worker's own error; "
    "if that runs, look in `dmesg` for a process that was killed for lack of memory",
    "dataset-empty": "print the number of rows after loading and after each filter",
    "device-mismatch": "move the inputs to the device of the model's parameters before that line",
    "disk-full-or-quota": "compare `df -h` and the limits that `ulimit -a` shows with what is "
    "written",
    "dtype-mismatch": "cast one of the two to the dtype of the other, or run the forward pass "
    "under autocast",
    "inference-server-unresponsive": "check whether the server runs and listens at that address "
    "and port, and read its log",
    "object-not-picklable": "make locks, files, clients and generators inside the worker, and "
    "define functions at the top of a module: lambdas and inner functions cannot be sent",
    "optimizer-state-mismatch": "build the optimizer after the model is sharded, wrapped or given "
    "adapters, from the parameters that the model then has",
    "output-folder-in-use": "remove the file or folder with that name, or use another folder",
    "package-shadowed": "rename your file or folder, so that the package of that name is found",
    "path-missing": "check the path as the process sees it: from its working directory, on its "
    "machine, in its container",
    "path-not-writable": "give a path that the user of the run may write to",
    "placement-group-unschedulable": "compare `ray status` with the requested bundles",
    "reward-server-unreachable": "check whether the reward's server runs and listens at that "
    "address and port",
    "reward-timeout": "raise the time limit, or score fewer answers at a time; give answers that "
    "are too slow a neutral reward",
    "setting-missing": "add the setting, or give the code a default for it",
    "setting-wrong-type": "give the setting a value of the required type and range; YAML reads "
    "1e-5 as text and 1.0e-5 as a number",
    "settings-exclusive": "change one of the settings that the message names",
    "shape-mismatch": "print the shapes right before that line: they show which side has the "
    "wrong size",
    "unknown-setting": "compare the name with those that are defined: it is misspelt, or "
    "belongs to another version",
}


def advice_on(name: str) -> Iterator[Fix]:
    """Yield general advice on an illness, given its name; nothing if there is none."""
    if name in _ADVICE:
        yield Fix("", "", _ADVICE[name])
