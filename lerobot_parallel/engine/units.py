"""What acts on a plan's units before they are sharded: activation checkpointing and torch.compile.

Both replace a module's `forward` on the instance. No wrapper module appears, so parameter names stay what they are,
and the hooks of `fully_shard` stay outside: a unit is gathered once, then its compiled or checkpointed forward runs.

A unit that is one module is transformed as a whole. Of a group of leaves, whose layer nobody calls, each leaf with
modules of its own is (the MLP): a checkpointed single projection would save nothing but its input, which is kept
anyway, and what a policy does between the leaves is out of reach (`policy.gradient_checkpointing` of pi0 and pi05
recomputes that too, and goes with all of this). Single projections, embeddings and heads that are units of their own
are left alone for the same reason.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from lerobot_parallel.config.errors import ConfigError
from lerobot_parallel.config.runtime import AcceleratorConfig, CompileConfig
from lerobot_parallel.plans.plan import ResolvedPlan

# How transformers passes a key-value cache, also in training where a policy does not switch it off.
_CACHE = "past_key_values"


def needs_units(runtime: AcceleratorConfig) -> bool:
    """Whether a run needs a plan for what this module does, sharded or not."""
    return runtime.activation_checkpointing.mode != "none" or (runtime.compile.enabled and runtime.compile.regional)


def transform_units(policy: nn.Module, plan: ResolvedPlan | None, runtime: AcceleratorConfig) -> None:
    """Activation checkpointing, then compile, in place; before sharding, DDP and the optimizer.

    Args:
        plan: may be None where `needs_units` says no.

    Raises:
        ConfigError: torch does not know the compile backend.
    """
    if runtime.activation_checkpointing.mode == "full":
        for module in transformable(plan):
            module.forward = _checkpointed(module.forward, _batch_norms(module))
    if runtime.compile.enabled:
        _check_backend(runtime.compile)
        for module in transformable(plan) if runtime.compile.regional else [policy]:
            module.forward = _compiled(module.forward, runtime.compile)


def transformable(plan: ResolvedPlan) -> Iterator[nn.Module]:
    """The modules of a plan's units that have modules inside; a unit within a unit belongs to the outer one's."""
    composed = [module for unit in plan.units for module in unit.modules if any(True for _ in module.children())]
    inner = {id(child) for module in composed for child in module.modules() if child is not module}
    yield from (module for module in composed if id(module) not in inner)


def _checkpointed(forward: Callable, norms: list[_BatchNorm]) -> Callable:
    """Recompute in backward, with the random numbers of the first time, and without counting a batch twice."""
    contexts = {"context_fn": lambda: (nullcontext(), _statistics_stay(norms))} if norms else {}

    @functools.wraps(forward)
    def recomputed(*args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        repeatable = _with_fresh_cache(forward, kwargs.pop(_CACHE)) if kwargs.get(_CACHE) is not None else forward
        return checkpoint(repeatable, *args, use_reentrant=False, preserve_rng_state=True, **contexts, **kwargs)

    return recomputed


def _batch_norms(module: nn.Module) -> list[_BatchNorm]:
    return [norm for norm in module.modules() if isinstance(norm, _BatchNorm) and norm.track_running_stats]


@contextmanager
def _statistics_stay(norms: list[_BatchNorm]) -> Iterator[None]:
    before = [(norm, norm.momentum, norm.num_batches_tracked.clone()) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum, batches in before:
            norm.momentum = momentum
            norm.num_batches_tracked.copy_(batches)


def _with_fresh_cache(forward: Callable, cache: object) -> Callable:
    """`forward` with a key-value cache, into which it writes once; each repetition finds what it found before.

    Layers replace what a cache holds instead of writing into it, so two levels of shallow copies are enough.
    """
    found = _copy_cache(cache)
    caches = itertools.chain([cache], iter(lambda: _copy_cache(found), None))
    return lambda *args, **kwargs: forward(*args, **{_CACHE: next(caches)}, **kwargs)


def _copy_cache(cache: object) -> object:
    twin = copy.copy(cache)
    if hasattr(cache, "layers"):
        twin.layers = [copy.copy(layer) for layer in cache.layers]
    return twin


def _compiled(forward: Callable, config: CompileConfig) -> Callable:
    compiled = torch.compile(forward, backend=config.backend, mode=config.mode)
    return functools.wraps(forward)(lambda *args, **kwargs: compiled(*args, **kwargs))


def _check_backend(config: CompileConfig) -> None:
    known = torch._dynamo.list_backends(exclude_tags=())
    if config.backend not in known:
        raise ConfigError(
            "--accelerator.compile.backend",
            config.backend,
            "torch knows no such backend",
            f"use one of {', '.join(known)}",
        )
