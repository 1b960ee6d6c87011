"""The kernel over rows of edges, in Triton; importing this package loads Triton.

Triton names a compiled kernel by a hash of its source and of the functions that it calls. The hash
depends on which function was hashed first, so that a process that used another kernel before compiles it
again. All functions are hashed here in the order of their definition, callees first: then the names are
the same in every process.
"""

import triton

from gnn_attention.backends.gpu.kernels import _common, _row_passes

for _module in (_common, _row_passes):
    for _function in list(vars(_module).values()):
        # an interpreted function has no hash
        if isinstance(_function, triton.JITFunction):
            _function.cache_key  # noqa: B018
