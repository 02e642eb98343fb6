"""Where sub-envs live: in a worker process or in this one.

`EnvHost` builds the envs of its rows, binds them to the buffers, and carries out what a batched
env asks: commands on rows (the hot path) and calls (seeds, attributes, whole TensorDicts). It
knows neither pipes nor processes.

Conventions
    command  STEP, RESET (from nothing), RESTART (from the states that lie in the rows) or ADVANCE (a
             step, then a reset where something is done).
    rows     global row numbers, all of them this host's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from operator import attrgetter
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDictBase

from envkit.batched.bound_envs import TensorDictRows, bind_rows, row_core
from envkit.batched.caller_settings import holding
from envkit.batched.exchange.memory import SLOT, BufferPlan
from envkit.batched.metadata import EnvLeaves, EnvMetaData
from envkit.batched.shared_simulators import SimulatorOwners
from envkit.data.forms import require_form
from envkit.data.paths import Key, Path, as_key, leaf_paths
from envkit.data.plain import from_plain, plain
from envkit.env.base import EnvBase
from envkit.env.own_state import LOADED, loading
from envkit.env.wrapper_hints import fix_of_result
from envkit.errors import WorkerError
from envkit.specs.consolidation import contains_lazy_spec
from envkit.transport import RowsFailedError
from envkit.transport.by_value import pickle_with

STEP, RESET, ADVANCE, RESTART = 1, 2, 3, 4
COMMAND_NAMES: dict[int | str, str] = {
    STEP: "step",
    RESET: "reset",
    RESTART: "reset",
    ADVANCE: "step_and_maybe_reset",
    "reset_rows": "reset",
    "states": "state_dict",
    "load_states": "load_state_dict",
    "apply": "a call of single envs",
}
"""Name of the user's call where a command or call fails; other calls have the name of their method."""

BUILDING = ("rebuild",)
"""Methods that build envs, and may take as long as the start."""

Maker = tuple[Callable[..., EnvBase], dict[str, Any]]
Inputs = dict[int, tuple[TensorDictBase | None, dict[str, Any]]]  # data and keywords by row


@dataclass(eq=False)
class HostFactory:
    """Make the host of some rows; travels to a worker process by value.

    Args:
        makers: create function and keywords of each row.
        described: rows whose metadata is wanted after the start.
        num_threads: torch threads in the process that hosts; None leaves them alone.
        without_gradients: compute none in that process from now on.
        own_random_numbers: seed torch in that process by chance. Forks of one server would
            otherwise all draw the same numbers.
        choices: hold while envs are built, see `caller_settings`.
    """

    makers: list[Maker]
    described: frozenset[int]
    _: KW_ONLY
    num_threads: int | None = None
    without_gradients: bool = False
    own_random_numbers: bool = False
    choices: Mapping[str, Any] = field(default_factory=dict)
    owners: SimulatorOwners = field(default_factory=SimulatorOwners, init=False)

    def __call__(self, rows: range) -> EnvHost:
        if self.num_threads is not None:
            torch.set_num_threads(self.num_threads)
        if self.without_gradients:
            torch.set_grad_enabled(False)
        if self.own_random_numbers:
            torch.seed()
        makers = [self.makers[row] for row in rows]
        own = self.own_random_numbers
        return EnvHost(makers, rows, self.described, self.choices, self.owners, has_own_numbers=own)


class EnvHost:
    """The envs of some rows; see `envkit.transport.Host`."""

    def __init__(
        self,
        makers: list[Maker],
        rows: range,
        described: frozenset[int],
        choices: Mapping[str, Any],
        owners: SimulatorOwners,
        *,
        has_own_numbers: bool = False,
    ):
        self.first = rows.start
        self._has_own_numbers = has_own_numbers
        self.described = described
        self._makers = makers
        self._choices = choices
        self._owners = owners
        self._rows: Any = None
        self._states: tuple[Path, ...] = ()
        self._forms: dict[int, OutputForms] = {}
        self.envs: list[EnvBase] = []
        try:
            for row in rows:
                with _blaming(row):
                    self.envs.append(self._make(row))
        except BaseException:
            with suppress(Exception):  # the first error is the one to report
                self.close()
            raise

    def _make(self, row: int) -> EnvBase:
        make, kwargs = self._makers[row - self.first]
        with holding(self._choices):
            env = make(**kwargs)
        if not isinstance(env, EnvBase):
            raise WorkerError(
                f"the create function of env {row} returned {type(env).__name__}, but must "
                f"return an envkit environment. {fix_of_result(env)}"
            )
        self._owners.require("env", row, env)
        return env

    def describe(self) -> dict[int, EnvMetaData]:
        """Return the metadata of the envs that are to be described, by row."""
        return {
            row: EnvMetaData.metadata_from_env(env)
            for row, env in enumerate(self.envs, self.first)
            if row in self.described
        }

    # ---------------------------------------------------------------------------------- hot path

    def bind(self, arrays: dict[str, np.ndarray], rows: range) -> None:
        """Take the shared rows, which every env must fit."""
        slot, plans = arrays[SLOT.name], []
        for row, env in enumerate(self.envs, self.first):
            with _blaming(row):
                plans.append(BufferPlan.of(EnvLeaves(env), len(slot)).fitted(arrays))
        plan = plans[-1]
        self._states = tuple(EnvLeaves(self.envs[0]).paths("state"))
        regions = {region: plan.tensors(arrays, region) for region in plan.regions}
        self._rows = bind_rows(self.envs, rows, regions, slot)

    def run(self, command: int, rows: list[int]) -> None:
        """Carry out a command on rows, in order; see `envkit.transport.Host.run` for errors."""
        if command in (RESET, RESTART):
            given = self._states if command == RESTART else ()
            for row in rows:
                self._rows.reset(row, given)
        else:
            self._rows.step(rows, advance=command == ADVANCE)

    # ------------------------------------------------------------------------------------- calls

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Carry out one of the methods below by name."""
        return getattr(self, f"call_{method}")(*args, **kwargs)

    def call_reset_rows(self, inputs: dict[int, tuple[tuple[Path, ...], dict[str, Any]]]) -> None:
        """Reset bound rows, each from inputs of its row and with its own keywords."""
        self._for_each(inputs, lambda row, one: self._rows.reset(row, one[0], **one[1]))

    def call_reset(self, checked: bool, inputs: Inputs) -> dict[int, Any]:
        """Reset some envs with whole TensorDicts; see `_with_tensordicts`."""
        return self._with_tensordicts("reset", checked, inputs)

    def call_step(self, checked: bool, inputs: Inputs) -> dict[int, Any]:
        """Step some envs with whole TensorDicts; see `_with_tensordicts`."""
        return self._with_tensordicts("step", checked, inputs)

    def call_step_and_maybe_reset(self, checked: bool, inputs: Inputs) -> dict[int, Any]:
        """Step some envs with whole TensorDicts, and reset them; see `_with_tensordicts`."""
        return self._with_tensordicts("step_and_maybe_reset", checked, inputs)

    def call_rand_action(self, inputs: dict[int, TensorDictBase]) -> dict[int, Any]:
        """Draw actions in envs for the data of their rows, and return them by row."""

        def draw(row: int, td: TensorDictBase) -> TensorDictBase:
            env = self.envs[row - self.first]
            return env.rand_action(td).select(*env.action_keys)

        return self._for_each(inputs, draw)

    def _with_tensordicts(self, method: str, checked: bool, inputs: Inputs) -> dict[int, Any]:
        """Call a method of some envs, and give what each of them returns.

        With ``checked``, make sure that what comes out has the form of the specs.
        """

        def call(row: int, arguments: tuple[TensorDictBase | None, dict[str, Any]]) -> Any:
            td, kwargs = arguments
            returned = getattr(self.envs[row - self.first], method)(td, **kwargs)
            if checked:
                self._check(row, method, returned)
            return returned

        return self._for_each(inputs, call)

    def _check(self, row: int, method: str, returned: Any) -> None:
        forms = self._forms.get(row)
        if forms is None:
            forms = self._forms[row] = OutputForms(self.envs[row - self.first])
        if method == "reset":
            forms.check_root(returned)
        elif method == "step":
            forms.check_outcome(returned.get("next"))
        else:
            forms.check_outcome(returned[0].get("next"))
            forms.check_root(returned[1])

    def call_skip_rows(self, skipped: dict[int, tuple[bool, bool]]) -> None:
        """Skip a step in rows that their masks leave out.

        Args:
            skipped: by row, whether a root is to follow, and whether its episode has ended, so that a new one begins.
        """

        def skip(row: int, how: tuple[bool, bool]) -> None:
            advance, has_ended = how
            assert self._rows is not None
            if isinstance(self._rows, TensorDictRows):
                self._rows.step([row], advance=advance)
            elif advance and has_ended:
                self._rows.reset(row)

        self._for_each(skipped, skip)

    def call_set_seed(self, seeds: dict[int, int]) -> None:
        """Seed envs by row."""
        self._for_each(seeds, lambda row, seed: self.envs[row - self.first].set_seed(seed))

    def call_rebuild(self, rows: list[int]) -> None:
        """Replace envs that have failed by new ones."""
        self._for_each(dict.fromkeys(rows), self._rebuild)

    def _rebuild(self, row: int, _: None) -> None:
        with suppress(Exception):  # it has failed already and is not needed any more
            self.envs[row - self.first].close(raise_if_closed=False)
        env = self.envs[row - self.first] = self._make(row)
        if self._rows is not None:
            self._rows.replace(row, env)

    def _for_each(self, values: dict[int, Any], work: Callable[[int, Any], Any]) -> dict[int, Any]:
        """Work on rows one by one, all of them, and give the results by row.

        Raises:
            RowsFailedError: some rows raised.
        """
        results, errors = {}, {}
        for row, value in values.items():
            try:
                results[row] = work(row, value)
            except Exception as error:
                errors[row] = error
        if errors:
            raise RowsFailedError(errors, results)
        return results

    def call_has_attribute(self, path: tuple[str, ...]) -> bool:
        """Check whether every env has an attribute, looked up through its simulator."""
        try:
            self.call_get_attribute(path)
        except AttributeError:
            return False
        return True

    def call_get_attribute(self, path: tuple[str, ...]) -> list[Any]:
        """Read an attribute (of an attribute, and so on) of every env."""
        return [attrgetter(".".join(path))(env) for env in self.envs]

    def call_call_method(
        self, path: tuple[str, ...], args: tuple, kwargs: dict[str, Any]
    ) -> list[Any]:
        """Call a method of every env."""
        return [method(*args, **kwargs) for method in self.call_get_attribute(path)]

    def call_apply(self, asked: dict[int, Callable[[EnvBase], Any]]) -> dict[int, Any]:
        """Call a function with each of some envs."""
        return self._for_each(asked, lambda row, ask: ask(self.envs[row - self.first]))

    def call_change(self, asked: dict[int, Callable[[EnvBase], Any]]) -> dict[int, Any]:
        """Call a function with each of some envs that may change what takes their steps."""
        answers = self.call_apply(asked)
        for row in asked:
            self._rebind(row)
        return answers

    def call_move(self, device: torch.device) -> None:
        """Move every env to a device."""
        for env in self.envs:
            env.to(device)
        if isinstance(self._rows, TensorDictRows):
            self._rows.to(device)

    def _rebind(self, row: int) -> None:
        """Bind the row again after the object that takes the steps of an env has changed; rows of TensorDicts ask it each time."""
        if self._rows is not None and not isinstance(self._rows, TensorDictRows):
            self._rows.replace(row, self.envs[row - self.first])

    def call_states(self) -> dict[int, dict[str, Any]]:
        """Return, by row, the state dict of every env, and the root that its row remembers, in plain form.

        With the first row comes where torch's global generator is, if this process is the envs' own: what was
        never seeded draws from it.
        """
        roots = self._rows.roots() if isinstance(self._rows, TensorDictRows) else {}

        def read(row: int, _: None) -> dict[str, Any]:
            is_first = row == self.first and self._has_own_numbers
            return {
                "env": self.envs[row - self.first].state_dict(),
                "root": plain(roots.get(row)),
                "numbers": torch.get_rng_state() if is_first else None,
            }

        rows = range(self.first, self.first + len(self.envs))
        return self._for_each(dict.fromkeys(rows), read)

    def call_load_states(self, strict: bool, states: dict[int, dict[str, Any]]) -> dict[int, bool]:
        """Load what `call_states` gave, and return for each row whether its episode is lost."""

        def load(row: int, saved: dict[str, Any]) -> bool:
            env = self.envs[row - self.first]
            with loading({}, strict=strict):  # the caller warns
                env.load_state_dict(saved["env"], strict=strict)
            if isinstance(self._rows, TensorDictRows):
                self._rows.put_root(row, from_plain(saved["root"]))
            self._rebind(row)
            return _take_loss(env)

        are_lost = self._for_each(states, load)
        numbers = states[self.first]["numbers"] if self.first in states else None
        if self._has_own_numbers and numbers is not None:
            torch.set_rng_state(numbers)
        return are_lost

    def call_has_row_core(self) -> bool:
        """Check whether every env steps on NumPy rows, all of them with the same spaces."""
        return all(row_core(env) is not None for env in self.envs)

    def call_process_id(self) -> int:
        """Return the process the envs live in."""
        return os.getpid()

    def close(self) -> None:
        """Close every env, also those behind one that raises."""
        with ExitStack() as stack:
            for env in reversed(self.envs):
                stack.callback(env.close, raise_if_closed=False)


def _take_loss(env: EnvBase) -> bool:
    """Check whether loading has led an env out of its episode, which the pool reports instead of the env."""
    while (inner := env._modules.get("base_env")) is not None:
        env = cast(EnvBase, inner)
    is_lost = env._unshown is not None and env._left_by == LOADED
    if is_lost:
        env._unshown = None
    return is_lost


@contextmanager
def _blaming(row: int) -> Iterator[None]:
    """Add the row in which something was raised meanwhile."""
    try:
        yield
    except Exception as error:
        raise RowsFailedError({row: error}, None) from error


class OutputForms:
    """The forms of what one env makes: of a root, and of the outcome of a step.

    Sizes that only data can tell fit any, and so do entries without a dtype. An env whose parts are
    unlike is trusted.
    """

    def __init__(self, env: EnvBase):
        def forms(*kinds: str) -> list[tuple[Key, tuple[int, ...], torch.dtype]]:
            specs = [getattr(env, f"full_{kind}_spec") for kind in kinds]
            return [
                (as_key(path), tuple(leaf.shape), leaf.dtype)
                for spec in specs
                if not contains_lazy_spec(spec)
                for path in leaf_paths(spec)
                if (leaf := spec[as_key(path)]).dtype is not None
            ]

        self._of_root = forms("observation", "done")
        self._of_outcome = forms("observation", "reward", "done")

    def check_root(self, td: TensorDictBase) -> None:
        """Check what a reset returned.

        Raises:
            WorkerError: an entry is missing, or has another form.
        """
        for key, shape, dtype in self._of_root:
            require_form(key, td.get(key, None), shape, dtype)

    def check_outcome(self, td: TensorDictBase) -> None:
        """Check ``next`` of a step; see `check_root`."""
        for key, shape, dtype in self._of_outcome:
            require_form(key, td.get(key, None), shape, dtype)


# ------------------------------------------------------------------------------- tensors in messages

# torch cannot unpickle tensors of uint16, uint32 and uint64 that it has pickled itself, alone or in a spec or
# a TensorDict. In messages to and from workers they travel as arrays of the same numbers.
_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


def _reduced(tensor: torch.Tensor) -> Any:
    if tensor.dtype in _UNSIGNED:
        return _tensor_on, (tensor.numpy(force=True), tensor.device)
    return tensor.__reduce_ex__(2)


def _tensor_on(array: Any, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device)


pickle_with(torch.Tensor, _reduced)
