"""List every builder of the zoo with a one-line definition and an example that can be drawn.

``gnn-attention graphs`` prints the list. A new builder needs one new example in ``EXAMPLES``.
"""

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gnn_attention import patterns
from gnn_attention.convert import expressions

__all__ = ["EXAMPLES", "Entry", "entries"]

# Each builder has one example here. They are in the order of the modules of `patterns`.
_CALLS = """
full(64); self_loops(64); causal(64); anti_causal(64); strict_causal(64); no_self(64);
cross(24, 64); causal_aligned(16, 64, 'lower_right'); encoder_decoder(32, 32); window(64, 8);
dilated(64, 8, 4); band(64, 5, 2); chunked(64, 16); segment_recurrence(64, 16, 16);
natten((8, 8), 3); swin((8, 8), 4, 2); haloed_blocks((8, 8), 4, 1); axial((8, 8));
image_local_2d((8, 8), (2, 4), (2, 2)); sliding_tile((8, 8), 2, 3); svg_spatial(8, 8, 8);
svg_temporal(8, 8, 2); strides(64, 8); summary_tokens(64, 8, 1); sparse_strided(64, 8);
sparse_fixed(64, 8, 1); sinks(64, 4); global_tokens(64, [0, 32]);
longformer(64, 4, 2, causal=False); etc(64, 4, 4); bigbird(64, 4); bigbird_etc(64, 4, 4);
memory_tokens(window(60, 8), 4); tglobal(64, 4, 8); side_nodes(64, 8); star(16); isab(64, 8)[0];
perceiver(64, 8)[0]; log_sparse(64); power_attention(64); butterfly(64); butterfly_factor(64, 3);
binary_partition(16, 2); longnet(64, [8, 32], [1, 4]); h_matrix_level(64, 4, 1);
fibottention(64, 4); random_senders(64, 4); expander(64, 2, causal=False); hypercube(6);
de_bruijn(2, 6); torus(8, 8); watts_strogatz(64, 4, 0.1); erdos_renyi(64, 0.1); prefix(64, 16);
documents([24, 8, 32]); shared_prefix(16, [16, 16, 16]); block_causal(64, 8);
bidirectional_groups([-1, 0, 0, 0, -1, 1, 1, -1]); permutation([3, 1, 4, 0, 5, 2]);
fill_in_the_middle(64, 24, 40); sink_window(64, 8); duo_attention(64, 4, [1], 8);
tree([-1, 0, 0, 1, 1, 2, 2, 3]); tree_decoding(8, [-1, -1, 0, 0, 1, 2]);
prefix_tree([8, 4, 4, 2], [-1, 0, 0, 1]); family([-1, 0, 0, 1, 1, 2, 2, 3]);
hierarchical_document([[4, 6], [5], [3, 3, 4]]); block_diffusion(32, 8); draft_training(8, 6, 4);
media_cross(32, [0, 12, 20], 4); with_self_loops(strict_causal(64)); k_hop(torus(8, 8), 2);
virtual_nodes(torus(8, 8), 1); temporal(full(8), [3, 1, 4, 1, 5, 9, 2, 6]);
edge_types(full(8), [causal(8), window(8, 2)]); shortest_paths(full(8), torus(8));
top_k(randn(64, 64), 8); nearest(randn(64, 2), 4);
shared_bucket(tensor([[0, 1, 0, 2, 1, 0, 2, 1]])); lsh(randn(64, 8), 8, rounds=2);
clusters([0, 1, 0, 2, 1, 0, 2, 1]);
routing(randn(64, 8), randn(64, 8, seed=1), randn(8, 8, seed=2), 8);
vertical_slash(64, [0, 20], [0, 1, 2, 16]); block_top_k(randn(64, 8), 8, 2);
moba(randn(64, 8), randn(64, 8, seed=1), 8, 2); quest(randn(64, 8), randn(64, 8, seed=1), 8, 2);
compressed_blocks(64, 8); tile_top_k(randn(64, 8), randn(64, 8, seed=1), 8, 2);
sorted_blocks(64, [3, 0, 7, 1, 2, 6, 4, 5], 8); permuted_blocks(64, [1, 2, 3, 4, 5, 6, 7, 0], 8);
"""
EXAMPLES: Mapping[str, str] = {
    call.strip().partition("(")[0]: call.strip() for call in _CALLS.split(";") if call.strip()
}


@dataclass(frozen=True)
class Entry:
    """A builder: its name, module, the first sentence of its docstring, and an example to draw."""

    name: str
    family: str
    definition: str
    example: str


def entries(names: Iterable[str] | None = None) -> list[Entry]:
    """Return the entries of builders by name, or of all. Raises ValueError for an unknown name."""
    result = []
    for name in patterns.__all__ if names is None else names:
        if name not in EXAMPLES:
            raise ValueError(expressions.describe_unknown_builder(str(name)))
        builder = getattr(patterns, name)
        family = builder.__module__.rpartition(".")[2]
        result.append(Entry(name, family, first_sentence(builder), EXAMPLES[name]))
    return result


def first_sentence(value: Any) -> str:
    """Return the first sentence of the docstring of a function or module, without Sphinx roles."""
    paragraph = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    paragraph = re.sub(r":\w+:`~?([^`]+)`", r"``\1``", paragraph)
    return re.split(r"(?<!e\.g)(?<!i\.e)(?<=\.) (?=[A-Z`])", paragraph)[0]
