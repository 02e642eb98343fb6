"""MixedEnv: rows of JAX and rows of processes as one batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from tensordict import TensorDict

from envkit import (
    Compose,
    DTypeCastTransform,
    MixedEnv,
    ObservationNorm,
    ParallelEnv,
    RenameTransform,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    VecNorm,
    check_env_specs,
)
from envkit.env.base import EnvBase
from envkit.env.seeding import next_seed
from envkit.errors import (
    ArgumentError,
    InputError,
    KeyCollisionError,
    MissingKeyError,
    ResetMaskError,
    StaleDataError,
    StepMaskError,
)
from envkit_bridges.gym.gym_env import GymEnv
from tests.env.test_partial import Zeros
from tests.zoo.drift import gym_rows, make_gym
from tests.zoo.envs import Chaos, Count, Slow, StatelessCount
from tests.zoo.jax_drift import jax_rows
from tests.zoo.policies import Replay

F, T = False, True


@pytest.fixture(scope="module")
def mixed() -> Iterator[MixedEnv]:
    env = MixedEnv([jax_rows(), gym_rows()])
    yield env
    env.close()


@pytest.fixture(scope="module")
def alone() -> Iterator[list]:
    envs = [jax_rows(), gym_rows()]
    yield envs
    envs[1].close()


def actions(rows: int, steps: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.rand(rows, steps, 1, generator=generator) * 1.4 - 0.4


def shared(td: TensorDict) -> TensorDict:
    """Leave the state out, at root and next."""
    return td.exclude("state", ("next", "state"))


def seeded(mixed, alone) -> None:
    following = mixed.set_seed(5)
    seed = 5
    for env in alone:
        seed = env.set_seed(seed)
    assert following == seed


# ------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("stop", [{}, {"break_when_any_done": False}], ids=["any done", "nonstop"])
def test_rows_are_those_of_the_members_run_alone(mixed, alone, stop):
    plan = actions(5, 12)
    seeded(mixed, alone)

    together = mixed.rollout(12, Replay(plan), **stop)
    steps = together.shape[1]
    parts = [
        env.rollout(steps, Replay(plan[rows]), break_when_any_done=False)
        for env, rows in zip(alone, (slice(0, 3), slice(3, 5)), strict=True)
    ]

    assert together.shape == (5, steps)
    for part, rows in zip(parts, (slice(0, 3), slice(3, 5)), strict=True):
        assert (shared(together)[rows] == shared(part)).all()


def test_a_mixed_env_keeps_its_specs(mixed):
    check_env_specs(mixed)

    assert mixed.batch_size == (5,)
    assert mixed.batch_locked
    assert set(mixed.full_state_spec.keys(True, True)) == {
        ("state", "moment"),
        ("state", "member0", "state", "floats"),
        ("state", "member0", "state", "words"),
    }


def test_seeds_follow_one_another(mixed):
    assert mixed.set_seed(7) == next_seed(next_seed(next_seed(7)))


# ------------------------------------------------------------------------------------------ masks


@pytest.mark.parametrize(
    "mask",
    [[T, F, F, T, F], [F, F, F, T, T], [T, T, F, F, F], [F, F, F, F, F], [T, T, T, T, T]],
    ids=["both", "only processes", "only jax", "none", "all"],
)
@pytest.mark.parametrize("passed", ["data", "mask alone"])
def test_a_reset_mask_replaces_only_its_rows(mixed, mask, passed):
    mask = torch.tensor(mask)[:, None]
    td = mixed.step_mdp(mixed.step(mixed.reset().set("action", torch.full((5, 1), -1.0))))
    before = td["observation"].clone()
    td = td if passed == "data" else TensorDict(batch_size=[5])

    fresh = mixed.reset(td.set("_reset", mask))
    step = mixed.step(fresh.clone().set("action", torch.zeros(5, 1)))

    assert (fresh["observation"] == before)[~mask].all()
    assert (fresh["observation"] >= 0)[mask].all()
    assert (before < 0).all()
    assert step["next", "observation"].equal(fresh["observation"])
    assert "_reset" not in fresh


def test_preset_next_entries_decide_what_is_done(mixed):
    root = mixed.reset().set("action", torch.full((5, 1), -1.0))
    root["next", "done"] = torch.tensor([[T], [F], [F], [T], [F]])

    data, following = mixed.step_and_maybe_reset(root)

    assert data["next", "done"].squeeze(-1).tolist() == [T, F, F, T, F]
    assert (following["observation"] >= 0).squeeze(-1).tolist() == [T, F, F, T, F]


@pytest.mark.parametrize("row", [0, 4], ids=["of jax", "of processes"])
@pytest.mark.parametrize("call", ["step", "step_and_maybe_reset"])
def test_an_action_that_is_refused_moves_no_row(mixed, row, call):
    root = mixed.reset()
    wrong = torch.ones(5, 1)
    wrong[row] = torch.nan

    with pytest.raises(InputError, match=f"'action' of row {row} is .*nan"):
        getattr(mixed, call)(root.clone().set("action", wrong))
    out = mixed.step(root.clone().set("action", torch.ones(5, 1)))

    moved = (out["next", "observation"] - root["observation"]).squeeze(-1)
    assert moved.tolist() == pytest.approx([1] * 5)


def test_an_action_of_a_row_that_is_left_out_may_be_anything(mixed):
    root = mixed.reset()
    actions, mask = torch.ones(5, 1), torch.tensor([T, F, T, T, F])
    actions[~mask] = torch.nan

    out = mixed.step(root.clone().set("action", actions).set("_step", mask))

    moved = (out["next", "observation"] - root["observation"]).squeeze(-1)
    assert moved.tolist() == pytest.approx([1, 0, 1, 1, 0])


def test_an_action_that_is_missing_leaves_the_env_usable(mixed):
    with pytest.raises(KeyError, match="rand_action"):
        mixed.step(mixed.reset())

    assert mixed.rollout(3).shape[0] == 5


# ------------------------------------------------------------------------------------------- state


def acted(root: TensorDict) -> TensorDict:
    """Copy a root of any of these envs and put an action in."""
    return root.clone().set("action", torch.zeros(*root.batch_size, 1, dtype=torch.int64))


def unlike() -> MixedEnv:
    """Two stateless members whose states differ."""
    counted = TransformedEnv(StatelessCount(9, batch_size=[2]), StepCounter())
    return MixedEnv([StatelessCount(9, batch_size=[3]), counted])


def test_the_state_of_jax_rows_travels_in_the_data(mixed, alone):
    root = mixed.reset()
    state = root["state", "member0", "state"]
    own = root[:3].exclude("state").set("state", state[:3]).set("action", torch.full((3, 1), 0.5))

    together = mixed.step(root.clone().set("action", torch.full((5, 1), 0.5)))
    by_itself = alone[0].step(own)

    assert not state[3:]["floats"].any()
    assert (together["next", "state", "member0", "state"][:3] == by_itself["next", "state"]).all()
    assert (shared(together)[:3] == shared(by_itself)).all()


@pytest.mark.parametrize("call", ["step", "step_and_maybe_reset"])
def test_stepping_one_tensordict_twice_gives_the_same_twice(call):
    env = unlike()
    root = acted(env.step_mdp(env.step(acted(env.reset()))))

    first, again = (getattr(env, call)(root.clone()) for _ in range(2))

    if call == "step":
        first, again = (first,), (again,)
    assert first[0]["next", "count"].flatten().tolist() == [2] * 5
    for one, other in zip(first, again, strict=True):
        assert (one == other).all()


def test_states_that_all_members_have_alike_stand_as_in_theirs():
    env = MixedEnv([counts(), StatelessCount(9, batch_size=[2])])

    root = env.reset()
    root["count"][2:] = torch.tensor([[3], [5]])
    data = env.step(acted(root))

    assert set(env.full_state_spec.keys(True, True)) == {"count", ("state", "moment")}
    assert data["next", "count"].flatten().tolist() == [1, 1, 4, 6]
    check_env_specs(env)


def test_states_that_differ_stand_beside_each_other():
    env = unlike()
    root = env.step_mdp(env.step(acted(env.reset())))

    assert root["count"].flatten().tolist() == [1] * 5
    assert root["state", "member1", "step_count"].flatten().tolist() == [0, 0, 0, 1, 1]
    check_env_specs(env)


def test_a_stateful_row_is_not_stepped_from_data_that_it_has_left_behind():
    env = MixedEnv([StatelessCount(9, batch_size=[1]), counts()])
    root = acted(env.reset())
    first = env.step(root.clone())

    with pytest.raises(StaleDataError, match=r"row 1 .*moment 1.* at moment 2.*step_mdp.*reset"):
        env.step(root.clone())
    following = env.step(acted(env.step_mdp(first)))

    assert following["next", "count"].flatten().tolist() == [2, 2, 2]


def test_the_end_of_an_episode_is_left_behind_by_a_reset():
    env = MixedEnv([SerialEnv(2, partial(Count, 1))])
    data, root = env.step_and_maybe_reset(acted(env.reset()))

    with pytest.raises(StaleDataError, match=r"moment 2, .* at moment 3"):
        env.step(acted(env.step_mdp(data)))
    assert env.step(acted(root))["next", "count"].flatten().tolist() == [1, 1]


def seeds_anew(env, root):
    env.set_seed(3)
    return root


def steps_a_row(env, root):
    return env.step_mdp(env.step(root.set("_step", torch.tensor([T, F]))))


def resets_a_row(env, root):
    return env.reset(root.set("_reset", torch.tensor([[T], [F]])))


@pytest.mark.parametrize(
    "go_on",
    [
        lambda env, root: root.clone(),
        lambda env, root: root[torch.arange(2)],
        lambda env, root: env.step_mdp(env.step(root)),
        lambda env, root: env.step_and_maybe_reset(root)[1],
        lambda env, root: env.step_mdp(env.rollout(9, break_when_any_done=False)[..., -1]),
        lambda env, root: root.exclude("state"),
        lambda env, root: root.set("count", root["count"] - 7),
        seeds_anew,
        steps_a_row,
        resets_a_row,
    ],
    ids=lambda go_on: getattr(go_on, "__name__", None),
)
def test_what_is_made_of_the_newest_data_can_be_stepped(go_on):
    env = MixedEnv([counts()])
    root = env.step_mdp(env.step(acted(env.reset())))

    data = env.step(acted(env.maybe_reset(go_on(env, acted(root)))))

    assert data["next", "reward"].all()


@pytest.mark.parametrize(
    "stop", [{}, {"break_when_any_done": False}, {"break_when_all_done": True}]
)
def test_rollouts_through_transforms_go_on_from_the_newest_data(stop):
    env = MixedEnv([SerialEnv(2, [partial(Count, 2), partial(Count, 4)]), counts()])
    cast = DTypeCastTransform(torch.int64, torch.float32, in_keys=["count"])
    scaled = ObservationNorm(loc=3.0, scale=2.0, in_keys=["count"])
    env = TransformedEnv(env, Compose(cast, scaled, StepCounter()))

    data = env.rollout(7, **stop)

    assert (data["next", "count"] == data["next", "step_count"] * 2.0 + 3.0).all()


def test_members_must_leave_the_name_of_the_states_free():
    def make():
        return SerialEnv(1, lambda: TransformedEnv(Count(3), RenameTransform(["count"], ["state"])))

    with pytest.raises(KeyCollisionError, match=r"'state'.*\('state', 'moment'\).*RenameTransform"):
        MixedEnv([make(), make()])


# ----------------------------------------------------------------------------- what members told


def reset_the_first(env, root):
    root = env.reset(root.set("_reset", torch.tensor([[T], [F], [F], [F]])))
    assert root["count"].flatten().tolist() == [0, 77, 77, 77]


def step_the_first(env, root):
    data = env.step(acted(root).set("_step", torch.tensor([T, F, F, F])))
    assert data["next", "count"].flatten().tolist() == [2, 77, 77, 77]


def preset_what_follows(env, root):
    root = acted(root)
    root["next", "count"] = torch.full((4, 1), 77)
    data, _ = env.step_and_maybe_reset(root)
    assert data["next", "count"].flatten().tolist() == [77, 77, 77, 77]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (reset_the_first, [0, 1, 1, 1]),
        (step_the_first, [2, 1, 1, 1]),
        (preset_what_follows, [2, 2, 2, 2]),
    ],
)
def test_what_the_caller_says_of_a_row_is_not_what_its_member_told(call, expected):
    env = MixedEnv([counts(), counts()])
    root = env.step_mdp(env.step(acted(env.reset())))

    call(env, root.set("count", torch.full((4, 1), 77)))
    root_after = env.reset(TensorDict({"_reset": torch.zeros(4, 1, dtype=torch.bool)}, [4]))

    assert root_after["count"].flatten().tolist() == expected


def test_what_the_caller_says_of_a_state_is_not_what_its_member_told():
    env = MixedEnv([StatelessCount(9, batch_size=[2])])
    root = env.reset().set("count", torch.tensor([[5], [6]]))

    shown = env.reset(root.set("_reset", torch.tensor([[T], [F]])))["count"].tolist()
    told = env.reset(TensorDict({"_reset": torch.zeros(2, 1, dtype=torch.bool)}, [2]))

    assert shown == [[0], [6]]
    assert told["count"].tolist() == [[0], [0]]


def test_what_the_caller_says_of_a_part_of_a_row_is_not_what_its_member_told():
    env = MixedEnv([SerialEnv(1, Zeros)])
    root = env.reset().set("val", torch.tensor([[5, 6]]))

    shown = env.reset(root.set("_reset", torch.tensor([[T, F]])))["val"].tolist()
    told = env.reset(TensorDict({"_reset": torch.zeros(1, 2, dtype=torch.bool)}, [1]))

    assert shown == [[0, 6]]
    assert told["val"].tolist() == [[0, 0]]


KINDS = {
    "rows": lambda: SerialEnv(2, Count, use_buffers=True),
    "tensordicts": lambda: SerialEnv(2, Count, use_buffers=False),
    "lazy stacks": lambda: SerialEnv(2, Count, share_individual_td=True),
    "processes": lambda: ParallelEnv(2, Count),
    "transformed": lambda: TransformedEnv(SerialEnv(2, Count), StepCounter()),
    "nested": lambda: MixedEnv([SerialEnv(1, Count), SerialEnv(1, Count)]),
}


@pytest.fixture(params=KINDS)
def beside(request) -> Iterator[MixedEnv]:
    """A member of each kind between two that have nothing to do with it, reset."""
    env = MixedEnv([counts(), KINDS[request.param](), ParallelEnv(1, Count)])
    yield env
    env.close()


@pytest.mark.parametrize("call", ["step", "step_and_maybe_reset"])
def test_an_action_that_one_member_refuses_leaves_all_as_they_were(beside, call):
    root = acted(beside.reset())
    wrong = root.clone().set("action", torch.tensor([[0], [0], [0], [7], [0]]))

    with pytest.raises(InputError, match=r"'action' of row 3 is \[7\]"):
        getattr(beside, call)(wrong.clone())
    with pytest.raises(InputError, match=r"'action' of row 3 "):
        getattr(beside, call)(wrong.set("_step", torch.tensor([T, F, F, T, T])))
    data = beside.step(root.set("_step", torch.tensor([T, T, T, F, T])))

    assert data["next", "count"].flatten().tolist() == [1, 1, 1, 0, 1]


@pytest.mark.parametrize(
    ("spoil", "error", "match"),
    [
        (lambda td: td["action"][1].fill_(torch.nan), InputError, "'action' of row 1 .*NaN"),
        (lambda td: td["action"][4].fill_(torch.nan), InputError, "'action' of row 4 .*NaN"),
        (lambda td: td.pop("state"), MissingKeyError, "'state'"),
        (lambda td: td.set("_step", torch.ones(5)), StepMaskError, "boolean"),
    ],
)
def test_a_refused_step_moves_neither_jax_rows_nor_processes(mixed, spoil, error, match):
    root = mixed.reset().set("action", torch.full((5, 1), 0.5))
    wrong = root.clone()
    spoil(wrong)

    with pytest.raises(error, match=match):
        mixed.step(wrong)
    data = mixed.step(root)

    moved = data["next", "observation"] - data["observation"]
    assert moved.flatten().tolist() == pytest.approx([0.5] * 5)


def test_rows_of_a_vector_env_are_checked_before_others_are_stepped():
    lax = {"categorical_action_encoding": True}
    poles = GymEnv("CartPole-v1", num_envs=2, **lax)
    env = MixedEnv([SerialEnv(1, lambda: GymEnv("CartPole-v1", **lax)), poles])
    root = env.reset()

    with pytest.raises(InputError, match="'action' of row 2 is 5"):
        env.step(root.clone().set("action", torch.tensor([0, 1, 5])))
    data = env.step(root.set("action", torch.tensor([0, 1, 1])))

    assert (data["next", "observation"] != data["observation"]).any(-1).all()
    env.close()


def test_a_member_that_fails_leaves_no_other_in_the_middle_of_a_step():
    def make():
        return SerialEnv(2, partial(Chaos, 9), use_buffers=False)

    env = MixedEnv([make(), make()])
    root = env.reset()
    faults = torch.tensor([[Chaos.FAULTS.index("raise")], [0], [0], [0]])

    with pytest.raises(RuntimeError, match="cannot go on from 0"):
        env.step(root.clone().set("action", faults))
    with pytest.raises(ResetMaskError, match=r"after a step that failed.*without a mask"):
        env.reset(root.clone().set("_reset", torch.tensor([[T], [F], [F], [F]])))

    assert [*env.members[0].env.c, *env.members[1].env.c] == [0, 1, 1, 1]
    assert env.step(acted(env.reset()))["next", "count"].flatten().tolist() == [1] * 4


# -------------------------------------------------------------------- what members are to a module


def counts(**options) -> SerialEnv:
    return SerialEnv(2, Count, **options)


def normed() -> TransformedEnv:
    return TransformedEnv(counts(), VecNorm(in_keys=["count"], out_keys=["normed"]))


def weights(env: MixedEnv) -> list[float]:
    """Say how much the `VecNorm` of each member has seen."""
    states = env.state_dict()
    return [states[member.name]["moments.count.weight"].item() for member in env.members]


def test_the_state_of_members_is_saved_and_loaded():
    env, other = MixedEnv([normed(), normed()]), MixedEnv([normed(), normed()])
    before = weights(other)
    env.rollout(4)

    state = env.state_dict()
    other.load_state_dict(state)

    assert list(state) == ["member0", "member1", "_state"]
    assert before != weights(env) == weights(other)


def test_a_mean_that_is_frozen_stays_as_it_is():
    env = MixedEnv([normed(), normed()])
    env.rollout(3)
    for member in env.members:
        member.env.transform.freeze()
    before = weights(env)

    env.rollout(3)

    assert weights(env) == before


def test_members_move_with_the_env():
    env = MixedEnv([counts(), counts()])
    before = env.reset().device

    moved = env.to("cpu")

    assert before is None
    assert moved is env
    assert [member.env.device for member in env.members] == [torch.device("cpu")] * 2
    assert env.rollout(2).device == torch.device("cpu")


def test_data_goes_where_the_env_and_each_member_expect_it():
    lax = {"allow_done_after_reset": True}  # flags on meta cannot be read
    meta, cpu = torch.device("meta"), torch.device("cpu")
    env = MixedEnv([counts(device="cpu", **lax), counts(**lax)])
    env._device = meta  # the one other device of every machine, which users are refused

    root = env.reset()
    parts = [member.part(TensorDict({"action": torch.ones(4, 1)}, [4])) for member in env.members]
    EnvBase.to(env.members[1].env, meta)
    moved = env.members[1].part(TensorDict({"action": torch.ones(4, 1)}, [4]))

    assert {root.device, root["count"].device} == {meta}
    assert [part["action"].device for part in parts] == [cpu, cpu]
    assert moved["action"].device == meta


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_members_on_two_devices_deliver_to_one():
    members = [counts(device="cuda"), counts(device="cpu")]
    with pytest.raises(
        ArgumentError,
        match=r"\['cuda:0', 'cpu'\].*MixedEnv\(members, device='cuda:0'\)",
    ):
        MixedEnv(members)
    env = MixedEnv(members, device="cuda")

    data = env.rollout(7, break_when_any_done=False)
    env.to("cpu")
    on_cpu = env.rollout(2)

    assert data.device.type == data["next", "count"].device.type == "cuda"
    assert data["next", "count"].squeeze(-1).tolist() == [[1, 2, 3, 4, 5, 1, 2]] * 4
    assert on_cpu["next", "count"].device.type == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_jax_rows_on_a_gpu_stand_beside_processes():
    env = MixedEnv([jax_rows(device="cuda"), SerialEnv(2, make_gym)], device="cuda")

    data = env.rollout(4, break_when_any_done=False)
    moved = env.to("cpu").rollout(4, break_when_any_done=False)

    assert data.device.type == data["observation"].device.type == "cuda"
    assert moved["observation"].device.type == "cpu"


# ------------------------------------------------------------------------------------- two phases


@pytest.mark.parametrize("use_buffers", [True, False])
@pytest.mark.parametrize("call", ["step", "step_and_maybe_reset"])
@pytest.mark.parametrize("here_first", [True, False])
def test_processes_step_while_rows_of_this_process_do(use_buffers, call, here_first):
    here = SerialEnv(1, partial(Slow, 0.3), use_buffers=use_buffers)
    there = ParallelEnv(1, partial(Slow, 0.3), use_buffers=True)
    with ExitStack() as stack:
        env = MixedEnv([here, there] if here_first else [there, here])
        stack.callback(env.close)

        getattr(env, call)(env.rand_action(env.reset()))
        ((began_here, ended_here),), ((began_there, ended_there),) = here.times, there.times

    assert began_there < ended_here
    assert began_here < ended_there


def test_closing_a_mixed_env_closes_its_members():
    members = [jax_rows(1), gym_rows(1)]
    env = MixedEnv(members)

    env.close()

    assert env.is_closed
    assert all(member.is_closed for member in members)
    env.close()


def test_three_members_are_concatenated_in_order():
    env = MixedEnv([jax_rows(1), gym_rows(1), jax_rows(2)])
    env.set_seed(0)

    root = env.reset()
    out = env.step(root.clone().set("action", torch.tensor([[-1.0], [-0.5], [0.0], [0.5]])))
    env.close()

    moved = (out["next", "observation"] - root["observation"]).squeeze(-1)
    assert moved.tolist() == pytest.approx([-1.0, -0.5, 0.0, 0.5])
