"""This project's step as its scripts take it, on work whose size and answer lengths are given.

The run is built by the script's own `build_run`, and the step is made of the script's own functions. Two things are
added from outside: the uniforms that tokens are drawn with, so that answers end where they are told to and another
implementation can draw the same tokens; and hooks that tell a stopwatch which phase has begun.

Letters: B prompts, G answers a prompt, N = B·G rows, P prompt width, R answer width.
"""

import argparse
import contextlib
import copy
import functools
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.stopwatch import Stopwatch
from dataset.lm_dataset import collate_rows
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer import train_grpo, train_ppo
from trainer.arguments import STARTER_DIR
from trainer.checkpoints import save_weights, weights_path
from trainer.loading import load_tokenizer
from trainer.prompts import encode_chat, encode_prompts
from trainer.rollout_engine import sample_answers
from trainer.trainer_utils import row_is_real, start_process, unwrap_model

SCRIPTS = {"grpo": train_grpo, "ppo": train_ppo}
WEIGHTS = "random"
LOWEST_UNIFORM = 0.05  # above the probability of the first token of the vocabulary, which ends answers here
REFERENCE_NOISE = 5e-3  # what sets policy and reference apart, so that the KL term has a value and a gradient
MANY_EPOCHS = 10_000  # planned, so that the learning rate's cosine is flat over the few steps taken


@dataclass
class Work:
    """What one step works on."""

    args: argparse.Namespace  # the script's, with this work's sizes
    batch: dict[str, list]  # B rows of the dataset
    prompts: tuple[Tensor, Tensor]  # ids and mask [B, P], for who wants them encoded
    copies: int  # G
    lengths: list[int]  # of the N answers
    uniforms: Tensor  # float64 [N, R], what the tokens are drawn with
    minibatches: list[int]  # PPO: first rows of the minibatches, in the order in which the script last took them


# ---------------------------------------------------------------------------------------------- set-up
def question_of(tokenizer, prompt_len: int, number: int) -> str:
    """A question of random digits whose chat prompt has exactly `prompt_len` tokens (a digit is a token)."""
    _, ids = encode_chat(tokenizer, [{"role": "user", "content": "1"}], open_thinking=True)
    digits = prompt_len - len(ids) + 1
    if digits < 1:
        raise ValueError(f"--prompt_len {prompt_len}: the chat headers alone take {len(ids) - 1} tokens; give at least "
                         f"{len(ids)}")  # fmt: skip
    return "".join(map(str, np.random.Generator(np.random.Philox(number)).integers(0, 10, digits)))


def write_inputs(args, folder: Path) -> None:
    """Random weights as MiniMind saves them, and twice the prompts that a step takes."""
    config = MiniMindConfig(args.hidden_size, args.num_hidden_layers, bool(args.use_moe), vocab_size=args.vocab_size)
    torch.manual_seed(args.seed)
    save_weights(MiniMindForCausalLM(config), weights_path(folder, WEIGHTS, config))
    tokenizer = load_tokenizer(str(STARTER_DIR.parent))
    questions = [question_of(tokenizer, args.prompt_len, number) for number in range(2 * args.batch_size)]
    rows = [{"conversations": [{"role": "user", "content": question}]} for question in questions]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def script_argv(args, folder: Path) -> list[str]:
    """The command line of the training script: its defaults, but for sizes, inputs and what the user asked for."""
    flags = {
        "hidden_size": args.hidden_size, "num_hidden_layers": args.num_hidden_layers, "use_moe": args.use_moe,
        "from_weight": WEIGHTS, "weight_dir": folder, "data_path": folder / "prompts.jsonl", "save_dir": folder,
        "checkpoint_dir": folder, "reward_model_path": STARTER_DIR / "reward_model", "num_workers": 0,
        "batch_size": args.batch_size, "max_seq_len": args.prompt_len, "max_gen_len": args.max_gen_len,
        "thinking_ratio": 1, "system_ratio": 0, "temperature": 1.0, "seed": args.seed, "epochs": MANY_EPOCHS,
        "device": args.device, "dtype": args.dtype, "threads": args.threads, "use_compile": args.use_compile,
        "num_generations": args.num_generations if args.algo == "grpo" else None,
        "micro_batch_tokens": args.micro_batch_tokens, "gradient_checkpointing": args.gradient_checkpointing,
    }  # fmt: skip
    words = [word for name, value in flags.items() if value is not None for word in (f"--{name}", str(value))]
    return [*words, "--dry_run"]


def answer_lengths(kind: str, rows: int, longest: int, seed: int) -> list[int]:
    """Lengths of the answers: all `longest`, or one from each of `rows` equal parts of 1/8 … 1 of it, in mixed order.

    The middle of each part, so that few rows are spread like many, whatever the seed.
    """
    if kind == "fixed":
        return [longest] * rows
    shares = 1 / 8 + 7 / 8 * (np.arange(rows) + 0.5) / rows
    order = np.random.Generator(np.random.Philox(seed)).permutation(rows)
    return [max(1, round(longest * share)) for share in shares[order]]


def end_after(lengths: list[int], longest: int, seed: int) -> Tensor:
    """Uniforms float64 [N, longest] that draw the first token of the vocabulary, id 0, as each row's last and nowhere
    else: the uniform 0 always draws it, and a uniform above its probability never does."""
    draws = np.random.Generator(np.random.Philox(seed)).uniform(LOWEST_UNIFORM, 1.0, (len(lengths), longest))
    for row, length in zip(draws, lengths, strict=True):
        if length < longest:
            row[length - 1] = 0.0
    return torch.from_numpy(draws)


# ---------------------------------------------------------------------------------------------- the step
class Product:
    """A run of one of the scripts, ready to take steps that are watched."""

    name = "this project"

    def __init__(self, args, folder: Path):
        write_inputs(args, folder)
        self.script, self.algo = SCRIPTS[args.algo], args.algo
        self.args = self.script.parse_args(script_argv(args, folder))
        self.device = start_process(self.args)
        # what the script says of its inputs was meant for inputs that a user chose
        with contextlib.redirect_stdout(io.StringIO()):
            self.run = self.script.build_run(self.args, self.device)
        self.lengths_kind, self.seed = args.lengths, args.seed
        # Id 0 ends an answer: the one id that a uniform can ask for or rule out whatever the probabilities are. Texts
        # of random weights have no end of their own.
        self.run.tokenizer.eos_token = self.run.tokenizer.pad_token
        # The balance loss counts a prompt's tokens once here and once an answer in the textbook.
        self.run.config.router_aux_loss_coef = 0.0
        self.wrapped = [self.run.policy] if self.algo == "grpo" else [self.run.actor, self.run.critic]
        self.models = [unwrap_model(model) for model in self.wrapped]
        torch.manual_seed(args.seed + 1)
        with torch.no_grad():
            for parameter in self.run.reference.parameters():
                parameter.add_(REFERENCE_NOISE * torch.randn(parameter.shape).to(self.device))  # on any device the same
        self.start = [copy.deepcopy(model.state_dict()) for model in self.models]
        self.before_step = None  # called with the models just before the optimizers move them

    def restore(self) -> None:
        """The weights of the beginning and no gradients, so that every step starts from the same."""
        for model, state in zip(self.models, self.start, strict=True):
            model.load_state_dict(state)
            model.zero_grad(set_to_none=True)

    def work(self, *, prompts: int | None = None, copies: int | None = None, longest: int | None = None) -> Work:
        """The work of a step; sizes default to the flags'."""
        args = copy.copy(self.args)
        args.batch_size, args.max_gen_len = prompts or args.batch_size, longest or args.max_gen_len
        if self.algo == "grpo":
            args.num_generations = copies or args.num_generations
        copies = args.num_generations if self.algo == "grpo" else 1
        batch = collate_rows([self.run.dataset[i] for i in range(args.batch_size)])
        encoded = encode_prompts(self.run.tokenizer, batch["prompt_ids"], args.max_seq_len, self.device)
        rows = args.batch_size * copies
        lengths = answer_lengths(self.lengths_kind, rows, args.max_gen_len, self.seed)
        minibatches = [*range(0, rows, args.mini_batch_size)] * args.ppo_update_iters if self.algo == "ppo" else []
        return Work(args, batch, (encoded["input_ids"], encoded["attention_mask"]), copies, lengths,
                    end_after(lengths, args.max_gen_len, self.seed).to(self.device), minibatches)  # fmt: skip

    def decode(self, work: Work):
        policy, keys = self.models[0], [(train_grpo.TRAIN_STREAM, self.seed, 0, index) for index in work.batch["index"]]
        decode = type(policy).decode

        @functools.wraps(decode)
        def with_given_uniforms(*args, **settings):
            return decode(policy, *args, **{**settings, "uniforms": work.uniforms})

        with mock.patch.object(policy, "decode", with_given_uniforms):
            return sample_answers(self.run.engine, self.run.tokenizer, work.batch["prompt_ids"], keys, work.args,
                                  self.device, num_generations=work.copies, temperature=work.args.temperature)

    def score(self, work: Work, rollout) -> Tensor:
        return self.script.calculate_rewards(
            work.batch["prompt"], rollout.completions, self.run.reward_model, messages=work.batch["messages"],
            answers=work.batch["answer"], answer_reward=work.args.answer_reward,
        ).to(self.device)  # fmt: skip

    def update(self, work: Work, rollout, rewards: Tensor, watch: Stopwatch) -> dict[str, float]:
        """Learn from one rollout; gives what the script would log of it."""
        real = row_is_real(work.args.batch_size, work.copies, self.device)
        with self.watched(watch):
            watch.switch("forward")
            if self.algo == "grpo":
                sums = train_grpo.update(self.run, work.args, rollout, rewards, real, 1, True)
            else:
                sums = self.update_ppo(work, rollout, rewards, real)
            watch.switch("other")
            return sums.reduce()

    def update_ppo(self, work: Work, rollout, rewards: Tensor, real: Tensor):
        minibatch_order = train_ppo.minibatch_order

        def noted_order(*args):
            work.minibatches = minibatch_order(*args)
            return work.minibatches

        with mock.patch.object(train_ppo, "minibatch_order", noted_order):
            experience = train_ppo.gather_experience(self.run, work.args, rollout, rewards, real)
            return train_ppo.update(self.run, work.args, experience)

    @contextlib.contextmanager
    def watched(self, watch: Stopwatch) -> Iterator[None]:
        """Inside, a forward pass, a backward pass and an optimizer step each tell the stopwatch what has begun.

        What follows a forward pass counts with it, until the next one begins: log-probs belong to their logits.
        """
        backward, optimizer_step = torch.autograd.backward, self.script.optimizer_step

        def timed_backward(*args, **settings):
            with watch.phase("backward"):
                backward(*args, **settings)

        def timed_optimizer_step(models, *args, **settings):
            if self.before_step is not None:
                self.before_step([unwrap_model(model) for model in models])
            with watch.phase("optimizer"):
                return optimizer_step(models, *args, **settings)

        models = {**dict(zip(("old log-probs", "values"), self.wrapped, strict=False)), "reference": self.run.reference}
        hooks = [model.register_forward_pre_hook(functools.partial(begin, watch, phase))
                 for phase, model in models.items()]  # fmt: skip
        try:
            with mock.patch("torch.autograd.backward", timed_backward), \
                    mock.patch.object(self.script, "optimizer_step", timed_optimizer_step):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def in_float32(self) -> Iterator[None]:
        """Inside, everything is worked out in true float32, whatever --dtype says."""
        run = self.run
        kept = run.engine.autocast_ctx, run.scaler, self.args.dtype, torch.get_float32_matmul_precision()
        run.engine.autocast_ctx, self.args.dtype = contextlib.nullcontext(), "float32"
        run.scaler = torch.amp.GradScaler(self.device.partition(":")[0], enabled=False)
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            run.engine.autocast_ctx, run.scaler, self.args.dtype = kept[:3]
            torch.set_float32_matmul_precision(kept[3])


def begin(watch: Stopwatch, phase: str, module: nn.Module, inputs) -> None:
    """A hook for the start of a forward pass: `phase` if it makes no gradient."""
    learns = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters())
    watch.switch("forward" if learns else phase)


def take_step(side, work: Work, watch: Stopwatch):
    """Roll out, score, learn, under the stopwatch."""
    watch.switch("decode")
    rollout = side.decode(work)
    watch.switch("reward")
    rewards = side.score(work, rollout)
    side.update(work, rollout, rewards, watch)
    return rollout
