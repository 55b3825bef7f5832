"""How the records of each operation are shown: columns, peers, the order of rows, and the lines below."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sparsek.bench.engine import records
from sparsek.bench.engine.benches import BENCHES, Bench
from sparsek.bench.engine.records import Record
from sparsek.bench.suites import (
    attention_run,
    fp8,
    host,
    pack,
    semi24,
)
from sparsek.bench.suites.case import Bar, Case, SuiteRow

EARLIER = "earlier version"


@dataclass(frozen=True)
class Column:
    """A heading, and what stands below it for one record."""

    heading: str
    cell: Callable[[Record], str]


@dataclass(frozen=True)
class Table:
    """The table of one operation: a row for each of its device times, in the order of `suite`, then of cases.

    `bench`: the benchmark that makes its records. `peers` maps names in records to headings; `dense` names the dense
    ones. `note` says what the numbers mean. `pages`: where the table stands. `shown`: columns of its own that a screen
    shows beside the usual ones. `ratios`: a column for each peer with the ratio of rates.
    """

    op: str
    title: str
    peers: Mapping[str, str]
    dense: tuple[str, ...]
    bench: Bench
    columns: tuple[Column, ...]
    note: str
    pages: tuple[str, ...]
    shown: tuple[Column, ...] = ()
    ratios: bool = True

    @property
    def suite(self) -> tuple[SuiteRow, ...]:
        """The rows of the benchmark's suites that belong here."""
        return tuple(row for row in self.bench.rows if row.case.op == self.op)

    @property
    def command(self) -> str:
        """What makes its records: "spmm --suite blocks", with the first suite that has such rows."""
        named = (
            name for name, rows in self.bench.suites.items() if any(row.case.op == self.op for row in rows)
        )
        return f"{self.bench.name} --suite {next(named)}"


def mark(record: Record) -> str:
    """Says so if the kernel has changed since."""
    return "" if records.is_fresh(record) else f" ({EARLIER})"


def case_name(record: Record) -> str:
    """The name of the record's case."""
    return records.case_of(record).name


def _time(record: Record) -> str:
    ms = record["ms"]
    return f"{ms['median']:.3f} ({ms['min']:.3f} to {ms['max']:.3f})"


def _useful(record: Record) -> str:
    rate = record["tflops"]["useful"]
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"


def _bandwidth(record: Record) -> str:
    return f"{record['gbps']:.0f}"


def _of_roof(record: Record) -> str:
    return f"{record['roofline']['fraction'] * 100:.0f} %"


def _symbolic(name: str) -> Callable[[Record], str]:
    def cell(record: Record) -> str:
        ms, share = record[f"{name}_ms"], record[f"{name}_share"]
        return "" if ms is None or share is None else f"{ms:.3f} ({share * 100:.0f} %)"

    return cell


def _beside_plain(record: Record) -> str:
    """How much longer than the plain product of the same rounds."""
    if "plain" not in record["peers"]:
        return ""
    return f"{(record['ms']['median'] / record['peers']['plain']['ms']['median'] - 1) * 100:+.1f} %"


def _memory(record: Record) -> str:
    return "" if record["memory"] is None else f"{record['memory'] * 100:.3g} %"


def _peak(record: Record) -> str:
    return "" if record["peak_gb"] is None else f"{record['peak_gb']:.3g}"


def _per_token(record: Record) -> str:
    """Microseconds over the queries: the same at every length, where the time is linear in it."""
    case = record["case"]
    return f"{record['ms']['median'] * 1e3 / (case['batch'] * case['q_len']):.3g}"


def _speedup(record: Record) -> str:
    """Time of the dense peer over the kernel's, from the same rounds."""
    for name in table_of(record).dense:
        if name in record["peers"]:
            return f"{record['peers'][name]['ms']['median'] / record['ms']['median']:.2f}x"
    return ""


def _ms_of(peer: str) -> Callable[[Record], str]:
    def cell(record: Record) -> str:
        return f"{record['peers'][peer]['ms']['median']:.3f}" if peer in record["peers"] else ""

    return cell


def _against(
    bars: Mapping[Case, Sequence[Bar]], names: Mapping[str, str], kernels: str = "hopper."
) -> Callable[[Record], str]:
    """What `kernels`, the start of their names, must reach beside peers: "cuBLAS 1.45 (aim 1.7): met"."""

    def cell(record: Record) -> str:
        if not record["kernel"].startswith(kernels):
            return ""
        parts = [
            f"{names[bar.peer]} {bar.must:g} (aim {bar.aim:g}): {bar.verdict(record['ratio'][bar.peer])}"
            for bar in bars.get(records.case_of(record), ())
            if bar.peer in record["ratio"]
        ]
        return "; ".join(parts)

    return cell


def _near(record: Record) -> str:
    return f"{record['near']} of {record['count']}"


def _near_measured(record: Record) -> str:
    return f"{record['near_measured']} of {record['count']}"


def _worst(record: Record) -> str:
    return f"{record['worst']:.2f}x the best"


def below(record: Record) -> str:
    """What a record without a row says under the table."""
    ms, where = record["ms"]["median"], case_name(record) + mark(record)
    if record["op"] == "mask_build":
        return f"A mask, built and ready: {ms:.3f} ms ({where})."
    alone = record["peers"][attention_run.ALONE]["ms"]["median"]
    return (
        f"Mask build, plan and kernel, a new mask every call: {ms:.3f} ms, {ms / alone:.2f} times the kernel alone "
        f"({where}, {record['kernel']})."
    )


def _host_case(record: Record) -> host.HostCase:
    case = records.case_of(record)
    assert isinstance(case, host.HostCase)
    return case


def _spell(milliseconds: float, case: host.HostCase) -> str:
    return f"{milliseconds / 1e3:.3g} s" if case.is_first else f"{milliseconds * 1e3:.1f} us"


def _host_time(record: Record) -> str:
    return _spell(record["ms"]["median"], _host_case(record)) + mark(record)


def _torch_time(record: Record) -> str:
    peers = record["peers"]
    return _spell(peers[host.TORCH]["ms"]["median"], _host_case(record)) if host.TORCH in peers else ""


def _over_torch(record: Record) -> str:
    peer = record["peers"].get(host.TORCH)
    return "" if peer is None else f"{record['ms']['median'] / peer['ms']['median']:.2f}"


def _at_most(record: Record) -> str:
    case, ms = _host_case(record), record["ms"]["median"]
    bar, peer = case.bar, record["peers"].get(host.TORCH)
    if bar is None or (peer is None and not case.is_first):
        return ""
    found = ms / 1e3 if peer is None else ms / peer["ms"]["median"]
    return f"{bar.must:g}{' s' if case.is_first else ''}: {bar.verdict(found)}"


def _aim(record: Record) -> str:
    case = _host_case(record)
    return "" if case.bar is None else f"{case.bar.aim:g}{' s' if case.is_first else ''}"


TIME = Column("time", _host_time)
TORCH_TIME = Column("torch's time", _torch_time)
OVER_TORCH = Column("over torch's", _over_torch)
AT_MOST = Column("at most", _at_most)
AIM = Column("aim", _aim)
CASE = Column("case", case_name)
KERNEL = Column("kernel", lambda record: f"{record['kernel']}{mark(record)}")
MS = Column("ms (min to max)", _time)
SPEEDUP = Column("speedup over dense", _speedup)
USEFUL = Column("useful TFLOPS", _useful)
GBPS = Column("GB/s", _bandwidth)
ROOF = Column("of the roofline", _of_roof)
SYMBOLIC = Column("symbolic ms (of a first call)", _symbolic("symbolic"))
SYMBOLIC_GPU = Column("of it on the GPU (of the call's)", _symbolic("symbolic_gpu"))
BESIDE_PLAIN = Column("time beside plain", _beside_plain)
MEMORY = Column("extra memory", _memory)
PEAK = Column("peak GB", _peak)
PER_TOKEN = Column("us per token", _per_token)
NEAR = Column("within 5 %, by prediction", _near)
NEAR_MEASURED = Column("by its own rounds", _near_measured)
WORST = Column("worst choice", _worst)
USEFUL_NOTE = (
    "Useful TFLOPS count stored blocks only. A ratio is this library's useful rate over the peer's rate in "
    "the same rounds: useful FLOPs for sparse peers, dense FLOPs on dense random data for dense ones."
)

SPMM = Table(
    op="spmm",
    title="BSR x dense",
    peers={
        "cublas": "cuBLAS",
        "torch_sparse": "torch.sparse",
        "torch_sparse_stages": "torch.sparse, stages",
        "cusparse": "cuSPARSE",
        "torch_dense": "torch dense",
        "a_at_b": "A @ B",
    },
    dense=("cublas", "torch_dense"),
    bench=BENCHES["spmm"],
    columns=(CASE, KERNEL, MS, SPEEDUP, USEFUL, GBPS, ROOF),
    note=(
        f"{USEFUL_NOTE} A @ B is this library's on the same pattern. "
        "torch.sparse runs with the best of all four parameters of its kernel, 'stages' with its own but num_stages."
    ),
    pages=("README.md", "docs/spmm.md"),
)
SDDMM = Table(
    op="sddmm",
    title="SDDMM",
    peers={
        "cublas": "cuBLAS",
        "torch_sparse": "torch.sparse",
        "torch_csr": "torch.sparse CSR",
        "torch_dense": "torch dense",
    },
    dense=("cublas", "torch_dense"),
    bench=BENCHES["sddmm"],
    columns=(CASE, KERNEL, MS, SPEEDUP, USEFUL, ROOF),
    note=(
        f"{USEFUL_NOTE} torch.sparse is the kernel of its BSR sampled_addmm with the best tile of K, stages and warps."
    ),
    pages=("README.md", "docs/sddmm.md"),
)
SPGEMM = Table(
    op="spgemm",
    title="BSR x BSR",
    peers={"cublas": "cuBLAS", "torch_csr": "torch.sparse CSR", "torch_dense": "torch dense"},
    dense=("cublas", "torch_dense"),
    bench=BENCHES["spgemm"],
    columns=(CASE, KERNEL, MS, SPEEDUP, USEFUL, ROOF, SYMBOLIC, SYMBOLIC_GPU),
    note=(
        "Of both matrices the given share of blocks is stored: as many in every block row of A and in every block "
        "column of B. Useful TFLOPS count pairs of stored blocks that meet. A ratio is this library's useful rate over "
        "the peer's rate in the same rounds: useful FLOPs for sparse peers, dense FLOPs on dense random data for dense "
        "ones. The symbolic phase finds out which blocks meet and deals them out, timed on the wall from an idle GPU "
        "to an idle GPU; its share is that of a call on patterns seen for the first time, which also plans and "
        "multiplies. On the GPU: the kernels and copies alone, and their share of those of the call."
    ),
    pages=("README.md", "docs/spgemm.md"),
    shown=(SYMBOLIC, SYMBOLIC_GPU),
)
LINEAR = Table(
    op="linear",
    title="linear",
    peers={"cublas": "cuBLAS and torch", "torch_dense": "torch dense", "plain": "the plain product"},
    dense=("cublas", "torch_dense"),
    bench=BENCHES["linear"],
    columns=(CASE, KERNEL, MS, BESIDE_PLAIN, SPEEDUP, USEFUL, ROOF),
    note=(
        f"{USEFUL_NOTE} The dense peer is torch's linear layer, followed by torch's activation and addition. The plain "
        "product is this library's x @ W.T, into the same output."
    ),
    pages=("README.md", "docs/linear.md"),
    shown=(BESIDE_PLAIN,),
)
SEMI24_PEERS = {
    "cublas": "cuBLAS",
    "cusparselt": "cuSPARSELt",
    "cusparselt_alike": "cuSPARSELt, same layouts",
    "bsr": "this library's BSR",
    "torch_dense": "torch dense",
}
SEMI24 = Table(
    op="semi24",
    title="2:4",
    peers=SEMI24_PEERS,
    dense=("cublas", "torch_dense"),
    bench=BENCHES["semi24"],
    columns=(
        CASE,
        KERNEL,
        MS,
        SPEEDUP,
        Column("dense-equivalent TFLOPS", _useful),
        ROOF,
        Column("must reach", _against(semi24.BARS, SEMI24_PEERS)),
    ),
    note=(
        "TFLOPS are dense-equivalent: 2 * M * N * K of a 2:4 matrix, 2 * N for every value in the stored blocks of "
        "one in blocks, kept or not; half of that is multiplied. A ratio is this library's rate over the peer's in "
        "the same rounds, cuBLAS on dense random data. cuSPARSELt is the fastest of all its algorithms in all layouts "
        "of B and C, its B laid out before any time; with the same layouts it takes B and makes C as they lie here. "
        "BSR is this library's on the same blocks, with all their values. The roofline counts the stored values at the "
        "dense rate."
    ),
    pages=("README.md", "docs/two-four.md"),
)
STORY = Table(
    op="story",
    title="equal stored values",
    peers=SEMI24_PEERS,
    dense=("cublas", "torch_dense"),
    bench=BENCHES["semi24"],
    columns=(
        CASE,
        KERNEL,
        MS,
        Column("cuBLAS ms", _ms_of("cublas")),
        Column("cuSPARSELt ms", _ms_of("cusparselt")),
        SPEEDUP,
        Column("TFLOPS of stored values", _useful),
        ROOF,
    ),
    note=(
        "x @ W.T where the given share of W's values is stored: hopper.semi24 two of every four neighbours; "
        "hopper.bsr24 twice that share of the blocks of 128, each 2:4; hopper.spmm that share of the blocks, whole. "
        "All of a case and its peers in the same rounds, cuBLAS on dense random data. A ratio compares rates of stored "
        "values, of cuBLAS of all values."
    ),
    pages=("README.md", "docs/two-four.md"),
)
FP8_PEERS = {
    "cublas_fp8": "cuBLAS FP8",
    "cublas_fp8_float32": "cuBLAS FP8, float32 sums",
    "cusparselt": "cuSPARSELt FP8",
    "bf16": "this library in bf16",
    "torch_dense": "torch dense, bf16",
}
FP8 = Table(
    op="fp8",
    title="FP8",
    peers=FP8_PEERS,
    dense=("cublas_fp8", "torch_dense"),
    bench=BENCHES["fp8"],
    columns=(
        CASE,
        KERNEL,
        MS,
        SPEEDUP,
        USEFUL,
        ROOF,
        Column("must reach", _against(fp8.BARS, FP8_PEERS)),
    ),
    note=(
        "Both operands are in FP8 before any time, E4M3 with a float32 scale for each row of W and of x unless said, C "
        "in bf16. Useful TFLOPS count every value in stored blocks; of 2:4 matrices they are dense-equivalent, the "
        "values that are not there counted too. A ratio compares rates in the same rounds. cuBLAS FP8 is the faster of "
        "one scale for all and one a row, with the sums that it takes least time for, on dense random data; cuSPARSELt "
        "the fastest of its algorithms and layouts, without scales."
    ),
    pages=("README.md", "docs/fp8.md"),
)
PACK = Table(
    op="pack",
    title="packing",
    peers={"copy": "a copy"},
    dense=("copy",),
    bench=BENCHES["pack"],
    columns=(
        CASE,
        KERNEL,
        MS,
        GBPS,
        ROOF,
        Column("must reach", _against(pack.BARS, {"copy": "a copy"}, "")),
    ),
    note=(
        "GB/s count the dense matrix read once and what is stored written once, 2:4 values with their metadata or "
        "blocks with their indices; those of a copy the same matrix read and written, by torch, in the same rounds. "
        "Timed are Semi24.from_dense(w) and BSR.from_dense(w, block, keep=...), the choice of blocks and its sync "
        "included."
    ),
    pages=("README.md", "docs/two-four.md"),
)
MLP_PEERS = {"torch_dense": "torch dense", "torch_dense_compiled": "torch dense, compiled"}
MLP_TRAIN = Table(
    op="mlp_train",
    title="training step of an MLP",
    peers=MLP_PEERS,
    dense=("torch_dense",),
    bench=BENCHES["mlp"],
    columns=(CASE, KERNEL, MS, SPEEDUP, USEFUL, ROOF),
    note=(
        f"{USEFUL_NOTE} A step is the forward and the gradients of x and of both weights, without an optimizer. The "
        "roofline is the sum of those of its six products."
    ),
    pages=("README.md", "docs/linear.md"),
    shown=(SPEEDUP,),
)
MLP_DECODE = Table(
    op="mlp_decode",
    title="decoding through an MLP",
    peers=MLP_PEERS,
    dense=("torch_dense",),
    bench=BENCHES["mlp"],
    columns=(CASE, KERNEL, MS, SPEEDUP, GBPS, ROOF),
    note=(
        f"{USEFUL_NOTE} One CUDA graph holds as many layers one after another as exceed the cache several times, each "
        "with weights of its own; the time is that of the replay over their number, for the peers too. The roofline is "
        "the sum of those of the two products."
    ),
    pages=("README.md", "docs/linear.md"),
    shown=(SPEEDUP,),
)
ATTENTION = Table(
    op="attention",
    title="attention",
    peers={
        "cudnn": "cuDNN dense",
        "fa4": "FlashAttention-4",
        "flex": "FlexAttention",
        "cudnn_bsa": "cuDNN block-sparse",
        "sdpa": "torch dense",
    },
    dense=("cudnn", "sdpa"),
    bench=BENCHES["attention"],
    columns=(CASE, KERNEL, MS, SPEEDUP, USEFUL, ROOF, MEMORY),
    note=(
        "Useful TFLOPS count the pairs that the mask admits, the roofline whole blocks. A ratio is this library's "
        "useful rate over the peer's rate in the same rounds; dense peers run causal where the mask is, else every "
        "pair, and count these. FlashAttention-4 runs on its own layout, FlexAttention with its default options, "
        "in blocks of 64 with tiles of 64. "
        "Extra memory is what a call that builds its mask, plans and runs takes at most beyond q, k, v and the output, "
        "over the bytes of these."
    ),
    pages=("README.md", "docs/attention.md"),
)
GRADIENT_PEERS = {
    "cudnn": "cuDNN dense",
    "fa2": "FlashAttention-2 dense",
    "fa4": "FlashAttention-4",
    "flex": "FlexAttention",
    "cudnn_bsa": "cuDNN block-sparse",
    "any_order": "deterministic=False",
    "sdpa": "torch dense",
}
ATTENTION_BACKWARD = Table(
    op="attention_backward",
    title="gradients of attention",
    peers=GRADIENT_PEERS,
    dense=("cudnn", "sdpa"),
    bench=BENCHES["attention-backward"],
    columns=(CASE, KERNEL, MS, SPEEDUP, USEFUL, ROOF, MEMORY),
    note=(
        "dq, dk and dv, where out and lse are there. Useful TFLOPS count the pairs that the mask admits, five products "
        "each, 2.5 times the forward pass; the roofline whole blocks. A ratio is this library's useful rate over "
        "the peer's rate in the same rounds; dense peers run causal where the mask is, else every pair, and count "
        "these. Peers run as they come, FlashAttention-4 and cuDNN with atomics; this library gives the same bits "
        "every time unless a row says that it is not deterministic. Extra memory is what a call that builds its mask, "
        "plans and runs takes at most beyond dq, dk and dv, over the bytes of q, k, v and the output."
    ),
    pages=("README.md", "docs/attention-backward.md"),
)
ATTENTION_TRAIN = Table(
    op="attention_train",
    title="training step of attention",
    peers=GRADIENT_PEERS,
    dense=("cudnn", "sdpa"),
    bench=BENCHES["attention-backward"],
    columns=(CASE, KERNEL, MS, PER_TOKEN, SPEEDUP, USEFUL, ROOF, PEAK),
    note=(
        f"{USEFUL_NOTE} A step is attention and the gradients of q, k and v, by autograd. Peak memory is the most that "
        "a step, the first on its mask, holds at once, q, k, v and the gradient of the output included."
    ),
    pages=("README.md", "docs/attention-backward.md"),
    shown=(PER_TOKEN, PEAK),
)
PLANNER = Table(
    op="planner",
    title="the planner's choice",
    peers={"best": "the best measured", "measured": "its own rounds' choice", "dense": "dense", "2:4": "2:4"},
    dense=("dense",),
    bench=BENCHES["planner"],
    columns=(CASE, MS, NEAR, WORST, NEAR_MEASURED),
    note=(
        "For every layer each option of `choose_format` is checked and timed in the same rounds: dense, 2:4, and BSR "
        "and BSR24 in blocks of 64 and 128 with the given share of blocks, in FP8 too where kernels are. The time is "
        "that of the choice by predictions alone; as `choose_format` does on a GPU, another choice is made by short "
        "rounds of its own, timed before. Times are sums over all layers, and ratios those of the sums; 'within 5 %' "
        "counts layers whose choice takes at most 1.05 times as long as the fastest option."
    ),
    pages=("README.md", "docs/planner.md"),
    shown=(NEAR, WORST, NEAR_MEASURED),
)
HOST = Table(
    op="host",
    title="host time",
    peers={host.TORCH: "torch"},
    dense=(host.TORCH,),
    bench=BENCHES["host"],
    columns=(CASE, TIME, TORCH_TIME, OVER_TORCH, AT_MOST, AIM),
    note=(
        "Time on the clock on the wall, of calls as users write them, whose plans are kept: how long the host is busy "
        "with one, of so few in a row that none waits for the GPU; of a layer how long one of twenty takes, until the "
        "GPU is idle. torch multiplies the dense matrix in the same type, in FP8's rows bf16, with the same bias and "
        "activation, in the same rounds. A first call is the first of a new process, after the import, from an idle "
        "GPU to an idle GPU; empty caches hold no compiled kernel of Triton's or this library's. 'At most' and 'aim' "
        "are limits of the time over torch's, or of seconds."
    ),
    pages=("README.md", "docs/host.md"),
    shown=(TIME, TORCH_TIME, OVER_TORCH, AT_MOST),
    ratios=False,
)
TABLES: Mapping[str, Table] = {
    table.op: table
    for table in (
        SPMM,
        SDDMM,
        SPGEMM,
        LINEAR,
        SEMI24,
        STORY,
        FP8,
        PACK,
        MLP_TRAIN,
        MLP_DECODE,
        ATTENTION,
        ATTENTION_BACKWARD,
        ATTENTION_TRAIN,
        PLANNER,
        HOST,
    )
}


def table_of(record: Record) -> Table:
    """The table that a record belongs to."""
    return TABLES[records.OPS[record["op"]].case.op]
