"""The benchmark suite of the repository: ``python -m benchmarks``, ``python3 -m benchmarks.gpu_run``; it is not in
the wheel.
"""
