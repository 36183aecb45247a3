"""Decoding that ends when a rank's own samples do: ranks make different numbers of unit calls and none waits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from lerobot_parallel.config.topology import Degrees
from lerobot_parallel.plans import builtin
from tests.policies.builds.common import CHUNK, make, observation
from tests.policies.builds.joint import pi_batch
from tests.policies.builds.towers import ACTION_END, ACTION_TOKENS, molmoact2_batch
from tests.policies.cases import CASES
from tests.policies.runs import runtime_for, shard
from tests.support.world import WorldError

SHORT, LONG = 2, 4


@contextmanager
def _ending_at(head: nn.Module, step: int, *, words: range, end: int) -> Iterator[list[int]]:
    """The head chooses among `words` as its weights have it, and says `end` at its `step`-th call; yields the calls."""
    calls: list[int] = []

    def restrict(_module: nn.Module, _inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        allowed = torch.tensor([end] if len(calls) == step else list(words))
        return logits.masked_fill(~torch.isin(torch.arange(logits.shape[-1]), allowed), -torch.inf)

    handle = head.register_forward_hook(restrict)
    try:
        yield calls
    finally:
        handle.remove()


def _pi0_fast(policy: Any, step: int) -> tuple[torch.Tensor, int]:
    """The tokens of one observation, and how often the head was called for them."""
    seen: list[torch.Tensor] = []
    policy.detokenize_actions = lambda tokens, **_: seen.append(tokens.clone()) or torch.zeros(1, 4, 6)
    policy.config.temperature, policy.config.max_decoding_steps = 0.0, LONG
    end = policy._paligemma_tokenizer.convert_tokens_to_ids("|")
    with _ending_at(policy.model.paligemma_with_expert.paligemma.lm_head, step, words=range(5, 80), end=end) as calls:
        policy.predict_action_chunk(observation(pi_batch(1, 3)))
    return seen[0], len(calls)


def _molmoact2(policy: Any, step: int, *, static_cache: bool) -> tuple[torch.Tensor, int]:
    """The chunk that the bins of one sample's action tokens fill, and how often the head was called for them.

    Args:
        static_cache: the way of its CUDA graphs, without the graphs; else a cache that grows.
    """
    policy.config.enable_inference_cuda_graph = static_cache
    policy.action_tokenizer = SimpleNamespace(decode=lambda bins, **_: np.resize(bins[0], (1, CHUNK, 6)))
    with _ending_at(policy.model.lm_head, step, words=ACTION_TOKENS, end=ACTION_END) as calls:
        chunk = policy.predict_action_chunk(molmoact2_batch(1, 3), inference_action_mode="discrete")
    return chunk, len(calls)


def _on_rank(name: str, decode: Callable, gathered: bool) -> list[tuple[torch.Tensor, int]]:
    if not gathered:
        plan = builtin.BUILTIN_PLANS[name]
        builtin.BUILTIN_PLANS[name] = plan.model_copy(update={"gathered_methods": ()})
    _, policy, _, _ = shard(CASES[name], Degrees(1, 2), runtime_for())
    policy.eval()
    return [decode(policy, SHORT if dist.get_rank() == turn else LONG) for turn in (0, 1)]


def _alone(name: str, decode: Callable) -> list[tuple[torch.Tensor, int]]:
    policy = make(CASES[name], seed=0).eval()
    return [decode(policy, step) for step in (SHORT, LONG)]


@pytest.mark.parametrize(
    ("name", "decode"),
    [
        pytest.param("pi0_fast", _pi0_fast, id="pi0_fast"),
        pytest.param("molmoact2", partial(_molmoact2, static_cache=False), id="molmoact2"),
        pytest.param("molmoact2", partial(_molmoact2, static_cache=True), id="molmoact2_static_cache"),
    ],
)
def test_ranks_that_stop_at_different_steps_finish_with_the_unsharded_tokens(
    world: Callable, name: str, decode: Callable
) -> None:
    ((short, long),) = world(_alone, 1, name, decode)
    assert (short[1], long[1]) == (SHORT, LONG)
    first, second = world(_on_rank, 2, name, decode, True)
    for ours, theirs in zip([*first, *second], [short, long, long, short], strict=True):
        assert ours[1] == theirs[1]
        assert torch.equal(ours[0], theirs[0])


def test_without_gathering_first_they_do_not(world: Callable) -> None:
    """The control: ranks that gather unit by unit meet each other's collectives out of step, and wait or abort."""
    with pytest.raises(WorldError, match="longer than 15 s|SIGABRT"):
        world(_on_rank, 2, "pi0_fast", _pi0_fast, False, timeout=15)
