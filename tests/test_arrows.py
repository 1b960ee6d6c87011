"""The house: a module imports only from rows above its own (DESIGN, section 4), read off the syntax tree."""

import ast
from pathlib import Path

import pytest

import gnn_attention

PACKAGE = Path(gnn_attention.__file__).parent

ROWS = [
    ["_shapes", "_checks", "_compile", "_files", "_experiment_results", "_sizing", "explorer._html", "_glossary"],
    [
        *("_edge_lists", "_text", "_arrays", "_given", "_grids", "_canvas", "_spans", "_range_extremes", "bytepair", "weights"),
        *("_audit_part", "_cost_rates", "_experiment_store", "_subspaces", "_audit_cover", "_audit_embedding", "_edge_dropout"),
    ],
    ["_corpus", "_ranges", "_listed", "_cost_configs", "_experiment_plot", "_audit_runner"],
    ["_rules", "_audit_witnesses"],
    ["_enumeration"],
    ["_cover"],
    ["_counting"],
    ["graph", "edges", "score_mods", "rotary", "factored", "_recompute", "_operator", "cost_model"],
    [
        *(f"patterns.{name}" for name in ("basic", "local", "grids", "strided", "hubs", "latents", "hierarchies", "expanders")),
        *(f"patterns.{name}" for name in ("sequences", "streaming", "trees", "decoding", "structure", "content", "blocks")),
        "algebra._operands",
        "tiling",
        *(
            "_pieces",
            "_tile_masks",
            "explorer._pack",
            "graph_files",
            "_nonfinite",
            "_audit_bounds",
            "_lifetimes",
            "_traced_edges",
            "latent_heads",
        ),
    ],
    [
        "algebra.stacks",
        "_kernel_masks",
        "_flex_masks",
        "_cost_graph",
        "_tile_parts",
        "_edge_lowering",
        "_token_views",
        "analyse._walks",
        "_layouts",
        "_effort",
        "_held",
    ],
    ["algebra.products", "algebra.walks", "analyse._everyone", "analyse.structure", "analyse.compare", "_hf_places"],
    ["algebra.tokens", "analyse.reach", "analyse.spectrum", "analyse._hamiltonian", "_hf_use"],
    ["algebra.blocks", "analyse.expressive"],
    ["algebra", "patterns", "analyse"],
    [
        "expressions",
        "draw",
        "cost",
        "_rectangle_lowering",
        "_edge_arithmetic",
        "_edge_folding",
        "_rectangle_kernels",
        "_audit_verdict",
    ],
    ["catalogue", "_lowering", "_cost_table", "_experiment_graphs", "_edge_kernels", "_edge_products"],
    ["convert", "_cost_command", "explorer._masks", "standard_heads", "_call", "_fused", "_flows"],
    ["heads", "_rectangle_formula", "_foreign_layouts", "_hf_masks", "_pairs", "lazy_heads"],
    [*(f"backends.{name}" for name in ("reference", "dense", "tiles", "rows", "mixed", "flex"))],
    ["backends", "_surgery"],
    ["choosing"],
    ["attend"],
    ["layer", "_layer_trace", "general", "_token_cache", "huggingface"],
    ["cache", "foreign", "tasks", "_operate", "_audit_calls"],
    ["model", "minilm", "explorer._recorded", "_audit_ways"],
    [
        "training",
        "generation",
        "trace",
        "auditor",
        "_head_reading",
        "explorer._data",
        "verify.report",
        "verify.measure",
        "verify.oracle",
        "verify.cases",
    ],
    ["verify.check", "_head_templates", "_head_vocabulary", "experiment", "explorer", "pytest_plugin", "_audit_command"],
    ["circuits", "explorer._command", "verify.attend_checks", "verify.layer_checks", "verify.rule_checks"],
    ["verify.trained_checks"],
    ["verify", "bench.process", "bench.measure", "bench.workloads", "commands"],
    ["bench.graphs", "bench.methods", "bench.calibrate", "bench.training"],
    ["bench.checked", "bench.summary"],
    ["bench.targets", "bench.table", "bench.plots"],
    ["bench.attention"],
    ["bench"],
    ["__main__"],
]
ROW_OF = {name: number for number, row in enumerate(ROWS) for name in row}
ALLOWED_INSIDE = {
    "networkx",
    "torch_geometric",
    "torch_geometric.data",
    "torch.nn.attention.flex_attention",
    "torch._inductor",
    "torch._inductor.exc",
    "torch._dynamo.exc",
    "torch.utils._triton",
    "resource",
}  # loaded when asked for


def modules():
    """Every module but the front door, by dotted name inside the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        if name:
            yield name, path


def imports(path):
    """(module, inside a function) for every import of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {node for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for node in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            for alias in node.names:
                own = f"{node.module}.{alias.name}"
                yield own if is_module(own) else node.module, node in inside


def is_module(dotted):
    """True if the dotted name is a module of this package."""
    path = PACKAGE.parent / Path(*dotted.split("."))
    return dotted.startswith("gnn_attention") and (path.with_suffix(".py").exists() or (path / "__init__.py").exists())


def test_every_module_has_a_row_and_every_row_its_module():
    """A new module must be placed; a removed one must leave."""
    assert sorted(ROW_OF) == sorted(name for name, _ in modules())


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=lambda x: x if isinstance(x, str) else "")
def test_arrows_point_upwards(name, path):
    """Never sideways, never down; inside functions only what is loaded on demand."""
    for imported, inside in imports(path):
        if inside:
            assert imported in ALLOWED_INSIDE or imported.split(".")[0] == "matplotlib", (
                f"{name} imports {imported} inside a function"
            )
        if imported.startswith("gnn_attention") and imported != "gnn_attention":
            other = imported.removeprefix("gnn_attention.")
            assert ROW_OF[other] < ROW_OF[name], f"{name} (row {ROW_OF[name]}) imports {other} (row {ROW_OF[other]})"


def test_a_downward_arrow_would_be_seen(tmp_path):
    """The test can fail: the reader of imports finds them at the top and inside functions."""
    file = tmp_path / "module.py"
    file.write_text("from gnn_attention import layer\ndef f():\n    import gnn_attention.verify\n")
    assert list(imports(file)) == [("gnn_attention.layer", False), ("gnn_attention.verify", True)]


def test_only_the_layer_and_those_below_know_torch_geometric():
    """Above it, only convert loads it, on demand."""
    for name, path in modules():
        for imported, inside in imports(path):
            if imported.startswith("torch_geometric"):
                assert ROW_OF[name] >= ROW_OF["layer"] or (name == "convert" and inside), name
