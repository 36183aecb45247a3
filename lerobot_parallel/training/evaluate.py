"""Held-out loss on all ranks, environment evaluation on rank 0."""

import logging

import torch
from lerobot.common.train_utils import get_step_identifier
from lerobot.envs import close_envs, make_env, make_env_pre_post_processors
from lerobot.scripts.lerobot_eval import eval_policy_all
from lerobot.utils.logging_utils import AverageMeter, MetricsTracker

from lerobot_parallel.engine.buffers import agree_on_buffers
from lerobot_parallel.engine.sharding import reshard
from lerobot_parallel.training.assemble import Run
from lerobot_parallel.training.data import draw_as_the_host, to_float_images


def held_out_loss(run: Run) -> float:
    """Mean loss over the held-out batches, then over the ranks, the same value everywhere. Collective."""
    if run.degrees.sharded:
        agree_on_buffers(run.policy)
    _draw_for_the_loader(run)
    run.policy.eval()
    losses: list[torch.Tensor] = []
    with torch.no_grad(), run.accelerator.autocast():
        for batch in run.eval_loader:
            loss, _ = run.policy(run.preprocessor(to_float_images(batch, run.dataset.meta.camera_keys)))
            losses.append(loss)
    reshard(run.policy)
    run.policy.train()
    # Summed in double precision, as the host does.
    mean = sum(torch.stack(losses).float().tolist()) / len(losses) if losses else 0.0
    return run.accelerator.reduce(torch.tensor(mean, device=run.accelerator.device), reduction="mean").item()


def _draw_for_the_loader(run: Run) -> None:
    """The host draws for its held-out loader's iterator too: for every evaluation, or with persistent workers once."""
    once = run.cfg.persistent_workers and run.cfg.num_workers > 0
    if not once or run.step == run.cfg.eval_steps:
        draw_as_the_host()


def evaluate_in_environment(run: Run) -> None:
    """Roll the policy out, log success and reward. Rank 0 only: unsharded policies are whole there."""
    cfg = run.cfg
    logging.info("Eval policy at step %d", run.step)
    env_preprocessor, env_postprocessor = make_env_pre_post_processors(env_cfg=cfg.env, policy_cfg=cfg.policy)
    envs = make_env(cfg.env, n_envs=cfg.eval.batch_size, use_async_envs=cfg.eval.use_async_envs)
    try:
        with torch.no_grad(), run.accelerator.autocast():
            info = eval_policy_all(
                envs=envs,
                policy=run.module,
                env_preprocessor=env_preprocessor,
                env_postprocessor=env_postprocessor,
                preprocessor=run.preprocessor,
                postprocessor=run.postprocessor,
                n_episodes=cfg.eval.n_episodes,
                videos_dir=cfg.output_dir / "eval" / f"videos_step_{get_step_identifier(run.step, cfg.steps)}",
                max_episodes_rendered=4,
                start_seed=cfg.seed,
                max_parallel_tasks=cfg.env.max_parallel_tasks,
            )
    finally:
        close_envs(envs)
    _log_rollouts(run, info)


def _log_rollouts(run: Run, info: dict) -> None:
    overall = info["overall"]
    for suite, suite_info in info.items():
        logging.info("Suite %s aggregated: %s", suite, suite_info)
    meters = {
        "avg_sum_reward": AverageMeter("∑rwrd", ":.3f"),
        "pc_success": AverageMeter("success", ":.1f"),
        "eval_s": AverageMeter("eval_s", ":.3f"),
    }
    tracker = MetricsTracker(
        run.cfg.batch_size,
        run.dataset.num_frames,
        run.dataset.num_episodes,
        meters,
        initial_step=run.step,
        accelerator=run.accelerator,
    )
    for name in meters:
        setattr(tracker, name, overall.pop(name))
    if run.wandb is not None:
        run.wandb.log_dict({**tracker.to_dict(), **info}, run.step, mode="eval")
        run.wandb.log_video(overall["video_paths"][0], run.step, mode="eval")
