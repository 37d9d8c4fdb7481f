#!/usr/bin/env bash
# From weights to training steps against a real SGLang server: convert, launch, compare log-probs, kill, train.
# Usage: scripts/sglang_smoke.sh VENV [PYTHON]        about 10 minutes on a CPU
#   VENV    an environment in which `python -m sglang.launch_server` runs. On a machine without a GPU that has to be an
#           SGLang that works on a CPU: its own CPU build, or one whose compiled kernels are replaced by modules that
#           PYTHONPATH leads to (SMOKE_PYTHONPATH is passed to the server alone).
#   PYTHON  the trainer's interpreter, default `python`.
# Prints what the integration tests measured and the trainers' own lines; exit status 0 if everything held.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
venv=${1:?usage: sglang_smoke.sh VENV [PYTHON]}
python=${2:-python}
work=$(mktemp -d)
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
url=http://127.0.0.1:$port

options=(--host 127.0.0.1 --port "$port" --dtype float32)
if ! command -v nvidia-smi >/dev/null; then
    export SGLANG_USE_CPU_ENGINE=1
    options+=(--device cpu --attention-backend torch_native --disable-cuda-graph --max-total-tokens 20000)
fi

# The server is a process group of its own, so that kill -9 reaches its workers too.
cat >"$work/launch.sh" <<LAUNCH
[ ! -s "$work/pid" ] || kill -9 -- -"\$(cat "$work/pid")" 2>/dev/null || true
PYTHONPATH="${SMOKE_PYTHONPATH:-}" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 \
    setsid "$venv/bin/python" -m sglang.launch_server --model-path "\$(cat "$work/folder")" ${options[*]} \
    >>"$work/server.log" 2>&1 </dev/null &
echo \$! >"$work/pid"
LAUNCH
stop() { bash -c "kill -9 -- -\$(cat '$work/pid')" 2>/dev/null || true; }
trap 'status=$?; stop; [ $status = 0 ] && rm -rf "$work" || { tail -30 "$work/server.log"; echo "kept: $work"; }' EXIT

serve() { # FOLDER: launch, and wait until it answers
    echo "$1" >"$work/folder"
    bash "$work/launch.sh"
    for _ in $(seq 300); do
        if curl -sf -m 25 "$url/health" >/dev/null; then return; fi
        kill -0 "$(cat "$work/pid")" 2>/dev/null || { echo "the server died" >&2; exit 1; }
        sleep 1
    done
    echo "the server did not come up in 300 s" >&2
    exit 1
}

measure() { # FOLDER: the integration tests against a server of it
    echo "== $1"
    serve "$1"
    (cd "$root" && SGLANG_TEST_URL=$url SGLANG_TEST_MODEL=$1 SGLANG_TEST_RESTART="bash $work/launch.sh" \
        "$python" -m pytest -q -rP -p no:cacheprovider tests/integration)
}

# Experts of random weights: SGLang ignores tied embeddings there, so this is what the written lm_head is for.
(cd "$root" && "$python" - "$work/random_64_moe.pth" <<'MODEL'
import sys
import torch
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from trainer.loading import load_tokenizer
torch.manual_seed(0)
vocabulary = len(load_tokenizer("model"))
config = MiniMindConfig(64, 2, use_moe=True, vocab_size=vocabulary, initializer_range=0.15)
torch.save(MiniMindForCausalLM(config).state_dict(), sys.argv[1])
MODEL
)
"$python" "$root/scripts/convert_model.py" "$work/random_64_moe.pth" "$work/moe"
"$python" "$root/scripts/convert_model.py" "$root/model/starter/starter_sft_128.pth" "$work/dense"
measure "$work/moe"
stop
measure "$work/dense"

for name in grpo ppo; do
    echo "== train_$name"
    "$python" "$root/trainer/train_$name.py" --starter --device cpu --max_steps 5 --eval_prompts 0 \
        --rollout_engine sglang --sglang_base_url "$url" --sglang_model_path "$work/dense" \
        --sglang_shared_path "$work/shared" --save_dir "$work/$name" --checkpoint_dir "$work/$name" \
        --run_dir "$work/$name/run"
    "$python" - "$work/$name/run/metrics.jsonl" <<'METRICS'
import json
import sys
for row in map(json.loads, open(sys.argv[1], encoding="utf-8")):
    shown = {name: value for name, value in row.items() if name in ("step", "reward") or name.startswith("sampling/")}
    print(shown)
METRICS
done
