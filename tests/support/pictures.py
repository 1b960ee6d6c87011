"""Pictures of notebooks: PNG in base64."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

# How far a channel of a colour, of 255, may be from the one that was drawn.
CLOSE = 16


def encoded(png: bytes) -> str:
    """The text of a picture in a notebook."""
    return base64.b64encode(png).decode()


def opened(picture: str) -> Image.Image:
    """The picture of a text."""
    return Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")


def pixels(picture: str) -> Any:
    """The colours of a picture, ``[pixels, 3]``."""
    return np.asarray(opened(picture), int).reshape(-1, 3)


def small(picture: str) -> str:
    """The same picture in 256 colours: under half of the size, and each channel of a pixel within ``CLOSE``.

    ``MAXCOVERAGE`` keeps the error of every pixel small. Median cut, the default, spends the colours on what
    covers most of the picture, so that a few marks in a colour of their own turn grey.
    """
    stream = io.BytesIO()
    few = opened(picture).quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(stream, "PNG", optimize=True)
    return encoded(stream.getvalue())
