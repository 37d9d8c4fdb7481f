"""Checks of an SGLang server before it is trusted: does it serve this model, has it the weights, how does it count."""

from pathlib import Path

import torch
from torch import Tensor, nn

from model.configuration import MiniMindConfig
from model.export import minimind_config, read_json
from trainer.distributed import Logger, unwrap_model
from trainer.rollout_engine import compute_per_token_logps
from trainer.sglang_client import Job, Sampling, SGLangServer

PROBE_TOKENS = 16
# The temperature at which servers are asked how they report log-probs. Above 1: there even a trained model's log-probs
# are far from those at temperature 1, while below 1 both are near 0.
PROBE_TEMPERATURE = 2.0
WRONG_MODEL = 0.5  # nats: half-precision servers are within 0.1 of a float32 trainer on average, other weights are not
TELLING_APART = 1e-3  # nats between the two scales below which rounding could decide
COMPARED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
            "use_moe", "rope_theta", "inference_rope_scaling")  # fmt: skip


def remedy(config) -> str:
    """What to launch a server with that is to serve the model of this config."""
    if isinstance(config, MiniMindConfig):
        return "launch it with the folder that scripts/convert_model.py wrote from the weights being trained"
    return "launch it with the folder of --hf_model"


def check_launch_folder(folder: str | None, config, what: str) -> None:
    """Compare a launch folder's config, where this machine sees it, with the model's.

    Raises: ValueError naming `what`, the first size that differs, and both values.
    """
    path = Path(folder or "") / "config.json"
    if not folder or not path.is_file():
        return
    if isinstance(config, MiniMindConfig):
        theirs = vars(minimind_config(read_json(path), path))
        names = COMPARED + (("num_experts", "moe_intermediate_size") if config.use_moe else ("intermediate_size",))
    else:
        theirs = read_json(path)
        names = [name for name in ("model_type", *COMPARED, "intermediate_size") if name in theirs]
    for name in names:
        if theirs[name] != getattr(config, name, theirs[name]):
            raise ValueError(f"{what} {folder}: its {name} is {theirs[name]}, the model being trained has "
                             f"{getattr(config, name)}; {remedy(config)}")


def check_server(server: SGLangServer, config) -> None:
    """Compare what a server says of itself with the model, before it is sent weights that would kill it.

    Raises: ValueError if it serves another architecture or other sizes.
    """
    info = server.learn()
    kind = config.model_type
    if isinstance(config, MiniMindConfig):
        kind = "qwen3_moe" if config.use_moe else "qwen3"
    if info.get("model_type") not in (None, kind):
        raise ValueError(f"{server.url} serves a {info['model_type']}, the model being trained is a {kind}; "
                         f"{remedy(config)}")
    check_launch_folder(info.get("model_path"), config, f"{server.url} serves")
    Logger(f"SGLang server {server.url}: version {info.get('version', 'unknown')}, context "
           f"{server.context or 'unknown'} tokens")


def probe_server(server: SGLangServer, model: nn.Module, end_ids: tuple[int, ...], version: str | None) -> str:
    """What a server divides logits by in the log-probs it reports, found with two requests.

    A greedy answer's log-probs must be the trainer's: that proves the weights. Those of an answer at PROBE_TEMPERATURE
    are compared with the trainer's at that temperature and at 1.
    Returns: "sampling" (the sampling temperature), "one", or "unknown" where the two are too close to tell, as they are
    for a model that is all but uniform.
    Raises: RuntimeError if the server computes another model.
    """
    vocab_size = unwrap_model(model).config.vocab_size
    prompt = [(1 + max(1, vocab_size // 8) * i) % vocab_size for i in range(8)]

    def ask(temperature: float) -> tuple[list[int], Tensor]:
        sampling = Sampling(PROBE_TOKENS, temperature, 1.0, 0, end_ids, ignore_eos=True)
        job = Job(f"the probe at temperature {temperature:g}", prompt, 1, sampling)
        answer = server.generate(job, vocab_size, version)
        return answer.ids, torch.tensor(answer.logps)

    ids, theirs = ask(0.0)
    greedy = (theirs - score_answer(model, prompt, ids, 1.0)).abs().mean().item()
    if greedy > WRONG_MODEL:
        raise RuntimeError(f"{server.url}: with the trainer's weights, its log-probs of a greedy answer are "
                           f"{greedy:.3g} nats from the trainer's on average: it computes another model (other rotary "
                           f"settings, or experts without an lm_head.weight of their own?); "
                           f"{remedy(unwrap_model(model).config)}")
    ids, theirs = ask(PROBE_TEMPERATURE)
    warm, plain = (score_answer(model, prompt, ids, t) for t in (PROBE_TEMPERATURE, 1.0))
    gaps = {"sampling": (theirs - warm).abs().mean().item(), "one": (theirs - plain).abs().mean().item()}
    convention, apart = min(gaps, key=gaps.get), (warm - plain).abs().mean().item()
    if apart < TELLING_APART or gaps[convention] > 0.25 * apart:
        convention = "unknown"
    words = {"sampling": "at the sampling temperature", "one": "at temperature 1",
             "unknown": "at a temperature that cannot be told"}[convention]  # fmt: skip
    Logger(f"SGLang server {server.url}: greedy log-probs within {greedy:.2g} nats of the trainer's, those of sampled "
           f"answers are reported {words} (off by {gaps['sampling']:.2g} from that, {gaps['one']:.2g} from 1)")
    return convention


@torch.no_grad()
def score_answer(model: nn.Module, prompt: list[int], answer: list[int], temperature: float) -> Tensor:
    """The trainer's own log-probs of an answer, float32 [tokens] on the CPU; the model's mode stays as it is."""
    bare = unwrap_model(model)
    was_training = bare.training
    ids = torch.tensor([prompt + answer], device=next(bare.parameters()).device)
    logps = compute_per_token_logps(bare.eval(), ids, len(answer), temperature=temperature)[0].cpu()
    bare.train(was_training)
    return logps
