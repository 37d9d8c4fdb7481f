"""Sizes of MiniMind's model, and the rotary positions that follow from them."""

import math

import torch
from torch import Tensor
from transformers import PretrainedConfig

# MiniMind's long-context setting, switched on as a whole by `inference_rope_scaling` (YaRN: arxiv.org/abs/2309.00071)
YARN = {
    "factor": 16.0,
    "original_max_position_embeddings": 2048,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
}


class MiniMindConfig(PretrainedConfig):
    """Sizes and switches of the model, with MiniMind's names and defaults.

    head_dim, intermediate_size and moe_intermediate_size follow from hidden_size and num_attention_heads when left out.
    Raises: ValueError naming the field for a size below 1, heads that do not divide, or an odd head_dim.
    """

    model_type = "minimind"

    def __init__(
        self,
        hidden_size: int = 768,
        num_hidden_layers: int = 8,
        use_moe: bool = False,
        *,
        vocab_size: int = 6400,
        bos_token_id: int = 1,
        eos_token_id: int = 2,
        pad_token_id: int = 0,
        num_attention_heads: int = 8,
        num_key_value_heads: int = 4,
        head_dim: int | None = None,
        intermediate_size: int | None = None,
        max_position_embeddings: int = 32768,
        rms_norm_eps: float = 1e-6,
        rope_theta: float = 1e6,
        inference_rope_scaling: bool = False,
        dropout: float = 0.0,
        hidden_act: str = "silu",
        num_experts: int = 4,
        num_experts_per_tok: int = 1,
        moe_intermediate_size: int | None = None,
        norm_topk_prob: bool = True,
        router_aux_loss_coef: float = 5e-4,
        tie_word_embeddings: bool = True,
        initializer_range: float = 0.02,
        **kwargs,
    ):
        # MiniMind: its config.json also holds the YaRN numbers, which follow from inference_rope_scaling
        kwargs.pop("rope_scaling", None)
        super().__init__(**kwargs)
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.use_moe = bool(use_moe)
        self.vocab_size = vocab_size
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self._check_heads(head_dim)
        self.head_dim = hidden_size // num_attention_heads if head_dim is None else head_dim
        default_intermediate = math.ceil(hidden_size * math.pi / 64) * 64
        self.intermediate_size = default_intermediate if intermediate_size is None else intermediate_size
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.inference_rope_scaling = bool(inference_rope_scaling)
        self.dropout = dropout
        self.hidden_act = hidden_act
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.moe_intermediate_size = self.intermediate_size if moe_intermediate_size is None else moe_intermediate_size
        self.norm_topk_prob = norm_topk_prob
        self.router_aux_loss_coef = router_aux_loss_coef
        self.tie_word_embeddings = tie_word_embeddings
        self.initializer_range = initializer_range
        self._check_sizes()

    def _check_heads(self, head_dim: int | None) -> None:
        """Raise ValueError unless hidden_size, heads and key/value heads divide one another."""
        for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}: "
                "change one of them or give head_dim"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )

    def _check_sizes(self) -> None:
        """Raise ValueError naming the first field that no model can be built from."""
        positive = ("num_hidden_layers", "vocab_size", "head_dim", "intermediate_size", "max_position_embeddings")
        experts = ("num_experts", "num_experts_per_tok", "moe_intermediate_size") if self.use_moe else ()
        for name in positive + experts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary positions turn pairs, so it must be even")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}: it must be in [0, 1)")
        if self.hidden_act != "silu":
            raise ValueError(f"hidden_act is {self.hidden_act!r}: only 'silu' (SwiGLU) is built")
        if self.use_moe and self.num_experts_per_tok > self.num_experts:
            raise ValueError(f"num_experts_per_tok {self.num_experts_per_tok} is above num_experts {self.num_experts}")


def rotary_frequencies(config: MiniMindConfig) -> Tensor:
    """Radians per position of each rotated pair, float32 [D/2]; slowed down by YaRN if the config asks for it.

    YaRN keeps a pair that turns more than beta_fast times within the original context, divides the frequency of one
    that turns less than beta_slow times by `factor`, and goes linearly between (arxiv.org/abs/2309.00071, 3.2).
    """
    half = config.head_dim // 2
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponent
    original = YARN["original_max_position_embeddings"]
    if not config.inference_rope_scaling or config.max_position_embeddings <= original:
        return frequencies

    def pair_turning(turns: float) -> float:
        wavelengths = math.log(original / (turns * 2 * math.pi)) / math.log(config.rope_theta)
        return config.head_dim * wavelengths / 2

    low = max(math.floor(pair_turning(YARN["beta_fast"])), 0)
    high = min(math.ceil(pair_turning(YARN["beta_slow"])), half - 1)
    slowed = ((torch.arange(half, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return frequencies * (1.0 - slowed + slowed / YARN["factor"])


def rotary_tables(config: MiniMindConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of the positions 0 .. length-1, float32 [length, D], each frequency twice (rotate-half layout).

    The first half of sin is negated: x · cos + roll(x, D/2) · sin is then the rotation, without a negated copy of x.
    """
    angles = torch.outer(torch.arange(length, dtype=torch.float32), rotary_frequencies(config)).to(device)
    scale = YARN["attention_factor"] if config.inference_rope_scaling else 1.0
    cos = torch.cat([angles.cos(), angles.cos()], dim=-1) * scale
    return cos, torch.cat([-angles.sin(), angles.sin()], dim=-1) * scale
