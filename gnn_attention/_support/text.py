"""Foreign texts as pages and pictures can hold them."""

from __future__ import annotations

import re

_JOINERS = {"\u200c", "\u200d"}
_LINE_END = re.compile("\r\n|[\n\r\x0b\x0c\x85\u2028\u2029]")


def printable(text: str, line_ends: bool = False) -> str:
    """The text as every page and picture can hold it: what has no shape is a space, half a character U+FFFD.

    What joins letters stays (U+200C, U+200D): without it Persian, Indic scripts and families of emoji fall
    apart. Where ``line_ends`` stay, each is a ``\\n``.

    >>> printable("a\\x1b[31m\\tb"), printable("\\N{ZERO WIDTH JOINER}") == "\\N{ZERO WIDTH JOINER}"
    ('a [31m b', True)
    """
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    allowed = _JOINERS | {"\n"} if line_ends else _JOINERS
    lines = _LINE_END.sub("\n" if line_ends else " ", whole)
    return "".join(letter if letter.isprintable() or letter in allowed else " " for letter in lines)


def one_line(text: str, longest: int = 400) -> str:
    """A text as a part of one line, cut where it is long: what another library says of a file.

    >>> one_line("Missing key(s):\\n\\tW_Q"), one_line("a" * 99, 8)
    ('Missing key(s): W_Q', 'aaaa ...')
    """
    line = " ".join(printable(text).split())
    return line if len(line) <= longest else f"{line[: longest - 4]} ..."
