"""The training loop: the host's, in small steps, over whatever engine the run has."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lerobot.common.train_utils import should_save_checkpoint
from lerobot.common.wandb_utils import WandBLogger
from lerobot.utils.utils import has_method, inside_slurm
from tqdm import tqdm

from lerobot_parallel.checkpoint.progress import progress
from lerobot_parallel.config.train import ParallelTrainPipelineConfig
from lerobot_parallel.engine.ranks import patient_group, raised_together
from lerobot_parallel.training.assemble import Run, start_noise
from lerobot_parallel.training.data import draw_as_the_host, endless, to_float_images
from lerobot_parallel.training.evaluate import evaluate_in_environment, held_out_loss
from lerobot_parallel.training.metrics import StepMetrics
from lerobot_parallel.training.preemption import stop_requests
from lerobot_parallel.training.publish import upload_checkpoint


def train_loop(run: Run) -> bool:
    """Step from `run.step` to `cfg.steps`, logging, evaluating and saving on the way. Collective.

    Returns:
        Whether it came to its end; False if a signal on any rank stopped it, after one save.
    """
    cfg = run.cfg
    metrics = StepMetrics(cfg, run.dataset, run.accelerator, step=run.step)
    first_step = run.step
    save_due = stop = False
    # Not the run itself: a cycle would keep it, with its loader's processes, until the interpreter has ended.
    run.saver.published = partial(_upload, run.cfg, run.wandb)
    with _progress_bar(run) as bar, stop_requests() as request:
        for batch in _batches(run, metrics):
            loss, norm, outputs = train_step(run, batch)
            run.step += 1
            bar.update(1)
            metrics.add(loss, norm, run.optimizer.param_groups[0]["lr"], outputs)
            if cfg.log_freq > 0 and run.step % cfg.log_freq == 0:
                _log(run, metrics)
            # A save that falls inside an accumulation window waits for the window's update.
            save_due = save_due or should_save_checkpoint(run.step, cfg.save_freq, cfg.steps)
            last = run.step == cfg.steps
            with _aside(metrics):
                _evaluate(run)
                stop = run.saver.step_edge(bool(request)) or stop
                if cfg.save_checkpoint and (save_due or stop) and (run.window.is_update or last):
                    _save(run, steps_done=run.step - first_step)
                    save_due = False
                _evaluate_environment(run)
            if stop and (run.window.is_update or last):
                break
        run.saver.wait()
    return run.step == cfg.steps


def _batches(run: Run, metrics: StepMetrics) -> Iterator[dict[str, Any]]:
    batches = endless(run.loader, _epoch_draws(run))
    start_noise(run)
    for _ in range(run.step, run.cfg.steps):
        began = time.perf_counter()
        batch = run.preprocessor(to_float_images(next(batches), run.dataset.meta.camera_keys))
        metrics.loaded(time.perf_counter() - began)
        yield batch


def _epoch_draws(run: Run) -> Callable[[], None]:
    """What to do at the beginning of each epoch to draw what the host draws.

    In the middle of an epoch its iterator existed before the saved random state; persistent workers make the one
    of the first epoch serve all.
    """
    once = run.cfg.persistent_workers and run.cfg.num_workers > 0
    start = run.order.position(0) if run.order is not None else None
    drawn = start is not None and (start.start_index > 0 or (once and start.epoch > 0))

    def begin() -> None:
        nonlocal drawn
        if not drawn:
            draw_as_the_host()
        drawn = once

    return begin


def train_step(run: Run, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, Any] | None]:
    """One micro-batch, and the optimizer's update if it ends a window. Collective.

    Returns:
        The micro-batch's loss (0-dim, detached from nothing, not read), the gradient norm on update steps, and
        what the policy says for the log.
    """
    run.policy.train()
    with run.window.micro_batch():
        with run.accelerator.autocast():
            loss, outputs = compute_loss(run, batch)
        run.accelerator.backward(loss)
        norm = _update(run) if run.window.is_update else None
    if run.scheduler is not None:
        run.scheduler.step()
    return loss.detach(), norm, outputs


def compute_loss(run: Run, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any] | None]:
    """The policy's own loss, or the weighted mean over samples where a sample weighter is set.

    The mean divides by the sum of the weights, so that samples of weight 0 do not shrink the gradient.
    """
    if run.sample_weighter is None:
        return run.policy(batch)
    weights, stats = run.sample_weighter.compute_batch_weights(batch)
    per_sample, outputs = run.policy(batch, reduction="none")
    loss = (per_sample * weights).sum() / (weights.sum() + 1e-6)
    return loss, (outputs or {}) | {f"sample_weight_{key}": value for key, value in stats.items()}


def _update(run: Run) -> torch.Tensor:
    norm = run.window.finish(run.cfg.optimizer.grad_clip_norm)
    run.optimizer.step()
    run.optimizer.zero_grad()
    if has_method(run.module, "update"):
        run.module.update()
    return norm


def _log(run: Run, metrics: StepMetrics) -> None:
    metrics.read()
    if run.accelerator.is_main_process:
        logging.info(metrics.tracker)
        if run.wandb is not None:
            values = metrics.tracker.to_dict()
            if run.sample_weighter is not None:
                values.update({f"sample_weighting/{k}": v for k, v in run.sample_weighter.get_stats().items()})
            run.wandb.log_dict(values, run.step)
    metrics.reset()


def _evaluate(run: Run) -> None:
    if run.eval_loader is None or run.cfg.eval_steps <= 0 or run.step % run.cfg.eval_steps:
        return
    loss = held_out_loss(run)
    logging.info("step %d: eval_loss=%.4f", run.step, loss)
    if run.wandb is not None:
        run.wandb.log_dict({"eval_loss": loss}, step=run.step, mode="eval")


def _evaluate_environment(run: Run) -> None:
    freq = run.cfg.env_eval_freq
    if run.cfg.env is None or freq <= 0 or run.step % freq:
        return
    with raised_together("evaluating in the environment", patient_group()):
        if run.accelerator.is_main_process:
            evaluate_in_environment(run)


def _save(run: Run, *, steps_done: int) -> None:
    cfg = run.cfg
    logging.info("Checkpoint policy after step %d", run.step)
    run.saver.save(
        progress(
            run.step,
            run.degrees,
            batch_size=cfg.batch_size,
            grad_accum_steps=cfg.accelerator.gradient_accumulation.steps,
            position=run.order.position(steps_done) if run.order is not None else None,
        ),
    )


def _upload(cfg: ParallelTrainPipelineConfig, wandb: WandBLogger | None, directory: Path) -> None:
    """Rank 0, once a checkpoint is there."""
    if cfg.save_checkpoint_to_hub:
        upload_checkpoint(directory, cfg)
    if wandb is not None:
        wandb.log_policy(directory)


@contextmanager
def _progress_bar(run: Run) -> Iterator[tqdm]:
    hidden = inside_slurm() or not run.accelerator.is_main_process
    with tqdm(
        total=run.cfg.steps - run.step, desc="Training", unit="step", disable=hidden, position=0, leave=True
    ) as bar:
        yield bar


@contextmanager
def _aside(metrics: StepMetrics) -> Iterator[None]:
    began = time.perf_counter()
    yield
    metrics.aside(time.perf_counter() - began)
