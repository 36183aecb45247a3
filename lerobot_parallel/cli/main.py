"""`lerobot-parallel`: the group of commands, their errors and their exit codes."""

import importlib

import click

from lerobot_parallel import __version__
from lerobot_parallel.config.errors import ConfigError

_COMMANDS = {
    "convert": "lerobot_parallel.cli.convert",
    "inspect": "lerobot_parallel.cli.inspect",
    "doctor": "lerobot_parallel.cli.doctor",
    "demo": "lerobot_parallel.cli.demo",
    "plans": "lerobot_parallel.cli.plans",
}


class _Group(click.Group):
    """Imports a command when it is asked for; the modules import torch and the host only when they run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        return importlib.import_module(_COMMANDS[cmd_name]).command

    def invoke(self, ctx: click.Context) -> object:
        """Turns what a user can fix into one line on stderr and exit code 1; anything else is a bug, and looks so."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except (ConfigError, OSError) as error:
            raise click.ClickException(str(error)) from None
        except ValueError as error:
            from lerobot_parallel.checkpoint.safe_read import CheckpointError

            if not isinstance(error, CheckpointError):
                raise
            raise click.ClickException(str(error)) from None


@click.command(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lerobot-parallel")
def main() -> None:
    """Tools around the checkpoints of parallel LeRobot runs."""


if __name__ == "__main__":
    main(prog_name="lerobot-parallel")
