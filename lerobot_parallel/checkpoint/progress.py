"""training_step.json: how far a run had come, on what topology, and where in the data."""

import json

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from lerobot_parallel.checkpoint.layout import Checkpoint
from lerobot_parallel.checkpoint.safe_read import CheckpointError
from lerobot_parallel.config.topology import Degrees


class SavedTopology(BaseModel):
    """The degrees of the run that wrote the checkpoint."""

    model_config = ConfigDict(extra="ignore")

    dp_replicate: PositiveInt = 1
    dp_shard: PositiveInt = 1
    ring_degree: PositiveInt = 1
    ulysses_degree: PositiveInt = 1


class DataPosition(BaseModel):
    """The next sample: an epoch, and how many samples of it all ranks together have taken."""

    epoch: NonNegativeInt
    start_index: NonNegativeInt


class Progress(BaseModel):
    """Contents of the file. The host writes `step`, `num_processes` and `batch_size` only; its later releases
    everything but `num_processes` and `data_position`.

    `data_position` is this project's: a run that changed its topology more than once cannot derive it from
    `step`, since a step then stood for different numbers of samples.
    """

    model_config = ConfigDict(extra="ignore")

    step: NonNegativeInt
    dp_world_size: PositiveInt | None = None
    num_processes: PositiveInt | None = None
    batch_size: PositiveInt | None = None
    grad_accum_steps: PositiveInt = 1
    parallelism: SavedTopology | None = None
    data_position: DataPosition | None = None

    @property
    def data_ranks(self) -> int | None:
        """Over how many ranks the data was split."""
        return self.dp_world_size or self.num_processes

    def difference(self, degrees: Degrees) -> str | None:
        """How the topology of now differs from the saved one, as far as that is known."""
        saved = self.parallelism
        if saved is None:
            same = self.data_ranks in (None, degrees.world_size)
            return None if same else f"{degrees.world_size} ranks instead of {self.data_ranks}"
        if (saved.dp_replicate, saved.dp_shard) == (degrees.dp_replicate, degrees.dp_shard):
            return None
        return (
            f"dp_replicate {degrees.dp_replicate} x dp_shard {degrees.dp_shard} "
            f"instead of {saved.dp_replicate} x {saved.dp_shard}"
        )

    def write(self, checkpoint: Checkpoint) -> None:
        checkpoint.step_file.write_text(json.dumps(self.model_dump(exclude_none=True), indent=4))

    @classmethod
    def read(cls, checkpoint: Checkpoint) -> "Progress":
        """
        Raises:
            CheckpointError: the file is missing or is none of these.
        """
        path = checkpoint.step_file
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise CheckpointError(path, f"cannot be read ({error.strerror})") from None
        except ValidationError as error:
            first = error.errors()[0]
            raise CheckpointError(path, f"{'.'.join(map(str, first['loc'])) or 'content'}: {first['msg']}") from None


def progress(
    step: int, degrees: Degrees, *, batch_size: int, grad_accum_steps: int, position: DataPosition | None
) -> Progress:
    """What a checkpoint at `step` says of itself; `batch_size` is one rank's micro-batch."""
    return Progress(
        step=step,
        dp_world_size=degrees.world_size,
        num_processes=degrees.world_size,
        batch_size=batch_size,
        grad_accum_steps=grad_accum_steps,
        parallelism=SavedTopology(dp_replicate=degrees.dp_replicate, dp_shard=degrees.dp_shard),
        data_position=position,
    )
