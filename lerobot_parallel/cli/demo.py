"""`lerobot-parallel demo`: train sharded, resume on another topology, convert, load with the host."""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import click

from lerobot_parallel.checkpoint import layout
from lerobot_parallel.config.errors import ConfigError

REPO_ID = "local/demo"
HALF = 20
GLOBAL_BATCH = 16
STAGE_LIMIT_S = 600
TAIL_LINES = 40

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
dataset = LeRobotDataset.create(repo_id, fps=10, features=features, root=root, use_videos=False, video_backend="pyav")
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
item = LeRobotDataset(repo_id, root=root, video_backend="pyav")[0]
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
        return f"{engine} on {self.processes} processes ({self.dp_replicate} x {self.dp_shard})"


FIRST, SECOND = Topology(1, 2), Topology(2, 2)


@dataclass(frozen=True)
class Stage:
    """One row of the table: `saw` is what people read, a line each, `facts` the same and more for programs."""

    name: str
    seconds: float
    saw: tuple[str, ...]
    facts: dict[str, Any]


@click.command()
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="A new directory; else a temporary one.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def command(folder: Path | None, as_json: bool) -> None:
    """Show the whole story on this machine, without a download.

    Makes a small dataset, trains a tiny policy sharded on 2 processes, resumes it on 4, converts the checkpoint and
    loads it with LeRobot itself, all through the commands that a user would run. Takes a minute or two on 2 CPU
    cores; a training uses GPUs where there is one for each of its processes.
    """
    _check_hook()
    demo = _Demo(_fresh(folder))
    click.echo(f"working in {demo.folder}", err=True)
    stages = demo.play()
    if as_json:
        paths = {name: str(path) for name, path in demo.paths().items()}
        click.echo(json.dumps({"stages": [asdict(stage) for stage in stages], "paths": paths}))
    else:
        click.echo(_table(stages, demo.paths()))


def _check_hook() -> None:
    from lerobot_parallel.hooks import status

    hook = status()
    if not hook["active"]:
        raise click.ClickException(f"lerobot-train does not use this package here: {hook['reason']}")


def _fresh(folder: Path | None) -> Path:
    if folder is None:
        return Path(tempfile.mkdtemp(prefix="lerobot-parallel-demo-"))
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError("--dir", folder, "exists already", "give a new directory")
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def _table(stages: list[Stage], paths: dict[str, Path]) -> str:
    rows = []
    for stage in stages:
        first, *more = stage.saw
        rows += [f"{stage.name:<8} {stage.seconds:5.1f} s  {first}", *(f"{'':18}{line}" for line in more)]
    rows += [f"{'in all':<8} {sum(stage.seconds for stage in stages):5.1f} s", ""]
    return "\n".join([*rows, *(f"{name:<8} {path}" for name, path in paths.items())])


class _Demo:
    """The stages, in the order they build on each other; each leaves its command and its output in `logs`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dataset = folder / "dataset"
        self.run = folder / "run"
        self.logs = folder / "logs"
        self.gpus = 0
        self.logs.mkdir()

    def paths(self) -> dict[str, Path]:
        return {"policy": layout.locate(self.run).pretrained, "dataset": self.dataset, "logs": self.logs}

    def play(self) -> list[Stage]:
        story: list[tuple[str, Callable[[], Stage]]] = [
            ("make a small dataset", self.make_dataset),
            (f"train with {FIRST}, stop half way", self.train),
            (f"resume with {SECOND}", self.resume),
            (f"convert the shards to {layout.MODEL_FILE}", self.convert),
            ("load the result with LeRobot itself", self.load),
        ]
        stages = []
        for number, (what, stage) in enumerate(story, 1):
            click.echo(f"{number}/{len(story)} {what}", err=True)
            stages.append(stage())
        return stages

    def make_dataset(self) -> Stage:
        report = self.logs / "dataset.json"
        seconds, _ = self._call("dataset", _python(_MAKE_DATASET, REPO_ID, self.dataset, report))
        made = json.loads(report.read_text())
        self.gpus = made["gpus"]
        return Stage("dataset", seconds, (f"{made['episodes']} episodes, {made['frames']} frames",), made)

    def train(self) -> Stage:
        flags = [
            f"--dataset.repo_id={REPO_ID}",
            f"--dataset.root={self.dataset}",
            f"--output_dir={self.run}",
            "--policy.type=act",
            "--policy.push_to_hub=false",
            "--policy.dim_model=128",
            "--policy.dim_feedforward=256",
            "--policy.n_heads=4",
            "--policy.chunk_size=8",
            "--policy.n_action_steps=8",
            "--policy.use_vae=false",
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
        device = "cuda" if self.gpus >= topology.processes else "cpu"
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={topology.processes}"]
        shape = [f"--steps={steps}", f"--batch_size={GLOBAL_BATCH // topology.processes}", f"--policy.device={device}"]
        run = ["-m", "lerobot.scripts.lerobot_train", *flags, *topology.flags, *shape]
        # A run on the CPU must not see GPUs that are too few for it.
        hidden = {} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
        seconds, log = self._call(name, [sys.executable, *launch, *run], **hidden)
        step = json.loads(layout.locate(self.run).step_file.read_text())["step"]
        losses = [float(loss) for loss in re.findall(r"\bloss:(\S+)", log)]
        sizes = re.search(r"of ([\d,]+) parameters, .*per rank ([\d,]+)", log)
        if step != steps or not losses or sizes is None:
            raise click.ClickException(f"{name} reached step {step} of {steps} with {len(losses)} losses, {self.logs}")
        whole, kept = (int(number.replace(",", "")) for number in sizes.groups())
        saw = (
            f"{topology}, {device}: each keeps {kept / whole:.0%} of {whole:,} parameters",
            f"step {step}, loss {losses[0]} -> {losses[-1]}",
        )
        facts = {"device": device, "step": step, "losses": losses, "parameters": whole, "parameters_per_rank": kept}
        return Stage(name, seconds, saw, asdict(topology) | facts)

    def convert(self) -> Stage:
        checkpoint = layout.locate(self.run)
        convert = ["-m", "lerobot_parallel.cli.main", "convert", str(checkpoint.path), "--verify"]
        seconds, _ = self._call("convert", [sys.executable, *convert])
        shards, file = _size(checkpoint.model_shards), checkpoint.model_file.stat().st_size
        saw = f"{shards / 1e6:.2f} MB of shards -> {file / 1e6:.2f} MB in {layout.MODEL_FILE}, verified"
        return Stage("convert", seconds, (saw,), {"shard_bytes": shards, "file_bytes": file})

    def load(self) -> Stage:
        checkpoint = layout.locate(self.run)
        report = self.logs / "load.json"
        where = (REPO_ID, self.dataset, checkpoint.pretrained, checkpoint.model_shards, report)
        seconds, _ = self._call("load", _python(_LOAD, *where))
        facts = json.loads(report.read_text())
        if facts["difference"] != 0:
            raise click.ClickException(f"the loaded weights differ from the shards by up to {facts['difference']}")
        action = ", ".join(f"{number:.3f}" for number in facts["action"])
        saw = ("ACTPolicy.from_pretrained: max |weight - shard| = 0", f"select_action = [{action}]")
        return Stage("load", seconds, saw, facts)

    def _call(self, name: str, command: list[str], **env: str) -> tuple[float, str]:
        """Runs one stage to its end; seconds and log. A failure prints the end of the log and is the demo's."""
        path = self.logs / f"{name}.log"
        # The datasets library would keep a copy in the user's own cache for ever.
        env = {"HF_DATASETS_CACHE": str(self.folder / ".cache"), **env}
        started = time.monotonic()
        with path.open("w") as log:
            print(f"$ {shlex.join(command)}", file=log, flush=True)
            code = _run(command, self.folder, log, env)
        text = path.read_text(errors="replace")
        if code != 0:
            click.echo(_tail(text), err=True)
            how = f"took more than {STAGE_LIMIT_S} seconds" if code is None else f"exited with {code}"
            raise click.ClickException(f"the stage {name!r} {how}; its log: {path}")
        return time.monotonic() - started, text


def _python(script: str, *args: object) -> list[str]:
    return [sys.executable, "-c", script, *map(str, args)]


def _run(command: list[str], folder: Path, log: TextIO, env: dict[str, str]) -> int | None:
    """The exit code, or None after the time limit. The launcher is asked to stop, so that it stops its workers."""
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    variables = {**quiet, **os.environ, **env}
    process = subprocess.Popen(command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
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


def _tail(log: str) -> str:
    """The end of a log, without what is noise here: LeRobot on a missing video decoder, the launcher on the fact that
    its processes failed, and the former states of progress bars."""
    log = re.sub(r"^.*Could not load libtorchcodec(.|\n)*?Falling back to 'pyav'.*\n", "", log, flags=re.MULTILINE)
    log = re.split(r"^.*torch/distributed/elastic/.* failed \(exitcode", log, maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in log.split("\n")]
    return "\n".join([line for line in lines if line.strip()][-TAIL_LINES:])


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())
