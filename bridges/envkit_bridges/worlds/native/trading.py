"""A market of one share, bought and sold whole: the price is a geometric random walk, all of it is in the data.

Prices move by log-normal steps, one a trading day of 1/252 year; a position earns what its price gained,
each trade costs a share of the price.

Conventions
    window      days of prices that are shown, the last one today's.
    volatility  standard deviation, and drift mean, of the yearly logarithmic return.
    action      0 keeps everything as it is, 1 buys, 2 sells.
"""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from tensordict import TensorDict, TensorDictBase

from envkit.arrays.integers import as_int
from envkit.data.arguments import as_batch_size, as_number
from envkit.env.options import EnvOptionsWithoutSeed
from envkit.envs.seeded_env import SeededEnv, default_parameters, parameter_specs, parameters_in
from envkit.errors import InputError
from envkit.rules import DONE_LEAVES
from envkit.specs import Binary, Categorical, Composite, Unbounded
from envkit.specs.annotations import BatchSize, Device, EnvData, as_device, require_memory

WINDOW = 50
BUY, SELL = 1, 2
_DAY = 1 / 252  # of a year of trading
_OF_ROWS = "rows of unlike parameters: params['params', name] = torch.tensor([...])"


class FinancialRegimeEnv(SeededEnv):
    """Trade one share; truncated after ``max_steps`` days.

    Args:
        td_params: what `gen_params` gave, or a part of it: the parameters of rows that bring no
            own. Batch size ``()``.
        seed: of prices and random actions; without one they come from torch's global generator.
        device: where data is.
        window_size: days of prices that are shown; None takes that of ``td_params``, 50 by default.
        batch_size: what a reset without data produces; any other size is accepted too.
        **options: see `envkit.env.options.EnvOptions`.

    The reward of a step at price p, which becomes p': minus the cost of a trade, plus the gain of what is
    sold over its price when it was bought, plus a tenth of p'/p - 1 while the share is held. Buying what
    is held, and selling what is not, does nothing.

    Raises:
        BatchSizeError: (a RuntimeError) ``td_params`` has a batch size.
        MissingKeyError: (a KeyError) ``td_params`` has no ``params``.
        InputError: (a ValueError) at a reset: rows bring another ``window_size`` than the env has; at a step: the
            action is none.

    Example:
        >>> from envkit import FinancialRegimeEnv
        >>> env = FinancialRegimeEnv(seed=0, window_size=20)
        >>> data = env.rollout(10)
        >>> data["price_history"].shape, data["next", "reward"].shape
        (torch.Size([10, 20]), torch.Size([10, 1]))
    """

    def __init__(
        self,
        td_params: TensorDictBase | None = None,
        seed: int | None = None,
        device: Device | None = None,
        window_size: int | None = None,
        **options: Unpack[EnvOptionsWithoutSeed],
    ):
        super().__init__(device=device, **options)
        require_memory(self.device, type(self).__name__)
        defaults = default_parameters(td_params, self.gen_params(device=self.device))
        if window_size is not None:
            as_int("window_size", window_size, least=1, meaning="the days of prices to show")
            defaults["window_size"] = torch.full_like(defaults["window_size"], window_size)
        self._defaults, self.window_size = defaults, int(defaults["window_size"])
        place: dict[str, Any] = {"device": self.device}
        state = Composite(
            price_history=Unbounded((self.window_size,), dtype=torch.float32, **place),
            current_holdings=Binary(1, dtype=torch.bool, **place),
            entry_price=Unbounded((1,), dtype=torch.float32, **place),
            step_count=Unbounded((), dtype=torch.int64, **place),
            params=parameter_specs(defaults),
        )
        flag = Categorical(2, (1,), dtype=torch.bool, **place)
        self.observation_spec_unbatched = state
        self.state_spec_unbatched = state.clone()
        self.action_spec_unbatched = Categorical(3, (1,), dtype=torch.int64, **place)
        self.reward_spec_unbatched = Unbounded((1,), dtype=torch.float32, **place)
        self.full_done_spec_unbatched = Composite({name: flag.clone() for name in DONE_LEAVES})
        if seed is not None:
            self.set_seed(seed)

    @staticmethod
    def gen_params(
        window_size: int | None = None,
        initial_price: float = 100.0,
        volatility: float = 0.2,
        drift: float = 0.05,
        transaction_cost: float = 0.001,
        max_steps: int = 252,
        batch_size: BatchSize | None = None,
        device: Device | None = None,
    ) -> EnvData:
        """Return parameters under ``params``, one set for each element of a batch.

        Args:
            window_size: days of prices that are shown; None is 50.
            initial_price: before the first day that is shown.
            volatility, drift: see the module.
            transaction_cost: of each trade, as a share of the price.
            max_steps: days of an episode.
            batch_size: of the data; None is one set.
            device: where they are.

        Raises:
            ArgumentTypeError: (a TypeError) one is no single number, or a count no int.
            ArgumentError: (a ValueError) one is infinite or NaN, or a count is below 1.
            DeviceNameError: (a ValueError and a RuntimeError) torch has no such device.

        Example:
            >>> from envkit import FinancialRegimeEnv
            >>> params = FinancialRegimeEnv.gen_params(window_size=20, volatility=0.4)
            >>> FinancialRegimeEnv(params).reset()["price_history"].shape
            torch.Size([20])
        """
        days = WINDOW if window_size is None else window_size
        counts = {
            "window_size": as_int(
                "window_size", days, least=1, meaning="the days of prices to show"
            ),
            "max_steps": as_int("max_steps", max_steps, least=1, meaning="the days of an episode"),
        }
        numbers = {"initial_price": initial_price, "volatility": volatility, "drift": drift}
        numbers["transaction_cost"] = transaction_cost
        place = None if device is None else as_device(device)
        require_memory(place, "gen_params")
        tensors = {name: torch.tensor(value, dtype=torch.int64) for name, value in counts.items()}
        for name, value in numbers.items():
            number = as_number(name, value, meaning=f"one; {_OF_ROWS}")
            tensors[name] = torch.tensor(number, dtype=torch.float32)
        params = TensorDict({"params": TensorDict(tensors)}, device=place)
        return params.expand(as_batch_size(batch_size)).contiguous()

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        shape = self._shape_of(td)
        params = parameters_in(td, self._defaults, shape, self.device)
        _require_window(params["window_size"], self.window_size)
        volatility, initial = (
            params[name].unsqueeze(-1) for name in ("volatility", "initial_price")
        )
        daily = volatility * math.sqrt(_DAY) * self._normal(*shape, self.window_size)
        out = {
            "price_history": initial * daily.cumsum(-1).exp(),
            "current_holdings": torch.zeros((*shape, 1), dtype=torch.bool, device=self.device),
            "entry_price": torch.zeros((*shape, 1), dtype=torch.float32, device=self.device),
            "step_count": torch.zeros(shape, dtype=torch.int64, device=self.device),
            "params": params,
        }
        return TensorDict(out, shape, device=self.device)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        params: Any = td["params"]
        entry: Any = td["entry_price"]
        history: Any = td["price_history"]
        held = td["current_holdings"]
        action = self._action_inputs["action"].take(td.get("action", None), td.batch_size)
        price, following = history[..., -1:], self._next_price(history[..., -1:], params)
        buys, sells = ~held & (action == BUY), held & (action == SELL)

        fee = params["transaction_cost"].unsqueeze(-1) * price
        gain = (price - entry) / entry.where(sells, 1.0)
        holds = (held | buys) & ~sells
        reward = gain.where(sells, 0.0) - fee.where(buys | sells, 0.0)
        reward = reward + (0.1 * (following - price) / price).where(holds, 0.0)
        count = td["step_count"] + 1
        over = (count >= params["max_steps"]).unsqueeze(-1)
        out = {
            "price_history": torch.cat([history[..., 1:], following], -1),
            "current_holdings": holds,
            "entry_price": price.where(buys, entry).where(holds, 0.0),
            "step_count": count,
            "params": params.clone(),
            "reward": reward,
            "done": over,
            "truncated": over.clone(),
            "terminated": torch.zeros_like(over),
        }
        return TensorDict(out, td.batch_size, device=td.device)

    def _next_price(self, price: torch.Tensor, params: TensorDictBase) -> torch.Tensor:
        volatility, drift = (params[name].unsqueeze(-1) for name in ("volatility", "drift"))
        noise = self._normal(*price.shape)
        return price * (drift * _DAY + volatility * math.sqrt(_DAY) * noise).exp()


def _require_window(sizes: torch.Tensor, window: int) -> None:
    """Check that rows want as many days as all rows have."""
    if bool((sizes != window).any()):
        other = int(sizes.flatten()[(sizes != window).flatten().nonzero()[0, 0]])
        raise InputError(
            f"('params', 'window_size') is {other}, but the prices of this env go back {window} days in every row. "
            f"Build one of that length: FinancialRegimeEnv(window_size={other})."
        )
