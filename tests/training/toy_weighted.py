"""The nasty toy with a loss for each sample, as `--sample_weighting.type` needs it: `--policy.type=toy_weighted`."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from lerobot.configs import PreTrainedConfig
from torch import Tensor

from tests.support.toy import ACTION, ToyNastyConfig, ToyNastyPolicy, make_toy_nasty_pre_post_processors


@PreTrainedConfig.register_subclass("toy_weighted")
@dataclass
class ToyWeightedConfig(ToyNastyConfig):
    pass


class ToyWeightedPolicy(ToyNastyPolicy):
    config_class = ToyWeightedConfig
    name = "toy_weighted"

    def forward(self, batch: dict[str, Tensor], reduction: str = "mean") -> tuple[Tensor, dict]:
        """With reduction "none" the loss has shape (batch,)."""
        tokens, actions, logits = self._run(batch)
        mse = F.mse_loss(actions.float(), batch[ACTION].float(), reduction="none").mean(dim=(1, 2))
        guess = F.cross_entropy(logits.float().transpose(1, 2), tokens, reduction="none").mean(dim=1)
        loss = mse + 0.1 * guess
        return (loss if reduction == "none" else loss.mean()), {"largest": loss.max().item()}


def make_toy_weighted_pre_post_processors(
    config: ToyWeightedConfig, dataset_stats: dict | None = None
) -> tuple[Any, Any]:
    return make_toy_nasty_pre_post_processors(config, dataset_stats)
