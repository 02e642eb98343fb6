"""`env[index]`: some sub-envs of a batched env as an env of their own."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from envkit import (
    GymEnv,
    ObservationNorm,
    ParallelEnv,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)
from envkit.errors import (
    ArgumentCountError,
    ArgumentError,
    ArgumentTypeError,
    ClosedEnvError,
    NotSelectableError,
    ResumeError,
    RowIndexError,
    UnsupportedError,
    WorkerError,
)
from tests.zoo.envs import Count


class Swappable(Count):
    """Takes over the limit of another one."""

    def __setitem__(self, index, source):
        self.n = source.n


def pendulum():
    return GymEnv("Pendulum-v1")


KINDS = {
    "serial": lambda make: SerialEnv(3, make),
    "serial, tds": lambda make: SerialEnv(3, make, use_buffers=False),
    "serial, rows": lambda make: SerialEnv(3, make, share_individual_td=True),
    "parallel": lambda make: ParallelEnv(3, make, num_processes=2),
}


@pytest.fixture(params=KINDS)
def new_env(request):
    envs = []

    def make(create):
        envs.append(KINDS[request.param](create))
        return envs[-1]

    yield make
    for env in envs:
        env.close(raise_if_closed=False)


def ones(td):
    return td.set("action", torch.ones(*td.batch_size, 1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (0, [0]),
        (-1, [2]),
        (slice(1, None), [1, 2]),
        (slice(None, None, -2), [2, 0]),
        ([2, 0], [2, 0]),
        (torch.tensor([1, -1]), [1, 2]),
        (torch.tensor(1), [1]),
    ],
)
def test_a_part_steps_its_sub_envs_and_no_others(index, rows):
    env = SerialEnv(3, Count)
    env.reset()

    data = env[index].rollout(2, ones, break_when_any_done=False)

    assert data.batch_size == (len(rows), 2)
    assert data["next", "count"].tolist() == [[[1], [2]]] * len(rows)
    assert env.get_attr("steps") == [2 if row in rows else 0 for row in range(3)]


def test_a_part_is_live(new_env):
    env = new_env(Count)
    root = env.reset()
    part = env[1:]
    data = part.step(ones(part.reset()))

    stepped = env.step(ones(root))

    assert data["next", "count"].tolist() == [[1], [1]]
    assert stepped["next", "count"].tolist() == [[1], [2], [2]]
    assert part.step(ones(data["next"].exclude("reward")))["next", "count"].tolist() == [[3], [3]]


def test_a_part_gives_the_data_that_its_sub_envs_give_among_all(new_env):
    env = new_env(pendulum)
    env.set_seed(3)
    actions = torch.rand(3, 4, 1)
    whole = env.rollout(4, actions=actions.unbind(1))
    env.set_seed(3)
    env.reset()
    env.set_seed(3)

    part = env[[2, 0]].rollout(4, actions=actions[[2, 0]].unbind(1))

    assert torch.equal(part["next", "observation"], whole["next", "observation"][[2, 0]])


def test_a_part_resets_the_rows_of_its_mask_alone(new_env):
    env = new_env(Count)
    env.reset()
    part = env[[0, 2]]
    td = part.step_mdp(part.step(ones(part.reset())))

    td = part.reset(td.set("_reset", torch.tensor([[True], [False]])))

    assert td["count"].tolist() == [[0], [1]]
    assert part.step(ones(td))["next", "count"].tolist() == [[1], [2]]


def test_a_part_steps_the_rows_of_its_mask_alone(new_env):
    env = new_env(Count)
    env.reset()
    part = env[1:]

    td = part.step(ones(part.reset()).set("_step", torch.tensor([False, True])))

    assert td["next", "count"].tolist() == [[0], [1]]
    assert env.get_attr("steps") == [0, 0, 1]


def test_episodes_of_a_part_end_and_begin_by_themselves(new_env):
    env = new_env(lambda: Count(2))
    env.reset()

    data = env[2].rollout(5, ones, break_when_any_done=False)

    assert data["count"].flatten().tolist() == [0, 1, 0, 1, 0]


def test_the_first_reset_of_a_part_starts_the_batched_env(new_env):
    env = new_env(Count)

    data = env[1:].rollout(2, ones)

    assert data["next", "count"].tolist() == [[[1], [2]]] * 2
    assert env.step(ones(env.reset()))["next", "count"].tolist() == [[1]] * 3


def test_the_specs_of_a_part_hold(new_env):
    env = new_env(pendulum)
    env.reset()

    check_env_specs(env[1:])
    check_env_specs(TransformedEnv(env[0], StepCounter(3)))


def test_a_part_of_a_part_counts_its_own_rows():
    env = SerialEnv(3, Count)
    env.reset()

    env[1:][-1].rollout(2, ones)

    assert env.get_attr("steps") == [0, 0, 2]


def test_a_seed_reaches_the_sub_envs_of_the_part_alone(new_env):
    env = new_env(pendulum)
    env.set_seed(0)
    env.reset()
    part = env[[1, 2]]

    following = part.set_seed(7)
    first = part.reset()["observation"]
    same = SerialEnv(2, pendulum)

    assert same.set_seed(7) == following
    assert torch.equal(same.reset()["observation"], first)


def test_attributes_and_methods_are_those_of_the_part(new_env):
    env = new_env(Count)
    env.reset()
    part = env[1:]

    part.set_attr("n", 9, indices=1)

    assert env.get_attr("n") == [5, 5, 9]
    assert part.get_attr("n") == part.n == part.maxs == [5, 9]
    assert part.call("hello", 1) == part.hello(x=1) == [6, 10]
    with pytest.raises(AttributeError, match="nor its sub-envs have an attribute 'heloo'"):
        part.heloo  # noqa: B018


class Held:
    """What an env holds, and what can be called too."""

    def __init__(self, number):
        self.number = number

    def __call__(self, more):
        return self.number + more


class Holder(Count):
    """Counts, and holds something."""

    def __init__(self, *args):
        super().__init__(*args)
        self.held = Held(3)


def test_attributes_of_attributes_are_those_of_the_part(new_env):
    env = new_env(Holder)
    env.reset()
    part = env[1:]

    assert part.held.number == env.held.number[1:] == [3, 3]
    assert part.held(1) == [4, 4]
    with pytest.raises(AttributeError, match=r"have an attribute 'held\.size'"):
        part.held.size  # noqa: B018


def test_numbers_of_a_transform_are_read_from_one_sub_env(new_env):
    env = new_env(lambda: TransformedEnv(pendulum(), ObservationNorm(0.5, 2.0, ["observation"])))
    env.reset()

    assert env[1].transform.loc == env.transform.loc[:1] == [torch.tensor(0.5)]


def test_an_attribute_of_an_attribute_is_not_set_on_the_sub_env(new_env):
    env = new_env(Count)
    env.reset()

    for owner in (env, env[1:]):
        with pytest.raises(
            (ArgumentError, WorkerError), match=r"'transform\.loc'; expected the name"
        ):
            owner.set_attr("transform.loc", 3.0)


@pytest.mark.parametrize(
    "index",
    [True, [True, False, True], torch.tensor([True, False, True])],
)
def test_bools_choose_no_sub_envs(index):
    with pytest.raises(NotSelectableError, match=r"not chosen by bools.*nonzero"):
        SerialEnv(3, Count)[index]


@pytest.mark.parametrize("index", [3, -4, [0, 3], slice(3, None), [], 1.0, "0", [[0, 1]], (0, 5)])
def test_an_index_without_sub_envs_is_an_index_error(index):
    with pytest.raises(RowIndexError) as caught:
        SerialEnv(3, Count)[index]

    assert isinstance(caught.value, IndexError)


def test_closing_a_part_leaves_the_batched_env_running(new_env):
    env = new_env(Count)
    root = env.reset()
    part = env[0]

    part.close()
    part.close()

    assert part.is_closed and not env.is_closed
    assert env.step(ones(root))["next", "count"].tolist() == [[1]] * 3
    with pytest.raises(ClosedEnvError, match=r"was closed. Take it again: env\[index\]"):
        part.reset()


def test_a_part_ends_with_the_batched_env(new_env):
    env = new_env(Count)
    env.reset()
    part = env[0]
    td = ones(part.reset())

    env.close()
    env.reset()

    for call in (part.reset, lambda: part.step(td), lambda: part.get_attr("n"), lambda: part[0]):
        with pytest.raises(ClosedEnvError, match="of which this is a part was closed"):
            call()


def test_a_part_keeps_the_batched_env_alive():
    part = SerialEnv(2, Count)[0]

    assert part.rollout(2, ones)["next", "count"].flatten().tolist() == [1, 2]


def test_a_part_has_no_state_and_no_device_of_its_own():
    part = SerialEnv(2, Count)[0]

    with pytest.raises(ResumeError, match="Save the batched env"):
        part.state_dict()
    with pytest.raises(UnsupportedError, match=r"Call to\(\) of the batched env"):
        part.to("cpu")


def test_a_sub_env_takes_over_another_env_where_its_class_says_how(new_env):
    env = new_env(Swappable)
    env.reset()

    env[1:] = [Count(7), Count(8)]
    env[0] = Count(6)

    assert env.get_attr("n") == [6, 7, 8]


def test_a_sub_env_that_takes_over_nothing_says_so(new_env):
    env = new_env(Count)

    with pytest.raises(UnsupportedError, match=r"sub-env 1 is of type Count.*__setitem__"):
        env[1] = Count()
    with pytest.raises(ArgumentCountError, match="1 sources for 2 sub-envs"):
        env[1:] = Count()
    with pytest.raises(ArgumentTypeError, match="of type int"):
        env[1:] = [1, 2]


def test_an_error_of_a_sub_env_names_it():
    class Fails(Count):
        def _step(self, td):
            raise OSError("no gripper")

    env = SerialEnv(3, [Count, Count, Fails])
    env.reset()
    part = env[1:]

    with pytest.raises(WorkerError, match=r"(?s)2.*no gripper"):
        part.step(ones(part.reset()))
    assert env[:2].rollout(2, ones)["next", "count"].tolist() == [[[1], [2]]] * 2


def test_create_functions_are_known_before_the_start():
    one, unlike = SerialEnv(2, Count), ParallelEnv(2, [Count, pendulum])

    assert one.create_env_fn == [Count, Count] and one._single_task
    assert unlike.create_env_fn == [Count, pendulum] and not unlike._single_task
    assert one.is_closed and unlike.is_closed


def test_a_part_takes_data_without_a_device():
    env = SerialEnv(3, Count)
    env.reset()
    part = env[1:]
    root = part.reset()

    data = part.step(TensorDict({"action": torch.ones(2, 1), **dict(root.items())}, [2]))

    assert data["next", "count"].tolist() == [[1], [1]]
