"""FlashInfer's two wrappers of block-sparse attention (0.7.2), on SparseK's kernels.

    from sparsek.integrations.flashinfer import VariableBlockSparseAttentionWrapper    # was: from flashinfer

`plan` keeps the lists where they are and does not wait for a GPU, except for blocks that are no multiples of 64 and for
masks of elements, which are evaluated at every query and key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsek.attn.mask.mask import BlockMask
from sparsek.attn.ops.attention import attention
from sparsek.core import arguments
from sparsek.core.arguments import INT32_MAX
from sparsek.core.errors import InvalidInput
from sparsek.integrations.flashinfer_masks import (
    BlockGrid,
    Padded,
    WrapperSetting,
    by_positions,
    check_sums,
    scores_of,
)
from sparsek.integrations.foreign_options import (
    absent,
    check_operands,
    check_shape,
    ints_on,
    refusing,
)

NO_FP8 = (None, "attention has no FP8 operands")
NO_ROTATION = ("NONE", "apply rotary embeddings before the call")
NHD: dict[str, tuple[Any, str]] = {"kv_layout": ("NHD", "k and v are [N, num_kv_heads, head_dim]")}
HND: dict[str, tuple[Any, str]] = {"kv_layout": ("HND", "q, k and v are [heads, tokens, head_dim]")}
IN_PAGES = "call sparsek.attention_paged, which takes lengths and tables of pages on the device"

__getattr__ = absent(
    __name__,
    BatchPrefillWithPagedKVCacheWrapper=IN_PAGES,
    BatchDecodeWithPagedKVCacheWrapper=IN_PAGES,
    BatchPrefillWithRaggedKVCacheWrapper="call sparsek.attention_varlen",
    single_prefill_with_kv_cache="call sparsek.attention",
    single_decode_with_kv_cache="call sparsek.attention",
    merge_state="call sparsek.merge_attention, with lse of the natural logarithm",
)


class _Wrapper:
    """What both wrappers have: the device of a workspace that is not needed."""

    def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto") -> None:
        self.device = arguments.tensor("float_workspace_buffer", float_workspace_buffer).device
        arguments.text("backend", backend)

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Do nothing: SparseK needs no workspace.

        Args:
            float_workspace_buffer: Not read.
            int_workspace_buffer: Not read.
        """


class BlockSparseAttentionWrapper(_Wrapper):
    """Attention with a block-sparse mask in BSR form, as lists, or as a map for each head.

    Blocks of R x C with R and C multiples of 64 are planned on the device. Of any other size, and with `mask`, the mask
    is evaluated at every query and key, once, in chunks: O(M * N) time.

    Args:
        float_workspace_buffer: A tensor on the device of the lists. SparseK needs no workspace.
        backend: Any name of FlashInfer's; SparseK chooses its kernel itself.

    Source: FlashInfer, Ye et al., arXiv:2501.01005.

    Example:
        >>> import torch
        >>> from sparsek.integrations.flashinfer import BlockSparseAttentionWrapper
        >>> indptr, indices = torch.tensor([0, 1, 3]), torch.tensor([1, 0, 1])
        >>> wrapper = BlockSparseAttentionWrapper(torch.empty(0))
        >>> wrapper.plan(indptr, indices, 128, 128, 64, 64, 2, 2, 32, q_data_type="float32", o_data_type="float32")
        >>> q, k, v = torch.randn(3, 128, 2, 32).unbind()
        >>> wrapper.run(q, k, v).shape
        torch.Size([128, 2, 32])
    """

    @refusing("BlockSparseAttentionWrapper", **NHD)
    def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, backend)
        self._setting: WrapperSetting | None = None
        self._mask: BlockMask | None = None

    @refusing(
        "BlockSparseAttentionWrapper.plan", packed_mask=(None, "pass mask=, bool [nnz, R, C]"), q_scale=NO_FP8,
        k_scale=NO_FP8, v_scale=NO_FP8, pos_encoding_mode=NO_ROTATION,
    )  # fmt: skip
    def plan(
        self,
        indptr: Tensor | None,
        indices: Tensor | None,
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: Tensor | None = None,
        packed_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype = "float16",
        non_blocking: bool = True,
        block_mask: Tensor | None = None,
        kv_block_lens: Tensor | None = None,
        q2k_indices: Tensor | None = None,
        q2k_num: Tensor | None = None,
        kv_splits: int | str | None = None,
        use_clc: bool | None = None,
        q_scale: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """Make the mask that `run` applies, from indptr and indices, from block_mask, or from q2k_indices.

        Args:
            indptr: int [MB + 1], MB = ceil(M / R): row i has the entries indptr[i] to indptr[i + 1] of `indices`.
            indices: int [nnz]: key blocks below NB = N / C.
            M: Queries.
            N: Keys, a multiple of C.
            R: Queries of a block.
            C: Keys of a block.
            num_qo_heads: Heads of q.
            num_kv_heads: Heads of k and v, a divisor.
            head_dim: The dim of each head.
            mask: bool [nnz, R, C]: which elements of each stored block are seen; all for None. With indptr only.
            packed_mask: Must be None: pass `mask`.
            causal: Whether query i sees no key after i + N - M. Not with `mask`, as in FlashInfer. Its kernels count
                the keys of a row's blocks instead, which is the same where the last block of each row is on the
                diagonal.
            pos_encoding_mode: Must be "NONE".
            use_fp16_qk_reduction: Not read: scores are summed in float32.
            logits_soft_cap: Scores become cap * tanh(score / cap); None or 0 for none.
            sm_scale: The factor of the scores; head_dim**-0.5 for None.
            rope_scale: Not read, since there is no rotation.
            rope_theta: Not read.
            q_data_type: The dtype of q, a torch dtype or its name.
            kv_data_type: The dtype of k and v; that of q for None.
            o_data_type: The dtype of the result.
            non_blocking: Not read: nothing is copied.
            block_mask: bool [Hq or Hkv, MB, NB]. Each head of q may have blocks of its own. With it, indptr and indices
                are not read, as in the backends of FlashInfer that have it.
            kv_block_lens: int [NB]: the valid keys of each block, its first ones.
            q2k_indices: int [Hq, MB, n]: key blocks of each row. Not with block_mask, nor with indptr and indices.
            q2k_num: int [Hq, MB]: how many of them count; all for None.
            kv_splits: Not read.
            use_clc: Not read.
            q_scale: Must be None.
            k_scale: Must be None.
            v_scale: Must be None.

        Raises:
            InvalidInput: For options that SparseK does not have, and lists that do not fit.
        """
        heads, types = (num_qo_heads, num_kv_heads, head_dim), (q_data_type, kv_data_type, o_data_type)
        setting = WrapperSetting.of(heads, logits_soft_cap, sm_scale, types)
        sizes = [
            arguments.integer(name, n, 1, INT32_MAX) for name, n in (("M", M), ("N", N), ("R", R), ("C", C))
        ]
        grid = BlockGrid(*sizes, device=self.device)
        causal = arguments.flag("causal", causal) and mask is None
        if block_mask is not None:
            indptr = indices = None
        given = [each is not None for each in (indptr, block_mask, q2k_indices)]
        if sum(given) != 1 or (indptr is None) != (indices is None):
            raise InvalidInput("give one of indptr with indices, block_mask, and q2k_indices")
        if mask is not None and indptr is None:
            raise InvalidInput(
                "mask has the elements of the blocks in indices; give indptr and indices with it, and no block_mask"
            )
        if block_mask is not None:
            table = grid.of_map(block_mask, setting.heads)
        elif q2k_indices is not None:
            table = grid.of_lists(q2k_indices, q2k_num, setting.heads)
        else:
            table = grid.of_rows(indptr, indices)
        lens = grid.lens(kv_block_lens)
        if mask is None:
            self._mask = grid.by_blocks(table, causal, lens)
        else:
            arguments.tensor("mask", mask, (torch.bool,), 3)
            right = (indices.shape[0] if indices is not None else 0, grid.R, grid.C)
            check_shape("mask", mask, right, "[nnz, R, C]")
            self._mask = grid.by_elements(table, causal, lens, mask)
        self._setting = setting

    begin_forward = plan

    @refusing("BlockSparseAttentionWrapper.run", scale_q=NO_FP8, scale_k=NO_FP8, scale_v=NO_FP8)
    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale_q: Tensor | None = None,
        scale_k: Tensor | None = None,
        scale_v: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """Return attention by the mask of `plan`.

        Args:
            q: [M, Hq, D].
            k: [N, Hkv, D].
            v: [N, Hkv, D].
            scale_q: Must be None.
            scale_k: Must be None.
            scale_v: Must be None.
            out: Where the result is copied to, [M, Hq, D].
            lse: Where the lse is copied to, float32 [M, Hq].
            return_lse: Whether to return (out, lse).
            enable_pdl: Not read.

        Returns:
            out [M, Hq, D], 0 where a query sees no key; lse float32 [M, Hq], the logarithm to base 2, -inf there.

        Raises:
            InvalidInput: Before `plan`, and for tensors that it was not for.
        """
        if self._mask is None or self._setting is None:
            raise InvalidInput("BlockSparseAttentionWrapper.run before plan; call plan first")
        check_operands(q, k, v, "[tokens, H, D]")
        self._setting.check(q, k, v, 1)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        found, sums = attention(q, k, v, self._mask, return_lse=True, **self._setting.scores)
        return self._setting.results(found[0].transpose(0, 1), sums[0].T, out, lse, return_lse)

    @refusing("BlockSparseAttentionWrapper.forward", pos_encoding_mode=NO_ROTATION)
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale_q: Tensor | None = None,
        scale_k: Tensor | None = None,
        scale_v: Tensor | None = None,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor:
        """Return `run(q, k, v)`, deprecated in FlashInfer. Its options replace those of `plan`, also for later calls.

        The arguments are those of `run` and of `plan`; sm_scale None is D**-0.5.

        Returns:
            out [M, Hq, D], as `run`.

        Raises:
            InvalidInput: As `run`, and for options that SparseK does not have.
        """
        scores = scores_of(logits_soft_cap, sm_scale)
        if self._setting is not None:
            self._setting = self._setting._replace(scores=scores)
        return self.run(q, k, v, scale_q, scale_k, scale_v)

    def end_forward(self) -> None:
        """Do nothing, as in FlashInfer."""


class VariableBlockSparseAttentionWrapper(_Wrapper):
    """Attention with a map of blocks for each head of k, whose rows and columns have sizes of their own.

    Each block is padded to a multiple of 64 tokens on the device, and the result is gathered back: nothing waits for a
    GPU, and time follows the padded blocks. With `causal` the mask is evaluated at every query and key instead.

    Args:
        float_workspace_buffer: A tensor on the device of the map. SparseK needs no workspace.
        backend: Any name of FlashInfer's; SparseK chooses its kernel itself.

    Source: FlashInfer, Ye et al., arXiv:2501.01005.

    Example:
        >>> import torch
        >>> from sparsek.integrations.flashinfer import VariableBlockSparseAttentionWrapper
        >>> blocks = torch.tensor([[[0, 0, 1], [1, 0, 1], [0, 1, 1]]], dtype=torch.bool)
        >>> wrapper = VariableBlockSparseAttentionWrapper(torch.empty(0))
        >>> rows, columns = torch.tensor([[1, 2, 3]]), torch.tensor([[3, 1, 2]])
        >>> wrapper.plan(blocks, rows, columns, 1, 1, 32, q_data_type="float32")
        >>> q, k, v = torch.randn(3, 1, 6, 32).unbind()
        >>> wrapper.run(q, k, v).shape
        torch.Size([1, 6, 32])
    """

    @refusing("VariableBlockSparseAttentionWrapper", **HND)
    def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, backend)
        self._planned: tuple[WrapperSetting, Tensor, Tensor, Tensor, bool] | None = None
        self._made: dict[tuple[int, int], Any] = {}

    @refusing("VariableBlockSparseAttentionWrapper.plan", pos_encoding_mode=NO_ROTATION)
    def plan(
        self,
        block_mask_map: Tensor,
        block_row_sz: Tensor,
        block_col_sz: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        """Take the map that `run` applies. Its mask is made at the first `run`, which knows the lengths.

        Args:
            block_mask_map: bool [Hkv, MB, NB]: which blocks the heads of q that share a head of k visit.
            block_row_sz: int [Hkv, MB]: the queries of each row of blocks.
            block_col_sz: int [Hkv, NB]: the keys of each column of blocks.
            num_qo_heads: Heads of q.
            num_kv_heads: Heads of k and v, a divisor.
            head_dim: The dim of each head.
            causal: Whether query i sees no key after i + N - M.
            pos_encoding_mode: Must be "NONE".
            use_fp16_qk_reduction: Not read: scores are summed in float32.
            logits_soft_cap: Scores become cap * tanh(score / cap); None or 0 for none.
            sm_scale: The factor of the scores; head_dim**-0.5 for None.
            rope_scale: Not read, since there is no rotation.
            rope_theta: Not read.
            non_blocking: Not read: nothing is copied.
            q_data_type: The dtype of q and of the result, a torch dtype or its name.
            kv_data_type: The dtype of k and v; that of q for None.

        Raises:
            InvalidInput: For options that SparseK does not have, and a map that does not fit.
        """
        heads, types = (num_qo_heads, num_kv_heads, head_dim), (q_data_type, kv_data_type, q_data_type)
        setting = WrapperSetting.of(heads, logits_soft_cap, sm_scale, types)
        arguments.tensor("block_mask_map", block_mask_map, (torch.bool,), 3)
        arguments.one_device("block_mask_map is", block_mask_map.device, "the workspace is", self.device)
        kv_heads, (rows, columns) = setting.heads[1], block_mask_map.shape[1:]
        check_shape("block_mask_map", block_mask_map, (kv_heads, rows, columns), "[num_kv_heads, MB, NB]")
        block_row_sz = ints_on("block_row_sz", block_row_sz, self.device, 2)
        block_col_sz = ints_on("block_col_sz", block_col_sz, self.device, 2)
        if not rows or not columns:
            raise InvalidInput(
                f"block_mask_map is {list(block_mask_map.shape)}; it must have a row and a column of blocks"
            )
        check_shape("block_row_sz", block_row_sz, (kv_heads, rows), "as block_mask_map")
        check_shape("block_col_sz", block_col_sz, (kv_heads, columns), "as block_mask_map")
        # The caller may write to its own.
        lists = block_mask_map.clone(), block_row_sz.clone(), block_col_sz.clone()
        self._planned = (setting, *lists, arguments.flag("causal", causal))
        self._made = {}

    begin_forward = plan

    @refusing("VariableBlockSparseAttentionWrapper.run")
    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """Return attention by the map of `plan`.

        Args:
            q: [Hq, S, D].
            k: [Hkv, T, D].
            v: [Hkv, T, D].
            out: Where the result is copied to, [Hq, S, D].
            lse: Where the lse is copied to, float32 [Hq, S].
            return_lse: Whether to return (out, lse).
            enable_pdl: Not read.

        Returns:
            out [Hq, S, D], 0 where a query sees no key; lse float32 [Hq, S], the logarithm to base 2, -inf there.

        Raises:
            InvalidInput: Before `plan`, and for tensors that it was not for; for sizes that do not sum to the lengths,
                which are checked on the CPU only. On a GPU such sizes give results without meaning.
        """
        if self._planned is None:
            raise InvalidInput("VariableBlockSparseAttentionWrapper.run before plan; call plan first")
        setting, blocks, rows, columns, causal = self._planned
        check_operands(q, k, v, "[H, tokens, D]")
        setting.check(q, k, v, 0)
        lengths = q.shape[1], k.shape[1]
        if lengths not in self._made:
            check_sums(rows, columns, *lengths)
            self._made[lengths] = (by_positions if causal else Padded.of)(blocks, rows, columns, *lengths)
        made = self._made[lengths]
        if isinstance(made, BlockMask):
            found, sums = attention(q[None], k[None], v[None], made, return_lse=True, **setting.scores)
            found, sums = found[0], sums[0]
        else:
            found, sums = made.attention(q, k, v, setting.scores)
        return setting.results(found, sums, out, lse, return_lse)

    @refusing("VariableBlockSparseAttentionWrapper.forward", pos_encoding_mode=NO_ROTATION)
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Tensor:
        """Return `run(q, k, v)`, deprecated in FlashInfer. Its options replace those of `plan`, also for later calls.

        The arguments are those of `run` and of `plan`; sm_scale None is D**-0.5.

        Returns:
            out [Hq, S, D], as `run`.

        Raises:
            InvalidInput: As `run`, and for options that SparseK does not have.
        """
        scores = scores_of(logits_soft_cap, sm_scale)
        if self._planned is not None:
            self._planned = (self._planned[0]._replace(scores=scores), *self._planned[1:])
        return self.run(q, k, v)
