"""What bridges refuse, and with which way out."""

from __future__ import annotations

from functools import cache, partial

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import torch
from tensordict import TensorDict

import envkit
from envkit import (
    GymEnv,
    GymWrapper,
    PendulumEnv,
    PettingZooEnv,
    PettingZooWrapper,
    SerialEnv,
    TicTacToeEnv,
    cache_dir,
    check_env_specs,
    make,
    to_gym_vector,
)
from envkit.env.groups import complete_group_map
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceNameError,
    DoneError,
    HandoffError,
    OptionError,
    SpecError,
)
from envkit.functional import Box, Discrete, Timestep
from envkit.specs import OneHot
from envkit_bridges.dlpack import jax_device_of, to_jax, to_torch, torch_dtype_of
from envkit_bridges.exports.gym_registry import gym_env_of
from envkit_bridges.exports.torchrl import TorchRLWrapper
from envkit_bridges.exports.torchrl_specs import from_torchrl_spec
from envkit_bridges.gym.backend import set_gym_backend
from envkit_bridges.gym.like import GymLikeEnv
from envkit_bridges.jax.jax_env import JaxEnv
from envkit_bridges.policy.compiled import compile_policy
from envkit_bridges.worlds import native
from envkit_bridges.worlds.brax import BraxEnv, BraxWrapper
from tests.zoo.envs import Count
from tests.zoo.gym_envs import Informed
from tests.zoo.pettingzoo_games import Fading
from tests.zoo.refusals import assert_refused, each_row
from tests.zoo.walkers import Pendulum


class BornDone:
    action_space = Box(-1.0, 1.0, (1,))

    def reset(self, key):
        return key, Timestep(key[:1] * 0.0, terminated=True)

    def step(self, state, action):
        return state, Timestep(action)


JAX = partial(JaxEnv, Pendulum(), device="cpu")


def faced(**options):
    """An env behind gym's protocol, reset."""
    env = gym_env_of(Count(), "gymnasium", **{"info_keys": None, "to_numpy": False, **options})
    env.reset()
    return env


class Untold(GymLikeEnv):
    """Declares an action and no observation."""

    def __init__(self):
        super().__init__(Informed())
        self.action_spec = OneHot(2)


@cache
def rows() -> SerialEnv:
    env = SerialEnv(2, Count)
    env.reset()
    return env


@cache
def pendulums() -> JaxEnv:
    return JaxEnv(Pendulum(), batch_size=[2])


def masked(declared) -> JaxEnv:
    """Make an env of two entries, whose declaration of masks is given."""

    class Masked:
        action_space = Discrete(3)
        action_masks = declared

        def reset(self, key):
            seen = {"observation": jnp.zeros(2), "action_mask": jnp.ones(3, bool)}
            return jnp.int32(0), Timestep(seen)

        def step(self, state, action):
            return state, self.reset(None)[1]

    return JaxEnv(Masked(), batch_size=[2])


REFUSALS = [
    # -- gym's registry, check_env_specs
    (
        "an id that is a number",
        lambda: Count.register_gym(3),
        TypeError,
        "id is 3.*must be a string",
    ),
    (
        "an episode of no step",
        lambda: Count.register_gym("Never-v0", max_episode_steps=0),
        ValueError,
        "max_episode_steps is 0.*None for no limit",
    ),
    (
        "infos that are a number",
        lambda: faced(info_keys=3),
        TypeError,
        "info_keys is 3.*list of keys",
    ),
    (
        "a word as action",
        lambda: faced().step("a"),
        TypeError,
        "'action' is 'a', of type str.*Pass",
    ),
    ("no action", lambda: faced().step(None), TypeError, "'action' is None.*Pass numbers"),
    (
        "a check of a number",
        lambda: check_env_specs(3),
        TypeError,
        "env is 3, of type int.*must be an env of envkit",
    ),
    (
        "a check of a class",
        lambda: check_env_specs(Count),
        TypeError,
        r"the class Count.*Build one: Count\(\.\.\.\)",
    ),
    # -- wrappers, gym
    (
        "a backend that is a number",
        lambda: set_gym_backend(3),
        TypeError,
        "backend is 3, of type int.*gymnasium, gym",
    ),
    (
        "an env with that backend",
        lambda: GymEnv("CartPole-v1", backend=3),
        TypeError,
        "backend is 3",
    ),
    (
        "a name that is wrapped",
        lambda: GymWrapper("Pendulum-v1"),
        TypeError,
        r"'Pendulum-v1', of type str.*GymEnv\('Pendulum-v1'\)",
    ),
    ("a number that is wrapped", lambda: GymWrapper(3), TypeError, "given 3, of type int.*GymEnv"),
    (
        "an env as a name",
        lambda: GymEnv(gymnasium.make("CartPole-v1")),
        TypeError,
        r"env_name is .*CartPole.*Use GymWrapper\(env\)",
    ),
    ("a number as a name", lambda: GymEnv(3), TypeError, "env_name is 3.*name of a registered env"),
    (
        "a vector of words",
        lambda: GymEnv("CartPole-v1", num_envs="a"),
        TypeError,
        "num_envs is 'a'.*or 0 for one env",
    ),
    (
        "a gym batch that is a number",
        lambda: GymEnv("CartPole-v1", batch_size=3),
        TypeError,
        "batch_size is 3",
    ),
    (
        "a reader that is a number",
        lambda: GymWrapper(Informed()).set_info_dict_reader(3),
        TypeError,
        r"info reader is 3.*reader\(info, td\)",
    ),
    (
        "an observation nobody declared",
        lambda: Untold().reset(),
        ValueError,
        "Untold declares no observation spec.*_make_specs",
    ),
    # -- JAX and Brax
    (
        "a brax name that is wrapped",
        lambda: BraxWrapper("fast", device="cpu"),
        TypeError,
        r"'fast', of type str.*BraxEnv\('fast'\)",
    ),
    (
        "caches cleared before a step",
        lambda: JAX(cache_clear_frequency=-1),
        ValueError,
        "cache_clear_frequency is -1.*False for never",
    ),
    *(
        (name, *row)
        for name, row in {
            f"caches cleared {often!r}": (
                partial(JAX, cache_clear_frequency=often),
                TypeError,
                f"cache_clear_frequency is {often!r}",
            )
            for often in ("x", True, 1.5)
        }.items()
    ),
    (
        "a number to unpack",
        lambda: JAX().unpack(3),
        TypeError,
        r'state is of type int.*td\["state"\]',
    ),
    ("no state to unpack", lambda: JAX().unpack(TensorDict()), KeyError, "no 'floats', 'words'"),
    ("a number to pack", lambda: JAX().pack(3), TypeError, "nested is of type int.*env.unpack"),
    ("no fields to pack", lambda: JAX().pack(TensorDict()), KeyError, r"no .*'key'; it has \[\]"),
    # -- simulators
    (
        "a library close to one that there is",
        lambda: envkit.list_envs(world="bra"),
        ArgumentError,
        r"no library 'bra'.*'brax'",
    ),
    ("make: num_envs is 0", lambda: make("gym/CartPole-v1", 0), ArgumentError, "num_envs is 0"),
    ("list_envs: 'nowhere'", lambda: envkit.list_envs(world="nowhere"), ArgumentError, "'nowhere'"),
    ("make: of type int", lambda: make(3), ArgumentTypeError, "of type int"),
    (
        "make: 'cloud'",
        lambda: make("gym/CartPole-v1", 2, backend="cloud"),
        ArgumentError,
        "'cloud'",
    ),
    ("register: id is 3", lambda: envkit.register(3, Count), ArgumentTypeError, "id is 3"),
    (
        "register: kind is 'new'",
        lambda: envkit.register("lab/Count", Count, kind="new"),
        ArgumentError,
        "kind is 'new'",
    ),
    (
        "GymEnv: frame_skip is 0",
        lambda: GymEnv("CartPole-v1", frame_skip=0),
        ArgumentError,
        "frame_skip is 0",
    ),
    (
        "GymEnv: from_pixels is 'yes'",
        lambda: GymEnv("CartPole-v1", from_pixels="yes"),
        ArgumentTypeError,
        "from_pixels is 'yes'",
    ),
    (
        "GymWrapper: categorical_action_encoding is 2",
        lambda: GymWrapper(3, 2),
        ArgumentTypeError,
        "categorical_action_encoding is 2",
    ),
    (
        "GymEnv: frame_skip is 'two'",
        lambda: GymEnv("CartPole-v1", frame_skip="two"),
        ArgumentTypeError,
        "frame_skip is 'two'",
    ),
    ("make: 'colour'", lambda: make("gym/CartPole-v1", colour="red"), OptionError, "'colour'"),
    ("GymEnv: 'frameskip'", lambda: GymEnv("CartPole-v1", frameskip=2), OptionError, "'frameskip'"),
    (
        "to_gym_vector: autoreset",
        lambda: to_gym_vector(rows(), autoreset="soon"),
        ArgumentError,
        "autoreset",
    ),
    ("to_gym_vector: batch", lambda: to_gym_vector(PendulumEnv()), ArgumentError, "batch"),
    # -- others
    (
        "a wrong render mode of a pool is told before it starts",
        lambda: make("gym/CartPole-v1", 2, render_mode="rgb"),
        ArgumentError,
        "render_mode of 'CartPole-v1' is 'rgb'",
    ),
    (
        "a kind of pool is no physics of brax",
        lambda: make("brax/fast", 2, backend="async"),
        ArgumentError,
        r"'async'.*names the physics: 'generalized'.*no pool",
    ),
    (
        "a wrong keyword of envpools own pool is told before it starts",
        lambda: make("envpool/CartPole-v1", 2, backend="async", foo=1),
        OptionError,
        "CartPole-v1 of EnvPool takes no keyword 'foo'",
    ),
    (
        "rows of a library that steps them together are no workers",
        lambda: make("envpool/CartPole-v1", num_workers=2),
        OptionError,
        r"num_workers is 2, but 'envpool'.*Pass num_envs",
    ),
    (
        "a game of turns has no parallel form in a pool either",
        lambda: make("pettingzoo/classic/tictactoe_v3", 2, parallel=True),
        ArgumentError,
        r"take turns.*Pass parallel=False",
    ),
    (
        "what has no counterpart is told",
        lambda: from_torchrl_spec(torch.Size([1])),
        SpecError,
        r"torch\.Size has no counterpart",
    ),
    (
        "an env of ours is refused with the way back",
        lambda: TorchRLWrapper(Count()),
        ArgumentTypeError,
        r"env is Count, an env of envkit.*Use it as it is.*to_torchrl\(env",
    ),
    (
        "what is no env is refused",
        lambda: TorchRLWrapper("CartPole-v1"),
        ArgumentTypeError,
        r"env is 'CartPole-v1', of type str.*torchrl\.envs",
    ),
    (
        "a vector env of unlike shapes says what works",
        lambda: GymEnv("Blackjack-v1", num_envs=2),
        ArgumentError,
        r"no array form .* flatten a Tuple of unlike shapes",
    ),
    ("an unknown name is refused", lambda: set_gym_backend("jim"), ArgumentError, "gymnasium, gym"),
    (
        "a function is not a module",
        lambda: compile_policy(lambda x: x),
        TypeError,
        r"of type function, but must be .*JaxPolicy",
    ),
    (
        "a population of nothing",
        lambda: compile_policy([]),
        TypeError,
        r"list of modules is empty.*Pass \[module\]",
    ),
    (
        "a population with a function",
        lambda: compile_policy([torch.nn.Linear(1, 1), print]),
        TypeError,
        "module 1 is <built-in.*Pass a list of modules",
    ),
    (
        "a population of different layers",
        lambda: compile_policy([torch.nn.Linear(1, 1), torch.nn.Conv1d(1, 1, 1)]),
        ValueError,
        "module 1 has Conv1d as module '', but module 0 has Linear.*one architecture",
    ),
    (
        "a population of different sizes",
        lambda: compile_policy([torch.nn.Linear(1, 1), torch.nn.Linear(2, 1, bias=False)]),
        ValueError,
        "module 1 has 2 as attribute 'in_features', but module 0 has 1",
    ),
    (
        "a population whose members differ in a number",
        lambda: compile_policy(
            [torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(p)) for p in (0.1, 0.2)]
        ),
        ValueError,
        "module 1 has 0.2 as attribute '1.p', but module 0 has 0.1.*as a buffer",
    ),
    (
        "a population without parameters",
        lambda: compile_policy([torch.nn.Tanh(), torch.nn.Tanh()]),
        ValueError,
        "no parameters and no buffers",
    ),
    (
        "the state of another population",
        lambda: compile_policy(torch.nn.Linear(1, 1), ({"bias": torch.zeros(2, 1)}, {})),
        ValueError,
        r"parameters \['bias'\], but the module has \['bias', 'weight'\].*stack_module_state",
    ),
    (
        "a population that is given twice",
        lambda: compile_policy([torch.nn.Linear(1, 1)], ({}, {})),
        TypeError,
        r"type list and state is given.*Pass compile_policy\(modules\[0\], state\)",
    ),
    (
        "state that is not stacked",
        lambda: compile_policy(
            torch.nn.Linear(1, 1), (dict(torch.nn.Linear(1, 1).named_parameters()), {})
        ),
        ValueError,
        r"'weight' of the state has shape \(1, 1\); expected \(policies, 1, 1\)",
    ),
    (
        "state of two and of three policies",
        lambda: compile_policy(
            torch.nn.Linear(1, 1), ({"weight": torch.zeros(2, 1, 1), "bias": torch.zeros(3, 1)}, {})
        ),
        ValueError,
        r"tensors of \[2, 3\] policies",
    ),
    (
        "what names no folder is refused",
        lambda: cache_dir(3),
        ArgumentError,
        r"path is 3, of type int, but must be a path.*Pass path=",
    ),
    (
        "an episode that begins with its end is refused as a reset does",
        lambda: JaxEnv(BornDone(), batch_size=[2], device="cpu").rollout(
            3, break_when_any_done=False
        ),
        DoneError,
        "set right after a reset",
    ),
    (
        "an unknown state layout is refused",
        lambda: JaxEnv(Pendulum(), state_layout="flat"),
        ArgumentError,
        "'packed' or 'nested'",
    ),
    (
        "rows are reset where they are done or all of them",
        lambda: JaxEnv(Pendulum(), batch_size=[3], reset_rows="most"),
        ArgumentError,
        "reset_rows is 'most', but must be 'done' or 'all'",
    ),
    (
        "data is on the first of the devices",
        lambda: JaxEnv(Pendulum(), batch_size=[2], devices=jax.devices()[:1], device="meta"),
        ArgumentError,
        "Leave device= out",
    ),
    (
        "numpy that holds no numbers is refused",
        lambda: to_jax(np.array(["a"])),
        HandoffError,
        "number type",
    ),
    (
        "int4 is refused with advice",
        lambda: to_torch(jnp.zeros(2, jnp.int4)),
        HandoffError,
        "int4 to int8",
    ),
    (
        "a tracer is refused with advice",
        lambda: jax.jit(to_torch)(jnp.ones(2)),
        HandoffError,
        "outside of it",
    ),
    (
        "a dtype torch lacks is refused",
        lambda: torch_dtype_of(jnp.float8_e4m3b11fnuz),
        HandoffError,
        "both libraries have",
    ),
    (
        "a device that jax does not see is refused",
        lambda: jax_device_of("meta"),
        DeviceNameError,
        "device='cpu'",
    ),
    (
        "an unknown name or keyword is told with the nearest 1",
        lambda: native.build("Pendulun"),
        ArgumentError,
        r"no env called 'Pendulun'.* 'Pendulum'",
    ),
    (
        "an unknown name or keyword is told with the nearest 2",
        lambda: native.build("Pendulum", sed=3),
        OptionError,
        r"envkit/Pendulum takes no keyword 'sed'. Did you mean 'seed'",
    ),
    (
        "an unknown name or keyword is told with the nearest 3",
        lambda: native.build("PendulumJax", params={"max_torq": 1.0}),
        OptionError,
        r"no keyword 'max_torq'. Did you mean 'max_torque'",
    ),
    (
        "a string chooses no number of players",
        lambda: TicTacToeEnv(single_player="no"),
        TypeError,
        "single_player is 'no', but must be a bool",
    ),
    (
        "an unknown name lists the known ones",
        lambda: BraxEnv("no_such_env", device="cpu"),
        ArgumentError,
        r"'no_such_env'.* ant, ",
    ),
    (
        "an unknown layout is refused",
        lambda: BraxEnv("fast", device="cpu", state_layout="flat"),
        ArgumentError,
        "'packed' or 'nested'",
    ),
    (
        "pixels are refused",
        lambda: BraxEnv("fast", device="cpu", from_pixels=True),
        NotImplementedError,
        "pixels",
    ),
    (
        "a string is no list of agents",
        lambda: complete_group_map(["agent_0"], {"team": "agent_0"}),
        ArgumentTypeError,
        r"Pass \['agent_0'\]",
    ),
    (
        "agents that take turns need a mask",
        lambda: PettingZooEnv("classic/tictactoe_v3", parallel=False),
        ValueError,
        r"take turns.*use_mask=True",
    ),
    (
        "games on rows refuse agents that die without a mask",
        lambda: SerialEnv(2, lambda: PettingZooWrapper(Fading((1, 3)), done_on_any=False)).rollout(
            4, break_when_any_done=False
        ),
        RuntimeError,
        "Pass use_mask=True",
    ),
    # -- what a newcomer writes in JAX, or for another call
    (
        "an array of JAX as action",
        lambda: rows().step(rows().reset().set("action", jnp.zeros((2, 1)))),
        SpecError,
        r"'action' is of type ArrayImpl, of jaxlib, but the env takes a tensor.*torch\.from_dlpack",
    ),
    (
        "a function of JAX that takes params is no policy",
        lambda: pendulums().rollout(2, lambda params, observation, key: observation),
        TypeError,
        r"takes three arguments, as functions of JAX do.*Pass JaxPolicy\(policy, params\)",
    ),
    (
        "a function of JAX that takes observations is no policy",
        lambda: pendulums().rollout(2, lambda observation: jnp.tanh(observation)),
        TypeError,
        r"computes in JAX, but was called with tensors.*pass JaxPolicy\(act, params\)",
    ),
    (
        "a compiled function of JAX is no policy",
        lambda: pendulums().rollout(2, jax.jit(lambda observation: observation)),
        TypeError,
        r"computes in JAX.*pass JaxPolicy\(act, params\)",
    ),
    (
        "make with transform=",
        lambda: make("gym/CartPole-v1", 2, transform=None),
        TypeError,
        "make takes no keyword 'transform'. Did you mean 'transforms'",
    ),
    *(
        (
            f"action masks that are {declared!r}",
            partial(masked, declared),
            RuntimeError,
            rf"{words}.*action_masks = \(\(\(\), \('action_mask',\)\),\)",
        )
        for declared, words in (
            ("action_mask", "must be pairs of paths"),
            (("action_mask",), "must be pairs of paths"),
            ((((), "action_mask"),), "must be pairs of paths"),
            ({"action": "action_mask"}, "must be pairs of paths"),
            (3, "is 3, but must be pairs of paths"),
            (
                ((("action",), ("action_mask",)),),
                r"names the action .*, but its action space has \[\(\)\]",
            ),
        )
    ),
    (
        "an action mask that is not observed",
        lambda: masked((((), ("mask",)),)),
        RuntimeError,
        r"names the mask \('mask',\), but its observations are \[\('action_mask',\), \('observation',\)\]",
    ),
    (
        "an action mask of floats",
        lambda: masked((((), ("observation",)),)),
        RuntimeError,
        "has dtype float32, but must hold bools or integers. Return mask != 0",
    ),
]


@each_row(REFUSALS)
def test_it_is_refused_with_a_way_out(call, error, words):
    assert_refused(call, error, words)
