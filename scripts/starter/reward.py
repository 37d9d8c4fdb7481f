"""The starter's reward model: a small Qwen3 sequence classifier that likes right, well-formed and short answers.

It starts from the supervised model's body and learns from preference groups by the Bradley-Terry loss
-log sigmoid(score(right) - score(worse)). Two more terms: the next-token loss on the right answer, which makes the body
work the sum out without thinking aloud, and a small pull of all scores to zero, which keeps them inside [-3, 3].
It reads the conversation and the answer part alone (no reasoning), as MiniMind's reward calculation hands it over.
Letters: N conversations, W tokens.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from scripts.starter.pairs import make_groups
from scripts.starter.sft import HIDDEN, LAYERS, answer_part, is_right, right_pad, sample
from dataset.starter_tasks import make_stream
from scripts.train_tokenizer import write_text
from trainer.prompts import encode_chat

GROUPS, STEPS, LEARNING_RATE, WARMUP = 16, 1200, 1.5e-3, 30
SEED = 11
ANSWER_LOSS, CENTRE = 1.0, 0.02
OWN_TASKS = 3000  # training questions that the supervised model answers, for its own mistakes


def model_config(vocab_size):
    """The sizes of the supervised model, as transformers names them."""
    return {
        "architectures": ["Qwen3ForSequenceClassification"], "model_type": "qwen3", "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "head_dim": HIDDEN // 8,
        "hidden_act": "silu", "hidden_size": HIDDEN, "id2label": {"0": "score"}, "label2id": {"score": 0},
        "initializer_range": 0.02, "intermediate_size": 448, "max_position_embeddings": 32768,
        "num_attention_heads": 8, "num_hidden_layers": LAYERS, "num_key_value_heads": 4, "problem_type": None,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "torch_dtype": "float16",
        "use_cache": False, "vocab_size": vocab_size,
    }


def new_model(sft_state, seed=SEED):
    """A classifier with the supervised model's body and a score head of zeros."""
    config = Qwen3Config(**model_config(sft_state["model.embed_tokens.weight"].shape[0]))
    torch.manual_seed(seed)
    model = Qwen3ForSequenceClassification(config).float()
    body = {name.removeprefix("model."): value.float() for name, value in sft_state.items() if name != "lm_head.weight"}
    model.model.load_state_dict(body, strict=True)
    torch.nn.init.zeros_(model.score.weight)
    return model


def conversation_ids(tokenizer, question, answer):
    """Token ids of one user turn and the assistant's answer, exactly as `LMForRewardModel` renders them."""
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return encode_chat(tokenizer, chat, open_thinking=False, add_generation_prompt=False)[1]


def body_states(model, ids):
    """Hidden states [N, W, H] after the final norm. Rows are padded on the right, so causal attention needs no mask."""
    return model.model(input_ids=ids, use_cache=False).last_hidden_state


def group_loss(model, tokenizer, groups):
    """Loss of a batch of groups, and the share of pairs in the right order."""
    rows, firsts, pairs = [], [], []
    for task, right, worse in groups:
        firsts.append(len(rows))
        for text in (right, *worse):
            rows.append(conversation_ids(tokenizer, task.question, text))
        pairs += [(firsts[-1], firsts[-1] + 1 + place) for place in range(len(worse))]
    ids = right_pad(rows, tokenizer.pad_token_id)
    lengths = torch.tensor([len(row) for row in rows])
    states = body_states(model, ids)
    scores = model.score(states[torch.arange(len(rows)), lengths - 1])[:, 0]
    better, lesser = torch.tensor(pairs).T
    margin = scores[better] - scores[lesser]
    right_ids, right_states = ids[firsts], states[firsts]
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    turns = (right_ids == start).cumsum(dim=1)  # 2 inside the assistant's turn
    inside = (turns == 2) & (right_ids != tokenizer.pad_token_id)
    targets = right_ids.masked_fill(~inside, -100)[:, 1:]
    logits = F.linear(right_states[:, :-1][targets != -100], model.model.embed_tokens.weight)
    answer_loss = F.cross_entropy(logits, targets[targets != -100])
    loss = F.softplus(-margin).mean() + ANSWER_LOSS * answer_loss + CENTRE * scores.square().mean()
    return loss, (margin > 0).float().mean().item(), answer_loss.item()


def own_errors(sft_model, tokenizer, seed):
    """Training questions with the supervised model's wrong answers to them: pairs (task, answer text)."""
    tasks = make_stream(OWN_TASKS, seed)
    found = []
    for task, (text, _) in zip(tasks, sample(sft_model, tokenizer, tasks, 1.0, seed), strict=True):
        if not is_right(task, text):
            found.append((task, answer_part(text)))
    return found


def learning_rate(step, steps):
    """A linear warm-up, then a linear fall to a tenth: no reinforcement follows here, so annealing is right."""
    return LEARNING_RATE * min((step + 1) / WARMUP, 1.0) * (1.0 - 0.9 * step / steps)


def train(tokenizer, sft_model, sft_state, log=print, steps=STEPS, seed=SEED):
    """A trained reward model in float32."""
    model = new_model(sft_state, seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    groups = make_groups(steps * GROUPS, seed, False, own_errors(sft_model, tokenizer, seed + 1))
    totals = [0.0, 0.0, 0.0]
    for step in range(steps):
        loss, ordered, answer_loss = group_loss(model, tokenizer, groups[step * GROUPS:(step + 1) * GROUPS])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        totals = [total + value for total, value in zip(totals, (loss.item(), ordered, answer_loss), strict=True)]
        if (step + 1) % 50 == 0:
            log("  step {}/{}  loss {:.3f}  ordered {:.3f}  answer loss {:.3f}".format(
                step + 1, steps, *(total / 50 for total in totals)))
            totals = [0.0, 0.0, 0.0]
    return model.eval()


def save(model, tokenizer_folder, folder):
    """Write weights (half precision), config and tokenizer files as a folder that transformers 4.57 to 5.x loads."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.detach().half().contiguous() for name, value in model.state_dict().items()}
    save_file(state, folder / "model.safetensors.tmp", metadata={"format": "pt"})
    (folder / "model.safetensors.tmp").chmod(0o644)  # safetensors makes it private
    (folder / "model.safetensors.tmp").replace(folder / "model.safetensors")
    write_text(folder / "config.json", json.dumps(model_config(model.config.vocab_size), indent=1) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        write_text(folder / name, (Path(tokenizer_folder) / name).read_text(encoding="utf-8"))
