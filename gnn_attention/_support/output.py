"""stdout and stderr of a command, whatever their encoding, closed or at the end of a broken pipe.

Where a stream takes ASCII alone (``LANG=C``), masks are drawn in ``#`` and ``.``; other letters are a ``?``.
"""

import codecs
import os
import sys
from contextlib import suppress
from typing import TextIO

PLAIN = {"■": "#", "·": ".", "±": "+-", "→": "->", "—": "-"}


def plain(error: UnicodeError) -> tuple[str | bytes, int]:
    """An error handler: ASCII forms of letters; bytes of a file name that are no text stay as they are.

    >>> codecs.register_error("plain", plain)
    >>> "■ · ö".encode("ascii", "plain"), "a\\udcffb".encode("utf-8", "plain")
    (b'# . ?', b'a\\xffb')
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    return b"".join(map(_bytes_of, letters)), error.end


def _bytes_of(letter: str) -> bytes:
    if "\udc80" <= letter <= "\udcff":
        return bytes([ord(letter) - 0xDC00])
    return PLAIN.get(letter, "?").encode("ascii")


def prepare() -> None:
    """Before a command writes: closed streams lead nowhere, others replace what they cannot encode."""
    codecs.register_error("plain", plain)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
        elif getattr(stream, "errors", "") in ("strict", "surrogateescape"):
            with suppress(AttributeError):  # a stream that is no file
                stream.reconfigure(errors="plain")


def finish() -> bool:
    """Flush; False if the reader of stdout, a pager for example, is gone."""
    _flush(sys.stderr)
    return _flush(sys.stdout)


def _flush(stream: TextIO) -> bool:
    try:
        stream.flush()
    except BrokenPipeError:
        with suppress(OSError, ValueError):  # a stream that is no file cannot be led elsewhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return False
    except ValueError:  # it is closed
        return True
    return True
