"""Settings of Sphinx for the site that ``docs/build.py`` builds, which works without a network."""

from __future__ import annotations

import sys
from pathlib import Path

# Annotations name the axes of tensors only if jaxtyping is imported before the package.
import jaxtyping  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import gnn_attention  # noqa: E402

project = "gnn_attention"
author = copyright = "The gnn_attention authors"
release = version = gnn_attention.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "site_math",
    "site_pages",
    "site_seeds",
]
root_doc = "docs/index"
include_patterns = ["docs/**", "notebooks/[0-9]*.ipynb", "notebooks/README.md"]
include_patterns += ["ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md"]
suppress_warnings = ["mystnb.unknown_mime_type"]

myst_enable_extensions = ["dollarmath", "attrs_block", "attrs_inline", "deflist"]
myst_heading_anchors = 4
DESCRIPTION = "An attention mask is a graph: attention as torch_geometric message passing, verified equal to dense attention"
myst_html_meta = {"description": DESCRIPTION}
nb_execution_mode = "off"
nb_merge_streams = True

autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 90
add_module_names = False
toc_object_entries_show_parents = "hide"

html_math_renderer = "mathml"
html_theme = "furo"
html_title = "gnn_attention"
html_static_path = [str(ROOT / "docs" / "site")]
html_css_files = ["site.css"]
html_js_files = [("live.js", {"defer": "defer"})]
html_extra_path = [str(ROOT / "docs" / "explore.html"), str(ROOT / "docs" / "site" / "index.html")]
html_favicon = str(ROOT / "docs" / "site" / "favicon.svg")
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
copybutton_prompt_text = ">>> |\\.\\.\\. |\\$ "
copybutton_prompt_is_regexp = True
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1d4ed8", "color-brand-content": "#1d4ed8"},
    "dark_css_variables": {"color-brand-primary": "#93b4ff", "color-brand-content": "#93b4ff"},
}
