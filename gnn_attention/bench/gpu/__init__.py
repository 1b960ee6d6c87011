"""Time and memory on a GPU: ``gnn-attention bench gpu``, ours beside every peer, on the same inputs in one run.

First the ceilings of the device (copies, products, gathers), then every workload: each method is checked against float64, weighed
and timed, forward and backward. A run fits a ``--budget`` and is carried on by ``--resume``; without a GPU it is refused, but for
``--device cpu --quick``, a trial of the benchmark itself.
"""

from __future__ import annotations

from gnn_attention.bench.gpu import plots, table, targets, workloads
from gnn_attention.bench.gpu.calibrate import calibrated
from gnn_attention.bench.gpu.records import read
from gnn_attention.bench.gpu.running import keeper, run_gpu

__all__ = ["calibrated", "keeper", "plots", "read", "run_gpu", "table", "targets", "workloads"]
