"""Envs of a collector can be asked and changed between batches, wherever they are; and what a worker is given."""

from __future__ import annotations

import json
import re
import warnings

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase

from envkit import (
    AsyncCollector,
    Collector,
    Composite,
    EnvBase,
    GymEnv,
    MultiaSyncDataCollector,
    MultiCollector,
    MultiSyncDataCollector,
    PendulumJaxEnv,
    RandomPolicy,
    RewardSum,
    SerialEnv,
    StepCounter,
    SyncDataCollector,
    TransformedEnv,
    Unbounded,
    VecNorm,
    VecNormV2,
)
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    KeyCollisionError,
    OptionError,
    WorkerError,
)
from tests.zoo.envs import Count

CHOICE = {"dtype": torch.int64}


def one() -> Count:
    return Count(5)


def two() -> SerialEnv:
    return SerialEnv(2, one)


def counted() -> TransformedEnv:
    return TransformedEnv(two(), StepCounter())


def longest(batch) -> int:
    return int(batch["next", "count"].max())


@pytest.mark.parametrize("make", [one, two, counted])
def test_single_envs_here_are_asked_and_changed(make):
    collector = SyncDataCollector(make, frames_per_batch=20)
    collector.next()
    envs = len(collector.get_attr("n"))

    collector.set_attr("n", 3, indices=-1)

    assert collector.get_attr("n") == [*[5] * (envs - 1), 3]
    assert collector.call("hello", 2, indices=[envs - 1]) == [5]
    collector.reset()
    last = collector.next()[-1] if envs > 1 else collector.next()
    assert longest(last) == 3
    collector.shutdown()


@pytest.mark.parametrize("kind", [MultiSyncDataCollector, MultiaSyncDataCollector])
def test_envs_of_workers_are_numbered_over_all_of_them(kind):
    with kind([two] * 2, frames_per_batch=40) as collector:
        collector.next()

        collector.set_attr("n", 3, indices=[0, 3])

        assert collector.get_attr("n") == [3, 5, 5, 3]
        assert collector.get_attr("n", indices=[3, 1]) == [3, 5]
        assert collector.call("hello", x=1) == [4, 6, 6, 4]
        with pytest.raises(AttributeError, match=r"no attribute 'unheard_of'"):
            collector.get_attr("unheard_of")
        with pytest.raises(ArgumentError, match=r"there are 4 sub-envs"):
            collector.set_attr("n", 3, indices=4)
        collector.next()


def test_what_is_set_holds_from_the_next_batch_and_none_is_lost():
    with MultiSyncDataCollector([one] * 2, frames_per_batch=20, prefetch=1) as collector:
        batches = [collector.next()]
        collector.set_attr("n", 2)
        batches += [collector.next(), collector.next()]

    assert [longest(batch) for batch in batches] == [5, 5, 2]
    assert collector.frames == 60


def test_paths_lead_to_what_a_worker_has():
    with MultiSyncDataCollector([one] * 2, RandomPolicy(), frames_per_batch=4) as collector:
        collector.next()

        assert collector.get_distant_attr("worker_idx") == [0, 1]
        assert collector.get_distant_attr("frames") == [2, 2]
        assert collector.map_fn("env.hello", [(1,), (2,)]) == [6, 7]
        assert collector.map_fn("env.hello", list_of_kwargs=[{"x": 3}] * 2) == [8, 8]
        assert collector.getattr_env("n") == 5
        assert collector.getattr_policy("action_key") == "action"
        assert collector.frames_per_batch_worker() == 2
        with pytest.raises(ArgumentError, match=r"have \[1\] entries, but there are 2 calls"):
            collector.map_fn("env.hello", [(1,)])


def test_an_env_of_a_worker_that_was_reset_by_name_is_refused_since_its_warnings_are_hidden():
    with MultiSyncDataCollector([one] * 2, RandomPolicy(), frames_per_batch=4) as collector:
        first = collector.next()
        collector.map_fn("env.reset")

        refused = []
        for _ in range(2):  # each worker says it once, in any order
            with pytest.raises(WorkerError, match=r"StaleDataError.*by other code") as error:
                collector.next()
            refused.append(re.match(r"worker (\d)", str(error.value))[1])
        batch = collector.next()

        assert sorted(refused) == ["0", "1"]
        numbers = [set(data["collector", "traj_ids"].flatten().tolist()) for data in (first, batch)]
        assert not numbers[0] & numbers[1]


@pytest.mark.parametrize("kind", [VecNorm, VecNormV2])
def test_statistics_of_workers_come_to_an_env_for_evaluation(kind):
    def make():
        return TransformedEnv(pendulum(), kind(in_keys=["observation"]))

    judged = make()
    with MultiSyncDataCollector([make] * 2, frames_per_batch=40) as collector:
        collector.next()
        states = collector.map_fn("env.transform.state_dict")
        first, second = collector.get_distant_attr("env.transform.loc")

    judged.transform.load_state_dict(states[0])

    assert torch.equal(judged.transform.loc["observation"], first["observation"])
    assert not torch.equal(first["observation"], second["observation"])


def test_one_worker_of_its_own_goes_on_while_the_caller_trains(tmp_path):
    collector = AsyncCollector(
        one, frames_per_batch=5, total_frames=20, init_fn=(tmp_path / "begun").touch
    )

    assert (tmp_path / "begun").exists()
    assert len(collector) == 4
    assert [tuple(batch.shape) for batch in collector] == [(5,)] * 4
    collector.shutdown()


@pytest.mark.parametrize(
    ("sync", "kind"), [(True, MultiSyncDataCollector), (False, MultiaSyncDataCollector)]
)
def test_the_class_of_workers_gives_the_kind_that_fits(sync, kind):
    class Mine(MultiCollector):
        mark = 7

    with MultiCollector([one], sync=sync, frames_per_batch=2) as collector:
        assert type(collector) is kind
    with Mine([one], sync=sync, frames_per_batch=2) as collector:
        assert isinstance(collector, kind) and isinstance(collector, Mine) and collector.mark == 7
        assert collector.next().numel() == 2


def test_a_number_of_workers_means_processes():
    with Collector(one, frames_per_batch=4, num_collectors=2) as collector:
        assert type(collector) is MultiSyncDataCollector and len(collector.worker_pids) == 2


# ------------------------------------------------------------------------------------------ seeds


def drawn(td):
    return td.set("action", torch.randn((*td.batch_size, 1)).clamp(-2, 2))


def pendulum():
    return GymEnv("Pendulum-v1")


def normed():
    return TransformedEnv(pendulum(), VecNorm(in_keys=["observation"]))


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (pendulum, {}),
        (normed, {}),
        (lambda: SerialEnv(2, pendulum), {}),
        (lambda: PendulumJaxEnv(batch_size=[2]), {}),
        (normed, {"backend": "process", "num_collectors": 2}),
    ],
    ids=["one", "normed", "two", "jax", "workers"],
)
@pytest.mark.parametrize("policy", [None, drawn], ids=["random", "drawing"])
def test_the_same_seed_gives_the_same_data(make, options, policy):
    def batches(seed):
        torch.randn(3)  # what a program has drawn before does not matter
        with Collector(make, policy, frames_per_batch=8, seed=seed, **options) as collector:
            return [collector.next() for _ in range(2)]

    first, again, other = batches(3), batches(3), batches(4)

    for batch, twin in zip(first, again, strict=True):
        assert (batch == twin).all()
    assert not torch.equal(first[0]["action"], other[0]["action"])


def test_what_a_factory_draws_follows_the_seed_too():
    def factory():
        return TensorDictModule(torch.nn.Linear(3, 1), ["observation"], ["action"])

    def first(seed):
        collector = Collector(pendulum, policy_factory=factory, frames_per_batch=4, seed=seed)
        return collector.next()["action"]

    assert torch.equal(first(3), first(3))
    assert not torch.equal(first(3), first(4))


@pytest.mark.parametrize("seed", [-1, 0.5, "3"])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(ValueError, match=r"seed is .*the seed of all envs and generators"):
        SyncDataCollector(one, frames_per_batch=4, seed=seed)


# ---------------------------------------------------------------------------------------- weights


class Says(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.choice = torch.nn.Parameter(torch.zeros(1))

    def forward(self, count):
        return (self.choice * 0).long().expand(count.shape).clone()


def train(policy) -> None:
    with torch.no_grad():
        policy.choice += 1


@pytest.mark.parametrize("kind", [MultiSyncDataCollector, MultiaSyncDataCollector])
def test_weights_that_were_never_sent_are_warned_of_once(kind):
    policy = Says()
    with kind([one], policy, frames_per_batch=2) as collector:
        for _ in range(3):
            collector.next()
            train(policy)
        with pytest.warns(UserWarning, match=r"none were sent.*update_policy_weights_\(\)"):
            collector.next()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(4):
                train(policy)
                collector.next()


def test_weights_that_are_sent_or_never_change_are_not_warned_of():
    policy = Says()
    with MultiSyncDataCollector([one], policy, frames_per_batch=2) as collector:
        for _ in range(5):
            collector.next()
        for _ in range(5):
            train(policy)
            collector.update_policy_weights_()
            collector.next()

    assert collector.policy_version == 5


def test_a_version_that_is_counted_by_hand_sends_nothing():
    policy = Says()
    with MultiSyncDataCollector(
        [one], policy, frames_per_batch=2, track_policy_version=True
    ) as collector:
        collector.increment_version()
        assert collector.next()["policy_version"].tolist() == [[1, 1]]
        train(policy)
        collector.update_policy_weights_(policy=policy)

        assert collector.next()["next", "policy_version"].tolist() == [[2, 2]]
        assert collector.getattr_policy("choice").tolist() == [1.0]


@pytest.mark.parametrize("name", ["policy_or_weights", "policy_weights", "weights", "policy"])
def test_weights_have_any_of_the_names(name):
    policy, trained = Says(), Says()
    train(trained)
    collector = SyncDataCollector(one, policy, frames_per_batch=2)

    collector.update_policy_weights_(**{name: trained})

    assert policy.choice.item() == 1
    with pytest.raises(KeyError, match=r"weights for \['critic'\]"):
        collector.update_policy_weights_(trained, model_id="critic")
    with pytest.raises(ValueError, match=r"2 sets of weights"):
        collector.update_policy_weights_(trained, weights_dict={"policy": trained})


# --------------------------------------------------------------------------------------- keywords


class Remembers(torch.nn.Module):
    """A policy that needs an entry which only its primer gives."""

    in_keys, out_keys = ["hidden", "count"], ["action"]

    def make_tensordict_primer(self):
        from envkit import TensorDictPrimer, Unbounded

        return TensorDictPrimer(hidden=Unbounded((2,)))

    def forward(self, tensordict):
        return tensordict.set("action", torch.zeros((*tensordict.batch_size, 1), **CHOICE))


@pytest.mark.parametrize(("asked", "is_completed"), [(None, True), (True, True), (False, False)])
@pytest.mark.parametrize("options", [{}, {"num_collectors": 1}], ids=["here", "worker"])
def test_an_env_is_completed_for_a_policy_unless_that_is_refused(asked, is_completed, options):
    with Collector(
        one,
        Remembers(),
        frames_per_batch=2,
        auto_register_policy_transforms=asked,
        **options,
    ) as collector:
        assert ("hidden" in collector.next().keys()) is is_completed


def test_compact_batches_of_workers_have_no_next_observation_and_whole_episodes():
    with Collector(
        counted, num_collectors=2, trajs_per_batch=3, traj_format="cat", compact_obs=True
    ) as collector:
        batch = collector.next()

    assert set(batch["next"].keys()) == {"reward", "done", "terminated"}
    assert batch["count"].flatten().tolist() == [*range(5)] * 3


def test_a_version_is_refused_beside_an_entry_of_its_name():
    def make():
        return TransformedEnv(pendulum(), RewardSum(["reward"], ["policy_version"]))

    with pytest.raises(KeyCollisionError, match=r"records 'policy_version'.*RenameTransform"):
        SyncDataCollector(make, frames_per_batch=2, track_policy_version=True)


@pytest.mark.parametrize(
    ("error", "text", "options"),
    [
        (OptionError, "needs trajs_per_batch=", {"trajs_per_write": 1}),
        (
            OptionError,
            "two names of one option",
            {"extend_buffer": True, "replay_buffer_chunk": False, "replay_buffer": []},
        ),
        (
            ArgumentTypeError,
            r"must have a method collection_stopped\(\)",
            {"interruptor": object()},
        ),
        (ArgumentTypeError, r"worker_idx is 'a'", {"worker_idx": "a"}),
        (
            ArgumentError,
            r"split_trajs and trajs_per_batch need",
            {"track_traj_ids": False, "trajs_per_batch": 1},
        ),
    ],
)
def test_keywords_that_contradict_each_other_are_refused(error, text, options):
    with pytest.raises(error, match=text):
        SyncDataCollector(one, frames_per_batch=2, **options)


class Once:
    """Stops a batch after its third step, once."""

    calls = 0

    def collection_stopped(self) -> bool:
        self.calls += 1
        return self.calls == 3


def test_an_interruptor_of_workers_is_named_by_its_other_name():
    with pytest.raises(OptionError, match=r"preemptive_threshold="):
        MultiSyncDataCollector([one], frames_per_batch=2, interruptor=Once())


def test_frames_of_an_interrupted_batch_are_those_that_were_made():
    collector = SyncDataCollector(two, frames_per_batch=20, interruptor=Once())
    short, whole = collector.next(), collector.next()

    assert short.shape == whole.shape == (2, 10)
    assert short["collector", "mask"].sum() == 6 and whole["collector", "mask"].all()
    assert collector.frames == 26
    assert torch.equal(whole["count"][:, 0], short["next", "count"][:, 2])


def test_batches_of_a_worker_are_profiled(tmp_path):
    with Collector(one, frames_per_batch=4, num_collectors=2) as collector:
        collector.enable_profile(
            workers=[1],
            num_rollouts=2,
            save_path=tmp_path / "at" / "{worker_idx}.json",
            with_stack=False,
        )
        for _ in range(3):
            collector.next()
        collector.disable_profile()

    (trace,) = (tmp_path / "at").iterdir()
    assert trace.name == "1.json" and json.loads(trace.read_text())["traceEvents"]


class Watchful(Count):
    """Notes on which device it is stepped."""

    def _step(self, td):
        self.stepped_on = td.device
        return super()._step(td)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [({}, None), ({"policy_device": "cpu"}, None), ({"env_device": "cpu"}, torch.device("cpu"))],
    ids=["none", "of the policy", "of the env"],
)
def test_an_env_without_a_device_is_stepped_on_none_wherever_its_policy_acts(devices, expected):
    env = Watchful(device=None)
    policy = RandomPolicy(env.full_action_spec)

    collector = SyncDataCollector(env, policy, frames_per_batch=2, total_frames=2, **devices)
    next(iter(collector))
    collector.shutdown()

    assert env.stepped_on == expected


SIZES = (1, 3)


class Unlike(EnvBase):
    """Two agents: one sees and does one number, the other three. It shows what they did before."""

    def __init__(self):
        super().__init__()
        specs = [Composite(seen=Unbounded((size,))) for size in SIZES]
        acts = [Composite(action=Unbounded((size,))) for size in SIZES]
        self.observation_spec = Composite(agents=torch.stack(specs, 0))
        self.full_action_spec = Composite(agents=torch.stack(acts, 0))
        self.reward_spec = Unbounded((1,))

    def _shown(self, each):
        return LazyStackedTensorDict(*[TensorDict({"seen": one}) for one in each], stack_dim=0)

    def _reset(self, td, **kwargs):
        return TensorDict({"agents": self._shown([torch.zeros(size) for size in SIZES])})

    def _step(self, td):
        did = [td["agents"][agent]["action"].clone() for agent in range(2)]
        flag = torch.zeros(1, dtype=torch.bool)
        return TensorDict({"agents": self._shown(did), "reward": torch.ones(1), "done": flag})

    def _set_seed(self, seed):
        pass


class OneMore(TensorDictModuleBase):
    """Each agent does one more than it sees."""

    in_keys = [("agents", "seen")]  # noqa: RUF012
    out_keys = [("agents", "action")]  # noqa: RUF012

    def forward(self, td):
        for agent in range(2):
            one = td["agents"][agent]
            one["action"] = one["seen"] + 1
        return td


@pytest.mark.parametrize("form", ["module", "function"])
def test_a_policy_acts_for_agents_with_actions_of_unlike_size(form):
    policy = OneMore() if form == "module" else lambda td: OneMore()(td)
    collector = SyncDataCollector(Unlike(), policy, frames_per_batch=3, total_frames=6)

    batches = list(collector)
    collector.shutdown()

    for number, data in enumerate(batches):
        for agent, size in enumerate(SIZES):
            did = data["agents"][:, agent]["action"]
            steps = torch.arange(1.0, 4.0) + 3 * number
            assert torch.equal(did, steps.unsqueeze(-1).expand(3, size))


@pytest.mark.parametrize("keyword", ["return_same_td", "no_cuda_sync"])
def test_a_batch_that_is_held_stays_as_it_is_with_keywords_of_no_effect(keyword):
    with Collector(one, frames_per_batch=3, total_frames=6, **{keyword: True}) as collector:
        first, second = list(collector)

    assert first["count"].flatten().tolist() == [0, 1, 2]
    assert second["count"].flatten().tolist() == [3, 4, 0]


def test_workers_that_deliver_one_by_one_have_no_results_to_stack():
    with MultiaSyncDataCollector(
        [one] * 2, None, frames_per_batch=5, total_frames=10, cat_results="stack"
    ) as collector:
        batches = list(collector)

    assert [batch["count"].flatten().tolist() for batch in batches] == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize(
    "make",
    [lambda: PendulumJaxEnv(batch_size=[2]), lambda: GymEnv("CartPole-v1", num_envs=2)],
    ids=["JaxEnv", "vector env"],
)
def test_a_parameter_that_would_not_reach_the_simulators_of_rows_is_not_set(make):
    with (
        Collector(make, frames_per_batch=4) as collector,
        pytest.raises(AttributeError, match=r"'gravity'.*would not reach the simulators"),
    ):
        collector.set_attr("gravity", 3.0)
