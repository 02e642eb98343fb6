"""The compiled programs behind a stateless env.

`Programs` owns everything that is traced. It works on flat rows and on arrays by path; it does not
know TensorDict, torch, or batches of more than one axis. The outputs of rows are decided in `fused_transforms`.

Conventions
    rows       flat batch axis, padded to the size a program is compiled for.
    path       tuple of names; a state has either the two paths `PACKED`, or one for each leaf.
    flags      bool (3, rows, 1): done, terminated, truncated; (6, rows, 1) of two moments.
    memory     leaves by path that fused transforms read at the root; empty without any.
    constants  triple. One mapping for each fused transform, with the constants and state of `FusableTransform`.
               Rows that count for such state, bool (rows,), None if there is none. The model that the env is stepped
               with, None where none is an argument, see `ModelledEnv`.
    policy     see `functional.Policy`; observes leaves by path. None draws from the action space.
    run        dict of time-major arrays: "root" and "next", each as outputs are, but for flags of shape
               (3, time, rows); "action" and, for a policy that writes more (`Acted`), "written" in its place.
    carried    state of all rows after a run, as its loop carries it. It is not read: where it is given out, XLA on a
               CPU keeps buffers of the loop apart that else share memory and wait for each other, see docs/performance.md.
    outputs    dict with "state" and "leaves" (arrays by path) and "flags". The leaves of a step
               include its rewards; those of a root do not. A "state" that is not recorded is empty.
               The outputs of the last moment of a program have "shared" if a transform has state: what
               that is then, one mapping for each transform.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from operator import is_
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from envkit.data.paths import Path
from envkit.functional import (
    BatchedEnv,
    EnvWrapper,
    Policy,
    Stopped,
    StopRule,
    Timestep,
    Transition,
    done_of,
    random_policy,
    unroll,
    unroll_until,
)
from envkit.transforms.core.fusable import FusableTransform
from envkit_bridges.jax.compilation import jit_with_note, simulator_name
from envkit_bridges.jax.fused_transforms import Acted, NamedRows, RowState, flags_of
from envkit_bridges.jax.gradients import Differentiable, vjp_of
from envkit_bridges.jax.sharding import AXIS, EVERYWHERE, FLAGS, ROWS, Shards, after_time
from envkit_bridges.jax.shared_programs import (
    Program,
    Shared,
    UnlikeError,
    content_of,
    copied_from,
    shared_by,
)

if TYPE_CHECKING:
    import numpy as np

    from envkit.functional import Origin
    from envkit.functional.structure import PyTree

ByPath = dict[Path, Any]
Constants = tuple[Sequence[Mapping[str, Any]], jax.Array | None, Any]
Begin = tuple[ByPath, ByPath, jax.Array, ByPath]  # state, root, flags and what a policy remembers

# torch stores these, but neither adds nor (in a TensorDict) clones them.
_SIGNED = {"uint16": "int16", "uint32": "int32", "uint64": "int64"}

PACKED: tuple[Path, Path] = (("floats",), ("words",))
KEY: Path = ("key",)  # of the state leaf by leaf: what the next episode of a row is drawn from


NOTHING, RESTART, BEGIN = range(3)  # what follows a step, see `Programs.advance`

_PARTS = {"state": ROWS, "leaves": ROWS}
_OUTPUTS = {**_PARTS, "flags": FLAGS}
_MOMENTS = {name: after_time(spec) for name, spec in _OUTPUTS.items()}
_RUN = {"root": _MOMENTS, "next": _MOMENTS, "action": after_time(ROWS), "written": after_time(ROWS)}
_BEGIN = ROWS, ROWS, FLAGS, ROWS
# Inputs and outputs of each program, apart from static arguments, where rows are spread over devices.
_SPREAD: dict[str, tuple[tuple[Any, ...], Any]] = {
    "step": ((ROWS, ROWS, ROWS, EVERYWHERE), _OUTPUTS),
    "restart": ((ROWS, ROWS, EVERYWHERE, EVERYWHERE), _OUTPUTS),
    "advance": ((ROWS, ROWS, ROWS, EVERYWHERE, EVERYWHERE), (_PARTS, _PARTS, FLAGS)),
    "reseed": ((ROWS, EVERYWHERE), ROWS),
    "relayout": ((ROWS,), ROWS),
    "unroll": ((_BEGIN, EVERYWHERE, EVERYWHERE, EVERYWHERE), (_RUN, _OUTPUTS, ROWS)),
}


class Programs:
    """Jitted step, restart, advance, unroll, until, reseed and relayout over rows.

    `step`, `reseed` and `relayout` are `Differentiable`.

    Args:
        env: the env over rows.
        transforms: what is fused into the programs, first to last.
        packed: give states out as two buffers; else leaf by leaf. Both are taken in.
        compiled: or else run operation by operation, as JAX does without ``jit``.
        shards: devices over which rows are spread. `until`, whose rows wait for each other, and the
            backward passes do not run over several.
        shared: name of the `Shared` of the env that this is a copy of.

    Programs are shared by envs that declare to be equal (`key`), and by copies. An env of which an attribute is set to
    something else is compiled again, and shares with no other from then on; arrays in attributes are not looked into.
    ``traces`` counts by name how often each was traced for this one.
    """

    def __init__(
        self,
        env: BatchedEnv,
        transforms: Sequence[FusableTransform] = (),
        *,
        packed: bool = True,
        compiled: bool = True,
        shards: Shards | None = None,
        shared: str | None = None,
    ):
        self.env = env
        self.transforms = tuple(transforms)
        self.packed = packed
        self.compiled = compiled
        self.shards = shards
        self._devices = 1 if shards is None else len(shards.devices)
        self.traces: dict[str, int] = {}
        self._functions: dict[str, tuple[Callable[..., Any], int]] = {}
        self.step = self._differentiable("step", self._step)
        self.restart = self._program("restart", self._restart)
        self.advance = self._program("advance", self._advance)
        self.reseed = self._differentiable("reseed", self._reseed)
        self.relayout = self._differentiable("relayout", self._relayout)
        self.unroll = self._program("unroll", self._unroll, static=3)
        self.until = self._program("until", self._until, static=4)
        self._objects = list(_objects_in(env.env))
        self._seen = self._attributes()
        self._shared: Shared | None = copied_from(shared)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy shares what is compiled, but for transforms, and counts its own traces."""
        make = partial(Programs, packed=self.packed, compiled=self.compiled, shards=self.shards)
        shared = None if self.transforms else self.shared.name
        return partial(make, shared=shared), (self.env, self.transforms)

    def over(self, env: BatchedEnv) -> Programs:
        """Return programs like these over other rows; what they trace is counted with what these did."""
        make = partial(Programs, packed=self.packed, compiled=self.compiled, shards=self.shards)
        programs = make(env, self.transforms)
        programs.traces = self.traces
        return programs

    @property
    def advancing(self) -> set[int]:
        """Numbers of rows that `advance` was traced for by an equal env, or that it is expected to be."""
        return self.shared.advancing

    @property
    def shared(self) -> Shared:
        """Programs of the env as it is now, of which attributes are compared by identity at each call."""
        seen = self._attributes()
        if len(seen) != len(self._seen) or not all(map(is_, seen, self._seen)):
            self._objects = list(_objects_in(self.env.env))
            self._seen, self._shared = self._attributes(), Shared()
        elif self._shared is None:
            self._shared = shared_by(self.key())
        return self._shared

    def _attributes(self) -> list[object]:
        held: list[object] = [transform._edits for transform in self.transforms]
        for one, computed in self._objects:
            pairs = vars(one).copy().items()  # another thread may add to it
            held += [part for pair in pairs if pair[0] not in computed for part in pair]
        return held

    def key(self) -> Hashable:
        """Return all that traces depend on, of an env that declares by `__eq__` which others it equals."""
        env = innermost = self.env.env
        while isinstance(innermost, EnvWrapper):
            innermost = innermost.env
        if type(innermost).__eq__ is object.__eq__:
            return object()
        if env.model_argument is not None:
            env = env.with_model(None)
        try:
            content = content_of(env)
        except UnlikeError:
            return object()
        like = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(self.env.template))
        transforms = tuple((transform, transform._edits) for transform in self.transforms)
        devices = None if self.shards is None else self.shards.devices
        form = self.packed, self.compiled, devices
        return env, content, self.env.axis, self.env.chunks, like, transforms, form

    def _program(self, name: str, function: Callable[..., Any], static: int = 0) -> Program:
        self._functions[name] = function, static
        return Program(name, self)

    def jit(self, name: str, traced: Callable[..., Any]) -> Callable[..., Any]:
        """Jit ``traced`` as this env needs the program of that name, on all of its devices."""
        if not self.compiled:
            return jax.disable_jit()(traced)
        static, what = self._functions[name][1], f"{name} of {simulator_name(self.env)}"
        if self.shards is None or name not in _SPREAD:
            return jit_with_note(traced, what, static_argnums=tuple(range(static)))
        return self.shards.jit(traced, what, *_SPREAD[name], static=static)

    def static(self, name: str) -> int:
        """Return how many of the first arguments of a program are static."""
        return self._functions[name][1]

    def trace(self, name: str, *args: object) -> PyTree:
        """Compute what the program of that name does, and count it."""
        self.traces[name] = self.traces.get(name, 0) + 1
        try:
            return self._functions[name][0](*args)
        finally:
            self._seen = self._attributes()  # what a trace keeps in an attribute is no change

    def _differentiable(self, name: str, function: Callable) -> Differentiable:
        run, vjp = self._program(name, function), self._program(f"{name}_vjp", vjp_of(function))
        return Differentiable(run, vjp)

    def env_given(self, model: object) -> BatchedEnv:
        """Return the env over rows, stepped with a model where that is an argument; None where it is not."""
        return self.env if model is None else self.env.with_model(model)

    def _rows(
        self, constants: Constants, root: Collection[Path] = (), remembered: Collection[Path] = ()
    ) -> NamedRows:
        each, counted, model = constants
        return NamedRows(self.env_given(model), self.transforms, each, counted, root, remembered)

    # ----------------------------------------------------------------------------------- programs

    def inputs_like(self, constants: Constants) -> tuple[ByPath, Any, ByPath]:
        """Return state, action and memory that `advance` takes, in form: shapes and dtypes of one row."""

        def inputs() -> tuple[ByPath, Any, ByPath]:
            state = self._write_state(self.env.packing.blank(1))
            return state, *self._rows(constants).blank_inputs(1)

        return jax.eval_shape(inputs)

    def _step(
        self, state: ByPath, action: object, memory: ByPath, constants: Constants
    ) -> dict[str, Any]:
        rows = self._rows(constants)
        before = rows.begin(self.read_state(state), memory)
        return self._outputs(*rows.step(before, action))

    def _restart(
        self, state: ByPath, mask: jax.Array, constants: Constants, follows: int | jax.Array
    ) -> dict[str, Any]:
        """Begin new episodes where ``mask`` is set; other rows keep their state and show anything.

        ``follows`` is `RESTART`, or `BEGIN` where rows have no episode yet, see `advance`.
        """
        rows, inner = self._rows(constants), self.read_state(state)
        origins = jax.lax.cond(
            follows == BEGIN, lambda: rows.env.first_origins(inner.key), lambda: inner.origin
        )
        return self._fresh(*rows.restart(mask, origins, inner, self._write_state))

    def _advance(
        self,
        state: ByPath,
        action: object,
        memory: ByPath,
        constants: Constants,
        follows: int | jax.Array,
    ) -> tuple[dict[str, Any], dict[str, Any], jax.Array]:
        """Step, then begin new episodes where one has ended; gives `next`, the root after it, and the flags of both.

        ``follows`` is `RESTART`. The same program is good for a step that nothing follows (`NOTHING`). It
        also serves a first episode in every row without a step before (`BEGIN`): then `next` means nothing, and only
        the key of the state is read. Not on a GPU, where the host would read at each step which of the two it is.
        """
        rows, inner = self._rows(constants), self.read_state(state)
        rows_here, first = inner.key.shape[0], rows.env.first_origins
        self.advancing.add(rows_here * self._devices)

        def before() -> RowState:
            # Read within the branch: what is read outside of it is laid out as its own arrays.
            return rows.begin(self.read_state(state), memory)

        def written(moment: tuple[RowState, Timestep]) -> tuple[RowState, Timestep]:
            after, timestep = moment
            return RowState(self._write_state(after.inner), {}, after.shared), timestep

        def begun() -> tuple[tuple[RowState, Timestep], Origin]:
            return written(rows.unstepped(before(), rows_here)), first(inner.key)

        def stepped() -> tuple[tuple[RowState, Timestep], Origin]:
            return written(rows.step(before(), action)), inner.origin

        if self.env.chunks.asks_first:
            (following, timestep), origins = jax.lax.cond(follows == BEGIN, begun, stepped)
        else:
            (following, timestep), origins = stepped()
        ended = (done_of(timestep) & (follows == RESTART)) | (follows == BEGIN)
        restarted, root = rows.restart_written(
            ended, origins, following, timestep, self._write_state
        )
        moment = {"state": following.inner, **self._shown(timestep)}
        fresh = self._fresh(restarted, root)
        return moment, fresh, jnp.concatenate([moment.pop("flags"), fresh.pop("flags")])

    def _reseed(self, state: ByPath, key: jax.Array) -> ByPath:
        rows = self.read_state(state)
        return self._write_state(replace(rows, key=self.env.row_keys(key, rows.key.shape[0])))

    def _relayout(self, state: ByPath) -> ByPath:
        """Convert a state of either layout into the one that is given out."""
        return self._write_state(self.read_state(state))

    def _unroll(
        self,
        steps: int,
        policy: Any,
        record_state: bool,
        begin: Begin,
        params: object,
        draws: jax.Array,
        constants: Constants,
    ) -> tuple[dict[str, Any], dict[str, Any], Any]:
        """Take many steps, restarting what is done; gives the run, the root after the last step and `carried`.

        ``draws`` has the words of the key of the run, then the number of its first step here.
        """
        key, start = draws[:-1], draws[-1]
        rows, carry = self._begun(begin, constants)
        carry, record = unroll(
            rows,
            carry,
            random_policy(rows) if policy is None else self._drawing_apart(policy),
            params,
            key,
            steps=steps,
            start=start,
            record_state=record_state,
        )
        return self._run(record), self._root_after(carry), carry[0].inner

    def _until(
        self,
        capacity: int,
        policy: Any,
        rule: StopRule,
        check_every: int,
        begin: Begin,
        params: object,
        key: jax.Array,
        start: PyTree,
        constants: Constants,
        counted: jax.Array,
        limit: jax.Array | int,
    ) -> tuple[dict[str, Any], dict[str, Any], Stopped]:
        """Take steps until rows are done, see `unroll_until`; gives what `_unroll` does, and the end."""
        rows, carry = self._begun(begin, constants)
        carry, record, stopped = unroll_until(
            rows,
            carry,
            policy or random_policy(rows),
            params,
            key,
            counted,
            rule=rule,
            capacity=capacity,
            limit=limit,
            start=start,
            check_every=check_every,
            record_state=True,
        )
        return self._run(record), self._root_after(carry), stopped

    def _drawing_apart(self, policy: Policy) -> Policy:
        """Wrap a policy so that it draws other numbers on every shard."""
        if self.shards is None:
            return policy
        return lambda params, observation, key: policy(
            params, observation, jax.random.fold_in(key, jax.lax.axis_index(AXIS))
        )

    def _begun(self, begin: Begin, constants: Constants) -> tuple[NamedRows, Any]:
        state, root, flags, remembered = begin
        rows = self._rows(constants, root, remembered)
        return rows, rows.resume(self.read_state(state), root | remembered, flags)

    def _root_after(self, carry: tuple[RowState, Timestep]) -> dict[str, Any]:
        return self._outputs(carry[0], replace(carry[1], reward={}))

    def _run(self, record: Transition) -> dict[str, Any]:
        root = Timestep(record.observation, {}, record.terminated, record.truncated, record.info)
        is_acted = isinstance(record.action, Acted)
        return {
            "root": {**self._shown(root), "state": self._name_buffers(record.state)},
            "next": {**self._shown(record.next), "state": self._name_buffers(record.next_state)},
            "action": None if is_acted else record.action,
            "written": record.action.written if is_acted else {},
        }

    # -------------------------------------------------------------------------------------- names

    def _outputs(self, state: RowState, timestep: Timestep) -> dict[str, Any]:
        return self._fresh(replace(state, inner=self._write_state(state.inner)), timestep)

    def _fresh(self, written: RowState, timestep: Timestep) -> dict[str, Any]:
        """Return the last moment of a program by name, of which the state of the env is written already."""
        shared = {"shared": written.shared} if any(written.shared) else {}
        return {"state": written.inner, **self._shown(timestep), **shared}

    def _shown(self, timestep: Timestep) -> dict[str, Any]:
        """List what a timestep of named rows shows; time, if any, stays in front of the rows."""
        flags = flags_of(timestep)
        if flags.ndim == 2:  # those of a run are copied by a CPU to have one more axis
            flags = flags[..., None]
        return {"leaves": timestep.observation | timestep.reward, "flags": flags}

    def _write_state(self, state: object) -> ByPath:
        if not self.packed:
            return self.name_leaves(state)
        return {(name,): buffer for name, buffer in self.env.packing.pack(state).items()}

    def _name_buffers(self, buffers: dict[str, jax.Array] | None) -> ByPath:
        if buffers is None:
            return {}
        if not self.packed:
            return self.name_leaves(self.env.packing.unpack(buffers))
        return {(name,): buffer for name, buffer in buffers.items()}

    def read_state(self, state: ByPath) -> PyTree:
        """Rebuild the state of rows that was given out, in either layout; any batch axes."""
        packing = self.env.packing
        if set(state) == set(PACKED):
            return packing.unpack({path[0]: buffer for path, buffer in state.items()})
        dtypes = {field.name: field.dtype for field in packing.fields}
        return packing.from_leaves(
            {name: _same_bits(leaf, dtypes[name]) for name, leaf in state.items()}
        )

    def name_leaves(self, state: object) -> ByPath:
        """Return the leaves of a state by path, unsigned ones reinterpreted as signed ones."""
        return {
            name: _same_bits(leaf, _SIGNED.get(leaf.dtype.name, leaf.dtype))
            for name, leaf in self.env.packing.leaves(state).items()
        }


def _objects_in(env: Any) -> Iterator[tuple[object, set[str]]]:
    """Yield an env and those inside it that may change, with the names of attributes that they compute themselves."""
    while env is not None:
        if hasattr(env, "__dict__") and not isinstance(env, EnvWrapper):
            members = [member for kind in type(env).__mro__ for member in vars(kind).items()]
            yield env, {name for name, value in members if isinstance(value, cached_property)}
        env = getattr(env, "env", None)


def _same_bits(leaf: jax.Array, dtype: np.dtype | str) -> jax.Array:
    return leaf if leaf.dtype == dtype else jax.lax.bitcast_convert_type(leaf, jnp.dtype(dtype))
