"""Proof, before anything is timed, that the textbook and this project compute the same thing."""

import torch
from torch import Tensor

from benchmarks.product import Product, Work
from benchmarks.stopwatch import Stopwatch
from benchmarks.textbook import Textbook, hidden_states, padding_mask

LARGEST_ERROR = 1e-5  # of losses (absolute, or relative where they are above 1) and gradients (relative to their norm)
LARGEST_LOGP_ERROR = 1e-4  # nats, decoding against a forward pass
LARGEST_REWARD_ERROR = {"cpu": 1e-4, "cuda": 0.05}  # scored in a batch or alone; on a GPU the reward model is float16


def require(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(f"the textbook step and this project's step differ: {message}. Times of different results "
                           "would mean nothing, so none are taken")  # fmt: skip


def require_lengths(name: str, rollout, work: Work) -> None:
    lengths = rollout.completion_mask.sum(dim=1).tolist()
    require(lengths == work.lengths, f"answers of {lengths} tokens in {name}, of {work.lengths} asked for")


@torch.no_grad()
def centre(work: Work, rollout, textbook: Textbook) -> tuple[Tensor, Tensor]:
    """Move each uniform of the work to the middle of the interval that draws the token it drew, and give
    (log-probs of the drawn tokens float32 [N, R], which count).

    A uniform near the edge of two tokens' intervals would draw the one here and the other there, for a difference in
    the last bit of a logit.
    """
    width, temperature = rollout.completion_ids.shape[1], work.args.temperature
    logps = torch.zeros(rollout.completion_ids.shape, device=rollout.output_ids.device)
    for i, ids in enumerate(rollout.output_ids):
        states, _ = hidden_states(textbook.models[0], ids[None], padding_mask(rollout.attention_mask[i][None]),
                                  textbook.rotary)  # fmt: skip
        scaled = textbook.models[0].lm_head(states)[0, -width - 1 : -1].float() / temperature
        probs = scaled.softmax(dim=-1)
        drawn = rollout.completion_ids[i][:, None]
        above = probs.cumsum(dim=-1, dtype=torch.float64)
        middle = (above.gather(1, drawn) - probs.gather(1, drawn) / 2) / above[:, -1:]
        length = work.lengths[i]
        work.uniforms[i, :length] = middle[:length, 0]
        logps[i] = scaled.log_softmax(dim=-1).gather(1, drawn)[:, 0]
    return logps, rollout.completion_mask


def gradients_of(side, work: Work, rollout, rewards: Tensor) -> tuple[dict[str, float], list[list[Tensor]]]:
    """(losses, gradient of every parameter at each optimizer step) of an update."""
    steps = []

    def keep(models) -> None:
        steps.append([torch.zeros_like(p) if p.grad is None else p.grad.clone()
                      for model in models for p in model.parameters()])  # fmt: skip

    side.before_step = keep
    try:
        losses = side.update(work, rollout, rewards, Stopwatch(str(rewards.device)))
    finally:
        side.before_step = None
    return losses, steps


def norm(tensors: list[Tensor]) -> float:
    return torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt().item()


def compare_updates(product: Product, textbook: Textbook, work: Work, rollouts: tuple) -> dict[str, float]:
    """{"loss_error", "gradient_error"}, the largest; RuntimeError where they are too large."""
    rewards = torch.linspace(-1.0, 1.0, len(work.lengths), device=product.device).flip(0)
    losses, steps = gradients_of(product, work, rollouts[0], rewards)
    product.restore()
    expected_losses, expected_steps = gradients_of(textbook, work, rollouts[1], rewards)
    product.restore()
    require(len(steps) == len(expected_steps),
            f"{len(steps)} optimizer steps here, {len(expected_steps)} in the textbook")  # fmt: skip
    loss_error = 0.0
    for name, expected in expected_losses.items():
        error = abs(losses[name] - expected) / max(1.0, abs(expected))
        require(error <= LARGEST_ERROR, f"{name} is {losses[name]:.8g} here and {expected:.8g} in the textbook, more "
                f"than {LARGEST_ERROR} apart")  # fmt: skip
        loss_error = max(loss_error, error)
    gradient_error = 0.0
    for found, expected in zip(steps, expected_steps, strict=True):
        error = norm([a - b for a, b in zip(found, expected, strict=True)]) / norm(expected)
        require(error <= LARGEST_ERROR, f"gradients are {error:.3g} apart (norm of the difference by norm), at most "
                f"{LARGEST_ERROR} is allowed")  # fmt: skip
        gradient_error = max(gradient_error, error)
    return {"loss_error": loss_error, "gradient_error": gradient_error}


def check(product: Product, textbook: Textbook, longest: int) -> tuple[Work, dict[str, float]]:
    """Work with answers of at most `longest` tokens, and how closely the two agree on it: tokens, their log-probs,
    rewards, losses and gradients.

    Worked out in float32. Raises: RuntimeError that says what differs, and by how much.
    """
    with product.in_float32():
        work = product.work(longest=longest)
        first = product.decode(work)
        require_lengths(product.name, first, work)
        logps, counted = centre(work, first, textbook)
        rollouts = product.decode(work), textbook.decode(work)
        for side, rollout in zip((product, textbook), rollouts, strict=True):
            require_lengths(side.name, rollout, work)
        equal = (rollouts[0].completion_ids == rollouts[1].completion_ids)[counted]
        require(bool(equal.all()), f"{int((~equal).sum())} of {equal.numel()} tokens")
        logp_error = (rollouts[0].per_token_logps - logps)[counted].abs().max().item()
        require(logp_error <= LARGEST_LOGP_ERROR, f"log-probs from decoding are up to {logp_error:.3g} nats from those "
                f"of a forward pass, at most {LARGEST_LOGP_ERROR} is allowed")  # fmt: skip
        limit = LARGEST_REWARD_ERROR[product.device.partition(":")[0]]
        rewards = product.score(work, rollouts[0]), textbook.score(work, rollouts[1])
        reward_error = (rewards[0] - rewards[1]).abs().max().item()
        require(reward_error <= limit, f"rewards are up to {reward_error:.3g} apart, at most {limit} is allowed")
        errors = compare_updates(product, textbook, work, rollouts)
    work.args.dtype = product.args.dtype
    return work, {"tokens": equal.numel(), "logp_error": logp_error, "reward_error": reward_error, **errors}
