"""Facts of a graphics card that JAX and torch share, which our rules of memory and order rest on.

Each probe forces one of them and prints what it saw; what is wanted stands beside it. They take minutes on a card;
``python -m bench.gpu_day --rehearse`` shows without one that they run. `bench.gpu` says how fast things are, and
`bench.gpu_parity` whether rollouts agree with those of the CPU.

Run: ``python -m bench.gpu_probe``
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bench.harness import accelerator, is_rehearsal, record
from envkit import configure_gpu
from envkit_bridges.dlpack import to_jax, to_jit, to_torch

ROUNDS = 10


@dataclass(frozen=True)
class Place:
    """Where a probe runs, and how much work keeps that device busy for a while."""

    device: torch.device

    @property
    def is_card(self) -> bool:
        """Whether it is a graphics card."""
        return self.device.type == "cuda"

    @property
    def elements(self) -> int:
        """Elements of a large array."""
        return 1 << (22 if self.is_card else 14)

    def wait(self) -> None:
        """Wait for all of torch's work."""
        if self.is_card:
            torch.cuda.current_stream(self.device).synchronize()

    def reading_slowly(self) -> Callable[[jax.Array], jax.Array]:
        """Give a program that goes on reading its argument for long."""
        loops, elements = (3000, self.elements) if self.is_card else (30, self.elements)

        def read(array: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, loops, lambda i, s: s + array[(i * 1031) % elements], 0.0)

        return jax.jit(read)


def lent_memory_dies_early(place: Place) -> dict[str, Any]:
    """Drop what was lent while the program reads it: wrong sums say that it must be kept."""
    ones, slow = torch.ones(place.elements, device=place.device), place.reading_slowly()
    expected, reused, wrong = float(slow(jnp.from_dlpack(ones))), 0, 0
    for _ in range(ROUNDS):
        lent = ones.clone()
        address, result = lent.data_ptr(), slow(jnp.from_dlpack(lent))
        del lent
        reused += torch.full_like(ones, 9.0).data_ptr() == address
        wrong += float(result) != expected
    return {"reused": reused, "wrong_when_dropped": wrong}


def lent_memory_is_kept(place: Place) -> dict[str, Any]:
    """Keep what was lent until torch has the result, as our steps do: no sum may be wrong."""
    ones, slow = torch.ones(place.elements, device=place.device), place.reading_slowly()
    expected, wrong = float(slow(jnp.from_dlpack(ones))), 0
    for _ in range(ROUNDS):
        lent = to_jit(ones.clone(), copy=False)
        result = to_torch(slow(lent))
        del lent
        torch.full_like(ones, 9.0)
        wrong += result.item() != expected
    return {"wrong (0 wanted)": wrong}


def memory_of_jax_is_reused(place: Place, *, waits: bool) -> dict[str, Any]:
    """Drop a tensor of JAX's memory that torch still reads, and run programs that take no tensor."""
    make, wrong = jax.jit(lambda value: jnp.full((place.elements,), value)), 0
    for _ in range(ROUNDS):
        tensor = to_torch(make(1.0))
        place.wait()
        busy = torch.zeros(1 << 26 if place.is_card else 8, device=place.device)
        for _ in range(50):
            busy.sin_()
        total = tensor.double().sum()
        del tensor
        if waits:
            place.wait()
        kept = [make(7.0) for _ in range(6)]
        wrong += total.item() != place.elements
        del kept
    return {f"wrong, {'waiting (0 wanted)' if waits else 'not waiting'}": wrong}


def slices_cross(place: Place) -> dict[str, Any]:
    """Lend slices that begin at every address, and arrays of awkward shapes and dtypes."""
    numbers = torch.arange(4096, dtype=torch.float32, device=place.device)
    sums = [float(jnp.sum(to_jax(numbers[i : 1024 + i], copy=False))) for i in range(5)]
    wanted = [float(numbers[i : 1024 + i].sum()) for i in range(5)]
    shapes = [(64, 1), (3, 64, 1), (1, 3, 4), (64, 1, 6, 2), (64, 0)]
    plus_one = jax.jit(lambda array: array + 1)
    shaped = [to_torch(plus_one(to_jit(torch.ones(s, device=place.device)))) for s in shapes]
    dtypes = (torch.bool, torch.uint8, torch.int32, torch.uint32, torch.bfloat16)
    back = [to_torch(to_jax(torch.ones(8, device=place.device).to(d))).dtype for d in dtypes]
    is_right = all(bool((tensor == 2).all()) for tensor in shaped) and tuple(back) == dtypes
    return {"sums are right": sums == wanted, "shapes and dtypes are right": is_right}


def another_stream(place: Place) -> dict[str, Any]:
    """Hand over on a stream that is not torch's first: no value may be old."""
    if not place.is_card:
        return {}
    double, wrong = jax.jit(lambda array: array * 2), 0
    with torch.cuda.stream(torch.cuda.Stream()):
        for value in range(500):
            lent = to_jit(torch.full((1 << 20,), float(value), device=place.device), copy=False)
            wrong += bool((to_torch(double(lent)) != 2 * value).any())
    return {"wrong of 500 (0 wanted)": wrong}


def microseconds(place: Place) -> dict[str, Any]:
    """Time the parts of a hand-off on the host."""
    tensor = torch.zeros(4096, 64, device=place.device)
    array, tiny = jax.block_until_ready(to_jax(tensor)), jax.jit(lambda x: x + 1)
    works: dict[str, Callable[[], Any]] = {
        "jnp.from_dlpack": lambda: jnp.from_dlpack(tensor),
        "to_jit": lambda: to_jit(tensor, copy=False),
        "torch.from_dlpack": lambda: torch.from_dlpack(array),
        "to_torch": lambda: to_torch(array),
        "dispatch": lambda: tiny(array),
        "dispatch, waited for": lambda: tiny(array).block_until_ready(),
        "dispatch, to_torch, waited for": lambda: (to_torch(tiny(array)), place.wait()),
    }
    return {name: _median_us(work) for name, work in works.items()}


def _median_us(work: Callable[[], Any], rounds: int = 300) -> float:
    work()
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return round(statistics.median(seconds) * 1e6, 1)


def precision(place: Place) -> dict[str, Any]:
    """Show how far float32 products are from exact ones: TF32 is 1e-3 off, full float32 1e-6."""
    draw = np.random.default_rng(0).standard_normal
    errors = {}
    for name, left, right in (
        ("matmul", draw((4096, 27)), draw((27, 32))),
        ("vmapped 3x3", draw((4096, 3, 3)), draw((4096, 3, 1))),
    ):
        left, right = left.astype(np.float32), right.astype(np.float32)
        exact = left.astype(np.float64) @ right.astype(np.float64)
        device = jax.devices("cuda" if place.is_card else "cpu")[0]
        given = jax.device_put((left, right), device)
        errors[name] = float(np.abs(np.asarray(jax.jit(jnp.matmul)(*given)) - exact).max())
    return errors


PROBES: dict[str, Callable[[Place], dict[str, Any]]] = {
    "lent memory dropped early": lent_memory_dies_early,
    "lent memory kept": lent_memory_is_kept,
    "memory of JAX reused": lambda place: memory_of_jax_is_reused(place, waits=False),
    "memory of JAX reused after waiting": lambda place: memory_of_jax_is_reused(place, waits=True),
    "slices, shapes and dtypes": slices_cross,
    "another stream": another_stream,
    "microseconds": microseconds,
    "errors of float32 products": precision,
}


def main() -> None:
    """Run every probe; one that raises is printed and does not stop the others, but the exit code is 1."""
    place = Place(torch.device("cpu" if is_rehearsal() else "cuda"))
    if place.is_card and not torch.cuda.is_available():
        print("no CUDA device: nothing was probed (python -m bench.gpu_day --rehearse)")
        return
    if place.is_card:
        configure_gpu(0.6)
    results: dict[str, Any] = {}
    for name, probe in PROBES.items():
        try:
            results[name] = probe(place)
        except Exception as error:
            results[name] = {"raised": f"{type(error).__name__}: {str(error)[:300]}"}
        print(f"{name}: {results[name]}", flush=True)
    record(f"facts of {accelerator() or 'a CPU'}", results)
    raise SystemExit(int(any("raised" in found for found in results.values())))


if __name__ == "__main__":
    main()
