"""Every public member of TorchRL's collectors is provided, or is out for a reason, and does what it does there."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch.utils.data import DataLoader
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.weight_update import (
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
)

import envkit
from tests.reference.compare import (
    OURS,
    check_same,
    differs,
    names_out,
    outcome,
    public_members,
    torchrl,
)

pytestmark = pytest.mark.filterwarnings(  # of TorchRL and what it calls
    "ignore::UserWarning:torch", "ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch"
)

KINDS = ("Collector", "MultiSyncCollector", "MultiAsyncCollector", "AsyncCollector")


@pytest.mark.parametrize("name", KINDS)
def test_every_member_is_provided_or_in_the_table(name):
    ours = envkit.SyncDataCollector if name == "Collector" else getattr(envkit, name)
    theirs = public_members(getattr(torchrl.collectors, name), "torchrl")

    missing = theirs - public_members(ours, "envkit")

    assert missing == names_out("collectors") & theirs
    assert len(missing) <= 0.25 * len(theirs)


def test_every_class_is_provided_or_in_the_table():
    missing = {name for name in torchrl.collectors.__all__ if not hasattr(envkit, name)}

    assert missing == names_out("classes of collectors")


# ------------------------------------------------------------------------------- a program of each


def policy() -> TensorDictModule:
    """Act without drawing: the sum of what is observed."""
    return TensorDictModule(
        lambda observation: observation.sum(-1, keepdim=True).tanh(),
        in_keys=["observation"],
        out_keys=["action"],
    )


def collector_of(library, kind: str = "Collector", **options):
    def make():
        return library.GymEnv("Pendulum-v1")

    options = {"frames_per_batch": 8, "total_frames": 32, **options}
    return getattr(library, kind)(make, policy(), **options)


def ended(collector, result):
    collector.shutdown()
    return result


def buffer() -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(200), batch_size=4)


def keys(data) -> list[str]:
    return sorted(map(str, data.keys(True, True)))


def filled_in_the_background(lib):
    held = buffer()
    collector = collector_of(lib, replay_buffer=held)
    before = collector.is_running()
    collector.start()
    while collector.is_running():
        pass
    collector.async_shutdown(timeout=20)
    return before, len(held)


def hooks(lib):
    calls = []
    collector = collector_of(lib)
    before = (collector.pre_collect_hook, collector.post_collect_hook)
    collector.pre_collect_hook = lambda: calls.append("pre")
    collector.set_post_collect_hook(lambda batch: calls.append(tuple(batch.shape)))
    batches = iter(collector)
    next(batches), next(batches)
    return ended(collector, (before, calls))


def versions(lib):
    collector = collector_of(lib, track_policy_version=True)
    batches = iter(collector)
    collected = [next(batches)]
    collector.increment_version()
    collected.append(next(batches))
    versions_then = collector.policy_version, collector.get_policy_version()
    data = [(b["next", "policy_version"], keys(b)) for b in collected]
    return ended(collector, (data, versions_then))


def statistics(lib):
    collector = collector_of(lib)
    batches = iter(collector)
    next(batches)
    names = ("frames", "total_frames", "requested_frames_per_batch", "completed")
    return ended(collector, {name: collector.stats()[name] for name in names})


def by_path(lib):
    collector = collector_of(lib, worker_idx=3)
    answers = (
        collector.worker_idx,
        collector.get_distant_attr("env.batch_size"),
        collector.cascade_execute("env.batch_size.numel"),
        collector.map_fn("get_distant_attr", [("worker_idx",), ("total_frames",)]),
        collector.getattr_env("batch_size"),
        collector.getattr_policy("out_keys"),
    )
    return ended(collector, answers)


def without_ids(lib):
    collector = collector_of(lib, track_traj_ids=False)
    return ended(collector, keys(next(iter(collector))))


def one_path_for_two_calls(lib):
    return collector_of(lib).map_fn("get_distant_attr", [()], [{}, {}])


def compact(lib):
    collector = collector_of(lib, compact_obs=True)
    return ended(collector, keys(next(iter(collector))))


def by_episode(lib):
    sizes, held = [], buffer()
    extend = held.extend
    held.extend = lambda data: (sizes.append(tuple(data.shape)), extend(data))[1]
    collector = collector_of(
        lib,
        trajs_per_batch=2,
        trajs_per_write=1,
        max_frames_per_traj=5,
        frames_per_batch=20,
        total_frames=20,
        replay_buffer=held,
    )
    list(collector)
    return ended(collector, sizes[:4])


SETTINGS = (
    *("init_random_frames", "max_frames_per_traj", "reset_at_each_iter", "set_truncated"),
    *("compact_obs", "reset_when_done", "exploration_type", "trajs_per_batch", "traj_format"),
    *("postproc", "interruptor", "replay_buffer", "storing_device", "track_traj_ids"),
)


def settings(lib, **options):
    collector = collector_of(lib, **options)
    told = {name: getattr(collector, name) for name in (*SETTINGS, *options)}
    told["exploration_type"] = told["exploration_type"].name
    return ended(collector, told)


def interrupted(lib):
    class Stopper:
        calls = 0

        def collection_stopped(self):
            self.calls += 1
            return self.calls == 3

    collector = collector_of(lib, interruptor=Stopper())
    batch = next(iter(collector))
    return ended(collector, (tuple(batch.shape), batch["collector", "traj_ids"]))


def through_a_loader(lib):
    """Read the batches of a collector as torch reads any data set."""
    collector = collector_of(lib)
    loader = DataLoader(collector, batch_size=None, collate_fn=lambda batch: batch)
    return ended(collector, [tuple(batch.shape) for batch in loader])


PROGRAMS = {
    "len": lambda lib: ended(c := collector_of(lib), len(c)),
    "a loader of torch": through_a_loader,
    "the last batch is whole": lambda lib: ended(
        c := collector_of(lib, frames_per_batch=4, total_frames=10),
        (len(c), [len(batch) for batch in c], c.total_frames),
    ),
    "len without an end": lambda lib: len(collector_of(lib, total_frames=-1)),
    "frames_per_batch": lambda lib: (
        collector_of(lib).frames_per_batch,
        collector_of(lib).requested_frames_per_batch,
    ),
    "fake_tensordict": lambda lib: collector_of(lib, set_truncated=True).fake_tensordict(),
    "rollout": lambda lib: keys(collector_of(lib).rollout()),
    "iterator": lambda lib: [tuple(batch.shape) for batch in collector_of(lib).iterator()],
    "next": lambda lib: [
        collector_of(lib).next().batch_size,
        collector_of(lib, total_frames=8).next().batch_size,
    ],
    "start without a buffer": lambda lib: collector_of(lib).start(),
    "start": filled_in_the_background,
    "hooks": hooks,
    "policy_version": versions,
    "stats": statistics,
    "paths": by_path,
    "an unlike number of arguments": one_path_for_two_calls,
    "no such path": lambda lib: collector_of(lib).get_distant_attr("env.unheard_of"),
    "an attribute is no method": lambda lib: collector_of(lib).map_fn("total_frames"),
    "no model": lambda lib: collector_of(lib).get_model("critic"),
    "get_model": lambda lib: collector_of(lib).get_model("policy").out_keys,
    "getattr_rb": lambda lib: collector_of(lib, replay_buffer=buffer()).getattr_rb("_batch_size"),
    "track_traj_ids": without_ids,
    "track_traj_ids beside split_trajs": lambda lib: collector_of(
        lib, track_traj_ids=False, split_trajs=True
    ),
    "compact_obs": compact,
    "extend_buffer": lambda lib: len(ended_buffer(lib, True)),
    "add each step": lambda lib: len(ended_buffer(lib, False)),
    "trajs_per_write": by_episode,
    "interruptor": interrupted,
    "profile_config": lambda lib: collector_of(lib).profile_config,
    "settings that were passed": partial(
        settings,
        init_random_frames=16,
        max_frames_per_traj=5,
        reset_at_each_iter=True,
        set_truncated=True,
        compact_obs=True,
        storing_device="cpu",
        policy_device="cpu",
        env_device="cpu",
        postproc=len,
    ),
    "settings by default": settings,
    "closed": lambda lib: ended(c := collector_of(lib), (c.closed, c.shutdown(), c.closed)),
    "profile of no batch": lambda lib: collector_of(lib).enable_profile(
        num_rollouts=1, warmup_rollouts=1
    ),
    "disable_profile": lambda lib: collector_of(lib).disable_profile(),
    "weights and whose they are": lambda lib: collector_of(lib).update_policy_weights_(
        weights_dict={"policy": policy()}, model_id="policy"
    ),
    "weights given twice": lambda lib: collector_of(lib).update_policy_weights_(
        {}, policy=policy()
    ),
}


def ended_buffer(lib, extend: bool) -> ReplayBuffer:
    held = buffer()
    collector = collector_of(lib, replay_buffer=held, extend_buffer=extend)
    list(collector)
    return ended(collector, held)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_collector_in_this_process_does_what_torchrls_does(name):
    check_same(PROGRAMS[name])


def test_a_setting_cannot_be_assigned():
    collector = collector_of(OURS)

    with pytest.raises(
        AttributeError, match=r"Build a new one: SyncDataCollector\(..., postproc=...\)"
    ):
        collector.postproc = len

    collector.shutdown()


SCHEMES = {
    "of the policy": lambda: {"policy": MultiProcessWeightSyncScheme(strategy="tensordict")},
    "of shared memory": lambda: {"policy": SharedMemWeightSyncScheme()},
}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_reach_workers_when_they_are_sent_whatever_the_scheme(scheme):
    def actions(lib):
        net = torch.nn.Linear(3, 1)
        torch.nn.init.zeros_(net.weight), torch.nn.init.constant_(net.bias, 0.25)
        collector = lib.MultiSyncCollector(
            [partial(lib.GymEnv, "Pendulum-v1")],
            TensorDictModule(net, in_keys=["observation"], out_keys=["action"]),
            frames_per_batch=4,
            total_frames=8,
            weight_sync_schemes=SCHEMES[scheme](),
        )
        actions_taken = []
        for batch in collector:
            actions_taken.append(batch["action"].flatten().tolist())
            net.bias.data.fill_(0.75)
            collector.update_policy_weights_()
        return ended(collector, actions_taken)

    check_same(actions)
    assert outcome(OURS, actions).value == [[0.25] * 4, [0.75] * 4]


@pytest.mark.parametrize(
    ("schemes", "message"),
    [
        ({"policy": None, "value": None}, r"has \['value'\], but a collector sends"),
        ({"policy": NoWeightSyncScheme()}, "has a NoWeightSyncScheme"),
        ([None], "is of type list, but must be a dict"),
    ],
)
def test_schemes_that_would_be_ignored_are_refused(schemes, message):
    with pytest.raises(TypeError, match=message):
        collector_of(OURS, weight_sync_schemes=schemes)


def test_subclasses_are_collectors_and_their_constructors_are_called():
    def built(library):
        class Named(library.Collector):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self.label = "mine"

        collector = Named(lambda: library.GymEnv("Pendulum-v1"), policy(), frames_per_batch=4)
        told = collector.label, type(collector).__name__, isinstance(collector, Named)
        return ended(collector, (told, tuple(next(iter(collector)).shape)))

    check_same(built)


def test_both_versions_of_a_step_are_that_which_acted():
    def root(library):
        collector = collector_of(library, track_policy_version=True)
        batches = iter(collector)
        next(batches)
        collector.increment_version()
        return ended(collector, next(batches)["policy_version"].tolist())

    assert "[1, 1, 1, 1, 1, 1, 1, 1]" in differs("callers-come-first", root)


def waits(library) -> bool:
    def make():
        return library.GymEnv("Pendulum-v1")

    collector = library.Collector(make, policy(), num_collectors=1, frames_per_batch=4)
    return ended(collector, isinstance(collector, library.MultiSyncCollector))


def numbers_of_workers(library) -> list[int]:
    collector = library.MultiAsyncCollector(
        [lambda: library.GymEnv("Pendulum-v1")] * 2,
        None,
        frames_per_batch=[8, 4],
        total_frames=12,
    )
    return ended(collector, sorted(len(batch) for batch in collector))


def hooks_called(library) -> list[str]:
    calls = []
    collector = library.MultiSyncCollector(
        [lambda: library.GymEnv("Pendulum-v1")],
        None,
        frames_per_batch=4,
        total_frames=8,
        pre_collect_hook=lambda: calls.append("pre"),
        post_collect_hook=lambda batch: calls.append("post"),
    )
    list(collector)
    return ended(collector, calls)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        pytest.param(waits, True, id="workers wait for the caller"),
        pytest.param(numbers_of_workers, [4, 8], id="a worker with a number makes so many"),
        pytest.param(hooks_called, ["pre", "post"] * 2, id="hooks run where it was built"),
    ],
)
def test_workers_do_what_the_page_of_deviations_says(call, expected):
    answer = outcome(OURS, call)

    assert answer.value == expected, answer.message


@pytest.mark.slow
def test_workers_wait_for_the_caller_unless_they_are_told_not_to():
    assert "envkit: True" in differs("callers-come-first", waits)


@pytest.mark.slow
def test_a_worker_with_a_number_of_its_own_makes_so_many():
    assert "envkit: [4, 8]" in differs("numbers-of-workers", numbers_of_workers)


@pytest.mark.slow
def test_hooks_run_where_the_collector_was_built():
    assert "['pre', 'post', 'pre', 'post']" in differs("callers-come-first", hooks_called)
