"""The most memory that pruning a whole model takes, on the device and on the host."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sparsek.core import memory
from sparsek.core.clock import Times, wait
from sparsek.models.config import BlockSparse
from sparsek.models.prune import prune
from sparsek.models.stream import read_tensors
from sparsek_bench.engine import options
from sparsek_bench.engine.bench import Column, Record, Table
from sparsek_bench.engine.case import Bar, Case, block_name, rows, stored_name
from sparsek_bench.engine.run import Outcome, passed, record_of
from sparsek_bench.engine.sensors import Sensors
from sparsek_bench.engine.sources import executed_by
from sparsek_bench.engine.tables import CASE, judged
from sparsek_bench.engine.timed_call import Timed
from sparsek_bench.suites.llama import Sizes, llama, near

MODULE = "models.prune"
DEVICE, HOST = Bar("", 3.0, 2.0), Bar("", 1.5, 1.2)


@dataclass(frozen=True)
class PruneMemoryCase(Case):
    """A checkpoint of a model of Llama's shapes, loaded and pruned by `sk.prune` with OBS, a block at a time on the
    device, on `batches` of calibration; activations are kept in a folder. The time is that of the pruning.

    In 1e9 bytes: `peak_gb`, the most of the device; `block_gb` and `layer_gb`, the weights of a block and its largest;
    `batch_gb`, the inputs of a block for one batch; `forward_gb`, the most that a dense block takes to compute it, with
    these inputs; `host_gb`, what the process grew by, with all libraries loaded before; `checkpoint_gb`, the file.
    `peak_gb` and `forward_gb` are null on a CPU, and `host_gb` where Linux does not count it.
    """

    op: ClassVar[str] = "prune_memory"
    rated: ClassVar[bool] = False
    hosted: ClassVar[bool] = True
    extra: ClassVar[tuple[str, ...]] = (
        "peak_gb",
        "block_gb",
        "layer_gb",
        "batch_gb",
        "forward_gb",
        "host_gb",
        "checkpoint_gb",
    )
    dense_flops: ClassVar[float] = 0.0

    layers: int = options.size("Layers", "11", usual=11)
    width: int = options.size("Features of a token", "2048", usual=2048)
    hidden: int = options.size("Features of an MLP", "5632", usual=5632)
    heads: int = options.size("Heads of q", "16", usual=16)
    batches: int = options.size("Batches", "2", usual=2)
    sequences: int = options.size("Sequences of a batch", "8", usual=8)
    tokens: int = options.size("Tokens of a sequence", "2048", usual=2048)
    block: tuple[int, int] = options.block(usual=(128, 128))
    density: float = options.share(default="0.5", usual=0.5)
    dtype: str = options.dtype()

    @property
    def name(self) -> str:
        """One short line: "11 layers of 2048 and 5632, block 128 50 % bf16, 2 batches of 8 x 2048"."""
        stored = stored_name(block_name(self.block), self.density, self.dtype)
        batches = f"{self.batches} batches of {self.sequences} x {self.tokens}"
        return f"{self.layers} layers of {self.width} and {self.hidden}, {stored}, {batches}"

    def run(
        self, *, device: torch.device, report: Callable[[str], None] = lambda text: None, **_: Any
    ) -> Outcome:
        """One record of one run. Raises GateError if a pruned layer does not compute its product."""
        from safetensors.torch import save_file

        sizes = Sizes(self.layers, self.width, self.hidden, self.heads, max(1, self.heads // 2), 1024)
        generator = torch.Generator("cpu").manual_seed(1)
        shape = self.batches, self.sequences, self.tokens
        ids = torch.randint(1024, shape, generator=generator, device="cpu")
        with TemporaryDirectory() as folder:
            path = Path(folder, "model.safetensors")
            report("checkpoint")
            save_file(dict(llama(sizes, self.tokens, self.drawn, torch.device("cpu")).state_dict()), path)
            if device.type == "cuda":
                report("libraries")
                small = llama(Sizes(2, 256, 512, 2, 1, 64), 64, self.drawn, torch.device("cpu"))
                config = {"blocks.*": BlockSparse(64, 0.5)}
                prune(small, config, calibration=[ids[0, :1, :64] % 64], device=device)
                del small
            memory.trim()
            before = reset_host_peak()
            model = llama(sizes, self.tokens, self.drawn, torch.device("meta"))
            model.load_state_dict(read_tensors(path), assign=True)  # not mapped, as by `sparsek prune`
            weights = (each.weight for each in model.blocks.modules() if isinstance(each, nn.Linear))
            whole = {  # that of no layer is kept here, so pruned ones can leave the device
                "block_gb": sum(each.numel() * each.element_size() for each in model.blocks[0].parameters()),
                "layer_gb": max(each.numel() * each.element_size() for each in weights),
                "batch_gb": ids[0].numel() * self.width * self.drawn.itemsize,
                "checkpoint_gb": path.stat().st_size,
                "forward_gb": self.forward_bytes(model.blocks[0], device),
            }
            memory.trim()
            config = {"blocks.*": BlockSparse(self.block, self.density)}
            took: list[float] = []

            def pruned() -> None:
                began = perf_counter()
                prune(model, config, calibration=list(ids), device=device, folder=Path(folder, "run"))
                wait(device)
                took.append((perf_counter() - began) * 1e3)

            report("prune")
            seen, ran = Sensors(device), []
            peak = memory.peak_bytes(lambda: ran.extend(executed_by(pruned)), device)
            if not ran:  # on a CPU nothing is called for a peak
                ran.extend(executed_by(pruned))
            seen.sample()
            after = host_peak()
        layer: Any = model.get_submodule("blocks.0.attention.q")
        x = torch.randn(256, self.width, device=device, dtype=self.drawn)
        with torch.no_grad():
            layer = layer.to(device)
            weight = layer.to_dense()
            wide: Tensor = x.double() @ weight.double().T
            gate = passed(self, MODULE, near(layer(x), x @ weight.T, wide))
        host = None if before is None or after is None else after - before
        found = {"peak_gb": peak, "host_gb": host, **whole}
        extra = {name: None if found[name] is None else round(found[name] / 1e9, 6) for name in self.extra}
        record = record_of(self, Timed(MODULE), Times.of(took), gate, device, seen, **extra, ran=ran)
        return Outcome(self, (record,), {}, {})

    @torch.no_grad()
    def forward_bytes(self, block: nn.Module, device: torch.device) -> int | None:
        """The most that the device holds beside the weights while a block takes a batch; None on a CPU."""
        if device.type != "cuda":
            return None
        dim = self.width // self.heads
        own = copy.deepcopy(block).to(device)
        turn = torch.zeros(2, self.tokens, dim, device=device, dtype=self.drawn).unbind()

        def call() -> None:
            own(
                torch.zeros(self.sequences, self.tokens, self.width, device=device, dtype=self.drawn),
                turn,
                None,
            )

        call()  # with libraries
        return memory.peak_bytes(call, device)


def reset_host_peak() -> int | None:
    """The bytes of this process in the host's memory; from now on its peak is counted anew. None where Linux is not, or
    refuses.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return None
    return host_peak()


def host_peak() -> int | None:
    """The most bytes that this process had in the host's memory."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(found[0]) * 1024 if found else None


def _over(record: Record, peak: str, *allowed: str) -> float | None:
    sizes = [record[name] for name in allowed]
    return None if record[peak] is None else record[peak] / sum(sizes)


def _ratio(peak: str, *allowed: str) -> Callable[[Record], str]:
    def cell(record: Record) -> str:
        over = _over(record, peak, *allowed)
        return "" if over is None else f"{record[peak]:.2f} GB, {over:.2f}x"

    return cell


def _targets(record: Record) -> str:
    found = (
        ("device", DEVICE, "peak_gb", "block_gb", "batch_gb"),
        ("host", HOST, "host_gb", "checkpoint_gb"),
    )
    parts = []
    for where, bar, *names in found:
        over = _over(record, names[0], *names[1:])
        if over is not None:
            verdict, shown = judged(bar, over)
            parts.append(f"{where} at most {bar.must:g}x, {verdict}: {shown}")
    return "; ".join(parts)


PRUNE = rows("auto", PruneMemoryCase())
PRUNED = Table(
    op="prune_memory",
    title="memory of pruning",
    dense=(),
    columns=(
        CASE,
        Column("s", lambda record: f"{record['ms']['median'] / 1e3:.1f}"),
        Column("device, over a block and its activations", _ratio("peak_gb", "block_gb", "forward_gb")),
        Column("over a block and its inputs", _ratio("peak_gb", "block_gb", "batch_gb")),
        Column("host, over the checkpoint", _ratio("host_gb", "checkpoint_gb")),
        Column("target", _targets, text=True),
    ),
    note=(
        "A checkpoint of 1 GB, loaded on the host and pruned by `sk.prune` with OBS and reconstruction, one block "
        "at a time on the GPU. The device's peak is over the weights of a block and what its dense forward pass of "
        "one batch of calibration takes, or the hidden states of that batch alone; the host's is what the "
        "process grew by, over the file."
    ),
    usual=("block 128 50 % bf16",),
    ratios=False,
)
