"""Every refusal of contract.md section 3: one line, once, exit code 1 on all ranks, before anything is touched."""

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.commands import ROOT, quiet_env, train_in_world
from tests.support.world import RankResult, run_world_raw
from tests.training.refusing import FSDP2, LINE, quiet, refusal, the_line, tree, untouched  # noqa: F401
from tests.training.runs import act_args, common_args, merged

GONE_WITHIN_S = 10.0


@pytest.fixture
def refused(untouched: None, tmp_path: Path) -> Callable[..., str]:
    """The refusal of ACT on a dataset that does not exist, with these flags."""
    nowhere = act_args(Path("nowhere"))
    return lambda *flags, **kwargs: refusal(merged(*nowhere, *flags), tmp_path, **kwargs)


# Flags

FLAGS: dict[str, tuple[list[str], list[str]]] = {
    # What is typed, and what the line must hold: flag and value first, then the reason or the way out.
    "replicate below one": (["--parallelism.dp_replicate=0"], ["--parallelism.dp_replicate=0: ", "use 1 or more"]),
    "shard below one": (["--parallelism.dp_shard=0"], ["--parallelism.dp_shard=0: ", "-1 for all that is left"]),
    "does not divide": (
        ["--parallelism.dp_replicate=3", "--parallelism.dp_shard=-1"],
        ["--parallelism.dp_shard=-1: ", "dp_replicate=3 does not divide", "choose a dp_replicate that divides it"],
    ),
    "product": (
        ["--parallelism.dp_replicate=2", FSDP2],
        [
            "--parallelism.dp_shard=2: dp_replicate=2 x dp_shard=2 x ring_degree=1 x ulysses_degree=1 x cfg_parallel=1",
            "= 4 processes, but the world has 2",
            "start 4 processes",
        ],
    ),
    "replicas": (
        ["--parallelism.dp_replicate=3"],
        ["--parallelism.dp_replicate=3: ", "the world has 2", "start 3 processes"],
    ),
    "ring": (["--parallelism.context_parallel.ring_degree=2"], ["ring_degree=2: ", "reserved", "use 1"]),
    "ulysses": (["--parallelism.context_parallel.ulysses_degree=2"], ["ulysses_degree=2: ", "reserved", "use 1"]),
    "guidance": (["--parallelism.cfg_parallel=2"], ["--parallelism.cfg_parallel=2: ", "train with 1"]),
    "precision": (["--accelerator.mixed_precision=fp8"], ["--accelerator.mixed_precision=fp8: ", "no, bf16, fp16"]),
    "sharded fp16": (
        [FSDP2, "--accelerator.mixed_precision=fp16"],
        ["--accelerator.mixed_precision=fp16: ", "use bf16 or no"],
    ),
    "window": (
        ["--accelerator.gradient_accumulation.steps=0"],
        ["--accelerator.gradient_accumulation.steps=0: ", "use 1 or more"],
    ),
    "two ways to units": (
        [FSDP2, "--accelerator.fsdp.wrap_modules=[ACTEncoderLayer]", "--accelerator.fsdp.min_num_params=10"],
        [
            "--accelerator.fsdp.wrap_modules=['ACTEncoderLayer']: ",
            "--accelerator.fsdp.min_num_params=10",
            "give one of the two",
        ],
    ),
    "no names": (
        [FSDP2, "--accelerator.fsdp.wrap_modules=[]"],
        ["--accelerator.fsdp.wrap_modules=[]: ", "leave it out"],
    ),
    "no size": (
        [FSDP2, "--accelerator.fsdp.min_num_params=0"],
        ["--accelerator.fsdp.min_num_params=0: ", "use 1 or more"],
    ),
    "no expression": (
        [FSDP2, "--accelerator.fsdp.ignored_modules=("],
        ["--accelerator.fsdp.ignored_modules=(: ", "not a regular"],
    ),
    "format": (["--checkpoint_format=zip"], ["--checkpoint_format=zip: ", "safetensors, dcp, safetensors_dcp"]),
    "dcp unsharded": (
        ["--checkpoint_format=dcp"],
        ["--checkpoint_format=dcp: ", "dp_shard=1", "--parallelism.dp_shard=-1"],
    ),
    "both unsharded": (
        ["--checkpoint_format=safetensors_dcp"],
        ["--checkpoint_format=safetensors_dcp: ", "use safetensors"],
    ),
    "checkpointing mode": (
        ["--accelerator.activation_checkpointing.mode=half"],
        ["--accelerator.activation_checkpointing.mode=half: ", "none, full"],
    ),
    "several optimizers": (
        ["--parallelism.dp_replicate=2", "--use_policy_training_preset=false", "--optimizer.type=multi_adam"],
        ["--optimizer.type=multi_adam: ", "use a single one"],
    ),
    "compile mode": (
        ["--accelerator.compile.enabled=true", "--accelerator.compile.mode=fast"],
        ["--accelerator.compile.mode=fast: ", "max-autotune"],
    ),
    "sharded graphs": (
        [FSDP2, "--accelerator.compile.enabled=true", "--accelerator.compile.mode=reduce-overhead"],
        ["--accelerator.compile.mode=reduce-overhead: ", "CUDA graph", "default"],
    ),
    "nothing kept": (["--checkpoint.keep_last=0"], ["--checkpoint.keep_last=0: ", "use 1 or more"]),
    "sharded adapters": (
        [FSDP2, "--peft.method_type=LORA"],
        ["--parallelism.dp_shard=2: ", "PEFT", "--parallelism.dp_shard=1"],
    ),
    "sharded rollouts": ([FSDP2, "--env.type=pusht"], ["--parallelism.dp_shard=2: ", "environment", "drop --env.*"]),
    "not an int": (["--parallelism.dp_shard=two"], ["parallelism.dp_shard", "two"]),
    "not a bool": (["--accelerator.fsdp.cpu_offload=maybe"], ["accelerator.fsdp.cpu_offload", "maybe"]),
    "not a list": (["--accelerator.fsdp.wrap_modules=Layer", FSDP2], ["accelerator.fsdp.wrap_modules", "Layer"]),
    "the host's own": (["--eval_steps=2", FSDP2], ["eval_steps", "eval_split"]),
    "the host's own groups": (["--dataset.eval_split=2", FSDP2], ["eval_split", "got 2.0"]),
    "no config": (["--config_path=no/where", FSDP2], ["--config_path=no/where: ", "name a train_config.json"]),
    "no config file": (["--config_path=no/train_config.json", FSDP2], ["--config_path=no/train_config.json: "]),
    "no run to resume": (["--resume=true", FSDP2], ["config_path"]),
}


@pytest.mark.parametrize("case", FLAGS)
def test_flags(refused: Callable[..., str], case: str):
    flags, parts = FLAGS[case]
    text = refused(*flags)
    assert text.startswith(parts[0]) or not parts[0].startswith("--")
    assert [part for part in parts if part not in text] == []


@pytest.mark.parametrize(("world", "flag"), [(1, FSDP2), (4, "--parallelism.dp_shard=3")])
def test_worlds_of_other_sizes(refused: Callable[..., str], world: int, flag: str):
    assert f"the world has {world};" in refused(flag, nprocs=world)


def of_another_type(kind: str, *flags: str) -> list[str]:
    model = ["--policy.device=cpu", "--policy.push_to_hub=false"]
    return [*common_args(Path("nowhere")), f"--policy.type={kind}", *model, *flags]


def test_a_policy_that_cannot_be_sharded(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch):
    from lerobot_parallel.plans import registry

    monkeypatch.setitem(registry.BUILTIN_PLANS, "act", registry.WrapPlan(unshardable="it has three parameters"))
    text = refused(FSDP2)
    assert text.startswith("--parallelism.dp_shard=")
    assert "act is not sharded: it has three parameters" in text
    assert text.endswith("use --parallelism.dp_shard=1")


def of_a_reward_model(kind: str, *flags: str) -> list[str]:
    model = ["--reward_model.device=cpu", "--reward_model.push_to_hub=false"]
    return [*common_args(Path("nowhere")), f"--reward_model.type={kind}", *model, *flags]


def test_a_reward_model_with_nothing_to_train(untouched: None, tmp_path: Path):
    text = refusal(of_a_reward_model("topreward", "--parallelism.dp_shard=1"), tmp_path)
    assert text.startswith("--reward_model.type=topreward: ")
    assert text.endswith("use its compute_reward() as it is")


def test_adapters_of_a_reward_model(untouched: None, tmp_path: Path):
    args = of_a_reward_model("reward_classifier", "--peft.method_type=LORA", "--parallelism.dp_shard=1")
    assert refusal(args, tmp_path).startswith("--peft=set: ")


def test_a_policy_that_trains_in_bf16_only(untouched: None, tmp_path: Path):
    text = refusal(of_another_type("lingbot_va", FSDP2), tmp_path)
    assert text.startswith("--accelerator.mixed_precision=no: ")
    assert text.endswith("use bf16")


def test_a_policy_without_a_plan(untouched: None, tmp_path: Path):
    text = refusal(of_another_type("toy_nasty", FSDP2), tmp_path)
    assert text.startswith("--policy.type=toy_nasty: ")
    for way_out in (
        "--accelerator.fsdp.wrap_modules",
        "--accelerator.fsdp.min_num_params",
        "_fsdp_wrap_modules",
        "lerobot_parallel.plans",
    ):
        assert way_out in text


VARIABLES = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_DYNAMO_BACKEND": "inductor",
    "ACCELERATE_USE_DEEPSPEED": "true",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
}


@pytest.mark.parametrize("name", VARIABLES)
def test_variables_of_accelerate(refused: Callable[..., str], name: str):
    text = refused(FSDP2, env={name: VARIABLES[name]})
    assert text.startswith(f"{name}={VARIABLES[name]}: ")
    assert "LEROBOT_ALLOW_ACCELERATE_ENV=1" in text


def test_variables_of_accelerate_can_be_allowed(refused: Callable[..., str]):
    # Another refusal takes their place.
    text = refused("--parallelism.dp_shard=3", env={**VARIABLES, "LEROBOT_ALLOW_ACCELERATE_ENV": "1"})
    assert text.startswith("--parallelism.dp_shard=3: ")


def test_an_existing_output_directory_is_the_hosts_refusal(refused: Callable[..., str], tmp_path: Path):
    (tmp_path / "out").mkdir()
    assert "out already exists" in refused(FSDP2)


# Names, which a built policy alone can confirm: rank 0 looks, the others wait for it at the process group


def launched(args: list[str], cwd: Path) -> RankResult:
    """Rank 0 of a run whose launcher ends the other rank once rank 0 has refused."""
    before = tree(cwd)
    first, second = train_in_world(args, 2, cwd, grace=0.2, timeout=60)
    assert first.exitcode == 1
    assert not first.error
    assert second.stopped or second.exitcode == 1
    assert LINE not in second.stderr
    assert tree(cwd) == before
    return first


NAMES = {
    "--accelerator.fsdp.wrap_modules=[ACTEncoderLayr]": (
        "--accelerator.fsdp.wrap_modules=ACTEncoderLayr: ",
        "close names: ACTEncoderLayer",
    ),
    "--accelerator.fsdp.ignored_modules=no_such_part": (
        "--accelerator.fsdp.ignored_modules=no_such_part: ",
        "matches no module name",
    ),
}


@pytest.mark.parametrize("flag", NAMES)
def test_names_that_match_nothing(small_dataset: Path, tmp_path: Path, flag: str):
    start, reason = NAMES[flag]
    text = the_line(launched(act_args(small_dataset, FSDP2, flag), tmp_path))
    assert text.startswith(start)
    assert reason in text


def test_names_that_only_sharding_can_check_are_refused_there_once(
    small_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from lerobot_parallel.training import command, preflight

    monkeypatch.setattr(preflight, "_skeleton", lambda cfg: None)
    monkeypatch.setattr(command, "_GRACE_S", 30.0)
    first = launched(act_args(small_dataset, FSDP2, "--accelerator.fsdp.wrap_modules=[ACTEncoderLayr]"), tmp_path)
    (line,) = [line for line in first.stderr.splitlines() if line.startswith(LINE)]
    assert "close names: ACTEncoderLayer" in line
    assert "Traceback" not in first.stderr


@pytest.mark.parametrize(
    "flags", [[], ["--accelerator.fsdp.wrap_modules=[ACTEncoderLayr]"]], ids=["", "with a wrong name"]
)
def test_a_missing_dataset_ends_all_ranks(tmp_path: Path, flags: list[str]):
    began = time.monotonic()
    results = train_in_world(act_args(Path("nowhere"), FSDP2, *flags), 2, tmp_path, grace=30, timeout=60)
    assert [(r.exitcode, r.stopped) for r in results] == [(1, False)] * 2
    assert time.monotonic() - began < 20
    assert "rank 0 failed while reading the dataset local/toy" in results[1].stderr


# One rank alone


def _refused_on(failing: int) -> None:
    import torch.distributed as dist

    from lerobot_parallel.config.errors import ConfigError
    from lerobot_parallel.training import command

    def run(*args: object) -> None:
        dist.init_process_group("gloo")
        if dist.get_rank() == failing:
            raise ConfigError("--steps", 3, "this rank's shard is bad", "mend it")
        dist.barrier()

    command._parse_once = lambda: type("Config", (), {"job": type("Job", (), {"is_remote": False})})
    command.preflight = lambda cfg: (None, None)
    command.run_training = run
    command.train()


def test_a_refusal_that_rank_0_does_not_know_of_is_said_by_its_own_rank():
    first, second = run_world_raw(_refused_on, 2, 1, grace=5, timeout=60)
    assert second.exitcode == 1
    assert second.stderr.splitlines()[-1] == f"{LINE}rank 1: --steps=3: this rank's shard is bad; mend it"
    assert LINE not in first.stderr


# As users start them


def lines_until_the_end(command: list[str], cwd: Path, env: dict[str, str]) -> Iterator[tuple[float, str]]:
    """Lines of stderr with their times, then the time when the last process that could write to it was gone."""
    variables = {**os.environ, **quiet_env(), "PYTHONPATH": str(ROOT), **env}
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    deadline = time.monotonic() + 150
    left = b""
    with selectors.DefaultSelector() as selector, process:
        selector.register(process.stderr, selectors.EVENT_READ)
        while selector.select(max(deadline - time.monotonic(), 0)):
            read = os.read(process.stderr.fileno(), 65536)
            *lines, left = (left + read).split(b"\n")
            yield from ((time.monotonic(), line.decode(errors="replace")) for line in lines)
            if not read:
                break
        else:
            os.killpg(process.pid, 9)
            pytest.fail("the command did not end")
    yield time.monotonic(), f"exit code {process.returncode}"


COMMANDS: dict[str, tuple[list[str], dict[str, str]]] = {
    "--parallelism.dp_shard=3: ": (["--parallelism.dp_shard=3"], {}),
    "ACCELERATE_USE_FSDP=true: ": ([FSDP2], {"ACCELERATE_USE_FSDP": "true"}),
    # Rank 0 alone knows, while the other one already waits at the process group.
    "--accelerator.fsdp.wrap_modules=ACTEncoderLayr: ": (
        [FSDP2, "--accelerator.fsdp.wrap_modules=[ACTEncoderLayr]"],
        {},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("start", COMMANDS)
def test_under_torchrun_all_ranks_are_gone_within_seconds_after_one_line(
    small_dataset: Path, tmp_path: Path, start: str
):
    flags, env = COMMANDS[start]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "-m", "lerobot.scripts.lerobot_train", *act_args(small_dataset, *flags)]
    *said, (ended, exit_code) = lines_until_the_end(command, tmp_path, env)
    ours = [(at, line) for at, line in said if line.startswith(LINE)]
    assert len(ours) == 1, "\n".join(line for _, line in said)[-3000:]
    assert ours[0][1].startswith(LINE + start)
    assert ended - ours[0][0] < GONE_WITHIN_S
    assert exit_code == "exit code 1"
    assert not [line for _, line in said if "lerobot_parallel" in line and line.lstrip().startswith("File ")]
    assert tree(tmp_path) == set()
