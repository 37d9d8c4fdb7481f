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
    """What both caches below share: a [2, n, heads, slots, D] tensor a layer, keys and then values."""

    def __init__(self, store: list[Tensor], filled: int):
        self.store, self.filled = store, filled

    def next_slot(self) -> None:
        """Go on to the next token of every row."""
        self.filled += 1

    def write(self, layer: int, kv: Tensor) -> None:
        """Store the keys and values [2, n, heads, D] of the tokens being read."""
        self.store[layer][:, :, :, self.filled - 1] = kv

    def keep_rows(self, holes: Tensor, fillers: Tensor, left: int) -> None:
        """Go on with `left` rows; see fill_holes."""
        for layer, old in enumerate(self.store):
            for half in old:
                fill_holes(half[:, :, : self.filled], holes, fillers, left)
            self.store[layer] = old[:, :left]


class RowCache(RunningCache):
    """Every row holds its prompt and its answer. Prompts end at the same slot, so all rows write to one place."""

    def __init__(self, prompts: KVCache, copies: int, room: int, spare: int = 0, static: bool = False):
        """spare: so many rows that belong to no prompt are added; static: attention goes over all slots, the empty ones
        hidden, so that shapes do not change from step to step and nothing but tensors does: what a compiled step and a
        CUDA graph need."""
        longest = prompts.filled
        slots = longest + room
        start = longest - prompts.lengths
        source = (torch.arange(longest, device=start.device) - start[:, None]).clamp(min=0)
        store = [self._moved(both, source, copies, slots) for both in zip(prompts.keys, prompts.values)]
        store = [F.pad(both, (0, 0, 0, 0, 0, 0, 0, spare)) for both in store] if spare else store
        super().__init__(store, longest)
        self.slots, self.static, self.bias = slots, static, None
        self.slot = torch.full((1,), longest - 1, device=start.device)  # where the token being read goes
        # fused attention takes twice as long as its products for a single float32 token on the CPU
        self.fused = static or store[0].is_cuda or store[0].dtype != torch.float32
        if static or not prompts.aligned:
            columns = torch.arange(slots, device=start.device)
            hidden = columns < start[:, None]
            if static:
                hidden = hidden | (columns >= longest)
            bias = store[0].new_zeros(hidden.shape).masked_fill(hidden, -math.inf)
            bias = bias.repeat_interleave(copies, dim=0)
            self.bias = F.pad(bias, (0, 0, 0, spare))[:, None, None]

    @staticmethod
    def _moved(both: tuple[Tensor, Tensor], source: Tensor, copies: int, slots: int) -> Tensor:
        """Each prompt `copies` times, in the columns up to its end; all slots hold numbers, because attention
        multiplies those it may not see by 0, and 0 · NaN is NaN."""
        b, heads, _, size = both[0].shape
        new = both[0].new_zeros(2, b, copies, heads, slots, size)
        for half, old in zip(new, both):
            right = torch.take_along_dim(old[:, :, : source.shape[1]], source[:, None, :, None], dim=2)
            half[:, :, :, : source.shape[1]] = right[:, None]
        return new.flatten(1, 2)

    def next_slot(self) -> None:
        super().next_slot()
        if self.static:
            self.slot.add_(1)
            self.bias.index_fill_(3, self.slot, 0.0)

    def write(self, layer: int, kv: Tensor) -> None:
        if self.static:
            self.store[layer].index_copy_(3, self.slot, kv[:, :, :, None])
        else:
            super().write(layer, kv)

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """Attention output [n, queries·heads·D] of scaled q [n, queries·heads, D]; kv [2, n, heads, D] is stored."""
        self.write(layer, kv)
        end = self.slots if self.static else self.filled
        keys, values = self.store[layer][:, :, :, :end]
        bias = None if self.bias is None else self.bias[..., :end]
        # the query heads of one key/value head become the columns of one query: nothing is repeated
        q = q.unflatten(1, (kv.shape[2], -1))
        if self.fused:
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=1.0).reshape(len(q), -1)
        scores = q @ keys.transpose(2, 3)
        if bias is not None:
            scores += bias
        return (scores.softmax(dim=3) @ values).view(len(q), -1)

    def keep_rows(self, holes: Tensor, fillers: Tensor, left: int) -> None:
        super().keep_rows(holes, fillers, left)
        if self.bias is not None:
            self.bias = fill_holes(self.bias, holes, fillers, left)


class GroupCache(RunningCache):
    """Rows hold their answers alone; a prompt is held and read once for all of its answers. For float32 on the CPU.

    Memory is read in one sweep, which matters more than how much is read: prompts lie without gaps, and answers have
    hardly more slots than they need, all of which are read. A list of the heads of the running rows is turned into the
    grid [B · heads, G · queries, …] of a prompt's queries and back by two index tensors.
    """

    def __init__(self, prompts: KVCache, copies: int):
        b, heads, _, size = prompts.keys[0].shape
        empty = [old.new_zeros(2, b * copies, heads, 0, size) for old in prompts.keys]
        super().__init__(empty, 0)
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
        if self.filled == self.store[0].shape[3]:
            more = max(GROWTH, self.filled // 8)
            self.store = [F.pad(old, (0, 0, 0, more)) for old in self.store]
        super().next_slot()

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """Attention output [n, queries·heads·D] of scaled q [n, queries·heads, D]; kv [2, n, heads, D] is stored."""
        self.write(layer, kv)
        _, n, heads, size = kv.shape
        keys, values = self.store[layer].flatten(1, 2)
        prompt_keys, prompt_values = self.prompt_keys[layer], self.prompt_values[layer]
        prompt = prompt_keys.shape[1]
        q = q.reshape(n * heads, -1, size)
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
        # exchanged, not copied: of the rows that are left, no two may have one place
        self.places[torch.cat([holes, fillers])] = self.places[torch.cat([fillers, holes])]
        self.places = self.places[:left]
        self._index()
