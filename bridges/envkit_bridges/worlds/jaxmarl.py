"""JaxMARL's games of several agents as stateless envs: agents in groups, each a node of the data.

Which agents share a group, and what the entries of a group are called, is as with PettingZoo's games.

Conventions
    step     the library's ``step_env``: its own ``step`` resets what has ended by itself, and is not used.
    agents   by name, in the library's order; a number n stands for "agent_n". Those of a group are alike.
    end      of the game: ``dones["__all__"]``. It is truncated where as many steps were made as the library's limit
             has, else terminated. An agent's flags stay as they were when it ended.
    team     the reward under "__all__", which some games pay the team.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from envkit.data.arguments import as_bool
from envkit.env.groups import GroupMap, complete_group_map
from envkit.errors import ArgumentError, SpecError, SpecTypeError, UnsupportedError
from envkit.functional import AgentsDiscrete, Box, Timestep
from envkit.specs.annotations import Device
from envkit_bridges.jax.options import JaxOptions
from envkit_bridges.jax.simulator import NO_LIMIT, DrawingState, SimulatorCore, SimulatorEnv
from envkit_bridges.libraries import (
    EnvNames,
    Simulator,
    keywords_told,
    no_object_of,
    parameters_of,
    quietly,
    require,
    require_name,
    require_quietly,
)
from envkit_bridges.offscreen import in_memory

if TYPE_CHECKING:
    from envkit.functional.structure import PyTree

_TEAM = "__all__"
_TAKEN = frozenset(
    (
        "action",
        "done",
        "info",
        "metrics",
        "next",
        "reward",
        "state",
        "team_reward",
        "terminated",
        "truncated",
    )
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class JaxMARLState(DrawingState):
    """The library's own state, and which agents have ended before: bool (agents,), in the library's order."""

    ended: jax.Array


@dataclass(frozen=True)
class JaxMARLCore(SimulatorCore):
    """A game of JaxMARL as a `StatelessEnv`; made by `of`.

    ``members``: numbers of agents by group. ``limit``: steps of an episode, None where the library has no limit.
    ``masks``: the method that says which actions are allowed, "" where there is none.
    """

    action_space: Mapping[str, Any] | None = field(default=None, compare=False)
    members: tuple[tuple[str, tuple[int, ...]], ...] = ()
    limit: int | None = None
    masks: str = ""
    use_mask: bool = False
    pays_team: bool = False

    @classmethod
    def of(
        cls,
        env: Simulator,
        make: Callable[[], Any] | None,
        group_map: GroupMap | None,
        use_mask: bool,
    ) -> Self:
        """Read an env object: its agents, their spaces, what it shows.

        Raises:
            SpecError: agents of a group are unlike.
            SpecTypeError: an action is neither a choice nor a bounded array.
        """
        core = cls(env, make, limit=_limit_of(env), masks=_masks_of(env), use_mask=use_mask)
        names = core.names
        observed, state = _in_form(env.reset, jax.random.PRNGKey(0))
        actions = {
            agent: _in_form(env.action_space(agent).sample, jax.random.PRNGKey(0))
            for agent in env.agents
        }
        _, _, rewards, _, _ = _in_form(env.step_env, jax.random.PRNGKey(0), state, actions)
        forms = [
            (
                _form_of(env.action_space(agent)),
                str(_like(_in_form(partial(core._of_agent, number=number), observed))),
            )
            for number, agent in enumerate(env.agents)
        ]
        groups = complete_group_map(names, group_map)
        if group_map is None:
            groups = _alike(groups, {name: forms[number] for number, name in enumerate(names)})
        members = {group: tuple(map(names.index, agents)) for group, agents in groups.items()}
        spaces = {}
        for group, numbers in members.items():
            _require_sense(group, [names[n] for n in numbers], [forms[n] for n in numbers])
            spaces[group] = {
                "action": _space_of([env.action_space(env.agents[n]) for n in numbers])
            }
        return replace(
            core,
            action_space=spaces,
            members=tuple(members.items()),
            pays_team=isinstance(rewards, Mapping) and _TEAM in rewards,
        )

    def lasting(self, steps: int | None) -> Self:
        """Return the game made again with such a limit."""
        if self.limit is None or (steps is not None and steps <= self.limit):
            return self
        limit, kind = NO_LIMIT if steps is None else steps, type(self.env)
        accepted = [name for name in _LIMITS if name in parameters_of(kind)]
        if self.make is None or not accepted:
            raise ArgumentError(
                f"episode_length is {-1 if steps is None else steps}, but {kind.__name__} of JaxMARL ends by itself after "
                f"{self.limit} steps. Make it with another limit, e.g. env_kwargs={{{(accepted or ['max_steps'])[0]!r}: "
                f"{limit}}} where it takes that, or pass at most {self.limit}."
            )
        make = partial(self.make, **{accepted[0]: limit})
        return replace(self, env=make(), make=make, limit=limit)

    @property
    def names(self) -> list[str]:
        """The names of all agents."""
        return [agent if isinstance(agent, str) else f"agent_{agent}" for agent in self.env.agents]

    @property
    def groups(self) -> dict[str, int]:
        """How many agents each group has."""
        return {group: len(numbers) for group, numbers in self.members}

    @property
    def group_map(self) -> dict[str, list[str]]:
        """The names of agents by group."""
        return {group: [self.names[n] for n in numbers] for group, numbers in self.members}

    @property
    def reward_shape(self) -> dict[str, Any]:
        """That of each group, and of the team where the library pays it."""
        shape: dict[str, Any] = {group: {"reward": (n, 1)} for group, n in self.groups.items()}
        return shape | ({"team_reward": (1,)} if self.pays_team else {})

    @property
    def action_masks(self) -> tuple[tuple[tuple[str, str], tuple[str, str]], ...]:
        """Each group's action with its mask, where the library says what is allowed."""
        return tuple(
            ((group, "action"), (group, "action_mask"))
            for group in self.groups
            if self._has_options(group)
        )

    def _has_options(self, group: str) -> bool:
        assert self.action_space is not None
        return bool(self.masks) and isinstance(self.action_space[group]["action"], AgentsDiscrete)

    def reset(self, key: jax.Array) -> tuple[JaxMARLState, Timestep]:
        """Reset by the library's ``reset``."""
        episode, draws = jax.random.split(key)
        observed, inner = self.env.reset(episode)
        none = jnp.zeros(len(self.env.agents), bool)
        state = JaxMARLState(inner, draws, jnp.int32(0), none)
        return state, Timestep(self._shown(observed, inner, none, none), self._unpaid())

    def step(self, state: JaxMARLState, action: PyTree) -> tuple[JaxMARLState, Timestep]:
        """Step by the library's ``step_env``."""
        agents = self.env.agents
        actions = {
            agents[number]: action[group]["action"][place]
            for group, numbers in self.members
            for place, number in enumerate(numbers)
        }
        actions = {agent: actions[agent] for agent in agents}
        observed, inner, rewards, dones, info = self.env.step_env(state.key, state.inner, actions)
        moves = state.moves + 1
        over = _flag(dones[_TEAM])
        is_late = over & (False if self.limit is None else moves >= self.limit)
        # an agent of which the library says nothing ends with the game
        flags = [
            dones.get(agent, dones.get(name, dones[_TEAM]))
            for agent, name in zip(agents, self.names, strict=True)
        ]
        own = jnp.stack([_flag(flag) for flag in flags])
        terminated = state.ended | (own & ~is_late)
        truncated = own & is_late & ~state.ended
        after = replace(state, inner=inner, moves=moves, ended=state.ended | own)
        shown = self._shown(observed, inner, terminated, truncated)
        paid: dict[str, Any] = {
            group: {"reward": self._stacked(numbers, rewards)[:, None].astype(jnp.float32)}
            for group, numbers in self.members
        }
        if self.pays_team:
            paid["team_reward"] = rewards[_TEAM].reshape(1)
        infos = dict(info) if isinstance(info, Mapping) else {}
        return after, Timestep(shown, paid, over & ~is_late, is_late, infos)

    def _unpaid(self) -> dict[str, Any]:
        return jax.tree.map(
            jnp.zeros, self.reward_shape, is_leaf=lambda shape: isinstance(shape, tuple)
        )

    def _of_agent(self, tree: PyTree, number: int) -> PyTree:
        """Return what belongs to an agent: by name, by number, or along the first axis; what has no such axis belongs to all agents."""
        agent, agents = self.env.agents[number], len(self.env.agents)
        if isinstance(tree, Mapping) and agent in tree:
            return tree[agent]
        if isinstance(tree, tuple | list):
            return tree[number]
        return jax.tree.map(
            lambda leaf: leaf[number] if leaf.shape[:1] == (agents,) else leaf, tree
        )

    def _stacked(self, numbers: Sequence[int], tree: PyTree) -> PyTree:
        """Put what is the agents' of a group side by side."""
        parts = [self._of_agent(tree, number) for number in numbers]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)

    def _shown(
        self, observed: PyTree, inner: PyTree, terminated: jax.Array, truncated: jax.Array
    ) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        if isinstance(observed, Mapping) and self.env.agents[0] in observed:
            others = [name for name in observed if name not in self.env.agents]
            shown = {str(name): observed[name] for name in others}
        allowed = getattr(self.env, self.masks)(inner) if self.masks else {}
        for group, members in self.members:
            numbers = jnp.array(members)
            of_group = {
                "observation": self._stacked(members, observed),
                "terminated": terminated[numbers][:, None],
                "truncated": truncated[numbers][:, None],
            }
            if self._has_options(group):
                mask = self._stacked(members, allowed) != 0
                of_group["action_mask"] = mask | ~mask.any(-1, keepdims=True)
            if self.use_mask:
                of_group["mask"] = jnp.ones(len(members), bool)
            shown[group] = of_group
        return shown

    def render(self, states: Sequence[Any]) -> list[np.ndarray]:
        """Draw the games of MPE by the library's visualizer, with matplotlib, and those of STORM by their ``render``.

        Raises:
            UnsupportedError: (a NotImplementedError) the library has no picture in memory of the others.
        """
        module = type(self.env).__module__
        if ".storm." in module:
            return [self._storm(jax.tree.map(np.asarray, state)) for state in states]
        if ".mpe." not in module:
            raise UnsupportedError(
                f"{type(self.env).__name__} of JaxMARL cannot be drawn here; games of MPE and STORM can. Plot what it "
                "observes, or hand env.unpack(td['state']) to a visualizer of the library."
            )
        frames = []
        for state in states:
            with in_memory() as frame, quietly():
                visualizer = require("jaxmarl.environments.mpe.mpe_visualizer").MPEVisualizer
                visualizer(self.env, [state])
                frames.append(frame())
        return frames

    def _storm(self, state: Any) -> np.ndarray:
        """Draw a game of STORM by the library's ``render``, and below it how many inner and outer steps are over.

        The library draws these two white bars too, but as int8, and NumPy 2 refuses its 255. At time 0 they are empty.
        """
        frame = np.array(self.env.render(replace(state, step=0, outer_t=0)))
        width = frame.shape[1]
        bar = 32  # pixels, also of a cell
        inner, outer = width // self.env.num_inner_steps, width // self.env.num_outer_steps
        frame[-2 * bar : -bar, : int(state.step) * inner] = 255
        frame[-bar:, : int(state.outer_t) * outer] = 255
        return frame


def _flag(value: jax.typing.ArrayLike) -> jax.Array:
    return jnp.asarray(value, bool).reshape(())


def _in_form(function: Callable[..., Any], *args: PyTree) -> PyTree:
    with quietly():
        return jax.eval_shape(function, *args)


def _like(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: (tuple(leaf.shape), str(leaf.dtype)), tree)


_LIMITS = ("max_steps", "episode_length")
"""Keywords of games that are their limit of steps."""


def _limit_of(env: Simulator) -> int | None:
    """Find after how many steps the library ends an episode."""
    inner = getattr(env, "num_inner_steps", None)
    if inner is not None:
        return int(inner) * int(env.num_outer_steps)
    limit = getattr(env, "max_steps", getattr(env, "episode_length", None))
    return None if limit is None else int(limit)


def _masks_of(env: Simulator) -> str:
    """Return the name of the method of an env that says which actions are allowed."""
    bare = require("jaxmarl.environments.multi_agent_env").MultiAgentEnv
    if type(env).get_avail_actions is not bare.get_avail_actions:
        return "get_avail_actions"
    return "get_legal_moves" if hasattr(env, "get_legal_moves") else ""


def _form_of(space: Any) -> str:
    """Describe an action space, alike for spaces that hold the same."""
    bounds = [np.asarray(getattr(space, name, 0)).tolist() for name in ("low", "high", "n")]
    return f"{type(space).__name__}{bounds}{space.shape}"


def _alike(groups: Mapping[str, Sequence[str]], forms: Mapping[str, Any]) -> dict[str, list[str]]:
    """Divide groups whose agents are unlike."""
    alike: dict[str, list[str]] = {}
    for group, agents in groups.items():
        is_even = len({forms[agent] for agent in agents}) == 1
        alike |= {group: list(agents)} if is_even else {agent: [agent] for agent in agents}
    return alike


def _require_sense(group: str, agents: Sequence[str], forms: Sequence[Any]) -> None:
    if group in _TAKEN:
        raise ArgumentError(
            f"group_map has a group {group!r}, but an entry of that name means something else here. Call it otherwise."
        )
    if len(set(forms)) > 1:
        raise SpecError(
            f"the agents {list(agents)} of group {group!r} observe or act in unlike shapes, which cannot lie side by "
            "side in a program. Put them into separate groups: group_map=MarlGroupMapType.ONE_GROUP_PER_AGENT."
        )


def _space_of(spaces: Sequence[Any]) -> AgentsDiscrete | Box:
    """Return the space of the actions of agents that are alike.

    Raises:
        SpecTypeError: they are neither choices nor bounded arrays.
    """
    library = require("jaxmarl.environments.spaces")
    first, count = spaces[0], len(spaces)
    if isinstance(first, library.Discrete):
        return AgentsDiscrete.of(int(first.n), count)
    if isinstance(first, library.Box):
        shape = (count, *first.shape)
        low, high = (np.broadcast_to(np.asarray(side), shape) for side in (first.low, first.high))
        return Box(low, high, shape, first.dtype)
    raise SpecTypeError(
        f"the action space of this env of JaxMARL is {type(first).__name__}, but JaxMARLEnv takes Discrete and Box. "
        "Have the env take one of these."
    )


class JaxMARLOptions(JaxOptions, total=False):
    """Keywords of JaxMARL's envs, those of every env over JAX (`envkit_bridges.jax.options.JaxOptions`) included.

    Args:
        group_map: names of agents by group, or a `MarlGroupMapType`. By default agents called ``name_<int>`` share the
            group ``name`` if they are alike; others are alone.
        use_mask: add the flags ``mask`` of each group: which agents act in the next step.
        categorical_action_encoding: choices as integers, or one-hot.
    """

    group_map: GroupMap | None
    use_mask: bool
    categorical_action_encoding: bool


class JaxMARLWrapper(SimulatorEnv):
    """Give an env object of JaxMARL the TensorDict interface, for any batch size.

    Entries of each group, whose leading axis are its agents: ``observation``, ``action``, ``reward`` (float32), the
    flags ``done``, ``terminated`` and ``truncated``, ``mask`` with ``use_mask``, ``action_mask`` where the library
    says which actions are allowed (random actions obey it). The flags of the root say when the whole game has ended.

    Args:
        env: a ``MultiAgentEnv`` of JaxMARL.
        device: where data and simulation are; None takes the CPU.
        **options: see `envkit_bridges.worlds.jaxmarl.JaxMARLOptions`.

    Attributes:
        group_map: the names of agents by group.

    Unknown public attributes are looked up on the JaxMARL env.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no env of JaxMARL, or ``group_map`` is none.
        ArgumentError: (a ValueError) an agent is in no group or in several; the env resets by itself.
        SpecError: agents of a group are unlike.
        SpecTypeError: an action is neither a choice nor a bounded array.

    Example:
        >>> import jaxmarl
        >>> from envkit import JaxMARLWrapper
        >>> env = JaxMARLWrapper(jaxmarl.make("MPE_simple_spread_v3"), batch_size=[8])
        >>> env.action_spec.shape
        torch.Size([8, 3])
    """

    libname = "jaxmarl"
    _core: JaxMARLCore

    def __init__(
        self, env: Simulator, *, device: Device | None = None, **options: Unpack[JaxMARLOptions]
    ):
        _require_bare(env)
        keywords: dict[str, Any] = {"categorical_action_encoding": True, **options}
        use_mask = as_bool("use_mask", keywords.pop("use_mask", False))
        core = JaxMARLCore.of(env, self._maker, keywords.pop("group_map", None), use_mask)
        super().__init__(core, device=device, **keywords)

    @property
    def group_map(self) -> dict[str, list[str]]:
        """The names of agents by group."""
        return self._core.group_map


def _require_bare(env: Simulator) -> None:
    require_quietly(_REGISTRATION)  # first, so that what is imported next prints nothing
    kind = require("jaxmarl.environments.multi_agent_env").MultiAgentEnv
    if not isinstance(env, kind):
        raise no_object_of("an env object of JaxMARL, as jaxmarl.make gives", "JaxMARL", env)
    if getattr(env, "auto_reset", False):
        raise ArgumentError(
            f"{type(env).__name__} was made with auto_reset=True, and resets episodes itself. Make it with "
            "auto_reset=False."
        )


_MABRAX = frozenset(("ant_4x2", "halfcheetah_6x1", "hopper_3x1", "humanoid_9|8", "walker2d_2x3"))
_ROBOTARIUM = "JaxRobotarium"
_REGISTRATION = "jaxmarl.registration"


def env_names() -> list[str]:
    """List the envs that can be made here: MABrax needs Brax, and those of JaxRobotarium a package of that name."""
    registration = require_quietly(_REGISTRATION)
    return sorted(
        name
        for name in registration.registered_envs
        if (registration.SUBMODULE_ENVIRONMENTS or not name.startswith(_ROBOTARIUM))
        and (registration.MABRAX_AVAILABLE or name not in _MABRAX)
    )


class JaxMARLEnv(JaxMARLWrapper):
    """Make an env of JaxMARL by name; see `JaxMARLWrapper` for its entries.

    Args:
        env_name: registered name, e.g. "MPE_simple_spread_v3".
        env_kwargs: keywords of the library for this env, e.g. ``{"num_agents": 5}``.
        device: where data and simulation are; None takes the CPU.
        **options: see `envkit_bridges.worlds.jaxmarl.JaxMARLOptions`.

    Raises:
        ArgumentError: (a ValueError) JaxMARL has no env of that name here.
        OptionError: (a TypeError) the env does not know one of ``env_kwargs``.

    Example:
        >>> from envkit import JaxMARLEnv
        >>> env = JaxMARLEnv("MPE_simple_spread_v3", batch_size=[8])
        >>> env.group_map
        {'agent': ['agent_0', 'agent_1', 'agent_2']}
        >>> env.observation_spec["agent", "observation"].shape
        torch.Size([8, 3, 18])
    """

    available_envs: ClassVar[Sequence[str]] = EnvNames(env_names)  # type: ignore[assignment]

    def __init__(
        self,
        env_name: str,
        *,
        env_kwargs: Mapping[str, Any] | None = None,
        device: Device | None = None,
        **options: Unpack[JaxMARLOptions],
    ):
        require_name("JaxMARL", env_name, env_names())
        keywords = dict(env_kwargs or {})
        self.env_name, self._maker = env_name, partial(_environment, env_name, **keywords)
        self._made_with = {"env_kwargs": keywords} if keywords else {}

        def accepted() -> list[str]:
            return parameters_of(type(_environment(env_name)))

        with keywords_told(f"{env_name} of JaxMARL", keywords, accepted):
            env = self._maker()
        super().__init__(env, device=device, **options)


def _environment(name: str, **kwargs: Any) -> Simulator:
    with quietly():
        if name in _MABRAX:
            kwargs = {"auto_reset": False, **kwargs}
        return require(_REGISTRATION).make(name, **kwargs)
