"""Running averages in the transform and in the data (`VecNormV2`): what they show, whom they belong to, what they refuse."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict

from tests.reference.compare import OURS, THEIRS, check_same, differs, outcome
from tests.reference.transforms.worlds import arm, count, leaf_specs, played, rows, teams


def rounded(value):
    """Write numbers as they are, but for the last digits of floats."""
    if isinstance(value, float):
        return float(f"{value:.3g}") if abs(value) > 1e-6 else 0.0
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return type(value)(map(rounded, value)) if isinstance(value, (list, tuple)) else value


def check_rounded(call):
    ours, theirs = (outcome(library, call) for library in (OURS, THEIRS))
    assert not ours.errors | theirs.errors, (ours.message, theirs.message)
    assert rounded(ours.value) == rounded(theirs.value)


WORLDS = {
    "one env": count,
    "rows": rows,
    "a batch": partial(arm, shape=(3,), batch=(2,)),
}
ENTRY = {"one env": "success", "rows": "success", "a batch": "observation"}
KINDS = {
    "kept": {"decay": 0.99},
    "kept, all alike": {"decay": 1.0},
    "kept, of all rows": {"reduce_batch_dims": True, "decay": 0.9},
    "kept, of all rows, all alike": {"reduce_batch_dims": True, "decay": 1.0},
    "in the data": {"stateful": False, "decay": 0.9},
    "in the data, all alike": {"stateful": False, "decay": 1.0},
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_averages_show_what_those_of_the_reference_show(world, kind):
    def call(lib):
        norm = lib.VecNormV2([ENTRY[world]], ["shown"], **KINDS[kind])
        env = lib.TransformedEnv(WORLDS[world](lib), norm)
        shown = [played(env, 8, break_when_any_done=False), leaf_specs(env)["observation"]]
        return shown if "data" in kind else [*shown, norm.loc, norm.scale]

    check_rounded(call)


def test_groups_of_agents_have_averages_of_their_own():
    def call(lib):
        norm = lib.VecNormV2([("a", "seen")], stateful=False, decay=0.5)
        return played(lib.TransformedEnv(teams(lib), norm), 3)

    check_rounded(call)


def test_frozen_copies_and_clones_go_their_own_way():
    def call(lib):
        norm = lib.VecNormV2(["success"], ["shown"], decay=0.5)
        env = lib.TransformedEnv(count(lib), norm)
        played(env, 3)
        copies = [norm.frozen_copy(), norm.clone()]
        played(env, 5)
        other = lib.TransformedEnv(count(lib), copies[0])
        return [played(other, 5)["next", "shown"], *(copy.loc for copy in (norm, *copies))]

    check_rounded(call)


def test_what_was_shown_is_computed_back_and_fixed():
    def call(lib):
        norm = lib.VecNormV2(["success"], ["shown"], decay=0.5)
        env = lib.TransformedEnv(count(lib), norm)
        data = played(env, 4)
        fixed = norm.to_observation_norm()
        return [norm.denorm(data["next"])["success"], fixed(data["next"].clone())["shown"]]

    check_rounded(call)


def test_the_new_api_of_the_older_one_is_this_one():
    check_same(lambda lib: type(lib.VecNorm(["a"], new_api=True, decay=0.5)).__name__)
    check_same(lambda lib: lib.VecNorm(["a"], ["b"], new_api=True, stateful=False).stateful)
    check_same(lambda lib: lib.VecNorm(["a"], new_api=True, shapes=[(1,)]))
    check_same(lambda lib: type(lib.VecNorm(["a"], new_api=False)).__name__)


def carried(lib):
    return lib.VecNormV2(["a"], stateful=False)


REFUSED = {
    "averages of all rows in the data": lambda lib: lib.VecNormV2(
        ["a"], stateful=False, reduce_batch_dims=True
    ),
    "shared data of none": lambda lib: lib.VecNormV2(
        ["a"], stateful=False, shared_data=TensorDict()
    ),
    "loc": lambda lib: carried(lib).loc,
    "scale": lambda lib: carried(lib).scale,
    "frozen_copy": lambda lib: carried(lib).frozen_copy(),
    "frozen_copy before data": lambda lib: lib.VecNormV2(["a"]).frozen_copy(),
    "denorm": lambda lib: carried(lib).denorm(TensorDict()),
    "denorm before data": lambda lib: lib.VecNormV2(["a"]).denorm(TensorDict()),
    "to_observation_norm": lambda lib: carried(lib).to_observation_norm(),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_needs_averages_in_the_transform_says_so(case):
    check_same(REFUSED[case])
    with pytest.raises(RuntimeError, match=r"stateful=True|Step its env first"):
        REFUSED[case](OURS)


def test_integers_rewards_and_data_are_standardised_and_skipped_rows_left_alone():
    def kept(lib, **kwargs):
        env = lib.TransformedEnv(
            rows(lib), lib.VecNormV2(["count", "reward"], ["c", "r"], **kwargs)
        )
        return played(env, 3)["next", "c"]

    def called(lib):
        return lib.VecNormV2(["a"], reduce_batch_dims=True)(
            TensorDict({"a": torch.ones(3, 2)}, [3])
        )

    def masked(lib):
        norm = lib.VecNormV2(["success"], ["shown"], decay=0.5)
        env = lib.TransformedEnv(rows(lib), norm)
        td = env.rand_action(env.reset())
        env.step(td.set("_step", torch.tensor([True, False])))
        return norm.state_dict(), norm.loc

    differs("running-averages", kept)
    differs("running-averages", partial(kept, stateful=False))
    differs("running-averages", called)
    differs("running-averages", masked)


def test_averages_of_a_state_dict_and_shared_ones_go_on():
    first = OURS.VecNormV2(["success"], decay=0.5)
    played(OURS.TransformedEnv(count(OURS), first), 3)
    loaded = OURS.VecNormV2(["success"], decay=0.5)

    loaded.load_state_dict(first.state_dict())
    shared = OURS.VecNormV2(["success"], decay=0.5, shared_data=first.statistics)
    played(OURS.TransformedEnv(count(OURS), shared), 3)

    counts = [norm.statistics["count", "success"].max().item() for norm in (loaded, first, shared)]
    assert counts == [4, 8, 8]
    assert OURS.VecNormV2(["success"], stateful=False).state_dict().keys() == {"skipped_rows"}


@pytest.mark.parametrize("name", ["VecNorm", "VecNormV2"])
def test_a_state_dict_names_each_statistic_once_there_is_one(name):
    def names_of_state(lib, data):
        norm = getattr(lib, name)(["a"])
        for _ in range(data):
            norm(TensorDict({"a": torch.ones(3)}))
        return sorted(norm.state_dict())

    differs("running-averages", lambda lib: names_of_state(lib, 0))
    differs("running-averages", lambda lib: names_of_state(lib, 1))
    assert names_of_state(OURS, 0) == ["skipped_rows"] and len(names_of_state(OURS, 1)) > 2


def test_rows_of_another_number_than_the_averages_are_told():
    norm = OURS.VecNormV2(["a"])
    norm(TensorDict({"a": torch.zeros(3, 1)}, [3]))

    with pytest.raises(RuntimeError, match="reduce_batch_dims=True"):
        norm(TensorDict({"a": torch.zeros(2, 1)}, [2]))
    with pytest.raises(ValueError, match="decay is 2"):
        OURS.VecNormV2(["a"], decay=2)
    with pytest.raises(ValueError, match="Pass one for each"):
        OURS.VecNormV2(["a"], ["b", "c"])


def test_two_of_them_in_the_data_have_names_of_their_own():
    env = OURS.TransformedEnv(
        count(OURS),
        OURS.Compose(
            OURS.VecNormV2(["success"], ["one"], stateful=False, decay=0.5),
            OURS.VecNormV2(["one"], ["two"], stateful=False, decay=0.9),
        ),
    )

    data = played(env, 3)

    assert not torch.equal(
        data["next", "_vecnorm_loc", "success"], data["next", "_vecnorm2_loc", "one"]
    )


@pytest.mark.slow
def test_envs_in_workers_update_the_same_averages():
    def learnt(lib):
        def make():
            norm = lib.VecNormV2(["success"], ["shown"], decay=0.5)
            return lib.TransformedEnv(count(lib), norm)

        creator = lib.EnvCreator(make)
        local = creator()
        env = lib.ParallelEnv(2, creator)
        try:
            env.rollout(3)
        finally:
            env.close()
        return local.transform.loc["success"].shape, bool(
            (local.transform.loc["success"] > 0).all()
        )

    check_same(learnt)


def test_envs_of_one_creator_update_the_same_averages():
    creator = OURS.EnvCreator(
        lambda: OURS.TransformedEnv(count(OURS), OURS.VecNormV2(["success"], ["shown"], decay=0.5))
    )
    first, second = creator(), creator()

    played(first, 3)

    assert torch.equal(first.transform.loc["success"], second.transform.loc["success"])
    assert first.transform.kept["success"].count.eq(4).all()
    assert first.transform.lock is second.transform.lock
