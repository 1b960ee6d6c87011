"""The layers of the package: what may import what, and what is loaded on demand; read off the syntax tree."""

import ast
import functools
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import gnn_attention

PACKAGE = Path(gnn_attention.__file__).parent
# From the bottom: a package imports from the rows above its own in this table, and from its own row if that
# makes no circle.
LAYERS = """
_support
graph edge_softmax score_mods rotary
heads patterns algebra analyse backends
attend convert draw
layer selectors cache huggingface
model distributed lm
interpret explorer verify
cli __main__
""".strip().splitlines()
LEVEL = {package: level for level, row in enumerate(LAYERS) for package in row.split()}
# loaded on demand
ALLOWED_INSIDE = {
    *[
        "networkx",
        "scipy.sparse",
        "tokenizers",
        "torch_geometric",
        "torch_geometric.data",
        "resource",
        "pymetis",
        "tqdm",
        "platformdirs",
    ],
    "matplotlib",
    *["torch.nn.attention.flex_attention", "torch._inductor", "torch._inductor.exc", "torch._dynamo.exc"],
    "torch._dynamo.symbolic_convert",
    "torch.utils._triton",
    # it needs transformers
    "gnn_attention.huggingface",
    "gnn_attention.lm",
    # it needs Triton
    "gnn_attention.backends.gpu.kernels.rows",
}


def modules():
    """Every module but the front door, by dotted name inside the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        if name:
            yield name, path


@functools.cache
def nodes(path):
    """Every node of a file's syntax tree."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@functools.cache
def imports(path):
    """(module, inside a function) for every import of a file."""
    functions = (node for node in nodes(path) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    inside = {node for function in functions for node in ast.walk(function)}
    return tuple((name, node in inside) for node in nodes(path) for name in names(node, path))


def names(node, path):
    """The modules that an import names; none of another node."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{path.name}: relative import"
        for alias in node.names:
            own = f"{node.module}.{alias.name}"
            yield own if is_module(own) else node.module


@functools.cache
def is_module(dotted):
    """True if the dotted name is a module of this package."""
    path = PACKAGE.parent / Path(*dotted.split("."))
    exists = path.with_suffix(".py").exists() or (path / "__init__.py").exists()
    return dotted.startswith("gnn_attention") and exists


def own_imports(path):
    """What a file imports of this package, but for its front door."""
    own = "gnn_attention."
    return {name.removeprefix(own) for name, _ in imports(path) if name.startswith(own)}


def circle(arrows):
    """A circle of imports, or None."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return error.args[1]
    return None


@pytest.mark.slow
def test_no_module_imports_in_a_circle():
    """Functions that import included; so there is an order in which the package can be read."""
    assert circle({name: own_imports(path) for name, path in modules()}) is None
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) is not None


def arrows_of_packages():
    """(importing package, imported package) of every import across packages, with the module that has it."""
    for name, path in modules():
        for imported in own_imports(path):
            pair = name.split(".")[0], imported.split(".")[0]
            if pair[0] != pair[1]:
                yield pair, name


def test_every_package_has_a_layer():
    """And every layer names what is there."""
    assert {name.split(".")[0] for name, _ in modules()} == LEVEL.keys()


def test_no_package_imports_from_a_layer_of_its_users():
    """No arrow upward."""
    assert [(pair, name) for pair, name in arrows_of_packages() if LEVEL[pair[0]] < LEVEL[pair[1]]] == []


def test_no_package_imports_in_a_circle():
    """Within a row too."""
    arrows = {}
    for (importing, imported), _ in arrows_of_packages():
        arrows.setdefault(importing, set()).add(imported)
    assert circle(arrows) is None


def test_nothing_private_lies_flat():
    """A private helper lives in the package that owns it."""
    entries = [path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert [name for name in entries if name.startswith("_") and not name.startswith("__")] == ["_support"]
    assert len(entries) <= 29


def test_functions_import_only_what_is_loaded_on_demand():
    """All else stands at the top."""
    wrong = [
        f"{name} imports {imported} inside a function"
        for name, path in modules()
        for imported, inside in imports(path)
        if inside and imported not in ALLOWED_INSIDE and imported.split(".")[0] not in ALLOWED_INSIDE
    ]
    assert wrong == []


def test_nothing_below_the_layer_knows_torch_geometric():
    """But for convert, which loads it on demand."""
    for name, path in modules():
        if LEVEL[name.split(".")[0]] < LEVEL["layer"]:
            for imported, inside in imports(path):
                assert not imported.startswith("torch_geometric") or (
                    name.startswith("convert.") and inside
                ), name
