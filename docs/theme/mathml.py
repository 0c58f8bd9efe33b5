"""Equations become MathML when the site is built, so that reading them needs no script and no network."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

_EQUATION = re.compile(r'<(span|div) class="arithmatex">(\\\(|\\\[)(.*?)(\\\)|\\\])</\1>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """MkDocs calls this with the HTML of each page."""
    return _EQUATION.sub(_to_mathml, content)


def _to_mathml(match: re.Match[str]) -> str:
    block = match[1] == "div"
    mathml = convert(html.unescape(match[3]).strip(), display="block" if block else "inline")
    return f'<div class="equation">{mathml}</div>' if block else mathml
