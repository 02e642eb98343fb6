"""Our own envs beside TorchRL's of the same names: the same seeds, actions and data."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from envkit import FinancialRegimeEnv, PendulumEnv, TicTacToeEnv
from envkit.errors import InputError
from envkit_bridges.worlds.native.chess import san_moves
from tests.envs.model_based.models import latent, linear, moments
from tests.reference.compare import OURS, THEIRS, check_same, check_works_alike, differs

pytestmark = pytest.mark.filterwarnings(  # of TorchRL and what it calls
    "ignore::UserWarning:torch", "ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch"
)


def pendulum(lib, **options):
    return lib.PendulumEnv(seed=0, **options)


def test_pendulums_declare_and_draw_the_same():
    check_works_alike(lambda lib: pendulum(lib).observation_spec)
    check_works_alike(lambda lib: pendulum(lib).full_state_spec)
    check_works_alike(lambda lib: pendulum(lib).full_action_spec)
    check_works_alike(lambda lib: pendulum(lib).full_done_spec)
    check_works_alike(lambda lib: lib.PendulumEnv.gen_params(g=3.0, batch_size=[2]))
    check_works_alike(
        lambda lib: pendulum(lib).reset(lib.PendulumEnv.gen_params(batch_size=[2, 3]))
    )


def test_pendulums_swing_alike_to_the_bit():
    def swing(lib):
        actions = (torch.randn(40, 3, 1) * 3).unbind(0)
        start = lib.PendulumEnv.gen_params(g=9.0, batch_size=[3])
        return pendulum(lib).rollout(40, actions=actions, tensordict=start)

    check_works_alike(swing)


@pytest.mark.parametrize("set_state", [None, True, False])
@pytest.mark.parametrize("mask", [None, [True, False]], ids=["all", "part"])
def test_pendulums_begin_at_a_given_state_alike(set_state, mask):
    def begin(lib):
        env = pendulum(lib)
        td = env.reset(env.gen_params(batch_size=[2]))
        if mask is not None:
            td["_reset"] = torch.tensor(mask)[:, None]
        return env.reset(td, **({} if set_state is None else {"set_state": set_state}))

    check_works_alike(begin)


def test_parameters_of_the_constructor_are_the_defaults_here():
    differs(
        "native-envs",
        lambda lib: pendulum(lib, td_params=lib.PendulumEnv.gen_params(g=1.0)).reset()[
            "params", "g"
        ],
    )
    assert PendulumEnv(PendulumEnv.gen_params(g=1.0)).reset()["params", "g"] == 1
    check_same(lambda lib: lib.PendulumEnv(td_params=lib.PendulumEnv.gen_params(batch_size=[3])))


# -- games -----------------------------------------------------------------------------


@pytest.mark.parametrize("single_player", [False, True])
@pytest.mark.parametrize("kind", ["observation", "state", "action", "reward", "done"])
def test_games_of_tic_tac_toe_declare_the_same(single_player, kind):
    check_works_alike(
        lambda lib: getattr(lib.TicTacToeEnv(single_player=single_player), f"full_{kind}_spec")
    )


@pytest.mark.parametrize(
    "cells", [[4, 0, 2, 6, 3, 5, 1, 7, 8], [0, 3, 1, 4, 2], [0, 3, 1, 4, 8, 5]]
)
def test_games_of_tic_tac_toe_go_alike(cells):
    def play(lib):
        return lib.TicTacToeEnv().rollout(9, actions=[torch.tensor(cell) for cell in cells])

    check_works_alike(play)
    check_works_alike(lambda lib: lib.TicTacToeEnv().reset(_rows(2, 3)))
    check_same(lambda lib: lib.TicTacToeEnv().reset(_rows(2), set_state=True))


def test_a_cell_that_is_taken_is_refused_here():
    def play(lib):
        env = lib.TicTacToeEnv()
        return env.rollout(2, actions=[torch.tensor(4), torch.tensor(4)])

    differs("native-envs", play)
    with pytest.raises(InputError):
        play(OURS)
    assert TicTacToeEnv().rollout(9)["next", "done"][-1]


def chess(lib, **options):
    return lib.ChessEnv(include_fen=True, include_san=True, mask_actions=False, **options)


def test_moves_of_chess_have_the_same_numbers():
    theirs = chess(THEIRS).san_moves

    assert theirs[-1] == ""  # which is the name of no move
    assert list(san_moves()) == theirs[:-1]


@pytest.mark.parametrize("options", [{}, {"stateful": False}, {"include_pgn": True}], ids=str)
def test_games_of_chess_go_alike(options):
    env = chess(OURS, **options)
    env.set_seed(0)
    actions = env.rollout(60)["action"].unbind(0)

    check_works_alike(lambda lib: chess(lib, **options).rollout(70, actions=actions))
    check_works_alike(lambda lib: chess(lib, **options).reset())
    check_works_alike(lambda lib: _legal_after(lib, options, actions[0], uci=True))
    check_works_alike(lambda lib: _legal_after(lib, options, actions[0], uci=False))


def _legal_after(lib, options, action, *, uci):
    env = chess(lib, **options)
    return env.get_legal_moves(env.step(env.reset().set("action", action))["next"], uci=uci)


MATE, OVER = "2k5/R7/2K5/8/8/8/8/8 w - - 0 1", "R1k5/8/2K5/8/8/8/8/8 b - - 0 1"


@pytest.mark.parametrize("fen", [MATE, OVER, "nonsense"])
@pytest.mark.parametrize("set_state", [True, False, None])
@pytest.mark.parametrize("stateful", [True, False])
def test_games_of_chess_begin_alike(fen, set_state, stateful):
    how = {} if set_state is None else {"set_state": set_state}

    check_same(lambda lib: chess(lib, stateful=stateful).reset(TensorDict({"fen": fen}), **how))


def test_what_chess_refuses_is_refused_alike():
    check_same(lambda lib: lib.ChessEnv(stateful=False))
    check_same(lambda lib: lib.ChessEnv(include_hash_inv=True, include_fen=True))
    check_same(lambda lib: lib.ChessEnv(mask_actions=False).all_actions())
    check_same(lambda lib: chess(lib).rollout(1, actions=[torch.tensor(0)]))


def test_a_legal_move_by_another_name_is_refused_here():
    mate = torch.tensor(san_moves().index("e4#"))

    differs("native-envs", lambda lib: chess(lib).rollout(1, actions=[mate]))
    with pytest.raises(InputError, match="is 'e4#'"):
        chess(OURS).rollout(1, actions=[mate])


def test_legal_moves_are_counted_and_hashes_are_numbers_here():
    differs("native-envs", lambda lib: _first(lib).cardinality())
    differs(
        "native-envs",
        lambda lib: _first(lib, include_fen=True, include_hash=True).reset()["fen_hash"],
    )
    differs(
        "native-envs",
        lambda lib: _first(lib, include_legal_moves=True).reset()["legal_moves"].shape,
    )
    assert _first(OURS).cardinality() == 20


def _first(lib, **options):
    env = lib.ChessEnv(**options)
    env.reset()
    return env


# -- text ------------------------------------------------------------------------------


class Letters:
    vocab_size = 128

    def __call__(self, text):
        if isinstance(text, str):
            return torch.tensor([ord(letter) for letter in text])
        return torch.tensor([[ord(letter) for letter in line] for line in text])

    def decode(self, tokens):
        return "".join(map(chr, tokens.tolist()))

    def batch_decode(self, rows):
        return [self.decode(row) for row in rows]


@pytest.mark.parametrize("options", [{}, {"text_output": False}, {"text_key": "said"}], ids=str)
@pytest.mark.parametrize("text", ["hello", ["hello", "world"]], ids=str)
def test_texts_are_written_alike_but_for_the_hash(text, options):
    def write(lib):
        env = lib.LLMHashingEnv(tokenizer=Letters(), **options)
        root = env.make_tensordict(text)
        action = torch.full((*root.batch_size, 1), ord("s"))
        return env.step(root.set("action", action)).exclude("hashing", ("next", "hashing"))

    check_works_alike(write)
    check_works_alike(lambda lib: lib.LLMHashingEnv(9, text_output=False).full_observation_spec)
    check_works_alike(lambda lib: lib.LLMHashingEnv(9, text_output=False).full_action_spec)
    check_works_alike(lambda lib: lib.LLMHashingEnv(9).full_reward_spec)


def test_what_the_text_env_refuses_is_refused_alike():
    check_same(lambda lib: lib.LLMHashingEnv())
    check_same(lambda lib: lib.LLMHashingEnv(9).reset(_rows(2)))


# -- a market --------------------------------------------------------------------------


def market(lib, **options):
    return lib.FinancialRegimeEnv(seed=0, **options)


@pytest.mark.parametrize("kind", ["observation", "state", "action", "reward", "done"])
def test_markets_declare_the_same(kind):
    check_works_alike(lambda lib: getattr(market(lib), f"full_{kind}_spec"))
    check_works_alike(lambda lib: lib.FinancialRegimeEnv.gen_params(max_steps=3, batch_size=[2]))


def test_markets_move_and_pay_alike():
    actions = torch.randint(3, (40, 1), generator=torch.Generator().manual_seed(0)).unbind(0)
    rounded = ("price_history", "entry_price", "reward")

    def trade(lib):
        return market(lib).rollout(40, actions=actions)

    check_works_alike(lambda lib: trade(lib)["next"].exclude(*rounded))
    for name in rounded:
        torch.testing.assert_close(trade(OURS)["next", name], trade(THEIRS)["next", name])


def test_a_window_and_a_batch_of_markets_are_what_was_asked_for():
    differs("native-envs", lambda lib: market(lib, window_size=7).reset()["price_history"].shape)
    differs(
        "native-envs",
        lambda lib: market(lib).reset(lib.FinancialRegimeEnv.gen_params(batch_size=[2])),
    )
    assert FinancialRegimeEnv(window_size=7).reset()["price_history"].shape == (7,)


def _rows(*batch_size):
    return TensorDict(batch_size=batch_size)


# -- models ----------------------------------------------------------------------------


def hidden(lib, **options):
    class Hidden(lib.ModelBasedEnvBase):
        def __init__(self):
            super().__init__(linear(), **options)
            self.observation_spec = lib.Composite(hidden=lib.Unbounded((4,)))
            self.state_spec = lib.Composite(hidden=lib.Unbounded((4,)))
            self.action_spec = lib.Unbounded((1,))
            self.reward_spec = lib.Unbounded((1,))

        def _reset(self, tensordict=None, **kwargs):
            shape = self.batch_size if tensordict is None else tensordict.batch_size
            return TensorDict({"hidden": torch.ones(*shape, 4)}, shape, device=self.device)

    return Hidden()


def test_models_step_alike():
    actions = torch.linspace(-1, 1, 5)[:, None].unbind(0)

    check_works_alike(lambda lib: hidden(lib).rollout(5, actions=actions))
    check_works_alike(lambda lib: hidden(lib).rollout(2, tensordict=_rows(3).to("cpu")).shape)
    check_works_alike(lambda lib: hidden(lib).device)
    check_works_alike(lambda lib: hidden(lib).rollout(1)["next", "reward"].requires_grad)
    check_same(lambda lib: lib.ModelBasedEnvBase(linear()))


@pytest.mark.parametrize("kind", ["observation", "state", "action", "reward", "done"])
def test_models_take_specs_over_alike(kind):
    def taken(lib):
        env = hidden(lib)
        env.set_specs_from_env(pendulum(lib))
        return sorted(map(str, getattr(env, f"full_{kind}_spec").keys(True, True)))

    check_works_alike(taken)


def dreamer(lib, **options):
    model, decoder = latent()
    latents = {"state": lib.Unbounded((3,)), "belief": lib.Unbounded((2,))}
    base = lib.TransformedEnv(
        pendulum(lib), lib.TensorDictPrimer(latents, random=False, default_value=0.0)
    )
    env = lib.DreamerEnv(model, (3,), (2,), obs_decoder=decoder if options.get("decodes") else None)
    env.set_specs_from_env(base)
    return env


def test_latents_are_imagined_and_decoded_alike():
    def begin(lib):
        start = TensorDict(
            {"state": torch.ones(5, 3), "belief": torch.ones(5, 2)}, [5], device="cpu"
        )
        return dreamer(lib, decodes=True).reset(start)

    def stepped(lib):
        env = dreamer(lib, decodes=True)
        td = env.step(begin(lib).set("action", torch.ones(5, 1)))
        return td, env.any_done(td), env.maybe_reset(td) is td

    check_works_alike(begin)
    check_works_alike(stepped)
    check_works_alike(lambda lib: dreamer(lib, decodes=True).decode_obs(begin(lib)))
    check_works_alike(
        lambda lib: dreamer(lib, decodes=True).decode_obs(
            begin(lib).set("action", torch.ones(5, 1)), compute_latents=True
        )
    )
    check_same(lambda lib: dreamer(lib).decode_obs(begin(lib)))


def imagined(lib, **options):
    return lib.ImaginedEnv(moments(), lib.GymEnv("Pendulum-v1"), **options)


def test_beliefs_are_imagined_alike():
    belief = {"mean": torch.ones(1, 3), "var": torch.zeros(1, 3, 3)}
    action = torch.zeros(1)

    def stepped(lib):
        env = imagined(lib)
        root = env.reset(TensorDict({"observation": belief}, [1]))
        return env.step(root.set("action", action))["next"].exclude("reward")

    check_works_alike(stepped)
    check_works_alike(lambda lib: imagined(lib).full_observation_spec)
    check_works_alike(lambda lib: imagined(lib, batch_size=[2]).batch_size)
    check_works_alike(lambda lib: imagined(lib).reset().shape)
    check_same(lambda lib: lib.ImaginedEnv(moments(), lib.PendulumEnv()))


def test_beliefs_begin_at_an_observation_and_have_actions_of_the_batch_here():
    start = TensorDict({"observation": torch.ones(1, 3)}, [1])

    differs("native-envs", lambda lib: imagined(lib).reset(start.clone())["observation", "mean"])
    differs("native-envs", lambda lib: imagined(lib).full_action_spec)
