"""The house: a module imports only from rows above its own (DESIGN, section 4), read off the syntax tree."""

import ast
from pathlib import Path

import pytest

import gnn_attention

PACKAGE = Path(gnn_attention.__file__).parent

# A paragraph is a row.
MODULES = """
_shapes _checks _compile _files _experiment_results _sizing _glossary _rank_table kernels kernels._tiled
verify.circumstances figures._figure _recompute bench.process bench.measure _json_files _printable _turns
figures.allocations _interrupts _templates figures.children figures.documents figures.hostile_texts figures.memos
figures.mutations figures.sandbox

figures.results verify.report bytepair explorer._html _text _arrays _given _grids _canvas _spans _range_extremes weights
_audit_part _cost_rates _experiment_store _subspaces _audit_cover _audit_embedding _edge_dropout _gpu_forms
bench.gpu.gather_kernel rotary factored _operator cost_model _pieces _nonfinite verify.oracle _kept _edge_checks
_checkpoint_files _memory figures.greedy _twice figures.interrupts figures._table

_lookup _edge_lists _train_checkpoints verify.record _corpus edges _ranges _listed _cost_configs _experiment_plot
_audit_runner latent_heads _gpu_devices _token_views _flash _edge_arithmetic standard_heads figures._running
_model_config

score_mods bench.gpu.machine _merging kernels._common _rules _audit_witnesses _rank_rates bench.gpu.calibrate
_rectangle_kernels heads lazy_heads

_foreign_layouts kernels._row_passes kernels._tiled_backward kernels._tiled_forward _enumeration _without_lists
bench.gpu.records

_cover

_box_grid

_counting

graph

patterns.basic patterns.local patterns.grids patterns.strided patterns.hubs patterns.latents patterns.hierarchies
patterns.expanders patterns.sequences patterns.streaming patterns.trees patterns.decoding patterns.structure
patterns.content patterns.blocks algebra._operands tiling _tile_masks explorer._pack graph_files _audit_bounds
_lifetimes _traced_edges _diagonals _gpu_rows _gpu_windows _partition _rank_graph _edge_lowering analyse._walks _layouts
_effort analyse._everyone analyse.compare _call figures._malformed_case

algebra.stacks _kernel_masks _flex_masks _cost_graph _tile_parts _held _balance _gpu_tiles _heard analyse.structure
_rank_estimates kernels.rows analyse.reach patterns _edge_folding _rectangle_formula _gpu_logits backends.reference
backends.dense

algebra.products algebra.walks _hf_places _halo _locality _parts kernels._visits analyse.spectrum analyse._hamiltonian
_rectangle_lowering _edge_kernels _edge_products convert backends.flex

algebra.tokens _hf_use _exchange _gpu_counts _rank_plan kernels.tiles kernels.windows analyse.expressive _lowering
_fused _flows _hf_masks _pairs backends.varlen figures.families verify.cases bench.graphs figures._malformed_hugging

algebra.blocks _gpu_costs _triton_ops analyse cost backends.tiles backends.rows backends.mixed figures.draws _surgery

algebra draw _audit_verdict _cost_table backends.triton

expressions backends.split bench.workloads

catalogue _experiment_graphs _recipe _cost_command backends bench.gpu.workloads

explorer._masks choosing verify.measure commands figures._malformed_graphs

attend verify.check figures.roundings

layer _layer_trace _token_cache huggingface _rank_attention verify.attend_checks verify.rule_checks
verify.dropout_checks verify.large_checks verify.processes bench.calibrate figures.peaks general

cache foreign tasks _operate _audit_calls _rank_cache verify.layer_checks verify.gpu_checks bench.methods
figures.gradients figures.determinism figures._malformed_calls figures._malformed_layers

model minilm explorer._recorded _audit_ways figures.problems bench.checked bench.summary bench.gpu.methods
figures.operators

generation trace auditor _head_reading explorer._data _head_shards _train_report verify.trained_checks figures.equality
bench.targets bench.table bench.plots bench.gpu.checked bench.gpu.plots bench.gpu.targets figures.errors
figures.interference figures._malformed_caches figures.chunked figures.compilation

_head_templates _head_vocabulary explorer pytest_plugin _audit_command distributed verify bench.attention
bench.gpu.measuring bench.gpu.table figures.decoding figures.together figures.endurance figures figures._command

circuits explorer._command _train_ranks bench.gpu.running figures.threads figures.refusals figures.file_forms
figures.surfaces verify._command

training bench.gpu figures.memory figures.mutated_files figures.pages

experiment bench.training

bench figures._malformed_tools

figures.malformed __main__
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
    inside = {node for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)) for node in ast.walk(f)}
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


def unions_of_types(source):
    """Lines with ``isinstance(x, A | B)``, which the compilers of older torch cannot read."""
    for node in ast.walk(ast.parse(source)):
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass")
        if called and len(node.args) == 2 and isinstance(node.args[1], ast.BinOp):
            yield node.lineno


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=lambda x: x if isinstance(x, str) else "")
def test_types_are_asked_for_in_tuples(name, path):
    """``isinstance(x, (A, B))``: torch.compile of 2.4 breaks its graph at a union."""
    assert list(unions_of_types(path.read_text(encoding="utf-8"))) == []


def test_a_union_of_types_would_be_seen():
    """The test can fail."""
    assert list(unions_of_types("x = 1\nisinstance(x, int | float)\nissubclass(int, (int, str))")) == [2]
