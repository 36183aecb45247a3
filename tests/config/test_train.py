"""The flags of contract.md section 2: frozen, read from the command line and from JSON, and written back."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import draccus
import pytest
from lerobot.configs import parser
from lerobot.configs.train import TrainPipelineConfig

from lerobot_parallel.config.errors import ConfigError
from lerobot_parallel.config.train import ParallelTrainPipelineConfig, check_config_path
from tests.support.datasets import peer_dir

# Copied from contract.md by hand. Adding a flag is a decision: other software reads and writes these.
FLAGS: dict[str, Any] = {
    "parallelism.dp_replicate": 1,
    "parallelism.dp_shard": 1,
    "parallelism.context_parallel.ring_degree": 1,
    "parallelism.context_parallel.ulysses_degree": 1,
    "parallelism.cfg_parallel": 1,
    "accelerator.mixed_precision": "no",
    "accelerator.gradient_accumulation.steps": 1,
    "accelerator.fsdp.reshard_after_forward": True,
    "accelerator.fsdp.wrap_modules": None,
    "accelerator.fsdp.min_num_params": None,
    "accelerator.fsdp.cpu_offload": False,
    "accelerator.fsdp.ignored_modules": None,
    "accelerator.ddp.find_unused_parameters": True,
    "accelerator.ddp.gradient_as_bucket_view": False,
    "accelerator.ddp.static_graph": False,
    "accelerator.compile.enabled": False,
    "accelerator.compile.backend": "inductor",
    "accelerator.compile.mode": None,
    "accelerator.compile.regional": True,
    "accelerator.activation_checkpointing.mode": "none",
    "checkpoint_format": "safetensors",
}
# This project's own, of section 5: in train_config.json only where they differ from these defaults.
OWN: dict[str, Any] = {
    "checkpoint.async_save": False,
    "checkpoint.keep_last": None,
    "checkpoint.verify": True,
    "checkpoint.auto_resume": False,
}
OTHER: dict[str, tuple[str, Any]] = {
    "parallelism.dp_replicate": ("2", 2),
    "parallelism.dp_shard": ("-1", -1),
    "parallelism.context_parallel.ring_degree": ("3", 3),
    "parallelism.context_parallel.ulysses_degree": ("4", 4),
    "parallelism.cfg_parallel": ("2", 2),
    "accelerator.mixed_precision": ("bf16", "bf16"),
    "accelerator.gradient_accumulation.steps": ("5", 5),
    "accelerator.fsdp.reshard_after_forward": ("false", False),
    "accelerator.fsdp.wrap_modules": ('["ACTEncoderLayer", "BasicBlock"]', ["ACTEncoderLayer", "BasicBlock"]),
    "accelerator.fsdp.min_num_params": ("1000000", 1000000),
    "accelerator.fsdp.cpu_offload": ("true", True),
    "accelerator.fsdp.ignored_modules": (r"model\.(vae|head)$", r"model\.(vae|head)$"),
    "accelerator.ddp.find_unused_parameters": ("false", False),
    "accelerator.ddp.gradient_as_bucket_view": ("true", True),
    "accelerator.ddp.static_graph": ("true", True),
    "accelerator.compile.enabled": ("true", True),
    "accelerator.compile.backend": ("eager", "eager"),
    "accelerator.compile.mode": ("reduce-overhead", "reduce-overhead"),
    "accelerator.compile.regional": ("false", False),
    "accelerator.activation_checkpointing.mode": ("full", "full"),
    "checkpoint_format": ("safetensors_dcp", "safetensors_dcp"),
}
RUN = ["--dataset.repo_id=local/toy", "--dataset.root=data", "--policy.type=act", "--policy.device=cpu", "--steps=7"]
GROUPS = ("parallelism", "accelerator", "checkpoint_format")

pytestmark = pytest.mark.usefixtures("warmed")


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        leaves.update(flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value})
    return leaves


def ours(config: ParallelTrainPipelineConfig) -> dict[str, Any]:
    return {name: value for name, value in flat(config.to_dict()).items() if name.split(".")[0] in GROUPS}


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Reads a command line as the host's `main` does."""

    def read(*argv: str, config_class: type = ParallelTrainPipelineConfig) -> Any:
        def identity(cfg: Any) -> Any:
            return cfg

        identity.__annotations__["cfg"] = config_class
        monkeypatch.setattr(sys, "argv", ["lerobot-train", *argv])
        return parser.wrap()(identity)()

    return read


def saved(config: TrainPipelineConfig, folder: Path) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    config.save_pretrained(folder)
    return json.loads((folder / "train_config.json").read_text())


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "root" and r.levelno >= logging.WARNING]


# The list


def test_the_flags_and_their_defaults_are_those_of_the_contract(parse: Callable):
    assert ours(parse(*RUN)) == FLAGS


def test_help_lists_exactly_these_flags(parse: Callable, capsys: pytest.CaptureFixture[str]):
    def listed(config_class: type) -> set[str]:
        with pytest.raises(SystemExit):
            parse("--help", config_class=config_class)
        words = capsys.readouterr().out.split()
        return {word.removeprefix("--") for word in words if word.startswith("--")}

    added = listed(ParallelTrainPipelineConfig) - listed(TrainPipelineConfig)
    flags = set(FLAGS) | set(OWN)
    groups = {flag for flag in added if any(name.startswith(f"{flag}.") or f".{flag}." in name for name in flags)}
    assert added - groups == flags


def test_every_flag_has_another_value_to_test_with():
    assert OTHER.keys() == FLAGS.keys()
    assert all(OTHER[name][1] != default for name, default in FLAGS.items())


# Round trips


def test_every_flag_comes_back_from_the_command_line_and_from_json(parse: Callable, tmp_path: Path):
    expected = {name: value for name, (_, value) in OTHER.items()}
    typed = parse(*RUN, *(f"--{name}={text}" for name, (text, _) in OTHER.items()))
    assert ours(typed) == expected
    written = saved(typed, tmp_path / "run")
    assert {name: flat(written)[name] for name in FLAGS} == expected
    for where in (tmp_path / "run", tmp_path / "run/train_config.json"):
        assert ParallelTrainPipelineConfig.from_pretrained(where).to_dict() == typed.to_dict()
        assert parse(f"--config_path={where}").to_dict() == typed.to_dict()
    assert saved(parse(f"--config_path={tmp_path / 'run'}"), tmp_path / "again") == written


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_alone_changes_nothing_else(parse: Callable, name: str):
    text, value = OTHER[name]
    assert ours(parse(*RUN, f"--{name}", text)) == FLAGS | {name: value}


def test_the_command_line_wins_over_the_file(parse: Callable, tmp_path: Path):
    saved(parse(*RUN, "--parallelism.dp_shard=4", "--accelerator.fsdp.cpu_offload=true"), tmp_path)
    config = parse(f"--config_path={tmp_path}", "--parallelism.dp_shard=2", "--checkpoint_format=dcp")
    assert ours(config) == FLAGS | {
        "parallelism.dp_shard": 2,
        "accelerator.fsdp.cpu_offload": True,
        "checkpoint_format": "dcp",
    }


def test_a_yaml_file_is_read_too(parse: Callable, tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "parallelism:\n  dp_shard: 2\naccelerator:\n  mixed_precision: no\n  fsdp:\n    cpu_offload: true\n"
    )
    config = parse(f"--config_path={file}", *RUN)
    assert ours(config) == FLAGS | {"parallelism.dp_shard": 2, "accelerator.fsdp.cpu_offload": True}


@pytest.mark.parametrize("value", ["no", "NO", "off", "'no'", '"no"'])
def test_no_mixed_precision_survives_yaml(parse: Callable, tmp_path: Path, value: str):
    config = parse(*RUN, f"--accelerator.mixed_precision={value}")
    assert config.accelerator.mixed_precision == "no"
    assert saved(config, tmp_path)["accelerator"]["mixed_precision"] == "no"


def test_none_is_a_mode_and_null_is_none(parse: Callable):
    config = parse(
        *RUN,
        "--accelerator.activation_checkpointing.mode=none",
        "--accelerator.compile.mode=null",
        "--accelerator.fsdp.wrap_modules=null",
    )
    assert ours(config) == FLAGS


def test_a_run_without_our_flags_adds_exactly_these_keys_to_the_hosts(parse: Callable, tmp_path: Path):
    host = saved(parse(*RUN, config_class=TrainPipelineConfig), tmp_path / "host")
    own = saved(parse(*RUN), tmp_path / "own")
    added = {key: own.pop(key) for key in GROUPS}
    assert flat(added) == FLAGS
    assert own == host


def test_our_own_flags_are_written_only_where_they_differ(parse: Callable, tmp_path: Path):
    config = parse(*RUN)
    assert flat({"checkpoint": vars(config.checkpoint)}) == OWN
    changed = parse(*RUN, "--checkpoint.keep_last=3", "--checkpoint.verify=false", "--checkpoint.async_save=false")
    assert saved(changed, tmp_path)["checkpoint"] == {"keep_last": 3, "verify": False}
    assert vars(parse(f"--config_path={tmp_path}").checkpoint) == vars(changed.checkpoint)


# The host's later releases


def test_the_later_hosts_config_is_read_with_one_warning(caplog: pytest.LogCaptureFixture):
    file = peer_dir() / "fsdp2/000004/pretrained_model/train_config.json"
    theirs = json.loads(file.read_text())
    config = ParallelTrainPipelineConfig.from_pretrained(file)
    assert {key: config.to_dict()[key] for key in GROUPS} == {key: theirs[key] for key in GROUPS}
    (warning,) = warnings_in(caplog)
    assert warning.startswith(f"{file}: dropped ")
    assert set(warning.rpartition(": ")[2].split(", ")) == {"ema", "dataset.exclude_episodes"}
    kept = set(flat(config.to_dict()))
    assert {name for name in flat(theirs) if name.split(".")[0] != "ema"} - kept == {"dataset.exclude_episodes"}


def with_keys(folder: Path, config: dict[str, Any], **keys: Any) -> Path:
    """Writes a config with a value put in under every dotted name, spelled with `__`."""
    for name, value in keys.items():
        *groups, last = name.split("__")
        target = config
        for group in groups:
            target = target[group]
        target[last] = value
    (folder / "train_config.json").write_text(json.dumps(config))
    return folder


UNKNOWN = {
    "ema": {"enable": False, "decay": 0.9},
    "later": {},
    "wandb__later": None,
    "policy__later": False,
    "accelerator__later": {"enabled": False, "size": 3},
    "accelerator__fsdp__later": [],
    "dataset__image_transforms__later": "",
}


def test_unknown_keys_that_switch_nothing_on_are_dropped_at_any_depth(
    parse: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    plain = parse(*RUN)
    folder = with_keys(tmp_path, plain.to_dict(), **UNKNOWN)
    assert ParallelTrainPipelineConfig.from_pretrained(folder).to_dict() == plain.to_dict()
    (warning,) = warnings_in(caplog)
    assert set(warning.rpartition(": ")[2].split(", ")) == {name.replace("__", ".") for name in UNKNOWN}


def test_a_config_of_this_host_gives_no_warning(parse: Callable, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    saved(parse(*RUN), tmp_path)
    ParallelTrainPipelineConfig.from_pretrained(tmp_path)
    assert warnings_in(caplog) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ema", {"enable": True, "decay": 0.9}),
        ("dataset__exclude_episodes", [3]),
        ("later", 0.5),
        ("accelerator__later", {"size": 3}),
        ("accelerator__fsdp__later", True),
        ("policy__later", "fast"),
    ],
)
def test_an_unknown_key_with_an_active_value_is_refused(parse: Callable, tmp_path: Path, name: str, value: Any):
    folder = with_keys(tmp_path, parse(*RUN).to_dict(), **{name: value})
    with pytest.raises(ConfigError) as refused:
        ParallelTrainPipelineConfig.from_pretrained(folder)
    text = str(refused.value)
    assert text.startswith(f"--config_path={folder / 'train_config.json'}: ")
    assert f"{name.replace('__', '.')}={value!r}" in text


def test_legacy_fields_of_the_host_are_still_migrated(parse: Callable, tmp_path: Path):
    folder = with_keys(tmp_path, parse(*RUN).to_dict(), use_rabc=True, rabc_kappa=0.02, rabc_progress_path="p.parquet")
    weighting = ParallelTrainPipelineConfig.from_pretrained(folder).sample_weighting
    assert (weighting.type, weighting.kappa) == ("rabc", 0.02)


# A config that cannot be read


@pytest.mark.parametrize("text", ["{", "[]", "3", ""])
def test_a_file_that_is_no_config_is_refused_by_name(tmp_path: Path, text: str):
    (tmp_path / "train_config.json").write_text(text)
    for read in (ParallelTrainPipelineConfig.from_pretrained, lambda path: check_config_path(str(path))):
        with pytest.raises(ConfigError, match="train_config.json"):
            read(tmp_path)


@pytest.mark.parametrize("name", ["missing", "missing.json", "no/where", "/no/where/train_config.json", "a b"])
def test_a_config_that_does_not_exist_is_refused_by_name(name: str):
    with pytest.raises(ConfigError) as refused:
        check_config_path(name)
    assert str(refused.value).startswith(f"--config_path={name}: ")


def test_no_config_path_is_none_of_our_business():
    check_config_path(None)
    check_config_path("")


# Imports


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_a_user_can_set_is_known_without_torch_or_the_host():
    run_python(
        "import sys\n"
        "from lerobot_parallel.config import errors, runtime, source, topology\n"
        "assert source.config_file('.') is None\n"
        "runtime.check_runtime(runtime.AcceleratorConfig(), sharded=True, device='cpu')\n"
        "topology.resolve_degrees(topology.ParallelismConfig(), 2)\n"
        "assert not {'torch', 'lerobot', 'accelerate', 'draccus'} & set(sys.modules)\n"
    )


def test_parsing_the_flags_imports_neither_torch_nor_accelerate():
    run_python(
        "import sys\n"
        "import draccus\n"
        "from lerobot_parallel.config.runtime import AcceleratorConfig\n"
        "from lerobot_parallel.config.topology import ParallelismConfig\n"
        "args = ['--mixed_precision=bf16', '--fsdp.wrap_modules=[A]', '--ddp.static_graph=true']\n"
        "assert draccus.parse(AcceleratorConfig, args=args).fsdp.wrap_modules == ['A']\n"
        "assert draccus.parse(ParallelismConfig, args=['--dp_shard=2']).dp_shard == 2\n"
        "assert not {'torch', 'lerobot', 'accelerate'} & set(sys.modules)\n"
    )


def test_the_whole_config_imports_no_more_than_the_hosts_and_no_cuda():
    run_python(
        "import sys\n"
        "import lerobot.configs.train\n"
        "before = 'accelerate' in sys.modules\n"
        "import lerobot_parallel.config.train\n"
        "assert ('accelerate' in sys.modules) == before\n"
        "assert not sys.modules['torch'].cuda.is_initialized()\n"
    )


def test_draccus_encodes_what_it_decodes(parse: Callable):
    config = parse(*RUN)
    assert draccus.decode(ParallelTrainPipelineConfig, draccus.encode(config)).to_dict() == config.to_dict()
