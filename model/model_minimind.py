"""MiniMind's chat model in plain PyTorch: decoder (dense or mixture of experts) and language-model head.

The architecture and every parameter name are MiniMind's (github.com/jingyaogong/minimind), which is that of Qwen3 and
Qwen3-MoE: grouped-query attention with a norm on queries and keys, rotary positions, SwiGLU, RMSNorm before each part.
Sizes are in configuration.py, the norm in norm.py, the key/value cache in kv_cache.py, sampling in decoding.py.

Letters: N rows, T tokens (or new columns of a call), H hidden size, D head size, V vocabulary, E experts.
Where tokens lie and what they see is in layout.py.
"""

from dataclasses import fields
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from model.configuration import MiniMindConfig, rotary_tables
from model.decoding import DecodingMixin
from model.kv_cache import KVCache, pack_left
from model.layout import CachedColumns, PromptsAndAnswers, Rows
from model.norm import RMSNorm
from model.products import LargeGatedProduct, Linear

# transformers 5 renamed the field of its outputs; `.past_key_values` reads it in every version
CACHE_FIELD = "cache" if "cache" in {f.name for f in fields(MoeCausalLMOutputWithPast)} else "past_key_values"

FEW_TOKENS = 256  # up to here a batch without gradient runs every expert on every token on CUDA


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D] turned by its positions, in float32; tables [T, 1, D] as in rotary_tables; grad flows to x."""
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


class Attention(nn.Module):
    """Causal self-attention with normed, rotated queries and keys."""

    def __init__(self, config: MiniMindConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.dropout = config.dropout
        q_size, kv_size = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = Linear(config.hidden_size, q_size, bias=False)
        self.k_proj = Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = Linear(q_size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], layout, kept: Tensor | None = None) -> Tensor:
        """Attention output [T, H] of x [T, H], whose tokens lie as `layout` says; with `kept` long [k] that of these
        tokens alone, [k, H]."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim)))
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        # back to the projections' dtype: the float32 tables would otherwise promote half-precision keys
        q, k = rotate(q, *rotary).type_as(v), rotate(k, *rotary).type_as(v)
        out = layout.attend(self.layer, q, k, v, self.dropout if self.training else 0.0)
        if kept is not None:
            out = out.index_select(0, kept)
        return self.resid_dropout(self.o_proj(out))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, config: MiniMindConfig, intermediate_size: int):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = Linear(intermediate_size, config.hidden_size, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if type(self.down_proj) is Linear and x.dim() == 2 and self.down_proj.is_large_for(gate):
            return self.dropout(LargeGatedProduct.apply(gate, up, self.down_proj.weight))
        return self.dropout(self.down_proj(F.silu(gate) * up))


class MOEFeedForward(nn.Module):
    """Mixture of experts: each token goes through its num_experts_per_tok best experts, weighted by a softmax gate."""

    def __init__(self, config: MiniMindConfig):
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(
            FeedForward(config, config.moe_intermediate_size) for _ in range(config.num_experts)
        )

    def forward(self, x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """(output, balance loss []) of x [T, H]; real bool [T] (None = all) leaves padding out of the balance loss.

        Balance loss, only in training mode: coefficient · E · sum over experts of (share of tokens sent there) ·
        (mean gate probability); the gradient flows through the probability alone (Switch Transformer, section 2.2).
        """
        flat = x.reshape(-1, x.shape[-1])
        scores = self.gate(flat).float().softmax(dim=-1)
        weights, picks = scores.topk(self.config.num_experts_per_tok, dim=-1)
        if self.config.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        if x.is_cuda and len(flat) <= FEW_TOKENS and not torch.is_grad_enabled():
            out = self._through_all(flat, weights, picks)
        else:
            out = self._through_picked(flat, weights, picks)
        return out.view_as(x), self._balance_loss(scores, picks, real)

    def _through_picked(self, flat: Tensor, weights: Tensor, picks: Tensor) -> Tensor:
        """Tokens sorted by expert, so that each expert runs once. One without tokens runs on an empty batch: its
        gradient is then zero instead of missing, which DistributedDataParallel needs."""
        order = picks.flatten().argsort(stable=True)
        token = order // picks.shape[1]
        counts = F.one_hot(picks.flatten(), self.config.num_experts).sum(dim=0).tolist()
        parts = flat[token].split(counts)
        outputs = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        outputs = (outputs * weights.flatten()[order, None]).type_as(flat)
        return torch.zeros_like(flat).index_add(0, token, outputs)

    def _through_all(self, flat: Tensor, weights: Tensor, picks: Tensor) -> Tensor:
        """Every expert on every token, then the picked ones: for single decoding steps on CUDA, where reading the
        counts back would stall the device at each layer and the experts' weights are loaded anyway."""
        outputs = torch.stack([expert(flat) for expert in self.experts], dim=1)
        picked = outputs.gather(1, picks[:, :, None].expand(-1, -1, outputs.shape[-1]))
        return (picked * weights[:, :, None]).sum(dim=1).type_as(flat)

    def _balance_loss(self, scores: Tensor, picks: Tensor, real: Tensor | None) -> Tensor:
        if not self.training or self.config.router_aux_loss_coef == 0:
            return scores.new_zeros(())
        # Differs from MiniMind: padding does not count, so the loss does not depend on how wide a batch was padded
        counted = torch.ones_like(scores[:, 0]) if real is None else real.flatten().float()
        counted = (counted / counted.sum().clamp(min=1.0))[:, None]
        share = (F.one_hot(picks, self.config.num_experts).sum(dim=1) * counted).sum(dim=0)
        probability = (scores * counted).sum(dim=0)
        return (share * probability).sum() * self.config.num_experts * self.config.router_aux_loss_coef


class MiniMindBlock(nn.Module):
    """One layer: attention, then feed-forward, each behind a norm and added to the stream."""

    def __init__(self, config: MiniMindConfig, layer: int):
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MOEFeedForward(config) if config.use_moe else FeedForward(config, config.intermediate_size)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], layout, kept: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(stream [T, H], or [k, H] of the tokens `kept` [k]; this layer's balance loss [] or None without experts)."""
        attended = self.self_attn(self.input_layernorm(x), rotary, layout, kept)
        x = attended + (x if kept is None else x.index_select(0, kept))
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, MOEFeedForward):
            out, balance_loss = self.mlp(normed, layout.real)
            return x + out, balance_loss
        return x + self.mlp(normed), None


class MiniMindModel(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: MiniMindConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(MiniMindBlock(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False  # True: of each layer only its input is kept for the backward pass
        # Differs from MiniMind: plain attributes that grow with need, not buffers of full length. .half() must not
        # round them, and DistributedDataParallel, which broadcasts buffers, must not meet two lengths on two ranks.
        self._cos = self._sin = torch.empty(0)

    def _rotary(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """cos and signed sin of positions [T], all below `end`, float32 [T, 1, D]."""
        if self._cos.shape[0] < end or self._cos.device != positions.device:
            length = min(max(256, 1 << (end - 1).bit_length()), self.config.max_position_embeddings)
            # a table first needed under inference_mode must still be usable in training
            with torch.inference_mode(False):
                self._cos, self._sin = rotary_tables(self.config, length, positions.device)
        return self._cos[positions, None], self._sin[positions, None]

    def _read(self, ids: Tensor, layout, end: int, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(states after the final norm [T, H], balance loss summed over the layers []) of a layout's tokens [T].

        kept long [k]: the tokens whose states are wanted, [k, H]; of the others the last layer needs keys and values
        alone. With experts, whose balance loss counts every token, it is no less work.
        """
        rotary = self._rotary(layout.positions, end)
        hidden = self.dropout(self.embed_tokens(ids))
        aux_loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for number, layer in enumerate(self.layers, 1):
            inputs = hidden, rotary, layout
            if number == len(self.layers) and not self.config.use_moe:
                inputs = *inputs, kept
            if self.gradient_checkpointing and torch.is_grad_enabled():
                hidden, balance_loss = checkpoint(layer, *inputs, use_reentrant=False)
            else:
                hidden, balance_loss = layer(*inputs)
            aux_loss = aux_loss if balance_loss is None else aux_loss + balance_loss
        if kept is not None and self.config.use_moe:
            hidden = hidden.index_select(0, kept)
        return self.norm(hidden), aux_loss

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: KVCache | None = None,
        use_cache: bool = False,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, KVCache | None, Tensor]:
        """(hidden states after the final norm [N, T, H], cache or None, balance loss summed over the layers []).

        Padding on either side is left out of the computation: real tokens get what they get in an unpadded batch,
        padding gets 0 (with a cache, something finite). Differs from MiniMind: a token's position is the number of real
        tokens before it, not its column; attention depends on differences of positions, so only holes in a mask tell
        them apart.
        Args: input_ids long [N, T], anything where the mask is False; attention_mask [N, T], with a cache also
            [N, cached columns + T] (non-zero = real); past_key_values: cache of the columns before, which is extended
            in place; use_cache: make one if there is none; wanted bool [N, T]: where states are wanted, the others
            are 0 (None = everywhere). Grad flows to the parameters.
        Raises: ValueError for shapes that do not fit or a sequence beyond max_position_embeddings.
        """
        cache = KVCache(self.config.num_hidden_layers) if use_cache and past_key_values is None else past_key_values
        real = self._check_inputs(input_ids, attention_mask, cache)
        if cache is not None:
            hidden, cache, aux_loss = self._read_behind(input_ids, real, cache)
            return hidden if wanted is None else hidden * wanted[..., None], cache, aux_loss
        layout = Rows(torch.ones_like(input_ids, dtype=torch.bool) if real is None else real)
        kept = None if wanted is None else layout.flat_places(wanted)
        hidden, aux_loss = self._read(layout.flat_ids(input_ids), layout, input_ids.shape[1], kept)
        return layout.rows(hidden, kept), None, aux_loss

    def _read_behind(self, input_ids: Tensor, real: Tensor | None, cache: KVCache) -> tuple[Tensor, KVCache, Tensor]:
        """As forward, for columns behind those in a cache."""
        n, t = input_ids.shape
        back = None
        if real is not None and not bool(real.all()):
            input_ids, real, back = pack_left(input_ids, real)
        else:
            real = None
        layout = CachedColumns(cache, n, t, input_ids.device)
        hidden, aux_loss = self._read(input_ids.flatten(), layout, cache.filled + t)
        cache.advance(t, real)
        if back is not None:
            hidden = hidden.index_select(0, back)
        return hidden.unflatten(0, (n, t)), cache, aux_loss

    def answer_states(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        answer_ids: Tensor,
        answer_mask: Tensor,
        prompt_of: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(states that predict each real answer token, row by row [T, H], balance loss []), each prompt read once.

        Equal to reading prompt and answer of every row as one sequence, in value and in gradient; in the balance loss
        of experts a prompt's tokens count once, and not once an answer.
        Args: prompt_ids, prompt_mask [B, P], padded on either side; answer_ids, answer_mask [N, R], padded on the
            right; prompt_of long [N]: each answer's prompt (None = row i answers prompt i // (N // B)).
        Raises: ValueError if N is not a multiple of B and prompt_of is not given.
        """
        if prompt_of is None:
            copies = len(answer_ids) // max(len(prompt_ids), 1)
            if copies * len(prompt_ids) != len(answer_ids) or copies == 0:
                raise ValueError(f"{len(answer_ids)} answers to {len(prompt_ids)} prompts: expected as many for each")
            prompt_of = torch.arange(len(answer_ids), device=answer_ids.device) // copies
        layout = PromptsAndAnswers(prompt_mask.bool(), answer_mask.bool(), prompt_of)
        end = prompt_ids.shape[1] + answer_ids.shape[1]
        return self._read(layout.flat_ids(prompt_ids, answer_ids), layout, end, layout.predictors)

    def _check_inputs(self, input_ids: Tensor, attention_mask: Tensor | None, cache: KVCache | None) -> Tensor | None:
        """The mask of the new columns as bool [N, T], or None without a mask; ValueError for what does not fit."""
        if input_ids.dim() != 2 or input_ids.shape[1] == 0:
            raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}: expected [rows, width] with width >= 1")
        n, t = input_ids.shape
        start = 0 if cache is None else cache.filled
        if start + t > self.config.max_position_embeddings:
            raise ValueError(
                f"a sequence of {start + t} tokens is longer than max_position_embeddings "
                f"{self.config.max_position_embeddings}: shorten the prompt or the answer"
            )
        if start and len(cache.lengths) != n:
            raise ValueError(f"input_ids has {n} rows but past_key_values holds {len(cache.lengths)} rows")
        if attention_mask is None:
            return None
        if attention_mask.shape not in ((n, t), (n, start + t)):
            raise ValueError(
                f"attention_mask {tuple(attention_mask.shape)} does not fit input_ids {tuple(input_ids.shape)}"
                + (f" after {start} cached columns" if start else "")
            )
        return attention_mask[:, -t:].bool()


def complete_tied_weights(module, state_dict, prefix, local_metadata, strict, missing, unexpected, errors) -> None:
    """Before loading: a file that stores the tied matrix once (as safetensors does) holds it under both names."""
    names = [prefix + "model.embed_tokens.weight", prefix + "lm_head.weight"]
    found = [state_dict[name] for name in names if name in state_dict]
    if len(found) == 1:
        state_dict.update(dict.fromkeys(names, found[0]))
    if len(found) == 2 and not torch.equal(*found):
        errors.append(f"{names[0]} and {names[1]} differ, but this model ties them: set tie_word_embeddings=False")


class MiniMindForCausalLM(DecodingMixin, PreTrainedModel):
    """MiniMind with its language-model head, tied to the embedding; `decode` and `generate` come from DecodingMixin."""

    config_class = MiniMindConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    # a mapping for transformers 5; transformers 4 reads its keys alone
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: MiniMindConfig | None = None):
        super().__init__(config or MiniMindConfig())
        self.model = MiniMindModel(self.config)
        self.lm_head = Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        self.post_init()
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
            self.register_load_state_dict_pre_hook(complete_tied_weights)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.model.embed_tokens = value

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: KVCache | None = None,
        use_cache: bool = False,
        logits_to_keep: int | Tensor = 0,
        labels: Tensor | None = None,
        prompts: tuple[Tensor, ...] | None = None,
    ) -> MoeCausalLMOutputWithPast:
        """Logits [N, k, V], with hidden_states = the final normed hidden states [N, T, H]; grad flows.

        With `prompts` = (ids, mask) [B, P], or (ids, mask, prompt_of [N]), input_ids [N, R] are right-padded answers,
        and the logits [1, T, V] are those that predict their T real tokens, row by row: see answer_states.

        Args: as MiniMindModel.forward; logits_to_keep: 0 = every column, k = the last k, a tensor = those columns;
            labels long [N, T]: loss is the mean cross-entropy of each next token, -100 left out (without aux_loss).
        """
        if isinstance(logits_to_keep, int) and logits_to_keep < 0:
            raise ValueError(f"logits_to_keep is {logits_to_keep}: it must be at least 0 (0 = every column)")
        if prompts is not None:
            ids, mask, *prompt_of = prompts
            hidden, aux_loss = self.model.answer_states(ids, mask, input_ids, attention_mask, *prompt_of)
            return MoeCausalLMOutputWithPast(aux_loss=aux_loss, logits=self.lm_head(hidden)[None], hidden_states=hidden)
        hidden, cache, aux_loss = self.model(input_ids, attention_mask, past_key_values, use_cache)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept])
        loss = None
        if labels is not None:
            if labels.shape != logits.shape[:2]:
                raise ValueError(
                    f"labels {tuple(labels.shape)} need the logits of every column, found {tuple(logits.shape[:2])}: "
                    "leave logits_to_keep at 0"
                )
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)
        present = {} if cache is None else {CACHE_FIELD: cache}
        return MoeCausalLMOutputWithPast(loss=loss, aux_loss=aux_loss, logits=logits, hidden_states=hidden, **present)
