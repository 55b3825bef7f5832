"""Tensors that a kernel derives once from a matrix's tensors, kept as long as those and rebuilt after a write."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from sparsek.core.streams import Contents, Ready, captured, wait_for
from sparsek.engine.launch.launch import recorder


class Memo:
    """One derived tensor and what its sources held. `made` is the stream and event after which it is ready."""

    def __init__(self) -> None:
        self.held: Tensor | None = None
        self.made: Ready | None = None
        self.shown: tuple[tuple[Any, Contents | None], ...] = ()
        self.in_graphs: list[Tensor] = []

    def of(self, make: Callable[[], Tensor], *sources: Tensor) -> Tensor:
        """The result of `make` for `sources`; rebuilt if `Contents` shows a write to them.

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
            self.shown = tuple((weakref.ref(each), Contents.of(each)) for each in sources)
        elif capturing:
            if not any(each is self.held for each in self.in_graphs):
                self.in_graphs.append(self.held)
        elif self.made is not None:
            wait_for(self.made, (self.held,))
        return self.held

    def _fresh(self, sources: tuple[Tensor, ...]) -> bool:
        return len(self.shown) == len(sources) and all(
            ref() is x and held is not None and held.are_of(x) for (ref, held), x in zip(self.shown, sources)
        )
