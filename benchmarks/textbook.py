"""One RL step as a textbook writes it, on the same weights: what scripts/benchmark.py measures the trainers against.

Each choice is the obvious one, as in MiniMind's scripts, and none is wasteful on purpose: the prompt is repeated for
each answer, keys and values grow by torch.cat, every row is decoded until the last one ends, old log-probs take a
second forward, policy and reference make logits and log-softmax for all positions, attention is fused only where
nothing is padded, answers are scored one by one. Of this project it uses the modules that hold weights, and the text
rules.

Letters: B prompts, G answers a prompt, N = B·G rows, P prompt width, R answer width, W = P + R, V vocabulary, S cached
columns, D head size.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.stopwatch import Stopwatch
from model.configuration import rotary_frequencies
from model.model_minimind import MOEFeedForward
from trainer.rewards import answer_part, rule_reward
from trainer.trainer_utils import autocast_context

STD_EPS, VARIANCE_EPS = 1e-4, 1e-8


# ---------------------------------------------------------------------------------------------- model
def rms_norm(x: Tensor, norm: nn.Module) -> Tensor:
    scaled = x.float() * torch.rsqrt(x.float().pow(2).mean(dim=-1, keepdim=True) + norm.eps)
    return (norm.weight * scaled).type_as(x)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, T, heads, D] turned by its positions; cos, sin [T, 1, D]."""
    left, right = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-right, left], dim=-1) * sin).type_as(x)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """[N, T, heads·D] from q [N, T, heads, D] and k, v [N, S, kv heads, D]; mask [N, S], None = nothing is padded."""
    n, width, heads, size = q.shape
    shared = heads // k.shape[2]
    k, v = (x.repeat_interleave(shared, dim=2).transpose(1, 2) for x in (k, v))
    q = q.transpose(1, 2)
    if mask is None and width > 1:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        scores = q @ k.transpose(-2, -1) / math.sqrt(size)
        if width > 1:
            scores += torch.full((width, width), -torch.inf, device=q.device).triu(1)
        if mask is not None:
            scores += (1.0 - mask[:, None, None, :].type_as(scores)) * -1e9
        out = scores.float().softmax(dim=-1).type_as(v) @ v
    return out.transpose(1, 2).reshape(n, width, heads * size)


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight)


def attention(block: nn.Module, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, past):
    """(output [N, T, H], (keys, values) of all columns so far [N, S, kv heads, D])."""
    heads = (*x.shape[:2], -1, block.head_dim)
    q = rotate(rms_norm(linear(block.q_proj, x).view(heads), block.q_norm), *rotary)
    k = rotate(rms_norm(linear(block.k_proj, x).view(heads), block.k_norm), *rotary)
    v = linear(block.v_proj, x).view(heads)
    if past is not None:
        k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
    return linear(block.o_proj, attend(q, k, v, mask)), (k, v)


def swiglu(mlp: nn.Module, x: Tensor) -> Tensor:
    return linear(mlp.down_proj, F.silu(linear(mlp.gate_proj, x)) * linear(mlp.up_proj, x))


def experts(mlp: nn.Module, x: Tensor) -> Tensor:
    """Each expert on the tokens that chose it."""
    flat = x.reshape(-1, x.shape[-1])
    weights, picks = mlp.gate(flat).softmax(dim=-1, dtype=torch.float32).topk(mlp.config.num_experts_per_tok, dim=-1)
    if mlp.config.norm_topk_prob:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    out = torch.zeros_like(flat)
    for number, expert in enumerate(mlp.experts):
        token, place = (picks == number).nonzero(as_tuple=True)
        found = swiglu(expert, flat[token]) * weights[token, place, None]
        out = out.index_add(0, token, found.type_as(out))
    return out.view_as(x)


def hidden_states(model: nn.Module, ids: Tensor, mask: Tensor | None, rotary: tuple[Tensor, Tensor], cache=None):
    """(states after the final norm [N, T, H], cache of all columns) of new columns ids [N, T]; mask [N, S] or None."""
    start = 0 if cache is None else cache[0][0].shape[1]
    rotary = tuple(table[start : start + ids.shape[1]] for table in rotary)
    x, presents = model.model.embed_tokens(ids), []
    for number, layer in enumerate(model.model.layers):
        out, present = attention(layer.self_attn, rms_norm(x, layer.input_layernorm), rotary, mask,
                                 None if cache is None else cache[number])  # fmt: skip
        x = x + out
        feed_forward = experts if isinstance(layer.mlp, MOEFeedForward) else swiglu
        x = x + feed_forward(layer.mlp, rms_norm(x, layer.post_attention_layernorm))
        presents.append(present)
    return rms_norm(x, model.model.norm), presents


def padding_mask(mask: Tensor) -> Tensor | None:
    """The mask, or None where nothing is padded and fused attention may be used."""
    return None if bool(mask.all()) else mask


def token_logps(model, ids: Tensor, mask: Tensor, width: int, rotary, temperature: float) -> Tensor:
    """Log-probs float32 [N, width] of the last `width` tokens of ids [N, W], from the logits of all W positions."""
    states, _ = hidden_states(model, ids, padding_mask(mask), rotary)
    logits = linear(model.lm_head, states)
    if temperature != 1:
        logits = logits / temperature
    logps = logits[:, :-1].float().log_softmax(dim=-1)
    return logps.gather(-1, ids[:, 1:, None]).squeeze(-1)[:, -width:]


def token_values(critic, ids: Tensor, mask: Tensor, width: int, rotary) -> Tensor:
    """The critic's values float32 [N, width] before each of the last `width` tokens."""
    states, _ = hidden_states(critic, ids, padding_mask(mask), rotary)
    # MiniMind: the final norm a second time
    return critic.value_head(rms_norm(states, critic.model.norm)).squeeze(-1).float()[:, -width - 1 : -1]


# ---------------------------------------------------------------------------------------------- rollout
class Sampled(NamedTuple):
    """N answers behind their prompts; masks bool, True = a prompt's or an answer's token, its end included."""

    output_ids: Tensor  # [N, W]
    attention_mask: Tensor  # [N, W]
    completion_ids: Tensor  # [N, R]
    completion_mask: Tensor  # [N, R]
    completions: list[str]


def draw(logits: Tensor, uniforms: Tensor, temperature: float) -> Tensor:
    """Token ids [N]: the first whose cumulative probability exceeds the row's uniform (float64 [N])."""
    cumulative = (logits.float() / temperature).softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    return (cumulative <= uniforms[:, None] * cumulative[:, -1:]).sum(dim=-1)


@torch.no_grad()
def sample(model, prompt_ids: Tensor, prompt_mask: Tensor, copies: int, uniforms: Tensor, eos: int, pad: int,
           rotary, temperature: float) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(answers [N, R], their masks) to prompts [B, P] on the left; token t of row i is drawn with uniforms[i, t]."""
    new, mask = prompt_ids.repeat_interleave(copies, dim=0), prompt_mask.bool().repeat_interleave(copies, dim=0)
    padded = padding_mask(mask) is not None
    ids, counted, cache = new[:, :0], mask[:, :0], None
    running = torch.ones(len(new), dtype=torch.bool, device=new.device)
    for step in range(uniforms.shape[1]):
        states, cache = hidden_states(model, new, mask if padded else None, rotary, cache)
        logits = linear(model.lm_head, states)[:, -1]
        token = draw(logits, uniforms[:, step], temperature).masked_fill(~running, pad)
        ids, counted = torch.cat([ids, token[:, None]], dim=1), torch.cat([counted, running[:, None]], dim=1)
        mask = torch.cat([mask, torch.ones_like(running)[:, None]], dim=1)
        running = running & (token != eos)
        if not bool(running.any()):
            break
        new = token[:, None]
    return ids, counted


# ---------------------------------------------------------------------------------------------- the step
class Textbook:
    """GRPO and PPO steps on the models of a `Product`, with optimizers of its own."""

    name = "textbook"

    def __init__(self, product, longest: int):
        run, self.args, self.device = product.run, product.args, product.device
        self.models, self.reference = product.models, run.reference
        self.tokenizer, self.reward_model = run.tokenizer, run.reward_model
        rates = [self.args.learning_rate, getattr(self.args, "critic_learning_rate", None)]
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=rate)
                           for model, rate in zip(self.models, rates, strict=False)]  # fmt: skip
        self.scaler = torch.amp.GradScaler(self.device.partition(":")[0], enabled=self.args.dtype == "float16")
        angles = torch.outer(torch.arange(longest), rotary_frequencies(run.config)).repeat(1, 2).to(self.device)
        self.rotary = (angles.cos()[:, None], angles.sin()[:, None])
        self.before_step = None  # called with the models just before the optimizers move them

    def decode(self, work) -> Sampled:
        prompt_ids, prompt_mask = work.prompts
        with autocast_context(self.device, work.args.dtype):
            ids, mask = sample(self.models[0], prompt_ids, prompt_mask, work.copies, work.uniforms,
                               self.tokenizer.eos_token_id, self.tokenizer.pad_token_id, self.rotary,
                               work.args.temperature)  # fmt: skip
        texts = [self.tokenizer.decode(row[keep].tolist(), skip_special_tokens=True)
                 for row, keep in zip(ids.cpu(), mask.cpu(), strict=True)]  # fmt: skip
        output_ids = torch.cat([prompt_ids.repeat_interleave(work.copies, dim=0), ids], dim=1)
        full_mask = torch.cat([prompt_mask.bool().repeat_interleave(work.copies, dim=0), mask], dim=1)
        return Sampled(output_ids, full_mask, ids, mask, texts)

    def score(self, work, rollout: Sampled) -> Tensor:
        rewards = []
        for i, text in enumerate(rollout.completions):
            score = self.reward_model.get_score(work.batch["messages"][i // work.copies], answer_part(text))
            rewards.append(rule_reward(text) + score)
        return torch.tensor(rewards, device=self.device)

    def logps(self, model, work, rows) -> Tensor:
        return token_logps(model, rows.output_ids, rows.attention_mask, rows.completion_ids.shape[1], self.rotary,
                           work.args.logp_temperature)  # fmt: skip

    @torch.no_grad()
    def fixed_logps(self, work, rollout, watch: Stopwatch) -> tuple[Tensor, Tensor]:
        """(old, reference) log-probs [N, R]."""
        with autocast_context(self.device, work.args.dtype):
            watch.switch("old log-probs")
            old = self.logps(self.models[0], work, rollout)
            watch.switch("reference")
            return old, self.logps(self.reference, work, rollout)

    def update(self, work, rollout, rewards: Tensor, watch: Stopwatch) -> dict[str, float]:
        """Learn from one rollout; gives the losses by the names under which the trainers log them."""
        learn = self.grpo if len(self.models) == 1 else self.ppo
        return learn(work, rollout, rewards, watch)

    def step_optimizers(self, loss: Tensor, watch: Stopwatch) -> None:
        watch.switch("backward")
        self.scaler.scale(loss).backward()
        watch.switch("optimizer")
        if self.before_step is not None:
            self.before_step(self.models)
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), self.args.grad_clip)
            self.scaler.step(optimizer)
        self.scaler.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def grpo(self, work, rollout, rewards: Tensor, watch: Stopwatch) -> dict[str, float]:
        mask = rollout.completion_mask.float()
        old, ref = self.fixed_logps(work, rollout, watch)
        watch.switch("forward")
        groups = rewards.view(-1, work.copies)
        advantages = (groups - groups.mean(dim=1, keepdim=True)) / (groups.std(dim=1, correction=0, keepdim=True)
                                                                    + STD_EPS)  # fmt: skip
        with autocast_context(self.device, work.args.dtype):
            logps = self.logps(self.models[0], work, rollout)
        weight = (logps - old).exp().clamp(max=self.args.epsilon_high).detach()
        surrogate = -weight * advantages.view(-1, 1) * logps
        kl = (ref - logps).exp() - (ref - logps) - 1
        policy_loss, kl_loss = (((x * mask).sum(dim=1) / mask.sum(dim=1)).mean() for x in (surrogate, kl))
        self.step_optimizers(policy_loss + self.args.beta * kl_loss, watch)
        watch.switch("other")
        return {"policy_loss": policy_loss.item(), "kl": ((kl.detach() * mask).sum() / mask.sum()).item()}

    @torch.no_grad()
    def estimate_advantages(self, rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """(whitened advantages, returns) [N, R] by GAE, the reward on each row's last token."""
        advantages, following = torch.zeros_like(values), values.new_zeros(len(values), 2)  # next advantage, next value
        last = mask.sum(dim=1).long() - 1
        for t in reversed(range(values.shape[1])):
            reward = torch.where(last == t, rewards, 0.0)
            delta = reward + self.args.gamma * following[:, 1] - values[:, t]
            here = (delta + self.args.gamma * self.args.lam * following[:, 0]) * mask[:, t]
            advantages[:, t] = here
            following = torch.stack([here, values[:, t] * mask[:, t]], dim=1)
        returns = advantages + values
        mean = (advantages * mask).sum() / mask.sum()
        variance = ((advantages - mean).square() * mask).sum() / mask.sum()
        return (advantages - mean) * torch.rsqrt(variance + VARIANCE_EPS), returns

    def ppo(self, work, rollout, rewards: Tensor, watch: Stopwatch) -> dict[str, float]:
        mask, width = rollout.completion_mask.float(), rollout.completion_mask.shape[1]
        old, ref = self.fixed_logps(work, rollout, watch)
        watch.switch("values")
        with torch.no_grad(), autocast_context(self.device, work.args.dtype):
            old_values = token_values(self.models[1], rollout.output_ids, rollout.attention_mask, width, self.rotary)
        advantages, returns = self.estimate_advantages(rewards, old_values, mask)
        sums = torch.zeros(4, device=self.device)
        for start in work.minibatches:
            watch.switch("forward")
            chosen = slice(start, start + self.args.mini_batch_size)
            rows = Sampled(*(part[chosen] for part in rollout[:5]))
            losses = self.ppo_losses(work, rows, old[chosen], ref[chosen], advantages[chosen], old_values[chosen],
                                     returns[chosen])  # fmt: skip
            if losses is None:
                break
            policy_loss, kl, value_loss = losses
            self.step_optimizers(policy_loss + self.args.kl_coef * kl + self.args.vf_coef * value_loss, watch)
            counted = mask[chosen].sum()
            sums += torch.stack([policy_loss * counted, kl * counted, value_loss * counted, counted]).detach()
        watch.switch("other")
        policy_loss, kl, value_loss = (sums[:3] / sums[3]).tolist()
        return {"policy_loss": policy_loss, "kl": kl, "critic/vf_loss": value_loss}

    def ppo_losses(self, work, rows: Sampled, old, ref, advantages, old_values, returns):
        """(policy loss, KL, value loss) of a minibatch, or None if the policy has moved too far."""
        mask, width = rows.completion_mask.float(), rows.completion_mask.shape[1]
        with autocast_context(self.device, work.args.dtype):
            logps = self.logps(self.models[0], work, rows)
            values = token_values(self.models[1], rows.output_ids, rows.attention_mask, width, self.rotary)
        tokens = mask.sum()
        if 0.5 * ((logps.detach() - old).square() * mask).sum() / tokens > self.args.early_stop_kl:
            return None
        ratio, clip = (logps - old).exp(), self.args.clip_epsilon
        surrogate = -torch.min(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
        kl = (ref - logps).exp() - (ref - logps) - 1
        near = old_values + (values - old_values).clamp(-self.args.cliprange_value, self.args.cliprange_value)
        errors = 0.5 * torch.max((values - returns).square(), (near - returns).square())
        return tuple((x * mask).sum() / tokens for x in (surrogate, kl, errors))
