"""Envs of different libraries as one batch, side by side.

`MixedEnv` concatenates the batches of its members. It hands out the step to all of them before it
waits for any, so that worker processes step while JAX computes. It knows neither. Where the states of
members are in the data is decided in `members`.

Conventions
    member  an env with one batch axis; it is the submodule ``member{i}``.
    version tells data that the simulator of a stateful (batch-locked) member has left behind, see `members`.
    device  where the mixed env delivers; each member is given data where it expects it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, Unpack

import torch
from tensordict import TensorDictBase

from envkit import rules
from envkit.batched.batched_env import rows_for_others
from envkit.batched.exchange.mixed_pools import MixedRows
from envkit.batched.exchange.recording import recorded
from envkit.batched.members import (
    STATE,
    VERSION,
    Member,
    RowVersions,
    common_device,
    delivered,
    joined_specs,
    members_of,
    require_free,
    shared_leaves,
)
from envkit.batched.shared_simulators import SimulatorOwners
from envkit.data.arguments import require_state_dict
from envkit.data.keywords import known_to, refuse_unknown
from envkit.data.paths import Key, Path, as_path, take_out
from envkit.data.plain import from_plain, plain
from envkit.data.resets import collect_reset_masks
from envkit.env.base import EnvBase
from envkit.env.declared import OUTPUTS
from envkit.env.facts import Facts
from envkit.env.html import EnvReport
from envkit.env.learning import ALL
from envkit.env.options import CallOptions
from envkit.env.own_state import OWN, loading
from envkit.env.runs import Record, Run, Runs
from envkit.env.seeding import reset_keywords
from envkit.env.thread_lock import InUse
from envkit.env.tickets import Ticket
from envkit.env.wrapper_hints import known_wrapping_of
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    InputError,
    MissingKeyError,
    ReadOnlyError,
    ResetMaskError,
    SpecError,
)
from envkit.specs import Unbounded
from envkit.specs.annotations import Destination, Device, EnvData, destination, require_memory
from envkit.specs.inputs import counted_from
from envkit.specs.lasting import lasting


class MixedEnv(EnvBase):
    """Concatenate envs along their batch axis; batch-locked.

    A step reads the state of stateless members from its input: to step one TensorDict twice gives
    the same twice. Stateful members cannot go back: their rows are stepped from their newest data.

    Args:
        members: envs with one batch axis each, of equal keys (state apart), shapes and dtypes.
        device: where data is delivered; None takes the device that members name.
        **options: see `EnvBase`.

    Raises:
        ArgumentTypeError: (a TypeError) a member is no env.
        ArgumentError: (a ValueError) there is no member, or members name several devices and
            ``device`` none.
        SpecError: the members differ; the message lists every difference. Or a state has an entry
            that is no tensor of fixed shape.
        KeyCollisionError: members have another entry named ``state``.

    Example:
        >>> from envkit import GymEnv, MixedEnv, SerialEnv
        >>> make = lambda length: GymEnv("CartPole-v1", max_episode_steps=length)
        >>> short = SerialEnv(2, lambda: make(10))
        >>> long = SerialEnv(3, lambda: make(20))
        >>> env = MixedEnv([short, long])
        >>> env.rollout(5, break_when_any_done=False).batch_size
        torch.Size([5, 5])
        >>> env.close()
    """

    def __init__(
        self,
        members: Sequence[EnvBase],
        *,
        device: Device | None = None,
        **options: Unpack[CallOptions],
    ):
        refuse_unknown("MixedEnv", options, known_to(MixedEnv) or ())
        members = list(members)
        _require_members(members)
        placed = members_of(members)
        shared = shared_leaves(placed)
        super().__init__(
            batch_size=[placed[-1].rows.stop],
            device=common_device(members) if device is None else device,
            allow_done_after_reset=any(env.allow_done_after_reset for env in members),
        )
        require_memory(self._device, type(self).__name__)
        self.members = placed
        self._members_have_states = any(member.state for member in placed)
        self._in_use = InUse(type(self).__name__, [env._in_use for env in members])
        for member in self.members:
            self.add_module(member.name, member.env)
        for kind, spec in joined_specs(placed, shared, self.batch_size, self.device).items():
            setattr(self, f"full_{kind}_spec", spec)
        is_stateful = torch.zeros(self.batch_size, dtype=torch.bool, device="cpu")
        for member in self.members:
            is_stateful[member.rows] = member.env.batch_locked
        self._versions = RowVersions(is_stateful)
        # members that compute in this process first: the others work meanwhile
        self._in_order_of_waiting = sorted(
            placed, key=lambda member: member.env._facts.works_elsewhere
        )
        self._declare_state()

    keeps_last_output = True
    _fast_path_bypasses = EnvBase._fast_path_bypasses | {"_reset"}
    _hands_resets_on = True

    def _finish_specs(self, *, lock: bool) -> None:
        """Declare the done flags of the members alone: their transforms may have renamed or dropped twins."""
        super()._finish_specs(lock=False)
        first = self.members[0].env
        done = self.full_done_spec.clone()
        for key in list(done.keys(True, True)):
            if key not in first.done_keys:
                take_out(done, as_path(key))
        self._store(OUTPUTS, "done", done)
        self._declared.added_flags = first._declared.added_flags
        self._lock_own(lock)

    def rand_action(self, tensordict: TensorDictBase | None = None) -> EnvData:
        """Sample every action; see `EnvBase.rand_action`. Members that override it draw theirs."""
        if not self._members_draw_their_own:
            return super().rand_action(tensordict)
        td = self._drawn_into(tensordict)
        drawn = [
            member.env.rand_action(member.part(td, self._hidden)).select(*self.action_keys)
            for member in self.members
        ]
        actions = torch.cat([delivered(part, self.device) for part in drawn], 0)  # type: ignore[arg-type]
        return td.update(actions)

    @property
    def _draws_own_actions(self) -> bool:
        """Whether random actions come from an override of `rand_action`, or from rules of an env's own, here or inside."""
        return super()._draws_own_actions or self._members_draw_their_own

    @property
    def _members_draw_their_own(self) -> bool:
        return any(member.env._draws_own_actions for member in self.members)

    def _find_facts(self) -> Facts:
        merged = Facts.merged(member.env._facts for member in self.members)
        return replace(merged, steps_have_effects=type(self).__name__)

    def _declare_state(self) -> None:
        """Declare the states that travel in the data, as input and as observation."""
        forms: dict[Key, tuple[Sequence[int], torch.dtype | None]] = {
            member.state_key(path): (leaf.shape[1:], leaf.dtype)
            for member in self.members
            for path, leaf in member.state.items()
        }
        if self._versions.are_written:
            forms[VERSION] = (1,), torch.int64
        observation, device = self.full_observation_spec.clone(), self.device
        require_free(map(as_path, forms), observation)
        for key, (event, dtype) in forms.items():
            observation[key] = Unbounded((*self.batch_size, *event), dtype=dtype, device=device)
        read = {key for member in self.members for key in member.env.state_keys}
        state = observation.clone()
        for key in list(state.keys(True, True)):
            if key not in forms and key not in read:
                take_out(state, as_path(key))
        self.full_observation_spec, self.full_state_spec = observation, state
        self._hidden = (VERSION, *((STATE, member.name) for member in self.members))

    # ---------------------------------------------------------------------------------------- step

    def _runs(self) -> Runs:
        """Return runs in the rows of the members, where all have some, and of which all learn."""
        return _RunsOfMembers(self)

    def _rows_for_run(self) -> MixedRows | None:
        """Return rows of all members side by side, if a whole run can be recorded in them."""
        if (
            self._unshown is not None
            or self._members_have_states
            or not (self.device is None or self.device.type == "cpu")
        ):
            return None
        exchanges = [rows_for_others(member.env) for member in self.members]
        usable = [one for one in exchanges if one is not None and MixedRows.can_hold(one)]
        if len(usable) < len(exchanges):
            return None
        cache = self._declared.cache
        rows = cache.get("rows of members")
        if rows is None or rows.exchanges != tuple(usable):
            with lasting():
                rows = MixedRows(self, usable, self._versions, self._keep_newest)
            cache["rows of members"] = rows
        return rows

    def _keep_newest(self, rows: MixedRows) -> None:
        """Store what the members show after a run in their rows."""
        for member, exchange in zip(self.members, rows.exchanges, strict=True):
            member.newest = None
            if not rows.has_failed:
                member.keep(exchange.newest())

    def _prepare_step(self, ticket: Ticket, *, is_ahead: bool) -> None:
        td, mask = ticket.td, None if ticket.mask is None else ticket.mask.cpu()
        # Rows that are left out may be done already: then the reset follows apart.
        ticket.restarts = mask is None and self._may_restart(ticket)
        work = ticket.work = _MixedWork(mask, self._versions.moving(td, mask))
        for member in reversed(self._in_order_of_waiting):
            part = member.part(td, self._hidden)
            try:
                step = member.env._honoured_step(part, advance=ticket.restarts, is_ahead=True)
            except InputError as error:
                if error.row is None:
                    raise
                raise counted_from(member.rows.start, error) from None
            work.parts[member.name] = step

    def _begin_step(self, ticket: Ticket) -> None:
        self._versions.count(ticket.work.moving)
        try:
            for step in ticket.work.parts.values():
                step.begin()
        except BaseException:
            self._forget_newest()
            raise

    def _finish_step(self, ticket: Ticket) -> TensorDictBase:
        nexts = self._received(ticket)
        following = self._joined(nexts)
        if ticket.restarts:
            self._versions.tell(following)
        else:
            self._versions.tell(following, ticket.td, ticket.work.mask)
        return following

    def _fresh_root(self, ticket: Ticket, data: TensorDictBase) -> TensorDictBase:
        root = self._joined(ticket.work.roots)
        self._count_begun(data.get("next"), root)
        return root

    def _received(self, ticket: Ticket) -> dict[str, TensorDictBase]:
        """Receive from every member, also if one fails, and give what their steps made, by name.

        The newest results of each are kept; where the members have reset what is done, that is the root that follows.
        """
        work, nexts = ticket.work, {}
        failed: Exception | None = None
        try:
            for member in self._in_order_of_waiting:
                name = member.name
                try:
                    outcome = work.parts[name].recv()
                    data, newest = outcome if ticket.restarts else (outcome, outcome.get("next"))
                    nexts[name], work.roots[name] = data.get("next"), newest
                    member.keep(newest, None if work.mask is None else work.mask[member.rows])
                except Exception as error:
                    failed = failed or error
            if failed is not None:
                raise failed
        except BaseException:
            self._forget_newest()
            raise
        return nexts

    def _forget_newest(self) -> None:
        """Forget the newest results: it is not known any more which of the members have moved."""
        for member in self.members:
            member.newest = None

    def _count_begun(self, following: TensorDictBase, root: TensorDictBase) -> None:
        """Count the episodes that members have begun after a step that ended with ``following``."""
        if not self._versions.are_written:
            return
        flags = following.select(*self.done_keys)
        self.any_done(flags)
        masks = collect_reset_masks(flags, self.done_levels, self.full_done_spec)
        self._versions.count(self._rows_of(masks))
        self._versions.tell(root)

    def _visit_transforms(self, visit: Any, earlier: Any) -> Any:
        each = [ALL] * len(self.members) if earlier == ALL else earlier
        return [
            member.env._visit_transforms(visit, one)
            for member, one in zip(self.members, each, strict=True)
        ]

    def _movable_objects(self) -> Iterator[object]:
        yield from super()._movable_objects()
        for member in self.members:
            yield from member.env._movable_objects()

    def _rows_of(self, masks: Mapping[Path, torch.Tensor]) -> torch.Tensor:
        """Return which rows the `_reset` masks of all levels touch."""
        touched = torch.zeros(self.batch_size, dtype=torch.bool, device="cpu")
        for mask in masks.values():
            touched |= mask.reshape(len(touched), -1).any(-1).cpu()
        return touched

    def _joined(self, parts: Mapping[str, TensorDictBase]) -> TensorDictBase:
        """Concatenate the results of the members, by name, in the order of the rows."""
        shown, device = [], self._device
        for member in self.members:
            part = parts[member.name]
            if self._members_have_states:
                part = member.shown(part, self.members)
            shown.append(delivered(part, device))
        return torch.cat(shown, 0)  # type: ignore[return-value]

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        raise NotImplementedError("MixedEnv steps through its members.")

    # --------------------------------------------------------------------------------------- reset

    def _reset(self, td: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        masks = {}
        if td is not None:
            masks = collect_reset_masks(td, self.done_levels, self.full_done_spec)
        if masks and any(member.newest is None for member in self.members):
            raise ResetMaskError(
                "a partial reset came before the first full one, or after a step that failed, so what the "
                "other rows show is not known. Call reset() once without a mask."
            )
        rows = torch.ones(self.batch_size, dtype=torch.bool, device="cpu")
        if masks:
            rows = self._rows_of(masks)
        take = Member.part_to_reset if masks else Member.part
        parts: dict[str, Any] = {}
        keywords = reset_keywords(kwargs, (member.rows.start for member in self.members))
        for member, of_member in zip(self.members, keywords, strict=True):
            chosen = rows[member.rows]
            if bool(chosen.any()):
                part = None if td is None else take(member, td, self._hidden)
                results = member.env.reset(part, **of_member)
                member.keep(results, None if bool(chosen.all()) else chosen)
                self._versions.count(rows, member.rows)
            parts[member.name] = member.newest
        fresh = self._joined(parts)
        self._versions.tell(fresh)
        return fresh

    # ------------------------------------------------------------------------- specs, place, state

    def add_truncated_keys(self) -> EnvBase:  # type: ignore[override]
        """Refused: the members decide what they report."""
        raise ReadOnlyError(
            "truncated keys cannot be added to a mixed env: its done spec is that of its members. Add "
            "them to each: MixedEnv([member.add_truncated_keys(), ...])."
        )

    def to(self, *args: Destination, **kwargs: Destination) -> Self:
        """Move the members, and deliver to that device from now on; returns self."""
        require_memory(destination(*args, **kwargs), type(self).__name__)
        super().to(*args, **kwargs)
        for member in self.members:
            member.env.to(*args, **kwargs)
            if member.newest is not None:
                member.newest = delivered(member.newest, member.env.device)
        return self

    def record_for_resume(self, mode: bool = True) -> Self:
        """Record the episodes of every member, see `EnvBase.record_for_resume`."""
        for member in self.members:
            member.env.record_for_resume(mode)
        return self

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> dict[str, Any]:
        """Return ``{"member0": {...}, ...}``, the state dict of every member, and what the mixed env adds.

        With a ``prefix``, which a module passes that holds this env, the dict is flat, as that module is loaded.

        Raises:
            ResumeError: (a RuntimeError) a member records its episodes, and this one cannot be restored exactly.
        """
        if prefix:
            return super().state_dict(*args, prefix=prefix, **kwargs)
        states = {member.name: member.env.state_dict(*args, **kwargs) for member in self.members}
        return {**states, OWN: self._own_state()}

    def _own_state(self) -> dict[str, Any]:
        newest = [plain(member.newest) for member in self.members]
        return {**super()._own_state(), "moments": self._versions.state(), "newest": newest}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> None:
        """Load what `state_dict` gave.

        Args:
            state_dict: of an env of the same members.
            strict: False: rows whose recorded episode does not go on as it did are truncated by the next step, and
                begin a new one.
            assign: of ``torch.nn.Module.load_state_dict``.

        Raises:
            ArgumentTypeError: it is no dict.
            MissingKeyError: (a KeyError) a member, or what the mixed env added, is not in it.
            ResumeError: (a RuntimeError) a member did not get where it was.
        """
        require_state_dict(state_dict)
        names = [member.name for member in self.members]
        if sorted(state_dict) != sorted([*names, OWN]):
            raise MissingKeyError(
                f"the state dict has the entries {list(state_dict)}, but this env has the members "
                f"{names} and {OWN!r}. Pass what state_dict() of an env with as many members gave."
            )
        with loading(state_dict, strict=strict):
            for name, member in zip(names, self.members, strict=True):
                member.env.load_state_dict(state_dict[name], strict, assign)
            self._resume(state_dict[OWN], strict=strict)

    def _take_own_state(self, state: Mapping[str, Any], *, strict: bool) -> None:
        super()._take_own_state(state, strict=strict)
        self._versions.take(state["moments"])
        for member, newest in zip(self.members, state["newest"], strict=True):
            member.newest = from_plain(newest)

    # ------------------------------------------------------------------------------- seed and life

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Seed the members one after the other, each with the seed the one before returned."""
        following = seed
        for member in self.members:
            following = member.env.set_seed(following, static_seed=static_seed)
        self._versions.begin_anew()
        self._seed_actions(seed)
        return following

    def _leave_episodes(self, call: str) -> None:
        for member in self.members:
            member.env._leave_episodes(call)
        if self._versions.are_written:
            super()._leave_episodes(call)
            self._unshown = self._versions.is_stateful.clone()  # the others go on from any root

    @property
    def _seeded_parts(self) -> list[tuple[Any, int | None]]:
        return [
            (member.rows if part == () else member.rows.start + part, seed)
            for member in self.members
            for part, seed in member.env._seeded_parts
        ]

    def _set_seed(self, seed: int | None) -> None:
        self.set_seed(seed)

    def _repr_arguments(self) -> list[str]:
        return [f"[{', '.join(repr(member.env) for member in self.members)}]"]

    def _report(self) -> EnvReport:
        facts, specs, _ = super()._report()
        facts = {name: fact for name, fact in facts.items() if name != "env"}
        inside = {
            f"rows {member.rows.start} to {member.rows.stop - 1}": member.env
            for member in self.members
        }
        return EnvReport({**facts, "kind": f"{len(inside)} envs side by side"}, specs, inside)

    def close(self, *, raise_if_closed: bool = False) -> None:
        """Close every member."""
        super().close(raise_if_closed=raise_if_closed)
        for member in self.members:
            member.env.close(raise_if_closed=False)


@dataclass(slots=True, eq=False)
class _MixedWork:
    """State of a step under way in a mixed env.

    Attributes:
        mask: rows that are stepped, on the CPU; None: all.
        moving: rows whose simulator moves for good.
        parts: the step of each member by name, in the order in which they begin.
        roots: the newest results of each member, by its name.
    """

    mask: torch.Tensor | None
    moving: torch.Tensor
    parts: dict[str, Ticket] = field(default_factory=dict, init=False)
    roots: dict[str, TensorDictBase] = field(default_factory=dict, init=False)


class _RunsOfMembers(Runs):
    """Rollouts in the rows of the members, of which all members learn."""

    def __init__(self, env: MixedEnv):
        self._env = env

    def expect(self, stop: rules.Stop, policy: Any) -> None:
        """Announce a rollout to each member."""
        for member in self._env.members:
            member.env._runs().expect(stop, policy)

    def record(self, run: Run) -> Record:
        """Record a rollout in the rows."""
        env = self._env
        rows = env._rows_for_run()
        if rows is None or any(member.newest is None for member in env.members):
            return None
        env._versions.moving(run.root, None)
        try:
            return recorded(env, rows, run, ended=lambda following: {})
        finally:
            env._keep_newest(rows)


def _require_members(members: list[EnvBase]) -> None:
    """Check that there are members, and that each is an env with one batch axis."""
    if not members:
        raise ArgumentError(
            "MixedEnv got an empty list, but needs at least one env. "
            "Pass envs with one batch axis each: MixedEnv([BraxEnv(...), ParallelEnv(...)])."
        )
    owners = SimulatorOwners()
    for number, env in enumerate(members):
        if not isinstance(env, EnvBase):
            wrapping = known_wrapping_of(env)
            cure = "Build it first: MixedEnv([make(), ...]) instead of MixedEnv([make, ...])."
            if wrapping is not None:
                cure = f"Wrap it and give it a batch axis first: SerialEnv(1, lambda: {wrapping})."
            raise ArgumentTypeError(
                f"member {number} is {env!r}, of type {type(env).__name__}, but must be an env. {cure}"
            )
        owners.require("member", number, env)
        if env.batch_dims != 1:
            raise SpecError(
                f"member {number} has batch size {tuple(env.batch_size)}, but a mixed env "
                "needs exactly one batch axis. Build it with batch_size=[n], or put a single "
                "env in SerialEnv(1, ...)."
            )
