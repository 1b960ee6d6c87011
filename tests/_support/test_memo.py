"""What is computed once for a graph."""

import torch

from gnn_attention import patterns
from gnn_attention._support.memo import memoized


def test_what_is_made_on_a_gpu_is_there_before_other_streams_may_read_it(monkeypatch):
    graph, steps = patterns.causal(3), []

    class Stream:
        def synchronize(self):
            steps.append(("synchronize", (len(graph._memo))))

    def made(graph, device):
        steps.append(("made", device.type))
        return device

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    for _ in range(2):
        memoized(made, graph, torch.device("cuda:1"))
        memoized(made, graph, torch.device("cpu"))
    assert steps == [("made", "cuda"), ("synchronize", 0), ("made", "cpu")]
    assert len(graph._memo) == 2
