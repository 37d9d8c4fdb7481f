"""Where the tokens of a batch lie, and which of them see each other.

Everything but attention works on single tokens, so the model reads a batch as one flat list of its real tokens:
padding costs nothing. A layout knows how to make that list, lays it out as rows for the attention kernels, and makes
rows of it again. Letters: N rows, W padded width, T real tokens, D head size, B prompts, R answer width.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from model.kv_cache import KVCache


@lru_cache
def _try_shared_heads(device_type: str, dtype: torch.dtype, head_dim: int) -> bool:
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device_type, enabled=False):
        q = torch.zeros(1, 2, 8, head_dim, dtype=dtype, device=device_type, requires_grad=True)
        out = F.scaled_dot_product_attention(q, q[:, :1], q[:, :1], is_causal=True, enable_gqa=True)
    return "ScaledDotProduct" in out.grad_fn.name()


@torch.compiler.assume_constant_result
def fused_with_shared_heads(device_type: str, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether this torch has a fused kernel here for several query heads a key/value head (torch 2.6 has none on CPU,
    CUDA has none for float32). Without one it would build the score matrix; asked once, by trying it."""
    return _try_shared_heads(device_type, dtype, head_dim)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, dropout: float) -> Tensor:
    """Grouped-query attention [N, heads, W, D] through the fused kernels; grad flows.

    Args: q [N, heads, W, D]; k, v [N, kv heads, S, D]; visible bool [N, 1, W, S] (True = may look), or None: causal
        when W == S, everything visible when W == 1; dropout probability.
    """
    n, heads, width, d = q.shape
    kv_heads = k.shape[1]
    if width == 1:
        # one query a row: the heads that share a key/value head become its query rows, nothing is repeated
        out = F.scaled_dot_product_attention(q.reshape(n, kv_heads, -1, d), k, v, attn_mask=visible, dropout_p=dropout)
        return out.reshape(n, heads, 1, d)
    shared = heads != kv_heads
    if shared and not fused_with_shared_heads(q.device.type, q.dtype, d):
        k, v = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
        shared = False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, dropout_p=dropout, is_causal=visible is None, enable_gqa=shared
    )


class Spread(torch.autograd.Function):
    """[n, *] with the rows of x [T, *] in their `places` long [T], all different, and 0 elsewhere. autograd's own
    index_copy would keep x for the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, places: Tensor, n: int) -> Tensor:
        ctx.save_for_backward(places)
        return x.new_zeros(n, *x.shape[1:]).index_copy_(0, places, x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return Collect.apply(grad, *ctx.saved_tensors), None, None


class Collect(torch.autograd.Function):
    """x[places] [T, *] of x [n, *], the reverse of Spread. autograd's own index_select would add up the gradients of
    places that might be the same."""

    @staticmethod
    def forward(ctx, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.n = len(x)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return Spread.apply(grad, *ctx.saved_tensors, ctx.n), None


class Rows:
    """N sequences, padded anywhere. Each token sees itself and the real tokens before it in its row.

    A row's real tokens are laid out at its front, where causal attention cannot see the padding behind them, and only
    as wide as the longest row. A compiled model is given every column instead, since its sizes must not depend on
    the data; what padding gets is then finite and of no consequence.
    positions long [T]: how many real tokens stand before a token; real bool [T], or None where every token is.
    """

    def __init__(self, mask: Tensor):
        """mask bool [N, W], True = a real token."""
        n, w = mask.shape
        self.shape, self.width, self.real = mask.shape, w, None
        if torch.compiler.is_compiling():
            order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
            self.columns = (order + torch.arange(0, n * w, w, device=mask.device)[:, None]).flatten()
            self.real = mask.flatten()[self.columns]
            self.slots = None
            self.positions = torch.arange(w, device=mask.device).repeat(n)
            return
        self.columns = mask.flatten().nonzero().squeeze(1)
        self.positions = (mask.long().cumsum(dim=1) - 1).flatten()[self.columns]
        self.width = max(int(mask.sum(dim=1).max()), 1)
        self.slots = self.columns // w * self.width + self.positions
        if len(self.columns) == n * w:
            self.slots = None

    def __len__(self) -> int:
        return len(self.columns)

    def flat_ids(self, ids: Tensor) -> Tensor:
        """The real tokens long [T] of ids [N, W]; compiled, padding comes as id 0, whatever it was."""
        ids = ids.flatten()[self.columns]
        return ids if self.real is None else ids.masked_fill(~self.real, 0)

    def flat_places(self, wanted: Tensor) -> Tensor | None:
        """Where in the flat list the real tokens of `wanted` bool [N, W] stand, long [k]; None, which stands for all of
        them, when compiled: how many they are depends on the data."""
        return wanted.flatten()[self.columns].nonzero().squeeze(1) if self.real is None else None

    def rows(self, flat: Tensor, kept: Tensor | None = None) -> Tensor:
        """[N, W, …] with `flat` [T, …] where its tokens came from, and 0 in the padding; grad flows. With kept long
        [k], `flat` [k, …] are those tokens alone."""
        n, w = self.shape
        columns = self.columns if kept is None else self.columns[kept]
        if self.real is not None:  # a compiler decides itself what it keeps
            return flat.new_zeros(n * w, *flat.shape[1:]).index_copy(0, columns, flat).unflatten(0, (n, w))
        return Spread.apply(flat, columns, n * w).unflatten(0, (n, w))

    def grid(self, flat: Tensor) -> Tensor:
        """[N, heads, width, D] for the attention kernels, from [T, heads, D]; grad flows."""
        if self.slots is not None:
            flat = Spread.apply(flat, self.slots, self.shape[0] * self.width)
        return flat.unflatten(0, (self.shape[0], self.width)).transpose(1, 2)

    def flat(self, grid: Tensor) -> Tensor:
        """[T, heads·D] from [N, heads, width, D]; grad flows."""
        flat = grid.transpose(1, 2).flatten(2).flatten(0, 1)
        return flat if self.slots is None else Collect.apply(flat, self.slots)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """Attention output [T, heads·D] of q [T, heads, D] and k, v [T, kv heads, D]."""
        return self.flat(attend(self.grid(q), self.grid(k), self.grid(v), None, dropout))


class PromptsAndAnswers:
    """B prompts and N answers, each of which sees its prompt and what of itself came before: a prompt is read once
    for all its answers, and their gradients add up in it. In the flat list the prompts come first."""

    def __init__(self, prompt_mask: Tensor, answer_mask: Tensor, prompt_of: Tensor):
        """prompt_mask bool [B, P] with at least one token a row; answer_mask bool [N, R], True at the front of a row;
        prompt_of long [N], the prompt each answer belongs to."""
        self.prompts, self.answers, self.prompt_of = Rows(prompt_mask), Rows(answer_mask), prompt_of
        lengths = prompt_mask.sum(dim=1)[prompt_of]
        answer_rows = self.answers.columns // answer_mask.shape[1]
        self.positions = torch.cat([self.prompts.positions, self.answers.positions + lengths[answer_rows]])
        self.real = None if self.prompts.real is None else torch.cat([self.prompts.real, self.answers.real])
        steps = torch.arange(self.answers.width, device=lengths.device)
        prompt = torch.arange(self.prompts.width, device=steps.device) < lengths[:, None]
        earlier = (steps <= steps[:, None]).expand(len(lengths), -1, -1)
        self.visible = torch.cat([prompt[:, None].expand(-1, len(steps), -1), earlier], dim=2)[:, None]
        # an answer's first token is predicted by its prompt's last one, every other by the one before it
        before_answers = len(self.prompts) + torch.arange(len(self.answers), device=steps.device) - 1
        ends = self._flat_prompt_ends(prompt_mask)[prompt_of][answer_rows]
        self.predictors = torch.where(self.answers.positions == 0, ends, before_answers)

    def _flat_prompt_ends(self, prompt_mask: Tensor) -> Tensor:
        """Where each prompt's last real token stands in the flat list, long [B]."""
        lengths = prompt_mask.sum(dim=1)
        if self.prompts.slots is None:
            starts = torch.arange(len(lengths), device=lengths.device) * self.prompts.width
        else:
            starts = lengths.cumsum(0) - lengths
        return starts + lengths - 1

    def flat_ids(self, prompt_ids: Tensor, answer_ids: Tensor) -> Tensor:
        return torch.cat([self.prompts.flat_ids(prompt_ids), self.answers.flat_ids(answer_ids)])

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """Attention output [T, heads·D] of q [T, heads, D] and k, v [T, kv heads, D]."""
        sizes = [len(self.prompts), len(self.answers)]
        (q_prompts, q_answers), (k_prompts, k_answers), (v_prompts, v_answers) = (x.split(sizes) for x in (q, k, v))
        k_prompts, v_prompts = self.prompts.grid(k_prompts), self.prompts.grid(v_prompts)
        read = attend(self.prompts.grid(q_prompts), k_prompts, v_prompts, None, dropout)
        k_all = torch.cat([k_prompts[self.prompt_of], self.answers.grid(k_answers)], dim=2)
        v_all = torch.cat([v_prompts[self.prompt_of], self.answers.grid(v_answers)], dim=2)
        written = attend(self.answers.grid(q_answers), k_all, v_all, self.visible, dropout)
        return torch.cat([self.prompts.flat(read), self.answers.flat(written)])


class CachedColumns:
    """T = N·t new columns of N rows behind those a KVCache holds; every column counts as a token, row by row."""

    real = None

    def __init__(self, cache: KVCache, rows: int, t: int, device: torch.device):
        self.cache, self.rows, self.t, self.visible = cache, rows, t, None
        if cache.filled:
            positions, self.visible = cache.look_ahead(t)
            self.positions = positions.flatten()
        else:
            self.positions = torch.arange(t, device=device).repeat(rows)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """As in the other layouts; the new keys and values are written to the cache."""
        q, k, v = (x.unflatten(0, (self.rows, self.t)).transpose(1, 2) for x in (q, k, v))
        k, v = self.cache.write(layer, k, v)
        return attend(q, k, v, self.visible, dropout).transpose(1, 2).reshape(self.rows * self.t, -1)
