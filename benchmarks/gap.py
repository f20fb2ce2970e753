"""How far each engine's log-probs are from the trainer's, in bf16 on one GPU.

    python benchmarks/gap.py --engines native vllm sglang lmdeploy --shapes qwen3-0.6b qwen3-1.7b
        [--case 64x2:128+512] [--memory 0.2] [--out results.jsonl]

Every engine answers the same prompts (GROUPSxSIBLINGS:PROMPT+NEW, as in rollout.py) at temperature 1 and gives the
log-prob of each token that it drew; the trainer computes the log-probs of the same tokens in packs of 32k rows.
Rows: mean, 99th percentile and largest |delta| over all tokens, and of the sequence with the largest mean. The engines
are those of rollout.py, one after the other, each in a process of its own. Weights are random. Prints JSON rows.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from random_model import write_random_model
from rollout import PACKAGES, STARTERS, Answer, Worker, make_prompts, parse_case
from rows import Rows

from xtuner.v1.config import FSDPConfig
from xtuner.v1.engine import TrainEngine
from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.rl.trainer import pack_samples
from xtuner.v1.rl.trainer.samples import TrainingSample

DEVICE = torch.device("cuda", 0)


def sample(number: int, prompt: list[int], answer: Answer) -> TrainingSample:
    ids, logprobs = answer
    ahead = len(prompt) - 1
    return TrainingSample(
        number, prompt + ids[:-1], [-100] * ahead + ids, [1.0] * (ahead + len(ids)), [0.0] * ahead + logprobs,
        len(prompt), 1.0,
    )  # fmt: skip


def gaps(trainer: TrainEngine, prompts: list[list[int]], answers: list[Answer]) -> list[torch.Tensor]:
    """|delta log-prob| of each token, by sequence."""
    samples = [sample(i, p, a) for i, (p, a) in enumerate(zip(prompts, answers, strict=True))]
    ((packs,),) = pack_samples(
        samples, ranks=1, optimizer_steps=1, pack_max_length=32768, hidden_size=1024,
        share_prompts=False, pad_multiple=64,
    )  # fmt: skip
    by_sequence: dict[int, torch.Tensor] = {}
    for pack in packs:
        pack = pack.to(DEVICE)
        assert pack.rollout_logprobs is not None
        apart = (trainer.logprobs(pack) - pack.rollout_logprobs).abs().cpu()
        for i, number in enumerate(pack.rollout_ids):
            by_sequence[number] = apart[pack.sample_index.cpu() == i]
    return [by_sequence[i] for i in range(len(prompts))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=["native"], choices=list(STARTERS))
    parser.add_argument("--shapes", nargs="+", default=["qwen3-0.6b"])
    parser.add_argument("--case", default="64x2:128+512")
    parser.add_argument("--memory", type=float, default=0.2, help="share of the card's memory for each engine")
    parser.add_argument("--out")
    args = parser.parse_args()
    args.cases = [args.case]
    case = parse_case(args.case)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    rows = Rows("gap", "cuda", args.out, *(PACKAGES[e] for e in args.engines))
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as folder:
            model = write_random_model(Path(folder) / "model", shape, "cuda")
            trainer = TrainEngine(get_model_config_from_hf(model), FSDPConfig(), device=DEVICE)
            trainer.load_hf(model)
            prompts = make_prompts(case, 1)
            for engine in args.engines:
                worker = Worker(engine, str(model), args)
                try:
                    worker.answer()
                    answers = worker.run(case, 1, with_answers=True)["answers"]
                except RuntimeError as error:
                    print(error, file=sys.stderr)
                    continue
                finally:
                    worker.stop()
                found = gaps(trainer, prompts, answers)
                values = torch.cat(found)
                worst = max(float(sequence.mean()) for sequence in found)
                rows.add(
                    f"{shape}, {args.case}", engine, "mean |delta log-prob|", float(values.mean()), "nat",
                    p99=float(values.quantile(0.99)), largest=float(values.max()), worst_sequence=worst,
                    tokens=values.numel(),
                )  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
