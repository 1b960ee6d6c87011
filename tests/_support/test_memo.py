"""The memo of a graph."""

import torch

from gnn_attention import patterns
from gnn_attention._support.memo import memoized


def test_a_result_on_a_gpu_is_complete_before_other_streams_may_read_it(monkeypatch):
    graph, steps = patterns.causal(3), []

    class Stream:
        def synchronize(self):
            steps.append(("synchronize", (len(graph._memo))))

    def compute(graph, device):
        steps.append(("compute", device.type))
        return device

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    for _ in range(2):
        memoized(compute, graph, torch.device("cuda:1"))
        memoized(compute, graph, torch.device("cpu"))
    assert steps == [("compute", "cuda"), ("synchronize", 0), ("compute", "cpu")]
    assert len(graph._memo) == 2
