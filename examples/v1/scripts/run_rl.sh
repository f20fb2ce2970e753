#!/usr/bin/env bash
# One RL run from one config, on one machine or on several. Usage: run_rl.sh --help
set -euo pipefail

usage() {
    cat <<'TXT'
Usage: run_rl.sh CONFIG BACKEND MODEL TRAIN [EVAL] [ACCELERATOR] [PER_NODE] [-- OPTION...]

  CONFIG       Python file that defines `trainer`
  BACKEND      native | vllm | sglang | lmdeploy (on a GPU only)
  MODEL        Hugging Face folder of the model            (exported as MODEL_PATH)
  TRAIN        JSONL with training prompts                 (exported as DATA_PATH)
  EVAL         JSONL with evaluation prompts, or ""        (exported as EVAL_DATA_PATH)
  ACCELERATOR  gpu (default) | cpu                         (or the variable ACCELERATOR)
  PER_NODE     workers on each machine. Default: the devices in CUDA_VISIBLE_DEVICES, else all GPUs; 1 on a CPU
  OPTION...    handed to the command line, e.g. -- --set total_train_steps=10

Variables:
  WORK_DIR     folder of the run; default ./work_dirs/<model>_<folder of TRAIN>_<backend>
  PYTHON       interpreter; default: the active environment, else the repository's .venv, else python3
  XTUNER_VLLM_PYTHON, XTUNER_SGLANG_PYTHON, XTUNER_LMDEPLOY_PYTHON
               interpreter of the engine's own environment; default: PYTHON
Several machines: start the same command on each with
  NODE_COUNT   number of machines
  NODE_RANK    0 for the one that leads
  MASTER_ADDR  address of machine 0
  RAY_HEAD_PORT  port of the Ray head there (default 6379)
  RAY_AUTH_TOKEN a secret that all machines share: without it, whoever reaches the port can run code
  JOIN_TIMEOUT   seconds to wait for the others (default 600)

The exit code is the run's: 0 only if it finished. On machines other than 0: 0 if they served until the head went.
TXT
}

fail() {
    printf 'run_rl.sh: %s\n' "$@" >&2
    exit 2
}

# ---------------------------------------------------------------- what is asked

case "${1:-}" in -h | --help) usage && exit 0 ;; esac
positional=()
while [ $# -gt 0 ] && [ "$1" != "--" ]; do positional+=("$1") && shift; done
[ $# -eq 0 ] || shift
if [ ${#positional[@]} -lt 4 ] || [ ${#positional[@]} -gt 7 ]; then
    usage >&2
    fail "expected 4 to 7 arguments, got ${#positional[@]}"
fi

CONFIG=${positional[0]}
BACKEND=${positional[1]}
MODEL_PATH=${positional[2]}
DATA_PATH=${positional[3]}
EVAL_DATA_PATH=${positional[4]:-}
export MODEL_PATH DATA_PATH EVAL_DATA_PATH
ACCELERATOR=${positional[5]:-${ACCELERATOR:-gpu}}
PER_NODE=${positional[6]:-}

case $BACKEND in
    native | sglang | lmdeploy | vllm) ;;
    *) usage >&2 && fail "unknown backend '$BACKEND'; one of native, sglang, lmdeploy, vllm" ;;
esac
case $ACCELERATOR in
    cpu | gpu) ;;
    *) fail "unknown accelerator '$ACCELERATOR'; one of gpu, cpu" ;;
esac

problems=()
[ -f "$CONFIG" ] || problems+=("CONFIG: no such file: $CONFIG")
[ -f "$MODEL_PATH/config.json" ] || problems+=("MODEL: no config.json in: $MODEL_PATH (give a Hugging Face folder)")
[ -e "$DATA_PATH" ] || problems+=("TRAIN: no such file: $DATA_PATH")
[ -z "$EVAL_DATA_PATH" ] || [ -e "$EVAL_DATA_PATH" ] || problems+=("EVAL: no such file: $EVAL_DATA_PATH")
[ ${#problems[@]} -eq 0 ] || fail "${problems[@]}"

if [ -z "$PER_NODE" ]; then
    if [ "$ACCELERATOR" = cpu ]; then
        PER_NODE=1
    elif [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        PER_NODE=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true)
    else
        PER_NODE=$({ nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU' || true)
    fi
    [ "$PER_NODE" -gt 0 ] || fail "no GPU is visible here; give cpu as sixth argument (or ACCELERATOR=cpu), which is --accelerator cpu"
fi
case $PER_NODE in *[!0-9]* | 0) fail "PER_NODE must be a positive number, not '$PER_NODE'" ;; esac

NODE_COUNT=${NODE_COUNT:-1}
NODE_RANK=${NODE_RANK:-0}
RAY_HEAD_PORT=${RAY_HEAD_PORT:-6379}
JOIN_TIMEOUT=${JOIN_TIMEOUT:-600}
if [ "$NODE_COUNT" -gt 1 ] && [ -z "${MASTER_ADDR:-}" ]; then
    fail "NODE_COUNT=$NODE_COUNT needs MASTER_ADDR, the address of machine 0"
fi

# ---------------------------------------------------------------- what the run sees

absolute() { # workers may have another current folder
    case $1 in '' | /*) printf '%s' "$1" ;; *) printf '%s/%s' "$PWD" "$1" ;; esac
}
MODEL_PATH=$(absolute "$MODEL_PATH")
DATA_PATH=$(absolute "$DATA_PATH")
EVAL_DATA_PATH=$(absolute "$EVAL_DATA_PATH")

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    if [ -n "${VIRTUAL_ENV:-}" ]; then
        PYTHON=$VIRTUAL_ENV/bin/python
    elif [ -x "$ROOT/.venv/bin/python" ]; then
        PYTHON=$ROOT/.venv/bin/python
    fi
fi

engine_python=XTUNER_${BACKEND^^}_PYTHON
if [ "$BACKEND" != native ] && [ -z "${!engine_python:-}" ]; then
    "$PYTHON" -c 'import sys, importlib.util as u; sys.exit(u.find_spec(sys.argv[1]) is None)' "$BACKEND" ||
        fail "$BACKEND is not installed: pip install 'xtuner[$BACKEND]', or name the Python that has it in $engine_python."
fi

WORK_DIR=${WORK_DIR:-work_dirs/$(basename "$MODEL_PATH")_$(basename "$(dirname "$DATA_PATH")")_$BACKEND}
WORK_DIR=$(absolute "$WORK_DIR")
export WORK_DIR
export WORLD_SIZE=$NODE_COUNT
export PYTHONUNBUFFERED=1
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
export XTUNER_LOG_LEVEL=${XTUNER_LOG_LEVEL:-INFO}
unset XTUNER_USE_NATIVE XTUNER_USE_SGLANG XTUNER_USE_LMDEPLOY XTUNER_USE_VLLM
case $BACKEND in
    sglang) export XTUNER_USE_SGLANG=1 ;;
    lmdeploy) export XTUNER_USE_LMDEPLOY=1 ;;
    vllm) export XTUNER_USE_VLLM=1 ;;
esac
case $BACKEND in # their sleep modes map memory themselves, which expandable segments exclude
    lmdeploy | sglang | vllm) unset PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF ;;
esac
ulimit -n "$(ulimit -Hn)" 2>/dev/null || true

mkdir -p "$WORK_DIR"
stamp=$(date +%Y%m%d%H%M%S)

# ---------------------------------------------------------------- only what is started here is stopped here

set -m # each child leads its own process group, so that a signal reaches the child when we pass it on, and once
ray_pid='' run_pid='' tee_pid='' ray_dir=''

stop_child() { # PID SECONDS: ask, then force the whole group
    kill -TERM "$1" 2>/dev/null || return 0
    for _ in $(seq "$2"); do
        kill -0 "$1" 2>/dev/null || return 0
        sleep 1
    done
    kill -KILL -- "-$1" 2>/dev/null || true
    wait "$1" 2>/dev/null || true # without the shell's own "Killed" message
}

clean_up() {
    trap '' INT TERM HUP
    [ -z "$run_pid" ] || stop_child "$run_pid" 30
    [ -z "$ray_pid" ] || stop_child "$ray_pid" 15
    [ -z "$tee_pid" ] || stop_child "$tee_pid" 1
    if [ -n "$ray_dir" ]; then
        cp -R "$ray_dir"/session_2*/logs "$WORK_DIR/ray_${stamp}_rank$NODE_RANK" 2>/dev/null || true
        rm -rf "$ray_dir"
    fi
}
trap clean_up EXIT
pass_on() { # SIGNAL NUMBER: the run shuts down by itself and we leave with its exit code
    [ -z "$run_pid" ] && exit $((128 + $2))
    kill -s "$1" "$run_pid" 2>/dev/null || true
}
trap 'pass_on INT 2' INT
trap 'pass_on TERM 15' TERM
trap 'pass_on HUP 1' HUP

start_ray() { # ARGUMENT...: a Ray node that lives as long as this script
    ray_dir=$(mktemp -d "${TMPDIR:-/tmp}/xtuner-ray-XXXXXX")
    local gpus=0
    [ "$ACCELERATOR" = cpu ] || gpus=$PER_NODE
    if [ -n "${RAY_AUTH_TOKEN:-}" ]; then
        export RAY_AUTH_MODE=token
    else
        echo "run_rl.sh: RAY_AUTH_TOKEN is not set: whoever reaches port $RAY_HEAD_PORT can run code here" >&2
    fi
    "$PYTHON" -m ray.scripts.scripts start "$@" --num-gpus "$gpus" --temp-dir "$ray_dir" --disable-usage-stats --block \
        >"$WORK_DIR/ray_start_${stamp}_rank$NODE_RANK.log" 2>&1 &
    ray_pid=$!
}

head_answers() {
    (exec 3<>"/dev/tcp/$MASTER_ADDR/$RAY_HEAD_PORT") 2>/dev/null
}

wait_for() { # WHAT CONDITION...: until it holds, within JOIN_TIMEOUT
    local what=$1 end=$((SECONDS + JOIN_TIMEOUT))
    shift
    until "$@"; do
        if [ -n "$ray_pid" ] && ! kill -0 "$ray_pid" 2>/dev/null; then
            tail -n 20 "$WORK_DIR/ray_start_${stamp}_rank$NODE_RANK.log" >&2
            echo "run_rl.sh: Ray ended while waiting for $what" >&2
            exit 1
        fi
        if [ $SECONDS -ge $end ]; then
            echo "run_rl.sh: $what did not come within JOIN_TIMEOUT=$JOIN_TIMEOUT s" >&2
            exit 1
        fi
        sleep 1
    done
}

all_nodes_joined() {
    "$PYTHON" - "$NODE_COUNT" >/dev/null 2>&1 <<'PY'
import sys
import ray

ray.init(address="auto", logging_level="ERROR")
alive = sum(node["Alive"] for node in ray.nodes())
sys.exit(alive < int(sys.argv[1]))
PY
}

# ---------------------------------------------------------------- machines other than the first: join and serve

if [ "$NODE_COUNT" -gt 1 ] && [ "$NODE_RANK" -gt 0 ]; then
    wait_for "the head at $MASTER_ADDR:$RAY_HEAD_PORT" head_answers
    start_ray --address "$MASTER_ADDR:$RAY_HEAD_PORT"
    sleep 5 # a node that cannot join ends at once
    kill -0 "$ray_pid" 2>/dev/null || wait_for "this machine to join" false
    echo "run_rl.sh: machine $NODE_RANK serves the run at $MASTER_ADDR:$RAY_HEAD_PORT"
    while head_answers && kill -0 "$ray_pid" 2>/dev/null; do sleep 2; done
    head_answers || exit 0
    echo "run_rl.sh: Ray on this machine ended before the run did" >&2
    exit 1
fi

# ---------------------------------------------------------------- the run

if [ "$NODE_COUNT" -gt 1 ]; then
    head_answers && fail "port $RAY_HEAD_PORT of $MASTER_ADDR is taken; choose another RAY_HEAD_PORT on all machines"
    start_ray --head --node-ip-address "$MASTER_ADDR" --port "$RAY_HEAD_PORT" --include-dashboard false
    export RAY_ADDRESS=$MASTER_ADDR:$RAY_HEAD_PORT
    wait_for "the Ray head" head_answers
    wait_for "$NODE_COUNT machines" all_nodes_joined
fi

[ "$CONFIG" -ef "$WORK_DIR/config.py" ] || cp "$CONFIG" "$WORK_DIR/config.py"
cp "${BASH_SOURCE[0]}" "$WORK_DIR/run_rl.sh"

pipe_dir=$(mktemp -d "${TMPDIR:-/tmp}/xtuner-log-XXXXXX")
mkfifo "$pipe_dir/log"
exec 5<>"$pipe_dir/log" 6<"$pipe_dir/log" 7>"$pipe_dir/log" 5<&- # 5: opening one end waits for the other
rm -r "$pipe_dir"
tee "$WORK_DIR/training_log_$stamp.txt" <&6 6<&- 7>&- &
tee_pid=$!
"$PYTHON" "$ROOT/xtuner/v1/train/cli/rl.py" --config "$CONFIG" --work-dir "$WORK_DIR" \
    --num-workers $((NODE_COUNT * PER_NODE)) --accelerator "$ACCELERATOR" "$@" </dev/null >&7 2>&1 6<&- 7>&- &
run_pid=$!
exec 6<&- 7>&-

finished() { ! kill -0 "$1" 2>/dev/null; }
until finished "$run_pid"; do wait "$run_pid" || true; done # a trapped signal ends `wait` early
wait "$run_pid" && code=0 || code=$?
run_pid=''
for _ in $(seq 50); do # the last lines; a process that outlived the run may hold the pipe open
    if finished "$tee_pid"; then
        tee_pid=''
        break
    fi
    sleep 0.1
done
exit "$code"
