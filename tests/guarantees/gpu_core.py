"""The checks that a GPU must pass before its kernels count as verified: own forms x dtypes, a list fixed by name.

Every graph with every option, forward and gradients; dropout; the rules; the shapes and far offsets of
:mod:`tests.guarantees.gpu_shapes`; larger graphs; the same bits thrice and in a fresh process; memory; the
operators. ``python -m tests.guarantees.gpu_core`` prints how many there are and the digest of their names,
which a record must have (``gnn_attention.verify.record.CORE``). Nothing here needs a GPU but running them.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from gnn_attention.backends import BACKENDS, Backend
from gnn_attention.verify import OWN
from gnn_attention.verify.attend_checks import attend_checks, dropout_checks
from gnn_attention.verify.cases import FEATURES, GRAPHS
from gnn_attention.verify.check import DTYPES, Check, Settings
from gnn_attention.verify.record import digest
from gnn_attention.verify.rule_checks import rule_checks
from tests.guarantees.gpu_checks import gpu_checks, results_of
from tests.guarantees.gpu_large import LARGE, LargeCase, large_checks
from tests.guarantees.gpu_shapes import far_checks, shape_checks

CORE_DTYPES = ("bfloat16", "float16", "float32", "float64")
FORMS = tuple(name for name in BACKENDS if name.startswith(f"{OWN}-"))


@dataclass(frozen=True)
class Sizes:
    """Tokens of the larger graphs, of the shapes and of the far offsets."""

    large: int = 4096
    shapes: int = 150
    far: int = 2**22 + 77


TRIAL = Sizes(16, 12, 100)  # for a rehearsal on a CPU


def core_checks(
    device: str = "cuda", sizes: Sizes = Sizes(), backends: Sequence[Backend] | None = None
) -> list[Check]:
    """All of them, each of which must pass: what a form does not take is not among them."""
    own = tuple(BACKENDS[name] for name in FORMS) if backends is None else tuple(backends)
    settings = Settings(device, CORE_DTYPES, own, sizes=(1.0,), walk=False)
    plain = replace(settings, features=("plain",))
    every = [
        *attend_checks(settings),
        *dropout_checks(settings),
        *rule_checks(plain),
        *shape_checks(settings, sizes.shapes),
        *far_checks(settings, sizes.far),
        *large_checks(settings, sizes.large),
        *gpu_checks(settings, sizes.large),
        *fresh_checks(settings, sizes.large),
    ]
    return [check for check in every if check.skipped is None and not _unordered(check)]


def _unordered(check: Check) -> bool:
    """A bias for each edge on a graph whose edges have no order."""
    option, graph = check.factors.get("option"), check.factors.get("graph")
    known = option in FEATURES and graph in GRAPHS
    return known and FEATURES[str(option)].unsupported(GRAPHS[str(graph)]) is not None


def fresh_checks(settings: Settings, tokens: int) -> Iterator[Check]:
    """The bits of every larger graph in this process and in a new one."""
    for dtype in settings.semantics:
        for backend in settings.backends:
            run = partial(_fresh, settings, backend, dtype, tokens)
            yield Check(
                "repeat", backend.name, dtype, f"{tokens} tokens: the same bits in a new process", run
            )


def _fresh(settings: Settings, backend: Backend, dtype: str, tokens: int) -> Mapping[str, Any]:
    given = settings.device, backend.name, dtype, str(tokens)
    command = [sys.executable, "-m", "tests.guarantees.gpu_core", "--bits", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    here, there = bits(*given), done.stdout.strip()
    if done.returncode:
        return {
            "passed": False,
            "message": f"the new process ended with {done.returncode}: {done.stderr[-400:]}",
        }
    message = f"bits {here}" if here == there else f"bits {here}, in a new process {there}"
    return {"passed": here == there, "message": message}


def bits(device: str, backend: str, dtype: str, tokens: str) -> str:
    """A digest of outputs, lse and gradients on every larger graph."""
    settings, found = Settings(device), hashlib.sha256()
    for large in LARGE.values():
        case = LargeCase(settings, large, DTYPES[dtype], int(tokens), large.listed)
        for name, x in results_of(case, BACKENDS[backend]).items():
            found.update(name.encode() + x.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the core, or the bits that another process compares."""
    parser = argparse.ArgumentParser(prog="python -m tests.guarantees.gpu_core", description=__doc__)
    parser.add_argument("--bits", nargs=4, metavar=("DEVICE", "BACKEND", "DTYPE", "TOKENS"))
    args = parser.parse_args(arguments)
    if args.bits:
        print(bits(*args.bits))
        return 0
    labels = [check.label for check in core_checks()]
    for group, count in Counter(label.partition(":")[0] for label in labels).items():
        print(f"{group:<12}{count:>6}")
    print(f"{len(labels)} checks, {digest(labels)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
