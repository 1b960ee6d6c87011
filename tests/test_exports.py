"""Public names are documented, and importing the package is cheap."""

import importlib
import inspect
import operator
import subprocess
import sys

import pytest
from support.extras import needs

import gnn_attention as ga

PUBLIC = """
algebra analyse analyse.cost backends backends.cost_model cache convert convert.catalogue convert.expressions
convert.files distributed draw edge_softmax explorer graph graph.tiling heads heads.factored_matrix
heads.latent huggingface interpret.audit interpret.circuits interpret.trace
layer lm model model.foreign patterns rotary score_mods selectors verify
""".split()  # noqa: SIM905
# These names need transformers.
TRANSFORMERS_NAMES = {"lm", "huggingface", "use_graph"}
PROMISED = """
patterns.causal patterns.window patterns.prefix patterns.documents patterns.sinks patterns.tree patterns.full
convert.from_mask convert.from_edge_index convert.from_networkx convert.to_networkx convert.to_block_mask
convert.to_sdpa_mask convert.to_pyg convert.to_varlen convert.to_window tiling.tiles algebra.closure
analyse.diff draw.mask expressions.parse attend explain list_backends StandardHeads.from_mha
StandardHeads.from_arrays FactoredHeads.of MergedHeads.of MessagePassingAttention verify.run
TokenGraph.from_rule RefusalError cost_model.Costs audit heads_of foreign.score_mod_of foreign.layer_of
LatentHeads trace.cut trace.mute cache.KeyValueCache
cache.PatternMessageCache
""".split()  # noqa: SIM905
SIGNATURES = {
    "attend": "q k v graph scale score_mod bias sink_logits dropout backend return_info finite "
    "normaliser edge_attr edge_key edge_value edge_type",
    "StandardHeads": "width num_heads head_dim value_dim num_kv_heads bias source_width rotary qk_norm",
    "MessagePassingAttention": "heads score_mod dropout backend edge_dim num_edge_types normaliser",
}


def run(program):
    """Run a program in a new interpreter, and return its standard output."""
    command = [sys.executable, "-W", "ignore", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


IMPORTS = """
import sys
from importlib.abc import MetaPathFinder
import torch

class Watch(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in ("networkx", "transformers", "matplotlib", "scipy"):
            frame = sys._getframe(1)
            while "importlib" in frame.f_code.co_filename or frame.f_code.co_filename.startswith("<frozen"):
                frame = frame.f_back
            importing.append((frame.f_globals["__name__"], name))

importing = []
sys.meta_path.insert(0, Watch())
import gnn_attention
package = [name for name in ("torch_geometric", "transformers", "matplotlib") if name in sys.modules]
import gnn_attention.__main__
print(package, [pair for pair in importing if pair[0].startswith("gnn_attention")])
"""


@pytest.mark.slow
def test_importing_loads_no_heavy_package():
    """Heavy packages are loaded at first use (PEP 562), so that a command starts at once."""
    assert run(IMPORTS) == "[] []"
    assert ga.MessagePassingAttention
    assert "torch_geometric" in sys.modules


WITHOUT_EXTRAS = """
import sys
from importlib.abc import MetaPathFinder

class Without(MetaPathFinder):
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path, target=None):
        extras = ("transformers", "tokenizers", "matplotlib", "triton", "pymetis", "attn_gym")
        absent = name.split(".")[0] in extras
        return None if absent else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Without, sys.meta_path)
import gnn_attention as ga
import gnn_attention.__main__
loaded = [getattr(ga, name) for name in {*ga.__all__, *ga._LAZY_IMPORTS} - {"lm", "use_graph"}]
print(len(loaded))
"""


@pytest.mark.slow
def test_all_but_transformers_own_loads_without_any_extra():
    """The package works without extras, because the first command of the README installs none."""
    assert int(run(WITHOUT_EXTRAS)) == len({*ga.__all__, *ga._LAZY_IMPORTS}) - 2


def test_all_lists_exactly_the_front_door():
    """Every name of ``__all__`` and every shortcut resolves, and ``dir()`` lists ``__all__``."""
    assert dir(ga) == sorted(ga.__all__)
    for name in {*ga.__all__, *ga._LAZY_IMPORTS} - TRANSFORMERS_NAMES:
        assert getattr(ga, name) is not None
    with pytest.raises(AttributeError, match="module 'gnn_attention' has no attribute 'nonsense'"):
        _ = ga.nonsense


def test_the_contract_is_there():
    """The names that README, guide and notebooks use exist, and the main signatures have not changed."""
    for dotted in PROMISED:
        assert callable(operator.attrgetter(dotted)(ga)), dotted
    for name, parameters in SIGNATURES.items():
        assert list(inspect.signature(getattr(ga, name)).parameters) == parameters.split()


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    """Every public module, function, class and method has a docstring."""
    if name in TRANSFORMERS_NAMES:
        needs("transformers")
    module = importlib.import_module(f"gnn_attention.{name}")
    assert module.__doc__
    for export in module.__all__:
        public = getattr(module, export)
        if callable(public) and getattr(public, "__module__", "").startswith("gnn_attention"):
            assert public.__doc__, f"{name}.{export}"
            for method, value in vars(public).items() if inspect.isclass(public) else ():
                # torch_geometric adds methods of its own to layers.
                is_ours = inspect.isfunction(value) and value.__module__ == public.__module__
                if is_ours and not method.startswith("_"):
                    assert value.__doc__, f"{name}.{export}.{method}"
