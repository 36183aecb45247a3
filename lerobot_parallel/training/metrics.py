"""What a step leaves behind for the log, read from the device at log steps only."""

import time
from typing import Any

import torch
from accelerate import Accelerator
from lerobot.utils.logging_utils import AverageMeter, MetricsTracker


class StepMetrics:
    """Collects losses and norms as tensors, and fills the host's meters when a log line is due.

    The meters, their order and their reductions are the host's, so that its log line and charts stay as they
    are. `update_s` is wall time outside of data loading and of everything in `aside`, averaged over the log
    window: without a synchronisation per step, single steps have no length of their own on a GPU.
    """

    def __init__(self, cfg: Any, dataset: Any, accelerator: Accelerator, *, step: int) -> None:
        meters = {
            "loss": AverageMeter("loss", ":.3f", reduction="mean"),
            "grad_norm": AverageMeter("grdn", ":.3f"),
            "lr": AverageMeter("lr", ":0.1e"),
            "update_s": AverageMeter("updt_s", ":.3f", reduction="max"),
            "dataloading_s": AverageMeter("data_s", ":.3f", reduction="max"),
            "samples_per_s": AverageMeter("smp/s", ":.0f"),
        }
        if torch.cuda.is_available():
            meters["gpu_mem_gb"] = AverageMeter("mem_gb", ":.2f", reduction="max")
        self.tracker = MetricsTracker(
            cfg.batch_size, dataset.num_frames, dataset.num_episodes, meters, initial_step=step, accelerator=accelerator
        )
        self._global_batch = cfg.batch_size * accelerator.num_processes
        self._collects = cfg.log_freq > 0
        self._last_norm = 0.0
        self._start_window()

    def _start_window(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._norms: list[torch.Tensor] = []
        self._steps = 0
        self._loading_s = 0.0
        self._aside_s = 0.0
        self._began = time.perf_counter()

    def loaded(self, seconds: float) -> None:
        self._loading_s += seconds
        self.tracker.dataloading_s = seconds

    def aside(self, seconds: float) -> None:
        """Time within the window that belongs to no step: evaluation, checkpoints."""
        self._aside_s += seconds

    def add(self, loss: torch.Tensor, norm: torch.Tensor | None, lr: float, outputs: dict[str, Any] | None) -> None:
        """One step; `norm` is None on micro-steps that end no window."""
        self.tracker.step()
        self._steps += 1
        if not self._collects:
            return
        self._losses.append(loss.detach())
        if norm is not None:
            self._norms.append(norm)
        self.tracker.lr = lr
        if outputs:
            self.tracker.update_metrics(outputs)

    def read(self) -> None:
        """Fill the meters and reduce them over the ranks. Collective; waits for the device."""
        for loss in _values(self._losses):
            self.tracker.loss = loss
        norms = _values(self._norms)
        self._last_norm = norms[-1] if norms else self._last_norm
        for norm in norms or [self._last_norm]:
            self.tracker.grad_norm = norm
        elapsed = time.perf_counter() - self._began - self._loading_s - self._aside_s
        self.tracker.metrics["update_s"].update(max(elapsed, 0.0) / self._steps, self._steps)
        if torch.cuda.is_available():
            self.tracker.gpu_mem_gb = torch.cuda.max_memory_allocated() / 1024**3
            torch.cuda.reset_peak_memory_stats()
        self.tracker.reduce_across_ranks()
        step_time = self.tracker.update_s.avg + self.tracker.dataloading_s.avg
        if step_time > 0:
            self.tracker.samples_per_s = self._global_batch / step_time

    def reset(self) -> None:
        self.tracker.reset_averages()
        self._start_window()


def _values(tensors: list[torch.Tensor]) -> list[float]:
    return torch.stack(tensors).float().tolist() if tensors else []
