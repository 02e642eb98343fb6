"""Calls as a user makes them, each played by an env and by the model of it, and compared.

`Player` holds one env and its `Model` side by side. A command is a small object that calls both; after
each of them root and next of every transition are the same, or the first difference is told.

Conventions
    row     number of a game, over all batch axes.
    mask    tuple of bools, one for each row; None selects all without saying so.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from envkit.env.base import EnvBase
from tests.zoo.jax_trail import KeyedTrail, following, keys_in
from tests.zoo.kinds import Follow, Kind, bad_action, decoded, dtypes_of, encoded
from tests.zoo.model import Model, Moment, Row, Stop, Transition
from tests.zoo.trail import Trail, next_choice

STOPS: dict[Stop, dict[str, bool]] = {
    "never": {"break_when_any_done": False},
    "any": {"break_when_any_done": True},
    "all": {"break_when_all_done": True},
}

Mask = tuple[bool, ...] | None
Beginning = tuple[Any, ...]


class Player:
    """An env of some kind, its model, and the root at which both are.

    ``begun`` remembers for all programs of one env what each seed began with.
    """

    def __init__(self, kind: Kind, env: EnvBase, begun: dict[int, list[Beginning]]):
        self.kind, self.env, self.begun = kind, env, begun
        self.model = Model([])
        self.saved: tuple[TensorDictBase, list[Row]] | None = None

    def seed(self, seed: int) -> None:
        """Call `set_seed`, and `reset` from nothing."""
        self.env.set_seed(seed)
        self._games = [None if own is None else _seeded(own) for own in self.kind.row_seeds(seed)]
        self._since_seed: list[Beginning] = []
        self.reset()
        first = self.begun.setdefault(seed, self._since_seed)
        assert first == self._since_seed, "a seed began otherwise before"

    def reset(self) -> None:
        root = self.env.reset()
        if self.kind.around.banked:
            root["reward"] = torch.zeros(*root.batch_size, 1)
        self.begin(root)
        self.arrive(root)

    def begin(self, root: TensorDictBase) -> None:
        """Let the model begin where the env did in a reset from nothing, which gave ``root``.

        Rows that carry in the data what they begin from have it from there; no two begin from the same.
        """
        learned = _beginnings(self.kind, root)
        self._since_seed = self._since_seed + [beginning for beginning in learned if beginning]
        assert len(set(self._since_seed)) == len(self._since_seed), "two rows begin alike"
        rows = []
        for game, beginning in zip(self._games, learned, strict=True):
            if game is None:
                game = _begun(beginning)
            else:
                game.reset()
            rows.append(Row(game, self.kind.around))
        self.model = Model(rows)

    def arrive(self, root: TensorDictBase) -> None:
        """Compare a root with the model's, and go on from it."""
        _require_same("root", root, self.model.root)
        self.root = root

    def mask(self, mask: Sequence[bool]) -> torch.Tensor:
        return torch.tensor(mask).reshape(self.env.batch_size)

    def see(self, td: TensorDictBase, transitions: list[Transition]) -> None:
        """Compare the transition of every row."""
        _require_same("root", td.exclude("next", "action"), [row.root for row in transitions])
        _require_same("next", td["next"], [row.next for row in transitions])
        for choice, row in zip(
            decoded(self.env.action_spec, td["action"]), transitions, strict=True
        ):
            assert row.choice in (None, choice), "another action is recorded than was taken"


# ----------------------------------------------------------------------------------------- commands


@dataclass(frozen=True)
class Seed:
    """Seed, and begin from nothing; ``close`` first."""

    seed: int
    close: bool = False

    def __call__(self, player: Player) -> None:
        if self.close:
            player.env.close()
        player.seed(self.seed)


@dataclass(frozen=True)
class Reset:
    """Reset some rows, or all: from nothing, or from what the data says.

    ``alone``: the mask comes without the data, which the env knows.
    """

    mask: Mask = None
    passes_root: bool = True
    alone: bool = False

    def __call__(self, player: Player) -> None:
        if not self.passes_root and not player.kind.around.banked:
            player.reset()
            return
        td = player.root
        if self.alone and self.mask is not None:
            td = TensorDict(batch_size=td.batch_size)
        if self.mask is not None:
            td.set("_reset", player.mask(self.mask)[..., None])
        with self._told_of_ends(player.model):
            root = player.env.reset(td)
        assert root is td or self.alone
        player.model.reset(self.mask)
        player.arrive(root)

    def _told_of_ends(self, model: Model) -> AbstractContextManager:
        """Expect to be told that rows are done which the mask leaves out and no data speaks of."""
        if self.mask is None or not self.alone:
            return nullcontext()
        ended = any(done and not own for done, own in zip(model.done, self.mask, strict=True))
        return pytest.warns(UserWarning, match="Pass the current data") if ended else nullcontext()


@dataclass(frozen=True)
class Step:
    """Step the rows of a mask that are not done; ``advance``: and reset those that then are.

    ``form`` numbers the types in which actions may come.
    """

    choices: tuple[int, ...]
    mask: Mask = None
    advance: bool = False
    form: int = 0

    def __call__(self, player: Player) -> None:
        env, model, spec = player.env, player.model, player.env.action_spec
        mask = self.mask
        if any(model.done):
            wanted = mask or [True] * len(model.done)
            mask = [wants and not done for wants, done in zip(wanted, model.done, strict=True)]
        dtypes = dtypes_of(spec)
        dtype = dtypes[self.form % len(dtypes)]
        td = player.root.set("action", encoded(spec, self.choices, dtype))
        if mask is not None:
            td.set("_step", player.mask(mask))
        if self.advance:
            data, root = env.step_and_maybe_reset(td)
            transitions = model.advance(self.choices, mask)
        else:
            data = env.step(td)
            root = env.step_mdp(data)
            transitions = model.step(self.choices, mask)
        is_dense = not isinstance(td, LazyStackedTensorDict)
        assert data is td or (is_dense and getattr(env, "share_individual_td", False))
        player.see(data, transitions)
        player.arrive(root)


@dataclass(frozen=True)
class Refused:
    """Step with an action of one row that no simulator can take: refused, and nothing has moved."""

    row: int
    advance: bool

    def __call__(self, player: Player) -> None:
        env = player.env
        td = player.root.copy().set(
            "action", bad_action(env.action_spec, player.kind.rows, self.row)
        )
        with pytest.raises(ValueError, match="action"):
            (env.step_and_maybe_reset if self.advance else env.step)(td)


@dataclass(frozen=True)
class MaybeReset:
    def __call__(self, player: Player) -> None:
        root = player.env.maybe_reset(player.root)
        player.model.reset(player.model.done)
        player.arrive(root)


@dataclass(frozen=True)
class Rollout:
    """Take many steps.

    Args:
        steps: most of them.
        stop: the rule.
        start: "nothing": after a reset from nothing; "data": after a reset of all, from the data;
            "root": where the player is.
        policy: "follow" acts on data, "compiled" is in JAX.
        lazy: give a lazy stack.
    """

    steps: int
    stop: Stop = "never"
    start: Literal["nothing", "data", "root"] = "root"
    policy: Literal["random", "follow", "compiled"] = "follow"
    lazy: bool = False

    def __call__(self, player: Player) -> None:
        env, kind = player.env, player.kind
        start = "data" if self.start == "nothing" and kind.around.banked else self.start
        options: dict[str, Any] = {**STOPS[self.stop], "return_contiguous": not self.lazy}
        if start != "nothing":
            options |= {"tensordict": player.root, "auto_reset": start == "data"}
        policy = {"random": None, "follow": Follow(env), "compiled": following}[self.policy]
        before = player.root.clone()
        data = env.rollout(self.steps, policy, **options)
        assert (before == player.root).all(), "the data to start from was written to"
        if start == "nothing":
            player.begin(data[..., 0])
        elif start == "data":
            player.model.reset()
        self.compare(player, data)
        player.arrive(env.step_mdp(data[..., -1]))

    def compare(self, player: Player, data: TensorDictBase) -> None:
        parts, spec, kind = data.unbind(-1), player.env.action_spec, player.kind
        taken = [decoded(spec, part["action"]) for part in parts]

        def choose(step: int, row: int) -> int:
            if self.policy != "random":
                _, steps, trail = player.model.root[row]["observation"]
                return int(next_choice(steps, trail))
            assert step < len(taken), "the rollout is too short"
            assert kind.own_choice in (None, taken[step][row]), "rand_action was passed by"
            return taken[step][row]

        played = player.model.rollout(self.steps, choose, self.stop)
        assert len(parts) == len(played), "steps of the rollout"
        for part, transitions in zip(parts, played, strict=True):
            player.see(part, transitions)
        if not kind.around.banked:
            sums = data["next", "reward"].sum(-2).flatten().tolist()
            rows = zip(*played, strict=True)
            assert sums == [sum(one.next["reward"][0] for one in row) for row in rows]


@dataclass(frozen=True)
class Unroll:
    """Take ``steps`` steps in one program."""

    steps: int
    policy: Literal["random", "compiled"] = "compiled"

    def __call__(self, player: Player) -> None:
        policy = {"random": None, "compiled": following}[self.policy]
        data, root = player.env.unroll(player.root, self.steps, policy)
        Rollout(self.steps, policy=self.policy).compare(player, data)
        player.arrive(root)


@dataclass(frozen=True)
class Save:
    """Keep a copy of the root, in memory or on disk."""

    on_disk: bool = False

    def __call__(self, player: Player) -> None:
        root = player.root.clone()
        if self.on_disk:
            with TemporaryDirectory() as folder:
                root.memmap(folder)
                root = TensorDict.load_memmap(folder).clone()
        player.saved = root, player.model.saved(range(player.kind.rows))


@dataclass(frozen=True)
class Load:
    """Go on from what was saved, its rows in any order and number of copies."""

    rows: tuple[int, ...]

    def __call__(self, player: Player) -> None:
        if player.saved is None:
            return
        td, rows = player.saved
        index = torch.tensor(self.rows)
        root = td.reshape(-1)[index].reshape(td.batch_size)
        player.model.load([rows[row] for row in self.rows])
        player.arrive(root)


# ----------------------------------------------------------------------------------------- comparing


def _require_same(where: str, td: TensorDictBase, expected: list[Moment]) -> None:
    """Compare the entries, and the value of each in every row; state shows in what follows from it."""
    names = [key for key in td.keys(True, True) if key[0] != "state" and key != "game"]
    assert sorted(names) == sorted(expected[0]), f"the entries of {where}"
    columns = {name: td[name].reshape(len(expected), -1).tolist() for name in names}
    rows = [{name: columns[name][row] for name in names} for row in range(len(expected))]
    for number, (row, wanted) in enumerate(zip(rows, expected, strict=True)):
        assert row == wanted, f"{where} of row {number} is\n  {row}, but should be\n  {wanted}"


def _beginnings(kind: Kind, root: TensorDictBase) -> list[Beginning]:
    """Read from the data what the episode of each row began from; () where the env keeps it."""
    starts = root["observation"].reshape(kind.rows, 3)[:, 0].long().tolist()
    root = root.get(
        ("state", "member0"), root
    )  # where a mixed env keeps what its first member carries
    rows: dict[str, list] = {"seeded": [()] * kind.rows}
    if "keyed" in kind.worlds:
        keys = keys_in(root["state"]).reshape(kind.rows, 2).tolist()
        rows["keyed"] = [(*key, start) for key, start in zip(keys, starts, strict=True)]
    if "carried" in kind.worlds:
        rows["carried"] = [tuple(own) for own in root["game"].reshape(kind.rows, 5)[:, :2].tolist()]
    return [rows[world][row] for row, world in enumerate(kind.worlds)]


def _begun(beginning: Beginning) -> Trail:
    """Give the game of a row that has just begun so."""
    if len(beginning) == 3:
        *key, start = beginning
        return KeyedTrail(tuple(key), start)
    seed, episodes = beginning
    game = Trail(seed, episodes - 1)
    game.reset()
    return game


def _seeded(seed: int) -> Trail:
    """Give a game after `set_seed`, which begins an episode, as in gymnasium."""
    game = Trail(seed)
    game.reset()
    return game
