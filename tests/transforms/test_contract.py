"""One contract for all public transforms, wherever they stand: the data of envs that are stepped one at a time.

Each case of `tests.zoo.transforms.CASES` plays one script at each place: runs, single steps, steps of some rows,
resets of some. `OneByOne` plays it the slow way: each row is an env of its own behind the transform, stepped by
itself with TensorDicts. Rows that draw or learn together are compared with the same batch, stepped with TensorDicts.

Conventions
    place   how a transform stands around rows.
    player  what plays the script, and shows what it was shown.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from functools import cache, partial

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

import envkit
from envkit import (
    Compose,
    EnvBase,
    InitTracker,
    MixedEnv,
    ParallelEnv,
    SerialEnv,
    StepCounter,
    Transform,
    TransformedEnv,
    VecNormV2,
    check_env_specs,
)
from envkit.batched.bound_envs import row_core
from envkit.data.transition import leaves
from envkit.transforms.core.fusable import FusableTransform
from envkit_bridges.jax.jax_env import JaxEnv
from tests.zoo.resumed import as_read_again, equal_states, same, twice
from tests.zoo.transforms import (
    CASES,
    Case,
    Opaque,
    StatelessWalk,
    pendulum,
    recorded,
    walk,
)
from tests.zoo.walkers import Walker

pytestmark = [
    pytest.mark.filterwarnings("ignore::envkit.CentredRewardWarning"),
    pytest.mark.filterwarnings("ignore:set_seed.. of DreamerEnv"),
]

ROWS, STEPS = 3, 7
NOT_SHOWN = {"_memory", "_memory_2", "time_step", "time_policy", "time_reset"}
"""Where memory travels that later transforms change, which depends on how transforms are nested; and times."""

# ----------------------------------------------------------------------------------------- comparing


def assert_same(
    shown: TensorDictBase, expected: TensorDictBase, *, rounds: bool = False, part: int = 0
) -> None:
    """Check that both have the same entries with the same values, and no masks are left."""
    one, other = (
        {path: leaf for path, leaf in leaves(td) if not NOT_SHOWN & {*path}}
        for td in (shown, expected)
    )
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    assert not [path for path in one if {"_step", "_reset"} & {*path}]
    for path, leaf in one.items():
        wanted = other[path]
        assert type(leaf) is type(wanted), path
        if not isinstance(leaf, torch.Tensor):
            assert leaf.tolist() == wanted.tolist(), path
            continue
        assert leaf.dtype == wanted.dtype and leaf.shape == wanted.shape, (path, leaf.shape)
        if rounds and leaf.is_floating_point():
            torch.testing.assert_close(leaf, wanted, atol=1e-5, rtol=1e-5, equal_nan=True)
        else:
            is_equal = torch.equal(leaf.nan_to_num(7.5), wanted.nan_to_num(7.5))
            assert is_equal, (
                f"part {part} of the script: {path} is {leaf.tolist()}, but should be {wanted.tolist()}"
            )


# ------------------------------------------------------------------------------------------- players


def drawn_actions(
    env: EnvBase, rows: int, turns: int, *, is_batch: bool
) -> list[list[TensorDictBase]]:
    """Draw the actions of each turn and row from the spec of one env, or of all rows."""
    torch.manual_seed(0)
    if is_batch:
        return [list(env.full_action_spec.rand().unbind(0)) for _ in range(turns)]
    return [[env.full_action_spec.rand() for _ in range(rows)] for _ in range(turns)]


class Player:
    """What both players know: the next actions."""

    def __init__(self, case: Case, actions: list[list[TensorDictBase]]):
        self.case, self.actions, self.turn = case, actions, 0

    def chosen(self, root: TensorDictBase, row: int | None) -> TensorDictBase:
        """Write the actions of this turn into a root, of one row or of all."""
        if self.case.policy is not None:
            return root.set("action", self.case.policy(root))
        turn = self.actions[self.turn % len(self.actions)]
        action = turn[row] if row is not None else torch.stack(turn)
        return root.update(action.clone())


class OneByOne(Player):
    """Rows that do not know of each other."""

    def __init__(self, envs: list[EnvBase], case: Case, actions: list[list[TensorDictBase]]):
        super().__init__(case, actions)
        self.envs, self.roots = envs, [TensorDict()] * len(envs)

    def seed(self, seed: int) -> None:
        for env in self.envs:
            seed = env.set_seed(seed)

    def begin(self) -> TensorDictBase:
        self.roots = [env.reset() for env in self.envs]
        return torch.stack(self.roots)

    def reset(self, mask: list[bool]) -> TensorDictBase:
        for row, env in enumerate(self.envs):
            if mask[row]:
                self.roots[row] = env.reset(self.roots[row].copy())
        return torch.stack(self.roots)

    def step(self, mask: list[bool], *, advance: bool) -> list[TensorDictBase]:
        steps = []
        for row, env in enumerate(self.envs):
            root = self.chosen(self.roots[row].copy(), row)
            steps.append(env.step(root) if mask[row] else self._skipped(env, root))
            root = env.step_mdp(steps[-1])
            self.roots[row] = env.maybe_reset(root) if advance else root
        self.turn += 1
        return [torch.stack(steps), torch.stack(self.roots)]

    @staticmethod
    def _skipped(env: EnvBase, root: TensorDictBase) -> TensorDictBase:
        """Show the root once more, and no reward."""
        following = env.full_reward_spec.zero()
        for key in (*env.observation_keys, *env.done_keys):
            following.set(key, root[key])
        return root.set("next", following)

    def restart(self) -> TensorDictBase:
        self.roots = [env.maybe_reset(one) for env, one in zip(self.envs, self.roots, strict=True)]
        return torch.stack(self.roots)

    def rollout(self, stop: str) -> TensorDictBase:
        self.begin()
        taken: list[list[TensorDictBase]] = []
        for step in range(STEPS):
            steps_made = []
            for row, env in enumerate(self.envs):
                if stop == "all" and step and self._is_done(row):
                    steps_made.append(taken[-1][row].clone())
                    for key in env.reward_keys:
                        steps_made[-1]["next"][key].zero_()
                    continue
                steps_made.append(env.step(self.chosen(self.roots[row].copy(), row)))
                self.roots[row] = env.step_mdp(steps_made[-1])
            self.turn += 1
            taken.append(steps_made)
            done = [self._is_done(row) for row in range(len(self.envs))]
            if (stop == "any" and any(done)) or (stop == "all" and all(done)):
                break
            if stop == "never" and step < STEPS - 1:
                self.restart()
        return torch.stack([torch.stack(rows) for rows in taken], self._time)

    @property
    def _time(self) -> int:
        return 1 + self.envs[0].batch_dims

    def _is_done(self, row: int) -> bool:
        return any(bool(self.roots[row][key].any()) for key in self.envs[row].done_keys)


class Batch(Player):
    """An env of rows, or one env that stands for one row."""

    def __init__(
        self, env: EnvBase, case: Case, actions: list[list[TensorDictBase]], *, is_one: bool = False
    ):
        super().__init__(case, actions)
        self.env, self.is_one, self.root = env, is_one, TensorDict()

    def seed(self, seed: int) -> None:
        self.env.set_seed(seed)

    def begin(self) -> TensorDictBase:
        self.root = self.env.reset()
        return self._rows(self.root).clone()

    def reset(self, mask: list[bool]) -> TensorDictBase:
        before, env = self.root.clone(), self.env
        if self.is_one and not mask[0]:  # one simulator cannot be reset in part
            return self._rows(self.root).clone()
        for key, group in zip(env.reset_keys, env.done_keys_groups, strict=True):
            flags = self.root[group[0]]
            of_rows = self._mask(mask).reshape(
                *self._mask(mask).shape, *(1,) * (flags.ndim - self._mask(mask).ndim)
            )
            self.root.set(key, of_rows.expand_as(flags).clone())
        self.root = env.reset(self.root)
        self._require_kept(before, self.root, mask)
        return self._rows(self.root).clone()

    def step(self, mask: list[bool], *, advance: bool) -> list[TensorDictBase]:
        env, td = self.env, self._chosen(self.root.clone())
        if not all(mask):
            flags = self._mask(mask)
            while flags.ndim < len(env.batch_size):
                flags = flags[..., None]
            td.set("_step", flags.expand(env.batch_size).clone())
        before = self.root.clone()
        if advance:
            data, self.root = env.step_and_maybe_reset(td)
        else:
            data = env.step(td)
            self.root = env.step_mdp(data)
        self._require_kept(before, data["next"], mask)
        return [self._rows(data).clone(), self._rows(self.root).clone()]

    def restart(self) -> TensorDictBase:
        self.root = self.env.maybe_reset(self.root)
        return self._rows(self.root).clone()

    def rollout(self, stop: str) -> TensorDictBase:
        rules = {
            "never": {"break_when_any_done": False},
            "any": {"break_when_any_done": True},
            "all": {"break_when_all_done": True},
        }
        return self._rows(self.env.rollout(STEPS, self._chosen, **rules[stop])).clone()

    def _chosen(self, td: TensorDictBase) -> TensorDictBase:
        td = self.chosen(td, 0 if self.is_one else None)
        self.turn += 1
        return td

    def _mask(self, mask: list[bool]) -> torch.Tensor:
        return torch.tensor(mask[0] if self.is_one else mask)

    def _rows(self, td: TensorDictBase) -> TensorDictBase:
        return td.unsqueeze(0) if self.is_one else td

    def _require_kept(
        self, before: TensorDictBase, after: TensorDictBase, mask: list[bool]
    ) -> None:
        """Check that rows that are not in the mask show what they showed before."""
        shown = [key for key in (*self.env.observation_keys, *self.env.done_keys) if key in before]
        others = ~torch.tensor(mask)
        assert_same(
            self._rows(after.select(*shown))[others], self._rows(before.select(*shown))[others]
        )


def script(player: Player, rows: int) -> Iterator[TensorDictBase]:
    """Play; yield all that is shown. Masks are all rows, none, and any of them."""
    player.seed(3)
    yield player.begin()
    generator = torch.Generator().manual_seed(1)
    masks = [[True] * rows, [False] * rows]
    masks += (torch.rand(8, rows, generator=generator) < 0.5).tolist()
    for number, mask in enumerate(masks):
        yield from player.step([True] * rows, advance=number % 2 == 0)
        yield player.restart()
        yield from player.step(mask, advance=number % 3 == 0)
        if number % 2:
            yield player.reset(masks[-1 - number])
        yield player.restart()
    for stop in ("never", "all", "any"):
        yield player.rollout(stop)
    yield player.begin()


# -------------------------------------------------------------------------------------------- places


def behind(env: EnvBase, *transforms: Transform) -> TransformedEnv:
    return TransformedEnv(env, Compose(*transforms))


def one_env(case: Case) -> EnvBase:
    return TransformedEnv(case.env(), case.make())


@cache
def pool(kind: type, env: Callable[[], EnvBase], use_buffers: bool | None = None) -> EnvBase:
    """Rows without transforms, started once for all cases."""
    options = {"num_processes": 1} if kind is ParallelEnv else {"use_buffers": use_buffers}
    return kind(ROWS, env, **options)


@pytest.fixture(scope="module", autouse=True)
def pools_are_closed():
    yield
    pool.cache_clear()


AROUND_IT = (
    partial(StepCounter, 9, step_count_key="inner"),
    partial(InitTracker, init_key="outer"),
)
"""The transforms of the envs before and behind a nested one."""


def slow_chain(case: Case, place: str) -> list[Transform]:
    """Return the transforms of one env at a place, and one that keeps them from rows and programs."""
    if place != "nested":
        return [case.make(), Opaque()]
    inner, outer = AROUND_IT
    return [inner(), case.make(), outer(), Opaque()]


def nested(case: Case) -> EnvBase:
    def one() -> EnvBase:
        return TransformedEnv(TransformedEnv(case.env(), inner()), case.make())

    inner, outer = AROUND_IT
    return TransformedEnv(SerialEnv(ROWS, one), outer())


def two_pools(case: Case) -> EnvBase:
    return MixedEnv([SerialEnv(1, case.env), SerialEnv(ROWS - 1, case.env)])


PLACES: dict[str, Callable[[Case], EnvBase]] = {
    "alone": one_env,
    "inside": lambda case: SerialEnv(ROWS, partial(one_env, case)),
    "inside without buffers": lambda case: SerialEnv(
        ROWS, partial(one_env, case), use_buffers=False
    ),
    "workers": lambda case: ParallelEnv(ROWS, partial(one_env, case), num_processes=1),
    "around": lambda case: TransformedEnv(pool(SerialEnv, case.env), case.make()),
    "around without buffers": lambda case: TransformedEnv(
        pool(SerialEnv, case.env, False), case.make()
    ),
    "around workers": lambda case: TransformedEnv(pool(ParallelEnv, case.env), case.make()),
    "mixed": lambda case: TransformedEnv(two_pools(case), case.make()),
    "nested": nested,
    "stateless": lambda case: TransformedEnv(StatelessWalk(batch_size=[ROWS]), case.make()),
    "programs": lambda case: TransformedEnv(walkers(), case.make()),
}


@cache
def walkers() -> JaxEnv:
    return JaxEnv(Walker(), batch_size=[ROWS], device="cpu", episode_length=6)


def slow_env(case: Case, place: str) -> EnvBase:
    """Build one env behind a case in such a way that it is stepped with TensorDicts."""
    env = StatelessWalk() if place == "stateless" else case.env()
    return behind(env, *slow_chain(case, place))


def slow_batch(case: Case, place: str) -> EnvBase:
    """Build all rows at once in such a way that they are stepped with TensorDicts."""
    bases = {
        "alone": case.env,
        "stateless": lambda: StatelessWalk(batch_size=[ROWS]),
        "programs": walkers,
    }
    if place.startswith(("inside", "workers")):
        return SerialEnv(ROWS, partial(slow_env, case, place), use_buffers=False)
    base = bases.get(place, lambda: SerialEnv(ROWS, case.env, use_buffers=False))()
    first = [Opaque()] if place == "programs" else []
    return behind(base, *first, *slow_chain(case, place))


def play(name: str, place: str, player: Callable[..., Player]) -> list[TensorDictBase]:
    case, rows = CASES[name], 1 if place == "alone" else ROWS
    is_batch = place == "programs" or "alone" in case.never
    one = (slow_batch if is_batch else slow_env)(case, place)
    actions = drawn_actions(one, rows, 40, is_batch=is_batch)
    return list(script(player(case, actions), rows))


@cache
def expected(name: str, place: str) -> list[TensorDictBase]:
    """Play the slow way."""
    case, rows = CASES[name], 1 if place == "alone" else ROWS
    if place in case.together or place == "programs":
        env = slow_batch(case, place)
        return play(name, place, partial(Batch, env, is_one=place == "alone"))
    return play(name, place, partial(OneByOne, [slow_env(case, place) for _ in range(rows)]))


REFERENCES = ("alone", "nested", "stateless", "programs")
"""The places that have a reference of their own; the others have that of ``inside``."""


def check(name: str, place: str, env: EnvBase | None = None) -> EnvBase:
    """Check that a case shows at a place what it shows the slow way, and what its specs say."""
    case = CASES[name]
    env = PLACES[place](case) if env is None else env
    reference = place if place in (*REFERENCES, *case.together) else "inside"
    rounds = case.rounds or place == "programs"

    shown = play(name, place, partial(Batch, env, is_one=place == "alone"))
    if place == "mixed":  # which numbers its moments
        shown = [td.exclude("state", ("next", "state")) for td in shown]

    for part, (one, other) in enumerate(zip(shown, expected(name, reference), strict=True)):
        assert_same(one, other, rounds=rounds, part=part)
    check_env_specs(env, break_when_any_done=False)
    return env


def fuses(name: str) -> bool:
    leaves = CASES[name].leaves()
    return all(isinstance(leaf, FusableTransform) and leaf.fuses for leaf in leaves)


COMPILED = (
    *("entries", "values", "kept", "primed"),
    *("VecNorm", "NormalizeReward", "statistics of policies"),
)
"""The cases that are compiled: together they have all transforms that fuse."""


def cases_at(place: str, *quick: str, others=pytest.mark.more):
    """Parametrise by the cases that stand at a place, a few of which are quick."""
    is_there = {
        name: case.env is not None
        and place not in case.never
        and (case.env is walk or place not in ("stateless", "programs"))
        and (place != "programs" or name in COMPILED or not fuses(name))
        and not (case.needs_gpu and not torch.cuda.is_available())
        for name, case in CASES.items()
    }
    assert set(quick) <= CASES.keys()
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(n, marks=() if n in quick else others)
            for n, there in is_there.items()
            if there
        ],
    )


@cases_at("alone", "kept", "values")
def test_alone(name):
    check(name, "alone")


@cases_at("inside", "entries", "values")
def test_inside_the_sub_envs(name):
    check(name, "inside")

    assert not stacks(name) or row_core(one_env(CASES[name])) is not None


@cases_at("inside without buffers", "kept", "FrameSkipTransform")
def test_inside_the_sub_envs_without_buffers(name):
    check(name, "inside without buffers")


@cases_at("workers", "entries", others=pytest.mark.slow)
def test_in_workers(name, opened):
    check(name, "workers", opened(PLACES["workers"](CASES[name])))


@cases_at("around", "kept", "values")
def test_around_sub_envs(name):
    check(name, "around")


@cases_at("around without buffers", "NoopResetEnv, drawn", "VecNorm")
def test_around_sub_envs_without_buffers(name):
    check(name, "around without buffers")


@cases_at("around workers", "kept", others=pytest.mark.slow)
def test_around_workers(name):
    check(name, "around workers")


@cases_at("mixed", "kept", "NormalizeReward")
def test_around_a_mixed_env(name):
    check(name, "mixed")


@cases_at("nested", "kept", "values")
def test_between_transforms_of_other_envs(name):
    check(name, "nested")


@cases_at("stateless", "kept", "entries")
def test_around_a_stateless_env(name):
    check(name, "stateless")


@pytest.mark.rounding
@cases_at("programs", "kept", "values", others=pytest.mark.slow)
def test_in_programs(name):
    env = check(name, "programs")

    assert env._route.is_direct is fuses(name)


def stacks(name: str) -> bool:
    case = CASES[name]
    return case.env is walk and all(
        isinstance(leaf, FusableTransform) and leaf.stacks and not leaf.learns
        for leaf in case.leaves()
    )


# ------------------------------------------------------------------------------- copied and resumed


@cases_at("alone", "kept", "VecNorm")
def test_a_clone_shares_buffers_and_does_the_same(name):
    used, twin = used_and_copied(name, lambda transform: transform.clone())

    if not any(isinstance(leaf, VecNormV2) for leaf in CASES[name].leaves()):  # it copies averages
        assert all(one.data_ptr() == two.data_ptr() for one, two in buffers_of(used, twin))
    if name != "TrajCounter" and not any(leaf.learns for leaf in CASES[name].leaves()):
        assert_play_alike(name, twin, used)


@cases_at("alone", "kept", "VecNorm")
def test_a_deep_copy_shares_nothing_and_does_the_same(name):
    used, twin = used_and_copied(name, copy.deepcopy)

    assert all(one.data_ptr() != two.data_ptr() for one, two in buffers_of(used, twin))
    before = as_read_again(used.transform.state_dict())
    third = TransformedEnv(CASES[name].env(), copy.deepcopy(twin.transform))
    play(name, "alone", partial(Batch, third, is_one=True))
    assert equal_states(used.transform.state_dict(), before)
    assert_play_alike(name, twin, used)


def used_and_copied(name: str, copied: Callable) -> tuple[EnvBase, EnvBase]:
    """Build an env, and use it; build another one behind a copy of its transform."""
    used = one_env(CASES[name])
    used.rollout(3)
    twin = TransformedEnv(CASES[name].env(), copied(used.transform))
    assert twin.transform.container is twin and used.transform.container is used
    return used, twin


def buffers_of(*envs: EnvBase) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(*(env.transform.buffers() for env in envs), strict=True)


def assert_play_alike(name: str, *envs: EnvBase) -> None:
    shown = [play(name, "alone", partial(Batch, env, is_one=True)) for env in envs]
    for part, (one, other) in enumerate(zip(*shown, strict=True)):
        assert_same(one, other, part=part)


@cases_at("alone", "VecNormV2", "values")
def test_a_state_dict_is_loaded_into_a_fresh_one(name):
    case = CASES[name]
    trained, fresh = one_env(case), one_env(case)
    play(name, "alone", partial(Batch, trained, is_one=True))

    fresh.transform.load_state_dict(as_read_again(trained.transform.state_dict()))

    buffers = {key.rsplit(".", 1)[-1] for key, _ in trained.transform.named_buffers()}
    assert buffers == case.holds
    assert equal_states(trained.transform.state_dict(), fresh.transform.state_dict())
    assert_play_alike(name, trained, fresh)


def cases_resumed(place: str, *quick: str):
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=() if name in quick else pytest.mark.more)
            for name, case in CASES.items()
            if case.env in (walk, pendulum) and place not in case.never and name != "Timer"
            if not case.needs_gpu or torch.cuda.is_available()
        ],
    )


@cases_resumed("alone", "after averages", "NoopResetEnv, drawn")
def test_a_run_goes_on_in_a_fresh_env(name, opened):
    make = partial(one_env, CASES[name])

    assert same(twice(make, opened, before=9, after=9, seed=3))
    assert same(twice(make, opened, before=9, after=9, seed=None))


@cases_resumed("around", "kept", "primed")
def test_a_run_of_rows_goes_on_in_a_fresh_env(name, opened):
    def make() -> EnvBase:
        return TransformedEnv(SerialEnv(ROWS, CASES[name].env), CASES[name].make())

    assert same(twice(make, opened, before=9, after=9))


@cases_resumed("alone", "VecNorm", "RandomTruncationTransform")
def test_a_used_env_that_loads_the_dict_of_a_new_one_goes_on_as_the_new_one(name, opened):
    def played(is_used: bool) -> TensorDictBase:
        source, env = (opened(one_env(CASES[name]).record_for_resume()) for _ in range(2))
        source.set_seed(7)
        source.reset()
        state = as_read_again(source.state_dict())
        if is_used:
            env.set_seed(5)
            env.rollout(14, break_when_any_done=False)
        env.load_state_dict(state)
        env.set_seed(1)
        return env.rollout(20, break_when_any_done=False)

    assert_same(played(True), played(False))


# ------------------------------------------------------------------------------------ recorded data


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.data])
def test_recorded_data_becomes_what_an_env_shows(name):
    case = CASES[name]
    env, bare = one_env(case), case.env()
    actions = drawn_actions(bare, 1, STEPS, is_batch=False)
    shown = []
    for each in (env, bare):
        each.set_seed(3)
        act = Batch(each, case, actions, is_one=True)._chosen
        shown.append(each.rollout(STEPS, act, break_when_any_done=False))
    transform, data = case.make(), shown[1]

    if name in ALONG_TIME:
        transformed = transform(data.clone())["next"]
    else:
        transformed = transform(data["next"].clone())

    wanted = shown[0]["next"].select(*case.data)
    assert_same(transformed.select(*case.data), wanted, rounds=True)


ALONG_TIME = ("RewardSum",)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.env is None])
def test_recorded_data_is_worked_on_alike_by_copies_and_after_a_resume(name):
    def use(transform: Transform, data: TensorDictBase) -> TensorDictBase:
        torch.manual_seed(0)
        return (transform.inv if case.inv else transform)(data.clone())

    case, data = CASES[name], recorded()
    first, second = case.make(), case.make()
    clone, deep = first.clone(), copy.deepcopy(first)
    use(first, data[:, :5])

    second.load_state_dict(as_read_again(first.state_dict()))

    shown = [use(each, data[:, 5:]) for each in (first, second)]
    assert_same(*shown)
    assert_same(*(use(each, data) for each in (clone, deep)))


# ------------------------------------------------------------------------- devices, and which there are


NO_BOUNDS = {"ClipTransform", "RewardClipping", "SignTransform", "SuccessReward", "values", "kept"}
"""Meta tensors have no bounds to compare."""


@cases_at("stateless", "entries", "NormalizeReward")
def test_a_transform_moves_with_its_env(name):
    if name in NO_BOUNDS or name == "DeviceCastTransform":
        pytest.skip("compares bounds, or stays on its device")
    env = TransformedEnv(StatelessWalk(batch_size=[ROWS], device="cpu"), CASES[name].make())
    data = env.rollout(3).select(*env.observation_keys)
    assert {value.device.type for _, value in leaves(data)} == {"cpu"}

    env.to("meta")

    held = [*env.specs.values(True, True), *env.transform.buffers()]
    assert {one.device.type for one in held} == {"meta"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "make",
    [partial(JaxEnv, Walker(), batch_size=[ROWS]), partial(SerialEnv, ROWS, walk)],
    ids=["programs", "serial"],
)
@cases_at("programs")
def test_transforms_run_on_the_device_of_the_env(name, make):
    env = TransformedEnv(make(device="cuda"), CASES[name].make())

    check_env_specs(env, seed=0, break_when_any_done=False)
    data = env.rollout(7, break_when_any_done=False)

    on_cpu = {"DeviceCastTransform"}
    assert {value.device.type for _, value in leaves(data)} == {"cuda"} or name in on_cpu


BASES = {
    *("Transform", "FusableTransform", "MomentTransform"),
    *("ObservationTransform", "CoupledTransform", "Compose"),
}


def test_every_public_transform_has_a_case():
    public = {name: getattr(envkit, name) for name in envkit.__all__}
    transforms = {
        name
        for name, kind in public.items()
        if inspect.isclass(kind) and issubclass(kind, Transform)
    }

    covered = {type(leaf).__name__ for case in CASES.values() for leaf in case.leaves()}

    assert transforms - BASES <= covered
    compiled = {type(leaf) for name in COMPILED for leaf in CASES[name].leaves()}
    assert compiled >= {
        type(leaf) for name in CASES if fuses(name) for leaf in CASES[name].leaves()
    }
    assert transforms >= BASES
