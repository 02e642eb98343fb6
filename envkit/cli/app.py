"""The commands of ``envkit`` and their options.

Each command is a module, imported when it runs: ``envkit --help`` loads neither torch nor
JAX. A mistake of the user's ends with one line and exit status 2; ``--traceback`` shows where it was found.

A shell asks for completions at each press of Tab, and to import the library of an env takes seconds. So only the
library that the word begins with is read, and what it lists is kept in a file until something is installed. A library
that cannot be read offers nothing, since a shell has no place for errors.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from traceback import print_exception
from typing import Annotated, NoReturn

import typer

import envkit
from envkit.errors import ArgumentError, EnvkitError
from envkit.installing import DISTRIBUTION, cache_folder, install_hint

app = typer.Typer(
    name="envkit",
    help="Find, check, run and measure environments.",
    epilog="Exit status: 0 if all went well, 1 if something is broken or a goal was missed, 2 after a mistake, 130 after "
    "Ctrl-C. [bold]envkit COMMAND --help[/] says more.",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def complete_libraries(incomplete: str) -> list[str]:
    """List the libraries that begin so."""
    return [name for name in envkit.world_names() if name.startswith(incomplete)]


def complete_ids(incomplete: str) -> list[str]:
    """Return the ids that begin so, or, where several libraries begin so, these with a "/" behind them."""
    world, slash, _ = incomplete.partition("/")
    begun = [world] if slash else complete_libraries(incomplete)
    if len(begun) > 1:
        return [f"{name}/" for name in begun]
    try:
        listed = [id for name in begun for id in _ids_of(name)]
    except EnvkitError:
        return []
    return [id for id in listed if id.startswith(incomplete)]


def _ids_of(world: str) -> list[str]:
    """List the ids of a library, as they are kept if nothing was installed since."""
    file = cache_folder() / "ids" / f"{world}.json"
    installed = Path(sysconfig.get_path("purelib")).stat().st_mtime_ns
    of = [envkit.__version__, installed]
    with suppress(OSError, ValueError, LookupError, TypeError):  # there is none, or it is damaged
        kept = json.loads(file.read_text())
        if kept["of"] == of:
            return kept["ids"]
    ids = [str(id) for id in envkit.list_envs(world=world)]
    with suppress(OSError):  # a folder that cannot be written: the next call lists them again
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = file.with_suffix(".new")
        whole.write_text(json.dumps({"of": of, "ids": ids}))
        whole.replace(file)
    return ids


def complete_works(incomplete: str) -> list[str]:
    """List the works of ``bench`` that begin so."""
    from envkit.cli.bench import WORKS

    return [name for name in WORKS if name.startswith(incomplete)]


Id = Annotated[
    str,
    typer.Argument(
        help="Id of the environment, as brax/ant or gym/CartPole-v1.", autocompletion=complete_ids
    ),
]
NumEnvs = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of environments; without it, one environment without a batch."
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of the environments and of their random actions.")]


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"envkit {version(DISTRIBUTION)}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    traceback: Annotated[bool, typer.Option(help="Print the traceback of an error.")] = False,
) -> None:
    _Shown.traceback = traceback


class _Shown:
    """Handle the options in front of the command."""

    traceback = False


@app.command(epilog="Example: envkit doctor")
def doctor() -> None:
    """Check this machine: versions, devices, shared memory, rendering. Exit status 1 if something is broken."""
    from envkit.cli.doctor import examine

    raise typer.Exit(examine())


@app.command(
    "list", epilog="Examples: envkit list cartpole, envkit list --world brax, envkit list --worlds"
)
def list_ids(
    pattern: Annotated[
        str | None, typer.Argument(help="Part of an id, or a shell pattern for a whole id.")
    ] = None,
    world: Annotated[
        str | None,
        typer.Option(
            help="Library whose environments are listed, e.g. brax.",
            autocompletion=complete_libraries,
        ),
    ] = None,
    worlds: Annotated[
        bool, typer.Option("--worlds", help="List the libraries instead of environments.")
    ] = False,
) -> None:
    """List the ids that can be made here, one a line."""
    from envkit.cli.commands import print_ids, print_worlds

    if worlds:
        print_worlds()
    else:
        print_ids(pattern, world)


@app.command(epilog="Example: envkit info brax/ant --num-envs 64 --seconds 2")
def info(
    id: Id,
    num_envs: NumEnvs = None,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Seconds to measure the speed with random actions.")
    ] = 0.0,
) -> None:
    """Show what an env takes and gives, and on request how fast it steps."""
    from envkit.cli.commands import print_info

    print_info(id, num_envs, seconds)


@app.command(
    epilog="Example: envkit rollout gym/CartPole-v1 --num-envs 8 --steps 500 --out data.parquet"
)
def rollout(
    id: Id,
    num_envs: NumEnvs = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each environment.")] = 1000,
    seed: Seed = 0,
    video: Annotated[
        Path | None, typer.Option(help="Video file of the first environment: .mp4 or .gif.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Data file to write: .parquet, .h5 or .hdf5.")
    ] = None,
) -> None:
    """Step an env with random actions, and say what it returned."""
    from envkit.cli.commands import roll_out

    roll_out(id, num_envs, steps, seed, video=video, out=out)


@app.command(epilog="Example: envkit bench cartpole")
def bench(
    work: Annotated[
        str | None,
        typer.Argument(help="Benchmark to run: cartpole or brax.", autocompletion=complete_works),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Approximate seconds of a round.")] = 1.0,
) -> None:
    """Measure envkit beside the bare library, and beside what else is installed."""
    from envkit.cli.bench import measure

    measure(work, seconds)


@app.command(epilog="Example: envkit demo --out runs/first --seed 3")
def demo(
    out: Annotated[str, typer.Option(help="Folder for the curve and the rollouts.")] = "demo_out",
    device: Annotated[str, typer.Option(help="Device of torch and JAX: cpu or cuda.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of the whole job.")] = 0,
    cache: Annotated[
        str | None,
        typer.Option(help="Folder of compiled programs; by default in the user's cache."),
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Do not keep compiled programs.")
    ] = False,
) -> None:
    """Train on Brax, evaluate on Gymnasium, mix both."""
    typer.echo("loading torch, JAX, Brax and MuJoCo ...")
    try:
        from envkit.demo import GoalMissedError, run
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"the demo needs {error.name!r}, which is not installed. {install_hint('demo')}"
        ) from error
    _require_device(device)
    try:
        run(out=out, device=device, seed=seed, cache=cache, keep_programs=not no_cache)
    except GoalMissedError as error:
        raise SystemExit(f"the goal was not reached: {error}") from None


def _require_device(name: str) -> None:
    import torch

    try:
        is_known = torch.device(name).type in ("cpu", "cuda")
    except RuntimeError:
        is_known = False
    if not is_known:
        raise ArgumentError(
            f"--device is {name!r}, but must be a device of torch. Pass cpu, cuda, or one of several GPUs: cuda:1."
        )


def main(arguments: list[str] | None = None) -> None:
    """Run a command; returns if it went well.

    Raises:
        SystemExit: with status 2 and one line on standard error, a mistake of the user's; with the help and status 2,
            no command at all; with status 1, what the command itself says; with 130, Ctrl-C.
    """
    passed = sys.argv[1:] if arguments is None else arguments
    try:
        status = app(passed or ["--help"], prog_name="envkit", standalone_mode=False)
    except typer.Abort:  # Ctrl-C, to older versions of typer
        raise SystemExit(130) from None
    except (EnvkitError, OSError) as error:
        if _Shown.traceback:
            print_exception(error)
        _tell((str(error).splitlines() or [type(error).__name__])[0])
    except Exception as error:  # typer's own classes for mistakes move from version to version
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        of_command = getattr(error, "ctx", None)
        name = "envkit" if of_command is None else of_command.command_path
        told = " ".join(message().split()).rstrip(".")
        end = "" if told.endswith("?") else "."
        _tell(f"{told}{end} See: {name} --help")
    if not passed:
        raise SystemExit(2)
    if isinstance(status, int) and status:
        raise SystemExit(status)


def _tell(mistake: str) -> NoReturn:
    typer.echo(f"envkit: {mistake}", err=True)
    raise SystemExit(2) from None
