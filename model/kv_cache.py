"""Padding moved out of the way, and the keys and values of tokens already read.

Letters: N rows, T new columns, S cache slots, D head size.
"""

import torch
from torch import Tensor


def pack_left(input_ids: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Move each row's real tokens to its front, in order: (ids [N, T], mask [N, T], way back [N·T]).

    Padding ids become 0, whatever they were. `flat_rows.index_select(0, way_back)` restores the original columns.
    """
    n, t = real.shape
    order = (~real).to(torch.uint8).argsort(dim=1, stable=True)
    row_start = torch.arange(0, n * t, t, device=real.device)[:, None]
    way_back = (order.argsort(dim=1) + row_start).flatten()
    packed = real.gather(1, order)
    return input_ids.gather(1, order).masked_fill(~packed, 0), packed, way_back


class KVCache:
    """Keys and values of the tokens read so far, one pair of [rows, kv heads, S, D] tensors a layer.

    Slots 0 .. lengths[i]-1 of row i hold its real tokens in order (padding is overwritten by what comes next).
    `filled` is the number of slots in use by the longest row; `aligned` says that every row is that long.
    Tensors are made at the first write, in the dtype of what is written. Not for use with gradients.
    """

    def __init__(self, layers: int, capacity: int = 0):
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers
        self.capacity = capacity
        self.filled = 0
        self.aligned = True
        self.lengths: Tensor | None = None
        self._slots: Tensor | None = None

    def look_ahead(self, t: int) -> tuple[Tensor, Tensor | None]:
        """For t new columns after the cached ones: (positions long [rows, t], visible bool [rows, 1, t, filled + t]
        or None where every slot may be seen)."""
        steps = torch.arange(t, device=self.lengths.device)
        positions = self.lengths[:, None] + steps
        self._slots = positions
        if self.aligned and t == 1:
            return positions, None
        slots = torch.arange(self.filled + t, device=positions.device)
        return positions, slots <= positions[:, None, :, None]

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [rows, kv heads, t, D] of the new columns; give all keys and values to attend to."""
        end = self.filled + k.shape[2]
        if end > self.capacity:
            self.capacity = 2 * end
        both = []
        for store, new in ((self.keys, k), (self.values, v)):
            store[layer] = self._with_room(store[layer], new)
            if self.aligned:
                store[layer][:, :, self.filled : end] = new
            else:
                rows = torch.arange(len(new), device=new.device)[:, None]
                store[layer][rows, :, self._slots] = new.transpose(1, 2)
            both.append(store[layer][:, :, :end])
        return both[0], both[1]

    def _with_room(self, old: Tensor | None, new: Tensor) -> Tensor:
        """`old` if it has `capacity` slots, else a copy that has. Zeros, not empty memory: attention multiplies a slot
        it may not see by 0, and 0 · NaN is NaN."""
        if old is not None and old.shape[2] >= self.capacity:
            return old
        store = new.new_zeros(new.shape[0], new.shape[1], self.capacity, new.shape[3])
        if old is not None:
            store[:, :, : self.filled] = old[:, :, : self.filled]
        return store

    def advance(self, t: int, real: Tensor | None = None) -> None:
        """Count t written columns, of which real bool [rows, t] (packed left; None = all) are tokens."""
        if self.lengths is None:
            rows, device = self.keys[0].shape[0], self.keys[0].device
            self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.filled += t
        self.lengths = self.lengths + (t if real is None else real.sum(dim=1))
        self.aligned = self.aligned and real is None

    def spread(self, copies: int, capacity: int) -> "KVCache":
        """A cache with every row `copies` times in a row and room for `capacity` slots."""
        wide = KVCache(len(self.keys), capacity)
        wide.filled, wide.aligned = self.filled, self.aligned
        wide.lengths = self.lengths.repeat_interleave(copies)
        for store, source in ((wide.keys, self.keys), (wide.values, self.values)):
            for layer, old in enumerate(source):
                rows, heads, _, size = old.shape
                new = old.new_zeros(rows * copies, heads, capacity, size)
                new.unflatten(0, (rows, copies))[..., : self.filled, :] = old[:, None, :, : self.filled]
                store[layer] = new
        return wide

    def keep_rows(self, rows: Tensor) -> None:
        """Keep only these rows (long [m], ascending)."""
        self.lengths = self.lengths[rows]
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                kept = old[:, :, : self.filled].index_select(0, rows)
                old[: len(rows), :, : self.filled] = kept
                store[layer] = old[: len(rows)]
