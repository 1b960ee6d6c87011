"""A Sphinx extension that turns formulas into MathML, so that pages need neither scripts nor a network."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml

# Replacements for commands that docutils does not know; brackets of MathML grow without a command.
REPLACEMENTS = (
    (r"\\[bB]igg?[lr]?(?![a-zA-Z])", ""),
    (r"\\dots(?![a-zA-Z])", r"\\ldots "),
    (r"\\iff(?![a-zA-Z])", r"\\Longleftrightarrow "),
    (r"\\frac(\d)(\d)", r"\\frac{\1}{\2}"),
)


def mathml(code: str, block: bool = False) -> str:
    r"""Convert a LaTeX formula to MathML; an unknown command raises MathError.

    >>> mathml("a_1")
    '<math xmlns="http://www.w3.org/1998/Math/MathML"><msub><mi>a</mi><mn>1</mn></msub></math>'
    >>> mathml(r"\frac12") == mathml(r"\frac{1}{2}")
    True
    """
    for old, new in REPLACEMENTS:
        code = re.sub(old, new, code)
    return re.sub(r"\n\s*", "", latex2mathml.tex2mathml(code, as_block=block))


def visit(self: Any, node: nodes.Element) -> None:
    """Write an inline formula."""
    self.body.append(mathml(node.astext()))
    raise nodes.SkipNode


def visit_block(self: Any, node: nodes.Element) -> None:
    """Write a display formula, which scrolls if it is too wide for the page."""
    self.body.append(f'<div class="formula">{mathml(node.astext(), block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (visit, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
