"""Games of PettingZoo: groups, masks, agents that die, resets, and what stands around them."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from pettingzoo import ParallelEnv as TheirParallelEnv

from envkit import (
    AsyncEnvPool,
    Collector,
    Compose,
    MarlGroupMapType,
    MixedEnv,
    ParallelEnv,
    PettingZooEnv,
    PettingZooWrapper,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    BatchSizeError,
    BrokenLibraryError,
    EncodingError,
    InputError,
    MissingKeyError,
    MissingLibraryError,
    NotResetError,
    OptionError,
    OutputShapeError,
    SpecError,
    UnknownEnvError,
    UnsupportedError,
)
from envkit_bridges.worlds.pettingzoo.pettingzoo_env import build, env_names
from tests.bridges.compare import assert_same
from tests.zoo.pettingzoo_by_hand import play_beside_the_library
from tests.zoo.pettingzoo_games import Fading, Rebuilt, fading_in_turns
from tests.zoo.resumed import same, twice

make_spread = partial(PettingZooEnv, "mpe/simple_spread_v3", N=2, max_cycles=4)
make_tictactoe = partial(PettingZooEnv, "classic/tictactoe_v3", parallel=False, use_mask=True)
make_fading = partial(PettingZooWrapper, use_mask=True, done_on_any=False)


def stepped(env, actions: int = 0):
    """Reset and step until the game ends; gives what each ``next`` holds."""
    td, seen = env.reset(), []
    while not seen or not seen[-1]["done"]:
        td.update(env.full_action_spec.zero())
        td = env.step(td)
        seen.append(td["next"])
        td = env.step_mdp(td)
    return seen


# -------------------------------------------------------------------------------- the bare library


@pytest.mark.parametrize(
    ("task", "parallel"),
    [
        ("classic/tictactoe_v3", False),
        ("mpe/simple_tag_v3", True),
        ("butterfly/knights_archers_zombies_v11", False),
    ],
)
def test_a_game_is_the_bare_librarys_to_the_bit(task, parallel):
    ended = play_beside_the_library(task, parallel, 120)

    assert ended or "butterfly" in task


def test_the_specs_say_what_comes_out():
    for make in (make_spread, make_tictactoe, partial(make_fading, Fading())):
        check_env_specs(make())


# ------------------------------------------------------------------------------------------- groups


def test_agents_of_one_name_share_a_group_and_those_that_take_turns_are_alone():
    together = PettingZooEnv("mpe/simple_adversary_v3")
    in_turns = PettingZooEnv("mpe/simple_adversary_v3", parallel=False, use_mask=True)

    assert together.group_map == {"adversary": ["adversary_0"], "agent": ["agent_0", "agent_1"]}
    assert in_turns.group_map == {name: [name] for name in in_turns.possible_agents}


def test_an_entry_of_a_group_has_its_agents_in_front():
    env = PettingZooEnv("mpe/simple_adversary_v3", use_mask=True, return_state=True)

    data = env.rollout(2)

    assert data["agent", "observation"].shape == (2, 2, 10)
    assert data["adversary", "observation"].shape == (2, 1, 8)
    assert data["agent", "action"].shape == (2, 2)
    assert data["agent", "mask"].shape == (2, 2)
    assert data["next", "agent", "reward"].shape == (2, 2, 1)
    assert data["next", "agent", "done"].shape == (2, 2, 1)
    assert data["next", "done"].shape == (2, 1)
    assert data["next", "state"].shape == (2, 28)


@pytest.mark.parametrize(
    "group_map",
    [
        MarlGroupMapType.ALL_IN_ONE_GROUP,
        MarlGroupMapType.ONE_GROUP_PER_AGENT,
        {"odd": ["agent_1"], "even": ["agent_2", "agent_0"]},
    ],
)
def test_groups_change_where_an_agent_is_and_nothing_else(group_map):
    plain, grouped = make_fading(Fading()), make_fading(Fading(), group_map=group_map)
    runs = []

    for env in (plain, grouped):
        env.set_seed(0)
        last = stepped(env)[2]
        nodes = {
            name: last[g][i] for g, names in env.group_map.items() for i, name in enumerate(names)
        }
        runs.append({name: nodes[name] for name in env.possible_agents})

    for name, node in runs[0].items():
        assert_same(node, runs[1][name])


def test_agents_of_unlike_spaces_may_share_a_group():
    one = partial(PettingZooEnv, "mpe/simple_speaker_listener_v4")
    alone, together = one(), one(group_map=MarlGroupMapType.ALL_IN_ONE_GROUP)

    check_env_specs(together)
    together.set_seed(0)
    alone.set_seed(0)
    apart, joined = alone.rollout(5), together.rollout(5)

    assert joined[0]["agents"][0]["observation"].shape == (3,)
    assert joined[0]["agents"][1]["observation"].shape == (11,)
    assert apart["speaker", "observation"][0, 0].equal(joined[0]["agents"][0]["observation"])


@pytest.mark.parametrize(
    ("group_map", "message"),
    [
        ({"all": ["agent_0"]}, "'agent_1' is in 0 groups"),
        ({"all": ["agent_0", "agent_1", "agent_9"]}, "has the agent 'agent_9'"),
        ({"all": ["agent_0", "agent_1"], "none": []}, "'none' has no agents"),
    ],
)
def test_a_group_map_holds_each_agent_once(group_map, message):
    with pytest.raises(ValueError, match=message):
        make_spread(group_map=group_map)


@pytest.mark.parametrize(
    ("group_map", "message"),
    [
        ("all", "group_map is 'all', of type str, but must be a dict of groups"),
        ({"all": "agent_0"}, r"'agent_0' for the group 'all'.* Pass \['agent_0'\]"),
        ({"all": 3}, "3 for the group 'all', but must have a list of agents"),
    ],
)
def test_what_is_no_group_map_is_told(group_map, message):
    with pytest.raises(ArgumentTypeError, match=message):
        make_spread(group_map=group_map)


# ----------------------------------------------------------------------------------- actions, masks


def test_random_actions_obey_the_rules_of_the_game():
    env = make_tictactoe(seed=0)

    data = env.rollout(200, break_when_any_done=False)

    for player in env.group_map:
        allowed = data[player, "action_mask"].gather(-1, data[player, "action"].unsqueeze(-1))
        assert allowed.all()
    assert (data["next", "done"].sum() > 20).item()
    assert data["player_1", "mask"].logical_xor(data["player_2", "mask"]).all()


def test_the_spec_of_actions_allows_what_the_game_allows_now():
    env = make_tictactoe()
    td = env.reset()
    td["player_1", "action"] = torch.tensor([4])

    env.step(td)

    drawn = [env.full_action_spec["player_2", "action"].rand().item() for _ in range(50)]
    assert 4 not in drawn


def test_a_batch_of_games_obeys_the_rules_of_each():
    env = SerialEnv(3, make_tictactoe)
    env.set_seed(0)

    data = env.rollout(30, break_when_any_done=False)

    for player in ("player_1", "player_2"):
        allowed = data[player, "action_mask"].gather(-1, data[player, "action"].unsqueeze(-1))
        assert allowed.all()


def test_where_a_game_is_over_and_no_move_is_left_random_actions_are_drawn_from_all():
    env, moves = make_tictactoe(), [0, 1, 2, 4, 3, 5, 7, 6, 8]  # a draw
    td = env.reset()

    for turn, move in enumerate(moves):
        td[f"player_{turn % 2 + 1}", "action"] = torch.tensor([move])
        td = env.step(td)
        following = td["next"]
        td = env.step_mdp(td)

    assert following["done"].all()
    assert following["player_1", "action_mask"].all()
    assert following["player_2", "action_mask"].all()


def test_actions_may_be_spelled_one_hot():
    hot, counted = make_spread(seed=0, categorical_actions=False), make_spread(seed=0)

    data = hot.rollout(4)
    other = counted.reset()

    assert data["agent", "action"].shape == (4, 2, 5)
    other["agent", "action"] = data[0]["agent", "action"].argmax(-1)
    assert_same(counted.step(other)["next"], data[0]["next"])


def test_in_turns_the_action_of_the_one_whose_turn_it_is_is_enough():
    env = make_tictactoe()
    td = env.reset()
    td["player_1", "action"] = torch.tensor([0])

    following = env.step(td)["next"]

    assert following["player_2", "mask"].all() and not following["player_1", "mask"].any()
    with pytest.raises(MissingKeyError, match=r"no \('player_2', 'action'\)"):
        env.step(env.step_mdp(td))


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (torch.zeros(2, 5, dtype=torch.int64), r"has shape \(2, 5\), but the env takes \(2,\)"),
        (torch.tensor([0, 5]), r"is \[0, 5\], but"),
        (torch.full((2,), 0.5), "to which a cast would change it"),
    ],
)
def test_an_action_that_is_none_is_refused_by_name(action, message):
    env = make_spread()
    td = env.reset()
    td["agent", "action"] = action

    with pytest.raises(InputError, match=message) as caught:
        env.step(td)
    assert "'agent', 'action'" in str(caught.value)


def test_an_action_of_an_agent_in_a_group_of_unlike_ones_is_checked_by_its_own_space():
    env = PettingZooEnv(
        "mpe/simple_speaker_listener_v4", group_map=MarlGroupMapType.ALL_IN_ONE_GROUP
    )
    td = env.rand_action(env.reset())
    td["agents"][0].set(
        "action", torch.tensor(4)
    )  # the listener has five options, the speaker three

    with pytest.raises(InputError, match=r"speaker_0.* is 4"):
        env.step(td)


# ------------------------------------------------------------------------------- agents that are dead


def test_a_dead_agent_is_zero_and_stays_done_the_way_it_ended():
    env = make_fading(Fading((2, 3, 5)))

    seen = stepped(env)

    assert len(seen) == 5
    done = torch.stack([following["agent", "done"][:, 0] for following in seen])
    truncated = torch.stack([following["agent", "truncated"][:, 0] for following in seen])
    mask = torch.stack([following["agent", "mask"] for following in seen])
    assert done.int().tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 0], [1, 1, 1]]
    assert truncated.int().tolist() == [[0, 0, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0], [1, 0, 0]]
    assert mask.equal(~done)
    assert seen[1]["agent", "observation"][0].tolist() == [0, 2]  # its last one
    assert not seen[2]["agent", "observation"][0].any()
    assert not seen[2]["agent", "reward"][0].any()
    assert seen[2]["agent", "reward"][2] >= 3
    assert not seen[2]["agent", "info", "age"][0].any()


def test_agents_that_are_dead_are_asked_for_nothing():
    game = Fading((1, 3))

    stepped(make_fading(game))

    assert [list(actions) for actions in game.taken] == [
        ["agent_0", "agent_1"],
        ["agent_1"],
        ["agent_1"],
    ]


def test_the_game_ends_with_its_first_or_its_last_agent():
    first = PettingZooWrapper(Fading((2, 3)), use_mask=True)
    last = PettingZooWrapper(Fading((2, 3)), use_mask=True, done_on_any=False)

    assert len(stepped(first)) == 2
    assert len(stepped(last)) == 3


@pytest.mark.parametrize(
    ("lives", "terminated", "truncated"),
    [((3, 3), True, False), ((2, 2), False, True), ((2, 3), False, True)],
)
def test_the_whole_game_is_terminated_where_all_agents_were(lives, terminated, truncated):
    last = stepped(make_fading(Fading(lives)))[-1]

    assert (bool(last["terminated"]), bool(last["truncated"])) == (terminated, truncated)
    assert last["done"].all()


def test_agents_that_die_need_a_mask():
    env = PettingZooWrapper(Fading((1, 3)), done_on_any=False)

    with pytest.raises(ValueError, match=r"\['agent_0'\] .* are dead .* Pass use_mask=True"):
        stepped(env)


def test_agents_may_be_dead_from_the_beginning():
    env = PettingZooWrapper(Fading((0, 3)), use_mask=True)

    root, seen = env.reset(), stepped(env)

    assert root["agent", "done"].flatten().tolist() == [True, False]
    assert root["agent", "mask"].tolist() == [False, True]
    assert not root["done"].any()
    assert len(seen) == 3  # an agent that never lived ends nothing


def test_turns_of_dead_agents_are_no_steps():
    env = make_fading(fading_in_turns((1, 3)))

    seen = stepped(env)

    turns = [[bool(td[name, "mask"]) for name in env.possible_agents] for td in seen]
    assert turns[:3] == [[False, True], [False, True], [False, True]]
    assert len(seen) == 4  # a round of both, then two of the one that lives
    assert seen[-1]["agent_0", "terminated"].all()


@pytest.mark.parametrize("make", [Fading, fading_in_turns])
def test_a_game_that_is_over_takes_no_step(make):
    env = make_fading(make((1,)), group_map=MarlGroupMapType.ONE_GROUP_PER_AGENT)
    td = stepped(env)[-1].exclude(("agent_0", "reward"))

    with pytest.raises(NotResetError, match=r"the game of .* is over"):
        env.step(env.rand_action(td))


# ------------------------------------------------------------------------------------- infos, state


def test_numbers_in_infos_are_entries_and_texts_are_not():
    env = make_fading(Fading())

    data = env.rollout(2)

    assert data["next", "agent", "info", "age"].tolist() == [[1, 1, 1], [2, 2, 2]]
    assert data["agent", "info", "weight"].dtype == torch.float32
    assert set(data["agent", "info"].keys()) == {"age", "weight"}
    with pytest.raises(UnsupportedError, match="are entries of each group"):
        env.set_info_dict_reader()


def test_the_state_of_the_game_lies_at_the_root():
    env = make_fading(Fading(), return_state=True)

    assert env.rollout(3)["next", "state"].tolist() == [[1], [2], [3]]


def test_a_game_without_a_state_says_so():
    with pytest.raises(UnsupportedError, match="has no state of the whole game"):
        make_tictactoe(return_state=True)


# ----------------------------------------------------------------------------------- resets, masks


def test_a_game_is_not_reset_in_part():
    env = make_spread()
    td = env.rand_step(env.reset())["next"].exclude(("agent", "reward"))

    with pytest.raises(RuntimeError, match="cannot be reset in part"):
        env.reset(td.clone().set(("agent", "_reset"), torch.tensor([[True], [False]])))
    with pytest.raises(RuntimeError, match="cannot be reset in part"):
        env.reset(td.clone().set("_reset", torch.tensor([False])))


def test_the_mask_of_the_root_supersedes_those_of_groups():
    env = make_spread(seed=0)
    td = env.rand_step(env.reset())["next"].exclude(("agent", "reward"))
    td["_reset"], td["agent", "_reset"] = torch.tensor([True]), torch.tensor([[False], [True]])

    root = env.reset(td.clone())

    assert not (root["agent", "observation"] == td["agent", "observation"]).all(-1).any()
    assert not any("_reset" in key for key in root.keys(True))


def test_the_mask_of_a_row_supersedes_those_of_its_groups_in_a_batch():
    env = SerialEnv(2, make_spread)
    td = env.rand_step(env.reset())["next"].exclude(("agent", "reward"))
    td["_reset"] = torch.tensor([[True], [False]])
    td["agent", "_reset"] = torch.tensor([[[False], [True]], [[True], [True]]])

    root = env.reset(td.clone())

    same_rows = (root["agent", "observation"] == td["agent", "observation"]).flatten(1).all(-1)
    assert same_rows.tolist() == [False, True]


@pytest.mark.parametrize("use_buffers", [True, False])
def test_a_row_of_a_batch_is_not_reset_in_part(use_buffers):
    env = SerialEnv(2, make_spread, use_buffers=use_buffers)
    td = env.rand_step(env.reset())["next"].exclude(("agent", "reward"))
    td["agent", "_reset"] = torch.tensor([[[False], [True]], [[True], [True]]])

    with pytest.raises(RuntimeError, match="cannot be reset in part"):
        env.reset(td)


def test_a_step_that_is_masked_leaves_the_game_alone():
    game = Fading()
    env = make_fading(game)
    td = env.rand_action(env.reset()).set("_step", torch.tensor(False))

    following = env.step(td)["next"]

    assert not game.taken
    assert following["agent", "observation"].equal(td["agent", "observation"])
    assert not following["agent", "reward"].any()


@pytest.mark.parametrize("make", [make_spread, partial(make_fading, Fading())])
def test_a_seed_makes_a_run_again(make):
    env = make()
    runs = []

    for _ in range(2):
        env.set_seed(7)
        runs.append(env.rollout(12, break_when_any_done=False))
    built = make_spread(seed=5).rollout(3), make_spread(seed=5).rollout(3)

    assert_same(*runs)
    assert_same(*built)
    assert (
        not make_spread(seed=6)
        .reset()["agent", "observation"]
        .equal(built[0][0]["agent", "observation"])
    )


# --------------------------------------------------------------------------------- copies, resuming


COPIES = {"copied": copy.deepcopy, "pickled": lambda env: pickle.loads(pickle.dumps(env))}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_goes_on_as_the_original_would(copied):
    env = make_fading(Fading())
    env.set_seed(3)
    td = env.rand_action(env.step_mdp(env.rand_step(env.reset())))

    twin = copied(env)

    assert_same(twin.step(td.clone()), env.step(td.clone()))
    assert_same(twin.reset(), env.reset())


@pytest.mark.parametrize("make", [make_spread, make_tictactoe, partial(make_fading, Rebuilt())])
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_that_the_library_builds_anew_begins_with_a_reset(make, copied):
    env = make()
    env.set_seed(3)
    td = env.rand_action(env.reset())

    twin = copied(env)

    with pytest.raises(NotResetError, match="since it was made or copied"):
        twin.step(td)
    assert_same(twin.reset(), env.reset())


@pytest.mark.parametrize("make", [make_spread, make_tictactoe, partial(make_fading, Fading())])
def test_a_game_is_saved_and_goes_on_to_the_same_bits(make, opened):
    assert same(twice(make, opened, before=9, after=9))


def test_batches_of_games_are_saved_too(opened):
    assert same(twice(partial(SerialEnv, 2, make_spread), opened, before=6, after=6))


# ------------------------------------------------------------------------------- what stands around


def around(env):
    transforms = Compose(
        StepCounter(3),
        RewardSum(in_keys=[("agent", "reward")], out_keys=[("agent", "episode_reward")]),
    )
    return TransformedEnv(env, transforms)


@pytest.mark.parametrize("make", [make_spread, partial(SerialEnv, 2, make_spread)])
def test_transforms_work_on_entries_of_groups(make):
    env = around(make())
    env.set_seed(0)

    data = env.rollout(7, break_when_any_done=False)

    check_env_specs(env)
    paid, summed = data["next", "agent", "reward"], data["next", "agent", "episode_reward"]
    time = data.ndim - 1
    assert summed.select(time, 2).allclose(paid.narrow(time, 0, 3).sum(time))
    assert data["next", "truncated"].select(time, 2).all()
    assert summed.select(time, 3).equal(paid.select(time, 3))


def test_games_step_beside_other_envs_and_at_their_own_pace():
    mixed = MixedEnv([SerialEnv(2, make_spread), SerialEnv(1, make_spread)])
    mixed.set_seed(0)
    serial = SerialEnv(2, make_spread)
    serial.set_seed(0)
    pool = AsyncEnvPool([make_spread] * 2, backend="threading")

    data = mixed.rollout(6, break_when_any_done=False)
    pool.async_reset_send(pool.reset())
    td = pool.async_reset_recv(min_get=2)

    assert data["agent", "observation"].shape == (3, 6, 2, 12)
    assert data[:2, 0]["agent", "observation"].equal(serial.reset()["agent", "observation"])
    assert td["agent", "observation"].shape[-2:] == (2, 12)
    pool.close()


def test_a_collector_gives_batches_of_groups():
    collector = Collector(partial(SerialEnv, 2, make_spread), frames_per_batch=20, total_frames=40)

    batches = list(collector)

    assert [batch.shape for batch in batches] == [(2, 10)] * 2
    assert batches[0]["next", "agent", "reward"].shape == (2, 10, 2, 1)
    assert batches[0]["next", "done"].sum() == 4
    collector.shutdown()


def make_faded() -> PettingZooWrapper:
    return make_fading(Fading((0, 2, 3)))


def make_faded_in_turns() -> PettingZooWrapper:
    return make_fading(fading_in_turns((1, 3)))


@pytest.mark.parametrize(
    "make",
    [
        make_spread,
        make_tictactoe,
        make_faded,
        make_faded_in_turns,
        partial(make_spread, return_state=True),
    ],
)
def test_games_on_rows_are_those_of_their_tensordicts(make):
    runs = []

    for use_buffers in (True, False):
        env = SerialEnv(3, make, use_buffers=use_buffers)
        env.set_seed(0)
        whole = env.rollout(13, break_when_any_done=False)
        td, steps = env.step_mdp(whole[:, -1]), []
        td["_reset"] = torch.tensor([[True], [False], [True]])
        td = env.reset(td)
        for _ in range(8):
            data, td = env.step_and_maybe_reset(env.rand_action(td))
            steps.append(data)
        runs.append(
            (
                whole,
                torch.stack(steps, 1),
                env.rollout(6, break_when_all_done=True, break_when_any_done=False),
            )
        )

    for one, other in zip(*runs, strict=True):
        assert_same(one, other)


def test_games_step_on_rows_unless_something_else_must_be_done():
    class Doubled(PettingZooEnv):
        def step(self, tensordict):
            return super().step(tensordict)

    assert make_spread().row_core() is not None
    assert make_tictactoe().row_core() is not None
    assert Doubled("mpe/simple_v3").row_core() is None
    assert make_spread(return_state=True).row_core() is None


@pytest.mark.slow
def test_workers_give_the_games_that_this_process_gives():
    runs = []

    for kind in (ParallelEnv, SerialEnv):
        for make in (make_spread, make_tictactoe):
            with kind(2, make) as env:
                env.set_seed(0)
                runs.append(env.rollout(12, break_when_any_done=False))

    assert_same(runs[0], runs[2])
    assert_same(runs[1], runs[3])


# --------------------------------------------------------------------------------- names and errors


def test_the_world_lists_its_envs_without_building_any():
    assert "classic/tictactoe_v3" in env_names()
    assert env_names() == sorted(env_names()) == PettingZooEnv.available_envs
    assert not any(name.startswith("atari/") for name in env_names())


def test_a_world_builds_the_form_that_there_is():
    assert build("mpe/simple_v3").parallel
    assert not build("classic/tictactoe_v3").parallel
    assert not build("mpe/simple_v3", parallel=False).parallel
    assert repr(build("simple_v3")).startswith("PettingZooEnv('simple_v3', parallel=True")


@pytest.mark.parametrize("make", [PettingZooEnv, build])
def test_a_wrong_name_is_told_with_those_closest_to_it(make):
    with pytest.raises(UnknownEnvError, match=r"'tictacto_v3'. Did you mean 'tictactoe_v3'"):
        make("tictacto_v3")
    with pytest.raises(UnknownEnvError, match=r"See PettingZooEnv.available_envs"):
        make("zzz")


def test_other_mistakes_are_one_line_each():
    with pytest.raises(OptionError, match=r"'n_piston'. Did you mean 'n_pistons'\?"):
        PettingZooEnv("butterfly/pistonball_v6", n_piston=3)
    with pytest.raises(OptionError, match=r"no such keyword: .*'walkers'"):
        PettingZooEnv("sisl/multiwalker_v9", walkers=3)
    with pytest.raises(UnknownEnvError, match=r"take turns.*Pass parallel=False"):
        PettingZooEnv("classic/tictactoe_v3")
    with pytest.raises(ArgumentTypeError, match=r"task is 3.*must be the name"):
        PettingZooEnv(3)
    with pytest.raises(ArgumentTypeError, match=r"Pass one, or let PettingZooEnv\('pong'\)"):
        PettingZooWrapper("pong")
    with pytest.raises(ArgumentTypeError, match="wraps a ParallelEnv or an AECEnv"):
        PettingZooWrapper(gymnasium.make("CartPole-v1"))
    with pytest.raises(BatchSizeError, match="is one env"):
        make_spread(batch_size=[2])


def test_games_that_have_no_data_form_say_so():
    class Nobody(TheirParallelEnv):
        metadata = {"name": "nobody"}  # noqa: RUF012
        possible_agents = ()

    class Talking(Fading):
        def observation_space(self, agent):
            return gymnasium.spaces.Text(5)

    with pytest.raises(ArgumentError, match="has no possible_agents"):
        PettingZooWrapper(Nobody())
    with pytest.raises(SpecError, match="agent 'agent_0' holds values without an array form"):
        PettingZooWrapper(Talking())


class Careless(Fading):
    """`Fading`, whose step can be told to be careless with what it says of its agents."""

    def __init__(self, change, lives=(2, 9)):
        super().__init__(lives)
        self.change = change

    def step(self, actions):
        told = list(super().step(actions))
        self.change(self, *told)
        return tuple(told)


def careless(change, **kwargs):
    return PettingZooWrapper(
        Careless(change), use_mask=True, done_on_any=False, seed=0, **kwargs
    ).rollout(4, break_when_any_done=False)["next", "agent"]


def test_an_agent_that_dies_unobserved_is_paid_for_its_last_step():
    def unobserved(env, observations, rewards, *_):
        for name in set(observations).difference(env.agents):
            del observations[name]

    data = careless(unobserved)

    assert (data["reward"][:2, 0] > 0).all() and (data["reward"][2:, 0] == 0).all()
    assert (data["observation"][1:, 0] == 0).all() and data["done"][1:, 0].all()


def test_a_dead_agent_stays_dead_whatever_the_library_says_of_it_later():
    def denied(env, observations, rewards, terminated, truncated, infos):
        for told in (terminated, truncated):
            told.update({name: False for name in env.possible_agents if name not in told})

    data = careless(denied)

    assert data["truncated"][:, 0].squeeze(-1).tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda env, *_: env.agents.append("stranger"), r"'stranger'.*none of its possible_agents"),
        (lambda env, seen, paid, *_: paid.pop("agent_1"), r"'agent_1'.*rewards of its step hold"),
        (lambda env, seen, paid, ended, cut, _: cut.clear(), "truncations of its step hold only"),
        (lambda env, seen, *_: seen.pop("agent_1"), "observations of its step hold only"),
    ],
)
def test_a_step_that_does_not_tell_all_of_the_living_is_refused(change, message):
    with pytest.raises(OutputShapeError, match=message):
        careless(change)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (1, None, r"reward of 'agent_0' is None, but must be a number"),
        (1, "1.5", r"reward of 'agent_0' is '1.5', but must be a number"),
        (1, 10**400, r"reward of 'agent_0' is a whole number too large for float32"),
        (2, "no", r"terminated='no', of type str, but must return a bool"),
        (3, None, r"truncated=None, of type NoneType, but must return a bool"),
    ],
)
def test_rewards_and_flags_that_a_cast_would_change_are_refused(place, value, message):
    class Odd(Fading):
        def step(self, actions):
            parts = list(super().step(actions))
            parts[place] = dict.fromkeys(parts[place], value)
            return tuple(parts)

    with pytest.raises(EncodingError, match=message):
        PettingZooWrapper(Odd()).rollout(1)


def telling_in_turns(call, part, value):
    """Give a game of turns that says ``value`` of its first agent after each ``call``."""
    game = fading_in_turns()
    original = getattr(game, call)

    def said(*args, **kwargs):
        original(*args, **kwargs)
        if "agent_0" in game.agents:
            getattr(game, part)["agent_0"] = value

    setattr(game, call, said)
    return game


@pytest.mark.parametrize("call", ["reset", "step"])
@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("terminations", "no", r"terminated='no', of type str, but must return a bool"),
        ("truncations", None, r"truncated=None, of type NoneType, but must return a bool"),
        ("truncations", 0.5, r"truncated=0.5, of type float, but must return a bool"),
    ],
)
def test_flags_of_turns_that_are_none_are_refused(call, part, value, message):
    with pytest.raises(EncodingError, match=message):
        make_fading(telling_in_turns(call, part, value)).rollout(2)


@pytest.mark.parametrize("value", [np.bool_(False), 0, np.zeros((), bool)], ids=repr)
def test_flags_of_turns_may_be_those_of_any_library(value):
    data = make_fading(telling_in_turns("step", "truncations", value)).rollout(2)

    assert data.shape == (2,)
    assert not data["next", "agent_0", "truncated"].any()


def test_a_reward_that_is_no_number_and_a_reset_of_old_are_refused():
    class Old(Fading):
        def reset(self, seed=None, options=None):
            return super().reset(seed, options)[0]

    with pytest.raises(EncodingError, match=r"reward of 'agent_0'.*must be a number"):
        careless(lambda env, seen, paid, *_: paid.update(agent_0=np.ones(2)))
    with pytest.raises(OutputShapeError, match=r"must give \(observations, infos\)"):
        PettingZooWrapper(Old())


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "mpe2"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mpe2", None)

    with pytest.raises(MissingLibraryError, match=r"'\.\[pettingzoo\]'"):
        PettingZooEnv("mpe/simple_v3")
    assert PettingZooEnv.available_envs == []


def test_a_library_that_fails_at_import_is_told_with_its_reason(monkeypatch):
    def broken(name, *args):
        if name == "pettingzoo.classic.go_v5":
            raise ModuleNotFoundError("No module named 'pygame'", name="pygame")
        return original(name, *args)

    original = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", broken)

    with pytest.raises(BrokenLibraryError, match="No module named 'pygame'"):
        PettingZooEnv("classic/go_v5", parallel=False, use_mask=True)
