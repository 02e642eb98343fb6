"""What collectors refuse: told at construction where it can be known then, with a way out; nothing is left running."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch.utils.data import DataLoader

import envkit
from envkit import (
    Collector,
    GymEnv,
    MultiaSyncDataCollector,
    MultiSyncDataCollector,
    ParallelEnv,
    RandomPolicy,
    SerialEnv,
    SyncDataCollector,
)
from envkit.collectors.collector import ShownSetting
from envkit.errors import (
    ArgumentCountError,
    ArgumentError,
    ArgumentTypeError,
    ClosedEnvError,
    DeviceNameError,
    DoneError,
    InputError,
    MissingFileError,
    MissingKeyError,
    NoBufferError,
    NotStartedError,
    OptionError,
    PolicyError,
    ReadOnlyError,
    SpecError,
    UnsupportedError,
    WorkerError,
    WriteError,
)
from tests.zoo.envs import Count
from tests.zoo.refusals import assert_refused, each_row

KINDS = [SyncDataCollector, MultiSyncDataCollector, MultiaSyncDataCollector]
WITH_WORKERS = KINDS[1:]
ENOUGH = {"frames_per_batch": 4}


def refused(error, text: str, cls, make=Count, *, policy=None, **options) -> None:
    """Check that nothing is built: `Unbuilt` would say so."""
    makers = make if cls is SyncDataCollector else [make] * 2
    with pytest.raises(error, match=text):
        cls(makers, policy, **options)


def unbuilt():
    raise AssertionError("an env was built, though the options were refused")


WRONG_VALUES = [
    (OptionError, r"Pass one of them: transitions", {}),
    (
        ArgumentError,
        r"frames_per_batch is 0, but must be an int of at least 1",
        {"frames_per_batch": 0},
    ),
    (ArgumentTypeError, r"frames_per_batch is 2\.5", {"frames_per_batch": 2.5}),
    (ArgumentTypeError, r"frames_per_batch is '4'", {"frames_per_batch": "4"}),
    (
        ArgumentTypeError,
        r"frames_per_batch is True, but must be an int",
        {"frames_per_batch": True},
    ),
    (ArgumentTypeError, r"total_frames is True", {"total_frames": True}),
    (ArgumentError, r"trajs_per_batch is -1", {"trajs_per_batch": -1}),
    (
        ArgumentError,
        r"traj_format is 'flat', but must be 'padded' or 'cat'",
        {"traj_format": "flat"},
    ),
    (ArgumentError, r"total_frames is 0", {"total_frames": 0}),
    (ArgumentError, r"total_frames is -4", {"total_frames": -4}),
    (
        ArgumentTypeError,
        r"init_random_frames is 'all', but must be an int of at least -1",
        {"init_random_frames": "all"},
    ),
    (ArgumentTypeError, r"max_frames_per_traj is 1\.5", {"max_frames_per_traj": 1.5}),
    (
        ArgumentError,
        r"max_frames_per_traj is -3, but must be an int of at least -1",
        {"max_frames_per_traj": -3},
    ),
    (ArgumentError, r"init_random_frames is -3", {"init_random_frames": -3}),
    (ArgumentError, r"prefetch is 2, but at most 1", {"prefetch": 2}),
    (ArgumentError, r"prefetch is -1", {"prefetch": -1}),
    (ArgumentTypeError, r"reset_at_each_iter is 2, but must be a bool", {"reset_at_each_iter": 2}),
    (ArgumentTypeError, r"reset_when_done is None", {"reset_when_done": None}),
    (ArgumentTypeError, r"set_truncated is 'yes'", {"set_truncated": "yes"}),
    (ArgumentTypeError, r"progress is 2", {"progress": 2}),
    (ArgumentTypeError, r"split_trajs is 'yes'", {"split_trajs": "yes"}),
    (ArgumentTypeError, r"use_buffers is 2", {"use_buffers": 2}),
    (ArgumentTypeError, r"trust_policy is -1", {"trust_policy": -1}),
    (ArgumentTypeError, r"track_policy_version is 'on'", {"track_policy_version": "on"}),
    (ArgumentTypeError, r"record_state is 2", {"record_state": 2}),
    (ArgumentTypeError, r"postproc is 3, of type int, but must be callable", {"postproc": 3}),
    (ArgumentTypeError, r"pre_collect_hook is \[\]", {"pre_collect_hook": []}),
    (ArgumentTypeError, r"post_collect_hook is 'f'", {"post_collect_hook": "f"}),
    (ArgumentTypeError, r"policy_factory is 7", {"policy_factory": 7}),
    (
        ArgumentTypeError,
        r"compile_policy is 'inductor', but must be True, False, or a dict",
        {"compile_policy": "inductor"},
    ),
    (ArgumentTypeError, r"cudagraph_policy is 2", {"cudagraph_policy": 2}),
    (
        ArgumentTypeError,
        r"create_env_kwargs is 5, of type int, but must be a dict",
        {"create_env_kwargs": 5},
    ),
    (
        ArgumentTypeError,
        r"exploration_type is 'mode', but must be .*ExplorationType\.MODE",
        {"exploration_type": "mode"},
    ),
    (
        ArgumentTypeError,
        r"replay_buffer is 3, of type int, but must have a method extend",
        {"replay_buffer": 3},
    ),
    (
        ArgumentTypeError,
        r"replay_buffer is \[\], of type list, but must have a method add",
        {"replay_buffer": [], "replay_buffer_chunk": False},
    ),
    (
        OptionError,
        r"replay_buffer_chunk=False needs a replay_buffer",
        {"replay_buffer_chunk": False},
    ),
    (
        ArgumentError,
        r"device is 'tpu9', which is no device that torch has here",
        {"env_device": "tpu9"},
    ),
    (ArgumentError, r"storing_device is 3\.5", {"storing_device": 3.5}),
    (
        ArgumentError,
        r"^device is 'mps:77'",
        {"device": "mps:77", "storing_device": "cpu", "env_device": "cpu"},
    ),
    (
        OptionError,
        r"takes no keyword 'frame_per_batch'.*Did you mean 'frames_per_batch'",
        {"frame_per_batch": 2},
    ),
    (
        OptionError,
        r"reset_when_done=False steps envs on.*Leave out split_trajs",
        {"reset_when_done": False, "split_trajs": True},
    ),
    (PolicyError, r"policy is 3, of type int, but must be callable", {"policy": 3}),
    (
        OptionError,
        r"policy and policy_factory are both given",
        {"policy": len, "policy_factory": dict},
    ),
]


@pytest.mark.parametrize("cls", KINDS)
@pytest.mark.parametrize(("error", "text", "options"), WRONG_VALUES)
def test_options_that_cannot_be_are_refused_before_anything_is_built(cls, error, text, options):
    defaults = {} if {"trajs_per_batch"} & options.keys() or not options else ENOUGH

    refused(error, text, cls, unbuilt, **{**defaults, **options})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"split_trajs": True}, "batches of whole episodes are split already"),
        ({"set_truncated": True}, "whole episodes have ended already"),
        ({"reset_at_each_iter": True}, "unfinished episodes continue"),
        ({"reset_when_done": False}, "Leave out split_trajs or trajs_per_batch"),
        (
            {"replay_buffer": TensorDict, "replay_buffer_chunk": False},
            "replay_buffer is .* must have a method add|single steps into the buffer",
        ),
    ],
)
def test_whole_episodes_exclude_what_cuts_them(options, text):
    refused((OptionError, ArgumentTypeError), text, SyncDataCollector, trajs_per_batch=2, **options)


@pytest.mark.parametrize("cls", WITH_WORKERS)
@pytest.mark.parametrize(
    ("error", "text", "options"),
    [
        (
            ArgumentError,
            r"on_worker_failure is 'retry', but must be 'raise' or 'restart'",
            {"on_worker_failure": "retry"},
        ),
        (ArgumentError, r"max_restarts is -1", {"max_restarts": -1}),
        (ArgumentTypeError, r"max_restarts is 'many'", {"max_restarts": "many"}),
        (ArgumentError, r"timeout is 0, but must be a positive number of seconds", {"timeout": 0}),
        (ArgumentError, r"timeout is nan", {"timeout": float("nan")}),
        (ArgumentTypeError, r"timeout is '60'", {"timeout": "60"}),
        (ArgumentError, r"start_timeout is -1", {"start_timeout": -1}),
        (ArgumentError, r"num_threads is 0", {"num_threads": 0}),
        (ArgumentError, r"num_sub_threads is 0", {"num_sub_threads": 0}),
        (ArgumentTypeError, r"num_sub_threads is None", {"num_sub_threads": None}),
        (ArgumentTypeError, r"update_at_each_batch is 2", {"update_at_each_batch": 2}),
        (
            ArgumentError,
            r"preemptive_threshold is 1\.5, but must be a finite number, at least 0 and at most 1",
            {"preemptive_threshold": 1.5},
        ),
        (ArgumentError, r"preemptive_threshold is -0\.1", {"preemptive_threshold": -0.1}),
        (ArgumentError, r"preemptive_threshold is nan", {"preemptive_threshold": float("nan")}),
        (ArgumentTypeError, r"preemptive_threshold is 'half'", {"preemptive_threshold": "half"}),
        (
            OptionError,
            r"preemptive_threshold and split_trajs are both given",
            {"preemptive_threshold": 0.5, "split_trajs": True},
        ),
        (
            ArgumentCountError,
            r"frames_per_batch has 3 entries, but there are 2 workers",
            {"frames_per_batch": [4, 4, 4]},
        ),
        (
            ArgumentError,
            r"frames_per_batch\[1\] is 0, but must be an int of at least 1",
            {"frames_per_batch": [4, 0]},
        ),
        (ArgumentTypeError, r"frames_per_batch\[0\] is 4\.5", {"frames_per_batch": [4.5, 4]}),
        (
            ArgumentCountError,
            r"storing_device has 3 entries, but there are 2 workers",
            {"storing_device": ["cpu"] * 3},
        ),
        (ArgumentCountError, r"env_device has 1 entries", {"env_device": ["cpu"]}),
        (ArgumentCountError, r"policy_device has 1 entries", {"policy_device": ["cpu"]}),
        (ArgumentError, r"env_device is 'tpu9'", {"env_device": ["cpu", "tpu9"]}),
        (ArgumentCountError, r"create_env_kwargs has 1 entries", {"create_env_kwargs": [{}]}),
        (ArgumentTypeError, r"create_env_kwargs is 3", {"create_env_kwargs": [{}, 3]}),
        (ArgumentCountError, r"policy_factory has 1 entries", {"policy_factory": [dict]}),
        (ArgumentTypeError, r"policy_factory is 3", {"policy_factory": [dict, 3]}),
        (
            ArgumentCountError,
            r"num_workers is 3, but create_env_fn has 2 functions",
            {"num_workers": 3},
        ),
        (
            OptionError,
            r"num_collectors and num_workers are the same",
            {"num_workers": 2, "num_collectors": 2},
        ),
        (
            ArgumentError,
            r"backend is 'threads', but must be 'process', 'ray' or None",
            {"backend": "threads"},
        ),
        (OptionError, r"backend_options", {"backend_options": {"num_cpus": 1}}),
    ],
)
def test_options_of_workers_are_refused_before_any_starts(cls, error, text, options):
    if cls is MultiaSyncDataCollector and "preemptive_threshold" in options:
        error, text = (ArgumentError, OptionError), "preemptive_threshold"

    refused(error, text, cls, unbuilt, **{**ENOUGH, **options})


@pytest.mark.parametrize(
    ("error", "text", "options"),
    [
        (
            ArgumentError,
            r"cat_results is 'pile', but must be 'stack' or an int",
            {"cat_results": "pile"},
        ),
        (ArgumentError, r"cat_results is True", {"cat_results": True}),
        (ArgumentError, r"cat_results is 1\.0", {"cat_results": 1.0}),
        (
            OptionError,
            r"cat_results and trajs_per_batch are both given",
            {"cat_results": 0, "frames_per_batch": None, "trajs_per_batch": 1},
        ),
        (
            OptionError,
            r"preemptive_threshold and trajs_per_batch are both given",
            {"preemptive_threshold": 0.5, "frames_per_batch": None, "trajs_per_batch": 1},
        ),
        (
            OptionError,
            r"workers make different numbers of them\. Pass cat_results=-1",
            {"preemptive_threshold": 0.5, "replay_buffer": set(), "replay_buffer_chunk": False},
        ),
        (
            OptionError,
            r"storing_device is \['cpu', 'meta'\].* joined on one device\. Pass a single",
            {"storing_device": ["cpu", "meta"]},
        ),
        (OptionError, r"sync=False.*Use MultiaSyncDataCollector", {"sync": False}),
        (ArgumentTypeError, r"sync is 'no'", {"sync": "no"}),
    ],
)
def test_ways_to_join_that_there_are_not_are_refused(error, text, options):
    refused(error, text, MultiSyncDataCollector, unbuilt, **{**ENOUGH, **options})


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (OptionError, {"preemptive_threshold": 0.0}),
        (OptionError, {"prefetch": 1}),
        (OptionError, {"sync": True}),
    ],
)
def test_what_makes_workers_wait_is_refused_where_they_do_not(error, options):
    refused(
        error,
        "Use|use MultiSyncDataCollector",
        MultiaSyncDataCollector,
        unbuilt,
        **ENOUGH,
        **options,
    )


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2},
        {"on_worker_failure": "restart"},
        {"preemptive_threshold": 0.5},
        {"cat_results": "stack"},
        {"backend_options": {}},
        {"update_at_each_batch": True},
        {"sync": False},
        {"frames_per_batch": [4]},
        {"storing_device": ["cpu"]},
        {"create_env_kwargs": [{}]},
        {"policy_factory": [dict]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_the_front_door_names_the_kind_that_takes_no_such_option(options):
    with pytest.raises(TypeError, match=r"SyncDataCollector.*collects in this process"):
        Collector(unbuilt, **{**ENOUGH, **options})


@pytest.mark.parametrize("kind", [Collector, SyncDataCollector])
def test_a_keyword_of_another_kind_is_told_as_such_and_not_as_misspelt(kind):
    with pytest.raises(OptionError) as refusal:
        kind(unbuilt, num_workers=2, **ENOUGH)

    assert "'num_workers' is a keyword of collectors with workers" in str(refusal.value)
    assert "backend='process'" in str(refusal.value)
    assert "Did you mean" not in str(refusal.value)


@pytest.mark.parametrize("cls", WITH_WORKERS)
@pytest.mark.parametrize(
    ("create_env_fn", "text"),
    [
        (unbuilt, r"a single function, so num_workers= must say"),
        ([], r"create_env_fn is \[\], but must be a function"),
        (5, r"create_env_fn is 5, but must be a function"),
        ([Count, 5], r"create_env_fn has 5 for worker 1"),
    ],
)
def test_what_makes_no_env_is_refused(cls, create_env_fn, text):
    with pytest.raises(ArgumentTypeError, match=text):
        cls(create_env_fn, **ENOUGH)


# -------------------------------------------------------------------------------------- policies


def module(out: str, size: int) -> TensorDictModule:
    net = torch.nn.Sequential(_ToFloat(), torch.nn.Linear(1, size))
    return TensorDictModule(net, ["count"], [out])


def returns_three(td):
    return TensorDict({"action": torch.zeros(3, 1, dtype=torch.int64)}, [3])


class _ToFloat(torch.nn.Module):
    def forward(self, count):
        return count.float()


@pytest.mark.parametrize(
    ("policy", "error", "text"),
    [
        (module("move", 1), PolicyError, r"wrote.*'move'.*no \['action'\], which the env takes"),
        (
            TensorDictModule(torch.nn.Identity(), ["counts"], ["action"]),
            MissingKeyError,
            r"the policy reads \['counts'\], but the env gives \['count', 'done', 'terminated'\]\. Name its inputs",
        ),
        (module("action", 3), InputError, r"'action' with shape \(3,\), but the env takes \(1,\)"),
    ],
)
def test_a_module_that_does_not_fit_is_told_at_construction(policy, error, text):
    with pytest.raises(error, match=text):
        SyncDataCollector(Count, policy, **ENOUGH)


def test_a_policy_that_writes_option_numbers_is_told_how_the_env_takes_them():
    with GymEnv("CartPole-v1") as env:
        policy = TensorDictModule(lambda seen: seen.argmax(-1), ["observation"], ["action"])
        text = r"with shape \(\), but the env takes \(2,\).*make the env with categorical_action_encoding=True"
        with pytest.raises(InputError, match=text):
            SyncDataCollector(env, policy, **ENOUGH)


@pytest.mark.slow
def test_a_refused_construction_leaves_nothing_running(holdings):
    before = holdings()

    def make():
        return ParallelEnv(2, Count)

    for policy, options in (
        (module("move", 1), {}),
        (None, {"prefetch": 1}),
        (None, {"set_truncated": True}),
        (None, {"replay_buffer": [TensorDict({"other": torch.zeros(1)})]}),
    ):
        with pytest.raises((PolicyError, OptionError, DoneError, MissingKeyError)) as caught:
            SyncDataCollector(make, policy, frames_per_batch=4, **options)
        assert holdings()[1:] == before[1:], options
        del caught

    assert holdings() == before


def test_an_env_of_the_caller_is_not_closed_when_its_collector_is_refused(opened):
    env = opened(SerialEnv(2, Count))
    env.reset()

    with pytest.raises(OptionError, match="prefetch"):
        SyncDataCollector(env, frames_per_batch=4, prefetch=1)

    assert not env.is_closed


REFUSED_BY_WORKERS = [
    (
        [Count, lambda: SerialEnv(2, Count)],
        {},
        SpecError,
        r"worker 1 has batch size \(2,\).*worker 0",
    ),
    (
        [Count, lambda: Count().add_truncated_keys()],
        {},
        SpecError,
        r"unlike: .*truncated.*None.*worker 0",
    ),
    ([Count] * 2, {"cat_results": 3}, ArgumentError, r"cat_results is 3, but batches have 1 axes"),
    ([Count] * 2, {"on_worker_failure": "restart"}, DoneError, r"add_truncated_keys"),
    ([Count] * 2, {"update_at_each_batch": True}, OptionError, r"none with weights was"),
    ([Count] * 2, {"policy": module("move", 1)}, WorkerError, r"PolicyError.*no \['action'\]"),
    (
        [Count] * 2,
        {"policy_factory": [lambda: module("action", 1), lambda: None]},
        SpecError,
        r"policies of workers 0 and 1",
    ),
    (
        [Count] * 2,
        {"replay_buffer": [TensorDict({"count": torch.zeros(1)})]},
        MissingKeyError,
        r"holds data without.*'action'",
    ),
    (
        [lambda: Count().add_truncated_keys()] * 2,
        {"on_worker_failure": "restart", "frames_per_batch": 2},
        ArgumentError,
        r"batches need 2 steps or more",
    ),
    (
        [Count] * 2,
        {"frames_per_batch": [4, 2], "cat_results": "stack"},
        OptionError,
        r"\[4, 2\].*cat_results='stack' joins parts of one length",
    ),
    (
        [lambda: SerialEnv(2, Count)] * 2,
        {"frames_per_batch": [4, 2], "cat_results": 0},
        OptionError,
        r"cat_results=0 joins.*Pass -1",
    ),
    (
        [Count] * 2,
        {"frames_per_batch": [4, 2], "trajs_per_batch": 1},
        OptionError,
        r"parts of one length\. Pass one number",
    ),
]


@pytest.mark.parametrize(
    ("makers", "options", "error", "text"),
    [
        case if index in (0, 5) else pytest.param(*case, marks=pytest.mark.slow)
        for index, case in enumerate(REFUSED_BY_WORKERS)
    ],
)
def test_what_only_workers_can_tell_ends_them(holdings, makers, options, error, text):
    before = holdings()

    with pytest.raises(error, match=f"(?s){text}") as caught:
        MultiSyncDataCollector(makers, **{**ENOUGH, **options})

    assert holdings()[1:] == before[1:]
    del caught


# --------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ({}, r"\['1\.bias', '1\.weight'\] are missing"),
        ({"extra": torch.zeros(1)}, r"\['extra'\] are not the policy's"),
        (
            {"1.weight": torch.zeros(2, 2)},
            r"'1\.weight' is \(2, 2\) torch.float32, the policy has \(1, 1\)",
        ),
        ({"1.bias": torch.zeros(1, dtype=torch.float64)}, r"'1\.bias' is \(1,\) torch.float64"),
    ],
)
def test_weights_of_another_architecture_are_refused_and_change_nothing(weights, text):
    net = torch.nn.Sequential(_ToFloat(), torch.nn.Linear(1, 1))
    collector = SyncDataCollector(Count, net, frames_per_batch=2)
    before = {name: value.clone() for name, value in net.state_dict().items()}

    with pytest.raises(ArgumentError, match=f"another architecture.*{text}.*module built alike"):
        collector.update_policy_weights_({**before, **weights} if weights else {})

    assert collector.policy_version == 0
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_what_are_no_weights_is_refused():
    net = torch.nn.Sequential(_ToFloat(), torch.nn.Linear(1, 1))

    with pytest.raises(ArgumentTypeError, match=r"weights are of type int.*TensorDict.from_module"):
        SyncDataCollector(Count, net, frames_per_batch=2).update_policy_weights_(3)
    with pytest.raises(ArgumentTypeError, match="has no weights to load"):
        SyncDataCollector(Count, frames_per_batch=2).update_policy_weights_(net)


def test_workers_refuse_weights_resets_and_calls_that_do_not_fit():
    net = torch.nn.Sequential(_ToFloat(), torch.nn.Linear(1, 1))
    with MultiSyncDataCollector([Count] * 2, net, trust_policy=False, **ENOUGH) as collector:
        with pytest.raises(ArgumentError, match=r"'1\.bias', '1\.weight'\] are missing"):
            collector.update_policy_weights_({})
        with pytest.raises(ArgumentCountError, match=r"reset_idx has 1 entries.*2 workers"):
            collector.reset([True])
        assert collector.policy_version == 0

    for call in (collector.next, collector.reset, lambda: collector.set_seed(0)):
        with pytest.raises(ClosedEnvError, match=r"shut down|closed"):
            call()


def test_a_reset_of_other_rows_is_refused():
    collector = SyncDataCollector(lambda: SerialEnv(2, Count), **ENOUGH)
    collector.next()

    for rows in (torch.tensor([True]), torch.tensor([0, 1])):
        with pytest.raises(ArgumentError, match=r"bool mask of the batch of the env, \(2,\)"):
            collector.reset(rows)


def test_a_buffer_of_other_entries_is_told_before_it_is_written_to():
    held = [TensorDict({"other": torch.zeros(1)})]
    collector = SyncDataCollector(
        Count, frames_per_batch=2, replay_buffer=held, postproc=lambda td: td
    )

    with pytest.raises(MissingKeyError, match=r"\['other'\] are in the buffer alone"):
        collector.next()

    assert len(held) == 1


def collected(**options: Any) -> Collector:
    common: dict[str, Any] = {"frames_per_batch": 4, "total_frames": 8}
    return Collector(Count, None, **{**common, **options})


@pytest.mark.parametrize(
    "name", [name for name, shown in vars(Collector).items() if isinstance(shown, ShownSetting)]
)
def test_a_keyword_that_is_assigned_names_the_collector_to_build(name):
    collector = collected()

    with pytest.raises(ReadOnlyError, match=rf"Build a new one: SyncDataCollector\(..., {name}="):
        setattr(collector, name, 1)


def test_workers_of_a_data_loader_are_refused():
    # One worker: torch reports a second one that is still being started when the first was refused.
    loader = DataLoader(collected(), batch_size=None, collate_fn=list, num_workers=1)

    with pytest.raises(
        UnsupportedError, match=r"num_workers of a DataLoader is 1.*Pass num_workers=0"
    ):
        next(iter(loader))


REFUSALS = [
    # -- arguments and files
    (
        "a backend that there is not",
        lambda: Collector(unbuilt, backend="cloud", **ENOUGH),
        ArgumentError,
        r"backend is 'cloud', but must be .*'process'",
    ),
    (
        "the threads of another class",
        lambda: SyncDataCollector(unbuilt, backend="thread", **ENOUGH),
        OptionError,
        r"'thread'.*SyncDataCollector collects in this process",
    ),
    (
        "several envs for one process",
        lambda: SyncDataCollector([Count, Count], **ENOUGH),
        ArgumentTypeError,
        r"is of type list.*Several envs.*are one SerialEnv",
    ),
    (
        "a maker of a dict",
        lambda: SyncDataCollector(dict, **ENOUGH),
        ArgumentTypeError,
        r"result of create_env_fn is {}, of type dict.*wrap it: GymWrapper",
    ),
    (
        "keywords for an env that is built",
        lambda: SyncDataCollector(Count(), create_env_kwargs={"n": 3}, **ENOUGH),
        OptionError,
        r"create_env_fn is an env, which is built already",
    ),
    (
        "a policy that returns rows of another number",
        lambda: SyncDataCollector(lambda: SerialEnv(2, Count), returns_three, **ENOUGH).next(),
        PolicyError,
        r"batch size \(3,\), but was called with one of \(2,\)",
    ),
    (
        "a function whose arguments are no observations",
        lambda: SyncDataCollector(Count, lambda first, second: first, **ENOUGH),
        TypeError,
        "count",
    ),
    (
        "envs that step one by one, made ahead",
        lambda: SyncDataCollector(Count, frames_per_batch=2, prefetch=1),
        OptionError,
        r"prefetch=1 needs.*backend='process'",
    ),
    (
        "collected: frames_per_batch is 0",
        lambda: collected(frames_per_batch=0),
        ArgumentError,
        "frames_per_batch is 0",
    ),
    ("collected: 'many'", lambda: collected(frames_per_batch="many"), ArgumentTypeError, "'many'"),
    ("collected: both None", lambda: collected(frames_per_batch=None), OptionError, "both None"),
    (
        "collected: total_frames is 'all'",
        lambda: collected(total_frames="all"),
        ArgumentTypeError,
        "total_frames is 'all'",
    ),
    (
        "collected: exploration_type is",
        lambda: collected(exploration_type="wild"),
        ArgumentTypeError,
        "exploration_type is",
    ),
    ("collected: prefetch is 3", lambda: collected(prefetch=3), ArgumentError, "prefetch is 3"),
    (
        "collected: traj_format is 'pile'",
        lambda: collected(traj_format="pile"),
        ArgumentError,
        "traj_format is 'pile'",
    ),
    ("collected: 'cat'", lambda: collected(traj_format="cat"), ArgumentError, "'cat'"),
    (
        "collected: track_traj_ids=False",
        lambda: collected(track_traj_ids=False, split_trajs=True),
        ArgumentError,
        "track_traj_ids=False",
    ),
    ("collected: interruptor", lambda: collected(interruptor=3), ArgumentTypeError, "interruptor"),
    (
        "collected: reset_when_done=False",
        lambda: collected(reset_when_done=False, split_trajs=True),
        OptionError,
        "reset_when_done=False",
    ),
    (
        "Collector: policy_factory",
        lambda: Collector(
            Count,
            RandomPolicy(Count().full_action_spec),
            policy_factory=lambda: None,
            frames_per_batch=4,
            total_frames=8,
        ),
        OptionError,
        "policy_factory",
    ),
    (
        "collected: replay_buffer_chunk=False",
        lambda: collected(replay_buffer_chunk=False),
        OptionError,
        "replay_buffer_chunk=False",
    ),
    ("collected: postproc is 3", lambda: collected(postproc=3), ArgumentTypeError, "postproc is 3"),
    (
        "collected: replay_buffer is 3",
        lambda: collected(replay_buffer=3),
        ArgumentTypeError,
        "replay_buffer is 3",
    ),
    (
        "Collector: policy is 3",
        lambda: Collector(Count, 3, frames_per_batch=4, total_frames=8),
        PolicyError,
        "policy is 3",
    ),
    (
        "collected: max_frames_per_traj is -3",
        lambda: collected(max_frames_per_traj=-3),
        ArgumentError,
        "max_frames_per_traj is -3",
    ),
    (
        "collected: init_random_frames is -3",
        lambda: collected(init_random_frames=-3),
        ArgumentError,
        "init_random_frames is -3",
    ),
    (
        "collected: split_trajs is 'yes'",
        lambda: collected(split_trajs="yes"),
        ArgumentTypeError,
        "split_trajs is 'yes'",
    ),
    (
        "collected: storing_device is 'warp'",
        lambda: collected(storing_device="warp"),
        DeviceNameError,
        "storing_device is 'warp'",
    ),
    (
        "collected: 'frames_per_bath'",
        lambda: collected(frames_per_bath=3),
        OptionError,
        "'frames_per_bath'",
    ),
    (
        "SyncDataCollector: replay buffer",
        lambda: SyncDataCollector(Count, None, frames_per_batch=4, total_frames=8).start(),
        NoBufferError,
        "replay buffer",
    ),
    (
        "SyncDataCollector: in the background",
        lambda: (
            SyncDataCollector(Count, None, frames_per_batch=4, total_frames=8).pause().__enter__()
        ),
        NotStartedError,
        "in the background",
    ),
    (
        "load: /no/such/file",
        lambda: envkit.load("/no/such/file.pt", env=Count()),
        MissingFileError,
        "/no/such/file",
    ),
    ("save: path is 3", lambda: envkit.save(3, env=Count()), ArgumentTypeError, "path is 3"),
    (
        "save: /no/such",
        lambda: envkit.save("/no/such/folder/run.pt", policy=torch.nn.Linear(1, 1)),
        WriteError,
        "/no/such",
    ),
    (
        "save: path is ''",
        lambda: envkit.save("", policy=torch.nn.Linear(1, 1)),
        ArgumentError,
        "path is ''",
    ),
    # -- others
    (
        "an env that cannot be truncated is refused where it is to be",
        lambda: SyncDataCollector(Count, frames_per_batch=3, set_truncated=True),
        DoneError,
        "add_truncated_keys",
    ),
    *(
        (f"env and policy exchanged, {name}", call, TypeError, words)
        for name, call, words in (
            (
                "an env as policy",
                lambda: Collector(lambda observation: observation, Count(), frames_per_batch=3),
                r"policy is a Count, which is an env.*Collector\(env, policy",
            ),
            (
                "a module that is to make envs",
                lambda: Collector(torch.nn.Linear(1, 1), Count, frames_per_batch=3),
                r"create_env_fn is of type Linear, which is a policy.*Collector\(env, policy",
            ),
            (
                "in workers",
                lambda: MultiSyncDataCollector(
                    [RandomPolicy(Count().action_spec)], Count, frames_per_batch=3
                ),
                "create_env_fn is of type RandomPolicy, which is a policy",
            ),
        )
    ),
]


@each_row(REFUSALS)
def test_it_is_refused_with_a_way_out(call, error, words):
    assert_refused(call, error, words)
