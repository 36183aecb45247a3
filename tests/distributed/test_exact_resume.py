"""An interrupted run is the run that was not interrupted, bit for bit, on every rank."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from tests.support.commands import host_train_in_world, quiet_env, train_in_world
from tests.support.datasets import make_dataset
from tests.support.tracing import traced_training
from tests.support.world import run_world

COMMON = [
    "--dataset.repo_id=local/toy",
    "--policy.device=cpu",
    "--policy.push_to_hub=false",
    "--batch_size=4",
    "--log_freq=1",
    "--num_workers=0",
    "--wandb.enable=false",
    "--seed=7",
]
# The VAE and dropout draw noise in every step.
ACT = [
    "--policy.type=act",
    *(
        f"--policy.{flag}"
        for flag in ("dim_model=32", "dim_feedforward=64", "n_heads=4", "chunk_size=8", "n_action_steps=8")
    ),
    *(f"--policy.{flag}" for flag in ("latent_dim=8", "dropout=0.1", "use_vae=true", "optimizer_lr=1e-3")),
]
DIFFUSION = [
    "--policy.type=diffusion",
    *(
        f"--policy.{flag}"
        for flag in ("horizon=8", "n_action_steps=4", "down_dims=[16,32]", "diffusion_step_embed_dim=16")
    ),
    "--policy.n_groups=4",
]
TOY = ["--policy.type=toy_nasty", "--policy.dropout=0.2", "--accelerator.fsdp.wrap_modules=[ToyBlock]"]
AUGMENTED = ["--dataset.image_transforms.enable=true", "--dataset.image_transforms.max_num_transforms=2"]
WORKERS = ["--num_workers=2", "--dataloader_multiprocessing_context=fork"]
DDP, FSDP2 = "--parallelism.dp_replicate={}", "--parallelism.dp_shard={}"


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """20 frames, so that epochs end within a run; one with a camera."""
    folder = tmp_path_factory.mktemp("datasets")
    return {
        name: make_dataset(folder / name, episodes=2, frames=10, image=name == "camera") for name in ("plain", "camera")
    }


CASES: dict[str, tuple[int, str, list[str], str, int]] = {
    # ranks, topology, flags, dataset, the step whose checkpoint is resumed
    "act, one process": (1, FSDP2, [*ACT], "plain", 3),
    "act, ddp 2": (2, DDP, [*ACT], "plain", 3),
    "act, fsdp2 2, at the end of an epoch": (2, FSDP2, [*ACT, "--checkpoint_format=dcp"], "plain", 3),
    "act, ddp 4": (4, DDP, [*ACT], "plain", 3),
    "act, fsdp2 4": (4, FSDP2, [*ACT], "plain", 3),
    "act, fsdp2 2, accumulation": (2, FSDP2, [*ACT, "--accelerator.gradient_accumulation.steps=2"], "plain", 4),
    "act, ddp 2, accumulation, saved in the background": (
        2, DDP, [*ACT, "--accelerator.gradient_accumulation.steps=2", "--checkpoint.async_save=true"], "plain", 4
    ),
    "diffusion, fsdp2 2": (2, FSDP2, [*DIFFUSION, "--checkpoint_format=safetensors_dcp"], "plain", 3),
    "diffusion, ddp 2": (2, DDP, DIFFUSION, "plain", 3),
    "augmented images, workers, fsdp2 2": (2, FSDP2, [*TOY, *AUGMENTED, *WORKERS], "camera", 3),
    "augmented images, workers that do not persist, ddp 2": (
        2, DDP, [*TOY, *AUGMENTED, *WORKERS, "--persistent_workers=false"], "camera", 4
    ),
    "augmented images in the main process, one process": (1, FSDP2, [*TOY, *AUGMENTED], "camera", 4),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_three_and_five_steps_are_eight(tmp_path: Path, warmed: None, datasets: dict[str, Path], case: str):
    ranks, topology, flags, dataset, step = CASES[case]
    args = [*COMMON, *flags, f"--dataset.root={datasets[dataset]}", topology.format(ranks), "--steps=8"]
    whole = traced_training(
        [*args, "--save_freq=3" if step == 3 else "--save_freq=4", "--output_dir=whole"], ranks, tmp_path
    )
    saved = tmp_path / f"whole/checkpoints/00000{step}/pretrained_model/train_config.json"
    resumed = traced_training(["--resume=true", f"--config_path={saved}", "--output_dir=resumed"], ranks, tmp_path)
    for before, after in zip(whole, resumed, strict=True):
        assert after == before[step:]
    first, second = (tmp_path / name / "checkpoints/000008" for name in ("whole", "resumed"))
    names = {p.relative_to(first) for p in first.rglob("*") if p.is_file()}
    # Whole files, with weights, optimizer and every rank's random state; configs and the manifest name the folder.
    names = {name for name in names if name.suffix in (".safetensors", ".distcp") or name.name == "training_step.json"}
    assert sum("rng_state_rank" in name.name for name in names) == ranks
    assert [str(n) for n in names if (first / n).read_bytes() != (second / n).read_bytes()] == []


def test_ranks_draw_noise_of_their_own(tmp_path: Path, warmed: None, datasets: dict[str, Path]):
    args = [*COMMON, *ACT, f"--dataset.root={datasets['plain']}", DDP.format(2), "--steps=1", "--output_dir=out"]
    train_in_world(args, 2, tmp_path)
    states = [
        load_file(tmp_path / f"out/checkpoints/last/training_state/rng_state_rank_0000{r}.safetensors")
        for r in range(2)
    ]
    assert not torch.equal(states[0]["torch_rng_state"], states[1]["torch_rng_state"])


def test_workers_do_not_change_what_is_trained(tmp_path: Path, warmed: None, datasets: dict[str, Path]):
    args = [
        *COMMON,
        *TOY,
        *AUGMENTED,
        f"--dataset.root={datasets['camera']}",
        DDP.format(2),
        "--steps=4",
        "--persistent_workers=false",
    ]
    traces = [traced_training([*args, *more, f"--output_dir=out{len(more)}"], 2, tmp_path) for more in ([], WORKERS)]
    assert traces[0] == traces[1]


def test_one_process_draws_what_the_host_draws(tmp_path: Path, warmed: None, datasets: dict[str, Path]):
    args = [*COMMON, *ACT, f"--dataset.root={datasets['plain']}", "--steps=8", "--save_freq=8"]
    results = [
        *host_train_in_world([*args, "--output_dir=host"], 1, tmp_path),
        *train_in_world([*args, "--accelerator.mixed_precision=no", "--output_dir=ours"], 1, tmp_path),
    ]
    assert [r.exitcode for r in results] == [0, 0], [r.stderr[-2000:] for r in results]
    host, ours = (
        load_file(tmp_path / name / "checkpoints/last/pretrained_model/model.safetensors") for name in ("host", "ours")
    )
    assert host.keys() == ours.keys()
    assert [name for name in host if not torch.equal(host[name], ours[name])] == []


TOPOLOGIES = {
    "one process": (1, 1, 1),
    "ddp 2": (2, 2, 1),
    "fsdp2 2": (2, 1, 2),
    "fsdp2 4": (4, 1, 4),
    "hsdp 2x2": (4, 2, 2),
}
FORMATS = ("safetensors", "dcp", "safetensors_dcp")


def _hop(args: list[str], cwd: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """One run; everything it holds right after assembly and at its end."""
    import os
    import sys

    from lerobot_parallel.training import command

    states = []
    loop = command.train_loop

    def watched(run: Any) -> bool:
        states.append(_state(run))
        finished = loop(run)
        states.append(_state(run))
        return finished

    command.train_loop = watched
    os.chdir(cwd)
    sys.argv = ["lerobot-train", *args]
    command.train()
    return states[0], states[1]


def _state(run: Any) -> dict[str, torch.Tensor]:
    full = lambda t: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()  # noqa: E731
    state = {name: full(tensor) for name, tensor in run.module.state_dict().items()}
    for name, param in run.module.named_parameters():
        state |= {f"{name}/{field}": full(value) for field, value in run.saved.optimizer.state.get(param, {}).items()}
    return state


def test_thirty_hops_between_topologies_and_formats_change_no_bit(
    tmp_path: Path, warmed: None, datasets: dict[str, Path]
):
    draw = random.Random(4)
    config, before = None, None
    for hop in range(31):
        ranks, replicate, shard = TOPOLOGIES[draw.choice(list(TOPOLOGIES))]
        form = draw.choice(FORMATS) if shard > 1 else "safetensors"
        args = [
            f"--parallelism.dp_replicate={replicate}",
            f"--parallelism.dp_shard={shard}",
            f"--checkpoint_format={form}",
        ]
        args += [
            f"--steps={hop + 1}",
            "--output_dir=out",
            f"--checkpoint.async_save={str(draw.random() < 0.3).lower()}",
        ]
        if config is None:
            args += [*COMMON, *TOY, f"--dataset.root={datasets['plain']}", "--checkpoint.keep_last=2"]
        else:
            args += ["--resume=true", f"--config_path={config}"]
        results = run_world(_hop, ranks, args, tmp_path, launcher=ranks > 1, env=quiet_env())
        for loaded, _ in results if before is not None else ():
            assert loaded.keys() == before.keys()
            assert [n for n in before if not torch.equal(loaded[n], before[n])] == [], f"hop {hop}: {args}"
        before = results[0][1]
        config = draw.choice(["out/checkpoints", "out/checkpoints/last/pretrained_model/train_config.json"])
    assert sorted(p.name for p in (tmp_path / "out/checkpoints").iterdir()) == ["000030", "000031", "last"]
    step = json.loads((tmp_path / "out/checkpoints/last/training_state/training_step.json").read_text())
    assert step["step"] == 31
