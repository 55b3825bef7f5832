"""What a user would pick instead of `sk.attention`, and of its gradients.

A peer of the gradients runs its own forward pass when it is set up, on the same q, k, v and dO, and is timed by its
backward pass alone; of a training step both are timed. Its dq, dk and dv pass the same gate as a kernel's.
"""

import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparsek.attn.mask.mask import BlockMask
from sparsek_bench.engine.case import block_name, length_name
from sparsek_bench.engine.data import TokenMaker
from sparsek_bench.engine.peer import (
    Peer,
    ReadyPeer,
    UnavailableError,
    accepted,
    first_line,
    holding,
    setting_up,
)

# Masks that a dense peer computes as they are.
DENSE_MASKS = ("full", "causal")
LOW = ("bf16", "fp16")
# A dense step beyond this length is not measured: its time grows with the square of the length.
LONGEST_DENSE_STEP = 2**16
# Heads of keys and of values that cuDNN's block-sparse attention takes.
CUDNN_DIMS = ((64, 64), (96, 96), (128, 128))
# Blocks of FlashInfer's block-sparse attention on Hopper.
FLASHINFER_BLOCK = 64
# What a case measures.
LOOSE = 1.25  # times the budget: the error of a peer that rounds more than this library
FORWARD, BACKWARD, STEP = ("forward",), ("backward",), ("forward", "backward")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnavailableError(f"{name} cannot be imported: {first_line(error)}") from None


@contextmanager
def kept_graphs() -> Iterator[None]:
    """Inside, the backward pass of a graph of torch.compile can run more than once.

    torch gives this pass the saved tensors as scratch memory, unless donated_buffer is off when it is compiled and when
    it runs. The setting is the thread's own, so the backward pass stays on this thread.
    """
    config = imported("torch._functorch.config")
    with config.patch(donated_buffer=False), torch.autograd.set_multithreading_enabled(False):
        yield


@dataclass(frozen=True)
class AttentionPeer(Peer):
    """A peer whose attention is a function of q, k and v that autograd goes through, unless it has its own `timed`."""

    def attend(self, case: Any, one: Any) -> Any:
        """The attention of all sets like this one, in the peer's own layout."""
        raise NotImplementedError

    def laid(self, x: Tensor) -> Tensor:
        """x [B, H, L, D] in the peer's own layout, and a result of it as [B, H, L, D]."""
        return x

    def counted(self, case: Any) -> tuple[str, float | None]:
        """A note, and the FLOPs of a call where it computes more than the stored elements."""
        return "", None

    def ready(self, case: Any, sets: Sequence[Any], tried: Callable[[str], None]) -> ReadyPeer:
        """What the case measures, of every set: the forward pass, the backward pass, or both."""
        note, flops = self.counted(case)
        with setting_up(), kept_graphs() if case.passes == BACKWARD else nullcontext():
            attend = self.attend(case, sets[0])
            calls = tuple(self.timed(case, attend, one) for one in sets)
            out, *_ = [call() for call in calls]  # what fails, fails in the set-up
            if flops is None or case.mask in DENSE_MASKS:
                laid = self.laid(out) if isinstance(out, Tensor) else [self.laid(x) for x in out]
                rounded = accepted(sets[0].judge(laid), "its result", LOOSE)
                note = ", ".join(filter(None, (note, rounded)))
        return ReadyPeer(calls, note, flops)

    def timed(self, case: Any, attend: Any, one: Any) -> Callable[[], Any]:
        """The call of a set."""
        q, k, v = (self.laid(x.detach()).contiguous() for x in (one.q, one.k, one.v))
        if case.passes == FORWARD:
            return partial(attend, q, k, v)
        grad = self.laid(one.grad).contiguous()
        wanted = tuple(x.requires_grad_() for x in (q, k, v))
        return (step if case.passes == STEP else backward)(attend, wanted, grad)


def backward(attend: Attend, wanted: tuple[Tensor, ...], grad: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """A call of the backward pass alone: dq, dk and dv. The forward pass runs now."""
    out = attend(*wanted)

    def call() -> tuple[Tensor, ...]:
        with kept_graphs():
            return torch.autograd.grad(out, wanted, grad, retain_graph=True)

    return call


def step(attend: Attend, wanted: tuple[Tensor, ...], grad: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    """A call of both passes: out, dq, dk and dv."""

    def call() -> tuple[Tensor, ...]:
        out = attend(*wanted)
        return (out.detach(), *torch.autograd.grad(out, wanted, grad))

    return call


@dataclass(frozen=True)
class DenseAttention(AttentionPeer):
    """torch's scaled_dot_product_attention on the same q, k and v: causal if the mask is, else every pair.

    `backend` is one of torch's, by name; "" leaves the choice to torch.
    """

    backend: str = ""

    def why_not(self, case: Any, device: torch.device) -> list[str]:
        uneven = case.mask_text.causal and case.q_len != case.kv_len
        far = case.passes == STEP and case.kv_len > LONGEST_DENSE_STEP
        longest = length_name(LONGEST_DENSE_STEP)
        reasons = {
            "torch's is_causal lines up the first query with the first key, not the last with the last": uneven,
            f"takes time by the square of the length: not measured beyond {longest}": far,
        }
        return super().why_not(case, device) + holding(reasons)

    def attend(self, case: Any, one: Any) -> Attend:
        options = {"is_causal": case.mask_text.causal, "enable_gqa": case.heads != case.kv_heads}
        call = partial(functional.scaled_dot_product_attention, **options)
        return sdpa_kernel(getattr(SDPBackend, self.backend))(call) if self.backend else call

    def counted(self, case: Any) -> tuple[str, float | None]:
        causal = case.mask_text.causal
        return ("causal", case.causal_flops) if causal else ("every pair", case.dense_flops)


def flex_tiles(case: Any) -> dict[str, int]:
    """FlexAttention's `kernel_options` where its own tiles are larger than the mask's blocks, else {}.

    For heads of 64 and 128 in 16 bits on Hopper its tiles are 128 wide (torch 2.11 to 2.13), and it refuses blocks that
    they do not divide. With 64 x 64 it runs: what it takes itself for other head sizes.
    """
    if min(case.block) >= 128 or case.dim > 128 or case.dtype not in LOW:
        return {}
    return {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4}


@dataclass(frozen=True)
class Flex(AttentionPeer):
    """torch.compile of FlexAttention with its default options where they run, and the mask as its own BlockMask."""

    def why_not(self, case: Any, device: torch.device) -> list[str]:
        """Its backward pass drops tiles that are larger than blocks before it reads options."""
        small = case.passes != FORWARD and case.dim >= 64 and flex_tiles(case)
        reason = (
            "the only tile of its backward pass for heads of 64 to 128 on Hopper, 64 x 128, needs blocks of 128, "
            f"not {block_name(case.block)}"
        )
        return super().why_not(case, device) + holding({reason: small})

    def attend(self, case: Any, one: Any) -> Attend:
        from torch.nn.attention.flex_attention import flex_attention

        torch.compiler.reset()  # a compiled function stops compiling after 8 kinds of masks
        compiled = torch.compile(flex_attention, dynamic=False)
        call: Callable[..., Any] = compiled  # its result is one tensor: sums and maxima are left out
        made = one.make
        return partial(
            call,
            block_mask=_flex_of_tokens(made, case) if isinstance(made, TokenMaker) else one.mask.to_flex(),
            enable_gqa=case.heads != case.kv_heads,
            kernel_options=flex_tiles(case) or None,
        )

    def counted(self, case: Any) -> tuple[str, float | None]:
        return "tiles of 64" if flex_tiles(case) else "", None


def _flex_of_tokens(made: TokenMaker, case: Any) -> Any:
    """Its mask as NeMo makes one of MiniMax-M3's lists: a rule that looks up a bool [head of keys, query, block]."""
    from torch.nn.attention.flex_attention import create_block_mask

    (_, heads, queries, _), (columns, block) = made.indices.shape, (case.grid[1], case.block[1])
    table = torch.zeros(heads, queries, columns + 1, dtype=torch.bool, device=made.indices.device)
    listed = made.indices[0].long()
    table.scatter_(2, torch.where(listed < 0, columns, listed), True)
    group, ahead = case.heads // heads, case.kv_len - queries

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return table[h // group, q, k // block] & (k <= q + ahead)

    return create_block_mask(
        seen, None, case.heads, queries, case.kv_len, device=str(table.device), _compile=True
    )


@dataclass(frozen=True)
class SelectedBlocks(AttentionPeer):
    """Attention of selected blocks of flash-linear-attention's native sparse attention, on [B, S, H, D]."""

    def why_not(self, case: Any, device: torch.device) -> list[str]:
        group, of_tokens = case.heads // case.kv_heads, case.mask.startswith("tokens")
        reasons = {
            "takes lists of blocks for each query": not of_tokens,
            f"takes groups of a power of two of heads, 16 or more, not {group}": group < 16
            or group & (group - 1),
            f"takes {' and '.join(LOW)}, not {case.dtype}": case.dtype not in LOW,
            "takes as many queries as keys": case.q_len != case.kv_len,
        }
        return super().why_not(case, device) + holding(reasons)

    def laid(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)

    def attend(self, case: Any, one: Any) -> Attend:
        call = imported("fla.ops.nsa.parallel").parallel_nsa
        indices = one.make.indices.transpose(1, 2).contiguous()
        gate = torch.ones(case.batch, case.q_len, case.heads, dtype=one.q.dtype, device=one.q.device)
        counts = (indices >= 0).sum(-1).int()
        listed = indices.clamp(min=0)
        return lambda q, k, v: call(
            q, k, v, g_slc=gate, block_indices=listed, block_counts=counts, block_size=case.block[1]
        )


@dataclass(frozen=True)
class Flash4(AttentionPeer):
    """FlashAttention-4 (flash_attn.cute) on [B, S, H, D]: its causal and window arguments, or its lists of blocks.

    `ordered`: its gradients with the same bits every time. By default it adds dq in any order.
    """

    ordered: bool = False

    def why_not(self, case: Any, device: torch.device) -> list[str]:
        small = _by_lists(case) and case.block != (128, 128)
        reasons = {
            f"takes {' and '.join(LOW)}, not {case.dtype}": case.dtype not in LOW,
            "its arguments describe no documents": case.mask.startswith("documents"),
            "its window has no sinks without a mask_mod of its own language": "sinks" in case.mask,
            f"its lists hold blocks of 128, not {block_name(case.block)}": small,
            "gives the same bits every time, which the case does not need": self.ordered
            and not case.deterministic,
            "its ordered gradients take no lists of blocks": self.ordered and _by_lists(case),
        }
        return super().why_not(case, device) + holding(reasons)

    def laid(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)

    def attend(self, case: Any, one: Any) -> Attend:
        flash = imported("flash_attn.cute.interface").flash_attn_func
        options = self._options(case, one)

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = flash(q, k, v, **options)
            return out[0] if isinstance(out, tuple) else out

        return call

    def counted(self, case: Any) -> tuple[str, float | None]:
        return ("causal", case.causal_flops) if case.mask.startswith("tokens") else super().counted(case)

    def _options(self, case: Any, one: Any) -> dict[str, Any]:
        order = {"deterministic": True} if self.ordered else {}
        if not _by_lists(case):
            causal = {"causal": True} if case.mask_text.causal else {}
            if case.mask.startswith("tokens"):
                return order | causal
            # Its window counts the keys before the query, ours the query too.
            window = [(int(number) - 1, 0) for number in case.mask_text.numbers]
            return order | causal | ({"window_size": window[0]} if window else {})
        if one.mask.partial_blocks:
            raise UnavailableError("partial blocks of its lists need a mask_mod of its own language")
        lists = one.mask.to_fa4()
        count, index = lists.full_block_cnt, lists.full_block_idx
        forward = _whole_blocks(count, index, case)
        if case.passes == FORWARD:
            return {"block_sparse_tensors": forward}
        backward = _whole_blocks(*transposed_lists(one.mask), case)
        if self.ordered:
            backward = _with_turns(forward, backward)
        return order | {"block_sparse_tensors": forward, "block_sparse_tensors_bwd": backward}


def _by_lists(case: Any) -> bool:
    """Whether FlashAttention-4 needs lists of blocks for the mask; else its own arguments describe it."""
    return case.mask not in DENSE_MASKS and not case.mask_text.causal


def _with_turns(forward: Any, backward: Any) -> Any:
    """Its backward pass's lists with the place of every visit in the order in which dq is added."""
    places = imported("flash_attn.cute.block_sparsity").compute_dq_write_order(*forward[:4], *backward[:4])
    return backward._replace(dq_write_order=places[0], dq_write_order_full=places[1], spt=False)


def _whole_blocks(count: Tensor, index: Tensor, case: Any) -> Any:
    """Lists of whole blocks, counts [1, H, rows] and indices [1, H, rows, n], as FlashAttention-4 takes them."""
    return imported("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch(
        mask_block_cnt=torch.zeros_like(count),
        mask_block_idx=torch.zeros_like(index),
        full_block_cnt=count,
        full_block_idx=index,
        block_size=case.block,
    )


def transposed_lists(mask: BlockMask) -> tuple[Tensor, Tensor]:
    """The query tiles that see all of a key block: int32 counts [B, H, Nb] and lists [B, H, Nb, n], n of the fullest.

    They ascend; what follows them in a list is any tile.
    """
    starts, counts, indices = mask.transposed.full
    slots = starts[:, None] + torch.arange(max(1, int(counts.max())), device=mask.device)
    sides = (mask.batch, mask.heads, mask.grid[1])
    return counts.view(sides), indices[slots.clamp(max=len(indices) - 1)].view(*sides, -1)


@dataclass(frozen=True)
class CudnnBlocks(AttentionPeer):
    """Block-sparse attention of NVIDIA's cuDNN frontend: as many whole blocks in every row, no causal masks.

    Its backward pass is a function of its own, on its own forward pass's out and lse.
    """

    def why_not(self, case: Any, device: torch.device) -> list[str]:
        (bq, bk), dims, back = case.block, (case.dim, case.v_dim), case.passes != FORWARD
        even = case.mask_text.uniform and not case.q_len % bq and not case.kv_len % bk
        other, shared = back and dims != (128, 128), back and case.heads != case.kv_heads
        reasons = {
            f"takes as many whole blocks in every row, which {case.mask_text.words} has not": not even,
            f"takes square blocks, not {block_name(case.block)}": bq != bk,
            f"takes head sizes of 64, 96 and 128, not {case.dim} and {case.v_dim}": dims not in CUDNN_DIMS,
            f"takes {' and '.join(LOW)}, not {case.dtype}": case.dtype not in LOW,
            f"its gradients are bf16, not {case.dtype}": back and case.dtype != "bf16",
            f"its gradients take heads of 128 on Hopper, not {case.dim} and {case.v_dim}": other,
            f"its gradients take no shared heads, not {case.heads} to {case.kv_heads}": shared,
        }
        return super().why_not(case, device) + holding(reasons)

    def attend(self, case: Any, one: Any) -> Any:
        """Its functions of the forward pass and of the backward pass."""
        module, index, size = imported("cudnn.block_sparse_attention"), even_lists(one), case.block[0]
        return (
            lambda *given: module.block_sparse_attention_forward(*given, index, sparse_block_size=size),
            lambda *given: module.block_sparse_attention_backward(*given, index, sparse_block_size=size),
        )

    def timed(self, case: Any, attend: Any, one: Any) -> Callable[[], Any]:
        forward, backward = attend
        q, k, v = (x.detach() for x in (one.q, one.k, one.v))

        def gradients(made: Any) -> tuple[Tensor, ...]:
            found = backward(one.grad, q, k, v, made["o_tensor"], made["lse_tensor"])
            return found["dq_tensor"], found["dk_tensor"], found["dv_tensor"]

        def step() -> tuple[Tensor, ...]:
            made = forward(q, k, v)
            return made["o_tensor"], *gradients(made)

        if case.passes == FORWARD:
            return lambda: forward(q, k, v)["o_tensor"]
        return step if case.passes == STEP else partial(gradients, forward(q, k, v))


def even_lists(one: Any) -> Tensor:
    """int32 [B, Hq, Mb, n]: the key blocks of every query tile. Raises UnavailableError for uneven or partial ones."""
    lists = one.mask.to_fa4()
    count = lists.full_block_cnt
    if one.mask.partial_blocks or int(count.min()) != int(count.max()):
        raise UnavailableError("takes as many whole blocks in every row")
    return lists.full_block_idx.expand(*one.q.shape[:2], -1, -1).contiguous()


@dataclass(frozen=True)
class CudnnFlex(AttentionPeer):
    """Attention over intervals of keys, of NVIDIA's cuDNN frontend, on [B, S, H, D]. The plan of its mask is kept."""

    def why_not(self, case: Any, device: torch.device) -> list[str]:
        reasons = {
            f"takes two intervals of keys of each query, not {case.mask_text.words}": case.mask_text.rule
            is None
            and not case.mask.startswith("documents"),
            f"takes {' and '.join(LOW)}, not {case.dtype}": case.dtype not in LOW,
        }
        return super().why_not(case, device) + holding(reasons)

    def laid(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)

    def attend(self, case: Any, one: Any) -> Attend:
        module, intervals = imported("cudnn.flex_attention"), ends_of(one.mask).repeat(1, 1, case.batch)
        given = (self.laid(x.detach()).contiguous() for x in (one.q, one.k, one.v))
        plan = module.create_mask_plan(intervals, *given, build_backward=case.passes != FORWARD)
        return partial(module.flex_attn_func, mask_plan=plan)


def ends_of(mask: BlockMask) -> Tensor:
    """int32 [1, 1, q_len] or [1, 3, q_len]: ends (e, low, high) of what a query sees, the keys before e and those from
    low to high - 1. Raises UnavailableError for other masks.
    """
    keys, found = torch.arange(mask.kv_len, device=mask.device), []
    for at in range(0, mask.q_len, 1024):
        seen = mask.dense_rows(at, min(at + 1024, mask.q_len))
        first, *others = seen.flatten(0, 1)
        end = torch.where(first.all(-1), mask.kv_len, first.int().argmin(-1))
        high = torch.where(first.any(-1), mask.kv_len - first.flip(-1).int().argmax(-1), 0)
        ends = torch.stack((end, high - first.sum(-1) + end, high))
        e, low, high = ends[..., None]
        again = (keys < e) | ((keys >= low) & (keys < high))
        if not torch.equal(again, first) or any(not torch.equal(each, first) for each in others):
            raise UnavailableError("takes two intervals of keys of each query, the same for all heads")
        found.append(ends)
    whole = torch.cat(found, 1).int()[None]
    return whole if bool((whole[:, 1] < whole[:, 2]).any()) else whole[:, :1].contiguous()


@dataclass(frozen=True)
class Flash3(AttentionPeer):
    """FlashAttention-3 on [B, S, H, D] by the package fa3-fwd: the forward pass in bf16, without windows."""

    def why_not(self, case: Any, device: torch.device) -> list[str]:
        reasons = {
            "its package has no backward pass": case.passes != FORWARD,
            f"its package is built for bf16, not {case.dtype}": case.dtype != "bf16",
            f"takes dense and causal masks, not {case.mask_text.words}": case.mask not in DENSE_MASKS,
        }
        return super().why_not(case, device) + holding(reasons)

    def laid(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)

    def attend(self, case: Any, one: Any) -> Any:
        return partial(imported("fa3_fwd_interface").flash_attn_func, causal=case.mask_text.causal)


@dataclass(frozen=True)
class Flash3Windows(AttentionPeer):
    """FlashAttention-3 as vLLM builds it, for what fa3-fwd leaves out: windows, and fp16. One sequence [S, H, D].

    Behind the first keys its kernel counts blocks of 128 keys from a tile's first key, but the blocks without a mask
    from the sequence's: of a window of 300, queries 384 to 467 see keys up to 468 (docs/notes/attention-forward.md).
    """

    def why_not(self, case: Any, device: torch.device) -> list[str]:
        dense, words = case.mask in DENSE_MASKS, case.mask_text.words
        window = re.fullmatch(r"window:(\d+)", case.mask)
        keys = int(window[1]) if window else 0
        reasons = {
            "its package has no backward pass": case.passes != FORWARD,
            f"takes {' and '.join(LOW)}, not {case.dtype}": case.dtype not in LOW,
            f"takes dense and causal masks and windows, not {words}": not dense and not window,
            f"shows some queries later keys in windows over 256 that are no multiple of 128, such as {keys}": keys
            > 256
            and keys % 128 > 0,
            "is the same kernel as FlashAttention-3's": dense and case.dtype == "bf16",
            "takes one batch item": case.batch != 1,
        }
        return super().why_not(case, device) + holding(reasons)

    def laid(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)

    def attend(self, case: Any, one: Any) -> Attend:
        sides = {"q": case.q_len, "k": case.kv_len}
        ends = {f"cu_seqlens_{x}": one.q.new_tensor([0, n], dtype=torch.int32) for x, n in sides.items()}
        call = partial(
            imported("vllm.vllm_flash_attn").flash_attn_varlen_func,
            **ends,
            **{f"max_seqlen_{x}": n for x, n in sides.items()},
            causal=case.mask_text.causal,
            window_size=next(([int(n) - 1, 0] for n in case.mask_text.numbers), None),
            fa_version=3,
        )
        return lambda q, k, v: call(q[0], k[0], v[0])[None]


@dataclass(frozen=True)
class FlashInferBlocks(AttentionPeer):
    """FlashInfer's block-sparse attention on Hopper (backend "cake"), with its plan made before: the forward pass."""

    def why_not(self, case: Any, device: torch.device) -> list[str]:
        return super().why_not(case, device) + flashinfer_limits(case)

    def attend(self, case: Any, one: Any) -> Attend:
        plan = flashinfer_plan(one)
        return lambda q, k, v: plan.run(q[0], k[0], v[0])[None]


def flashinfer_limits(case: Any) -> list[str]:
    """Why FlashInfer's block-sparse attention on Hopper cannot run a case, its dtype aside. It refuses rows of more
    than 64 of its blocks when it plans.
    """
    dims, sides = (case.dim, case.v_dim), (case.q_len, case.kv_len)
    reasons = {
        "has no backward pass": case.passes != FORWARD,
        f"takes lists of whole blocks, not {case.mask_text.words}": not case.mask_text.uniform,
        f"takes heads of 128, not {case.dim} and {case.v_dim}": dims != (128, 128),
        f"results are bf16, not {case.dtype}": case.dtype != "bf16",
        "takes one batch item": case.batch != 1,
        "its lists are of the heads of keys": case.heads != case.kv_heads,
        f"takes lengths of whole blocks of {FLASHINFER_BLOCK}": any(x % FLASHINFER_BLOCK for x in sides),
    }
    return holding(reasons)


def flashinfer_plan(one: Any, **more: Any) -> Any:
    """Its plan of the mask of a set, with q_data_type and scales if q, k and v are in FP8."""
    module, kept = imported("flashinfer.cake_vsa_sm90"), in_blocks_of(one, FLASHINFER_BLOCK)
    heads, *grid = kept.shape
    sizes = (torch.full((heads, n), FLASHINFER_BLOCK, dtype=torch.int32, device=kept.device) for n in grid)
    return module.create_plan(one.q.device, kept, *sizes, heads, heads, one.q.shape[-1], **more)


def in_blocks_of(one: Any, side: int) -> Tensor:
    """bool [H, rows, columns]: the blocks of `side` that a mask keeps. Raises UnavailableError for partial ones."""
    if one.mask.partial_blocks:
        raise UnavailableError("takes whole blocks")
    lists, (rows, columns) = one.mask.to_fa4(), one.mask.grid
    count, index = lists.full_block_cnt[0], lists.full_block_idx[0].long()
    listed = torch.arange(index.shape[-1], device=index.device) < count[..., None]
    kept = torch.zeros(len(count), rows, columns + 1, dtype=torch.bool, device=index.device)
    kept = kept.scatter_(-1, index.where(listed, columns), True)[..., :columns]
    for dim, block in zip((1, 2), one.mask.block, strict=True):
        kept = kept.repeat_interleave(block // side, dim)
    return kept.expand(one.q.shape[1], -1, -1).contiguous()


PEERS: tuple[Peer, ...] = (
    DenseAttention("cudnn", "cuDNN dense", "cuda", "CUDNN_ATTENTION"),
    Flash4("fa4", "FlashAttention-4", "cuda"),
    Flex("flex", "FlexAttention", "cuda"),
    CudnnBlocks("cudnn_bsa", "cuDNN block-sparse", "cuda"),
    CudnnFlex("cudnn_flex", "cuDNN FlexAttention", "cuda"),
    Flash3("fa3", "FlashAttention-3", "cuda"),
    Flash3Windows("fa3_vllm", "FlashAttention-3 of vLLM", "cuda"),
    FlashInferBlocks("flashinfer", "FlashInfer block-sparse", "cuda"),
    DenseAttention("sdpa", "torch dense", "cpu"),
)
GRAD_PEERS: tuple[Peer, ...] = (
    *PEERS,
    Flash4("fa4_ordered", "FlashAttention-4, ordered", "cuda", ordered=True),
)
