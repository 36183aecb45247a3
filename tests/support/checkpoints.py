"""Runs small enough to save and load them hundreds of times: the nasty toy, stepped a little, without a dataset."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tests.support.toy import TOY_PLAN, make_toy, make_toy_nasty_pre_post_processors, toy_batch


def toy_run(
    output_dir: Path, *, dp_shard: int = 1, steps: int = 1, checkpoint_format: str = "safetensors", **own: Any
) -> Any:
    """A `RunState` whose optimizer made `steps` steps; `own` are entries of `--checkpoint.*`. Collective if sharded."""
    from lerobot.configs.default import DatasetConfig

    from lerobot_parallel.checkpoint.snapshot import RunState
    from lerobot_parallel.config.checkpointing import CheckpointConfig
    from lerobot_parallel.config.train import ParallelTrainPipelineConfig

    policy = make_toy(seed=0)
    cfg = ParallelTrainPipelineConfig(
        dataset=DatasetConfig(repo_id="local/toy"),
        policy=policy.config,
        output_dir=output_dir,
        steps=1000,
        checkpoint_format=checkpoint_format,
        checkpoint=CheckpointConfig(**own),
    )
    if dp_shard > 1:
        _shard(policy, dp_shard)
    optimizer = torch.optim.AdamW(policy.get_optim_params(), lr=1e-2)
    run = RunState(cfg, policy, optimizer, None, *make_toy_nasty_pre_post_processors(policy.config))
    for step in range(steps):
        take_step(run, seed=step)
    return run


def _shard(policy: Any, dp_shard: int) -> None:
    from contextlib import nullcontext

    from lerobot_parallel.checkpoint.sharded_policy import make_savable
    from lerobot_parallel.config.runtime import AcceleratorConfig
    from lerobot_parallel.config.topology import Degrees
    from lerobot_parallel.engine.sharding import shard_policy
    from lerobot_parallel.engine.topology import build_mesh
    from lerobot_parallel.plans.plan import WrapPlan, resolve_plan

    shard_policy(
        policy,
        resolve_plan(WrapPlan(**TOY_PLAN | {"keep_gathered": ["joint.prefix.{last}"]}), policy, source="test"),
        mesh=build_mesh(Degrees(1, dp_shard), "cpu"),
        runtime=AcceleratorConfig(),
        device=torch.device("cpu"),
        autocast=nullcontext,
    )
    make_savable(policy)


def take_step(run: Any, seed: int) -> None:
    """One optimizer step, in place, of every parameter that gets a gradient."""
    loss, _ = run.policy(toy_batch(4, seed=seed))
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.policy.update()


def full_state(run: Any) -> dict[str, torch.Tensor]:
    """Weights, buffers and optimizer state in full, by the module's and the optimizer's own fields. Collective."""
    full = lambda t: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()  # noqa: E731
    state = {f"model.{name}": full(tensor) for name, tensor in run.policy.state_dict().items()}
    for name, param in run.policy.named_parameters():
        for field, value in run.optimizer.state.get(param, {}).items():
            state[f"optimizer.{name}.{field}"] = full(value)
    return state


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def toy_progress(step: int, dp_shard: int = 1) -> Any:
    from lerobot_parallel.checkpoint.progress import progress
    from lerobot_parallel.config.topology import Degrees

    return progress(step, Degrees(1, dp_shard), batch_size=4, grad_accum_steps=1, position=None)


def save_toy(run: Any, step: int, dp_shard: int = 1) -> Path:
    """Saves in the foreground, whatever the run's flags say about waiting. Collective."""
    from lerobot_parallel.checkpoint.save import Saver

    saver = Saver(run)
    directory = saver.save(toy_progress(step, dp_shard))
    saver.wait()
    return directory


def load_toy(run: Any, checkpoint: Any) -> None:
    """Fills a run made by `toy_run(steps=0)`. Collective."""
    from lerobot_parallel.checkpoint.resume import load_optimizer, load_weights

    load_weights(run.policy, checkpoint)
    load_optimizer(run.policy, run.optimizer, checkpoint)


def contents(directory: Path) -> dict[str, bytes]:
    """Every file of a directory tree."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}
