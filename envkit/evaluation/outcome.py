"""What an evaluation found: the episodes of one policy, of several in comparison, or of data that was recorded already.

Intervals are those of Student's t, widened where a studentised bootstrap reaches further, as it does on the side to
which returns are skewed. The bootstrap needs `_FEWEST` episodes. Source: Efron and Tibshirani, An Introduction to the
Bootstrap, 1993, section 12.5.

Conventions
    episodes  of an evaluation: row after row, each row's in the order in which they were played; of recorded data: in the
              order of `envkit.data.episodes`, as they are met, by row, then by time.
    interval  lower and upper end; both NaN where one episode says nothing about the spread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDictBase

from envkit.data.arguments import require_option, require_tensordict
from envkit.data.episodes import EpisodeNumbers, Piece
from envkit.data.paths import Key, as_path
from envkit.errors import ArgumentError, BatchSizeError, MissingKeyError
from envkit.specs.annotations import EnvData

_FEWEST = 8
_SAMPLES = 10_000
_AT_ONCE = 4_000_000  # numbers drawn at a time


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """The episodes that one policy played.

    Attributes:
        returns: sum of the rewards of each episode, float64, shape ``(episodes,)``.
        lengths: its steps, int64.
        terminated: bool; it ended by itself. The others were truncated, by the env or by ``max_steps``.
        is_cut: bool; ``max_steps`` ended it.
        last: entries of the last step of each, batch size ``(episodes,)``: observations that are tensors of a known
            size, reward and flags.
        rows: how many were played side by side.
        seed: of the env.
        changed_by: names of the transforms that changed the reward before it was summed, the innermost first.

    Example:
        >>> from envkit import GymEnv, evaluate
        >>> env = GymEnv("CartPole-v1", max_episode_steps=5)
        >>> found = evaluate(env, None, episodes=3, seed=0)
        >>> found.returns, found.mean
        (tensor([5., 5., 5.], dtype=torch.float64), 5.0)
        >>> found.terminated
        tensor([False, False, False])
        >>> env.close()
    """

    returns: torch.Tensor
    lengths: torch.Tensor
    terminated: torch.Tensor
    is_cut: torch.Tensor
    last: EnvData
    rows: int
    seed: int
    changed_by: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.returns)

    @property
    def mean(self) -> float:
        """Mean of the returns."""
        return float(self.returns.mean())

    @property
    def std(self) -> float:
        """Standard deviation of the returns, n - 1 in the denominator; NaN for one episode."""
        return float(self.returns.std()) if len(self) > 1 else math.nan

    @cached_property
    def ci95(self) -> tuple[float, float]:
        """Return the 95 % interval of the mean return: Student's, from 8 episodes on widened by a bootstrap over them."""
        return _interval_of_mean(self.returns)

    @property
    def cut(self) -> int:
        """How many episodes ``max_steps`` ended."""
        return int(self.is_cut.sum())

    def scalars(self) -> dict[str, float]:
        """Return the numbers of this evaluation by name, for a logger.

        ``return`` is the mean, ``return_low`` and ``return_high`` its interval of 95 %, ``length`` the mean length in steps,
        ``terminated`` a share, ``episodes`` and ``cut`` are counts.

        Example:
            >>> from envkit import GymEnv, evaluate
            >>> env = GymEnv("CartPole-v1", max_episode_steps=5)
            >>> numbers = evaluate(env, None, episodes=3, seed=0).scalars()
            >>> for name in ("return", "length", "terminated"):
            ...     print(f"eval/{name}", numbers[name])
            eval/return 5.0
            eval/length 5.0
            eval/terminated 0.0
            >>> env.close()
        """
        low, high = self.ci95
        return {
            "return": self.mean,
            "return_low": low,
            "return_high": high,
            "length": float(self.lengths.double().mean()),
            "terminated": float(self.terminated.double().mean()),
            "episodes": float(len(self)),
            "cut": float(self.cut),
        }

    def success(self, key: Key) -> float:
        """Share of episodes whose last step has an entry set, ``"success"`` or ``("info", "is_success")`` say.

        Args:
            key: the entry, of the last step; bool, or a number that is not 0.

        Raises:
            MissingKeyError: (a KeyError) no step has it.
            ArgumentError: it is no number, or several, for each episode.

        Example:
            >>> from envkit import GymEnv, evaluate
            >>> env = GymEnv("CartPole-v1", max_episode_steps=5)
            >>> evaluate(env, None, episodes=4, seed=0).success("truncated")
            1.0
            >>> env.close()
        """
        return float(self._succeeded(key).double().mean())

    def success_ci95(self, key: Key) -> tuple[float, float]:
        """Interval of 95 % for the share of successes, that of Wilson.

        It is right for few episodes, and where all or none succeed. Source: Wilson, Probable inference, the law of
        succession, and statistical inference, Journal of the American Statistical Association 22, 1927.

        Args:
            key: as for `success`.

        Raises:
            MissingKeyError, ArgumentError: as `success`.

        Example:
            >>> from envkit import GymEnv, evaluate
            >>> env = GymEnv("CartPole-v1", max_episode_steps=5)
            >>> found = evaluate(env, None, episodes=4, seed=0)
            >>> low, high = found.success_ci95("truncated")
            >>> round(low, 2), high
            (0.51, 1.0)
            >>> env.close()
        """
        count, share = len(self), self.success(key)
        z = 1.959963984540054  # the normal quantile of 97.5 %
        scale = 1 + z * z / count
        middle = (share + z * z / (2 * count)) / scale
        half = math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2) * z / scale
        return max(0.0, middle - half), min(1.0, middle + half)

    def _succeeded(self, key: Key) -> torch.Tensor:
        value: Any = self.last.get(key, None)
        if value is None:
            raise MissingKeyError(
                f"the last steps have no {key!r}; they have {sorted(map(str, self.last.keys(True, True)))}. "
                "Name one of these."
            )
        if value.numel() != len(self):
            raise ArgumentError(
                f"{key!r} has shape {tuple(value.shape[1:])}, but one number for each episode says whether it "
                "succeeded. Name such an entry, or count by hand in .last."
            )
        return value.reshape(len(self)) != 0

    def __repr__(self) -> str:
        parts = [f"{name} {value}" for name, value in self._summary().items()]
        return f"Evaluation({len(self)} episodes: {', '.join(parts)})"

    def _repr_html_(self) -> str:
        return _table([{"episodes": str(len(self)), **self._summary()}])

    def _summary(self) -> dict[str, str]:
        summary = {
            "return": f"{self.mean:.4g} ± {self.std:.2g}",
            "95% interval of the mean": _interval(self.ci95),
            "length": f"{float(self.lengths.double().mean()):.4g}",
            "terminated": f"{float(self.terminated.double().mean()):.0%}",
        }
        summary |= {"cut": str(self.cut)} if self.cut else {}
        return summary | (
            {"reward changed by": ", ".join(self.changed_by)} if self.changed_by else {}
        )


@dataclass(frozen=True)
class Difference:
    """How much more one policy gets than another, on the same seeds.

    Attributes:
        first, second: their names.
        mean: of the returns of the first less those of the second, episode by episode.
        ci95: its interval of 95 %, over pairs.

    Example:
        >>> from envkit import GymEnv, evaluate
        >>> env = GymEnv("CartPole-v1", max_episode_steps=5)
        >>> found = evaluate(env, {"first": None, "second": None}, episodes=3, seed=0)
        >>> found.difference("first", "second").mean
        0.0
        >>> env.close()
    """

    first: str
    second: str
    mean: float
    ci95: tuple[float, float]

    def __repr__(self) -> str:
        return (
            f"Difference({self.first} - {self.second}: return {self.mean:+.4g}, "
            f"95% interval {_interval(self.ci95)})"
        )


class Comparison(Mapping[str, Evaluation]):
    """The evaluations of several policies on the same seeds, by name; `evaluate` gives one for a dict of policies.

    Args:
        evaluations: an `Evaluation` for each name, all of one number of episodes.

    Example:
        >>> from envkit import GymEnv, evaluate
        >>> env = GymEnv("CartPole-v1", max_episode_steps=5)
        >>> found = evaluate(env, {"first": None, "second": None}, episodes=3, seed=0)
        >>> list(found), found["second"].mean
        (['first', 'second'], 5.0)
        >>> env.close()
    """

    def __init__(self, evaluations: Mapping[str, Evaluation]):
        self._evaluations = dict(evaluations)

    def __getitem__(self, name: str) -> Evaluation:
        return self._evaluations[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._evaluations)

    def __len__(self) -> int:
        return len(self._evaluations)

    def difference(self, first: str, second: str) -> Difference:
        """Return how much more ``first`` gets than ``second``, paired by row and by number of the episode.

        The first episode of a row begins alike for both. Later ones do where the env fixes the order of its episodes,
        and need not where they depend on when the one before ended; the interval is right in either case.

        Args:
            first, second: names of two policies.

        Raises:
            MissingKeyError: (a KeyError) a name is unknown.
            BatchSizeError: they have different numbers of episodes.

        Example:
            >>> from envkit import GymEnv, evaluate
            >>> env = GymEnv("CartPole-v1", max_episode_steps=5)
            >>> found = evaluate(env, {"one": None, "other": None}, episodes=3, seed=0)
            >>> found.difference("one", "other")
            Difference(one - other: return +0, 95% interval [0, 0])
            >>> env.close()
        """
        for name in (first, second):
            if name not in self:
                raise MissingKeyError(
                    f"there is no policy {name!r}; there are {sorted(self)}. Name one of these."
                )
        one, other = self[first].returns, self[second].returns
        if one.shape != other.shape:
            raise BatchSizeError(
                f"{first!r} has {len(one)} episodes and {second!r} {len(other)}, which cannot be paired. "
                "Evaluate both in one call."
            )
        paired = one - other
        return Difference(first, second, float(paired.mean()), _interval_of_mean(paired))

    def __repr__(self) -> str:
        return f"Comparison({', '.join(f'{name}: {found!r}' for name, found in self.items())})"

    def _repr_html_(self) -> str:
        rows = [
            {
                "policy": name,
                "episodes": str(len(evaluation)),
                **evaluation._summary(),
                "cut": str(evaluation.cut),
            }
            for name, evaluation in self.items()
        ]
        return _table(rows)


def _interval_of_mean(values: torch.Tensor) -> tuple[float, float]:
    """Return the interval of 95 % for the mean of some values; the same ones give the same interval."""
    count = len(values)
    if count < 2:
        return math.nan, math.nan
    mean, error = float(values.mean()), float(values.std()) / math.sqrt(count)
    low, high = -_student(count - 1), _student(count - 1)
    if count >= _FEWEST and error > 0:
        drawn = _studentised(values)
        low, high = min(low, drawn[0]), max(high, drawn[1])
    return mean - high * error, mean - low * error


def _student(freedom: int) -> float:
    """Return the number that a t of so many degrees of freedom exceeds in 2.5 % of all cases.

    Beyond the table it is expanded around the normal distribution. Source: Abramowitz and Stegun, 26.7.5.
    """
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))


_STUDENT = (12.7062, 4.3027, 3.1824, 2.7764)


def _studentised(values: torch.Tensor) -> tuple[float, float]:
    """Return the ends of the middle 95 % of t in samples drawn, with replacement, from values that are not all equal."""
    count = len(values)
    generator, at_once = torch.Generator().manual_seed(0), max(1, _AT_ONCE // count)
    statistics = []
    for begun in range(0, _SAMPLES, at_once):
        shape = (min(at_once, _SAMPLES - begun), count)
        sample = values[torch.randint(count, shape, generator=generator)]
        spread = sample.std(1)
        varied = spread > 1e-9 * values.std()  # rounding leaves a little of no spread
        away = (sample.mean(1) - values.mean())[varied]
        statistics.append(away / spread[varied] * math.sqrt(count))
    low, high = (
        torch.cat(statistics).quantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()
    )
    return low, high


def _interval(ends: tuple[float, float]) -> str:
    return f"[{ends[0]:.4g}, {ends[1]:.4g}]"


def _table(rows: list[dict[str, str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(row.get(name, str()))}</td>' for name in rows[0])}</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


Agents = Literal["sum", "mean"] | None


class EpisodeStats(NamedTuple):
    """Result of `episode_stats`; each of shape ``(episodes,)``.

    Attributes:
        returns: sum of the rewards that are in the data, float64.
        lengths: steps that are in the data, int64.
        ended: bool; False where the data ends before the episode does.
        terminated: bool; it ended by itself. An ended episode that is not terminated was truncated.

    Example:
        >>> from envkit import GymEnv, episode_stats
        >>> env = GymEnv("CartPole-v1", max_episode_steps=5)
        >>> returns, lengths, ended, terminated = episode_stats(env.rollout(5))
        >>> returns, ended, terminated
        (tensor([5.], dtype=torch.float64), tensor([True]), tensor([False]))
        >>> env.close()
    """

    returns: torch.Tensor
    lengths: torch.Tensor
    ended: torch.Tensor
    terminated: torch.Tensor

    def __repr__(self) -> str:
        """Count the episodes, with mean return and length of those that ended."""
        text = f"{len(self.returns)} episodes, {int(self.ended.sum())} ended"
        if self.ended.any():
            returns, lengths = self.returns[self.ended], self.lengths[self.ended].double()
            text += f": mean return {returns.mean():.6g}, mean length {lengths.mean():.6g}"
        return f"{type(self).__name__}({text})"


def episode_stats(
    data: TensorDictBase | Iterable[TensorDictBase],
    *,
    reward_key: Key = ("next", "reward"),
    agents: Agents = None,
) -> EpisodeStats:
    """Return returns and lengths of the episodes in a rollout, in a batch of a collector, or in several of them.

    An episode that goes on in the next batch is one episode: by the trajectory ids of a collector, or else in the same
    row, where that goes on from where it had ended (see `envkit.data.episodes.EpisodeNumbers`). Steps of an episode
    before the first batch or after the last are not known: ``ended`` says where the end is there. Rows
    that `rollout` freezes, and padding, are no steps.

    Args:
        data: batch size ``(*batch, T)``, or batches in the order in which they were made.
        reward_key: entry that is summed, below ``next`` where that has it, so ``"reward"`` is as ``("next", "reward")``.
        agents: ``"sum"`` or ``"mean"`` makes one number of those that a group of agents gets in a step.

    Raises:
        DataTypeError: (a TypeError) it is no TensorDict.
        MissingKeyError: (a KeyError) there is no such entry, or no ``("next", "done")``.
        ArgumentError: it has several numbers for a step and ``agents`` is None; or see `EpisodeNumbers.number`.

    Example:
        >>> from envkit import GymEnv, episode_stats
        >>> env = GymEnv("CartPole-v1", max_episode_steps=3)
        >>> data = env.rollout(8, break_when_any_done=False)
        >>> found = episode_stats(data)
        >>> found.lengths, found.ended
        (tensor([3, 3, 2]), tensor([ True,  True, False]))
        >>> env.close()
    """
    wanted = "a rollout, a batch of a collector, or a list of these"
    if not isinstance(data, Iterable):
        require_tensordict("data", data, wanted)
    checked_agents(agents)
    numbers, totals = EpisodeNumbers(), _Totals()
    for batch in [data] if isinstance(data, TensorDictBase) else data:
        require_tensordict("data", batch, wanted)
        steps = numbers.number(batch)
        totals.grow(numbers.count)
        inside = steps.episode >= 0
        number = steps.episode[inside]
        reward = _by_step(batch, reward_key, inside.shape, agents)[inside]
        totals.returns.index_add_(0, number, reward)
        totals.lengths.index_add_(0, number, torch.ones_like(number))
        totals.mark_ends(steps.pieces, _flags(batch, inside.shape))
    return EpisodeStats(totals.returns, totals.lengths, totals.ended, totals.terminated)


class _Totals:
    """Sums over episodes, whose number grows."""

    def __init__(self) -> None:
        self.returns = torch.zeros(0, dtype=torch.float64)
        self.lengths = torch.zeros(0, dtype=torch.int64)
        self.ended = torch.zeros(0, dtype=torch.bool)
        self.terminated = torch.zeros(0, dtype=torch.bool)

    def grow(self, count: int) -> None:
        for name, held in list(vars(self).items()):
            more = torch.zeros(count - len(held), dtype=held.dtype)
            setattr(self, name, torch.cat([held, more]))

    def mark_ends(self, pieces: list[Piece], terminated: torch.Tensor) -> None:
        last = [piece for piece in pieces if piece.ended]
        numbers = torch.tensor([piece.episode for piece in last], dtype=torch.int64)
        rows, steps = [piece.row for piece in last], [piece.stop - 1 for piece in last]
        self.ended[numbers] = True
        self.terminated[numbers] = terminated[rows, steps]


def checked_agents(agents: object) -> None:
    """Refuse another way to make one number of the rewards of agents than there is."""
    require_option("agents", agents, ("sum", "mean", None))


def one_number(rewards: torch.Tensor, agents: Agents) -> torch.Tensor:
    """Make one number of those of a step, shape ``(*steps, numbers)``, float64 on the CPU."""
    rewards = rewards.detach().double().cpu()
    return rewards.mean(-1) if agents == "mean" else rewards.sum(-1)


def _by_step(batch: TensorDictBase, key: Key, shape: torch.Size, agents: Agents) -> torch.Tensor:
    below: Any = batch.get(("next", *as_path(key)), None)
    value: Any = batch.get(key, None) if below is None else below
    if value is None:
        raise MissingKeyError(
            f"the data has no {key!r}; it has {sorted(map(str, batch.keys(True, True)))}. Name the reward: "
            "reward_key=..."
        )
    if agents is None and value.numel() != shape.numel():
        raise ArgumentError(
            f"{key!r} has {value.numel() // max(1, shape.numel())} numbers for each step, but a return is the sum of one. "
            "Name an entry that has one, reward_key=..., or make one number of those of several agents: agents='mean'."
        )
    return one_number(value.reshape(*shape, -1), agents)


def _flags(batch: TensorDictBase, shape: torch.Size) -> torch.Tensor:
    """Return where an episode has ended by itself; data that does not say why it ended has ended so."""
    following = batch.get("next")
    flags: Any = following.get("terminated", None)
    if flags is None:
        flags = following.get("done")
    return flags.reshape(*shape, -1).any(-1).cpu()
