"""The zoo as a list: every builder with its one-line definition and an example that can be drawn.

``gnn-attention graphs`` prints it. A new builder is one new line of ``EXAMPLES``.

>>> entry = entries(["window"])[0]
>>> entry.example, entry.tokens, entry.edges
('window(64, 8)', 64, 484)
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gnn_attention import patterns
from gnn_attention._support.checks import quoted
from gnn_attention.convert import expressions
from gnn_attention.graph import TokenGraph

__all__ = ["EXAMPLES", "Entry", "entries", "listing"]

EXAMPLES: Mapping[str, str] = {
    # basic
    "full": "full(64)",
    "self_loops": "self_loops(64)",
    "causal": "causal(64)",
    "anti_causal": "anti_causal(64)",
    "strict_causal": "strict_causal(64)",
    "no_self": "no_self(64)",
    "cross": "cross(24, 64)",
    "causal_aligned": "causal_aligned(16, 64, 'lower_right')",
    "encoder_decoder": "encoder_decoder(32, 32)",
    # local
    "window": "window(64, 8)",
    "dilated": "dilated(64, 8, 4)",
    "band": "band(64, 5, 2)",
    "chunked": "chunked(64, 16)",
    "segment_recurrence": "segment_recurrence(64, 16, 16)",
    # grids
    "natten": "natten((8, 8), 3)",
    "swin": "swin((8, 8), 4, 2)",
    "haloed_blocks": "haloed_blocks((8, 8), 4, 1)",
    "axial": "axial((8, 8))",
    "image_local_2d": "image_local_2d((8, 8), (2, 4), (2, 2))",
    "sliding_tile": "sliding_tile((8, 8), 2, 3)",
    "svg_spatial": "svg_spatial(8, 8, 8)",
    "svg_temporal": "svg_temporal(8, 8, 2)",
    # strided
    "strides": "strides(64, 8)",
    "summary_tokens": "summary_tokens(64, 8, 1)",
    "sparse_strided": "sparse_strided(64, 8)",
    "sparse_fixed": "sparse_fixed(64, 8, 1)",
    # hubs
    "sinks": "sinks(64, 4)",
    "global_tokens": "global_tokens(64, [0, 32])",
    "longformer": "longformer(64, 4, 2, causal=False)",
    "etc": "etc(64, 4, 4)",
    "bigbird": "bigbird(64, 4)",
    "bigbird_etc": "bigbird_etc(64, 4, 4)",
    # latents
    "memory_tokens": "memory_tokens(window(60, 8), 4)",
    "tglobal": "tglobal(64, 4, 8)",
    "side_nodes": "side_nodes(64, 8)",
    "star": "star(16)",
    "isab": "isab(64, 8)[0]",
    "perceiver": "perceiver(64, 8)[0]",
    # hierarchies
    "log_sparse": "log_sparse(64)",
    "power_attention": "power_attention(64)",
    "butterfly": "butterfly(64)",
    "butterfly_factor": "butterfly_factor(64, 3)",
    "binary_partition": "binary_partition(16, 2)",
    "longnet": "longnet(64, [8, 32], [1, 4])",
    "h_matrix_level": "h_matrix_level(64, 4, 1)",
    "fibottention": "fibottention(64, 4)",
    # expanders
    "random_senders": "random_senders(64, 4)",
    "expander": "expander(64, 2, causal=False)",
    "hypercube": "hypercube(6)",
    "de_bruijn": "de_bruijn(2, 6)",
    "torus": "torus(8, 8)",
    "watts_strogatz": "watts_strogatz(64, 4, 0.1)",
    "erdos_renyi": "erdos_renyi(64, 0.1)",
    # sequences
    "prefix": "prefix(64, 16)",
    "documents": "documents([24, 8, 32])",
    "shared_prefix": "shared_prefix(16, [16, 16, 16])",
    "block_causal": "block_causal(64, 8)",
    "bidirectional_groups": "bidirectional_groups([-1, 0, 0, 0, -1, 1, 1, -1])",
    "permutation": "permutation([3, 1, 4, 0, 5, 2])",
    "fill_in_the_middle": "fill_in_the_middle(64, 24, 40)",
    # streaming
    "sink_window": "sink_window(64, 8)",
    "duo_attention": "duo_attention(64, 4, [1], 8)",
    # trees
    "tree": "tree([-1, 0, 0, 1, 1, 2, 2, 3])",
    "tree_decoding": "tree_decoding(8, [-1, -1, 0, 0, 1, 2])",
    "prefix_tree": "prefix_tree([8, 4, 4, 2], [-1, 0, 0, 1])",
    "family": "family([-1, 0, 0, 1, 1, 2, 2, 3])",
    "hierarchical_document": "hierarchical_document([[4, 6], [5], [3, 3, 4]])",
    # decoding
    "block_diffusion": "block_diffusion(32, 8)",
    "draft_training": "draft_training(8, 6, 4)",
    "media_cross": "media_cross(32, [0, 12, 20], 4)",
    # structure
    "with_self_loops": "with_self_loops(strict_causal(64))",
    "k_hop": "k_hop(torus(8, 8), 2)",
    "virtual_nodes": "virtual_nodes(torus(8, 8), 1)",
    "temporal": "temporal(full(8), [3, 1, 4, 1, 5, 9, 2, 6])",
    "edge_types": "edge_types(full(8), [causal(8), window(8, 2)])",
    "shortest_paths": "shortest_paths(full(8), torus(8))",
    # content
    "top_k": "top_k(randn(64, 64), 8)",
    "nearest": "nearest(randn(64, 2), 4)",
    "shared_bucket": "shared_bucket(tensor([[0, 1, 0, 2, 1, 0, 2, 1]]))",
    "lsh": "lsh(randn(64, 8), 8, rounds=2)",
    "clusters": "clusters([0, 1, 0, 2, 1, 0, 2, 1])",
    "routing": "routing(randn(64, 8), randn(64, 8, seed=1), randn(8, 8, seed=2), 8)",
    "vertical_slash": "vertical_slash(64, [0, 20], [0, 1, 2, 16])",
    # blocks
    "block_top_k": "block_top_k(randn(64, 8), 8, 2)",
    "moba": "moba(randn(64, 8), randn(64, 8, seed=1), 8, 2)",
    "quest": "quest(randn(64, 8), randn(64, 8, seed=1), 8, 2)",
    "compressed_blocks": "compressed_blocks(64, 8)",
    "tile_top_k": "tile_top_k(randn(64, 8), randn(64, 8, seed=1), 8, 2)",
    "sorted_blocks": "sorted_blocks(64, [3, 0, 7, 1, 2, 6, 4, 5], 8)",
    "permuted_blocks": "permuted_blocks(64, [1, 2, 3, 4, 5, 6, 7, 0], 8)",
}


@dataclass(frozen=True)
class Entry:
    """A builder of the zoo and its example; ``edges``, over all heads, is None where it makes no graph."""

    name: str
    family: str
    definition: str
    call: str
    example: str
    tokens: int | None = None
    edges: int | None = None
    heads: int | None = None

    @property
    def edges_per_token(self) -> float | None:
        """Mean number of senders that a receiver of the example attends to, in one head."""
        return (
            self.edges / (self.tokens * (self.heads or 1)) if self.tokens and self.edges is not None else None
        )


def entries(names: Iterable[str] | None = None) -> list[Entry]:
    """The builders of ``patterns``, family by family, or those named; ValueError for another name."""
    names = None if names is None else [names] if isinstance(names, str) else list(names)
    if unknown := [name for name in names or () if name not in EXAMPLES]:
        near = difflib.get_close_matches(str(unknown[0]), EXAMPLES, 1)
        hint = f"did you mean {near[0]!r}?" if near else "'gnn-attention graphs' lists them"
        raise ValueError(f"there is no builder {quoted(unknown[0])}; {hint}")
    return [_entry(name) for name in (patterns.__all__ if names is None else names)]


def listing(found: Iterable[Entry], width: int = 100) -> str:
    """The entries as text, under a heading for each family."""
    lines, family = [], ""
    for entry in found:
        if entry.family != family:
            family = entry.family
            lines += ["", *textwrap.wrap(f"{family}: {_heading(family)}", width)]
        rate = entry.edges_per_token
        counted = "a value for each edge" if rate is None else f"{rate:.3g} senders each"
        lines += ["", f"  {entry.example}".ljust(width - len(counted) - 1) + f" {counted}"]
        lines += textwrap.wrap(
            entry.definition.replace("``", "`"), width, initial_indent="    ", subsequent_indent="    "
        )
    return "\n".join(lines[1:])


def _entry(name: str) -> Entry:
    builder, example = getattr(patterns, name), EXAMPLES[name]
    made = expressions.evaluate(example)
    sizes = (made.num_dst, made.num_edges, made.heads) if isinstance(made, TokenGraph) else (None, None, None)
    return Entry(
        name,
        _family(builder),
        _first_sentence(builder),
        f"{name}{expressions.parameters(builder)}",
        example,
        *sizes,
    )


def _family(builder: Any) -> str:
    return str(builder.__module__.rpartition(".")[2])


def _heading(family: str) -> str:
    return _first_sentence(importlib.import_module(f"gnn_attention.patterns.{family}")).rstrip(".")


def _first_sentence(thing: Any) -> str:
    paragraph = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    paragraph = re.sub(r":\w+:`~?([^`]+)`", r"``\1``", paragraph)  # a reference, as a word
    return re.split(r"(?<!e\.g)(?<!i\.e)(?<=\.) (?=[A-Z`])", paragraph)[0]
