"""Command line: ``python -m envkit demo``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and run what it asks for."""
    parser = argparse.ArgumentParser(prog="envkit", description="Thousands of envs, one interface.")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="train on Brax, evaluate on Gymnasium, mix both")
    demo.add_argument("--out", default="demo_out", help="folder for the curve and the rollouts")
    demo.add_argument("--device", default="cpu", help="where torch and JAX compute: cpu or cuda")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument(
        "--cache", help="folder that keeps compiled programs (default: envkit in the user's cache)"
    )
    demo.add_argument("--no-cache", action="store_true", help="keep no compiled programs")
    options = parser.parse_args(arguments)

    print("loading torch, JAX, Brax and MuJoCo ...", flush=True)
    try:
        from envkit.demo import (  # torch and JAX load only when something is to be done
            GoalMissedError,
            run,
        )
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"the demo needs {error.name!r}, which is not installed. "
            "Install it with: pip install 'envkit[demo]'"
        ) from error
    try:
        run(
            out=options.out,
            device=options.device,
            seed=options.seed,
            cache=options.cache,
            keep_programs=not options.no_cache,
        )
    except GoalMissedError as error:
        raise SystemExit(f"the goal was not reached: {error}") from None


if __name__ == "__main__":
    main()
