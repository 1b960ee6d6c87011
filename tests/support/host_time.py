"""The host's time of a call on a planned graph, of which nothing is launched.

``PYTHONPATH=.:tests python tests/support/host_time.py [--profile]`` prints the microseconds of CPU of one
``attend`` by form, each the quietest of many batches: forward, with backward, the forward pass by the custom
operator and by the functions that it runs, and forward with all that is done before the driver is called.
"""

from __future__ import annotations

import cProfile
import dataclasses
import pstats
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from support.compile_gate import _NoDriver, launched_for
from triton.runtime import JITFunction
from triton.runtime.driver import driver

import gnn_attention as ga
from gnn_attention import patterns
from gnn_attention.backends import BACKENDS, triton
from gnn_attention.backends.gpu import ops

CALLS, BATCHES = 50, 40
FORMS = ("rows", "windows", "tiles")


def least(function: Callable[[], Any]) -> float:
    """Microseconds of CPU of one call: the quietest of many batches."""
    times = []
    for _ in range(BATCHES):
        start = time.process_time_ns()
        for _ in range(CALLS):
            function()
        times.append((time.process_time_ns() - start) / CALLS / 1e3)
    return min(times)


def take_cpu_tensors() -> None:
    """As if the kernels ran there."""
    supported = dataclasses.replace(triton.CAPABILITIES, devices=("cuda", "cpu"))
    for backend in (triton.BACKEND, *triton.FORM_BACKENDS):
        BACKENDS[backend.name] = dataclasses.replace(backend, capabilities=supported)


def operator_and_inside(call: Callable[[], Any]) -> tuple[float, float]:
    """(the operator, what it runs) of a call without gradients."""
    seen: list[Any] = []
    inside = ops._run
    ops._run = lambda *given: seen.append(given) or inside(*given)
    call()
    ops._run = inside
    return least(lambda: ops._ATTENTION(*seen[0])), least(lambda: inside(*seen[0]))


def calls(form: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(forward, forward and backward) of a window of 2,304 tokens, 4 query heads on 2."""
    graph = patterns.window(2304, 16)
    q, k = (torch.zeros(1, 2304, n, 64, dtype=torch.bfloat16).transpose(1, 2) for n in (4, 2))
    x = q.detach().requires_grad_()

    def forward() -> Any:
        return ga.attend(q, k, k, graph, backend=f"triton-{form}")

    def both() -> Any:
        out = ga.attend(x, k, k, graph, backend=f"triton-{form}")
        return torch.autograd.grad(out, x, q)

    return forward, both


def main() -> None:
    take_cpu_tensors()
    for form in FORMS:
        forward, both = calls(form)
        with launched_for("sm_90"):
            forward()
            triton_too = least(forward)
        launch, JITFunction.run = JITFunction.run, lambda self, *args, **options: None
        driver.set_active(_NoDriver(90))
        if "--profile" in sys.argv:
            with cProfile.Profile() as profile:
                for _ in range(2000):
                    forward()
            pstats.Stats(profile).sort_stats("tottime").print_stats(24)
        numbers = least(forward), least(both), *operator_and_inside(forward)
        titles = "forward", "with backward", "operator", "inside"
        found = ", ".join(f"{title} {number:.0f}" for title, number in zip(titles, numbers, strict=True))
        print(f"{form}: {found}, forward with Triton's part {triton_too:.0f} us")
        JITFunction.run = launch


if __name__ == "__main__":
    main()
