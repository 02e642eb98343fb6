"""A pendulum that is swung up, in torch: state and physical parameters in the data, differentiable in both.

The equations of motion and the cost are those of Gymnasium's Pendulum, stepped by semi-implicit Euler.
The same env in JAX is `envkit_bridges.worlds.native.pendulum`.

Conventions
    th      angle in rad, 0 upright, in [-pi, pi]; shape (*batch,), float32.
    thdot   angular velocity in rad/s; shape (*batch,), float32.
    params  scalars, one for each element: max_speed, max_torque, dt, g, m, l.
"""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from tensordict import TensorDict, TensorDictBase

from envkit.data.arguments import as_batch_size, as_number
from envkit.env.options import EnvOptionsWithoutSeed
from envkit.env.seeding import drawn_seed
from envkit.envs.seeded_env import SeededEnv, default_parameters, parameter_specs, parameters_in
from envkit.errors import InputError
from envkit.specs import Bounded, Composite, Unbounded
from envkit.specs.annotations import BatchSize, Device, EnvData, as_device, require_memory

PARAMETERS = {"max_speed": 8.0, "max_torque": 2.0, "dt": 0.05, "g": 10.0, "m": 1.0, "l": 1.0}
"""Default physical parameters, in SI units."""


class PendulumEnv(SeededEnv):
    """Swing up a pendulum and hold it upright; never done.

    Args:
        td_params: what `gen_params` gave, or a part of it: the parameters of rows that bring no
            own, and the bounds of action and velocity in the specs. Batch size ``()``.
        seed: of random states and actions; None draws one from torch's global generator.
        device: where data is.
        batch_size: what a reset without data produces; any other size is accepted too.
        **options: see `envkit.env.options.EnvOptions`.

    A reset keeps the parameters that the data holds and draws ``th`` in [-pi, pi] and ``thdot`` in
    [-1, 1]; where the data holds both and ``set_state`` is not False, it keeps them. A step takes the torque
    ``action``, shape (*batch, 1), clipped to ``max_torque``, and rewards the state before it. Gradients flow to the
    action, the state and the parameters.

    Raises:
        InputError: (a ValueError) at a step: the action has another shape, or is no float; at a reset: a state or
            parameters that the data brings are not one number for each row.
        BatchSizeError: (a RuntimeError) ``td_params`` has a batch size.
        MissingKeyError: (a KeyError) ``td_params`` has no ``params``.

    Example:
        >>> from envkit import PendulumEnv
        >>> env = PendulumEnv(batch_size=[4])
        >>> data = env.rollout(10)
        >>> data["th"].shape, data["next", "reward"].shape
        (torch.Size([4, 10]), torch.Size([4, 10, 1]))
        >>> sorted(data["params"].keys())
        ['dt', 'g', 'l', 'm', 'max_speed', 'max_torque']
    """

    _supports_set_state = True

    def __init__(
        self,
        td_params: TensorDictBase | None = None,
        seed: int | None = None,
        device: Device | None = None,
        **options: Unpack[EnvOptionsWithoutSeed],
    ):
        super().__init__(device=device, **options)
        require_memory(self.device, type(self).__name__)
        self._defaults = default_parameters(td_params, self.gen_params(device=self.device))
        torque, speed = (float(self._defaults[name]) for name in ("max_torque", "max_speed"))
        place: dict[str, Any] = {"device": self.device, "dtype": torch.float32}
        state = Composite(
            th=Bounded(-math.pi, math.pi, (), **place),
            thdot=Bounded(-speed, speed, (), **place),
            params=parameter_specs(self._defaults),
        )
        self.observation_spec_unbatched = state
        self.state_spec_unbatched = state.clone()
        self.action_spec_unbatched = Bounded(-torque, torque, (1,), **place)
        self.reward_spec_unbatched = Unbounded((1,), **place)
        self.set_seed(drawn_seed() if seed is None else seed)

    @staticmethod
    def gen_params(
        g: float = 10.0, batch_size: BatchSize | None = None, device: Device | None = None
    ) -> EnvData:
        """Return the default parameters under ``params``, with this gravity, one set for each element of a batch.

        Args:
            g: gravitational acceleration in m/s^2.
            batch_size: of the data; None is one set.
            device: where they are.

        Raises:
            ArgumentTypeError: (a TypeError) ``g`` is no single number, ``batch_size`` no sequence of ints.
            ArgumentError: (a ValueError) ``g`` is infinite or NaN.
            DeviceNameError: (a ValueError and a RuntimeError) torch has no such device.

        Example:
            >>> from envkit import PendulumEnv
            >>> moon = PendulumEnv.gen_params(g=1.6, batch_size=[4])
            >>> moon["params", "g"]
            tensor([1.6000, 1.6000, 1.6000, 1.6000])
            >>> PendulumEnv().reset(moon)["th"].shape
            torch.Size([4])
        """
        meaning = "a gravity in m/s^2; rows of unlike gravity: params['params', 'g'] = torch.tensor([...])"
        numbers_by_name = {**PARAMETERS, "g": as_number("g", g, meaning=meaning)}
        place = None if device is None else as_device(device)
        require_memory(place, "gen_params")
        numbers = {
            name: torch.tensor(value, dtype=torch.float32, device=place)
            for name, value in numbers_by_name.items()
        }
        params = TensorDict({"params": TensorDict(numbers)}, device=place)
        return params.expand(as_batch_size(batch_size)).contiguous()

    def _reset(self, td: TensorDictBase | None, *, set_state: bool) -> TensorDictBase:
        shape = self._shape_of(td)
        if td is not None and set_state and {"th", "thdot"} <= set(td.keys()):
            th, thdot = (_one_a_row(td, name, shape).clone() for name in ("th", "thdot"))
        else:
            th = self._uniform(shape, -math.pi, math.pi)
            thdot = self._uniform(shape, -1.0, 1.0)
        params = parameters_in(td, self._defaults, shape, self.device)
        return TensorDict({"th": th, "thdot": thdot, "params": params}, shape, device=self.device)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        th, thdot = td["th"], td["thdot"]
        params: Any = td["params"]
        speed, torque = params["max_speed"], params["max_torque"]
        action = td.get("action", None)
        # NaN is left to the equations.
        self._action_inputs["action"].require_form(action, td.batch_size)
        u = action.squeeze(-1).to(th.dtype).clamp(-torque, torque)
        cost = _normalised(th) ** 2 + 0.1 * thdot**2 + 0.001 * u**2

        gravity = 3 * params["g"] / (2 * params["l"]) * th.sin()
        push = 3.0 / (params["m"] * params["l"] ** 2) * u
        thdot = (thdot + (gravity + push) * params["dt"]).clamp(-speed, speed)
        th = _normalised(th + thdot * params["dt"])
        out: dict[str, Any] = {"th": th, "thdot": thdot, "params": params.clone()}
        return TensorDict({**out, "reward": -cost.unsqueeze(-1)}, td.batch_size, device=td.device)


def _one_a_row(td: TensorDictBase, name: str, shape: torch.Size) -> torch.Tensor:
    value = td[name]
    if value.shape != shape:
        raise InputError(
            f"{name!r} has shape {tuple(value.shape)}, but a reset to a state takes {tuple(shape)}: one number for each "
            "row, without its own axis. Squeeze or reshape it."
        )
    return value


def _normalised(angle: torch.Tensor) -> torch.Tensor:
    """Wrap an angle into [-pi, pi]."""
    return (angle + math.pi) % (2 * math.pi) - math.pi
