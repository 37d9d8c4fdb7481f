"""What the machine could do at best: the matrix products of a step alone, reading the weights once, the chip's peak.

Letters: B prompts, G answers a prompt, N = B·G rows, P prompt width, H hidden size.
"""

import re
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.product import Product, Work
from model.model_minimind import MOEFeedForward
from model.products import LargeProduct, can_pack, pack, times

# Dense bfloat16 products with float32 sums, 10¹² operations a second (makers' data sheets); the first match counts.
PEAK_TERAFLOPS = {"B200": 2250, "H200": 989, "GH200": 989, "H100 PCIe": 756, "H100": 989, "A100": 312, "L40S": 362,
                  "L4": 121, "A10G": 70, "RTX 4090": 165, "RTX 3090": 71}  # fmt: skip
COPY_BYTES = 1 << 27  # well above any cache
FEW_TOKENS = 256  # up to here the way in which a product is asked for matters
MEASURED_SECONDS, FEWEST_CALLS = 0.25, 3  # spent on each measurement


def seconds_of(call: Callable[[], object], device: str) -> float:
    """Median seconds of a call, after one that is not counted."""
    call()
    times, begun = [], time.perf_counter()
    while len(times) < FEWEST_CALLS or time.perf_counter() - begun < MEASURED_SECONDS:
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def copy_bandwidth(device: str) -> float:
    """Bytes a second that a copy reads and writes, both counted."""
    source = torch.ones(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds_of(lambda: target.copy_(source), device)


# ---------------------------------------------------------------------------------------------- matrix products
class Matrix(NamedTuple):
    """A weight [out, in] of the layers."""

    weight: Tensor
    share: float  # of the tokens that it multiplies
    last: bool  # behind the last layer's attention, where tokens count no more whose states nobody wants

    def rows(self, tokens: int, wanted: int) -> float:
        return self.share * (wanted if self.last else tokens)


def matrices(model, dtype: torch.dtype, stacked: bool) -> list[Matrix]:
    """Every matrix of the layers.

    stacked: matrices with one input as one matrix (query, key and value; gate and up), which is fewer and larger
    products.
    """
    groups, count = [], len(model.model.layers)
    for number, layer in enumerate(model.model.layers, 1):
        attention, moe = layer.self_attn, isinstance(layer.mlp, MOEFeedForward)
        last = number == count and not moe  # the balance loss of experts counts every token
        groups.append(([attention.q_proj, attention.k_proj, attention.v_proj], 1.0, False))
        groups.append(([attention.o_proj], 1.0, last))
        experts = [(layer.mlp, 1.0)]
        if moe:
            config = layer.mlp.config
            experts = [(expert, config.num_experts_per_tok / config.num_experts) for expert in layer.mlp.experts]
            groups.append(([layer.mlp.gate], 1.0, False))
        for expert, share in experts:
            groups += [([expert.gate_proj, expert.up_proj], share, last), ([expert.down_proj], share, last)]
    found = []
    for linears, share, last in groups:
        weights = [linear.weight.detach().to(dtype) for linear in linears]
        found += [Matrix(weight, share, last) for weight in ([torch.cat(weights)] if stacked else weights)]
    return found


class Products:
    """The matrix products of a model, timed alone: asked for as one F.linear a matrix, or as is fastest."""

    def __init__(self, model, device: str, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self.separate, self.stacked = (matrices(model, dtype, stacked) for stacked in (False, True))
        self.head = model.lm_head.weight.detach().to(dtype)
        self.packed = [matrix._replace(weight=pack(matrix.weight)) for matrix in self.stacked]
        self.packed_head = pack(self.head)
        self.weight_bytes = sum(matrix.weight.nbytes for matrix in self.separate) + self.head.nbytes

    def seconds(self, tokens: int, wanted: int, head: bool = True) -> float:
        """Of all products on `tokens` tokens, the states of `wanted` of which are wanted, and, with `head`, what they
        predict: one F.linear a matrix."""
        return self._seconds(self.separate, tokens, wanted, head, F.linear)

    def best_seconds(self, tokens: int, wanted: int, head: bool = True) -> float:
        """The same in the fastest of the ways known here: plain products, those of oneDNN, with and without weights in
        an order of its own, and for few tokens stacked ones and either with the factors in the other order."""
        ways = [(self.separate, F.linear)]
        if self.device == "cpu" and can_pack(self.dtype):
            ways += [(self.separate, LargeProduct.apply), (self.packed, times)]
        if tokens <= FEW_TOKENS:
            ways += [(self.separate, turned_linear), (self.stacked, F.linear), (self.stacked, turned_linear)]
        return min(self._seconds(form, tokens, wanted, head, product) for form, product in ways)

    @torch.no_grad()
    def _seconds(self, form: list[Matrix], tokens: int, wanted: int, head: bool, product: Callable) -> float:
        pairs = [(matrix.weight, max(1, round(matrix.rows(tokens, wanted)))) for matrix in form]
        if head:
            pairs.append((self.packed_head if form is self.packed else self.head, wanted))
        shapes = {(rows, weight.shape[1]) for weight, rows in pairs}
        inputs = {shape: torch.randn(shape, device=self.device).to(self.dtype) for shape in shapes}

        def all_products():
            for weight, rows in pairs:
                product(inputs[rows, weight.shape[1]], weight)

        return seconds_of(all_products, self.device)


def turned_linear(x: Tensor, weight: Tensor) -> Tensor:
    """F.linear(x, weight) transposed: on a CPU and for 2 to 8 rows several times as fast."""
    return weight @ x.t()


def running_rows(lengths: list[int]) -> list[int]:
    """How many rows go through the model at each token step: an answer of L tokens takes L - 1, the prompt gave one."""
    return [sum(length > step for length in lengths) for step in range(1, max(lengths))]


def interpolate(points: dict[int, float], x: int) -> float:
    """Linear between the measured points."""
    below, above = max(p for p in points if p <= x), min(p for p in points if p >= x)
    if below == above:
        return points[below]
    return points[below] + (points[above] - points[below]) * (x - below) / (above - below)


def measured_rows(most: int) -> list[int]:
    """1, 2, 4 … and the most: where a token step is measured."""
    return sorted({1, most, *(2**k for k in range(1, most.bit_length()) if 2**k < most)})


def passes_of(product: Product, work: Work) -> tuple[int, int, int]:
    """(passes over the rollout with a gradient; forward passes that old log-probs need beside them; the same for old
    values). Where one minibatch holds the rollout, its first pass gives all that is to be known before it."""
    if product.algo == "grpo":
        return 1, 0, 0
    apart = int(len(work.lengths) > work.args.mini_batch_size)
    # decoding's log-probs are those of a forward pass in float32 alone
    return work.args.ppo_update_iters, apart if work.args.dtype != "float32" else 0, apart


def machine_limits(product: Product, work: Work) -> dict:
    """Seconds that the step's matrix products take alone, on every real token once, as plain products and (names with
    `best_`) in the fastest way; and what reading the weights takes."""
    products = Products(product.models[0], product.device, getattr(torch, work.args.dtype))
    bandwidth = copy_bandwidth(product.device)
    found = {"copy_bandwidth": bandwidth, "weight_bytes": products.weight_bytes,
             "weights_read": products.weight_bytes / bandwidth}  # fmt: skip
    for prefix, seconds in (("", products.seconds), ("best_", products.best_seconds)):
        points = {rows: seconds(rows, rows) for rows in measured_rows(len(work.lengths))}
        found |= {prefix + "token_step": points, prefix + "phases": phase_limits(product, work, seconds, points)}
    return found


def phase_limits(product: Product, work: Work, seconds: Callable, points: dict[int, float]) -> dict[str, float]:
    """Of each phase and of the step, from `seconds` (a method of Products) and, by rows, what a token step takes."""
    args = work.args
    prompt_tokens, answer_tokens = args.batch_size * args.max_seq_len, sum(work.lengths)
    prefill = seconds(prompt_tokens, args.batch_size)
    forward = seconds(prompt_tokens + answer_tokens, answer_tokens)
    updates, old_passes, value_passes = passes_of(product, work)
    critic = seconds(prompt_tokens + answer_tokens, answer_tokens, False) if product.algo == "ppo" else 0.0
    parts = {"decode": prefill + sum(interpolate(points, rows) for rows in running_rows(work.lengths)),
             "old log-probs": old_passes * forward, "reference": forward, "values": value_passes * critic,
             "forward": updates * (forward + critic)}  # fmt: skip
    parts["backward"] = 2 * parts["forward"]
    return {**parts, "step": sum(parts.values())}


@torch.no_grad()
def attention_seconds(product: Product, rows: int, columns: int) -> float:
    """Of the attention of all layers for one token step: `rows` rows that look back on `columns` cached columns."""
    config, dtype = product.run.config, getattr(torch, product.args.dtype)
    shared = config.num_attention_heads // config.num_key_value_heads
    cache = [torch.randn(2, rows, config.num_key_value_heads, columns, config.head_dim, device=product.device).to(dtype)
             for _ in range(config.num_hidden_layers)]  # fmt: skip
    query = torch.randn(rows, config.num_key_value_heads, shared, config.head_dim, device=product.device).to(dtype)

    def all_layers():
        for k, v in cache:
            F.scaled_dot_product_attention(query, k, v)

    return seconds_of(all_layers, product.device)


# ---------------------------------------------------------------------------------------------- operations
def forward_flops(model, tokens: int, wanted: int, pairs: int, head: bool = True) -> float:
    """Of one forward pass: two a weight and token, and attention's over `pairs` of tokens that see each other. The
    states of `wanted` tokens are wanted and, with `head`, what they predict."""
    config = model.config
    layers = sum(2 * matrix.weight.numel() * matrix.rows(tokens, wanted)
                 for matrix in matrices(model, torch.float32, False))  # fmt: skip
    predictions = 2 * wanted * config.hidden_size * config.vocab_size if head else 0
    return layers + predictions + 4 * pairs * config.num_attention_heads * config.head_dim * config.num_hidden_layers


def step_flops(product: Product, work: Work) -> float:
    """Operations that the step needs, each prompt read once for its answers in decoding, reference and update."""
    prompt, model = work.args.max_seq_len, product.models[0]
    tokens, answers = work.args.batch_size * prompt + sum(work.lengths), sum(work.lengths)
    pairs = work.args.batch_size * prompt * (prompt + 1) // 2 + sum(
        length * prompt + length * (length + 1) // 2 for length in work.lengths
    )
    updates, old_passes, value_passes = passes_of(product, work)
    whole = forward_flops(model, tokens, answers, pairs)
    critic = forward_flops(model, tokens, answers, pairs, head=False) if product.algo == "ppo" else 0.0
    # decoding, reference, old log-probs; old values; a backward pass is two forward passes
    return (2 + old_passes) * whole + value_passes * critic + 3 * updates * (whole + critic)


def peak_flops(device: str) -> tuple[str, float | None]:
    """(name of the device, its operations a second in bfloat16, None where unknown)."""
    if not device.startswith("cuda"):
        return "CPU", None
    name = torch.cuda.get_device_name(device)
    for known, teraflops in PEAK_TERAFLOPS.items():
        if re.search(rf"\b{known}\b", name):
            return name, teraflops * 1e12
    return name, None
