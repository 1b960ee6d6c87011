"""torch_geometric's own tests, with our layer and our edge softmax in place of theirs.

``python -m tests.peers.pyg CHECKOUT [FILE ...]`` runs tests of a checkout of torch_geometric on its code:
those of the softmax and the layers that use it, then those of ``TransformerConv``, explainers and
heterogeneous models. It prints how many passed, failed or do not apply, and why. The exit code is 1 if one
failed or none passed.
"""

import argparse
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

SOFTMAX_TESTS = ["utils/test_softmax.py"]
SOFTMAX_TESTS += [f"nn/conv/test_{name}_conv.py" for name in ("gat", "gatv2", "agnn", "supergat")]
LAYER_TESTS = ["nn/conv/test_transformer_conv.py", "nn/conv/test_hetero_conv.py", "explain"]
LAYER_TESTS += ["nn/test_to_hetero_transformer.py", "nn/test_to_hetero_with_bases_transformer.py"]
LAYERS = ("TransformerConv", "GATConv", "GATv2Conv", "SAGEConv", "GCNConv")
FLAGS = ["-q", "--tb=short", "-o", "addopts=", "-p", "no:cacheprovider", "-W", "ignore"]
REASONS = {
    r"uninitialized parameter in .*numel|assert \d+ == 5824": "counts the parameters of their layer",
    "must be at least 1, got -1": "leaves a width open, where ours needs a Linear(-1, width) before it",
    r"torch\.jit": "needs TorchScript, which is refused by name",
    "must be Tensor, not type": "GraphMask reads x_i and x_j, which no layer of queries and keys has",
    "in test_custom_explain_message": "wants the message of SAGEConv, the state of the sender",
    "Number of messages .* does not match": "weighs messages [E, heads, D] along their heads, in GATConv too",
    "DID NOT RAISE <?.*ImportError": "wants the softmax by ptr to be refused without torch_scatter",
}


def softmax(src: Any, index: Any = None, ptr: Any = None, num_nodes: int | None = None, dim: int = 0) -> Any:
    """Compute our softmax over in-edges with the signature of theirs."""
    if index is None:
        degree = ptr.diff()
        index = torch.arange(len(degree), device=ptr.device).repeat_interleave(degree)
    count = int(index.max()) + 1 if num_nodes is None and len(index) else num_nodes or 0
    return edge_softmax.softmax(src.movedim(dim, -1), index, count)[0].movedim(-1, dim)


def our_layer(name: str) -> type:
    """Return our layer with the signature of theirs and a linear map to the width of its output."""

    class Layer(MessagePassingAttention):
        def __init__(self, widths: Any, out_channels: int, heads: int = 1, concat: bool = True, **extra: Any):
            source, width = widths if isinstance(widths, tuple) else (widths, widths)
            super().__init__(
                StandardHeads(width, heads, out_channels, source_width=source), backend=options.backend
            )
            self.arguments = f"{widths}, {out_channels}, heads={heads}"
            self.lin_edge = Linear(extra["edge_dim"], heads) if extra.get("edge_dim") else None
            self.lin = Linear(width, out_channels * (heads if concat else 1))

        def forward(self, x: Any, edge_index: Any, edge_attr: Any = None, **kwargs: Any) -> Any:
            bias = kwargs.pop("edge_weight", edge_attr)
            if bias is not None:
                bias = bias.log() if bias.dim() == 1 else self.lin_edge(bias).T
            output = super().forward(x, edge_index, bias, **kwargs)
            return (self.lin(output[0]), output[1]) if isinstance(output, tuple) else self.lin(output)

        def __repr__(self) -> str:
            return f"{name}({self.arguments})"

    return type(name, (Layer,), {"_alpha": None})


class Count:
    """A pytest plugin that counts the outcomes of tests."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            text = report.longreprtext
            reasons = [reason for pattern, reason in REASONS.items() if re.search(pattern, text)]
            self.outcomes[f"not applicable: {reasons[0]}" if reasons else "failed"] += 1
            if not reasons:
                print(f"\nfailed: {report.nodeid}: {text.splitlines()[-1]}")
        elif report.skipped or report.when == "call":
            self.outcomes["passed" if report.passed else "skipped by torch_geometric"] += 1


def main() -> int:
    count, tests = Count(), CHECKOUT / "test"
    for files, is_softmax in ((SOFTMAX_TESTS, True), (LAYER_TESTS, False)):
        paths = [str(tests / file) for file in files if not options.files or file in options.files]
        with pytest.MonkeyPatch.context() as patch:
            for name in () if is_softmax else LAYERS:
                for module in ("torch_geometric.nn", "torch_geometric.nn.conv"):
                    patch.setattr(f"{module}.{name}", our_layer(name))
            for name, module in list(sys.modules.items()) if is_softmax else ():
                if getattr(module, "softmax", None) is theirs and not name.endswith("._softmax"):
                    patch.setattr(module, "softmax", softmax)
            if paths:
                pytest.main([*FLAGS, f"-c={CHECKOUT}/pyproject.toml", *paths], [count])
    print(*(f"{number} {outcome}" for outcome, number in sorted(count.outcomes.items())), sep="\n")
    return int(count.outcomes["failed"] > 0 or not count.outcomes["passed"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a folder with torch_geometric/ and test/")
    parser.add_argument("--backend", help="auto or the name of a backend (default: message passing)")
    parser.add_argument("files", nargs="*", help="test files or folders under test/ (default: all of them)")
    options = parser.parse_args()
    CHECKOUT = options.checkout.resolve()
    if not (CHECKOUT / "test" / "nn" / "conv").is_dir():
        parser.error(f"checkout must hold the tests of torch_geometric in test/nn/conv, got {CHECKOUT}")
    sys.path.insert(0, str(CHECKOUT))
    import torch
    from torch_geometric.nn import Linear
    from torch_geometric.utils import softmax as theirs

    from gnn_attention import MessagePassingAttention, StandardHeads, edge_softmax

    sys.exit(main())
