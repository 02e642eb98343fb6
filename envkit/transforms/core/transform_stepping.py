"""How resets and steps go through transforms, to an env and back.

`TransformStepping` decides when each hook runs, and which rows it sees. The selection of masks, and what survives,
follow `rules` through `transition`, as in `EnvBase`. It does not know any transform.

Conventions
    inner    the side of the stepper, after the inverse pass; outer: the user's side.
    stepper  the env that is stepped: the base env, or one made of it that runs the first transforms
             by itself. The others are ``outside``.
    hidden   outer observations that the stepper does not read. A transform may have given them
             another shape or dtype, so they are kept from the stepper where it would merge them.
    route    where a step goes on its way through transforms, and how its results are shown on the way back.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase

from envkit import rules
from envkit.data.merging import merge_reset, merge_rows, spread_rows
from envkit.data.paths import Key, as_key, as_path, leaf_paths
from envkit.data.resets import collect_reset_masks, mark_done
from envkit.data.transition import OutputLeaf, leaves
from envkit.env.base import EnvBase
from envkit.env.policy import PolicyLike
from envkit.env.runs import Record, Run, Runs
from envkit.env.tickets import Ticket
from envkit.errors import FusionError
from envkit.specs import Composite
from envkit.specs.annotations import EnvData, reading_waits
from envkit.transforms.core.kept_memory import KeptMemory
from envkit.transforms.core.transform import Transform
from envkit.transforms.core.wrapper import TransformHolder


@dataclass(frozen=True)
class Route:
    """Which env is stepped, and where each transform runs, first to last."""

    base: EnvBase
    stepper: EnvBase
    fused: list[Transform]
    outside: list[Transform]
    is_direct: bool
    """Whether the stepper is one made to run transforms, and runs all there are."""

    @property
    def leaves(self) -> list[Transform]:
        """The transforms outside of the stepper, those of a `Compose` one by one."""
        return [leaf for part in self.outside for leaf in part.flat()]

    @property
    def is_pure(self) -> bool:
        """Whether the transforms outside of the stepper write to no tensor in place, and leave no trace of a call."""
        return all(leaf.is_pure for leaf in self.leaves)

    def shown_next(self, inner: TensorDictBase, done: TensorDictBase) -> TensorDictBase:
        """Show the ``next`` of a step the stepper has done, which was given ``inner``."""
        following = done.get("next")
        if done is inner:
            inner = inner.exclude("next", inplace=True)
        for transform in self.outside:
            following = transform._step(inner, following)
            if isinstance(transform, KeptMemory):
                inner = transform.outwards(inner)
        return following

    def shown_root(self, td: TensorDictBase, root: TensorDictBase) -> TensorDictBase:
        """Show what the stepper gave at a reset, which was asked for with ``td``."""
        td = self.inwards(td)
        for transform in self.outside:
            root = transform._reset(td, root)
            if isinstance(transform, KeptMemory):
                td = transform.outwards(td)
        return root

    def inwards(self, td: TensorDictBase) -> TensorDictBase:
        """Return the memory that travels elsewhere, and leave the rest as it is."""
        for transform in reversed(self.outside):
            if isinstance(transform, KeptMemory):
                td = transform.outwards(td)
        return td

    def require_one_program(self) -> None:
        """Check that steps, transforms included, are one program.

        Raises:
            FusionError: some transforms cannot run inside the program, or the env has none.
        """
        if not hasattr(type(self.stepper), "unroll"):
            raise FusionError(
                f"unroll needs a stateless env, whose steps are one program, but {type(self.stepper).__name__} is not. Use "
                "rollout(steps, break_when_any_done=False), which goes step by step."
            )
        names = ", ".join(type(leaf).__name__ for leaf in self.leaves)
        if names:
            raise FusionError(
                f"unroll would pass {names} by: these transforms run outside the programs of the env "
                "(the guide to transforms lists which run inside; all before them must). Use "
                "rollout(steps, break_when_any_done=False), which goes step by step."
            )


class TransformStepping(TransformHolder):
    """The part of a `TransformedEnv` that resets and steps."""

    _transform: Transform

    @property
    @abstractmethod
    def _chain(self) -> list[Transform]:
        """All that runs between the base env and the user, first to last."""

    resets_on_empty_mask = True  # the base env decides

    _found_route: Route | None = None
    _instead_of_copies: list[Transform] | None = None
    """Transforms of another env, of which this env's are copies, and which steps and resets go through."""
    _parents: dict[int, TransformHolder]  # the env before each transform, by its id

    @property
    def _route(self) -> Route:
        if self._instead_of_copies is not None:
            return Route(self.base_env, self.base_env, [], self._chain, is_direct=False)
        route = self._found_route
        if route is None and self._declared.remembers and self.base_env._may_be_fused:
            route = self._found_route = self._find_route()
        if route is None or not (route.stepper is route.base or route.base._may_be_fused):
            # programs are made for specs that stay, and for envs that step as their class says
            return Route(self.base_env, self.base_env, [], self._unfused, is_direct=False)
        return route

    def _find_route(self) -> Route:
        base, transforms = self.base_env, self._chain
        if not self._transform.is_flat:
            return Route(base, base, [], self._unfused, is_direct=False)
        stepper, count = base._fuse(transforms)
        outside = transforms[count:] if count or not transforms else self._unfused
        is_direct = not outside and stepper is not base
        return Route(base, stepper, transforms[:count], outside, is_direct)

    @property
    def _unfused(self) -> list[Transform]:
        """All transforms, where none runs inside the stepper: as one, so that a subclass of `Compose` is honoured."""
        chain = self._chain
        return chain if len(chain) > len(self._transform.flat()) else [self._transform]

    def _forget_what_was_made(self) -> None:
        """Find the route, and the parents of transforms, again at the next use."""
        self._found_route = None
        self._parents = {}
        self._declared.cache.pop("row", None)

    def _lock_own(self, mode: bool) -> None:
        if not mode:
            self._forget_what_was_made()  # specs may be edited from now on
        super()._lock_own(mode)

    def _store(self, side: str, kind: str, spec: Composite) -> None:
        self._forget_what_was_made()
        super()._store(side, kind, spec)

    def _fuse(self, transforms: Sequence[Transform]) -> tuple[EnvBase, int]:
        route = self._route
        return route.stepper._fuse(transforms) if route.is_direct else (self, 0)

    # --------------------------------------------------------------------------------------- reset

    def _check_batch(self, td: TensorDictBase) -> None:
        base: Any = self._modules["base_env"]  # as an attribute it would be looked for long
        if base.is_closed:
            base._check_batch(td)  # an env that starts at its first use starts here
        table = self._declared.table or self._table
        if table.batch_locked and td.batch_size != table.batch_size:
            super()._check_batch(td)

    def _reset(self, td: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        route = self._route
        if route.is_direct:
            kwargs.pop("set_state", None)  # programs always begin again
            return route.stepper._reset(td, **kwargs)
        return self._reset_through(route, td, **kwargs)

    def _reset_through(
        self, route: Route, td: TensorDictBase | None, **kwargs: Any
    ) -> TensorDictBase:
        given = None if td is None else td.copy()
        if given is None and self._has_preprocess:
            given = TensorDict({}, batch_size=self.batch_size, device=self.device)
        if given is not None:
            for transform in reversed(route.outside):
                given = transform._reset_env_preprocess(given)
            given = given.exclude("next", *self._hidden_keys)
        root = given
        if td is None or root is None or self._is_left(td, root):
            root = route.stepper.reset(root, **kwargs)
        return self._shown_root(root.empty() if td is None else td, root)

    def _is_left(self, td: TensorDictBase, given: TensorDictBase) -> bool:
        """Check whether there is something left to reset, or nothing was taken out of the masks of ``td``."""
        keys = self._route.stepper.reset_keys
        masks = [(td.get(key, None), given.get(key, None)) for key in keys]
        if all(mask is own for own, mask in masks):
            return True
        return any(mask is not None and bool(mask.any()) for _, mask in masks)

    def _shown_root(self, td: TensorDictBase, root: TensorDictBase) -> TensorDictBase:
        """Show what the stepper says after a reset, which was asked for with ``td``."""
        route = self._route
        return route.shown_root(td, root.select(*self._told_by_stepper, strict=False))

    @property
    def _told_by_stepper(self) -> list[Key]:
        """What a reset of the stepper may give: observations, flags, and states that the user's side has too."""

        def build() -> list[Key]:
            stepper = self._route.stepper
            own = {as_path(key) for key in self.state_keys}
            return [
                *stepper._table.shown,
                *(key for key in stepper.state_keys if as_path(key) in own),
            ]

        return self._declared.cached("told_by_stepper", build)

    @property
    def _has_preprocess(self) -> bool:
        return any(
            type(transform)._reset_env_preprocess is not Transform._reset_env_preprocess
            or "_reset_env_preprocess" in vars(transform)
            for transform in self._route.leaves
        )

    @property
    def _hidden_keys(self) -> list[Key]:
        def build() -> list[Key]:
            stepper = self._route.stepper
            read = {as_path(key) for key in (*stepper.state_keys, *stepper.action_keys)}
            return [key for key in stepper.observation_keys if as_path(key) not in read]

        return self._declared.cached("hidden_keys", build)

    @property
    def _unlike_keys(self) -> list[Key]:
        """Hidden entries that transforms show in another shape or dtype, or not at all."""

        def build() -> list[Key]:
            shown, inner = self.full_observation_spec, self._route.stepper.full_observation_spec
            leaves = {key: (shown.get(key, None), inner[key]) for key in self._hidden_keys}
            return [
                key
                for key, (leaf, own) in leaves.items()
                if leaf is None or (leaf.shape, leaf.dtype) != (own.shape, own.dtype)
            ]

        return self._declared.cached("unlike_keys", build)

    # ---------------------------------------------------------------------------------------- step

    def _make_step(self, td: TensorDictBase, *, advance: bool, is_ahead: bool = False) -> Ticket:
        route = self._route
        if route.is_direct:
            self._check_batch(td)
            return route.stepper._make_step(td, advance=advance, is_ahead=is_ahead)
        return super()._make_step(td, advance=advance, is_ahead=is_ahead)

    def _prepare_step(self, ticket: Ticket, *, is_ahead: bool) -> None:
        route, inner = self._route, ticket.td.exclude("next").copy()
        for transform in reversed(route.outside):
            inner = transform._inv_call(inner)
        mask = inner.get(rules.STEP, None)
        if mask is not None:
            mask = rules.step_mask(mask, inner.batch_size)
            inner = inner.exclude(rules.STEP, inplace=True)
            mask = None if bool(mask.all()) else mask
        if mask is None and self._may_restart(ticket):
            ticket.restarts = all(leaf.only_adds_done for leaf in route.leaves)
        self._hand_in(ticket, _TransformedWork(route, inner, mask), is_ahead=is_ahead)

    def _hand_in(self, ticket: Ticket, work: _TransformedWork, *, is_ahead: bool) -> None:
        """Start the stepper's part of a step."""
        stepper, given, ticket.work = work.route.stepper, work.given, work
        if work.mask is None:
            work.inner = stepper._honoured_step(given, advance=ticket.restarts, is_ahead=is_ahead)
        elif bool(work.mask.any()):
            given = given.exclude(*self._unlike_keys).set(rules.STEP, work.mask)
            work.inner = stepper._honoured_step(given, advance=False, is_ahead=is_ahead)
        inside = None if work.inner is None else work.inner.work
        if isinstance(inside, _TransformedWork) and inside.mask is not None:
            work.mask = inside.mask.reshape(work.given.batch_size)  # its transforms leave rows out

    def _begin_step(self, ticket: Ticket) -> None:
        if ticket.work.inner is not None:
            ticket.work.inner.begin()

    def _finish_step(self, ticket: Ticket) -> TensorDictBase:
        work = ticket.work
        done = None if work.inner is None else work.inner.recv()
        if ticket.restarts:
            done, work.root = cast(tuple[TensorDictBase, TensorDictBase], done)
            work.ended = done.get("next").copy()  # as the stepper shows it
        if work.mask is not None:
            following = self._masked_shown(ticket, done)
        else:
            following = work.route.shown_next(work.given, done)
        self._record_inputs(ticket.td, work, done)
        return following

    def _record_inputs(
        self, td: TensorDictBase, work: _TransformedWork, done: TensorDictBase | None
    ) -> None:
        """Write the inputs of the stepper's step, ``done``, that are recorded into the data."""
        for key in (self._declared.table or self._table).recorded:
            value = None if done is None else done.get(key, None)
            value = work.given.get(key, None) if value is None else value
            if value is not None:  # reshaped behind transforms of batch size
                td.set(key, value.reshape((*td.batch_size, *value.shape[work.given.batch_dims :])))

    def _masked_shown(self, ticket: Ticket, done: TensorDictBase | None) -> TensorDictBase:
        """Show the rows that moved, if any did, among the others."""
        td, work = ticket.td, ticket.work
        mask, route, given = work.mask, work.route, work.given.exclude("next")
        skipped = self._skipped_next(td)
        if done is None or not bool(mask.any()):
            return skipped
        shown = mask.reshape(td.batch_size).to(skipped.device)  # which transforms may change
        takes_any = not (self.batch_locked or any(leaf.remembers_rows for leaf in route.leaves))
        if takes_any and given.batch_size == td.batch_size:
            stepped = route.shown_next(given[mask], done[mask])
            stepped = spread_rows(stepped, shown)
            return merge_rows(skipped, stepped, {(): shown}, keeps_last=False)
        stepped = route.shown_next(given.set(rules.STEP, mask), done)
        return merge_rows(skipped, stepped, {(): shown})

    def _fresh_root(self, ticket: Ticket, data: TensorDictBase) -> TensorDictBase:
        """Show the root that the stepper gave, which has reset what is done; reset the rest."""
        work = ticket.work
        root, ended, following = work.root, work.ended, self.step_mdp(data)
        if self._needs_no_answer(work.route, ended, data.get("next")):
            mark_done(following, self.done_levels)
        elif self.any_done(following):
            root = self._also_reset(work.route.stepper, root, following, ended)
        else:
            return following
        masks = collect_reset_masks(following, self.done_levels, self.full_done_spec)
        begun = root.copy()
        fresh = self._shown_root(following, root)
        same = []
        if work.route.is_pure and not isinstance(fresh, LazyStackedTensorDict):
            same = _the_same(fresh, begun, _the_same(data.get("next"), ended))
        if not (self.allow_done_after_reset or set(self.done_keys) <= set(same)):
            self._checks.refuse_done(fresh, following, masks, self)
        untouched = [(key, fresh.pop(key)) for key in same]  # the stepper has kept what goes on
        root = merge_reset(following, fresh, masks, keeps_last=self.keeps_last_output)
        for key, leaf in untouched:
            root.set(key, leaf)
        return root

    def _needs_no_answer(self, route: Route, ended: TensorDictBase, shown: TensorDictBase) -> bool:
        """Check whether transforms may hear of resets without asking whether there are any, which waits for a GPU.

        So it is where the stepper has begun all again that ended, and a reset of nothing leaves no trace.
        """
        keys = route.stepper.done_keys
        if not any(reading_waits(ended.get(key)) for key in keys):
            return False
        is_theirs = set(keys) == set(self.done_keys) == set(_the_same(shown, ended, keys))
        return is_theirs and route.is_pure

    @staticmethod
    def _also_reset(
        stepper: EnvBase, root: TensorDictBase, asked: TensorDictBase, ended: TensorDictBase
    ) -> TensorDictBase:
        """Reset in the stepper what ``asked`` wants reset and the stepper has not begun again."""
        stepper.any_done(ended)
        late = {}
        for key in stepper.reset_keys:
            mask = asked.get(key, None)
            if mask is not None:
                late[key] = rules.still_to_reset(mask, ended.get(key, None))
        if not any(bool(mask.any()) for mask in late.values()):
            return root
        return stepper._reset_anew(root.update(late))

    def _skipped_next(self, td: TensorDictBase) -> TensorDictBase:
        if not isinstance(td, LazyStackedTensorDict) or td.stack_dim:
            return super()._skipped_next(td)
        rows = [
            self._checks.skipped_next(part, own, self.batch_dims - 1)
            for part, own in zip(td.unbind(0), self._leaves_by_row(td.shape[0]), strict=True)
        ]
        return LazyStackedTensorDict(*rows, stack_dim=0)

    def _leaves_by_row(self, rows: int) -> Sequence[Sequence[OutputLeaf]]:
        """List the output leaves of each row of a batch, which may differ."""
        if not self.batch_locked:
            return [self._table.outputs] * rows

        def build() -> Sequence[Sequence[OutputLeaf]]:
            kinds = ("observation", "reward", "done")
            specs = {kind: getattr(self, f"full_{kind}_spec") for kind in kinds}
            return [
                [
                    (path, kind, spec[row][as_key(path)])
                    for kind, spec in specs.items()
                    for path in leaf_paths(spec[row])
                ]
                for row in range(rows)
            ]

        return self._declared.cached("leaves_by_row", build)

    def _step_inverted(self, td: TensorDictBase) -> TensorDictBase:
        """Step with an input that has been through the inverse pass, for a transform of this env."""
        mask = td.get(rules.STEP, None)
        ticket = Ticket(self, td, False, mask)
        given = self._route.inwards(td.exclude("next", rules.STEP).copy())
        self._hand_in(ticket, _TransformedWork(self._route, given, mask), is_ahead=False)
        return ticket.begin().recv()

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        raise NotImplementedError("a TransformedEnv steps through its base env.")

    # ----------------------------------------------------------------------------- step, then reset

    def _step_last(self, td: TensorDictBase) -> TensorDictBase:
        route = self._route
        if not route.is_direct or not self._steps_by_itself:
            return self.step(td)
        self._check_batch(td)
        return route.stepper._step_last(td)

    # --------------------------------------------------------------------------- as one program

    def unroll(
        self,
        td: TensorDictBase,
        steps: int,
        policy: PolicyLike = None,
        *,
        record_state: bool = False,
    ) -> tuple[EnvData, EnvData]:
        """Take many steps in one program, transforms included; see `JaxEnv.unroll`.

        Raises:
            FusionError: (a NotImplementedError) some transforms cannot run inside the program, or the
                env has none.
        """
        self._require_no_override(draws=policy is None)
        route = self._route
        route.require_one_program()
        stepper: Any = route.stepper
        return stepper.unroll(td, steps, policy, record_state=record_state)

    @property
    def traces(self) -> dict[str, int]:
        """How often each program that this env runs was traced, by name; see `JaxEnv`."""
        stepper: Any = self._route.stepper
        return stepper.traces

    def _runs(self) -> Runs:
        """Return those of the env whose programs include all transforms, or else those behind the base env."""
        route = self._route
        return route.stepper._runs() if route.is_direct else _RunsOfChain(self, route.stepper)


class _RunsOfChain(Runs):
    """Rollouts of transforms around an env."""

    def __init__(self, env: TransformStepping, stepper: EnvBase):
        self._env, self._stepper = env, stepper

    def expect(self, stop: rules.Stop, policy: Any) -> None:
        """Let the env that makes the steps learn of a rollout."""
        self._stepper._runs().expect(stop, policy)

    def record(self, run: Run) -> Record:
        """Make a rollout as the base env can for transforms around it."""
        env = self._env
        if env._instead_of_copies is not None:
            return None
        return env.base_env._runs().record_behind(env, run)

    def record_behind(self, env: Any, run: Run) -> Record:
        """Make a rollout of transforms around these, as one chain."""
        is_plain = self._env._instead_of_copies is None
        return self._env.base_env._runs().record_behind(env, run) if is_plain else None


@dataclass(slots=True, eq=False)
class _TransformedWork:
    """State of a step under way in a `TransformedEnv`.

    Attributes:
        route: how it goes.
        given: the data after the inverse pass, without masks; what the stepper is given.
        mask: which rows move; None: all.
        inner: the step of the stepper; None where no row moves.
        root, ended: the root that follows, and ``next``, as a stepper shows them that has reset what is done.
    """

    route: Route
    given: TensorDictBase
    mask: torch.Tensor | None
    inner: Ticket | None = field(default=None, init=False)
    root: Any = field(default=None, init=False)
    ended: Any = field(default=None, init=False)


def _the_same(
    first: TensorDictBase, second: TensorDictBase, keys: Iterable[Key] | None = None
) -> list[Key]:
    """List the keys, of those given or all, under which both hold the very same tensor."""
    keys = [as_key(path) for path, _ in leaves(first)] if keys is None else keys
    found = ((key, first.get(key, None)) for key in keys)
    return [key for key, leaf in found if leaf is not None and leaf is second.get(key, None)]
