"""Which file a `--config_path` means; imports nothing heavy unless the hub has to be asked."""

from pathlib import Path

TRAIN_CONFIG = "train_config.json"


def config_file(config_path: str) -> Path | None:
    """The file that the host would read for a `--config_path`: itself, the one in a directory, or one of the hub.

    None where there is no such file; the host says what is wrong then.
    """
    path = Path(config_path)
    if not path.exists():
        return _hub_config_file(config_path)
    file = path / TRAIN_CONFIG if path.is_dir() else path
    return file if file.is_file() else None


def _hub_config_file(repo_id: str) -> Path | None:
    """The config of a training repo, or of its latest checkpoint where the run was interrupted."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from lerobot.utils.hub import find_latest_hub_checkpoint

    try:
        return Path(hf_hub_download(repo_id, TRAIN_CONFIG))
    except HfHubHTTPError:
        latest = find_latest_hub_checkpoint(repo_id)
        return Path(hf_hub_download(repo_id, f"{latest}/pretrained_model/{TRAIN_CONFIG}")) if latest else None
    except (HFValidationError, LocalEntryNotFoundError):
        return None
