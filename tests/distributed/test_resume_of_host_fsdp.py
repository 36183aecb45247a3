"""What the host wrote under its own FSDP, state by parameter name, resumes on any topology as it is."""

from pathlib import Path

import pytest
import torch

from tests.distributed.test_peer import _assert_equal, _full_state
from tests.distributed.test_resume_of_converted import ALONE
from tests.support.datasets import copy_peer
from tests.support.tracing import inspected_run
from tests.support.world import run_world

State = dict[str, torch.Tensor]


def _train_under_the_hosts_fsdp(checkpoint: Path) -> tuple[State, State]:
    """Two steps by torch's FSDP as accelerate sets it up for the host, written over a checkpoint of the host by its
    own functions. Returns what it gathered, in full, on rank 0."""
    import torch.distributed as dist
    import torch.distributed.fsdp as fsdp
    from lerobot.common.train_utils import gather_fsdp_state_dicts, save_training_state
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.act.modeling_act import ACTEncoderLayer, ACTPolicy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    pretrained = checkpoint / "pretrained_model"
    config = ACTConfig.from_pretrained(pretrained)
    policy = ACTPolicy.from_pretrained(pretrained, config=config).train()
    whole = fsdp.FullyShardedDataParallel(
        policy,
        auto_wrap_policy=ModuleWrapPolicy({ACTEncoderLayer}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW(policy.get_optim_params(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        whole(_batch(config))[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    # Offloading from a GPU copies. On the CPU it does not: torch then frees weights that it hands out (and crashes),
    # and state stays views of one tensor, which safetensors refuses.
    plain = fsdp.FullStateDictConfig
    fsdp.FullStateDictConfig = lambda **_: plain()
    weights, optim = gather_fsdp_state_dicts(whole, optimizer)
    state = {name: {k: v.clone() for k, v in entry.items()} for name, entry in optim.get("state", {}).items()}
    if dist.get_rank() == 0:
        policy.save_pretrained(pretrained, state_dict=weights)
        optim = {**optim, "state": state}
        save_training_state(checkpoint, 4, optimizer, None, num_processes=2, batch_size=4, optim_state_dict=optim)
    return weights, {f"{name}.{field}": value for name, entry in state.items() for field, value in entry.items()}


def _batch(config) -> State:  # noqa: ANN001
    chunk = config.chunk_size
    features = {name: torch.randn(4, *feature.shape) for name, feature in config.input_features.items()}
    actions = torch.randn(4, chunk, *config.action_feature.shape)
    return {**features, "action": actions, "action_is_pad": torch.zeros(4, chunk, dtype=torch.bool)}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, warmed: None) -> tuple[Path, State, State]:
    peer = copy_peer(tmp_path_factory.mktemp("host_fsdp"))
    checkpoint = peer / "host1/000004"
    (weights, fields), _ = run_world(_train_under_the_hosts_fsdp, 2, checkpoint, init=True)
    return peer, weights, fields


def test_its_optimizer_file_goes_by_names(written: tuple[Path, State, State]):
    from safetensors import safe_open

    peer, weights, fields = written
    with safe_open(peer / "host1/000004/training_state/optimizer_state.safetensors", framework="pt") as file:
        keys = set(file.keys())
    assert keys == {f"state/{name.rpartition('.')[0]}/{name.rpartition('.')[2]}" for name in fields}
    assert not any(key.split("/")[1].isdecimal() for key in keys)
    assert {key.split("/")[1] for key in keys} <= weights.keys()


@pytest.mark.parametrize(
    ("nprocs", "topology"), [(1, ALONE), (2, ALONE), (2, ["--parallelism.dp_shard=2"])], ids=["alone", "ddp2", "fsdp2"]
)
def test_weights_and_optimizer_are_those_it_gathered(
    written: tuple[Path, State, State], tmp_path: Path, nprocs: int, topology: list[str]
):
    peer, weights, fields = written
    config_path = peer / "host1/000004/pretrained_model/train_config.json"
    resume = ["--resume=true", f"--config_path={config_path}", f"--output_dir={tmp_path / 'out'}"]
    for found, found_fields, lr in inspected_run([*resume, *topology], nprocs, peer, _full_state):
        assert lr == 1e-3
        _assert_equal(found, weights)
        _assert_equal(found_fields, fields)
