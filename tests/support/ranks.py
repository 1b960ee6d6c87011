"""Run a function on several gloo processes of this machine, within a deadline.

``ranks.run(4, function, *arguments)`` calls ``function(rank, world_size, *arguments)`` in four processes with
a process group and returns the four results. The function stands at the top of its module; arguments and
results are whatever ``torch.save`` holds. The processes are forked from a server that has loaded torch once,
so that a run takes a fraction of a second.
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
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from support.bounds import error
from torch import distributed

from gnn_attention.verify.measure import EXACT

__all__ = ["RanksError", "alone", "run", "share"]

# what the server loads once: the package, and what test modules import
PRELOADED = ["torch.distributed.tensor.parallel", "torch.distributed.checkpoint.state_dict"]
PRELOADED += ["torch.distributed.fsdp", "gnn_attention.model", "examples.training", "pytest"]
PRELOADED += ["gnn_attention.distributed", "gnn_attention.convert.catalogue", "gnn_attention.verify.oracle"]
Tensors = Sequence[torch.Tensor]
# seconds that the others have to fail too, once one of them did
GRACE = 5.0


class RanksError(AssertionError):
    """Some rank failed, died, or was not done in time; the message holds the tracebacks."""


def run(world_size: int, function: Callable[..., Any], *arguments: Any, deadline: float = 60.0) -> list[Any]:
    """What ``function(rank, world_size, *arguments)`` returns on every rank.

    RanksError where one raises or dies, or where not all are done ``deadline`` seconds after the start; all
    are dead then.
    """
    return _results(range(world_size), world_size, function, arguments, deadline)


def alone(function: Callable[..., Any], *arguments: Any, deadline: float = 60.0) -> Any:
    """What ``function(*arguments)`` returns in one process without a process group, within a deadline."""
    return _results([0], None, function, arguments, deadline)[0]


def share(found: Tensors, true: Tensors, whole: Tensors | None = None) -> float:
    """The error of float64 results as a share of what is allowed, 1e-12 of the largest number of all of them.

    ``whole``: what ``true`` is a rank's part of; its largest number counts.
    """
    for a, b in zip(found, true, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype == torch.float64
    off = error(found, true)
    largest = max((float(x.abs().max()) for x in whole or true if x.numel()), default=0.0)
    return off / (EXACT * largest) if largest else 0.0 if off == 0 else math.inf


def _results(
    ranks: Sequence[int],
    world_size: int | None,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    deadline: float,
) -> list[Any]:
    context = _server()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(arguments, Path(folder) / "arguments")
        where = function.__module__, sys.modules[function.__module__].__file__, function.__qualname__
        processes = [
            context.Process(target=_rank, args=(rank, world_size, where, folder, deadline)) for rank in ranks
        ]
        for process in processes:
            process.start()
        try:
            in_time = _joined(processes, time.monotonic() + deadline)
        finally:
            for process in processes:
                process.kill()
                process.join()
        _check(folder, [process.exitcode for process in processes], in_time, deadline)
        return [torch.load(Path(folder) / f"result{rank}", weights_only=False) for rank in ranks]


@functools.cache
def _server() -> Any:
    """The server, which has loaded its modules once a first process is there: no deadline begins before."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    first = context.Process(target=int)
    first.start()
    first.join()
    return context


def _joined(processes: list[Any], end: float) -> bool:
    """True if all ended by themselves; after a failure the others have a little time."""
    running = {process.sentinel: process for process in processes}
    failed = False
    while running and time.monotonic() < end:
        for sentinel in wait(list(running), timeout=max(0.0, min(end - time.monotonic(), 1.0))):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode and not failed:
                failed, end = True, min(end, time.monotonic() + GRACE)
    return not running or failed


def _check(folder: str, codes: list[int | None], in_time: bool, deadline: float) -> None:
    texts = []
    for rank, code in enumerate(codes):
        file = Path(folder) / f"error{rank}"
        if file.exists():
            texts.append(f"rank {rank}:\n{file.read_text()}")
        elif code:
            texts.append(f"rank {rank} ended (exit code {code}) without a message")
    if not in_time:
        texts.insert(0, f"not done after {deadline} seconds")
    if texts:
        raise RanksError("\n".join(texts))


def _rank(
    rank: int, world_size: int | None, where: tuple[str, str, str], folder: str, deadline: float
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        place = () if world_size is None else (rank, world_size)
        if world_size is not None:
            store, timeout = f"file://{folder}/store", timedelta(seconds=deadline)
            group = {"rank": rank, "world_size": world_size, "timeout": timeout}
            distributed.init_process_group("gloo", init_method=store, **group)
        arguments = torch.load(Path(folder) / "arguments", weights_only=False)
        result = _function(*where)(*place, *arguments)
        torch.save(result, Path(folder) / f"result{rank}")
        if world_size is not None:
            # no rank leaves while others still communicate
            distributed.barrier()
            distributed.destroy_process_group()
    except BaseException:
        (Path(folder) / f"error{rank}").write_text(traceback.format_exc())
        os._exit(1)


def _function(module: str, file: str, name: str) -> Callable[..., Any]:
    """The function in this process, its module loaded under the name by which pytest knows it."""
    if module not in sys.modules:
        sys.path.insert(0, str(Path(file).parent))
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    return found
