"""Make foreign text safe to show: the one function for everything that people read.

A reward's exception, a file's name, a completion or a line of a foreign log may hold escape
sequences that clear the screen, rename the window or write to the clipboard (OSC 52), and bidi
controls that show text in another order than it has. Such characters are shown as escapes (\\x1b,
\\u202e), so that a person sees that they are there:

    C0 and C1 controls except line feed and tab; DEL
    bidi controls and marks, line and paragraph separators
    other invisible format characters (joiners stay: many scripts and emoji need them)
    halves of surrogate pairs, which no terminal and no file can take

It is used where text leaves for a terminal, console.log, report.html or an error message:
`terminal.SafeConsole`, the formatter of `logs`, the report, and the command line's errors.
Files of JSON escape for themselves. Idempotent.
"""

from __future__ import annotations

import re

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
# The colours of the doctor's own page.
_OWN_STYLE = re.compile("\x1b\\[(?:1;3[1236]|[012])m")


def safe_text(text: str) -> str:
    """Return the text with everything that could control a terminal shown as escapes."""
    return _UNSAFE.sub(lambda found: repr(found.group())[1:-1], text)


def safe_page(text: str) -> str:
    """Return a page that we coloured ourselves as safe text; our few colours stay."""
    parts, start = [], 0
    for style in _OWN_STYLE.finditer(text):
        parts += [safe_text(text[start : style.start()]), style.group()]
        start = style.end()
    return "".join([*parts, safe_text(text[start:])])
