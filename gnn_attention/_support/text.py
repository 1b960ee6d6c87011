"""Foreign texts for pages and pictures."""

import re

_JOINERS = {"\u200c", "\u200d"}  # which join letters in Persian, Indic scripts and emoji
_LINE_END = re.compile("\r\n|[\n\r\x0b\x0c\x85\u2028\u2029]")


def printable(text: str, line_end: str = " ") -> str:
    """The text with a space for what has no shape, U+FFFD for half a character, ``line_end`` for line ends.

    >>> printable("a\\x1b[31m\\tb")
    'a [31m b'
    """
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    line = _LINE_END.sub(line_end, whole)
    return "".join(letter if letter.isprintable() or letter in _JOINERS else " " for letter in line)


def token_label(text: str, longest: int = 32) -> str:
    """A token in a picture: ``⏎`` for a line end, ``␣`` for each of blanks alone, cut where it is long.

    >>> [token_label(text, 8) for text in ("\\n", "  ", "):\\r\\n", " international")]
    ['⏎', '␣␣', '):⏎', ' intern…']
    """
    label = printable(text, "⏎")
    label = label if label.strip() else label.replace(" ", "␣")
    return label if len(label) <= longest else f"{label[: longest - 1]}…"


def one_line(text: str, longest: int = 400) -> str:
    """A text of another library as a part of one line, cut where it is long."""
    line = " ".join(printable(text).split())
    return line if len(line) <= longest else f"{line[: longest - 4]} ..."
