#!/usr/bin/env bash
# Everything that needs a GPU, on one of them, at MiniMind's default sizes, in under 4 minutes: the parity tests, a few
# steps of both training scripts, and the benchmark. Prints time, tokens/s, MFU and peak memory; installs nothing.
# Usage: benchmarks/gpu_check.sh             PYTHON=... chooses the interpreter, default python
#        DEVICE=cpu benchmarks/gpu_check.sh  tiny sizes on a CPU: shows that the check itself runs, and nothing else
# Exit status: 0 if all of it held, 1 if something failed (the rest is still run) or if there is no GPU.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

python=${PYTHON:-python}
device=${DEVICE:-cuda}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export GPU_CHECK_DEVICE=$device TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

sizes=(--hidden_size 768 --num_hidden_layers 8)
training=(--max_gen_len 1024 --max_steps 3)
benchmark=(--prompt_len 768 --max_gen_len 1024 --dtype bfloat16 --lengths varied --repeats 1)
if [ "$device" = cpu ]; then
    sizes=(--hidden_size 32 --num_hidden_layers 2)
    training=(--max_gen_len 8 --max_steps 2)
    benchmark=(--prompt_len 24 --max_gen_len 8 --dtype bfloat16 --lengths varied --repeats 1 --memory 0 --threads 1)
fi

"$python" - "$device" <<'PROBE' || exit 1
import sys
try:
    import torch
    import transformers
except ImportError as error:
    sys.exit(f"error: {error}; choose an interpreter that has torch and transformers with PYTHON=...")
found = f"python {sys.version.split()[0]}, torch {torch.__version__}, transformers {transformers.__version__}"
if sys.argv[1] == "cpu":
    print(f"{found}: a trial on a CPU, which proves nothing about a GPU")
elif not torch.cuda.is_available():
    sys.exit(f"error: no GPU: {found} sees none; this check is for one (DEVICE=cpu tries its logic)")
else:
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    print(f"{found}, {torch.cuda.get_device_name(0)} with {memory:.0f} GiB")
PROBE

failed=()
check() { # NAME COMMAND...: run it, say how long it took, remember if it failed
    local name=$1 start=$SECONDS
    shift
    echo "== $name"
    if "$@"; then
        echo "== $name: passed in $((SECONDS - start)) s"
    else
        echo "== $name: FAILED (status $?) after $((SECONDS - start)) s"
        failed+=("$name")
    fi
}

train() { # ALGO: random weights, the starter's prompts and its reward model; every metric has to be a finite number
    local run=$folder/$1
    "$python" "trainer/train_$1.py" "${sizes[@]}" "${training[@]}" --device "$device" --from_weight none \
        --data_path dataset/rlaif_starter.jsonl --reward_model_path model/starter/reward_model --num_workers 0 \
        --save_dir "$run" --checkpoint_dir "$run" --run_dir "$run/run" || return
    "$python" - "$run/run/metrics.jsonl" "${training[-1]}" <<'METRICS'
import json
import math
import sys
rows = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")]
needed = ("reward", "policy_loss", "grad_norm", "completions/mean_length", "timing_s/step")
bad = [(row["step"], name) for row in rows for name in needed if not math.isfinite(row.get(name) or math.nan)]
if bad or len(rows) < int(sys.argv[2]):
    sys.exit(f"error: {len(rows)} of {sys.argv[2]} steps logged; not finite or missing: {bad}")
METRICS
}

check "parity tests" "$python" -m pytest -q -p no:cacheprovider tests/test_cuda.py
for algo in grpo ppo; do
    check "train_$algo" train $algo
done
for algo in grpo ppo; do
    check "benchmark $algo" "$python" scripts/benchmark.py --algo $algo "${sizes[@]}" "${benchmark[@]}" --device "$device"
done

echo "== ${SECONDS} s in all (240 s is the aim)"
if [ ${#failed[@]} -gt 0 ]; then
    echo "== FAILED: $(IFS=,; echo "${failed[*]}")"
    exit 1
fi
echo "== all passed"
