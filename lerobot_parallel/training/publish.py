"""The trained model goes to the hub: gathered by all ranks, uploaded by rank 0."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lerobot_parallel.checkpoint.sharded_policy import write_whole
from lerobot_parallel.checkpoint.state import gather_model_state
from lerobot_parallel.config.train import ParallelTrainPipelineConfig
from lerobot_parallel.engine.ranks import is_main, raised_together


def publish_trained_model(
    cfg: ParallelTrainPipelineConfig,
    model: nn.Module,
    preprocessor: Any,
    postprocessor: Any,
    dataset_meta: Any,
    *,
    peft_model: nn.Module | None = None,
) -> None:
    """Upload weights (or adapters), both processors, model card and train_config.json. Collective.

    The host logs `Model pushed to <url>`, the line that its job runner waits for. Shards are never uploaded.
    """
    full = gather_model_state(model) if isinstance(model, FSDPModule) else None
    with raised_together("publishing the trained model"):
        if is_main():
            if cfg.is_reward_model_training:
                # Its signature has no dataset_meta and no state_dict.
                if full is not None:
                    model._save_pretrained = lambda directory: write_whole(model, directory, full)
                model.push_model_to_hub(cfg)
            elif peft_model is not None:
                model.push_model_to_hub(cfg, peft_model=peft_model, dataset_meta=dataset_meta)
            else:
                model.push_model_to_hub(cfg, state_dict=full, dataset_meta=dataset_meta)
            repo_id = cfg.trainable_config.repo_id
            preprocessor.push_to_hub(repo_id)
            postprocessor.push_to_hub(repo_id)
