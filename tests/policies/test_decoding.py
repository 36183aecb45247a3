"""Decoding that ends when a rank's own samples do: ranks make different numbers of unit calls and none waits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lerobot_parallel.config.topology import Degrees
from lerobot_parallel.plans import builtin
from tests.policies.builds.common import make, observation
from tests.policies.builds.joint import pi_batch
from tests.policies.cases import CASES
from tests.policies.runs import runtime_for, shard
from tests.support.world import WorldError

CASE = CASES["pi0_fast"]
STEPS = 3
NEVER = -1


def _decode(policy: Any, first_token_ends: bool) -> tuple[torch.Tensor, int]:
    """The tokens of one observation, and how often the head was called for them."""
    seen: list[torch.Tensor] = []
    policy.detokenize_actions = lambda tokens, **_: seen.append(tokens.clone()) or torch.zeros(1, 4, 6)
    policy.config.temperature, policy.config.max_decoding_steps = 0.0, STEPS
    calls: list[int] = []
    handle = policy.model.paligemma_with_expert.paligemma.lm_head.register_forward_pre_hook(lambda *_: calls.append(1))
    token = 0 if first_token_ends else NEVER
    tokenizer = policy._paligemma_tokenizer
    ids = type(tokenizer).convert_tokens_to_ids
    tokenizer.convert_tokens_to_ids = lambda words: token if words == "|" else ids(tokenizer, words)
    head = policy.model.paligemma_with_expert.paligemma.lm_head
    always = head.register_forward_hook(lambda _m, _i, logits: logits.index_fill(-1, torch.tensor([0]), 1e9))
    policy.predict_action_chunk(observation(pi_batch(1, 3)))
    handle.remove()
    always.remove()
    return seen[0], len(calls)


def _on_rank(gathered: bool) -> list[tuple[torch.Tensor, int]]:
    if not gathered:
        plan = builtin.BUILTIN_PLANS["pi0_fast"]
        builtin.BUILTIN_PLANS["pi0_fast"] = plan.model_copy(update={"gathered_methods": ()})
    _, policy, _, _ = shard(CASE, Degrees(1, 2), runtime_for())
    policy.eval()
    return [_decode(policy, first_token_ends=dist.get_rank() == turn) for turn in (0, 1)]


def _alone() -> list[tuple[torch.Tensor, int]]:
    policy = make(CASE, seed=0).eval()
    return [_decode(policy, first_token_ends=ends) for ends in (True, False)]


def test_ranks_that_stop_at_different_steps_finish_with_the_unsharded_tokens(world: Callable) -> None:
    ((short, long),) = world(_alone, 1)
    assert (short[1], long[1]) == (1, STEPS)
    first, second = world(_on_rank, 2, True)
    for ours, theirs in zip([*first, *second], [short, long, long, short], strict=True):
        assert ours[1] == theirs[1]
        assert torch.equal(ours[0], theirs[0])


def test_without_gathering_first_they_do_not(world: Callable) -> None:
    """The control: ranks that gather unit by unit meet each other's collectives out of step, and wait or abort."""
    with pytest.raises(WorldError, match="longer than 15 s|SIGABRT"):
        world(_on_rank, 2, False, timeout=15)
