"""Compiles the Hopper kernels for sm_90a where no GPU is, and reads what came out. Runs under any supported Triton."""

import contextlib
import io
import json
import re
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.cache import get_cache_manager

from sparsek.attn.kernels.backward import bwd_wide_keys, bwd_wide_queries
from sparsek.attn.kernels.backward import hopper_bwd as attention_bwd
from sparsek.attn.kernels.backward import hopper_bwd_wide as attention_bwd_wide
from sparsek.attn.kernels.forward import hopper_fwd as attention_fwd
from sparsek.attn.kernels.paged import hopper as attention_paged
from sparsek.core import dtypes
from sparsek.engine.launch.gluon import describe_heads, shared_layout
from sparsek.products.kernels.sddmm import hopper as sddmm
from sparsek.products.kernels.spmm import hopper as spmm
from sparsek.products.kernels.spmm import hopper_fp8 as spmm_fp8
from tests.engine.launch import sass
from tests.engine.launch.sass import Loop


class WidePass(NamedTuple):
    """One of the two kernels of hopper.attention_bwd_wide: that over keys, or that over queries."""

    config: attention_bwd_wide.Config
    over_keys: bool


# hopper.spgemm runs the kernel of hopper.spmm.
Config = (
    spmm.Config
    | spmm_fp8.Config
    | sddmm.Config
    | attention_fwd.Config
    | attention_bwd.Config
    | WidePass
    | attention_paged.Config
)
# Of TTGIR.
VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")
CONSTANT = re.compile(r"%c-?\d+_i\d+(?:_\d+)?|%cst(?:_\d+)?")
# Arguments with any alignment.
ANYWHERE = ("slopes", "sinks", "q_scale", "k_scale", "v_scale")
READERS = sha256(Path(__file__).read_bytes() + Path(sass.__file__).read_bytes()).hexdigest()
# What Triton calls what torch and SparseK call otherwise.
FP8 = {"e4m3": ("fp8e4nv", torch.float8_e4m3fn), "e5m2": ("fp8e5", torch.float8_e5m2)}


class Code(NamedTuple):
    """Facts of one compiled kernel. `registers` is for each thread of `warps` warps at launch; sizes are in bytes.

    `wgmma` and `copies` list the distinct instructions; `waits` are the numbers of wgmma groups that may still run
    when a wait ends. `fixed_bounds`: see the function. `unwritten`, `mixed`, `early` and `loops` are what `sass` finds
    in the machine code, where that was to be read. `log` is what ptxas said.
    """

    wgmma: list[str]
    wgmma_count: int
    copies: list[str]
    waits: list[int]
    shared: int
    warps: int
    registers: int
    stack: int
    spills: int
    fixed_bounds: list[str]
    unwritten: list[str]
    mixed: list[str]
    early: list[str]
    loops: list[Loop]
    log: str


def compiled(c: Config, dtype: str, reads_sass: bool = True) -> Code:
    """`c` for bf16 or fp16, or the types of A, B and C, with the arguments that `launch` gives to the kernel.

    Reading machine code takes as long as compiling. What was found stays in Triton's cache, by the hash of the kernel's
    source, its constants, this Triton, and the files that read the code.
    """
    anywhere = ANYWHERE
    if isinstance(c, attention_fwd.Config):
        options = {"maxnreg": 128} if c.ctas_per_sm == 2 else {}
        function, source, types = _attention(c, dtype)
    elif isinstance(c, attention_bwd.Config):
        options = {}
        function, source, types = _attention_bwd(c, dtype)
    elif isinstance(c, WidePass):
        options = {}
        function, source, types = _attention_bwd_wide(c, dtype)
        anywhere = tuple(types)
    else:
        options = c.options
        if isinstance(c, spmm_fp8.Config):
            function, source, types = _spmm_fp8(c, dtype)
        elif isinstance(c, attention_paged.Config):
            function, source, types = _attention_paged(c, dtype)
        else:
            function, source, types = _sddmm(c, dtype) if isinstance(c, sddmm.Config) else _spmm(c, dtype)
    signature = {name: types.get(name, "i32") for name in function.arg_names}
    signature |= {"T": "constexpr", "SOURCE": "constexpr"}
    aligned = [
        at
        for at, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") and name not in anywhere
    ]
    ast = GluonASTSource(
        function,
        signature,
        constexprs={name: None for name, kind in signature.items() if kind == "constexpr"}
        | {"T": c.config if isinstance(c, WidePass) else c, "SOURCE": source},
        attrs={(at,): [["tt.divisibility", 16]] for at in aligned},
    )
    options = {"num_warps": 4} | options
    key = f"{triton.__version__} {READERS} {ast.hash()} {options} {reads_sass}"
    facts = get_cache_manager(sha256(key.encode()).hexdigest())
    known = facts.get_file("facts.json")
    if known is not None:
        found = Code(*json.loads(Path(known).read_text(encoding="utf-8")))
        return found._replace(loops=[Loop(*each) for each in found.loops])
    said = io.StringIO()
    # ptxas speaks only where Triton's cache does not answer for it.
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(said):
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        kernel: Any = triton.compile(ast, target=GPUTarget("cuda", 90, 32), options=options)
    found = _code(kernel, said.getvalue(), reads_sass)
    facts.put(json.dumps(found), "facts.json", binary=False)
    return found


def _spmm(c: spmm.Config, dtype: str) -> tuple[Any, str, dict[str, str]]:
    b_box = (c.cols, c.width) if c.b_col else (c.width, c.cols)
    boxes = {
        "a_desc": (c.width, 64) if c.a_col else (c.a_box, c.width),
        "b_desc": (1, *b_box) if c.b_stack else b_box,
        "c_desc": c.c_shape,
    }
    types = {name: _descriptor(box, dtype) for name, box in boxes.items()}
    # What is not there is the tiles again.
    types |= dict.fromkeys(("tiles", "starts", "cols", "blocks", "bias", "part_sums", "other"), "*i32")
    types |= {"alpha": "fp32", "beta": "fp32"} | ({"part_sums": "*fp32"} if c.split else {})
    there = (("bias", c.bias), ("other", bool(c.combine) or c.direct))
    types |= {name: f"*{dtype}" for name, given in there if given}
    types |= {"beside_desc": _descriptor(c.c_shape, dtype) if c.slope or c.preload else "constexpr"}
    return spmm.spmm_kernel, spmm.SOURCE, types


def _spmm_fp8(c: spmm_fp8.Config, dtype: str) -> tuple[Any, str, dict[str, str]]:
    """`dtype`: those of A, B and C, with spaces between."""
    a, b, out = dtype.split()
    described = {
        "a_desc": ((c.rows, c.width), a),
        "b_desc": ((c.cols, c.width), b),
        "c_desc": (c.c_shape, out),
    }
    types = {name: _descriptor(*each) for name, each in described.items()} | {"alpha": "fp32", "beta": "fp32"}
    # What is not there is the tiles again.
    types |= dict.fromkeys(("tiles", "starts", "cols", "bias", "part_sums", "other"), "*i32")
    types |= dict.fromkeys(("a_scale", "b_scale", *(["part_sums"] if c.split else [])), "*fp32")
    types |= {name: f"*{out}" for name, given in (("bias", c.bias), ("other", c.combine)) if given}
    return spmm_fp8.spmm_fp8_kernel, spmm_fp8.SOURCE, types


def _sddmm(c: sddmm.Config, dtype: str) -> tuple[Any, str, dict[str, str]]:
    boxes = {
        "x_desc": (c.width, 64) if c.a_col else (c.rows, c.width),
        "y_desc": c.y_box,
        "s_desc": c.c_shape,
    }
    types = {name: _descriptor(box, dtype) for name, box in boxes.items()}
    types |= dict.fromkeys(("tiles", "starts", "columns", "stored"), "*i32")
    return sddmm.sddmm_kernel, sddmm.SOURCE, types


def _attention(c: attention_fwd.Config, dtype: str) -> tuple[Any, str, dict[str, str]]:
    q, k, v, o = (
        torch.empty(1, heads, length, dim, dtype=dtypes.parse(dtype), device="meta")
        for heads, length, dim in (
            (c.pack, 64, c.dim),
            (1, c.keys, c.dim),
            (1, c.keys, c.v_dim),
            (c.pack, 64, c.v_dim),
        )
    )
    described = {
        "q_desc": attention_fwd.query_rows(q, c.pack, c.dim),
        "k_desc": describe_heads(k, c.keys, c.dim),
        "v_desc": describe_heads(v, c.keys, c.v_dim),
        "o_desc": attention_fwd.query_rows(o, c.pack, c.v_dim),
    }
    types = {name: _descriptor(each.box, dtype) for name, each in described.items()} | {"scale": "fp32"}
    types |= dict.fromkeys(("tiles", "count", "partial", "full", "rules", "bits", "lo", "hi"), "*i32")
    # What is not there is the same small int32 tensor.
    types |= {"lse": "*fp32" if c.lse else "*i32"}
    types |= dict.fromkeys(("part", "part_lse"), "*fp32" if c.split else "*i32")
    types |= (
        _ends(c)
        | _changes(c)
        | ({"sinks": f"*{c.sinks}"} if c.sinks else dict.fromkeys(("sinks", "sink_step"), "constexpr"))
    )
    return attention_fwd.attention_kernel, attention_fwd.SOURCE, types


def _attention_bwd(c: attention_bwd.Config, dtype: str) -> tuple[Any, str, dict[str, str]]:
    wide = {"q_desc": c.dim, "k_desc": c.dim, "dk_desc": c.dim}
    wide |= {"v_desc": c.v_dim, "do_desc": c.v_dim, "dv_desc": c.v_dim}
    rows = {"q_desc": c.queries, "do_desc": c.queries}
    boxes = {name: (1, 1, rows.get(name, 64), dim) for name, dim in wide.items()}
    if c.pack > 1:
        boxes |= {name: (1, 1, c.queries // c.pack, c.pack, wide[name]) for name in rows}
    types = {name: _descriptor(box, dtype) for name, box in boxes.items()}
    types |= {name: _descriptor((1, c.queries), "fp32") for name in ("rows_desc", "bounds_desc")}
    types |= {"dq_desc": _descriptor((1, 2 * c.dim, 32), "fp32")}
    types |= {"scale": "fp32", "factor": "fp32"}
    types |= dict.fromkeys(("tiles", "starts", "visits", "rules", "bits", "turns"), "*i32")
    types |= _changes(c) | _ends(c) | {"part_sums": "*fp32" if c.parts else "constexpr"}
    return attention_bwd.attention_bwd_kernel, attention_bwd.SOURCE, types


def _attention_bwd_wide(c: WidePass, dtype: str) -> tuple[Any, str, dict[str, str]]:
    config, over_keys = c
    wide = {"q_desc": config.dim, "k_desc": config.dim, "v_desc": config.v_dim, "do_desc": config.v_dim}
    wide |= {"dk_desc": config.dim, "dv_desc": config.v_dim} if over_keys else {"dq_desc": config.dim}
    types = {name: _descriptor((1, 1, 64, dim), dtype) for name, dim in wide.items()}
    types |= dict.fromkeys(("scale", "factor"), "fp32") | {"sums": "*fp32"}
    types |= {"rows_desc": _descriptor((1, 64), "fp32")} if over_keys else {"row_numbers": "*fp32"}
    pointers = ("order", "p_starts", "p_counts", "p_indices", "f_starts", "f_counts", "f_indices")
    types |= dict.fromkeys((*pointers, "lo", "hi", "rules", "bits"), "*i32")
    types |= {"entry_of": "*i32"} if over_keys else {}
    types |= _ends(config)
    kernel = bwd_wide_keys.attention_bwd_keys if over_keys else bwd_wide_queries.attention_bwd_queries
    return kernel, attention_bwd_wide.SOURCE, types


def _attention_paged(c: attention_paged.Config, dtype: str) -> tuple[Any, str, dict[str, str]]:
    q, o = (torch.empty(64, c.pack, d, dtype=dtypes.parse(dtype), device="meta") for d in (c.dim, c.v_dim))
    boxes = {
        "q_desc": attention_paged._rows(q, c.pack, c.dim).box,
        "k_desc": (1, 1, *c.k_box),
        "v_desc": (1, 1, *c.v_box),
        "o_desc": attention_paged._rows(o, c.pack, c.v_dim).box,
    }
    types = {name: _descriptor(box, dtype) for name, box in boxes.items()} | {"scale": "fp32", "bend": "fp32"}
    pointers = ("tiles", "count", "table", "p_starts", "p_counts", "partial", "f_starts", "f_counts", "full")
    types |= dict.fromkeys(pointers, "*i32") | {"out": f"*{dtype}"}
    # What is not there is the tiles again.
    there = (("lse", c.lse), ("sink_logits", c.sink_logits))
    types |= {name: "*fp32" if given else "*i32" for name, given in there}
    types |= {"words": "*i32" if c.members else "constexpr"}
    return attention_paged.attention_paged_kernel, attention_paged.SOURCE, types


def _changes(c: attention_fwd.Config | attention_bwd.Config) -> dict[str, str]:
    """What changes the scores; what is not there is None."""
    absent = [] if c.softcap else ["cap"]
    absent += [] if c.alibi else ["slopes", "slope_item", "slope_head", "ahead"]
    return {"cap": "fp32", "slopes": "*fp32"} | dict.fromkeys(absent, "constexpr")


def _ends(c: attention_fwd.Config | attention_bwd.Config | attention_bwd_wide.Config) -> dict[str, str]:
    """Window and sinks of members; None for neither."""
    return {} if c.member_ends else dict.fromkeys(("window", "sunk"), "constexpr")


def _descriptor(box: tuple[int, ...], dtype: str) -> str:
    name, kind = FP8[dtype] if dtype in FP8 else (dtype, dtypes.parse(dtype))
    return f"tensordesc<{name}{list(box)},{shared_layout(box, kind)!r}>"


def _code(kernel: Any, log: str, reads_sass: bool) -> Code:
    ptx = kernel.asm["ptx"]
    registers, stack, spilled = (
        re.findall(pattern, log)
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes stack", r"(\d+) bytes spill")
    )
    assert len(registers) == 1, log
    wgmma = re.findall(r"wgmma\.mma_async\.\S+", ptx)
    programs = [sass.parsed(sass.disassembled(kernel.asm["cubin"]))] if reads_sass else []
    return Code(
        wgmma=sorted(set(wgmma)),
        wgmma_count=len(wgmma),
        copies=sorted(set(re.findall(r"cp\.async\.bulk\.tensor\.\S+", ptx))),
        waits=sorted({int(n) for n in re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+);", ptx)}),
        shared=kernel.metadata.shared,
        warps=kernel.metadata.num_warps,
        registers=int(registers[0]),
        stack=max(map(int, stack)),
        spills=max(map(int, spilled)),
        fixed_bounds=fixed_bounds(kernel.asm["ttgir"]),
        unwritten=[found for program in programs for found in sass.unwritten(program)],
        mixed=[found for program in programs for found in sass.mixed_descriptors(program)],
        early=[found for program in programs for found in sass.early_arrivals(program)],
        loops=[found for program in programs for found in sass.multiplying_loops(program)],
        log=log,
    )


def fixed_bounds(ttgir: str) -> list[str]:
    """Bounds and steps of inner loops that do not follow the outer loop around them; constants are left out.

    Triton 3.6 forgets that a value is carried over the outer loop if nothing but a bound of an inner loop comes of it,
    and takes the one from before the loop, always (triton-lang/triton, pull request 9036; see test_hopper_code.py). So
    a bound is wrong that does not change with the outer loop, or of which a part was loaded before it. Kernels here
    have no such bound that is meant. Results of operations with regions count as changing.
    """
    found: list[str] = []
    made: dict[str, tuple[str, set[str]]] = {}  # of each value: its operation, and what that reads
    around: list[tuple[int, set[str]]] = []  # of each loop: its indentation, and the values made inside

    def sources(value: str, inside: set[str]) -> set[str]:
        """What a value comes of, down to values from outside the loop and to those that change by themselves."""
        operation, reads = made.get(value, ("", set()))
        if value not in inside or operation in ("", "region"):
            return {value}
        return set().union(*(sources(each, inside) for each in reads)) if reads else set()

    def is_loaded(value: str) -> bool:
        """A load is among what a value comes of."""
        operation, reads = made.get(value, ("", set()))
        return operation == "tt.load" or any(is_loaded(each) for each in reads)

    for line in ttgir.splitlines():
        indent = len(line) - len(line.lstrip())
        while around and indent <= around[-1][0]:
            around.pop()
        if one := re.match(r"\s*(%[\w$.-]+)(?::\d+)? = (\"?[\w.]+\"?)(.*)", line):
            operation = "region" if one[2].startswith(("scf.", '"')) else one[2]
            reads = set() if operation == "region" else {each.split("#")[0] for each in VALUE.findall(one[3])}
            made[one[1]] = operation, reads
            if around:
                around[-1][1].add(one[1])
        if loop := re.search(r"scf\.for %\S+ = (%\S+) to (%\S+) step (%\S+) ", line):
            for bound in loop.groups() if around else ():
                _, inside = around[-1]
                parts = sources(bound.split("#")[0], inside)
                changes = any(part in inside for part in parts)
                old = any(part not in inside and is_loaded(part) for part in parts)
                if not CONSTANT.fullmatch(bound) and (old or not changes):
                    found.append(bound)
            carried = re.findall(r"(%[\w$.-]+) = ", line[line.index("scf.for") :])
            around.append((indent, set(carried)))
            made |= dict.fromkeys(carried, ("", set()))
    return sorted(set(found))
