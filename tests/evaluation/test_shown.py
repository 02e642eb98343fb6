"""A rollout shows its episodes and entries in a notebook, where that is asked for; TensorDict's own repr stays as it is."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from IPython.core.formatters import DisplayFormatter
from tensordict import TensorDict, lazy_stack

import envkit
from envkit import episode_stats, show_rollout
from tests.env.test_html import Page
from tests.zoo.envs import Count, StatelessCount


def texts(shown) -> list[str]:
    return Page(shown._repr_html_()).texts


def test_a_rollout_shows_its_episodes_and_every_entry():
    data = StatelessCount(5, batch_size=[3]).rollout(12, break_when_any_done=False)

    shown = show_rollout(data)

    stats, written = episode_stats(data), texts(shown)
    assert shown.data is data
    for name, fact in {
        "batch size": "(3, 12)",
        "episodes": "6 ended, 3 cut by the end",
        "mean return": f"{stats.returns[stats.ended].mean():.4g}",
        "mean length": "5",
        "next.reward": "(3, 12, 1)",
        "next.done": "(3, 12, 1)",
    }.items():
        assert written[written.index(name) + 1] == fact
    assert written[written.index("next.done") + 2] == "bool"
    assert any(text.startswith("returns, ") for text in written)
    assert "\n" not in repr(shown) and "6 ended" in repr(shown)


def test_data_without_rewards_shows_its_entries_and_no_episodes():
    data = TensorDict({"<b>": torch.zeros(4, 2, dtype=torch.int32), "text": "hello"}, [4])

    written = texts(show_rollout(data))

    assert written[written.index("<b>") :][:4] == ["<b>", "(4, 2)", "int32", "cpu"]
    assert "text" in written and "episodes" not in written


def test_rewards_of_several_numbers_tell_no_return():
    following = {"reward": torch.zeros(2, 3, 2), "done": torch.zeros(2, 3, 1, dtype=torch.bool)}
    data = TensorDict({"next": TensorDict(following, [2, 3])}, [2, 3], names=[None, "time"])

    assert show_rollout(data).episodes is None


def test_steps_in_another_order_show_no_episodes():
    data = Count(9).rollout(9)

    shown = show_rollout(data[torch.randperm(9, generator=torch.Generator().manual_seed(0))])

    assert shown.episodes is None and "ended" not in repr(shown)


def test_a_notebook_that_asks_for_it_shows_every_tensordict_as_a_table_until_it_asks_no_more():
    shell = SimpleNamespace(
        display_formatter=DisplayFormatter()
    )  # where IPython keeps how types are shown
    data = StatelessCount(5, batch_size=[3]).rollout(12, break_when_any_done=False)

    def shown(td):
        return shell.display_formatter.format(td)[0].get("text/html")

    before = shown(data)
    envkit.load_ipython_extension(shell)
    rollout, stacked = shown(data), shown(lazy_stack([TensorDict(a=1), TensorDict(a=2)]))
    envkit.unload_ipython_extension(shell)

    assert before is None and shown(data) is None
    assert rollout == show_rollout(data)._repr_html_() and "<b>Rollout</b>" in rollout
    assert "<b>LazyStackedTensorDict</b>" in stacked and ">a<" in stacked
