"""VMAS, a simulator of several agents in torch: its scenarios as environments of many rows, agents in groups.

Which entries there are, and which agents share a group, is as with TorchRL's wrapper. `envkit_bridges.gym.torch_rows`
decides about steps and resets of rows.

Conventions
    agents   by name, in the library's order; those of a group are alike, and lie along the axis behind the rows.
    numbers  as in `envkit_bridges.gym.global_numbers`. The library keeps one set for all of its envs; here each env has its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, Unpack

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from envkit import rules
from envkit.arrays.integers import as_int
from envkit.data.arguments import as_bool
from envkit.data.paths import Key
from envkit.data.plain import from_plain, plain
from envkit.env.groups import GroupMap, MarlGroupMapType, complete_group_map
from envkit.env.options import TAKEN_HERE, EnvOptionsWithoutSeed
from envkit.env.seeding import checked_seed, drawn_seed, seed_of_32_bits
from envkit.errors import ArgumentError, ArgumentTypeError, InputError, OptionError, SpecError
from envkit.process_wide import alone
from envkit.specs import Composite, Unbounded
from envkit.specs.annotations import Device, as_device
from envkit.specs.stacks import stack
from envkit_bridges.gym.codecs import codec_at
from envkit_bridges.gym.global_numbers import (
    Numbers,
    device_numbers,
    numbers_now,
    set_device_numbers,
    set_numbers,
)
from envkit_bridges.gym.torch_leaves import TorchLeaves
from envkit_bridges.gym.torch_rows import TorchRowsEnv
from envkit_bridges.libraries import (
    EnvNames,
    Simulator,
    no_object_of,
    quietly,
    require_name,
    require_quietly,
)


class _Group(NamedTuple):
    """Agents that share a node.

    Attributes:
        name: of the node.
        members: their numbers in the library's order.
        action: the leaves of the action of one of them.
        infos: shapes of the infos that all of them have, by name.
    """

    name: str
    members: tuple[int, ...]
    action: TorchLeaves
    infos: Mapping[str, tuple[int, ...]]


class VmasWrapper(TorchRowsEnv):
    """Show an env object of VMAS as an env of TensorDicts; batch-locked, batch size ``(num_envs,)``.

    Entries of each group, whose axis behind the rows are its agents: ``observation``, ``action``, ``reward`` (float32) and
    ``("info", name)`` (float32) for the infos that the scenario shows after a reset. Infos are those of a step, and zero
    where an episode begins. The flags are those of the whole row; ``truncated`` says that ``max_steps`` were made.

    Args:
        env: what ``vmas.make_env`` returns, without a wrapper of VMAS. Its ``terminated_truncated`` is set.
        categorical_actions: integers for discrete actions; False spells them one-hot.
        group_map: names of agents by group, or a `MarlGroupMapType`. By default agents called ``name_<int>`` share the group
            ``name``, called "agents" where it is the only one, "agent"; if a name has another form, all are in "agents".
        seed: of the resets, and of random actions. None draws one from torch's global generator.
        from_pixels: add ``pixels``, uint8 (num_envs, height, width, 3). Each row is drawn by itself.
        pixels_only: with ``from_pixels``, leave observations out.
        device: where data is delivered; None leaves it on the device of the simulator.
        **options: of every env, see `envkit.env.options.EnvOptions`.

    Attributes:
        group_map: the names of agents by group.
        agent_names: all of them, in the library's order.

    Random numbers are the env's own, so that envs which are stepped in turns give what each gives alone. A `state_dict`
    holds them. Unknown public attributes are looked up on the VMAS env.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no env of VMAS, or ``group_map`` is none.
        ArgumentError: (a ValueError) an agent is in no group or in several.
        SpecError: (a ValueError) agents of a group are unlike.

    Example:
        >>> import vmas
        >>> from envkit import VmasWrapper
        >>> env = VmasWrapper(vmas.make_env("balance", num_envs=4, max_steps=100))
        >>> env.rollout(3)["agents", "observation"].shape
        torch.Size([4, 3, 3, 16])
        >>> env.close()
    """

    libname = "vmas"

    def __init__(
        self,
        env: Simulator,
        categorical_actions: bool = True,
        group_map: GroupMap | None = None,
        *,
        seed: int | None = None,
        from_pixels: bool = False,
        pixels_only: bool = False,
        device: Device | None = None,
        **options: Unpack[EnvOptionsWithoutSeed],
    ):
        _require_bare(env)
        env.terminated_truncated = True
        self._numbers = numbers_now(env.device)
        super().__init__(
            env, num_envs=env.num_envs, simulator_device=env.device, device=device, **options
        )
        self.categorical_actions = as_bool("categorical_actions", categorical_actions)
        self.from_pixels = as_bool("from_pixels", from_pixels)
        self.pixels_only = as_bool("pixels_only", pixels_only) and self.from_pixels
        self.agent_names = names = [agent.name for agent in env.agents]
        self.group_map = complete_group_map(
            names, _groups_by_name(names) if group_map is None else group_map
        )
        self._declare()
        if seed is None:
            seed = drawn_seed()
        else:
            seed = checked_seed(seed)
            self._seed_actions(seed)
        self._seed_simulator(seed)  # last: a look at observations may draw

    def _declare(self) -> None:
        env, device, names = self._env, self.device, self.agent_names
        with self._own_numbers():
            observed = env.get_from_scenario(
                get_observations=True,
                get_rewards=False,
                get_infos=True,
                get_dones=False,
                dict_agent_names=False,
            )
        specs: dict[str, Composite] = {"action": Composite(), "reward": Composite()}
        shown, self._groups = Composite(), list[_Group]()
        for name, agents in self.group_map.items():
            members = tuple(map(names.index, agents))
            parts = [self._form(number, *(each[number] for each in observed)) for number in members]
            self._require_alike(name, agents, [(part.action, part.observation) for part in parts])
            infos = _shared([part.infos for part in parts])
            codec = codec_at(parts[0].space, ("action",), categorical=self.categorical_actions)
            self._groups.append(_Group(name, members, TorchLeaves(codec), infos))
            count = len(members)
            specs["action"][name] = stack([codec.spec() for _ in members])
            specs["reward"][name] = Composite(
                reward=Unbounded((count, 1), dtype=torch.float32), shape=(count,)
            )
            node = Composite(shape=(count,))
            if not self.pixels_only:
                node.update(stack([parts[0].observation for _ in members]))
            if infos:
                numbers = {
                    key: Unbounded(shape, dtype=torch.float32) for key, shape in infos.items()
                }
                node["info"] = stack([Composite(numbers) for _ in members])
            if not node.is_empty():
                shown[name] = node
        if self.from_pixels:
            shown["pixels"] = Unbounded(self._frames().shape[1:], dtype=torch.uint8)
        batch = self.batch_size
        self.observation_spec = shown.to(device).expand(batch)
        self.action_spec = specs["action"].to(device).expand(batch)
        self.reward_spec = specs["reward"].to(device).expand(batch)
        self.done_spec = self._flag_specs()

    def _form(self, number: int, observation: Any, infos: Mapping[str, torch.Tensor]) -> _Form:
        """Describe one agent."""
        agent = self._env.agents[number]
        space = self._env.get_agent_action_space(agent)
        observed = self._env.get_agent_observation_space(agent, observation)
        codec = codec_at(observed, ("observation",), categorical=True)
        shapes = {name: tuple(_with_axis(value).shape[1:]) for name, value in infos.items()}
        return _Form(space, str(space), codec.spec(), shapes)

    @staticmethod
    def _require_alike(group: str, agents: Sequence[str], forms: Sequence[Any]) -> None:
        if any(form != forms[0] for form in forms):
            raise SpecError(
                f"the agents {list(agents)} of group {group!r} observe or act in unlike shapes, which cannot lie side by side. "
                "Put them into separate groups: group_map=MarlGroupMapType.ONE_GROUP_PER_AGENT."
            )
        if group in _TAKEN:
            raise ArgumentError(
                f"group_map has a group {group!r}, but an entry of that name means something else here. Call it otherwise."
            )

    def _repr_arguments(self) -> list[str]:
        return [str(type(self._env.scenario).__name__)]

    # --------------------------------------------------------------------------------- random numbers

    @contextmanager
    def _own_numbers(self) -> Iterator[None]:
        """Let the library draw from this env's numbers; all others are as they were afterwards, also where it raises."""
        with alone():
            shared: Numbers = type(self._env).vmas_random_state
            theirs, outside = list(shared), numbers_now(self._env.device)
            shared[:] = self._numbers[:3]
            set_device_numbers(self._env.device, self._numbers[3])
            try:
                yield
                self._numbers = [*shared, device_numbers(self._env.device)]
            except BaseException:  # the library puts those of the CPU back where it does not raise
                set_numbers(outside, self._env.device)
                raise
            finally:
                shared[:] = theirs
                set_device_numbers(self._env.device, outside[3])

    def _seed_simulator(self, seed: int | None) -> None:
        with self._own_numbers():
            self._env.seed(None if seed is None else seed_of_32_bits(seed))

    def _simulator_state(self) -> dict[str, Any]:
        return {**super()._simulator_state(), "numbers": plain(self._numbers, "random numbers")}

    def _restore_simulator(self, state: Mapping[str, Any]) -> None:
        super()._restore_simulator(state)
        self._numbers = from_plain(state["numbers"])

    # ------------------------------------------------------------------------------- steps and resets

    def _advance(self, td: TensorDictBase) -> TensorDict:
        actions = self._actions_by_agent(self._actions_in(td))
        with self._own_numbers():
            try:
                result = self._env.step(actions)
            except AssertionError as error:
                raise InputError(
                    f"VMAS does not take this action: {error}. Bring it there, e.g. with env.action_spec.project(action), or "
                    "make the env with clamp_actions=True."
                ) from error
        observations, rewards, terminated, truncated, infos = result
        flags = [flag.reshape(-1, 1) for flag in (terminated, truncated)]
        entries = {"done": rules.done_from(*flags), "terminated": flags[0], "truncated": flags[1]}
        return self._shown(_listed(observations), _listed(infos), _listed(rewards), entries)

    def _actions_by_agent(self, action: Any) -> list[torch.Tensor]:
        """Turn the actions of groups into what the library takes: a tensor for each agent."""
        taken: dict[int, torch.Tensor] = {}
        for group in self._groups:
            is_one = isinstance(action, torch.Tensor)
            of_group = action if is_one else action.get((group.name, "action"))
            for place, number in enumerate(group.members):
                own = self._for_simulator(of_group[:, place])
                taken[number] = group.action.taken({("action",): own})
        return [taken[number] for number in range(len(taken))]

    def _action_entry(self) -> Key | None:
        return (self._groups[0].name, "action") if len(self._groups) == 1 else None

    def _begin(self, rows: torch.Tensor | None, **kwargs: Any) -> TensorDict:
        env = self._env
        if kwargs.get("seed") is not None:
            kwargs["seed"] = seed_of_32_bits(checked_seed(kwargs["seed"]))
        with self._own_numbers():
            if rows is None or bool(rows.all()):
                env.reset(return_observations=False, **kwargs)
            else:
                for row in rows.nonzero().flatten().tolist():
                    env.reset_at(row, return_observations=False, **kwargs)
            (observations,) = env.get_from_scenario(
                get_observations=True,
                get_rewards=False,
                get_infos=False,
                get_dones=False,
                dict_agent_names=False,
            )
        return self._shown(observations)

    def _shown(
        self,
        observations: Sequence[Any],
        infos: Sequence[Any] | None = None,
        rewards: Sequence[torch.Tensor] | None = None,
        flags: Mapping[str, torch.Tensor] | None = None,
    ) -> TensorDict:
        """Write a moment down, group by group; without ``infos``, which a scenario has of a step, these are 0."""
        entries: dict[str, Any] = dict(flags or {})
        for group in self._groups:
            shown: dict[str, Any] = {}
            if not self.pixels_only:
                shown["observation"] = _stacked([observations[n] for n in group.members])
            if group.infos:
                shown["info"] = {
                    name: self._zeros(group, shape)
                    if infos is None
                    else _stacked([infos[number][name] for number in group.members])
                    for name, shape in group.infos.items()
                }
            if rewards is not None:
                shown["reward"] = _stacked([rewards[number] for number in group.members])
            if shown:
                entries[group.name] = self._node(shown, len(group.members))
        if self.from_pixels:
            entries["pixels"] = self._frames()
        made = TensorDict._new_unsafe(
            entries, batch_size=self.batch_size, device=self._simulator_device
        )
        return made if self.device == self._simulator_device else made.to(self.device)

    def _zeros(self, group: _Group, shape: tuple[int, ...]) -> torch.Tensor:
        size = (*self.batch_size, len(group.members), *shape)
        return torch.zeros(size, device=self._simulator_device)

    def _node(self, entries: Mapping[str, Any], agents: int) -> TensorDict:
        """Build the node of a group."""
        nested = {
            name: self._node(value, agents) if isinstance(value, Mapping) else value
            for name, value in entries.items()
        }
        size = torch.Size((*self.batch_size, agents))
        return TensorDict._new_unsafe(nested, batch_size=size, device=self._simulator_device)

    # --------------------------------------------------------------------------------------- pictures

    def render(
        self, mode: str = "rgb_array", env_index: int = 0, *args: object, **kwargs: object
    ) -> Any:
        """Draw one row by the library's ``render``, which needs pyglet and a display or EGL.

        Args:
            mode: "rgb_array" returns an array, uint8 (height, width, 3), and "human" opens a window.
            env_index: the row.
            args, kwargs: others of the library's ``render``; ``agent_index_focus`` is the agent to follow.
        """
        with self._own_numbers(), quietly():
            return self._env.render(mode, env_index, *args, **kwargs)

    def _frames(self) -> torch.Tensor:
        frames = [self.render(env_index=row) for row in range(self.numel())]
        return torch.from_numpy(np.stack(frames)).to(self._simulator_device)


class _Form(NamedTuple):
    """What is compared of the agents of a group: how one acts, what it observes, and shapes of its infos by name."""

    space: Any
    action: str
    observation: Composite
    infos: Mapping[str, tuple[int, ...]]


_TAKEN = frozenset(("done", "next", "pixels", "terminated", "truncated"))


def _groups_by_name(names: Sequence[str]) -> GroupMap:
    """Group agents by name as TorchRL does."""
    stems = [name.rpartition("_") for name in names]
    if not all(stem and number.isdigit() for stem, _, number in stems):
        return MarlGroupMapType.ALL_IN_ONE_GROUP
    groups: dict[str, list[str]] = {}
    for name, (stem, _, _) in zip(names, stems, strict=True):
        groups.setdefault(stem, []).append(name)
    return {"agents": groups["agent"]} if list(groups) == ["agent"] else groups


def _shared(infos: Sequence[Mapping[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    """Return the infos that all agents of a group have in one shape."""
    first = infos[0]
    return {
        name: shape
        for name, shape in first.items()
        if all(other.get(name) == shape for other in infos)
    }


def _with_axis(value: torch.Tensor) -> torch.Tensor:
    """Return values with an axis behind the rows, of size 1 where each row has one number."""
    return value[:, None] if value.ndim == 1 else value


def _stacked(values: Sequence[Any]) -> Any:
    """Put what is the agents' side by side, in float32; dicts member by member."""
    if isinstance(values[0], Mapping):
        return {name: _stacked([value[name] for value in values]) for name in values[0]}
    return torch.stack([_with_axis(value).to(torch.float32) for value in values], 1)


def _listed(by_agent: Any) -> Sequence[Any]:
    """Return what is the agents' in the library's order: envs that were made with dict_spaces give dicts."""
    return list(by_agent.values()) if isinstance(by_agent, Mapping) else by_agent


def _require_bare(env: Any) -> None:
    bare = require_quietly("vmas.simulator.environment").Environment
    if not isinstance(env, bare):
        raise no_object_of("what vmas.make_env returns without a wrapper", "Vmas", env)


def env_names() -> list[str]:
    """List the scenarios that the library names."""
    library = require_quietly("vmas")
    return sorted([*library.scenarios, *library.debug_scenarios, *library.mpe_scenarios])


class VmasEnv(VmasWrapper):
    """Make an env of VMAS by the name of a scenario; see `VmasWrapper` for its entries.

    Args:
        scenario: a name, see ``VmasEnv.available_envs``, or a ``BaseScenario`` of yours.
        num_envs: rows, the batch size.
        continuous_actions: False: each agent chooses among options. ``multidiscrete_actions=True`` gives them an axis each.
        max_steps: truncate episodes after so many steps; None: never.
        categorical_actions, group_map, seed, from_pixels, pixels_only: see `VmasWrapper`.
        scenario_kwargs: keywords of the scenario, e.g. ``{"n_agents": 5}``; they may be passed by themselves too.
        device: where the simulator runs and data is; None is the CPU.
        **kwargs: of ``vmas.make_env``: ``grad_enabled=True`` lets gradients flow through steps, ``clamp_actions=True`` clips
            actions that are out of range, which are errors otherwise; those of the scenario; and options of every env, see
            `envkit.env.options.EnvOptions`.

    Raises:
        UnknownEnvError: (a ValueError) VMAS has no scenario of that name.
        ArgumentError: (a ValueError) ``num_envs`` or ``max_steps`` is below 1.
        OptionError: (a TypeError) a keyword is unknown.

    Example:
        >>> from envkit import VmasEnv
        >>> env = VmasEnv("balance", 4, max_steps=100, n_agents=2)
        >>> env.group_map
        {'agents': ['agent_0', 'agent_1']}
        >>> env.rollout(3)["next", "agents", "reward"].shape
        torch.Size([4, 3, 2, 1])
        >>> env.close()
    """

    available_envs: ClassVar[Sequence[str]] = EnvNames(env_names)  # type: ignore[assignment]

    def __init__(
        self,
        scenario: Any,
        num_envs: int,
        *,
        continuous_actions: bool = True,
        max_steps: int | None = None,
        categorical_actions: bool = True,
        group_map: GroupMap | None = None,
        seed: int | None = None,
        from_pixels: bool = False,
        pixels_only: bool = False,
        scenario_kwargs: Mapping[str, Any] | None = None,
        device: Device | None = None,
        **kwargs: Any,
    ):
        self.scenario_name = _require_scenario(scenario)
        count = as_int("num_envs", num_envs, least=1, meaning="the number of rows")
        if max_steps is not None:
            max_steps = as_int("max_steps", max_steps, least=1, meaning="the limit of episodes")
        options = {name: kwargs.pop(name) for name in TAKEN_HERE if name in kwargs}
        of_scenario = {**(scenario_kwargs or {}), **kwargs}
        env = _build(
            scenario,
            num_envs=count,
            device=as_device(device),
            continuous_actions=as_bool("continuous_actions", continuous_actions),
            max_steps=max_steps,
            **of_scenario,
        )
        super().__init__(
            env,
            categorical_actions,
            group_map,
            seed=seed,
            from_pixels=from_pixels,
            pixels_only=pixels_only,
            **options,
        )

    def _repr_arguments(self) -> list[str]:
        return [repr(self.scenario_name)]


def _require_scenario(scenario: Any) -> str:
    if isinstance(scenario, str):
        require_name("VMAS", scenario, env_names())
        return scenario
    if not isinstance(scenario, require_quietly("vmas.simulator.scenario").BaseScenario):
        raise ArgumentTypeError(
            f"scenario is {scenario!r}, of type {type(scenario).__name__}, but must be a name or a BaseScenario of VMAS. Pass "
            "'balance', for example. An env object goes to VmasWrapper."
        )
    return type(scenario).__name__


def _build(scenario: Any, **kwargs: Any) -> Simulator:
    """Make an env of the library; the numbers that all of its envs share are as they were."""
    library = require_quietly("vmas")
    with alone():
        shared: Numbers = library.simulator.environment.Environment.vmas_random_state
        theirs, outside = list(shared), numbers_now(kwargs["device"])
        try:
            with quietly():
                warnings.filterwarnings("error", "Scenario kwargs")
                return library.make_env(scenario, **kwargs)
        except Warning as unused:
            raise OptionError(f"{unused} Leave them out, or correct their names.") from unused
        finally:
            shared[:] = theirs
            set_numbers(outside, kwargs["device"])


def build(name: str, *, num_workers: int, **kwargs: Any) -> VmasEnv:
    """Make an env of ``num_workers`` rows.

    Raises:
        UnknownEnvError: (a ValueError) the library has no scenario of this name.
    """
    return VmasEnv(name, num_workers, **kwargs)
