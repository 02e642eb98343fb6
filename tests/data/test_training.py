"""Advantages as TorchRL computes them, across padding and pieces that TorchRL does not see, and minibatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.objectives.value import GAE
from torchrl.objectives.value.functional import generalized_advantage_estimate as theirs

from envkit import (
    Collector,
    GymEnv,
    MultiStep,
    gae,
    generalized_advantage_estimate,
    minibatches,
    split_trajectories,
)
from envkit.errors import ArgumentError, DataTypeError, MissingKeyError

GAMMA, LMBDA = 0.99, 0.95


def drawn(shape: tuple[int, ...], seed: int) -> dict[str, torch.Tensor]:
    """What a step has, at random: a fifth of the steps is the last of a trajectory, half of those terminated."""
    generator = torch.Generator().manual_seed(seed)
    value, following, reward = torch.randn(3, *shape, generator=generator)
    done = torch.rand(shape, generator=generator) < 0.2
    terminated = done & (torch.rand(shape, generator=generator) < 0.5)
    return {
        "state_value": value,
        "next_state_value": following,
        "reward": reward,
        "done": done,
        "terminated": terminated,
    }


def recorded(shape: tuple[int, ...], seed: int) -> TensorDict:
    """A batch of such steps, of the batch size ``shape[:-1]``."""
    steps, batch_size = drawn(shape, seed), shape[:-1]
    following = {name: steps[name] for name in ("reward", "done", "terminated")}
    following["state_value"] = steps["next_state_value"]
    return TensorDict(
        {"state_value": steps["state_value"], "next": TensorDict(following, batch_size)},
        batch_size,
        names=[*[None] * (len(batch_size) - 1), "time"],
    )


def linear(td: Any) -> torch.Tensor:
    return td["observation"].sum(-1, keepdim=True)


shapes = st.lists(st.integers(1, 4), min_size=2, max_size=4).map(tuple)
rates = st.sampled_from([0.0, 0.5, 0.95, 0.99, 1.0])


@given(shape=shapes, seed=st.integers(0, 2**31), gamma=rates, lmbda=rates, data=st.data())
@settings(max_examples=60)
def test_advantages_have_the_bits_of_torchrl(shape, seed, gamma, lmbda, data):
    time_dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    steps = drawn(shape, seed)

    found = generalized_advantage_estimate(gamma, lmbda, **steps, time_dim=time_dim)

    in_time = {name: tensor.movedim(time_dim, -2) for name, tensor in steps.items()}
    for ours, other in zip(found, theirs(gamma, lmbda, **in_time), strict=True):
        assert torch.equal(ours.movedim(time_dim, -2), other)


@given(shape=shapes, seed=st.integers(0, 2**31), vectorized=st.booleans())
@settings(max_examples=40)
def test_a_batch_gets_what_the_gae_module_of_torchrl_writes(shape, seed, vectorized):
    batch = recorded((*shape[:-1], 1), seed)
    module = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=None, vectorized=vectorized)

    batch_after = gae(batch, gamma=GAMMA, lmbda=LMBDA)

    expected = module(batch.clone())
    for name in ("advantage", "value_target"):
        torch.testing.assert_close(batch_after[name], expected[name], rtol=1e-5, atol=1e-5)


def test_a_module_of_tensordict_and_a_function_of_tensordicts_give_the_values():
    torch.manual_seed(0)
    data = GymEnv("Pendulum-v1").rollout(6)
    network = torch.nn.Linear(3, 1)
    module = TensorDictModule(network, in_keys=["observation"], out_keys=["state_value"])

    by_module = gae(data, module, gamma=GAMMA, lmbda=LMBDA)
    by_function = gae(data, lambda td: network(td["observation"]), gamma=GAMMA, lmbda=LMBDA)

    expected = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=module)(data.clone())
    for found in (by_module, by_function):
        torch.testing.assert_close(found["advantage"], expected["advantage"], rtol=1e-4, atol=1e-4)
        assert not found["advantage"].requires_grad
    assert "advantage" not in data.keys() and "state_value" not in data["next"].keys()


def test_gradients_flow_to_the_values_of_the_function_over_tensors():
    steps = drawn((2, 5, 1), seed=3)
    ours, other = (steps["state_value"].clone().requires_grad_() for _ in range(2))

    generalized_advantage_estimate(GAMMA, LMBDA, **{**steps, "state_value": ours})[
        0
    ].sum().backward()
    theirs(GAMMA, LMBDA, **{**steps, "state_value": other})[0].sum().backward()

    torch.testing.assert_close(ours.grad, other.grad)


def test_rewards_of_double_precision_give_advantages_in_the_dtype_of_the_values():
    steps = drawn((2, 5, 1), seed=4)
    steps["reward"] = steps["reward"].double()

    advantage, _ = generalized_advantage_estimate(GAMMA, LMBDA, **steps)

    assert advantage.dtype == torch.float32
    torch.testing.assert_close(advantage, theirs(GAMMA, LMBDA, **steps)[0])


def test_the_axis_of_time_is_the_one_of_that_name():
    batch = recorded((3, 4, 1), seed=5)
    turned = batch.transpose(0, 1)
    turned.names = ["time", None]

    found = gae(turned, gamma=GAMMA, lmbda=LMBDA)["advantage"]

    last = gae(batch, gamma=GAMMA, lmbda=LMBDA)["advantage"]
    assert torch.equal(found.transpose(0, 1), last)
    assert torch.equal(gae(batch, gamma=GAMMA, lmbda=LMBDA, time_dim=-1)["advantage"], last)


@given(seed=st.integers(0, 2**31))
@settings(max_examples=30)
def test_trajectories_in_rows_of_their_own_have_the_same_advantages(seed):
    batch = recorded((3, 7, 1), seed)
    split = split_trajectories(batch)

    split_after = gae(split, gamma=GAMMA, lmbda=LMBDA)

    mask = split["mask"]
    plain = gae(batch, gamma=GAMMA, lmbda=LMBDA)
    assert torch.equal(split_after["advantage"][mask], plain["advantage"].flatten(0, 1))
    assert not split_after["advantage"][~mask].any()


def test_padding_after_a_trajectory_that_was_cut_leaves_its_advantages_alone():
    batch = recorded((1, 4, 1), seed=6)
    batch["next", "done"][:] = batch["next", "terminated"][:] = False
    padding = batch.clone()
    padding["next", "reward"][:] = float("nan")
    padded = torch.cat([batch, padding], -1)
    padded["collector", "mask"] = torch.arange(8)[None] < 4

    found = gae(padded, gamma=GAMMA, lmbda=LMBDA)["advantage"]

    assert torch.equal(found[:, :4], gae(batch, gamma=GAMMA, lmbda=LMBDA)["advantage"])
    assert not found[:, 4:].any()


def test_nothing_is_carried_over_where_trajectory_ids_change():
    pieces = [recorded((2, 3, 1), seed) for seed in (7, 8)]
    for number, piece in enumerate(pieces):
        piece["next", "done"][:] = piece["next", "terminated"][:] = False
        piece["collector", "traj_ids"] = torch.full((2, 3), number)

    found = gae(torch.cat(pieces, -1), gamma=GAMMA, lmbda=LMBDA)["advantage"]

    alone = [gae(piece, gamma=GAMMA, lmbda=LMBDA)["advantage"] for piece in pieces]
    assert torch.equal(found, torch.cat(alone, 1))


def test_an_action_mask_of_an_env_is_no_mask_of_steps():
    batch = recorded((2, 5, 1), seed=9)
    masked = batch.clone().set("mask", torch.zeros(2, 5, 9, dtype=torch.bool))

    found = gae(masked, gamma=GAMMA, lmbda=LMBDA)["advantage"]

    assert torch.equal(found, gae(batch, gamma=GAMMA, lmbda=LMBDA)["advantage"])
    assert sum(len(part) for part in minibatches(masked, 4)) == 10


def test_several_steps_at_once_are_discounted_as_in_torchrl():
    batch = MultiStep(GAMMA, 3)(recorded((2, 6, 1), seed=10))

    found = gae(batch, gamma=GAMMA, lmbda=LMBDA)["advantage"]

    module = GAE(gamma=GAMMA, lmbda=LMBDA, value_network=None, vectorized=False)
    torch.testing.assert_close(found, module(batch.clone())["advantage"], rtol=1e-5, atol=1e-5)


def test_a_batch_of_a_collector_goes_through_both():
    with Collector(lambda: GymEnv("Pendulum-v1"), frames_per_batch=20) as collector:
        batch = gae(collector.next(), linear, gamma=GAMMA, lmbda=LMBDA)

    parts = list(minibatches(batch.select("observation", "action", "advantage"), 8, epochs=2))

    assert [len(part) for part in parts] == [8, 8, 4] * 2
    assert set(parts[0].keys()) == {"observation", "action", "advantage"}


def test_gamma_and_lmbda_of_each_entry_are_those_of_its_advantages():
    batch, gammas, lmbdas = recorded((3, 2, 5, 1), seed=12), [0.9, 0.5, 1.0], [0.2, 1.0, 0.7]
    batch["steps_to_next_obs"] = torch.randint(1, 4, (3, 2, 5, 1))

    together = gae(batch, gamma=torch.tensor(gammas), lmbda=torch.tensor(lmbdas))

    for part, whole, gamma, lmbda in zip(batch, together, gammas, lmbdas, strict=True):
        alone = gae(part, gamma=gamma, lmbda=lmbda)
        torch.testing.assert_close(whole["advantage"], alone["advantage"])
    rows = batch.flatten(0, 1)
    by_row = gae(rows, gamma=torch.tensor(gammas).repeat_interleave(2), lmbda=LMBDA)
    assert by_row["advantage"].shape == (6, 5, 1)
    with pytest.raises(ArgumentError, match=r"gamma has shape \(2,\).*e.g. of shape \(3,\)"):
        gae(batch, gamma=torch.tensor([0.9, 0.8]), lmbda=LMBDA)


# -------------------------------------------------------------------------------------- minibatches


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    size=st.integers(1, 30),
    epochs=st.integers(1, 3),
)
@settings(max_examples=50)
def test_each_epoch_has_each_step_once_with_all_its_entries(shape, size, epochs):
    count = torch.Size(shape).numel()
    number = torch.arange(count).reshape(shape)
    batch = TensorDict({"number": number, "nested": {"twice": 2 * number[..., None]}}, shape)

    parts = list(minibatches(batch, size, epochs=epochs))

    seen = torch.cat([part["number"] for part in parts]).reshape(epochs, count)
    assert (seen.sort(-1).values == torch.arange(count)).all()
    assert all(torch.equal(part["nested", "twice"][:, 0], 2 * part["number"]) for part in parts)
    assert {len(part) for part in parts[:-1]} <= {size, count % size}


def test_the_order_is_another_in_each_epoch_and_that_of_the_generator():
    batch = TensorDict({"number": torch.arange(50)}, [50])

    def order(seed):
        generator = torch.Generator().manual_seed(seed)
        return [p["number"].tolist() for p in minibatches(batch, 50, epochs=2, generator=generator)]

    assert order(1) == order(1)
    assert order(1)[0] != order(1)[1]


def test_the_rest_of_an_epoch_is_left_out_when_asked():
    batch = TensorDict({"number": torch.arange(10)}, [10])

    assert [len(part) for part in minibatches(batch, 4, drop_last=True)] == [4, 4]
    with pytest.raises(ArgumentError, match="smaller batch_size"):
        minibatches(batch, 11, drop_last=True)


def test_minibatches_leave_padding_out():
    batch = TensorDict({"number": torch.arange(6).reshape(2, 3)}, [2, 3])
    batch["collector", "mask"] = torch.tensor([[True, False, False], [True, True, False]])

    (part,) = minibatches(batch, 6)

    assert part["number"].sort().values.tolist() == [0, 3, 4]


def test_axes_that_are_kept_are_shuffled_as_each_entry_would_be_alone():
    batch = TensorDict({"number": torch.arange(24).reshape(3, 2, 4)}, [3, 2, 4])

    def parts(batch, **options):
        generator = torch.Generator().manual_seed(0)
        return list(minibatches(batch, 3, epochs=2, generator=generator, **options))

    together = parts(batch, keep_dims=1)

    for part, *alone in zip(together, *map(parts, batch), strict=True):
        assert torch.equal(part["number"], torch.stack([one["number"] for one in alone]))
    assert [tuple(part.batch_size) for part in parts(batch, keep_dims=2)] == [
        (3, 2, 3),
        (3, 2, 1),
    ] * 2
    batch["mask"] = torch.ones(3, 2, 4, dtype=torch.bool)
    assert len(parts(batch, keep_dims=1)) == len(together)
    batch["mask"][0, 0, 0] = False
    with pytest.raises(ArgumentError, match=r"has padding.*Pass keep_dims=0"):
        parts(batch, keep_dims=1)
    with pytest.raises(ArgumentError, match="keep_dims is 3"):
        parts(batch, keep_dims=3)


# ------------------------------------------------------------------------------------ bad arguments


def test_what_does_not_fit_is_named():
    batch = recorded((2, 5, 1), seed=11)
    steps = drawn((2, 5, 1), seed=11)

    with pytest.raises(ArgumentError, match=r"value.unsqueeze\(-1\)"):
        gae(batch, lambda td: torch.zeros(2, 5), gamma=GAMMA, lmbda=LMBDA)
    with pytest.raises(TypeError) as caught:
        gae(batch, torch.nn.Linear(3, 1), gamma=GAMMA, lmbda=LMBDA)
    assert "Pass lambda td: critic(td['observation'])" in caught.value.__notes__[0]
    with pytest.raises(MissingKeyError, match=r"state_value.*Pass value"):
        gae(batch.exclude("state_value"), gamma=GAMMA, lmbda=LMBDA)
    with pytest.raises(MissingKeyError, match="no 'reward'"):
        gae(batch.exclude(("next", "reward")), gamma=GAMMA, lmbda=LMBDA)
    with pytest.raises(ArgumentError, match="axis of time as time_dim"):
        gae(batch, gamma=GAMMA, lmbda=LMBDA, time_dim=2)
    steps["next_state_value"] = steps["next_state_value"].long()
    with pytest.raises(ArgumentError, match=r"next_state_value has dtype .*\.float\(\)"):
        generalized_advantage_estimate(GAMMA, LMBDA, **steps)
    with pytest.raises(DataTypeError, match="batch is of type dict"):
        gae({}, gamma=GAMMA, lmbda=LMBDA)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match="batch_size is 0"):
        minibatches(batch, 0)
    with pytest.raises(ArgumentError, match="at least one batch axis"):
        minibatches(batch[0, 0], 1)
