"""Buffers that ranks update on their own data become one before they are saved or evaluated."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from lerobot_parallel.engine.buffers import agree_on_buffers


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("codes", torch.zeros(2, 2))
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("cache", torch.zeros(1), persistent=False)


def _agreed(rounds: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    rank = dist.get_rank()
    module = Counting()
    for _ in range(rounds):
        module.norm(_samples(rank))
    module.codes.fill_(rank + 1.0)
    module.ready.fill_(rank == 0)
    module.cache = torch.full((rank + 1,), float(rank))
    agree_on_buffers(module)
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}, module.cache


def _samples(rank: int) -> torch.Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(rank)) * (rank + 1) + rank


def test_running_statistics_are_averaged_and_the_rest_is_rank_0s(world: Callable) -> None:
    results = world(_agreed, 4, 1, init=True)
    # One update with momentum 0.1 from mean 0 and variance 1, averaged over the four ranks' own samples.
    means = torch.stack([0.1 * _samples(r).mean(0) for r in range(4)]).mean(0)
    variances = torch.stack([0.9 + 0.1 * _samples(r).var(0) for r in range(4)]).mean(0)
    for rank, (state, cache) in enumerate(results):
        torch.testing.assert_close(state["norm.running_mean"], means)
        torch.testing.assert_close(state["norm.running_var"], variances)
        assert torch.equal(state["codes"], torch.ones(2, 2))
        assert state["ready"].item() is True and state["norm.num_batches_tracked"] == 1
        assert torch.equal(cache, torch.full((rank + 1,), float(rank)))


def test_a_single_process_keeps_its_own() -> None:
    module = Counting()
    module.norm.running_mean.fill_(3.0)
    agree_on_buffers(module)
    assert module.norm.running_mean.tolist() == [3.0] * 3


def _step_after(agree: bool) -> torch.Tensor:
    module = Counting().train()
    module.norm(_samples(dist.get_rank()))
    if agree:
        agree_on_buffers(module)
    return module.norm(_samples(dist.get_rank() + 7)).detach().clone()


def test_agreeing_changes_no_training_step(world: Callable) -> None:
    for with_, without in zip(
        world(_step_after, 2, True, init=True), world(_step_after, 2, False, init=True), strict=True
    ):
        assert torch.equal(with_, without)
