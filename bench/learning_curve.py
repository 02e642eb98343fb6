"""Draw README's learning curve: run the block that trains there, as printed, in the folder of the pictures.

Run: ``make picture``, or ``python -m bench.learning_curve``; takes a minute
"""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from typing import Any

import matplotlib
import torch

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs" / "figures"
LOOKS: dict[Any, Any] = {
    "figure.dpi": 120,
    "savefig.dpi": 120,
    "font.size": 14,
}  # letters for 400 pixels


def training(text: str) -> str:
    """Return the block of README that trains."""
    (block,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "PPO" in block)
    return block


def main() -> None:
    """Train and draw."""
    matplotlib.use("agg")
    torch.set_num_threads(1)
    scope = {"__name__": "__main__"}
    began, cpu = time.perf_counter(), time.process_time()
    with contextlib.chdir(FIGURES), matplotlib.rc_context(LOOKS):
        exec(compile(training((ROOT / "README.md").read_text()), "README.md", "exec"), scope)
    seconds, of_cpu = time.perf_counter() - began, time.process_time() - cpu
    print(f"{seconds:.0f} s, {of_cpu:.0f} s of them CPU time")


if __name__ == "__main__":
    main()
