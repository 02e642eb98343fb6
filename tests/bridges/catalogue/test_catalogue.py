"""Envs by id: what is found, what is told of an id that means nothing, and which form many envs take."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

import envkit
from envkit import (
    AsyncEnvPool,
    BraxEnv,
    GymEnv,
    JumanjiWrapper,
    MultiThreadedEnv,
    ParallelEnv,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    list_envs,
    make,
    register,
    worlds,
)
from envkit.cli import doctor
from envkit.errors import ArgumentError, ArgumentTypeError, MissingLibraryError, OptionError
from envkit.installing import LIBRARIES, Library
from envkit_bridges.catalogue import ids
from tests.zoo.envs import Count


@pytest.fixture
def registry():
    """Let a test register ids that are gone after it."""
    before = dict(ids._REGISTERED)
    forget_worlds()
    yield
    ids._REGISTERED.clear()
    ids._REGISTERED.update(before)
    forget_worlds()


def forget_worlds():
    ids.own_worlds.cache_clear()
    ids._all_worlds.cache_clear()


# ------------------------------------------------------------------------------------------ forms


def test_one_env_has_no_batch(opened):
    env = opened(make("gym/CartPole-v1"))

    assert type(env) is GymEnv and env.env_name == "CartPole-v1"
    assert env.batch_size == ()


def test_many_of_a_stateless_world_are_one_env(opened):
    env = opened(make("brax/fast", 3, seed=0))
    twin = BraxEnv("fast", batch_size=[3], device="cpu")
    twin.set_seed(0)

    assert type(env) is BraxEnv and env.batch_size == (3,)
    assert (env.reset()["observation"] == twin.reset()["observation"]).all()


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, 1000),
        ({"max_episode_steps": 5}, 5),
        ({"episode_length": 7}, 7),
        ({"episode_length": None}, None),
    ],
)
def test_episodes_of_brax_are_as_long_as_its_own_maker_has_them(opened, options, limit):
    assert opened(make("brax/fast", **options)).episode_length == limit


def test_a_keyword_of_brax_called_backend_goes_to_brax(opened):
    assert opened(make("brax/inverted_pendulum", 2, backend="spring"))._env.backend == "spring"


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        (None, ParallelEnv),
        ("process", ParallelEnv),
        ("serial", SerialEnv),
        ("async", AsyncEnvPool),
        ("vector", GymEnv),
    ],
)
def test_many_of_a_stateful_world_are_what_the_backend_says(opened, backend, kind):
    env = opened(make("gym/CartPole-v1", 2, backend=backend))  # no process starts before a reset

    assert isinstance(env, kind)
    assert env.batch_size == (2,)


def test_a_batched_world_batches_by_itself_and_gives_one_row_without_a_batch(opened):
    many, one = (opened(make("envpool/CartPole-v1", count, seed=0)) for count in (2, None))

    assert type(many) is MultiThreadedEnv and many.batch_size == (2,)
    assert one.batch_size == () and one.rollout(5).shape[0] <= 5
    envkit.check_env_specs(one, seed=0)


def test_a_batched_world_is_stepped_asynchronously_by_its_own_threads(opened):
    env = opened(make("envpool/CartPole-v1", 2, backend="async"))

    env.async_reset_send(env.reset()[:1])
    assert isinstance(env, AsyncEnvPool)
    assert len(env.async_reset_recv(min_get=1)) == 1


@pytest.mark.parametrize("backend", [None, "serial"])
def test_seeds_limits_and_keywords_reach_every_env(opened, backend):
    many = opened(make("gym/Pendulum-v1", 2, backend=backend, max_episode_steps=3, seed=1, g=0.0))
    twin = opened(SerialEnv(2, lambda: GymEnv("Pendulum-v1", max_episode_steps=3, g=0.0)))
    twin.set_seed(1)

    data, expected = (env.rollout(5, break_when_any_done=False) for env in (many, twin))

    assert (data["observation"] == expected["observation"]).all()
    assert data["next", "truncated"][:, 2].all()


def test_a_world_without_a_limit_gets_a_step_counter(opened, registry):
    register("lab/Count", Count)

    env = opened(make("lab/Count", max_episode_steps=2))

    assert isinstance(env, TransformedEnv) and isinstance(env.transform, StepCounter)
    assert env.rollout(9).shape == (2,)


def test_transforms_are_appended_in_their_order(opened):
    one = opened(make("gym/CartPole-v1", transforms=RewardSum()))
    two = opened(make("gym/CartPole-v1", transforms=[RewardSum(), StepCounter(4)]))

    assert isinstance(one.transform, RewardSum)
    assert [type(part) for part in two.transform] == [RewardSum, StepCounter]


# ------------------------------------------------------------------------------------------- ids


def test_a_name_that_one_world_has_needs_no_world(opened):
    assert isinstance(opened(make("inverted_pendulum")), BraxEnv)


def test_a_name_that_several_worlds_have_is_told_with_their_ids(registry):
    register("lab/CartPole-v1", Count)

    with pytest.raises(
        ArgumentError, match=r"several libraries.*'gym/CartPole-v1'.*'lab/CartPole-v1'"
    ):
        make("CartPole-v1")


@pytest.mark.parametrize(
    ("id", "text"),
    [
        ("gym/CartPol-v1", "'CartPole-v1'"),
        ("HalfCheeta-v5", "'gym/HalfCheetah-v5'"),
        ("braxx/ant", "'brax/ant'"),
        ("cartpole", "Did you mean 'gym/CartPole-v1' or"),
        ("gymnasium/CartPole-v1", "Did you mean 'gym/CartPole-v1' or"),
        ("brax/antt", "ant, fast"),
        ("gym/Nothing-like-it", "gymnasium.registry"),
        ("nothing of this kind", "list_envs"),
        ("", "list_envs"),
    ],
)
def test_an_unknown_id_is_told_with_the_closest(id, text):
    with pytest.raises(ArgumentError) as error:
        make(id)

    assert text in str(error.value) and repr(id.removeprefix("gym/").removeprefix("brax/")) in str(
        error.value
    )
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("backend", [None, "serial", "async"])
@pytest.mark.parametrize(
    ("id", "wrong", "message"),
    [
        ("gym/CartPole-v1", {"foo": 1}, r"GymEnv\('CartPole-v1'\) takes no keyword 'foo'"),
        (
            "gym/CartPole-v1",
            {"timeout": 2},
            r"ParallelEnv\(2, lambda: make\('gym/CartPole-v1'\), timeout=2",
        ),
        ("dm_control/cartpole/swingup", {"foo": 1}, "DMControlEnv takes no keyword 'foo'"),
        ("dm_control/cartpole/swingup", {"task_kwargs": {"limit": 1}}, "Did you mean 'time_limit'"),
        ("pettingzoo/classic/tictactoe_v3", {"foo": 1}, "'classic/tictactoe_v3' takes no keyword"),
        ("pettingzoo/butterfly/pistonball_v6", {"n_piston": 1}, "Did you mean 'n_pistons'"),
    ],
)
def test_a_wrong_keyword_of_a_pool_is_told_before_it_starts(id, wrong, message, backend):
    with pytest.raises(OptionError, match=message):
        make(id, 2, backend=backend, **wrong)


def test_a_world_that_is_not_installed_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "brax", None)
    monkeypatch.setitem(sys.modules, "brax.envs", None)

    with pytest.raises(MissingLibraryError, match=r"'\.\[brax\]'"):
        make("brax/ant")


def test_a_limit_does_not_overwrite_a_state_of_the_env(opened):
    env = opened(make("envkit/FinancialRegime", 2, max_episode_steps=3, seed=0))

    following = env.rollout(5)["next"]

    assert (
        following["step_count"].tolist() == following["elapsed"][..., 0].tolist() == [[1, 2, 3]] * 2
    )
    assert following["truncated"][:, -1].all()


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((3,), {}, ArgumentTypeError, "id is 3, of type int"),
        (("gym/CartPole-v1", 0), {}, ArgumentError, "num_envs is 0"),
        (("gym/CartPole-v1", 2.5), {}, ArgumentTypeError, "num_envs is 2.5"),
        (("gym/CartPole-v1", 2), {"backend": "thread"}, ArgumentError, "'process', 'serial'"),
        (("gym/CartPole-v1",), {"backend": "serial"}, ArgumentError, "Pass num_envs"),
        (("gym/CartPole-v1",), {"transforms": [3]}, ArgumentTypeError, "transforms hold 3"),
        (
            ("gym/CartPole-v1",),
            {"transforms": StepCounter},
            ArgumentTypeError,
            "hold <class .*StepCounter",
        ),
        (("gym/CartPole-v1",), {"max_episode_steps": 0}, ArgumentError, "max_episode_steps is 0"),
        (
            ("brax/fast",),
            {"max_episode_steps": 3, "episode_length": 3},
            OptionError,
            "say the same",
        ),
        (("brax/fast",), {"nonsense": 3}, OptionError, "nonsense"),
        (("gym/CartPol-v1", 2), {}, ArgumentError, "Did you mean 'CartPole-v1'"),
        (
            ("pettingzoo/classic/tictacto_v3", 2),
            {},
            ArgumentError,
            "Did you mean 'classic/tictactoe_v3'",
        ),
        (("dm_control/cartpole/swing", 2), {}, ArgumentError, "Did you mean 'cartpole/swingup'"),
    ],
)
def test_a_mistake_is_told_where_it_is_made(arguments, options, error, message):
    with pytest.raises(error, match=message):
        make(*arguments, **options)


# ------------------------------------------------------------------------------------ registered


def test_an_env_of_ones_own_has_an_id(opened, registry):
    register("lab/Count", Count)

    pool = opened(make("lab/Count", 2, backend="serial", n=3))

    assert list_envs(world="lab") == ["lab/Count"]
    assert type(opened(make("Count"))) is Count
    assert pool.rollout(9).shape == (2, 3)


def test_a_stateless_env_of_ones_own_is_given_its_batch(opened, registry):
    register(
        "lab/Fast", lambda **options: BraxEnv("fast", device="cpu", **options), kind="stateless"
    )

    assert opened(make("lab/Fast", 5)).batch_size == (5,)


@pytest.mark.parametrize(
    ("id", "factory", "options", "message"),
    [
        ("Count", Count, {}, "'library/name'"),
        ("lab/", Count, {}, "'library/name'"),
        ("brax/ant2", Count, {}, "has already"),
        ("lab/Count", Count, {"kind": "odd"}, "'stateful' or 'stateless'"),
        ("lab/Count", 3, {}, "callable"),
        ("lab/There", Count, {}, "registered already"),
    ],
)
def test_an_id_that_cannot_be_registered_is_refused(registry, id, factory, options, message):
    register("lab/There", Count)

    with pytest.raises(ArgumentError, match=message):
        register(id, factory, **options)


def install(folder, monkeypatch, name, version, source, entry_points=""):
    """Install a package of one module."""
    module = name.replace("-", "_")
    (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)
    monkeypatch.syspath_prepend(folder)
    forget_worlds()


PACKAGE = """
from tests.zoo.envs import Count


class World:
    kind = "stateful"

    def env_names(self):
        return ["Short", "Long"]

    def fetching_names(self):
        return ["Long"]

    def build(self, name, **options):
        return Count({"Short": 2, "Long": 9}[name], **options)
"""


def test_a_package_brings_a_world_by_its_entry_point(opened, registry, tmp_path, monkeypatch):
    entry_points = "[envkit.worlds]\ntheirs = their_envs:World\n"
    install(tmp_path, monkeypatch, "their-envs", "0.3", PACKAGE, entry_points)

    env = opened(make("theirs/Short"))
    listed = list_envs(world="theirs")
    (described,) = [world for world in worlds() if world.name == "theirs"]

    assert env.rollout(9).shape == (2,)
    assert listed == ["theirs/Long", "theirs/Short"]
    assert [id.needs_network for id in listed] == [True, False]
    assert (described.library, described.version, described.num_envs) == ("their-envs", "0.3", 2)


def test_one_entry_of_the_table_adds_a_library(opened, registry, tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, "new-lib", "0.3", "class Simulator: ...")
    entry = Library("new_lib", "new-lib", "new", "NewWrapper", "new", adapter="new", env="NewEnv")
    monkeypatch.setitem(LIBRARIES, "new_lib", entry)
    adapter = SimpleNamespace(env_names=lambda: ["Short"], NewEnv=lambda name, **_: Count(2))
    monkeypatch.setitem(sys.modules, "envkit_bridges.worlds.new", adapter)

    env = opened(make("new/Short"))
    (described,) = [world for world in worlds() if world.name == "new"]
    _, versions, *_ = doctor._versions()
    (finding,) = [one for one in doctor._worlds() if one.what == "library new"]

    assert env.rollout(9).shape == (2,)
    assert list_envs(world="new") == ["new/Short"]
    assert (described.library, described.version, described.extra) == ("new_lib", "0.3", "new")
    assert "new-lib 0.3" in versions.report and finding.report == "1 envs of new_lib 0.3"
    assert envkit.get_available_libraries()["new_lib"]
    with pytest.raises(ArgumentTypeError, match=r"Wrap it: NewWrapper\(env\)"):
        TransformedEnv(importlib.import_module("new_lib").Simulator(), RewardSum())


# --------------------------------------------------------------------------------------- listing


def test_envs_are_listed_by_world_and_by_pattern():
    everything = list_envs()

    assert everything == sorted(everything)
    assert {"brax/ant", "gym/CartPole-v1"} <= set(everything)
    assert set(list_envs(world="brax")) == {id for id in everything if id.startswith("brax/")}
    assert "gym/CartPole-v1" in list_envs("cartpole")
    assert list_envs("brax/a*") == ["brax/ant"]
    assert list_envs("no such env") == []


def test_envs_of_three_libraries_need_the_network():
    fetching = [id for id in list_envs() if id.needs_network]

    assert {"gymnax/MNISTBandit-bsuite", "jumanji/Sokoban-v0"} <= set(fetching)
    assert {id.partition("/")[0] for id in fetching} <= {"gymnax", "jumanji", "playground"}


@pytest.mark.parametrize("options", [{"world": 3}, {"pattern": 3}, {"pattern": ["gym"]}])
def test_what_is_no_text_lists_nothing(options):
    (name,) = options

    with pytest.raises(ArgumentTypeError, match=rf"{name} is .*, of type .* must be a string"):
        list_envs(**options)


def test_what_gymnasium_only_keeps_the_names_of_is_not_listed():
    listed = list_envs(world="gym")

    assert "gym/HalfCheetah-v5" in listed
    assert "gym/HalfCheetah-v2" not in listed  # left for another package
    assert not [id for id in listed if "GymV2" in id]


def test_worlds_say_what_is_installed(monkeypatch):
    by_name = {world.name: world for world in worlds()}

    assert by_name["brax"].kind == "stateless" and by_name["brax"].extra == "brax"
    assert by_name["brax"].num_envs == len(list_envs(world="brax"))
    assert by_name["gym"].version and by_name["gym"].problem is None


def test_a_world_that_fails_at_import_is_told_and_hides_no_other(tmp_path, monkeypatch, registry):
    source = "raise ImportError('of another time')"
    entry_points = "[envkit.worlds]\nbroken = broken_world:World\n"
    install(tmp_path, monkeypatch, "broken-world", "1", source, entry_points)

    (described,) = [world for world in worlds() if world.name == "broken"]

    assert "of another time" in described.problem and described.num_envs is None
    assert "brax/ant" in list_envs()
    with pytest.raises(ImportError, match="of another time"):
        list_envs(world="broken")


def test_data_of_an_env_made_by_id_is_that_of_its_class():
    made, by_hand = make("gym/CartPole-v1", seed=3), GymEnv("CartPole-v1")
    by_hand.set_seed(3)
    torch.manual_seed(0)
    data = made.rollout(9)
    torch.manual_seed(0)
    expected = by_hand.rollout(9)

    assert (data["next", "observation"] == expected["next", "observation"]).all()


# ---------------------------------------------------------------------------------------- limits

LIMITED = {
    "gym": ("gym/Pendulum-v1", 200, None),
    "pettingzoo": ("pettingzoo/mpe/simple_spread_v3", 25, None),
    "agents in turns": ("pettingzoo/classic/rps_v2", 15, None),
    "keywords that no signature shows": ("pettingzoo/sisl/pursuit_v5", 500, None),
    "envpool": ("envpool/Pendulum-v1", 200, None),
    "dm_control": ("dm_control/pendulum/swingup", 1000, None),
    "gymnax": ("gymnax/Pendulum-v1", 3, "max_steps_in_episode"),
    "jumanji": ("jumanji/Maze-v0", 100, None),
    "jaxmarl": ("jaxmarl/MPE_simple_spread_v3", 25, None),
    "xminigrid": ("xminigrid/MiniGrid-Empty-16x16", 3, "max_steps"),
}
"""An env of each library, after how many steps its own limit ends an episode, and which of its params says so."""
SLOW = ("keywords that no signature shows", "jumanji", "jaxmarl", "xminigrid")


@pytest.mark.parametrize(
    "library",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in LIMITED],
)
def test_a_limit_beyond_that_of_the_library_is_in_force_and_minus_one_removes_it(library, opened):
    id, steps, param = LIMITED[library]
    options = {}
    if param is not None:
        options["env_params"] = make(id).params.replace(**{param: steps})

    cut = {}
    for limit in (None, steps + 4, -1):
        env = opened(make(id, max_episode_steps=limit, seed=0, **options))
        run = env.rollout(steps + 6, break_when_any_done=False)["next", "truncated"].flatten()
        cut[limit] = run.nonzero().flatten().add(1).tolist()

    assert cut[steps + 4] == [steps + 4] or library in ("jumanji", "agents in turns")
    assert steps + 4 not in cut[None] and not cut[-1]


@pytest.mark.slow
def test_the_params_of_craftax_hold_the_limit():
    limits = {
        limit: make("craftax/Craftax-Classic-Symbolic-v1", max_episode_steps=limit)
        for limit in (5, 20_000, -1)
    }

    assert [env.params.max_timesteps for env in limits.values()] == [10_000, 20_000, 2**31 - 1]


def test_a_limit_that_the_library_keeps_to_itself_is_refused_with_what_to_write():
    import jumanji

    with pytest.raises(ArgumentError, match=r"Maze ends by itself after 100 .*time_limit=300"):
        JumanjiWrapper(jumanji.make("Maze-v0"), episode_length=300)
    with pytest.raises(OptionError, match="max_cycles=30 say the same"):
        make("pettingzoo/mpe/simple_spread_v3", max_episode_steps=40, max_cycles=30)
    with pytest.raises(OptionError, match="time_limit=5 say the same"):
        make("dm_control/pendulum/swingup", max_episode_steps=40, task_kwargs={"time_limit": 5})
