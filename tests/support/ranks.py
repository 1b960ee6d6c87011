"""Run a function in several gloo processes of this machine, within a deadline.

``ranks.run(4, function, *arguments)`` calls ``function(rank, world_size, *arguments)`` in four processes
with a process group and returns the four results. The function must be defined at the top of its module, and
``torch.save`` must accept its arguments and results. The processes are forked from a server that has
loaded torch once, so a run takes a fraction of a second.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from support.bounds import error
from torch import distributed
from torch.multiprocessing import start_processes

from gnn_attention.verify.measure import FLOAT64_RTOL

__all__ = ["run", "share"]

# The server imports these modules, which the package and the tests need, only once.
PRELOADED = ["torch.distributed.tensor.parallel", "torch.distributed.checkpoint.state_dict"]
PRELOADED += ["torch.distributed.fsdp", "gnn_attention.model", "examples.training", "pytest"]
PRELOADED += ["gnn_attention.distributed", "gnn_attention.convert.catalogue", "gnn_attention.verify.oracle"]
Tensors = Sequence[torch.Tensor]
# After one rank fails, the other ranks have this many seconds to fail too.
GRACE = 5.0


def run(world_size: int, function: Callable[..., Any], *arguments: Any, deadline: float = 60.0) -> list[Any]:
    """Return the results of ``function(rank, world_size, *arguments)`` on all ranks.

    Raise AssertionError if a rank is still running ``deadline`` seconds after the start, and torch's
    ProcessException if a rank raises or dies. No process is left after either.
    """
    _start_server()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(arguments, Path(folder) / "arguments")
        address = function.__module__, sys.modules[function.__module__].__file__, function.__qualname__
        ranks = start_processes(
            _rank, (world_size, address, folder, deadline), world_size, join=False, start_method="forkserver"
        )
        end = time.monotonic() + deadline
        try:
            while not ranks.join(max(0.0, end - time.monotonic()), GRACE):
                assert time.monotonic() < end, f"not done after {deadline} seconds"
        finally:
            for process in ranks.processes:
                process.kill()
        return [torch.load(Path(folder) / f"result{rank}", weights_only=False) for rank in range(world_size)]


def share(output: Tensors, expected: Tensors, whole: Tensors | None = None) -> float:
    """Return the error of float64 results as a share of the allowed one, 1e-12 of the largest number.

    ``whole`` holds the tensors of all ranks, of which ``expected`` is a shard; its largest number is used.
    """
    for a, b in zip(output, expected, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype == torch.float64
    off = error(output, expected)
    largest = max((float(x.abs().max()) for x in whole or expected if x.numel()), default=0.0)
    return off / (FLOAT64_RTOL * largest) if largest else 0.0 if off == 0 else math.inf


@functools.cache
def _start_server() -> None:
    """Start the server and wait until it has loaded its modules, so that no deadline includes this time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    first = context.Process(target=int)
    first.start()
    first.join()


def _rank(rank: int, world_size: int, address: tuple[str, str, str], folder: str, deadline: float) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    group = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=deadline)}
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", **group)
    arguments = torch.load(Path(folder) / "arguments", weights_only=False)
    result = _load_function(*address)(rank, world_size, *arguments)
    torch.save(result, Path(folder) / f"result{rank}")
    # No rank may leave while others still communicate.
    distributed.barrier()
    distributed.destroy_process_group()


def _load_function(module: str, file: str, name: str) -> Callable[..., Any]:
    """Load the function's module under the name that it has in pytest, and return the function."""
    if module not in sys.modules:
        sys.path.insert(0, str(Path(file).parent))
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    function: Callable[..., Any] = getattr(sys.modules[module], name)
    return function
