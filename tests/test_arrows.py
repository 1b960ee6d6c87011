"""The house: a module imports only from rows above its own (DESIGN, section 4), read off the syntax tree."""

import ast
from pathlib import Path

import pytest

import gnn_attention

PACKAGE = Path(gnn_attention.__file__).parent

# A paragraph is a row.
MODULES = """
_shapes _checks _compile _files _experiment_results _sizing _glossary _rank_table _turns _templates _interrupts kernels
kernels._tiled verify.circumstances figures._figure figures.children figures.memos

explorer._html _edge_lists _text _arrays _given _grids _canvas _spans _range_extremes bytepair weights _audit_part
figures.interrupts
_cost_rates _experiment_store _subspaces _audit_cover _audit_embedding _edge_dropout _gpu_forms _train_checkpoints
bench.gpu.gather_kernel

_corpus _ranges _listed _cost_configs _experiment_plot _audit_runner

_rules _audit_witnesses

_enumeration _without_lists

_cover

_box_grid

_counting edges score_mods rotary factored _recompute _operator cost_model

graph _pieces _nonfinite latent_heads _gpu_devices _merging kernels._common

patterns.basic patterns.local patterns.grids patterns.strided patterns.hubs patterns.latents patterns.hierarchies
patterns.expanders patterns.sequences patterns.streaming patterns.trees patterns.decoding patterns.structure
patterns.content patterns.blocks algebra._operands tiling _tile_masks explorer._pack graph_files _audit_bounds
_lifetimes _traced_edges _diagonals _gpu_rows _gpu_windows _partition _rank_graph _edge_lowering _token_views
analyse._walks _layouts _effort _flash _rank_rates bench.gpu.calibrate kernels._row_passes kernels._tiled_backward
kernels._tiled_forward

algebra.stacks _kernel_masks _flex_masks _cost_graph _tile_parts _held _balance _gpu_tiles _heard analyse._everyone
analyse.structure analyse.compare _rank_estimates kernels.rows

algebra.products algebra.walks _hf_places _halo _locality _parts kernels._visits analyse.reach analyse.spectrum
analyse._hamiltonian

algebra.tokens _hf_use _exchange _gpu_counts _rank_plan kernels.tiles kernels.windows analyse.expressive

algebra.blocks _gpu_costs _triton_ops patterns analyse

algebra draw cost _rectangle_lowering _edge_arithmetic _edge_folding _rectangle_kernels _audit_verdict

expressions _lowering _cost_table _edge_kernels _edge_products

catalogue _experiment_graphs _recipe convert _cost_command standard_heads _call _fused _flows

explorer._masks heads _rectangle_formula _foreign_layouts _hf_masks _pairs lazy_heads _gpu_logits backends.varlen
figures.families

backends.reference backends.dense backends.tiles backends.rows backends.mixed backends.flex backends.triton
figures.draws

_surgery backends.split

backends

choosing

attend

layer _layer_trace _token_cache huggingface _rank_attention general

cache foreign tasks _operate _audit_calls _rank_cache

model minilm explorer._recorded _audit_ways verify.report verify.measure verify.oracle verify.cases

generation trace auditor _head_reading explorer._data verify.check _head_shards _train_report figures.roundings
verify.record

_head_templates _head_vocabulary explorer pytest_plugin _audit_command verify.attend_checks verify.layer_checks
verify.rule_checks bench.gpu.machine distributed verify.dropout_checks verify.large_checks verify.processes
figures.together

circuits explorer._command verify.trained_checks _train_ranks figures.problems verify.gpu_checks figures.threads

training verify bench.process bench.measure bench.workloads commands figures.equality

experiment figures.endurance bench.graphs bench.methods bench.calibrate bench.training bench.gpu.workloads figures verify._command

bench.checked bench.summary bench.gpu.methods

bench.targets bench.table bench.plots bench.gpu.checked bench.gpu.plots bench.gpu.targets

bench.attention bench.gpu.measuring bench.gpu.table

bench.gpu.running

bench.gpu

bench

__main__
"""
ROWS = [row.split() for row in MODULES.split("\n\n")]
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
    "pymetis",
    *(f"gnn_attention.kernels{name}" for name in ("", "._common", ".rows", ".windows", ".tiles")),  # they need Triton
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
