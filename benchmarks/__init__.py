"""The benchmark suite of the repository: ``python -m benchmarks``, ``python -m benchmarks.gpu``; it is not in
the wheel.
"""
