"""Packages import only from lower layers, and functions import only what is loaded on demand."""

import ast
import functools
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import gnn_attention

PACKAGE = Path(gnn_attention.__file__).parent
# The lowest layer comes first. A package imports from rows above its own in this table, and from its own row
# if that makes no cycle.
LAYERS = """
_support
graph edge_softmax score_mods rotary
heads patterns algebra analyse edge_ops backends
attend convert draw
layer selectors cache huggingface
model distributed lm
interpret explorer verify
cli __main__
""".strip().splitlines()
LEVEL = {package: level for level, row in enumerate(LAYERS) for package in row.split()}
# Functions may import these modules, which load on demand. The last three need transformers or Triton.
ALLOWED_INSIDE = """
networkx scipy.sparse tokenizers torch_geometric torch_geometric.data resource pymetis tqdm platformdirs
matplotlib torch.nn.attention.flex_attention torch._inductor torch._inductor.exc torch._dynamo.exc
torch._dynamo.symbolic_convert torch.utils._triton
gnn_attention.huggingface gnn_attention.lm gnn_attention.backends.gpu.kernels.rows
""".split()  # noqa: SIM905


def modules():
    """Yield the dotted name and path of every module of the package except its root."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        if name:
            yield name, path


@functools.cache
def nodes(path):
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@functools.cache
def imports(path):
    """Return ``(module, is_inside_function)`` for every import of a file."""
    functions = (node for node in nodes(path) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    inside = {node for function in functions for node in ast.walk(function)}
    return tuple((name, node in inside) for node in nodes(path) for name in imported_modules(node, path))


def imported_modules(node, path):
    """Yield the modules that an import names, and nothing for any other node."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{path.name}: relative import"
        for alias in node.names:
            dotted = f"{node.module}.{alias.name}"
            yield dotted if is_module(dotted) else node.module


@functools.cache
def is_module(dotted):
    """Return True if the dotted name is a module of this package."""
    path = PACKAGE.parent / Path(*dotted.split("."))
    exists = path.with_suffix(".py").exists() or (path / "__init__.py").exists()
    return dotted.startswith("gnn_attention") and exists


def internal_imports(path):
    """Return the modules of this package, except its root, that a file imports."""
    prefix = "gnn_attention."
    return {name.removeprefix(prefix) for name, _ in imports(path) if name.startswith(prefix)}


def find_cycle(imports_of):
    """Return a cycle of imports, or None."""
    try:
        TopologicalSorter(imports_of).prepare()
    except CycleError as error:
        return error.args[1]
    return None


@pytest.mark.slow
def test_no_module_imports_in_a_circle():
    """Imports inside functions count, so there is an order in which to read the package."""
    assert find_cycle({name: internal_imports(path) for name, path in modules()}) is None
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) is not None


def package_imports():
    """Yield the pair (importing, imported) of every import across packages, and the importing module."""
    for name, path in modules():
        for imported in internal_imports(path):
            pair = name.split(".")[0], imported.split(".")[0]
            if pair[0] != pair[1]:
                yield pair, name


def test_every_package_has_a_layer():
    assert {name.split(".")[0] for name, _ in modules()} == LEVEL.keys()


def test_no_package_imports_from_a_layer_of_its_users():
    assert [(pair, name) for pair, name in package_imports() if LEVEL[pair[0]] < LEVEL[pair[1]]] == []


def test_no_package_imports_in_a_circle():
    imports_of = {}
    for (importing, imported), _ in package_imports():
        imports_of.setdefault(importing, set()).add(imported)
    assert find_cycle(imports_of) is None


def test_nothing_private_lies_flat():
    """A private module belongs to a package, not to the root."""
    entries = [path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert [name for name in entries if name.startswith("_") and not name.startswith("__")] == ["_support"]
    assert len(entries) <= 29


def test_functions_import_only_what_is_loaded_on_demand():
    """All other imports are at the top of a file."""
    faults = [
        f"{name} imports {imported} inside a function"
        for name, path in modules()
        for imported, inside in imports(path)
        if inside and imported not in ALLOWED_INSIDE and imported.split(".")[0] not in ALLOWED_INSIDE
    ]
    assert faults == []


def test_nothing_below_the_layer_knows_torch_geometric():
    """The exception is convert, which loads it on demand."""
    for name, path in modules():
        if LEVEL[name.split(".")[0]] < LEVEL["layer"]:
            for imported, inside in imports(path):
                assert not imported.startswith("torch_geometric") or (
                    name.startswith("convert.") and inside
                ), name
