"""Documented failures of torch.sparse's BSR, one class each; the table TORCH_BSR is at the end.

Subjects of the issues were looked up on 2026-11-21, except PR #174039, which was not found, and PR #132646, which is
known from a thread that names it. Some concern torch's other sparse layouts and apply to BSR too.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import sparsek as sk
from benchmarks.torch_bsr.attempts import Case, Measured, Operands, in_a_process, memory_of
from benchmarks.torch_bsr.triton_kernels import TRITON_KERNELS


class _Product(Case):
    """a @ x"""

    def attempt(self, o: Operands) -> Any:
        return o.a @ o.x


class MemoryRagged(Case):
    """a @ x where the columns of x are no multiple of the block: memory"""

    name = "memory-ragged-n"
    where = "PR #85551"
    seen_on = "cuda"
    sizes = (1024, 1024, 264)
    block = (64, 64)

    def attempt(self, o: Operands) -> Any:
        even = o.x[:, :256].contiguous()
        return memory_of(lambda: o.a @ o.x, lambda: o.a @ even, "with 256 columns")

    def dense(self, o: Operands) -> Tensor:
        return o.a @ o.x


class MemoryBlock48(Case):
    """a @ x in blocks of 48, no power of 2: memory"""

    name = "memory-block-48"
    where = "PR #85551"
    seen_on = "cuda"
    sizes = (960, 960, 192)
    block = (48, 48)

    def theirs(self, o: Operands) -> Any:
        usual = sk.random_bsr(960, 960, 64, 0.25, dtype=o.x.dtype, device=o.x.device).to_torch()
        return memory_of(lambda: o.a @ o.x, lambda: usual @ o.x, "in blocks of 64")

    def ours(self, o: Operands) -> Any:
        usual = sk.random_bsr(960, 960, 64, 0.25, dtype=o.x.dtype, device=o.x.device)
        return memory_of(lambda: o.a @ o.x, lambda: usual @ o.x, "in blocks of 64")

    def dense(self, o: Operands) -> Tensor:
        return o.a @ o.x


class GradWeight(Case):
    """gradient of a in a @ x"""

    name = "grad-weight"
    where = "#86963"

    def theirs(self, o: Operands) -> Any:
        w = o.a.detach().requires_grad_()
        (w @ o.x).backward(o.dy)
        if w.grad.layout == torch.sparse_bsr:
            return w.grad
        dense = f"the gradient is dense, {w.numel() / o.stored.sum():.1f} times what is stored"
        return Measured(w.grad * o.stored, dense, "costly")

    def ours(self, o: Operands) -> Any:
        w = o.a.detach().requires_grad_()
        (w @ o.x).backward(o.dy)
        return w.grad

    def dense(self, o: Operands) -> Tensor:
        return (o.dy @ o.x.mT) * o.stored


class GradInput(Case):
    """gradient of x in a @ x, a fixed"""

    name = "grad-input"
    where = "#68621"

    def attempt(self, o: Operands) -> Any:
        x = o.x.clone().requires_grad_()
        (o.a @ x).backward(o.dy)
        return x.grad

    def dense(self, o: Operands) -> Tensor:
        return o.a.mT @ o.dy


class GradLinear(Case):
    """gradient of the input of linear(x, a), tokens in a batch"""

    name = "grad-linear"
    where = "PR #86137"

    def theirs(self, o: Operands) -> Any:
        x = o.batch.mT.contiguous().requires_grad_()
        functional.linear(x, o.a).sum().backward()
        return x.grad

    def ours(self, o: Operands) -> Any:
        x = o.batch.mT.contiguous().requires_grad_()
        sk.linear(x, o.a).sum().backward()
        return x.grad

    def dense(self, o: Operands) -> Tensor:
        return (torch.ones_like(o.left) @ o.a).expand(3, -1, -1)


class GradValues(Case):
    """gradient of the values that a matrix is built from"""

    name = "grad-values"
    where = "#98929"

    def theirs(self, o: Operands) -> Any:
        values = o.a.values().clone().requires_grad_()
        parts = o.a.crow_indices(), o.a.col_indices()
        w = torch.sparse_bsr_tensor(*parts, values, size=o.a.shape, device=values.device)
        (w @ o.x).backward(o.dy)
        return torch.sparse_bsr_tensor(*parts, values.grad, size=o.a.shape, device=values.device)

    def ours(self, o: Operands) -> Any:
        values = o.a.values.clone().requires_grad_()
        (sk.BSR(o.a.pattern, values) @ o.x).backward(o.dy)
        return sk.BSR(o.a.pattern, values.grad)

    def dense(self, o: Operands) -> Tensor:
        return (o.dy @ o.x.mT) * o.stored


class GradSampled(Case):
    """gradient of x in (x @ y) sampled at the blocks of a"""

    name = "grad-sddmm"
    where = "#105548"

    def theirs(self, o: Operands) -> Any:
        x = o.dy.clone().requires_grad_()
        sampled = torch.sparse.sampled_addmm(o.a, x, o.x.mT, beta=0.0)
        return torch.autograd.grad(sampled, x, o.a)[0]

    def ours(self, o: Operands) -> Any:
        x = o.dy.clone().requires_grad_()
        sampled = sk.sddmm(x, o.x.mT, o.a.pattern)
        return torch.autograd.grad(sampled.values, x, o.a.values)[0]

    def dense(self, o: Operands) -> Tensor:
        return o.a @ o.x


class GradSparseSparse(Case):
    """gradient of a in a @ c, both sparse"""

    name = "grad-sparse-sparse"
    where = "PR #174039"

    def theirs(self, o: Operands) -> Any:
        w = o.a.detach().requires_grad_()
        (w @ o.c).to_dense().sum().backward()
        return w.grad

    def ours(self, o: Operands) -> Any:
        w = o.a.detach().requires_grad_()
        sk.spgemm(w, o.c).sum().backward()
        return w.grad

    def dense(self, o: Operands) -> Tensor:
        return (o.a.new_ones(o.a.shape[0], o.c.shape[1]) @ o.c.mT) * o.stored


class Batched(_Product):
    """a @ x for a batch of x"""

    name = "batched"
    where = "#14489"

    def attempt(self, o: Operands) -> Any:
        return o.a @ o.batch


class Bf16(_Product):
    """a @ x in bf16"""

    name = "dtype-bf16"
    where = "#80574, #97668"
    dtype = torch.bfloat16


class Fp16(_Product):
    """a @ x in fp16"""

    name = "dtype-fp16"
    where = "#41069"
    dtype = torch.float16


class Convert(Case):
    """a in another dtype"""

    name = "dtype-convert"
    where = "#88419"
    dtype = torch.float32

    def theirs(self, o: Operands) -> Any:
        return o.a.to(torch.float64)

    def ours(self, o: Operands) -> Any:
        return o.a.to(dtype=torch.float64)

    def dense(self, o: Operands) -> Tensor:
        return o.a


class Rectangular(_Product):
    """a @ x in blocks of 32x64"""

    name = "block-32x64"
    where = "MKL's path"
    seen_on = "cpu"
    block = (32, 64)


class SmallBlocks(Case):
    """a @ x in blocks of 8"""

    name = "block-8"
    where = "_triton_ops.py"
    seen_on = "cuda"

    def theirs(self, o: Operands) -> Any:
        return o.a.to_dense().to_sparse_bsr((8, 8)) @ o.x

    def ours(self, o: Operands) -> Any:
        return sk.BSR.from_dense(o.a.to_dense(), block=8, threshold=0.0) @ o.x

    def dense(self, o: Operands) -> Tensor:
        return o.a @ o.x


class RaggedSides(Case):
    """a @ x where no block divides the sides of a"""

    name = "ragged-sides"
    where = "to_sparse_bsr"
    sizes = (250, 377, 96)

    def theirs(self, o: Operands) -> Any:
        return o.a.to_dense().to_sparse_bsr((32, 32)) @ o.x

    def ours(self, o: Operands) -> Any:
        return sk.BSR.from_dense(o.a.to_dense(), block=32, threshold=0.0) @ o.x

    def dense(self, o: Operands) -> Tensor:
        return o.a @ o.x


class Right(Case):
    """x @ a: the sparse operand on the right"""

    name = "right"
    where = "#54309"

    def attempt(self, o: Operands) -> Any:
        return o.left @ o.a


class Transposed(Case):
    """a.T @ dy"""

    name = "transposed"
    where = "#97668"

    def theirs(self, o: Operands) -> Any:
        return o.a.t() @ o.dy

    def ours(self, o: Operands) -> Any:
        return o.a.T @ o.dy

    def dense(self, o: Operands) -> Tensor:
        return o.a.mT @ o.dy


class SparseSparse(Case):
    """a @ c, both sparse"""

    name = "sparse-sparse"
    where = "#181494"

    def attempt(self, o: Operands) -> Any:
        return o.a @ o.c


class Sampled(Case):
    """(x @ y) sampled at the blocks of a"""

    name = "sddmm"
    where = "#181494"

    def theirs(self, o: Operands) -> Any:
        return torch.sparse.sampled_addmm(o.a, o.dy, o.x.mT, beta=0.0)

    def ours(self, o: Operands) -> Any:
        return sk.sddmm(o.dy, o.x.mT, o.a.pattern)

    def dense(self, o: Operands) -> Tensor:
        return (o.dy @ o.x.mT) * o.stored


class Add(Case):
    """a + a2"""

    name = "op-add"
    where = "#94185"

    def attempt(self, o: Operands) -> Any:
        return o.a + o.a2


class Subtract(Case):
    """a - a2"""

    name = "op-subtract"
    where = "#181494"

    def attempt(self, o: Operands) -> Any:
        return o.a - o.a2


class Divide(Case):
    """a / 3"""

    name = "op-divide"
    where = "#181494"

    def attempt(self, o: Operands) -> Any:
        return o.a / 3


class Multiply(Case):
    """a times a2, element by element"""

    name = "op-multiply"
    where = "#181494"

    def theirs(self, o: Operands) -> Any:
        return o.a * o.a2

    def ours(self, o: Operands) -> Any:
        return sk.BSR(
            o.a.pattern, o.a.values * o.a2.values
        )  # `*` between matrices is refused: it could mean @

    def dense(self, o: Operands) -> Tensor:
        return o.a * o.a2


class Sum(Case):
    """sums of the rows of a"""

    name = "op-sum"
    where = "#111509"

    def attempt(self, o: Operands) -> Any:
        return o.a.sum(1)


class Norm(Case):
    """norm of a"""

    name = "op-norm"
    roundings = 4
    where = "#181494"

    def attempt(self, o: Operands) -> Any:
        return o.a.norm()


class Slice(Case):
    """the first two block rows of a"""

    name = "op-slice"
    where = "#181494"

    def theirs(self, o: Operands) -> Any:
        return o.a[:64]

    def ours(self, o: Operands) -> Any:
        return o.a.block_row_slice(0, 2)

    def dense(self, o: Operands) -> Tensor:
        return o.a[:64]


class Deepcopy(Case):
    """deepcopy of a, as a module does with its weights"""

    name = "op-deepcopy"
    where = "#181494"

    def attempt(self, o: Operands) -> Any:
        return deepcopy(o.a)

    def dense(self, o: Operands) -> Tensor:
        return o.a


class Compiled(Case):
    """a @ x under torch.compile(fullgraph=True)"""

    name = "compile"
    where = "#171865"

    def attempt(self, o: Operands) -> Any:
        return torch.compile(lambda a, x: a @ x, fullgraph=True)(o.a, o.x)

    def dense(self, o: Operands) -> Tensor:
        return o.a @ o.x


class CompiledTraining(Case):
    """gradient of x through a compiled relu(a @ x)"""

    name = "compile-grad"
    where = "#171865"

    def attempt(self, o: Operands) -> Any:
        x = o.x.clone().requires_grad_()
        torch.compile(lambda a, x: (a @ x).relu(), fullgraph=True)(o.a, x).backward(o.dy)
        return x.grad

    def dense(self, o: Operands) -> Tensor:
        return o.a.mT @ (o.dy * (o.a @ o.x > 0))


class CompiledConversion(Case):
    """dense to BSR under torch.compile"""

    name = "compile-convert"
    where = "#150083, #170686"

    def theirs(self, o: Operands) -> Any:
        return torch.compile(lambda w: w.to_sparse_bsr((32, 32)))(o.a.to_dense())

    def ours(self, o: Operands) -> Any:
        return torch.compile(lambda w: sk.BSR.from_dense(w, 32, threshold=0.0))(o.a.to_dense())

    def dense(self, o: Operands) -> Tensor:
        return o.a


class ZeroBlock(Case):
    """blocks without elements"""

    name = "zero-block"
    where = "#190048"

    def theirs(self, o: Operands) -> Any:
        return in_a_process(
            "import torch\n"
            "values = torch.empty((0, 0, 3, 2, 1), dtype=torch.int64)\n"
            "crow, col = torch.tensor([0, 1, 1]), torch.tensor([0])\n"
            "torch.sparse_bsr_tensor(crow, col, values, check_invariants=False).to_dense()"
        )

    def ours(self, o: Operands) -> Any:
        return sk.BSR(sk.BlockPattern((0, 0), (0, 3), o.a.pattern.indptr[:1], o.a.pattern.indices[:0]), o.x)


TORCH_BSR: tuple[Case, ...] = (
    MemoryRagged(),
    MemoryBlock48(),
    GradWeight(),
    GradInput(),
    GradLinear(),
    GradValues(),
    GradSampled(),
    GradSparseSparse(),
    Batched(),
    Bf16(),
    Fp16(),
    Convert(),
    Rectangular(),
    SmallBlocks(),
    RaggedSides(),
    Right(),
    Transposed(),
    SparseSparse(),
    Sampled(),
    Add(),
    Subtract(),
    Divide(),
    Multiply(),
    Sum(),
    Norm(),
    Slice(),
    Deepcopy(),
    Compiled(),
    CompiledTraining(),
    CompiledConversion(),
    ZeroBlock(),
    *TRITON_KERNELS,
)
