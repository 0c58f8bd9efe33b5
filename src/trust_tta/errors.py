"""The errors of trust-tta; every message says in one line what was given, what is allowed and what to do."""

import re
import sys
import unicodedata

LONGEST_MESSAGE = 8000  # characters: enough for a file with twenty mistakes
_BREAKING = ("Cc", "Cs", "Zl", "Zp")  # kinds of characters: controls, broken Unicode, line and paragraph separators
_LINE_BREAK = re.compile(r"\s*[\n\r]\s*")


class TrustError(Exception):
    """Base of every error that trust-tta raises on purpose; its message is one line, whatever it quotes."""

    def __init__(self, message: object = "") -> None:
        super().__init__(one_line(str(message)))


class ConfigError(TrustError, ValueError):
    """An option, name or configuration that does not exist or does not fit."""


class CheckpointError(TrustError, ValueError):
    """A checkpoint that cannot be read or does not match the network."""


class DataError(TrustError, ValueError):
    """A data set, file or image that is missing, broken or not what it claims to be."""


class DownloadError(TrustError, RuntimeError):
    """A file that cannot be downloaded, or whose content is not the expected one."""


class ShapeError(TrustError, ValueError):
    """A tensor of the wrong shape, dtype or device; the message names the tensor."""


class BackendError(TrustError, RuntimeError):
    """A scan backend that this machine or this tensor cannot use."""


class DependencyError(TrustError, ImportError):
    """An optional package that is not installed; the message says how to install it."""


class StateError(TrustError, RuntimeError):
    """A saved state that does not belong to this object, or an object used after it was closed."""


class TrustWarning(UserWarning):
    """A call that works, but hardly as intended; the message says what to do instead."""


def users_level() -> int:
    """The stack level, as `warnings.warn` counts, of the code that called into this package or PyTorch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] in ("trust_tta", "torch"):
        frame, level = frame.f_back, level + 1
    return level


def reason_of(error: BaseException, *, longest: int = 200) -> str:
    """The message of another library's error in one line, or its type where it has none."""
    return " ".join(str(error).split())[:longest] or type(error).__name__


def one_line(text: str, *, longest: int = LONGEST_MESSAGE) -> str:
    """`text` as one printable line: control characters escaped, the middle of a long text left out."""
    if len(text) > longest:
        text = f"{text[: longest // 2]} ... {text[-longest // 4 :]}"
    if text.isprintable():
        return text
    shown = "".join(repr(c)[1:-1] if unicodedata.category(c) in _BREAKING else c for c in _LINE_BREAK.sub(" ", text))
    return shown if len(shown) <= longest else shown[: longest - 4] + " ..."
