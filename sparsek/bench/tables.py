"""How the records of each operation are shown: columns, peers, the order of rows, and the lines below."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sparsek.bench import attention, attention_run, records, spmm
from sparsek.bench.case import Entry
from sparsek.bench.records import Record

EARLIER = "earlier version"


@dataclass(frozen=True)
class Column:
    """A heading, and what stands below it for one record."""

    heading: str
    cell: Callable[[Record], str]


@dataclass(frozen=True)
class Table:
    """The table of one operation: a row for each of its device times, in the order of `suite`, then of cases.

    `peers` maps names in records to headings; `dense` names the dense ones. `note` says what the numbers mean.
    """

    op: str
    title: str
    peers: Mapping[str, str]
    dense: tuple[str, ...]
    suite_name: str
    suite: Sequence[Entry]
    columns: tuple[Column, ...]
    note: str


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


def _memory(record: Record) -> str:
    return "" if record["memory"] is None else f"{record['memory'] * 100:.3g} %"


def _speedup(record: Record) -> str:
    """Time of the dense peer over the kernel's, from the same rounds."""
    for name in table_of(record).dense:
        if name in record["peers"]:
            return f"{record['peers'][name]['ms']['median'] / record['ms']['median']:.2f}x"
    return ""


def below(record: Record) -> str:
    """What a record without a row says under the table."""
    ms, where = record["ms"]["median"], case_name(record) + mark(record)
    if record["op"] == "mask_build":
        return f"A mask, built and ready: {ms:.3f} ms ({where})."
    if record["op"] == "attention_new_mask":
        alone = record["peers"][attention_run.ALONE]["ms"]["median"]
        return (
            f"Mask build, plan and kernel, a new mask every call: {ms:.3f} ms, {ms / alone:.2f} times the kernel alone "
            f"({where}, {record['kernel']})."
        )
    return f"Host time of an eager call with a cached plan: {ms * 1e3:.1f} us ({where})."


_CASE = Column("case", case_name)
_KERNEL = Column("kernel", lambda record: f"{record['kernel']}{mark(record)}")
_MS = Column("ms (min to max)", _time)
_SPEEDUP = Column("speedup over dense", _speedup)
_USEFUL = Column("useful TFLOPS", _useful)
_ROOF = Column("of the roofline", _of_roof)

SPMM = Table(
    op="spmm",
    title="BSR x dense",
    peers={
        "cublas": "cuBLAS",
        "torch_sparse": "torch.sparse",
        "torch_sparse_stages": "torch.sparse, stages",
        "cusparse": "cuSPARSE",
        "torch_dense": "torch dense",
    },
    dense=("cublas", "torch_dense"),
    suite_name="issue2",
    suite=spmm.ISSUE2,
    columns=(
        _CASE,
        _KERNEL,
        _MS,
        _SPEEDUP,
        _USEFUL,
        Column("GB/s", _bandwidth),
        _ROOF,
    ),
    note=(
        "Useful TFLOPS count stored blocks only. A ratio is this library's useful rate over the peer's rate in "
        "the same rounds: useful FLOPs for sparse peers, dense FLOPs on dense random data for dense ones. "
        "torch.sparse runs with the best of all four parameters of its kernel, 'stages' with its own but num_stages."
    ),
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
    suite_name="issue3",
    suite=attention.ISSUE3,
    columns=(
        _CASE,
        _KERNEL,
        _MS,
        _SPEEDUP,
        _USEFUL,
        _ROOF,
        Column("extra memory", _memory),
    ),
    note=(
        "Useful TFLOPS count the pairs that the mask admits, the roofline whole blocks. A ratio is this library's "
        "useful rate over the peer's rate in the same rounds; dense peers run causal where the mask is, else every "
        "pair, and count these. FlashAttention-4 runs on its own layout, FlexAttention with its default options. "
        "Extra memory is what a call that builds its mask, plans and runs takes at most beyond q, k, v and the output, "
        "over the bytes of these."
    ),
)
TABLES: Mapping[str, Table] = {table.op: table for table in (SPMM, ATTENTION)}


def table_of(record: Record) -> Table:
    """The table that a record belongs to."""
    return TABLES[records.OPS[record["op"]].case.op]
