"""Workloads, methods, tasks, targets and tables of ``python3 -m benchmarks.gpu_run``, which needs a GPU."""
