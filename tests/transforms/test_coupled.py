"""A transform of one's own in which rows have an effect on each other: it sees each new row once."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from envkit import (
    Compose,
    CoupledTransform,
    SerialEnv,
    Transform,
    TransformedEnv,
    Unbounded,
    apply_to_composite,
    check_env_specs,
)
from tests.zoo.envs import Count, StatelessCount
from tests.zoo.transform_envs import TwoTeams


class Share(CoupledTransform):
    """Divides an entry by the largest value any row ever had, and notes what it saw."""

    def __init__(self, in_keys, out_keys):
        super().__init__(in_keys, out_keys)
        self.register_buffer("largest", torch.ones(()))
        self.seen = []

    def _observe_rows(self, key, rows):
        self.seen.append((key, rows.flatten().tolist()))
        self.largest = torch.maximum(self.largest, rows.max())

    def _apply_transform(self, value):
        return value / self.largest

    @apply_to_composite
    def transform_observation_spec(self, observation_spec):
        return Unbounded(observation_spec.shape)


class Forgetful(Share):
    _observe_rows = CoupledTransform._observe_rows


class More(Transform):
    """Ten more than a count."""

    def __init__(self):
        super().__init__(["count"], ["more"])

    def _apply_transform(self, value):
        return value + 10

    @apply_to_composite
    def transform_observation_spec(self, observation_spec):
        return observation_spec


ENVS = {
    "stateless": partial(StatelessCount, 50, batch_size=[4]),
    "stateful": partial(SerialEnv, 4, partial(Count, 50)),
}
masks = st.lists(st.booleans(), min_size=4, max_size=4).map(torch.tensor)


def advanced(env) -> TensorDict:
    """A root in which the counts are 1, 2, 2, 1."""
    root = env.step_mdp(env.rand_step(env.reset()))
    mask = torch.tensor([False, True, True, False])
    return env.step_mdp(env.step(env.rand_action(root).set("_step", mask)))


@pytest.mark.parametrize("kind", ENVS)
@settings(max_examples=8)
@given(mask=masks)
def test_the_rows_of_a_mask_are_seen_once_and_together(kind, mask):
    share = Share(["count"], ["share"])
    env = TransformedEnv(ENVS[kind](), share)
    root = advanced(env)
    share.seen.clear()

    stepped = env.step(env.rand_action(root.clone()).set("_step", mask))
    reset = env.reset(root.clone().set("_reset", mask[:, None]))

    counts = root["count"][mask].flatten()
    seen = [rows for _, rows in share.seen]
    assert seen == ([(counts + 1).tolist(), (counts * 0).tolist()] if mask.any() else [])
    assert stepped["next", "share"][mask].equal(stepped["next", "count"][mask] / share.largest)
    assert reset["share"][~mask].equal(root["share"][~mask])


@pytest.mark.parametrize("kind", ENVS)
def test_it_obeys_the_contract_of_transforms(kind):
    share = Share(["more"], ["share"])
    env = TransformedEnv(ENVS[kind](), Compose(More(), share))

    data = env.rollout(4)

    assert [rows for _, rows in share.seen] == [[10.0 + step] * 4 for step in range(5)]
    assert data["next", "share"].eq(1).all()
    check_env_specs(env)


def test_each_level_is_seen_where_it_was_reset():
    keys = [("a", "count"), ("b", "count")]
    share = Share(keys, [("a", "share"), ("b", "share")])
    env = TransformedEnv(TwoTeams((9, 9), batch_size=[2]), share)
    root = env.step_mdp(env.rand_step(env.reset()))
    share.seen.clear()

    env.reset(root.set(("a", "_reset"), torch.tensor([[True], [False]])))

    assert share.seen == [(keys[0], [0]), (keys[1], [0, 0])]  # no mask: all of that level is reset


def test_data_is_seen_as_a_whole():
    share = Share(["x"], ["y"])

    data = share(TensorDict({"x": torch.arange(6.0).reshape(2, 3, 1)}, [2, 3]))

    assert share.seen == [("x", [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])]
    assert data["y"].max() == 1


def test_one_that_does_not_look_is_told_so():
    with pytest.raises(NotImplementedError, match="does not write _observe_rows"):
        TransformedEnv(Count(3), Forgetful(["count"], ["share"])).reset()
