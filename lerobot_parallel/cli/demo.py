"""`lerobot-parallel demo`: train sharded, resume on another topology, convert, load with the host."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from lerobot_parallel.checkpoint import layout
from lerobot_parallel.config.errors import ConfigError

REPO_ID = "local/demo"
HALF = 20
STAGE_LIMIT_S = 600

_MAKE_DATASET = """
import json, sys
import numpy as np
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset

repo_id, root, report = sys.argv[1:]
sizes = {"observation.state": 6, "observation.environment_state": 4, "action": 6}
features = {
    name: {"dtype": "float32", "shape": (size,), "names": [f"{name}_{i}" for i in range(size)]}
    for name, size in sizes.items()
}
dataset = LeRobotDataset.create(repo_id, fps=10, features=features, root=root, use_videos=False)
draw = np.random.default_rng(0)
weights = draw.normal(size=(4, 6))
for _ in range(6):
    state, goal = draw.normal(size=6), draw.normal(size=4)
    for _ in range(30):
        action = np.tanh(goal @ weights - state)
        frame = {"observation.state": state, "observation.environment_state": goal, "action": action}
        dataset.add_frame({name: value.astype(np.float32) for name, value in frame.items()} | {"task": "reach"})
        state = state + 0.2 * action
    dataset.save_episode()
dataset.finalize()
made = {"episodes": dataset.meta.total_episodes, "frames": dataset.meta.total_frames}
json.dump(made | {"gpus": torch.cuda.device_count()}, open(report, "w"))
"""

_LOAD = """
import json, sys
import torch
import torch.distributed.checkpoint as dcp
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.factory import make_pre_post_processors

repo_id, root, pretrained, shards, report = sys.argv[1:]
policy = ACTPolicy.from_pretrained(pretrained)
policy.reset()
before, after = make_pre_post_processors(policy.config, pretrained_path=pretrained)
item = LeRobotDataset(repo_id, root=root)[0]
action = after(policy.select_action(before({key: item[key] for key in policy.config.input_features})))

weights = {name: weight.cpu() for name, weight in policy.state_dict().items()}
saved = {name: torch.full_like(weight, 7) for name, weight in weights.items()}
dcp.load({"model": saved}, checkpoint_id=shards)
difference = max((saved[name].double() - weight.double()).abs().max().item() for name, weight in weights.items())
json.dump({"action": action.flatten().tolist(), "difference": difference}, open(report, "w"))
"""


@dataclass(frozen=True)
class Topology:
    dp_replicate: int
    dp_shard: int

    @property
    def processes(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def flags(self) -> list[str]:
        return [f"--parallelism.dp_replicate={self.dp_replicate}", f"--parallelism.dp_shard={self.dp_shard}"]

    def __str__(self) -> str:
        engine = "HSDP" if self.dp_replicate > 1 else "FSDP2"
        return f"{engine} on {self.processes} processes (dp_replicate={self.dp_replicate}, dp_shard={self.dp_shard})"


FIRST, SECOND = Topology(1, 2), Topology(2, 2)
GLOBAL_BATCH = 16


@dataclass(frozen=True)
class Stage:
    """One row of the table."""

    name: str
    seconds: float
    saw: str


@click.command()
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="A new directory; else a temporary one.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def command(folder: Path | None, as_json: bool) -> None:
    """Show the whole story on this machine, without a download.

    Makes a small dataset, trains a tiny policy sharded on 2 processes, resumes it on 4, converts the checkpoint and
    loads it with LeRobot itself, all through the commands that a user would run. Takes a few minutes on 2 CPU cores.
    """
    demo = _Demo(_fresh(folder))
    click.echo(f"working in {demo.folder}", err=True)
    stages = [demo.make_dataset(), demo.train(), demo.resume(), demo.convert(), demo.load()]
    if as_json:
        click.echo(json.dumps({"folder": str(demo.folder), "stages": [asdict(stage) for stage in stages]}))
        return
    for stage in stages:
        click.echo(f"{stage.name:<8} {stage.seconds:6.1f} s  {stage.saw}")
    click.echo(f"the run: {demo.run}\nthe logs: {demo.folder / 'logs'}")


def _fresh(folder: Path | None) -> Path:
    if folder is None:
        return Path(tempfile.mkdtemp(prefix="lerobot-parallel-demo-"))
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError("--dir", folder, "exists already", "give a new directory")
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


class _Demo:
    """The stages, in the order they build on each other; each leaves its log in `logs`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dataset = folder / "dataset"
        self.run = folder / "run"
        self.device = "cpu"
        (folder / "logs").mkdir()

    def make_dataset(self) -> Stage:
        report = self.folder / "logs" / "dataset.json"
        seconds, _ = self._call("dataset", _python(_MAKE_DATASET, REPO_ID, self.dataset, report))
        made = json.loads(report.read_text())
        if made["gpus"] >= SECOND.processes:
            self.device = "cuda"
        return Stage("dataset", seconds, f"{made['episodes']} episodes, {made['frames']} frames")

    def train(self) -> Stage:
        flags = [
            f"--dataset.repo_id={REPO_ID}",
            f"--dataset.root={self.dataset}",
            f"--output_dir={self.run}",
            "--policy.type=act",
            f"--policy.device={self.device}",
            "--policy.push_to_hub=false",
            "--policy.dim_model=32",
            "--policy.dim_feedforward=64",
            "--policy.n_heads=4",
            "--policy.chunk_size=8",
            "--policy.n_action_steps=8",
            "--policy.latent_dim=8",
            "--policy.optimizer_lr=1e-3",
            "--checkpoint_format=dcp",
            f"--save_freq={HALF}",
            "--log_freq=5",
            "--num_workers=0",
            "--wandb.enable=false",
            "--seed=7",
        ]
        return self._train("train", FIRST, HALF, flags)

    def resume(self) -> Stage:
        config = layout.Checkpoint(layout.last_link(self.run)).train_config
        return self._train("resume", SECOND, 2 * HALF, ["--resume=true", f"--config_path={config}"])

    def _train(self, name: str, topology: Topology, steps: int, flags: list[str]) -> Stage:
        click.echo(f"{name}: {topology}, to step {steps}, {self.device}", err=True)
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={topology.processes}"]
        flags = [*flags, *topology.flags, f"--steps={steps}", f"--batch_size={GLOBAL_BATCH // topology.processes}"]
        seconds, log = self._call(name, [sys.executable, *launch, "-m", "lerobot.scripts.lerobot_train", *flags])
        checkpoint = layout.locate(self.run)
        reached = json.loads(checkpoint.step_file.read_text())["step"]
        losses = re.findall(r"\bloss:(\S+)", log)
        if reached != steps or not losses:
            raise click.ClickException(f"{name} reached step {reached} of {steps}, and logged {len(losses)} losses")
        return Stage(name, seconds, f"{topology}: step {reached}, loss {losses[0]} -> {losses[-1]}")

    def convert(self) -> Stage:
        checkpoint = layout.locate(self.run)
        convert = ["-m", "lerobot_parallel.cli.main", "convert", str(checkpoint.path), "--verify"]
        seconds, _ = self._call("convert", [sys.executable, *convert])
        sizes = f"{_size(checkpoint.model_shards)} bytes of shards -> {checkpoint.model_file.stat().st_size} bytes"
        return Stage("convert", seconds, f"{sizes} in {layout.MODEL_FILE}, verified")

    def load(self) -> Stage:
        checkpoint = layout.locate(self.run)
        report = self.folder / "logs" / "load.json"
        where = (REPO_ID, self.dataset, checkpoint.pretrained, checkpoint.model_shards, report)
        seconds, _ = self._call("load", _python(_LOAD, *where))
        saw = json.loads(report.read_text())
        action = ", ".join(f"{number:.3f}" for number in saw["action"])
        if saw["difference"] != 0:
            raise click.ClickException(f"the loaded weights differ from the shards by up to {saw['difference']}")
        return Stage("load", seconds, f"LeRobot's own ACTPolicy: max |weight - shard| = 0, select_action = [{action}]")

    def _call(self, name: str, command: list[str]) -> tuple[float, str]:
        """Runs one stage to its end; seconds and log. A failure prints the end of the log and is the demo's."""
        path = self.folder / "logs" / f"{name}.log"
        started = time.monotonic()
        with path.open("w") as log:
            code = _run(command, self.folder, log)
        text = path.read_text(errors="replace")
        if code != 0:
            click.echo("\n".join(text.splitlines()[-30:]), err=True)
            how = f"took more than {STAGE_LIMIT_S} seconds" if code is None else f"exited with {code}"
            raise click.ClickException(f"the stage {name!r} {how}; its log: {path}")
        return time.monotonic() - started, text


def _python(script: str, *args: object) -> list[str]:
    return [sys.executable, "-c", script, *map(str, args)]


def _run(command: list[str], folder: Path, log: object) -> int | None:
    """The exit code, or None after the time limit. The launcher is asked to stop, so that it stops its workers."""
    env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    process = subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        return process.wait(STAGE_LIMIT_S)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())
