"""Text that is safe to show: no control characters, no escape sequences, nothing that a terminal cannot print."""

from __future__ import annotations

import re
import sys

# C0 and C1 controls but for tab and newline, and what turns or hides text: bidirectional marks, zero-width characters.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_PLAIN = (("± ", "+-"), ("–", "-"), ("…", "..."))  # of the same width, where columns are aligned


def safe(text: str) -> str:
    """The text with a question mark for every character that controls a terminal or a page rather than being shown."""
    return _UNSAFE.sub("?", text)


def safe_line(text: str) -> str:
    """As `safe`, on one line: for names and labels."""
    return " ".join(safe(text).split()) if re.search(r"[\t\n]", text) else safe(text)


def printable(text: str) -> str:
    """The text as the terminal's encoding can show it; a sign that it lacks is spelled plainly, or a question mark."""
    text, encoding = safe(text), sys.stdout.encoding or "ascii"
    for sign, plain in _PLAIN:
        if sign != sign.encode(encoding, "replace").decode(encoding):
            text = text.replace(sign, plain)
    return text.encode(encoding, "replace").decode(encoding)
