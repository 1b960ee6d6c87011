"""An extension of Sphinx: formulas become MathML when the site is built, so that they need neither scripts nor a network."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml

# what docutils does not know, in words that it does: brackets of MathML grow by themselves
REWRITTEN = (
    (r"\\[bB]igg?[lr]?(?![a-zA-Z])", ""),
    (r"\\dots(?![a-zA-Z])", r"\\ldots "),
    (r"\\iff(?![a-zA-Z])", r"\\Longleftrightarrow "),
    (r"\\frac(\d)(\d)", r"\\frac{\1}{\2}"),
)


def mathml(code: str, block: bool = False) -> str:
    r"""A formula of LaTeX as an element of MathML; MathError where a command is unknown.

    >>> mathml("a_1")
    '<math xmlns="http://www.w3.org/1998/Math/MathML"><msub><mi>a</mi><mn>1</mn></msub></math>'
    >>> mathml(r"\frac12") == mathml(r"\frac{1}{2}")
    True
    """
    for old, new in REWRITTEN:
        code = re.sub(old, new, code)
    return re.sub(r"\n\s*", "", latex2mathml.tex2mathml(code, as_block=block))


def visit(self: Any, node: nodes.Element) -> None:
    """Write a formula of a line."""
    self.body.append(mathml(node.astext()))
    raise nodes.SkipNode


def visit_block(self: Any, node: nodes.Element) -> None:
    """Write a formula as a paragraph of its own, which scrolls where it is too wide."""
    self.body.append(f'<div class="formula">{mathml(node.astext(), block=True)}</div>\n')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (visit, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
