"""Keys and values of what running answers have read, and the attention of one new token a row to them.

Letters: B prompts, G answers a prompt, n <= N = B·G rows still running, D head size; "heads" below are those of keys
and values, each of which serves `queries` query heads.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from model.kv_cache import KVCache

GROWTH = 32  # slots by which a GroupCache grows, or an eighth of what it holds


def fill_holes(x: Tensor, holes: Tensor, fillers: Tensor, left: int) -> Tensor:
    """The first `left` rows of x, after its rows `fillers` (long [m]) were copied over the rows `holes` (long [m])."""
    x[holes] = x[fillers]
    return x[:left]


class RunningCache:
    """What both caches below share: one [n, heads, slots, D] tensor of keys and one of values a layer."""

    def __init__(self, keys: list[Tensor], values: list[Tensor], filled: int):
        self.keys, self.values, self.filled = keys, values, filled
        self.slot = torch.full((1,), filled - 1, device=keys[0].device)  # where the token being read goes

    def next_slot(self) -> None:
        """Go on to the next token of every row."""
        self.filled += 1
        self.slot.add_(1)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store k, v [n, heads, D] of the tokens being read."""
        self.keys[layer].index_copy_(2, self.slot, k[:, :, None])
        self.values[layer].index_copy_(2, self.slot, v[:, :, None])

    def keep_rows(self, holes: Tensor, fillers: Tensor, left: int) -> None:
        """Go on with `left` rows; see fill_holes."""
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                fill_holes(old[:, :, : self.filled], holes, fillers, left)
                store[layer] = old[:left]


class RowCache(RunningCache):
    """Every row holds its prompt and its answer. Prompts end at the same slot, so all rows write to one place."""

    def __init__(self, prompts: KVCache, copies: int, room: int, static: bool = False):
        """static: attention goes over all slots, the empty ones hidden, so that shapes do not change from step to step
        and nothing but tensors does: what a compiled step and a CUDA graph need."""
        longest = prompts.filled
        slots = longest + room
        start = longest - prompts.lengths
        source = (torch.arange(longest, device=start.device) - start[:, None]).clamp(min=0)
        super().__init__(
            [self._moved(old, source, copies, slots) for old in prompts.keys],
            [self._moved(old, source, copies, slots) for old in prompts.values],
            longest,
        )
        self.slots, self.static, self.bias = slots, static, None
        if static or not prompts.aligned:
            columns = torch.arange(slots, device=start.device)
            hidden = columns < start[:, None]
            if static:
                hidden = hidden | (columns >= longest)
            bias = self.keys[0].new_zeros(hidden.shape).masked_fill(hidden, -math.inf)
            self.bias = bias[:, None, None].repeat_interleave(copies, dim=0)

    @staticmethod
    def _moved(old: Tensor, source: Tensor, copies: int, slots: int) -> Tensor:
        """Each prompt `copies` times, in the columns up to its end; all slots hold numbers, because attention
        multiplies those it may not see by 0, and 0 · NaN is NaN."""
        right = torch.take_along_dim(old[:, :, : source.shape[1]], source[:, None, :, None], dim=2)
        new = old.new_zeros(old.shape[0], copies, old.shape[1], slots, old.shape[3])
        new[:, :, :, : source.shape[1]] = right[:, None]
        return new.flatten(0, 1)

    def next_slot(self) -> None:
        super().next_slot()
        if self.static:
            self.bias.index_fill_(3, self.slot, 0.0)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention output [n, queries·heads·D] of q [n, queries·heads, D]; k, v [n, heads, D] are stored."""
        self.write(layer, k, v)
        end = self.slots if self.static else self.filled
        keys, values = self.keys[layer][:, :, :end], self.values[layer][:, :, :end]
        bias = None if self.bias is None else self.bias[..., :end]
        # the query heads of one key/value head become the columns of one query: nothing is repeated
        q = q.unflatten(1, (k.shape[1], -1))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=bias).reshape(len(q), -1)

    def keep_rows(self, holes: Tensor, fillers: Tensor, left: int) -> None:
        super().keep_rows(holes, fillers, left)
        if self.bias is not None:
            self.bias = fill_holes(self.bias, holes, fillers, left)


class GroupCache(RunningCache):
    """Rows hold their answers alone; a prompt is held and read once for all of its answers. For float32 on the CPU,
    where fused attention to a single token takes twice as long as these products.

    Memory is read in one sweep, which matters more than how much is read: prompts lie without gaps, and answers have
    hardly more slots than they need, all of which are read. A list of the heads of the running rows is turned into the
    grid [B · heads, G · queries, …] of a prompt's queries and back by two index tensors.
    """

    def __init__(self, prompts: KVCache, copies: int):
        b, heads, _, size = prompts.keys[0].shape
        empty = [old.new_zeros(b * copies, heads, 0, size) for old in prompts.keys]
        super().__init__(empty, list(empty), 0)
        self.prompt_keys, self.prompt_values = (
            [old[:, :, : prompts.filled].flatten(0, 1) for old in store] for store in (prompts.keys, prompts.values)
        )
        device = prompts.lengths.device
        row, head = torch.arange(b * copies, device=device)[:, None], torch.arange(heads, device=device)
        self.places = (row // copies * heads + head) * copies + row % copies  # in the grid, of each head of each row
        self.grid_size = self.places.numel()
        self._index()
        self.bias = None
        if not prompts.aligned:
            hidden = torch.arange(prompts.filled, device=device) >= prompts.lengths[:, None]
            bias = empty[0].new_zeros(hidden.shape).masked_fill(hidden, -math.inf)
            self.bias = bias.repeat_interleave(heads, dim=0)[:, None]

    def _index(self) -> None:
        self.from_grid = self.places.flatten()
        # a row that ended leaves its place in the grid to row 0: what is computed there is not looked at
        self.to_grid = torch.zeros(self.grid_size, dtype=torch.long, device=self.places.device)
        self.to_grid[self.from_grid] = torch.arange(len(self.from_grid), device=self.places.device)

    def next_slot(self) -> None:
        if self.filled == self.keys[0].shape[2]:
            more = max(GROWTH, self.filled // 8)
            for store in (self.keys, self.values):
                store[:] = [F.pad(old, (0, 0, 0, more)) for old in store]
        super().next_slot()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention output [n, queries·heads·D] of q [n, queries·heads, D]; k, v [n, heads, D] are stored."""
        self.write(layer, k, v)
        n, heads, size = k.shape
        keys, values = self.keys[layer].flatten(0, 1), self.values[layer].flatten(0, 1)
        prompt_keys, prompt_values = self.prompt_keys[layer], self.prompt_values[layer]
        prompt = prompt_keys.shape[1]
        q = (q * size**-0.5).view(n * heads, -1, size)
        queries = q.shape[1]

        prompt_scores = self._to_grid(q) @ prompt_keys.transpose(1, 2)
        if self.bias is not None:
            prompt_scores += self.bias
        # the keys come first because MKL multiplies a long matrix by a short one faster than the other way round
        answer_scores = (keys @ q.transpose(1, 2)).transpose(1, 2)
        scores = torch.cat([self._from_grid(prompt_scores, queries), answer_scores], dim=2)
        scores[:, :, prompt + self.filled :] = -math.inf
        probs = scores.softmax(dim=2)
        out = probs[:, :, prompt:] @ values
        out += self._from_grid(self._to_grid(probs[:, :, :prompt]) @ prompt_values, queries)
        return out.view(n, -1)

    def _to_grid(self, x: Tensor) -> Tensor:
        """[B · heads, G · queries, *] from [n · heads, queries, *]."""
        return x.index_select(0, self.to_grid).view(len(self.prompt_keys[0]), -1, x.shape[2])

    def _from_grid(self, x: Tensor, queries: int) -> Tensor:
        """[n · heads, queries, *] from [B · heads, G · queries, *]."""
        return x.view(self.grid_size, queries, -1).index_select(0, self.from_grid)

    def keep_rows(self, holes: Tensor, fillers: Tensor, left: int) -> None:
        super().keep_rows(holes, fillers, left)
        self.places = fill_holes(self.places, holes, fillers, left)
        self._index()
