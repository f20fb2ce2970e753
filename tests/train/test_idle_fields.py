"""A field that does nothing in a run is named where it is set."""

from xtuner.v1.config import FSDPConfig, LRConfig, MuonConfig
from xtuner.v1.data_proto import SampleParams
from xtuner.v1.rl.agent_loop import SingleTurnAgentLoopConfig
from xtuner.v1.rl.utils import AcceleratorResourcesConfig
from xtuner.v1.train.idle_fields import idle_fields
from xtuner.v1.train.rl_trainer import LoadCheckpointConfig, TraceConfig
from xtuner.v1.utils import get_logger

from .helpers import RESPONSE, config


def test_what_does_nothing_in_a_run_is_named_where_it_is_set(model, tmp_path, caplog):
    """Else somebody waits for an effect."""
    get_logger().propagate = True
    try:
        with caplog.at_level("INFO", "xtuner"):
            assert config(model, tmp_path, rollout={"device": "GPU"}).check() == []
            assert "no effect" not in caplog.text
            changes = {
                "resources": AcceleratorResourcesConfig(accelerator="CPU", num_workers=1, num_accelerators_per_node=4),
                "worker": {
                    "fsdp_cfg": FSDPConfig(vision_recompute_ratio=0.5, mtp_checkpoint_use_reentrant=False),
                    "optim_cfg": MuonConfig(enable_all2all=False), "lr_cfg": LRConfig(lr_min=0.0),
                },
                "load_checkpoint_cfg": LoadCheckpointConfig(load_dataset=False),
                "trace_config": TraceConfig(output_dir="traces"),
            }  # fmt: skip
            cfg = config(model, tmp_path, **changes)
            cfg.agent_loop_manager_cfg.tasks.sampler_config.dataloader_cfg.round_up = False
            assert cfg.check() == []
    finally:
        get_logger().propagate = False
    (said,) = {record.getMessage() for record in caplog.records if "no effect" in record.getMessage()}
    assert said.removeprefix("no effect in this run: ").removesuffix(".").split(", ") == [
        "resources.num_accelerators_per_node", "train_worker_cfg.optim_cfg.enable_all2all",
        "train_worker_cfg.lr_cfg.lr_min", "train_worker_cfg.fsdp_cfg.vision_recompute_ratio",
        "train_worker_cfg.fsdp_cfg.mtp_checkpoint_use_reentrant", "trace_config.output_dir",
        "load_checkpoint_cfg.load_dataset", "agent_loop_manager_cfg.train.sampler_config.dataloader_cfg.round_up",
    ]  # fmt: skip


def test_a_device_of_the_engine_that_is_not_the_run_s_is_named(model, tmp_path):
    changes = {"rollout": {"device": "CPU"}, "worker": {"fsdp_cfg": FSDPConfig(cpu_param_dtype="bfloat16")}}
    assert idle_fields(config(model, tmp_path, **changes)) == []
    changes["resources"] = AcceleratorResourcesConfig(accelerator="GPU", num_workers=1)
    named = ["train_worker_cfg.fsdp_cfg.cpu_param_dtype", "rollout_config.device"]
    assert idle_fields(config(model, tmp_path, **changes)) == named


def test_a_tokenizer_that_the_loop_does_not_take_is_named(model, tmp_path, caplog):
    other = tmp_path / "other"
    other.mkdir()
    loop = SingleTurnAgentLoopConfig(hf_checkpoint=other, sample_params=SampleParams(max_tokens=RESPONSE))
    get_logger().propagate = True
    try:
        assert config(model, tmp_path, task={"agent_loop_config": loop}).check() == []
    finally:
        get_logger().propagate = False
    assert "other' has no effect: the loop takes tokenizer_path=" in caplog.text
