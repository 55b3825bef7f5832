"""Tensors that a kernel derives once from a matrix's tensors, kept as long as those and rebuilt after a write."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from sparsek.core.streams import Ready, captured, wait_for
from sparsek.kernels.lang.launch import recorder


class Memo:
    """One derived tensor and the versions of its sources. `made` is the stream and event after which it is ready."""

    def __init__(self) -> None:
        self.held: Tensor | None = None
        self.made: Ready | None = None
        self.shown: tuple[tuple[Any, int], ...] = ()
        self.in_graphs: list[Tensor] = []

    def of(self, make: Callable[[], Tensor], *sources: Tensor) -> Tensor:
        """The result of `make` for `sources`; rebuilt if torch's version counters show a write to them.

        A tensor made under CUDA graph capture belongs to the graph and is not kept. A captured graph keeps the tensor
        that it was captured with. Another stream waits for the tensor.
        """
        capturing = captured(sources[0])
        recorded = recorder()
        if recorded is not None:
            recorded.watch(*sources)
        if self.held is None or not self._fresh(sources):
            held = make()
            if capturing:
                return held
            self.held, self.made = held, Ready.here(held.device)
            counted = not any(each.is_inference() for each in sources)
            self.shown = tuple((weakref.ref(each), each._version) for each in sources) if counted else ()
        elif capturing:
            if not any(each is self.held for each in self.in_graphs):
                self.in_graphs.append(self.held)
        elif self.made is not None:
            wait_for(self.made, (self.held,))
        return self.held

    def _fresh(self, sources: tuple[Tensor, ...]) -> bool:
        if len(self.shown) != len(sources) or any(each.is_inference() for each in sources):
            return False
        return all(ref() is x and version == x._version for (ref, version), x in zip(self.shown, sources))
