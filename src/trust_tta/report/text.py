"""Text helpers: escaping of control characters, names, numbers and plurals."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

# C0 and C1 controls except tab and newline, bidirectional marks, zero-width characters and lone surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
_SHORT_DOMAINS = {
    "gaussian_noise": "gauss", "shot_noise": "shot", "impulse_noise": "impulse", "defocus_blur": "defocus",
    "glass_blur": "glass", "motion_blur": "motion", "zoom_blur": "zoom", "brightness": "bright",
    "elastic_transform": "elastic", "pixelate": "pixel", "jpeg_compression": "jpeg",
}  # fmt: skip
_PLAIN = (("± ", "+-"), ("–", "-"), ("…", "..."))  # same width, so that columns stay aligned


def safe(text: str) -> str:
    """The text with control and invisible characters replaced by question marks."""
    return _UNSAFE.sub("?", text)


def safe_line(text: str) -> str:
    """`safe` text on one line, for names and labels."""
    return " ".join(safe(text).split()) if re.search(r"[\t\n]", text) else safe(text)


def printable(text: str) -> str:
    """The text in the terminal's encoding, other signs replaced by ASCII or a question mark."""
    text, encoding = safe(text), sys.stdout.encoding or "ascii"
    for sign, plain in _PLAIN:
        if sign != sign.encode(encoding, "replace").decode(encoding):
            text = text.replace(sign, plain)
    return text.encode(encoding, "replace").decode(encoding)


def domain_name(domain: str) -> str:
    """ "gaussian_noise" as "gaussian noise"."""
    return safe_line(domain.replace("_", " "))


def short_domain(domain: str) -> str:
    """The name of a domain for a column of a table: "gaussian_noise" as "gauss"."""
    return _SHORT_DOMAINS.get(domain) or domain_name(domain)


def short_name(label: str, limit: int = 18) -> str:
    """A label for a chart: lists by their length; if too long, without the names of options, then cut."""
    text = re.sub(r"(\w+)=\[([^]]+)\]", lambda found: f"{found[2].count(',') + 1} {found[1]}", safe_line(label))
    text = text if len(text) <= limit else re.sub(r"\w+=(?!True|False)", "", text.replace("=True", ""))
    return shortened(text, limit)


def shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def joined(words: Sequence[str]) -> str:
    """ "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def counted(number: float, noun: str) -> str:
    """ "1 update", "6 passes"."""
    plural = f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"
    return f"{short_number(number)} {noun if short_number(number) == '1' else plural}"


def short_number(number: float) -> str:
    return f"{number:.0f}" if number >= 100 or abs(number - round(number)) < 0.005 else f"{number:.3g}"


def duration(seconds: float) -> str:
    """ "48 s", "12 min", "3.4 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
