"""The suite for a GPU: ``python -m benchmarks.gpu``.

First the ceilings of the device (copies, products, gathers), then every workload: each method is checked
against float64, weighed and timed, forward and backward. A run fits a ``--budget`` and is carried on by
``--resume``; without a GPU it is refused, except for ``--device cpu --quick``, a trial of the benchmark
itself.
"""
