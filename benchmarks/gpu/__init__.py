"""The workloads of ``python3 -m benchmarks.gpu_run``, which needs a GPU: methods, measuring, targets, tables."""
