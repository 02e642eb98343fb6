"""The pendulum of `envkit.envs.pendulum` in JAX, under the same names and specs, for thousands of rows at once.

Equal state, parameters and action give the same numbers up to float32 rounding; other random numbers are drawn.

Conventions
    th, thdot, params  as in `envkit.envs.pendulum`; they are the state, and all of it is shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from tensordict import TensorDict, TensorDictBase

from envkit.data.arguments import as_number, require_tensordict
from envkit.data.keywords import refuse_unknown
from envkit.envs.pendulum import PARAMETERS
from envkit.errors import ArgumentTypeError
from envkit.functional import Box, Timestep
from envkit.specs import Bounded
from envkit.specs.annotations import Device, EnvData
from envkit_bridges.jax.jax_env import JaxEnv
from envkit_bridges.jax.options import JaxOptions


class JaxPendulum:
    """One pendulum as a `StatelessEnv`; its state is its observation.

    Args:
        params: physical parameters in SI units, over `PARAMETERS`.

    Raises:
        OptionError: (a TypeError) there is no parameter of such a name.
        ArgumentTypeError: (a TypeError) ``params`` is no dict, or one of them no number.
    """

    def __init__(self, params: Mapping[str, float] | None = None):
        settings = {} if params is None else params
        if not isinstance(settings, Mapping):
            raise ArgumentTypeError(
                f"params is {params!r}, of type {type(params).__name__}, but must be a dict of numbers by name. Pass "
                "params={'g': 9.8}, for example."
            )
        refuse_unknown("a pendulum", settings, list(PARAMETERS))
        changed = {
            name: as_number(name, value, meaning="one in SI units")
            for name, value in settings.items()
        }
        self.params = {**PARAMETERS, **changed}

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.params == self.params  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.params.items())))

    @property
    def action_space(self) -> Box:
        """A torque."""
        torque = self.params["max_torque"]
        return Box(-torque, torque, (1,))

    def reset(self, key: jax.Array) -> tuple[dict[str, Any], Timestep]:
        """Draw the angle from all angles and the velocity from [-1, 1]."""
        of_angle, of_velocity = jax.random.split(key)
        state = {
            "th": jax.random.uniform(of_angle, (), jnp.float32, -jnp.pi, jnp.pi),
            "thdot": jax.random.uniform(of_velocity, (), jnp.float32, -1.0, 1.0),
            "params": {name: jnp.float32(value) for name, value in self.params.items()},
        }
        return state, Timestep(state)

    def step(self, state: dict[str, Any], action: jax.Array) -> tuple[dict[str, Any], Timestep]:
        """Take one step; the reward is of the state before it."""
        th, thdot, params = state["th"], state["thdot"], state["params"]
        u = jnp.clip(action[0], -params["max_torque"], params["max_torque"])
        cost = _normalised(th) ** 2 + 0.1 * thdot**2 + 0.001 * u**2

        gravity = 3 * params["g"] / (2 * params["l"]) * jnp.sin(th)
        push = 3.0 / (params["m"] * params["l"] ** 2) * u
        thdot = thdot + (gravity + push) * params["dt"]
        thdot = jnp.clip(thdot, -params["max_speed"], params["max_speed"])
        th = _normalised(th + thdot * params["dt"])
        state = {"th": th, "thdot": thdot, "params": params}
        return state, Timestep(state, -cost)


def _normalised(angle: jax.Array) -> jax.Array:
    return (angle + math.pi) % (2 * math.pi) - math.pi


class PendulumJaxEnv(JaxEnv):
    """Swing up the pendulum of `PendulumEnv` in JAX: the same entries and specs, and ``state`` and a flag for time limits.

    Args:
        params: physical parameters of new episodes by name, in SI units, over the defaults: {"max_speed": 8.0,
            "max_torque": 2.0, "dt": 0.05, "g": 10.0, "m": 1.0, "l": 1.0}.
        device: where torch data and JAX arrays are; None takes the CPU.
        **options: see `envkit_bridges.jax.options.JaxOptions`.

    Raises:
        OptionError: (a TypeError) a parameter or a keyword is unknown.

    Example:
        >>> from envkit import PendulumJaxEnv
        >>> env = PendulumJaxEnv(batch_size=[4])
        >>> env.rollout(3)["next", "reward"].shape
        torch.Size([4, 3, 1])
    """

    def __init__(
        self,
        params: Mapping[str, float] | None = None,
        *,
        device: Device | None = None,
        **options: Unpack[JaxOptions],
    ):
        self._pendulum = JaxPendulum(params)
        super().__init__(self._pendulum, device=device, **options)

    def _declare(self) -> None:
        super()._declare()
        speed = self._pendulum.params["max_speed"]
        for name, most in (("th", math.pi), ("thdot", speed)):
            free = self.observation_spec[name]
            self.observation_spec[name] = Bounded(-most, most, free.shape, free.device, free.dtype)

    def root_at(self, td: TensorDictBase) -> EnvData:
        """Return the root of episodes that begin at ``th``, ``thdot`` and ``params`` of ``td``, each if it is there.

        Args:
            td: any batch size.

        Example:
            >>> import torch
            >>> from tensordict import TensorDict
            >>> from envkit import PendulumJaxEnv
            >>> env = PendulumJaxEnv(batch_size=[4])
            >>> upright = TensorDict(th=torch.zeros(4), thdot=torch.zeros(4), batch_size=[4])
            >>> env.root_at(upright)["th"]
            tensor([0., 0., 0., 0.])
        """
        require_tensordict("td", td)
        root = self.reset(TensorDict(batch_size=td.batch_size, device=self.device))
        given = td.select("th", "thdot", "params", strict=False).to(root.device)
        fields = self.unpack(root["state"].clone()).update(given)
        return root.update(given).set("state", self.pack(fields))
