"""pgx's board games, card games and MinAtar as stateless envs: players take turns, one step a move.

Conventions
    player   index of a seat, 0 to ``num_players - 1``. Who moves first in an episode, each game draws.
    state    pgx's own without its observation, which the data shows; and the key from which steps draw chance (dice, cards).
    illegal  an action that ``legal_action_mask`` does not allow. pgx ends the game then: the player who took it is paid
             a penalty, the others share it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Unpack, get_args

import jax
import jax.numpy as jnp
import numpy as np
import torch

from envkit.data.arguments import require_option
from envkit.data.keywords import Default
from envkit.data.paths import Path
from envkit.errors import ArgumentError
from envkit.functional import Discrete, Timestep
from envkit.specs import Categorical
from envkit.specs.annotations import Device
from envkit_bridges.jax.options import JaxOptions
from envkit_bridges.jax.simulator import DrawingState, SimulatorCore, SimulatorEnv
from envkit_bridges.jax.svg import frame_of
from envkit_bridges.libraries import (
    EnvNames,
    Simulator,
    no_object_of,
    quietly,
    require,
    require_name,
)

if TYPE_CHECKING:
    from envkit.functional.structure import PyTree

__all__ = ["PgxCore", "PgxEnv", "PgxOptions", "PgxWrapper", "build", "env_names", "fetching_names"]

Illegal = Literal["raise", "library"]
_ILLEGAL, _PLAYER = "illegal_action", "current_player"


@dataclass(frozen=True)
class PgxCore(SimulatorCore):
    """A game of pgx as a `StatelessEnv`.

    ``action_space``: the moves of the game, legal ones or not.
    """

    action_space: Any = None
    action_masks: ClassVar = (((), ("action_mask",)),)

    @property
    def reward_shape(self) -> dict[str, tuple[int, ...]]:
        """One of the player who moved, and one of each player."""
        return {"reward": (), "player_reward": (self.env.num_players,)}

    def reset(self, key: jax.Array) -> tuple[DrawingState, Timestep]:
        """Begin a game by pgx's ``init``."""
        episode, draws = jax.random.split(key)
        state = self.env.init(episode)
        return DrawingState(_bare(state), draws, jnp.int32(0)), _shown(state, False)

    def step(self, state: DrawingState, action: jax.Array) -> tuple[DrawingState, Timestep]:
        """Move by pgx's ``step``; its key is that of this step."""
        before = state.inner
        after = self.env.step(before, action, state.key)
        paid = {"reward": after.rewards[before.current_player], "player_reward": after.rewards}
        is_illegal = jnp.logical_not(before.legal_action_mask[action])
        return state.after(_bare(after)), _shown(after, is_illegal, paid)

    def render(self, states: Sequence[Any]) -> list[np.ndarray]:
        """Draw by pgx's own drawings; those of shogi need a font with Japanese letters."""
        frames = []
        for state in states:
            whole = jax.tree.map(jnp.asarray, state)
            whole = whole.replace(observation=self.env.observe(whole))
            with quietly():
                drawing = whole.to_svg()
            frames.append(frame_of(drawing))
        return frames


def _bare(state: PyTree) -> PyTree:
    """Leave out the observation, which no step reads: a program would carry it twice."""
    return state.replace(observation=None)


def _shown(state: PyTree, is_illegal: PyTree, paid: PyTree = 0.0) -> Timestep:
    observation = {
        "observation": state.observation,
        "action_mask": state.legal_action_mask,
        _PLAYER: state.current_player.astype(jax.dtypes.canonicalize_dtype(jnp.int64)),
        _ILLEGAL: jnp.asarray(is_illegal)[None],
    }
    truncated = state.truncated & jnp.logical_not(state.terminated)
    return Timestep(observation, paid, state.terminated, truncated)


class PgxOptions(JaxOptions, total=False):
    """Keywords of pgx's games, those of every env over JAX (`envkit_bridges.jax.options.JaxOptions`) included.

    Args:
        illegal: what follows an illegal action. "raise": an error, after the step, or after the run that it is part of.
            "library": what pgx does, see `PgxWrapper`.
        categorical_action_encoding: moves as integers, or one-hot.
    """

    illegal: Annotated[Illegal, Default("raise")]
    categorical_action_encoding: Annotated[bool, Default(True)]


class PgxWrapper(SimulatorEnv):
    """Give a game object of pgx the TensorDict interface, for any batch size. One step is a move of one player.

    Entries beside ``observation``, which is what the player sees who is to move, at the root and under ``next``:

    - ``action_mask``: bool (*batch, actions), the legal actions; all are where the game is over. Random actions are
      legal ones.
    - ``current_player``: int64 (*batch,), who is to move.
    - ``illegal_action``: bool (*batch, 1), under ``next`` whether the action of this step was illegal.

    Under ``next`` alone: ``reward``, float32 (*batch, 1), that of the player who moved, and ``player_reward``, float32
    (*batch, players), that of each.

    An illegal action is an error after the step or the run, see `envkit_bridges.worlds.pgx.PgxOptions`. With ``illegal="library"`` pgx's rule
    applies: the game is over, and the player who took it is paid a penalty, -1 in most games.

    Args:
        env: a game of pgx, as `pgx.make` gives it.
        device: where data and simulation are; None takes the CPU.
        **options: see `envkit_bridges.worlds.pgx.PgxOptions`.

    Unknown public attributes are looked up on the game.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no game of pgx.
        ArgumentError: ``illegal`` is none of the two, or ``action_repeat`` would make a move for several players.

    Example:
        >>> import pgx
        >>> from envkit import PgxWrapper
        >>> env = PgxWrapper(pgx.make("connect_four"), batch_size=[3])
        >>> data = env.rollout(5)
        >>> data["next", "player_reward"].shape
        torch.Size([3, 5, 2])
    """

    libname = "pgx"

    def __init__(
        self,
        env: Simulator,
        *,
        device: Device | None = None,
        _make: Callable[[], Any] | None = None,
        **options: Unpack[PgxOptions],
    ):
        if not isinstance(env, require("pgx").Env):
            raise no_object_of("a game object of pgx", "Pgx", env)
        given: dict[str, Any] = {"categorical_action_encoding": True, **options}
        self.illegal = _illegal(given.pop("illegal", "raise"))
        if env.num_players > 1 and given.get("action_repeat", 1) != 1:
            raise ArgumentError(
                f"action_repeat is {given['action_repeat']}, but the {env.num_players} players of {env.id!r} take turns: "
                "an action of one would be repeated by the others. Leave action_repeat out."
            )
        state = jax.eval_shape(env.init, jax.eval_shape(lambda: jax.random.PRNGKey(0)))
        core = PgxCore(env, _make, Discrete(state.legal_action_mask.shape[0]))
        super().__init__(core, device=device, **given)
        self._engine.settings.illegal = _ILLEGAL if self.illegal == "raise" else None

    def _declare(self) -> None:
        super()._declare()
        players = Categorical(
            self._env.num_players, shape=self.batch_size, dtype=torch.int64, device=self.device
        )
        shown = self.full_observation_spec.clone()
        shown[_PLAYER] = players
        self.observation_spec = shown
        self._engine.wide = {(_PLAYER,): torch.int64}

    @property
    def _infos(self) -> frozenset[Path]:
        return super()._infos | {(_ILLEGAL,)}


def _illegal(value: object) -> Illegal:
    fix = "Pass 'raise' for an error after an illegal action, or 'library' for what pgx does."
    require_option("illegal", value, get_args(Illegal), fix=fix)
    return value  # type: ignore[return-value]


def env_names() -> list[str]:
    """List the games that `pgx.make` knows."""
    return sorted(_import_pgx().available_envs())


def fetching_names() -> frozenset[str]:
    """Name the games that are made from the network: none."""
    return frozenset()


def build(name: str, **kwargs: Any) -> PgxEnv:
    """Build one game by its name; see `PgxEnv` for keywords and errors."""
    return PgxEnv(name, **kwargs)


class PgxEnv(PgxWrapper):
    """Make a game of pgx by name; see `PgxWrapper` for its entries.

    Args:
        env_name: its name, e.g. "connect_four".
        device: where data and simulation are; None takes the CPU.
        **options: see `envkit_bridges.worlds.pgx.PgxOptions`.

    Raises:
        ArgumentError: (a ValueError) pgx has no game of that name.

    Example:
        >>> from envkit import PgxEnv
        >>> env = PgxEnv("tic_tac_toe", batch_size=[3])
        >>> env.reset()["action_mask"].shape
        torch.Size([3, 9])
    """

    available_envs: ClassVar[Sequence[str]] = EnvNames(env_names)  # type: ignore[assignment]

    def __init__(
        self, env_name: str, *, device: Device | None = None, **options: Unpack[PgxOptions]
    ):
        require_name("pgx", env_name, env_names())
        make = partial(_game, env_name)
        super().__init__(make(), device=device, _make=make, **options)
        self.env_name = env_name


def _import_pgx() -> ModuleType:
    with quietly():
        return require("pgx")


def _game(name: str) -> Simulator:
    with quietly():
        return _import_pgx().make(name)
