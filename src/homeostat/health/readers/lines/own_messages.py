"""Recognise what the doctor itself printed into a log: its findings are not words of the run.

A callback, `homeostat watch` and our own runs print findings beside the trainer's output. They
name illnesses and quote error texts, so a log that is read again, or a resumed run's, would
confirm whatever was once said about it.
"""

from __future__ import annotations

import re

_FINDING = r"(?:info|warn|error) [A-Z]{3}\d{3} "
# The first line of a message, as integrations/telling.py prints it.
_HEAD = re.compile(rf"homeostat: step [\d,]{{1,20}}: (?:worse: )?{_FINDING}")
_BELOW = ("likely cause: ", "what to do: ")
_LAST = "more: homeostat explain "
# Messages of one line: of integrations/, cli/watch.py, and our own runs (observe/ailments.py).
_ALONE = re.compile(
    rf"homeostat: (?:step [\d,]{{1,20}}: cleared: {_FINDING}"
    r"|the doctor failed and is off; |rule [A-Z]{3}\d{3} failed and is off: "
    r"|asking the (?:trainer|command|run) to stop |the webhook was not reached: "
    r"|the command of --exec |messages were not sent within |[^;]{1,400}; verdict: )"
    r"|(?:.{0,200}homeostat\.progress: )?step {1,12}\d{1,12}/\d{1,12}  "
    r"(?:(?:info|warn|error): [A-Z]{3}\d{3} [a-z0-9-]+: |[A-Z]{3}\d{3} [a-z0-9-]+ is over$)"
)


class OwnMessages:
    """Recognises the lines of messages in a log. `is_open` while more lines of one may follow."""

    def __init__(self) -> None:
        self.is_open = False

    def holds(self, line: str) -> bool:
        """Return whether a line, the next one of the log, is the doctor's."""
        text = line.strip()
        is_below = self.is_open and text.startswith((*_BELOW, _LAST))
        self.is_open = bool(_HEAD.match(text)) or (is_below and not text.startswith(_LAST))
        return self.is_open or is_below or bool(_ALONE.match(text))
