"""What reaches a hub on 127.0.0.1 that speaks the real one's protocol, through huggingface_hub's own client."""

import importlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

from lerobot_parallel.checkpoint import layout
from lerobot_parallel.checkpoint.convert import convert
from tests.support.commands import quiet_env
from tests.support.datasets import PEER_ARGS, copy_peer
from tests.support.hub import Hub, Repo, local_hub
from tests.support.shards import all_bits
from tests.support.toy import make_toy, make_toy_nasty_pre_post_processors
from tests.support.world import RankResult, run_world_raw

SHARDED = ["--parallelism.dp_shard=2", "--checkpoint_format=dcp", "--save_checkpoint_to_hub=true"]
PUSHED = ["--policy.push_to_hub=true", "--policy.repo_id=me/act", "--policy.private=true", "--policy.license=mit"]


@pytest.fixture
def hub(warmed: None) -> Iterator[Hub]:
    with local_hub() as running:
        yield running


def in_world(hub: Hub, nprocs: int, work: Callable[..., Any], *args: Any) -> list[RankResult]:
    """Ranks whose huggingface_hub reads the variables of `hub` anew."""

    def rank() -> Any:
        from huggingface_hub import constants

        importlib.reload(constants)
        assert hub.url == constants.ENDPOINT
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", force=True)
        return work(*args)

    return run_world_raw(rank, nprocs, env=quiet_env() | hub.env(), timeout=120, launcher=nprocs > 1)


def train(peer: Path, *flags: str) -> None:
    import sys

    from lerobot_parallel.training import command

    os.chdir(peer)
    args = [arg for arg in PEER_ARGS if "push_to_hub" not in arg]
    sys.argv = ["lerobot-train", *args, "--output_dir=out", *PUSHED, *SHARDED, *flags]
    command.train()


def weights(repo: Repo, prefix: str = "") -> dict[str, torch.Tensor]:
    return safetensors.torch.load(repo.files[f"{prefix}model.safetensors"])


def said(result: RankResult) -> str:
    return result.stdout + result.stderr


def test_sharded_run_publishes_its_model_and_its_checkpoints(hub: Hub, tmp_path: Path) -> None:
    peer = copy_peer(tmp_path)
    results = in_world(hub, 2, train, peer)
    assert [result.exitcode for result in results] == [0, 0], said(results[0])
    repo = hub.repos["me/act"]
    root = {name for name in repo.files if "/" not in name}
    processors = {name for name in root if name.startswith("policy_")}
    assert root - processors == {"README.md", "config.json", "model.safetensors", "train_config.json"}
    assert {"policy_preprocessor.json", "policy_postprocessor.json"} < processors
    local = convert(peer / "out", output=tmp_path / "local")
    assert all_bits(weights(repo)) == all_bits(safetensors.torch.load_file(local.path))
    card = repo.files["README.md"].decode()
    assert "license: mit" in card and "| Training steps | 8 |" in card and "- **Episodes:** " in card
    assert repo.private
    assert said(results[0]).count(f"Model pushed to {hub.url}/me/act\n") == 1
    assert "Model pushed" not in said(results[1])
    _assert_checkpoints(repo, peer)
    assert not layout.published_dir(peer / "out").exists()


def _assert_checkpoints(repo: Repo, peer: Path) -> None:
    """The host's layout and tags: everything that its own resume from the hub would download."""
    for step in ("000004", "000008"):
        folder = peer / "out" / "checkpoints" / step
        local = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        prefix = f"checkpoints/{step}/"
        assert {name.removeprefix(prefix) for name in repo.files if name.startswith(prefix)} == local
        assert step in repo.tags
    assert repo.commits[:2] == ["checkpoint 000004", "checkpoint 000008"] and len(repo.commits) == 3


def test_hub_that_refuses_costs_no_file_and_the_exit_code_tells(hub: Hub, tmp_path: Path) -> None:
    peer = copy_peer(tmp_path)
    hub.refuse = 403
    results = in_world(hub, 2, train, peer, "--steps=4")
    assert [result.exitcode for result in results] == [1, 1]
    folder = layout.published_dir(peer / "out")
    again = f"try again: lerobot-parallel convert {folder.relative_to(peer)} --push-to-hub me/act"
    assert again in said(results[0]) and "403 Forbidden" in said(results[0])
    assert "checkpoints/000004 was not uploaded (403" in said(results[0]) and "training goes on" in said(results[0])
    assert "Model pushed" not in said(results[0])
    hub.refuse = None
    (retry,) = in_world(hub, 1, push, folder, "me/act")
    assert retry.exitcode == 0, said(retry)
    assert set(hub.repos["me/act"].files) == {path.name for path in folder.iterdir()}


def push(folder: Path, repo: str, **options: Any) -> str:
    from lerobot_parallel.training.publish import publish_directory

    return publish_directory(folder, repo, **options)


def test_converted_directory_gets_a_card_with_the_facts_that_can_be_had(hub: Hub, tmp_path: Path) -> None:
    folder = layout.Checkpoint(copy_peer(tmp_path) / "fsdp2/000004").pretrained
    convert(folder)
    before = {path.name for path in folder.iterdir()}
    (pushed,) = in_world(hub, 1, push, folder, "me/plain")
    assert (pushed.exitcode, pushed.value) == (0, f"{hub.url}/me/plain"), said(pushed)
    assert {path.name for path in folder.iterdir()} == before
    files = hub.repos["me/plain"].files
    assert set(files) == before - {layout.MODEL_SHARDS} | {"README.md"}
    card = files["README.md"].decode()
    assert "datasets: local/reach" in card and "- act" in card and "| Training steps | 8 |" in card
    warnings = [line for line in said(pushed).splitlines() if "does not say" in line]
    assert len(warnings) == 1 and "the license" in warnings[0] and "episodes, frames" in warnings[0]
    assert not hub.repos["me/plain"].private


def test_unknown_policy_is_published_with_a_plain_card(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text('{"type": "nobody_knows"}')
    safetensors.torch.save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    (folder / "stray.distcp").write_bytes(b"shard")
    (pushed,) = in_world(hub, 1, push, folder, "me/unknown")
    assert pushed.exitcode == 0, said(pushed)
    assert set(hub.repos["me/unknown"].files) == {"README.md", "config.json", "model.safetensors"}
    assert "the policy's type and features, how it was trained, the dataset" in said(pushed)


def config_for(folder: Path, **trained: Any) -> Any:
    from lerobot.configs.default import DatasetConfig

    from lerobot_parallel.config.train import ParallelTrainPipelineConfig

    return ParallelTrainPipelineConfig(dataset=DatasetConfig("local/toy"), output_dir=folder, steps=3, **trained)


FACTS = SimpleNamespace(
    repo_id="local/toy",
    total_episodes=12,
    total_frames=345,
    fps=10,
    tasks=SimpleNamespace(index=["reach"]),
    robot_type="toy_arm",
    camera_keys=["observation.images.top"],
)


def publish_adapters(folder: Path) -> None:
    from peft import LoraConfig, get_peft_model

    from lerobot_parallel.training.publish import publish_trained_model

    policy = make_toy()
    policy.config.repo_id, policy.config.use_peft = "me/adapters", True
    model = get_peft_model(policy, LoraConfig(r=2, target_modules=["state_proj"]))
    processors = make_toy_nasty_pre_post_processors(policy.config)
    publish_trained_model(config_for(folder, policy=policy.config), model, *processors, FACTS, peft_model=model)


def test_adapters_go_instead_of_weights(hub: Hub, tmp_path: Path) -> None:
    (done,) = in_world(hub, 1, publish_adapters, tmp_path / "run")
    assert done.exitcode == 0, said(done)
    files = hub.repos["me/adapters"].files
    assert {"adapter_model.safetensors", "adapter_config.json", "config.json", "train_config.json"} < set(files)
    assert "model.safetensors" not in files and json.loads(files["config.json"])["type"] == "toy_nasty"
    assert sorted(safetensors.torch.load(files["adapter_model.safetensors"]))[0].endswith("lora_A.weight")
    assert "- **Episodes:** 12" in files["README.md"].decode() and "toy_arm" in files["README.md"].decode()


def publish_reward(folder: Path) -> None:
    from dataclasses import dataclass

    from lerobot.configs.rewards import RewardModelConfig
    from lerobot.rewards.pretrained import PreTrainedRewardModel

    from lerobot_parallel.training.publish import publish_trained_model

    @RewardModelConfig.register_subclass("toy_reward")
    @dataclass
    class ToyRewardConfig(RewardModelConfig):
        pass

    class ToyReward(PreTrainedRewardModel):
        config_class, name = ToyRewardConfig, "toy_reward"

        def __init__(self, config: ToyRewardConfig) -> None:
            super().__init__(config)
            self.score = torch.nn.Linear(2, 1)

        def compute_reward(self, batch: dict) -> torch.Tensor:
            return self.score(batch["x"])

    config = ToyRewardConfig(device="cpu", repo_id="me/reward", push_to_hub=True, license="mit")
    processors = make_toy_nasty_pre_post_processors(make_toy().config)
    publish_trained_model(config_for(folder, reward_model=config), ToyReward(config), *processors, FACTS)


def test_reward_models_are_published_where_the_host_raises(hub: Hub, tmp_path: Path) -> None:
    (done,) = in_world(hub, 1, publish_reward, tmp_path / "run")
    assert done.exitcode == 0, said(done)
    repo = hub.repos["me/reward"]
    assert set(weights(repo)) == {"score.weight", "score.bias"}
    assert json.loads(repo.files["config.json"])["type"] == "toy_reward"
    assert "reward-model" in repo.files["README.md"].decode()
    assert f"Model pushed to {hub.url}/me/reward" in said(done)
    assert "does not say" not in said(done)
