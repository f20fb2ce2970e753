"""vLLM's CPU build beside `rollout_cpu.py`, which starts this file with vLLM's interpreter.

    PYTHON rollout_cpu_vllm.py '{"model": ..., "dtype": "float32", "prompts": [[...], ...], "tokens": 48, ...}'

Prints a line of JSON when it is ready, and one for each line that it reads, which says how many tokens
to answer each prompt with.
"""

import json
import os
import sys
import time


def main() -> None:
    asked = json.loads(sys.argv[1])
    # Rows for the caller go to where stdout was; what the engine says goes to stderr.
    rows = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{asked['threads'] - 1}",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    import torch
    import vllm

    longest = max(map(len, asked["prompts"])) + asked["tokens"]
    engine = vllm.LLM(
        asked["model"], skip_tokenizer_init=True, dtype=asked["dtype"], max_model_len=longest,
        max_num_seqs=len(asked["prompts"]), max_num_batched_tokens=max(2048, longest), enforce_eager=True,
        enable_prefix_caching=asked["prefixes"], distributed_executor_backend="uni",
        logprobs_mode="processed_logprobs", disable_log_stats=True, seed=0,
    )  # fmt: skip
    params = vllm.SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, ignore_eos=True, logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    versions = {"vllm": vllm.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()}
    print(json.dumps(versions), file=rows, flush=True)
    for line in sys.stdin:
        params.max_tokens = int(line)
        engine.reset_prefix_cache()
        begin = time.process_time()
        outputs = [output.outputs[0] for output in engine.generate(prompts, params, use_tqdm=False)]
        seconds = time.process_time() - begin
        if any(len(output.logprobs) != len(output.token_ids) for output in outputs):
            raise RuntimeError("vLLM gave tokens without log-probs.")
        tokens = sum(len(output.token_ids) for output in outputs)
        print(json.dumps({"tokens": tokens, "processor_seconds": seconds}), file=rows, flush=True)


if __name__ == "__main__":
    main()
