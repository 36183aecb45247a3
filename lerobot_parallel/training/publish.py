"""The trained model goes to the hub: gathered by all ranks, assembled on disk and uploaded by rank 0."""

import logging
import shutil
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from lerobot.common.train_utils import push_checkpoint_to_hub
from lerobot.configs.policies import PreTrainedConfig
from lerobot.configs.rewards import RewardModelConfig
from lerobot.utils.import_utils import register_third_party_plugins
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lerobot_parallel.checkpoint import layout
from lerobot_parallel.checkpoint.safe_read import CheckpointError
from lerobot_parallel.checkpoint.sharded_policy import write_whole
from lerobot_parallel.checkpoint.state import gather_model_state
from lerobot_parallel.config.train import ParallelTrainPipelineConfig
from lerobot_parallel.engine.ranks import is_main, patient_group, raised_together
from lerobot_parallel.training.model_card import write_card

_UPLOADED = ["*.safetensors", "*.json", "*.yaml", "*.md"]
_NEVER_UPLOADED = ["*.distcp", f"{layout.MODEL_SHARDS}/*", "*.tmp", "*.log"]
_MESSAGE = "Upload policy weights, processors, train config and readme"


class PublishError(CheckpointError):
    """The files are complete on disk, but the upload failed; the text says where they are and how to try again."""

    def __init__(self, folder: Path, repo_id: str, error: Exception) -> None:
        again = f"lerobot-parallel convert {folder} --push-to-hub {repo_id}"
        problem = f"is complete, but was not uploaded to {repo_id} ({_reason(error)})"
        super().__init__(folder, f"{problem}; try again: {again}")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


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

    Everything is in one commit, after which `Model pushed to <url>` is logged, the line that the host's job runner
    waits for. Until then the files are in the run's output directory. Shards are never uploaded.

    Raises:
        PublishError: on rank 0, where the hub refused or could not be reached; `OtherRankError` elsewhere.
    """
    full = gather_model_state(model) if isinstance(model, FSDPModule) else None
    with raised_together("publishing the trained model", patient_group()):
        if is_main():
            folder = layout.published_dir(cfg.output_dir)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            config = cfg.trainable_config
            _save_weights(model, folder, full, config, peft_model)
            for processor in (preprocessor, postprocessor):
                if processor is not None:
                    processor.save_pretrained(folder)
            cfg.save_pretrained(folder)
            write_card(folder, config.repo_id, config, cfg, dataset_meta)
            _upload(folder, config.repo_id, config.private, retry=folder)
            shutil.rmtree(folder)


def _save_weights(
    model: nn.Module, folder: Path, full: dict[str, Tensor] | None, config: Any, peft_model: nn.Module | None
) -> None:
    """Weights and the policy's config, or adapters and both configs."""
    if peft_model is not None:
        peft_model.save_pretrained(folder, **({} if full is None else {"state_dict": full}))
        config.save_pretrained(folder)
    else:
        write_whole(model, folder, full)


def publish_directory(folder: Path, repo_id: str, *, private: bool | None = None) -> str:
    """Upload a directory with a policy as `convert` leaves it, and return the model's address.

    A card is made where there is none, from the configs beside the weights. Shards are never uploaded.

    Raises:
        PublishError: the hub refused or could not be reached.
    """
    with tempfile.TemporaryDirectory(prefix="lerobot-parallel-publish-") as temporary:
        staging = Path(temporary)
        for path in folder.iterdir():
            if path.is_file() and not path.name.startswith("."):
                (staging / path.name).symlink_to(path.resolve())
        if not (folder / layout.MODEL_CARD).exists():
            config, cfg = _configs(folder)
            write_card(staging, repo_id, config, cfg, _local_dataset(cfg))
        return _upload(staging, repo_id, private, retry=folder)


def _upload(folder: Path, repo_id: str, private: bool | None, *, retry: Path) -> str:
    """One commit; `huggingface_hub` repeats what may succeed later."""
    api = HfApi()
    try:
        repo_id = api.create_repo(repo_id=repo_id, private=private, exist_ok=True).repo_id
        commit = api.upload_folder(
            repo_id=repo_id,
            repo_type="model",
            folder_path=folder,
            commit_message=_MESSAGE,
            allow_patterns=_UPLOADED,
            ignore_patterns=_NEVER_UPLOADED,
        )
    except Exception as error:
        raise PublishError(retry, repo_id, error) from error
    url = commit.repo_url.url
    # lerobot.jobs.hf ends a remote run at this exact line.
    logging.info(f"Model pushed to {url}")
    return url


def upload_checkpoint(directory: Path, cfg: ParallelTrainPipelineConfig) -> None:
    """Upload a checkpoint during the run, with the host's layout and tag. Rank 0.

    It is on disk already, and training is worth more than a copy of it: a failure is logged, with the way to repeat it.
    """
    config = cfg.trainable_config
    try:
        push_checkpoint_to_hub(directory, config.repo_id, private=config.private)
    except Exception as error:
        target = f"{layout.CHECKPOINTS_DIR}/{directory.name}"
        logging.error(
            "%s was not uploaded (%s); training goes on. By hand: hf upload %s %s %s",
            *(directory, _reason(error), config.repo_id, directory, target),
        )


def _configs(folder: Path) -> tuple[PreTrainedConfig | RewardModelConfig | None, ParallelTrainPipelineConfig | None]:
    """The configs in a directory, None for those that this host does not know."""
    register_third_party_plugins()
    config = _read(lambda: PreTrainedConfig.from_pretrained(folder)) or _read(
        lambda: RewardModelConfig.from_pretrained(folder)
    )
    return config, _read(lambda: ParallelTrainPipelineConfig.from_pretrained(folder))


def _local_dataset(cfg: ParallelTrainPipelineConfig | None) -> Any:
    """The dataset's metadata where it is on this machine: nothing is downloaded for a card."""
    from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata
    from lerobot.utils.constants import HF_LEROBOT_HOME

    dataset = getattr(cfg, "dataset", None)
    if dataset is None:
        return None
    root = Path(dataset.root or HF_LEROBOT_HOME / dataset.repo_id)
    if not (root / "meta" / "info.json").is_file():
        return None
    return _read(lambda: LeRobotDatasetMetadata(dataset.repo_id, root=root))


def _read(make: Any) -> Any:
    try:
        return make()
    except Exception as error:
        logging.debug("not for the card: %s", error)
        return None
