"""Returns and rollouts are plotted with labels, from whatever holds them."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from envkit import GymEnv, episode_stats, evaluate, plot_returns, plot_rollout
from envkit.errors import ArgumentError, MissingKeyError, MissingLibraryError
from tests.zoo.envs import Count, StatelessCount

figure = pytest.importorskip("matplotlib.figure")


def axes(count=1):
    return figure.Figure().subplots(count, squeeze=False)[:, 0]


def test_returns_and_their_running_mean_are_plotted():
    returns = torch.arange(40.0)

    ax = plot_returns(returns, ax=axes()[0])

    raw, mean = ax.get_lines()
    assert raw.get_ydata().tolist() == returns.tolist()
    assert mean.get_xdata().tolist() == list(range(2, 41))
    assert mean.get_ydata().tolist() == [at + 0.5 for at in range(39)]
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_legend()) == ("episode", "return", None)


def test_curves_by_name_stand_in_the_legend_whatever_holds_them():
    env = StatelessCount(3, batch_size=[2])
    data = env.rollout(7, break_when_any_done=False)

    ax = plot_returns(
        {"evaluated": evaluate(env, None, 2, seed=0), "stats": episode_stats(data), "data": data},
        ax=axes()[0],
    )

    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "evaluated",
        "stats",
        "data",
    ]
    lines = ax.get_lines()
    ended = episode_stats(data)
    assert lines[2].get_ydata().tolist() == ended.returns[ended.ended].tolist()
    assert np.array_equal(lines[2].get_ydata(), lines[4].get_ydata())
    (bare, _) = plot_returns(data, ax=axes()[0]).get_lines()
    assert np.array_equal(bare.get_ydata(), lines[4].get_ydata())


def test_a_figure_is_made_where_no_axes_are_given():
    from matplotlib import pyplot

    before = set(pyplot.get_fignums())
    made = plot_returns([1.0, 2.0])

    assert set(pyplot.get_fignums()) - before == {made.figure.number}
    pyplot.close(made.figure)


def test_one_row_is_plotted_entry_by_entry_with_the_ends_of_episodes():
    env = StatelessCount(3, batch_size=[2])
    data = env.rollout(7, break_when_any_done=False)

    found = plot_rollout(data, row=1, axes=axes(6))

    named = {ax.get_ylabel(): ax for ax in found if ax.get_ylabel()}
    assert list(named)[:2] == ["reward", "action"] and "count" in named
    lines = named["count"].get_lines()
    assert lines[0].get_ydata().tolist() == data["count"][1, :, 0].tolist()
    ends = torch.nonzero(data["next", "done"][1, :, 0]).flatten().tolist()
    width = data["count"].shape[-1]
    assert ends and [line.get_xdata()[0] for line in lines[width:]] == ends
    assert list(named.values())[-1].get_xlabel() == "step"


def test_what_never_changes_is_left_out_but_for_rewards_and_actions():
    steps = torch.arange(3.0)
    still = torch.ones(3, 1)
    data = TensorDict(
        {"action": still, "gravity": still, "x": steps, "next": {"reward": still}}, [3]
    )

    found = plot_rollout(data, axes=axes(3))

    assert [ax.get_ylabel() for ax in found] == ["reward", "action", "x"]


@pytest.mark.parametrize(
    ("curves", "message"),
    [((), "no curves"), (([],), "at least one episode"), ((torch.zeros(2, 2),), r"shape \(2, 2\)")],
)
def test_what_holds_no_returns_is_refused(curves, message):
    with pytest.raises(ArgumentError, match=message):
        plot_returns(*curves)


def test_a_row_that_is_not_there_is_refused(monkeypatch):
    data = Count(3).rollout(2)
    with pytest.raises(ArgumentError, match="row is 1, but the data has 1 rows"):
        plot_rollout(data, row=1)
    with pytest.raises(ArgumentError, match="no time axis"):
        plot_rollout(data[0])
    with pytest.raises(ArgumentError, match="axes are 1, but"):
        plot_rollout(data, axes=axes(1))
    with pytest.raises(MissingKeyError, match="no entry with 1 to 16 numbers"):
        plot_rollout(TensorDict({"wide": torch.zeros(2, 99)}, [2]))
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(MissingLibraryError, match=r"'\.\[viz\]'"):
        plot_rollout(data)


def test_what_has_unlike_shapes_is_left_out():
    data = GymEnv("Blackjack-v1").rollout(5, break_when_any_done=False)

    shown = plot_rollout(data, axes=axes(4))

    assert {ax.get_ylabel() for ax in shown} >= {"reward", "action"}
    assert not any("observation" in ax.get_ylabel() for ax in shown)
