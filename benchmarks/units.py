"""What activation checkpointing and compile cost and save, on one process: peak memory and time of a training step.

An ACT policy, wide enough that its activations outweigh its weights, trains with and without; variants take turns, step
by step, within each round, so that a busy machine disturbs all alike. `peak_mib` is what a step's forward keeps
for its backward, counted by torch's saved-tensor hooks on CPU and by the allocator on CUDA. Prints JSON lines, one a
variant, with the ratios to `plain`.

    python benchmarks/units.py --rounds 10
    python benchmarks/units.py --rounds 30 --device cuda --backend inductor
"""

import argparse
import statistics
import time

import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy
from report import emit
from torch import nn

from lerobot_parallel.config.runtime import AcceleratorConfig, ActivationCheckpointingConfig, CompileConfig, FSDPConfig
from lerobot_parallel.engine.units import transform_units
from lerobot_parallel.plans import registry

STATE, ENV, ACTION = 14, 8, 14
WARMUP = 3


def variants(backend: str) -> dict[str, AcceleratorConfig]:
    recompute, compiled = ActivationCheckpointingConfig("full"), CompileConfig(enabled=True, backend=backend)
    return {
        "plain": AcceleratorConfig(),
        "recompute": AcceleratorConfig(activation_checkpointing=recompute),
        "compile": AcceleratorConfig(compile=compiled),
        "recompute_compile": AcceleratorConfig(activation_checkpointing=recompute, compile=compiled),
    }


def build(runtime: AcceleratorConfig, device: str, width: int, chunk: int) -> nn.Module:
    torch.manual_seed(0)
    features = {
        "observation.state": (FeatureType.STATE, STATE),
        "observation.environment_state": (FeatureType.ENV, ENV),
    }
    config = ACTConfig(
        device=device,
        chunk_size=chunk,
        n_action_steps=chunk,
        dim_model=width,
        dim_feedforward=4 * width,
        n_encoder_layers=6,
        n_vae_encoder_layers=6,
        dropout=0.0,
        input_features={name: PolicyFeature(kind, (size,)) for name, (kind, size) in features.items()},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (ACTION,))},
    )
    policy = ACTPolicy(config).to(device).train()
    transform_units(policy, registry.resolve(policy, "act", FSDPConfig()), runtime)
    return policy


def batch_of(n: int, chunk: int, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"observation.state": (n, STATE), "observation.environment_state": (n, ENV), "action": (n, chunk, ACTION)}
    batch = {name: torch.randn(shape, generator=generator).to(device) for name, shape in shapes.items()}
    return batch | {"action_is_pad": torch.zeros(n, chunk, dtype=torch.bool, device=device)}


class Saved:
    """Bytes of distinct storages that autograd keeps between forward and backward, weights aside."""

    def __init__(self, policy: nn.Module) -> None:
        self._weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
        self._sizes: dict[int, int] = {}

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def mib(self) -> float:
        return sum(self._sizes.values()) / 2**20


def step(policy: nn.Module, batch: dict[str, torch.Tensor], device: str) -> tuple[float, float, float]:
    """Seconds, peak MiB and loss of one forward and backward."""
    torch.manual_seed(2)
    policy.zero_grad()
    saved = Saved(policy)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    with (
        torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda tensor: tensor)
        if device == "cpu"
        else torch.enable_grad()
    ):
        loss, _ = policy(batch)
    loss.backward()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = saved.mib if device == "cpu" else (torch.cuda.max_memory_allocated() - before) / 2**20
    return seconds, peak, loss.item()


def measure(args: argparse.Namespace) -> list[dict]:
    policies = {
        name: build(config, args.device, args.width, args.chunk) for name, config in variants(args.backend).items()
    }
    batch = batch_of(args.batch, args.chunk, args.device)
    results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in policies}
    for policy in policies.values():
        for _ in range(WARMUP):
            step(policy, batch, args.device)
    for index in range(args.rounds):
        names = list(policies) if index % 2 else list(reversed(policies))
        for name in names:
            results[name].append(step(policies[name], batch, args.device))
    plain_s = [seconds for seconds, _, _ in results["plain"]]
    return [row(name, runs, plain_s, results["plain"]) for name, runs in results.items()]


def row(name: str, runs: list[tuple], plain_s: list[float], plain: list[tuple]) -> dict:
    peak, plain_peak = (max(run[1] for run in group) for group in (runs, plain))
    return {
        "variant": name,
        "step_ms": round(statistics.median(run[0] for run in runs) * 1e3, 2),
        "time_ratio": round(statistics.median(run[0] / p for run, p in zip(runs, plain_s, strict=True)), 3),
        "peak_mib": round(peak, 2),
        "peak_ratio": round(peak / plain_peak, 3),
        "loss_difference": abs(runs[0][2] - plain[0][2]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--chunk", type=int, default=50)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    for line in measure(args):
        emit(line | {"settings": vars(args)}, "lerobot-parallel", "lerobot", "torch")


if __name__ == "__main__":
    main()
