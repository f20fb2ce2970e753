"""vLLM, SGLang and LMDeploy on a GPU, as servers beside the trainer: through sleep and new weights, and a short run."""

import asyncio
import time
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch

from tests.engines.helpers import KINDS, Engines, buckets, logprobs_of, prompt, request, write_model
from tests.engines.test_run import KillsTheServer
from tests.train.helpers import RESPONSE, STOPS, config, fit
from xtuner.v1.config import FSDPConfig
from xtuner.v1.data_proto import SampleParams
from xtuner.v1.rl.rollout.backends.carriers import FolderCarrier, MemoryCarrier
from xtuner.v1.rl.rollout.backends.lmdeploy_weights import BucketCarrier
from xtuner.v1.rl.utils import AcceleratorResourcesConfig
from xtuner.v1.rl.weight_update import WeightUpdateError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GIB = 2**30
OPTIONS = {
    "vllm": {"vllm_enforce_eager": True, "vllm_env": {"VLLM_USE_FLASHINFER_SAMPLER": "0"}},
    "sglang": {
        "sglang_attention_backend": "triton", "sglang_sampling_backend": "pytorch", "sglang_grammar_backend": "none",
        "sglang_disable_cuda_graph": True,
    },
    "lmdeploy": {},
}  # fmt: skip


@pytest.fixture(params=["vllm", "sglang", "lmdeploy"])
def name(request: pytest.FixtureRequest) -> str:
    if not any(True for _ in distributions(name=request.param)):
        pytest.skip(f"{request.param} is not installed")
    return request.param


def models(folder: Path, kind: str = "tied") -> list[Path]:
    return [write_model(folder / f"model-{seed}", seed, std=0.06, hidden_size=256, kind=kind) for seed in range(2)]


def free() -> float:
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / GIB


@pytest.mark.parametrize("kind", KINDS)
def test_sleep_and_new_weights(name, kind, tmp_path):
    """Weights come through memory of the GPU, in more buckets than there are buffers, and once in a folder."""
    started = time.perf_counter()
    folders = models(tmp_path, kind)

    def timed(what, coroutine):
        start = time.perf_counter()
        value = engines.run(coroutine)
        print(f"{name}: {what} {time.perf_counter() - start:.3f} s, {free():.1f} GiB free", flush=True)
        return value

    def gaps(which):
        """Mean gap to the log-probs of each model's weights, LMDeploy's of before the temperature."""
        reported = 1.0 if name == "lmdeploy" else 0.8
        numbers = range(4)
        outputs = engines.generate(engine, *(request(i, temperature=0.8, max_tokens=40) for i in numbers))
        assert {o.finish_reason for o in outputs} <= {"stop", "length"}, outputs
        means = []
        for folder in folders:
            expected = torch.cat([logprobs_of(folder, prompt(i), outputs[i], reported) for i in numbers])
            means.append(float((torch.tensor(sum((o.logprobs for o in outputs), [])) - expected).abs().mean()))
        print(f"{name}: gap to model {which}: {means[which]:.4f}, to the other: {means[1 - which]:.4f}", flush=True)
        assert means[which] < 0.05 < 0.3 < means[1 - which]

    before = free()
    with asyncio.Runner() as runner:
        engines = Engines(name, folders, tmp_path / "logs", runner, device="cuda")
        try:
            engine = engines.start(
                skip_load_weights=True, gpu_memory_utilization=0.6, extra_rollout_config=OPTIONS[name]
            )
            print(f"{name}: start {time.perf_counter() - started:.1f} s, {free():.1f} GiB free", flush=True)
            assert isinstance(engine.carrier, BucketCarrier if name == "lmdeploy" else MemoryCarrier)
            timed("update", engine.update_weights(buckets(folders[0], 5), 1))
            gaps(0)
            awake = free()
            timed("sleep", engine.sleep())
            # Of a model so small most is a cache of so many tokens that the list of free ones takes gibibytes.
            assert before - free() < 0.1 * (before - awake)
            timed("wake weights", engine.wake(("weights",)))
            timed("update", engine.update_weights(buckets(folders[1], 7), 2))
            timed("wake cache", engine.wake(("kv_cache",)))
            gaps(1)
            timed("sleep, cache only", engine.sleep(("kv_cache",)))
            assert free() > awake + 20
            timed("wake cache", engine.wake(("kv_cache",)))
            gaps(1)

            with pytest.raises(WeightUpdateError, match="did not get every weight exactly once"):
                engines.run(engine.update_weights(buckets(folders[0])[1:], 3))
            (refused,) = engines.generate(engine, request())
            assert "the last update of its weights is not complete" in (refused.error or "")
            timed("update", engine.update_weights(buckets(folders[0]), 4))
            gaps(0)
            if name != "lmdeploy":
                engine.carrier = FolderCarrier(engine)
                timed("update by folder", engine.update_weights(buckets(folders[1]), 5))
                gaps(1)

            async def abort():
                tasks = [asyncio.ensure_future(engine.generate(request(i, max_tokens=200))) for i in range(300)]
                await asyncio.sleep(0.5)
                await engine.abort()
                return [await task for task in tasks]

            assert "abort" in {o.finish_reason for o in timed("abort", abort())}
        finally:
            log = "".join(path.read_text()[-6000:] for path in (tmp_path / "logs").glob("*.log"))
            try:
                timed("stop", engines.stopped())
            finally:
                print(log, flush=True)
    assert free() > before - 1


@pytest.mark.parametrize("dies", [False, True])
def test_two_steps_of_a_run(name, dies, tmp_path):
    """Its engine dies in the second one, and its weights with it: it gets them again."""
    cfg = config(
        models(tmp_path)[0], tmp_path, total_train_steps=2,
        resources=AcceleratorResourcesConfig(accelerator="GPU", num_workers=1),
        rollout={"backend": name, "gpu_memory_utilization": 0.3, "extra_rollout_config": OPTIONS[name]},
        worker={"pack_max_length": 512, "fsdp_cfg": FSDPConfig(torch_compile=False)},
        task={
            "params": SampleParams(temperature=0.7, max_tokens=RESPONSE, stop_token_ids=STOPS),
            "reward": KillsTheServer(*[13] * dies),
        },
    )  # fmt: skip
    run = fit(cfg)
    for step in (1, 2):
        assert {tuple(row["model_steps"]) for row in run.trajectories(step)} == {(step - 1,)}
    print(name, {key: run.series(key) for key in run.rows[0] if "mismatch" in key or key.startswith("timing")})
    assert max(run.series("mismatch/mismatch_logprob_abs_diff")) < 0.05
    assert run.rows[0].get("response/unscaled_logprob_share") == (1 if name == "lmdeploy" else None)
