"""What every kernel of attention and of its gradients does that runs on CPU tensors, Triton's interpreter included.

A test file has a class for each kernel: `class TestCpu(Forward): kernel = load("cpu.attention")`. What both passes of
a family do is a test of each `Pass`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.plan.kernels import AttentionCall, AttentionGradCall
from sparsek.engine.table import load
from sparsek.testing.attention_budget import check_attention
from sparsek.testing.poison import poisoned
from tests.attn.attention_cases import MEMBER_CASES, AttentionCase, random_bits
from tests.attn.kernels.backward import grad_cases
from tests.attn.kernels.backward.grad_cases import Inputs, differentiate, inputs, judged, poisoned_keys
from tests.attn.kernels.forward.changes import CHANGES
from tests.attn.kernels.forward.inputs import LAYOUTS, SMALL, normal
from tests.attn.kernels.planned import attend, attention_problem
from tests.attn.mask.members import of_members
from tests.sampling import sampled

layouts = pytest.mark.parametrize("layout", LAYOUTS)
scales = pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 30.0])
changes = pytest.mark.parametrize("name", CHANGES)
members = pytest.mark.parametrize("case", sampled(MEMBER_CASES, 3), ids=str)
of_packed = pytest.mark.parametrize("name", sampled(CHANGES, 1))
PACKED = next(case for case in MEMBER_CASES if case.heads == (24, 2))


def unstored(device: str) -> BlockMask:
    """Some blocks of keys are visited by no query, others by half of them."""
    dense = torch.zeros(100, 300, dtype=torch.bool)
    dense[:, 64:128] = True
    dense[50:, 256:] = True
    return BlockMask.from_dense(dense.to(device), SMALL)


class Pass(NamedTuple):
    """A kernel, what it is given for q, k, v and a mask, how it is run over NaN, its gate and its problem."""

    name: str
    given: Callable[..., Any]
    run: Callable[..., tuple[Tensor, ...]]
    judge: Callable[..., Any]
    problem: Callable[..., Any]

    def __repr__(self) -> str:
        return self.name

    def check(self, given: Any, note: object, config: Any = None) -> tuple[Tensor, ...]:
        """The results, after the gate."""
        found = self.run(load(self.name), given, config)
        gate = self.judge(given, found)
        assert gate.passed, f"{given[3]} {config}, {note}: {gate}"
        return found


def passes(forward: str, backward: str) -> dict[str, Pass]:
    return {
        "fwd": Pass(
            forward,
            lambda q, k, v, mask, **_: (q, k, v, mask),
            lambda kernel, given, config=None: attend(kernel, *given, config=config),
            lambda given, found: check_attention(*given, *found),
            attention_problem,
        ),
        "bwd": Pass(backward, inputs, differentiate, judged, grad_cases.problem),
    }


class Small:
    """A kernel, sizes that suit it, a config, None for the default, and one whose tiles are `narrow`."""

    kernel: Any
    dtype = torch.float32
    dims = (16, 8)
    lengths = (150, 200)
    heads = (4, 2)
    config: Any = None
    narrow: Any = None
    lse_step = 2  # between its elements

    def normal(self, *shape: int, seed: int = 0) -> Tensor:
        return normal(*shape, seed=seed, dtype=self.dtype)

    def operands(
        self, mask: BlockMask, heads: tuple[int, int] = (2, 1), batch: int = 1
    ) -> tuple[Tensor, ...]:
        """q, k and v for `mask`; two heads of q share one of k."""
        d, dv = self.dims
        sides = (2, mask.q_len, d), (1, mask.kv_len, d), (1, mask.kv_len, dv)
        return tuple(self.normal(batch, *side, seed=at) for at, side in enumerate(sides))

    def laid_out(self, layout: str) -> tuple[Any, ...]:
        """q, k, v, what lies as out does, and a mask."""
        (s, t), (d, dv), (hq, hkv) = self.lengths, self.dims, self.heads
        mask = BlockMask.sliding_window(q_len=s, kv_len=t, window=90, sinks=3, block=SMALL, device="cpu")
        sides = (hq, s, d), (hkv, t, d), (hkv, t, dv), (hq, s, dv)
        return *(LAYOUTS[layout](self.normal, 2, *side) for side in sides), mask

    def none_first(self) -> tuple[Any, ...]:
        """Two items, heads of q that share one of k, and queries that see nothing, in blocks of other sides."""
        mask = BlockMask.causal(q_len=70, kv_len=100, block=(128, 64), q_offset=-10, device="cpu")
        return *self.operands(mask, batch=2), mask


class Forward(Small):
    def check(self, q: Any, k: Any, v: Any, mask: BlockMask, config: Any = None, **more: Any) -> None:
        found = attend(self.kernel, q, k, v, mask, self.config if config is None else config, **more)
        gate = check_attention(q, k, v, mask, *found, **more)
        assert gate.passed, f"{mask} {config}: {gate}"

    @layouts
    def test_inputs_may_have_any_strides(self, layout: str) -> None:
        q, k, v, _, mask = self.laid_out(layout)
        self.check(q, k, v, mask)

    def test_outputs_have_any_strides_and_nothing_beside_them_is_written(self) -> None:
        mask = BlockMask.sliding_window(100, 40, block=SMALL, device="cpu")
        q, k, v = self.operands(mask)
        p, dv = attention_problem(q, k, v, mask), self.dims[1]
        c = self.kernel.default(p) if self.config is None else self.config
        wide, gaps = poisoned((1, 110, 3, dv + 8), q.dtype), poisoned((1, 2, 100, 2 * dv), q.dtype)
        lse = poisoned((1, 2, 100 * self.lse_step), torch.float32)[..., :: self.lse_step]
        forms = (wide, wide[:, :100, :2, :dv].transpose(1, 2), None), (gaps, gaps[..., ::2], lse)
        for room, out, of_lse in forms:
            call = AttentionCall(q, k, v, mask, 0.2, out, of_lse)
            self.kernel.launch(c, self.kernel.prepare(p, c, mask), call)
            assert check_attention(q, k, v, mask, out, of_lse, scale=0.2).passed
            out.fill_(torch.nan)
            assert room.isnan().all()

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    def test_keys_of_blocks_that_are_not_stored_and_beyond_the_last_are_never_read(self, bad: float) -> None:
        q, k, v = self.operands(BlockMask.full(q_len=100, kv_len=320, block=SMALL, device="cpu"))
        for x in (k, v):
            x[:, :, :64], x[:, :, 128:256], x[:, :, 300:] = bad, bad, bad
        self.check(q, k[:, :, :300], v[:, :, :300], unstored("cpu"))

    @scales
    def test_any_scale_is_within_budget(self, scale: float) -> None:
        mask = BlockMask.causal(100, block=SMALL, device="cpu")
        q, k, v = self.operands(mask)
        self.check(q, k, v, mask, scale=scale)

    def test_large_scores_do_not_overflow(self) -> None:
        mask = BlockMask.causal(200, block=SMALL, device="cpu")
        q, k, v = self.operands(mask)
        self.check(q * 50, k * 50, v, mask)

    def test_the_same_inputs_give_the_same_bits(self) -> None:
        mask = random_bits("cpu", (100, 130), SMALL, density=1.5)
        q, k, v = self.operands(mask)
        first, *others = (attend(self.kernel, q, k, v, mask, self.config) for _ in range(3))
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))

    @changes
    def test_changed_scores_are_within_budget(self, name: str) -> None:
        q, k, v, mask = self.none_first()
        self.check(3 * q, k, v, mask, self.narrow, scores=CHANGES[name](q))

    @members
    def test_masks_by_members_are_within_budget(self, case: AttentionCase) -> None:
        self.check(*case.make(dtype=self.dtype))

    @of_packed
    def test_changed_scores_of_packed_heads_are_within_budget(self, name: str) -> None:
        q, k, v, mask = PACKED.make(dtype=self.dtype)
        self.check(3 * q, k, v, mask, self.narrow, scores=CHANGES[name](q))

    def test_blocks_that_a_union_lacks_never_reach_its_tokens(self) -> None:
        """Tokens of the first tile have block 0, of the second block 1, and of the third both."""
        member = torch.tensor([[True, False], [False, True], [True, True]]).repeat_interleave(16, 0)
        hi = torch.full((1, 48), 100, dtype=torch.int32)
        mask = of_members(member[None, None], torch.zeros_like(hi), hi, 100, (16, 64)).mask
        d, dv = self.dims
        q, k, v = (
            self.normal(1, 8, 48, d),
            self.normal(1, 1, 100, d, seed=1),
            self.normal(1, 1, 100, dv, seed=2),
        )
        wanted = attend(self.kernel, q, k, v, mask, self.config)
        k[:, :, :64], v[:, :, :64] = 90.0, 90.0  # the interpreter warns of maxima over NaN
        for x, y in zip(wanted, attend(self.kernel, q, k, v, mask, self.config), strict=True):
            assert torch.equal(x[:, :, 16:32], y[:, :, 16:32])
            assert x.isfinite().all()


class Backward(Small):
    def given(self, mask: BlockMask) -> Inputs:
        q, k, v = self.operands(mask)
        return inputs(q, k, v, mask)

    def run(self, given: Inputs, config: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        return differentiate(self.kernel, given, self.config if config is None else config)

    def check(self, given: Inputs, config: Any = None) -> None:
        gate = judged(given, self.run(given, config))
        assert gate.passed, f"{given.mask} {config}: {gate}"

    @layouts
    def test_inputs_and_gradients_may_have_any_strides(self, layout: str) -> None:
        q, k, v, grad, mask = self.laid_out(layout)
        of_lse = self.normal(1).float().expand(grad.shape[:3])
        self.check(inputs(q, k, v, mask, with_lse=True)._replace(grad=grad, grad_lse=of_lse))

    def test_the_gradient_of_out_may_be_that_of_a_sum(self) -> None:
        mask = BlockMask.causal(q_len=70, kv_len=100, block=SMALL, device="cpu")
        given = self.given(mask)
        self.check(given._replace(grad=self.normal(self.dims[1]).expand(given.grad.shape)))

    def test_results_have_any_strides_and_nothing_beside_them_is_written(self) -> None:
        mask = BlockMask.sliding_window(100, 40, block=SMALL, device="cpu")
        given = self.given(mask)
        q, k, v = given[:3]
        p = grad_cases.problem(q, k, v, mask)
        c = self.kernel.default(p) if self.config is None else self.config
        rooms = [poisoned((1, 110, 3, x.shape[3] + 8), x.dtype) for x in (q, k, v)]
        found: Any = tuple(
            room[:, :100, : x.shape[1], : x.shape[3]].transpose(1, 2)
            for room, x in zip(rooms, (q, k, v), strict=True)
        )
        self.kernel.launch(c, self.kernel.prepare(p, c, mask), AttentionGradCall(*given[:9], *found))
        assert judged(given, found).passed
        for room, x in zip(rooms, found, strict=True):
            x.fill_(torch.nan)
            assert room.isnan().all()

    def test_keys_of_blocks_that_are_not_stored_are_never_read(self) -> None:
        dtype = "fp32" if self.dtype == torch.float32 else "fp16"
        given = poisoned_keys(AttentionCase("", unstored, dims=self.dims, dtype=dtype))
        assert given.k.isnan().any()
        assert given.v.isnan().any()
        self.check(given)

    def test_memory_behind_the_last_key_and_query_is_never_read(self) -> None:
        mask = BlockMask.causal(q_len=100, kv_len=90, block=SMALL, device="cpu")
        given, framed = self.given(mask), {}
        for name in ("q", "k", "v", "grad"):
            x = getattr(given, name)
            room = poisoned((1, x.shape[1], 128, x.shape[3]), x.dtype)
            room[:, :, : x.shape[2]] = x
            framed[name] = room[:, :, : x.shape[2]]
        self.check(given._replace(**framed))

    @scales
    def test_any_scale_is_within_budget(self, scale: float) -> None:
        mask = BlockMask.causal(100, block=SMALL, device="cpu")
        q, k, v = self.operands(mask)
        self.check(inputs(q * min(1.0, 0.2 / scale), k, v, mask, scale=scale))

    def test_large_scores_do_not_overflow(self) -> None:
        mask = BlockMask.causal(100, block=SMALL, device="cpu")
        q, k, v = self.operands(mask)
        assert all(x.isfinite().all() for x in self.run(inputs(q * 50, k * 50, v, mask)))

    @changes
    def test_changed_scores_are_within_budget(self, name: str) -> None:
        q, k, v, mask = self.none_first()
        given = inputs(3 * q, k, v, mask, with_lse=True, scores=CHANGES[name](q))
        for config in {None: None, str(self.narrow): self.narrow}.values() if name == "all" else (None,):
            self.check(given, config)

    @members
    def test_masks_by_members_are_within_budget(self, case: AttentionCase) -> None:
        self.check(inputs(*case.make(dtype=self.dtype), with_lse=True))

    @of_packed
    def test_changed_scores_of_packed_heads_are_within_budget(self, name: str) -> None:
        q, k, v, mask = PACKED.make(dtype=self.dtype)
        self.check(inputs(3 * q, k, v, mask, with_lse=True, scores=CHANGES[name](q)))
