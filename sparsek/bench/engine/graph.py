"""Calls captured in one CUDA graph."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


def captured(
    calls: Sequence[Callable[[], Any]], device: torch.device
) -> tuple[Callable[[], None], tuple[Any, ...]]:
    """A replay of all calls, one after another, and the tensors that it writes: one result for each call.

    The calls run once before, on the stream of the capture: what they make on first use is there then.
    Raises RuntimeError if one of them cannot be captured.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = tuple(call() for call in calls)
    return graph.replay, results
