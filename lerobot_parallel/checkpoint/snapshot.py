"""What a checkpoint is made of: the large state, taken as it is or copied so that training can go on."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lerobot_parallel.checkpoint.layout import MODEL_KEY, OPTIMIZER_KEY, Checkpoint
from lerobot_parallel.checkpoint.manifest import TensorCount
from lerobot_parallel.checkpoint.state import gather_model_state, model_state, optimizer_state, tied_names
from lerobot_parallel.config.train import ParallelTrainPipelineConfig
from lerobot_parallel.engine.buffers import agree_on_buffers
from lerobot_parallel.engine.ranks import is_main


@dataclass(frozen=True)
class RunState:
    """What a checkpoint is made of. `policy` is unwrapped: sharded, or the module that DDP wraps.

    `scaler` is that of fp16, which scales the loss by what the gradients of the steps before allowed.
    """

    cfg: ParallelTrainPipelineConfig
    policy: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    preprocessor: Any
    postprocessor: Any
    scaler: torch.amp.GradScaler | None = None

    @property
    def sharded(self) -> bool:
        return isinstance(self.policy, FSDPModule)

    @property
    def host_writes_model(self) -> bool:
        """Adapters and unsharded reward models are small, and written by the host's own methods."""
        return self.cfg.peft is not None or (self.cfg.is_reward_model_training and not self.sharded)


@dataclass(frozen=True)
class Snapshot:
    """The state to write, each part None where this rank, or this format, does not write it.

    Attributes:
        model_shards, optimizer_shards: state dicts for DCP, on every rank.
        model_file, optimizer_file: full tensors on rank 0.
    """

    model_shards: dict[str, Any] | None = None
    optimizer_shards: dict[str, Any] | None = None
    model_file: dict[str, torch.Tensor] | None = None
    optimizer_file: dict[str, Any] | None = None

    def shards(self, staging: Checkpoint) -> list[tuple[dict[str, Any], Any]]:
        """State dicts with the directories they go to."""
        pairs = [(self.model_shards, staging.model_shards), (self.optimizer_shards, staging.optimizer_shards)]
        return [(state, directory) for state, directory in pairs if state is not None]


def take(run: RunState) -> Snapshot:
    """The state of the run, aliasing its memory where nothing had to be gathered. Collective."""
    if not run.sharded:
        if not is_main():
            return Snapshot()
        model = None if run.host_writes_model else _without_aliases(run.policy)
        return Snapshot(model_file=model, optimizer_file=run.optimizer.state_dict())
    agree_on_buffers(run.policy)
    formats = run.cfg.checkpoint_format
    whole = gather_model_state(run.policy) if "safetensors" in formats else None
    return Snapshot(
        model_shards={MODEL_KEY: model_state(run.policy)} if "dcp" in formats else None,
        optimizer_shards={OPTIMIZER_KEY: optimizer_state(run.policy, run.optimizer)},
        model_file=whole if is_main() else None,
    )


def _without_aliases(policy: nn.Module) -> dict[str, torch.Tensor]:
    """The model's state with tied weights under one name, the one that the safetensors library would keep.

    It would note the others in its metadata, in an order of its own at each call.
    """
    aliases = {name for names in tied_names(policy) for name in sorted(names)[1:]}
    return {name: tensor for name, tensor in model_state(policy).items() if name not in aliases}


class Copier:
    """Copies state into host memory of its own, which is used again for the next copy."""

    def __init__(self) -> None:
        self._room: dict[tuple, torch.Tensor] = {}
        self._seen: dict[tuple, torch.Tensor] = {}

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """Waits until every byte has arrived. What was gathered is a copy already."""
        self._seen = {}
        gathered = snapshot.optimizer_shards is not None
        alive = {n: v for n, v in vars(snapshot).items() if not (gathered and n == "model_file")}
        parts = {name: self._copied((name,), value) for name, value in alive.items()}
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return replace(snapshot, **parts)

    def _copied(self, path: tuple, value: Any) -> Any:
        if isinstance(value, DTensor):
            return DTensor(self._own(path, value.to_local().detach()), value._spec, requires_grad=False)
        if isinstance(value, torch.Tensor):
            return self._own(path, value.detach())
        if isinstance(value, dict):
            return {key: self._copied((*path, key), item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copied((*path, index), item) for index, item in enumerate(value))
        return value

    def _own(self, path: tuple, tensor: torch.Tensor) -> torch.Tensor:
        """Tied weights stay one tensor, as writers drop their other names by that."""
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in self._seen:
            return self._seen[place]
        room = self._room.get(path)
        if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
            room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._room[path] = room
        self._seen[place] = room.copy_(tensor, non_blocking=tensor.is_cuda)
        return room


def count_model(policy: nn.Module) -> TensorCount:
    """Distinct tensors of the model's state: a tied weight counts once."""
    return _count(list(_without_aliases(policy).values()))


def count_optimizer(optimizer: torch.optim.Optimizer) -> TensorCount:
    fields = [value for state in optimizer.state.values() for value in state.values()]
    return _count([value for value in fields if isinstance(value, torch.Tensor)])


def _count(tensors: list[torch.Tensor]) -> TensorCount:
    return TensorCount(count=len(tensors), bytes=sum(t.numel() * t.element_size() for t in tensors))
