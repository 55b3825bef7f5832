"""Tensors that a kernel makes of a matrix's tensors once, keeps while they live, and renews when they have changed."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from sparsek.core.streams import Made, captured, follow
from sparsek.kernels.lang.launch import recorder


class Kept:
    """One tensor, and which state of which tensors it shows. `made` is where on which stream it became ready."""

    def __init__(self) -> None:
        self.held: Tensor | None = None
        self.made: Made | None = None
        self.shown: tuple[tuple[Any, int], ...] = ()
        self.in_graphs: list[Tensor] = []

    def of(self, make: Callable[[], Tensor], *sources: Tensor) -> Tensor:
        """What `make` gives for `sources`, made anew unless torch has counted no write to them since.

        What a CUDA graph would have to make belongs to the graph and is not kept; a graph that was captured keeps the
        one that it saw. Another stream waits for it.
        """
        capturing = captured(sources[0])
        recorded = recorder()
        if recorded is not None:
            recorded.watch(*sources)
        if self.held is None or not self._fresh(sources):
            held = make()
            if capturing:
                return held
            self.held, self.made = held, Made.here(held.device)
            counted = not any(each.is_inference() for each in sources)
            self.shown = tuple((weakref.ref(each), each._version) for each in sources) if counted else ()
        elif capturing:
            if not any(each is self.held for each in self.in_graphs):
                self.in_graphs.append(self.held)
        elif self.made is not None:
            follow(self.made, (self.held,))
        return self.held

    def _fresh(self, sources: tuple[Tensor, ...]) -> bool:
        if len(self.shown) != len(sources) or any(each.is_inference() for each in sources):
            return False
        return all(ref() is x and version == x._version for (ref, version), x in zip(self.shown, sources))
