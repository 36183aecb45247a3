"""The card of a published model: the host's own, with the facts of training and dataset that can be had."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from lerobot.configs.policies import PreTrainedConfig
from lerobot.configs.rewards import RewardModelConfig
from lerobot.configs.train import TrainPipelineConfig
from lerobot.policies.pretrained import PreTrainedPolicy
from lerobot.rewards.pretrained import PreTrainedRewardModel

from lerobot_parallel.checkpoint import layout

_PLAIN = """---
{{ card_data }}
---

# {{ repo_id }}

A policy for robots, trained with [LeRobot](https://github.com/huggingface/lerobot).
"""


class _UncheckedCard(ModelCard):
    """The host has cards checked by huggingface.co, whatever HF_ENDPOINT says; the hub that gets the upload checks
    them anyway."""

    def validate(self, repo_type: str | None = None) -> None:
        pass


def write_card(
    folder: Path,
    repo_id: str,
    config: PreTrainedConfig | RewardModelConfig | None,
    cfg: TrainPipelineConfig | None,
    dataset_meta: Any,
) -> None:
    """Write the card into `folder`; what it has to leave out is named in one warning."""
    card = _card(repo_id, config, cfg, dataset_meta)
    card.save(folder / layout.MODEL_CARD)
    missing = list(_missing(config, cfg, dataset_meta))
    if missing:
        logging.warning("The model card of %s does not say: %s", repo_id, ", ".join(missing))


def _card(repo_id: str, config: Any, cfg: TrainPipelineConfig | None, dataset_meta: Any) -> ModelCard:
    if config is None:
        data = ModelCardData(library_name="lerobot", pipeline_tag="robotics", tags=["robotics", "lerobot"])
        return ModelCard.from_template(data, template_str=_PLAIN, repo_id=repo_id)
    dataset = _dataset_name(cfg, dataset_meta)
    common = (dataset, config.type, config.license, config.tags)
    if isinstance(config, RewardModelConfig):
        with _unchecked(PreTrainedRewardModel):
            return PreTrainedRewardModel.generate_model_card(SimpleNamespace(config=config), *common)
    with _unchecked(PreTrainedPolicy):
        holder = SimpleNamespace(config=config)
        return PreTrainedPolicy.generate_model_card(holder, *common, cfg=cfg, dataset_meta=dataset_meta)


def _dataset_name(cfg: TrainPipelineConfig | None, dataset_meta: Any) -> str | None:
    known = getattr(getattr(cfg, "dataset", None), "repo_id", None)
    return known or getattr(dataset_meta, "repo_id", None)


@contextmanager
def _unchecked(owner: type) -> Iterator[None]:
    module = sys.modules[owner.__module__]
    module.ModelCard = _UncheckedCard
    try:
        yield
    finally:
        module.ModelCard = ModelCard


def _missing(config: Any, cfg: TrainPipelineConfig | None, dataset_meta: Any) -> Iterator[str]:
    if config is None:
        yield "the policy's type and features"
    elif not config.license:
        yield "the license (apache-2.0 is assumed)"
    if cfg is None:
        yield "how it was trained"
    elif not isinstance(config, RewardModelConfig):
        yield from (name for name in ("seed", "optimizer") if getattr(cfg, name, None) is None)
    if _dataset_name(cfg, dataset_meta) is None:
        yield "the dataset"
    if isinstance(config, RewardModelConfig):
        return
    if dataset_meta is None:
        yield "the dataset's episodes, frames, frame rate and tasks, the robot and its cameras"
    elif not dataset_meta.robot_type:
        yield "the robot"
