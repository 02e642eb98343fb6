"""Does an environment do what its specs say?

`check_env_specs` runs a short rollout and compares it with `fake_tensordict`; all differences are
reported at once. It fixes nothing.
"""

from __future__ import annotations

from functools import partial

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from envkit.base import EnvBase
from envkit.env_specs import as_key, as_path
from envkit.errors import OutOfSpecError
from envkit.specs import Composite, contains_lazy_spec
from envkit.transition import leaves

__all__ = ["check_env_specs"]


def check_env_specs(
    env: EnvBase,
    return_contiguous: bool = True,
    check_dtype: bool = True,
    seed: int | None = None,
    tensordict: TensorDictBase | None = None,
    break_when_any_done: bool | None = None,
) -> None:
    """Compare three random steps of an env with its specs; silent when they agree.

    Args:
        env: any environment.
        return_contiguous: stack the rollout densely.
        check_dtype: compare dtypes too.
        seed: seeds the env first.
        tensordict: what to start from.
        break_when_any_done: stop rule of the rollout.

    Raises:
        OutOfSpecError: an AssertionError that lists every key that is missing or too many, every
            shape, dtype and device that differs, and every value outside its spec.
    """
    if seed is not None:
        env.set_seed(seed)
    run = partial(
        env.rollout,
        3,
        tensordict=tensordict,
        auto_reset=True,
        break_when_any_done=break_when_any_done,
    )
    find = partial(
        _problems, env.specs, env.fake_tensordict(), device=env.device, check_dtype=check_dtype
    )
    try:
        problems = find(run(return_contiguous=return_contiguous))
    except (
        RuntimeError
    ):  # perhaps its steps cannot be stacked because one of them is not as it says
        problems = find(run(return_contiguous=False))
        if not problems:
            raise
    if problems:
        raise OutOfSpecError(
            f"{env} does not do what its specs say:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
            + "\nCorrect the specs, or what _reset and _step return."
        )


def _problems(
    specs: Composite,
    fake: TensorDictBase,
    real: TensorDictBase,
    *,
    device: torch.device | None,
    check_dtype: bool,
) -> list[str]:
    """Compare data with specs of batch size ``specs.shape``; lazy stacks part by part."""
    same = partial(_problems, device=device, check_dtype=check_dtype)
    if isinstance(real, LazyStackedTensorDict) and real.stack_dim >= specs.ndim:
        steps = (same(specs, fake, step) for step in real.unbind(real.stack_dim))
        return list(dict.fromkeys(problem for problems in steps for problem in problems))
    if specs.ndim and (contains_lazy_spec(specs) or isinstance(real, LazyStackedTensorDict)):
        return [
            f"{problem} (env {index})"
            for index in range(specs.shape[0])
            for problem in same(specs[index], fake[index], real[index])
        ]
    problems = _key_problems(fake, real)
    got, wanted = dict(leaves(real)), dict(leaves(fake))
    dynamic = _dynamic_shapes(specs)
    for path in (path for path in wanted if path in got):
        problems += _leaf_problems(
            path, wanted[path], got[path], dynamic.get(path), specs.ndim, real, device, check_dtype
        )
    return problems + _value_problems(specs, real)


def _dynamic_shapes(specs: Composite) -> dict[tuple[str, ...], torch.Size]:
    """Give the shapes that have sizes only data can tell, by path in a transition."""
    shapes = {}
    for side, kinds in (("input_spec", ("state", "action")), ("output_spec", _OUTPUTS)):
        for kind in kinds:
            for key, leaf in specs[side, f"full_{kind}_spec"].items(True, True):
                if -1 in leaf.shape:
                    shapes[as_path(key)] = shapes[("next", *as_path(key))] = leaf.shape
    return shapes


_OUTPUTS = ("observation", "reward", "done")


def _key_problems(fake: TensorDictBase, real: TensorDictBase) -> list[str]:
    wanted, got = ({path for path, _ in leaves(td)} for td in (fake, real))
    return [
        *(f"{as_key(path)!r} is present in real but not in fake" for path in sorted(got - wanted)),
        *(f"{as_key(path)!r} is present in fake but not in real" for path in sorted(wanted - got)),
    ]


def _leaf_problems(path, wanted, got, dynamic, ndim, real, device, check_dtype) -> list[str]:
    if not isinstance(got, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        return []
    key, problems = as_key(path), []
    if not got.is_nested:  # the shape of a nested tensor is that of its parts, which `is_in` asks
        event = (wanted.shape if dynamic is None else dynamic)[ndim:]
        got_event = got.shape[len(real.batch_size) :]
        sizes = zip(event, got_event, strict=False)
        if len(event) != len(got_event) or any(said not in (-1, size) for said, size in sizes):
            problems.append(f"{key!r} has shape {tuple(got_event)}, its spec says {tuple(event)}")
    if check_dtype and wanted.dtype != got.dtype:
        problems.append(f"{key!r} has dtype {got.dtype}, its spec says {wanted.dtype}")
    if device is not None and wanted.device != got.device:
        problems.append(f"{key!r} is on {got.device}, its spec says {wanted.device}")
    return problems


def _value_problems(specs: Composite, real: TensorDictBase) -> list[str]:
    inputs, outputs = specs["input_spec"], specs["output_spec"]
    places = {
        "root": (
            real,
            (outputs, "observation"),
            (inputs, "state"),
            (inputs, "action"),
            (outputs, "done"),
        ),
        "next": (
            real.get("next"),
            (outputs, "observation"),
            (outputs, "reward"),
            (outputs, "done"),
        ),
    }
    problems = []
    for place, (td, *kinds) in places.items():
        for owner, kind in kinds:
            spec = owner[f"full_{kind}_spec"]
            single = spec[(0,) * specs.ndim] if specs.ndim else spec
            problems += [f"{line} at {place}" for line in _outside(single, td)]
    return problems


def _outside(spec: Composite, td: TensorDictBase) -> list[str]:
    lines = []
    for key, leaf in spec.items(True, True):
        value = td.get(key, None)
        if isinstance(value, torch.Tensor) and leaf.dtype is not None and not leaf.is_in(value):
            lines.append(f"{key!r} has values outside its spec {leaf}")
    return lines
