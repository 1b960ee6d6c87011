"""Make text from other sources safe to show on pages and in pictures."""

import re

_JOINERS = {"\u200c", "\u200d"}  # They join letters in Persian and Indic scripts, and emoji.
_LINE_END = re.compile("\r\n|[\n\r\x0b\x0c\x85\u2028\u2029]")


def make_printable(text: str, line_end: str = " ") -> str:
    """Replace line ends by ``line_end``, lone surrogates by U+FFFD, other unprintable characters by spaces.

    >>> make_printable("a\\x1b[31m\\tb")
    'a [31m b'
    """
    valid_text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    line = _LINE_END.sub(line_end, valid_text)
    return "".join(char if char.isprintable() or char in _JOINERS else " " for char in line)


def token_label(text: str, max_length: int = 32) -> str:
    """Label a token: ``⏎`` for line ends, ``␣`` for blanks without other text, cut if too long.

    >>> [token_label(text, 8) for text in ("\\n", "  ", "):\\r\\n", " international")]
    ['⏎', '␣␣', '):⏎', ' intern…']
    """
    label = make_printable(text, "⏎")
    label = label if label.strip() else label.replace(" ", "␣")
    return label if len(label) <= max_length else f"{label[: max_length - 1]}…"


def one_line(text: str, max_length: int = 400) -> str:
    """Convert text to one printable line of at most ``max_length`` characters."""
    line = " ".join(make_printable(text).split())
    return line if len(line) <= max_length else f"{line[: max_length - 4]} ..."
