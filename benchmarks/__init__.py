"""Benchmarks of the repository, run by ``python -m benchmarks`` and ``python3 -m benchmarks.gpu_run``.

The wheel does not contain them.
"""
