"""Does an environment do what its specs say?

`check_env_specs` runs a short rollout and compares it with `fake_tensordict`; all differences are
reported at once. It fixes nothing.
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from envkit.base import EnvBase
from envkit.env_specs import as_key
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
    real = env.rollout(
        3,
        tensordict=tensordict,
        auto_reset=True,
        return_contiguous=return_contiguous,
        break_when_any_done=break_when_any_done,
    )
    problems = _problems(
        env.specs, env.fake_tensordict(), real, device=env.device, check_dtype=check_dtype
    )
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
    """Compare a rollout with specs of batch size ``specs.shape``; unlike envs one by one."""
    if contains_lazy_spec(specs):
        return [
            f"{problem} (env {index})"
            for index in range(specs.shape[0])
            for problem in _problems(
                specs[index], fake[index], real[index], device=device, check_dtype=check_dtype
            )
        ]
    problems = _key_problems(fake, real)
    got, wanted = dict(leaves(real)), dict(leaves(fake))
    for path in (path for path in wanted if path in got):
        event = wanted[path].shape[specs.ndim :]
        problems += _leaf_problems(path, wanted[path], got[path], event, real, device, check_dtype)
    return problems + _value_problems(specs, real)


def _key_problems(fake: TensorDictBase, real: TensorDictBase) -> list[str]:
    wanted, got = ({path for path, _ in leaves(td)} for td in (fake, real))
    return [
        *(f"{as_key(path)!r} is present in real but not in fake" for path in sorted(got - wanted)),
        *(f"{as_key(path)!r} is present in fake but not in real" for path in sorted(wanted - got)),
    ]


def _leaf_problems(path, wanted, got, event, real, device, check_dtype) -> list[str]:
    if not isinstance(got, torch.Tensor) or not isinstance(wanted, torch.Tensor):
        return []
    key, problems = as_key(path), []
    got_event = got.shape[len(real.batch_size) :]
    if event != got_event:
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
