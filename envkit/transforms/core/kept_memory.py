"""Keep the memory of an env in the data unchanged, also when later transforms change what is shown.

An entry that is an output and a state of an env is its memory: the next step reads what the last one wrote. Who
declares an entry in both specs declares it so; transforms, users' transforms and base envs alike. Where a later
transform renames, changes or leaves out such an entry, `KeptMemory` comes before it: it copies the memory to another
name, and gives it back on the way in. This module decides when that is, and under which names.

Where hooks over leaves run, each transform is handed its own memory, read from where it travels (`places_of`), and
returns the new one among its changes (`through`).

Conventions
    path   where the memory is for the env that reads it.
    place  where it travels instead: below its own node, which no other transform writes to.
    chain  transforms of an env, first to last, with those of this module among them.
    root   what a step or a reset is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, count
from typing import Any

from tensordict import TensorDictBase

from envkit import rules
from envkit.arrays.leaves import Changes, Leaves, with_changes
from envkit.data.paths import Path, as_key, as_path, take_out
from envkit.data.resets import collect_reset_masks
from envkit.specs import Composite, TensorSpec
from envkit.transforms.core.fusable import FusableTransform
from envkit.transforms.core.transform import Transform

_NODE = "_memory"

Pairs = tuple[tuple[Path, Path], ...]
Specs = tuple[Composite, Composite]


class KeptMemory(FusableTransform):
    """Keep memory of the env before under other names, and give it back on the way in.

    A `TransformedEnv` puts it before transforms that change what is shown of the memory.

    Args:
        pairs: path and place of each entry.
    """

    _in_repr = ("pairs",)

    only_adds_done = True
    computes_only = True
    keeps_books = True

    def __init__(self, pairs: Pairs):
        super().__init__()
        self.pairs = pairs

    @property
    def _is_forward(self) -> bool:
        return True  # where the hooks over leaves run, transforms are handed their memory

    def step_leaves(self, root: Leaves, following: Leaves, constants: Mapping[str, Any]) -> Changes:
        return self.reset_leaves(following, constants)

    def reset_leaves(self, fresh: Leaves, constants: Mapping[str, Any]) -> Changes:
        found = ((place, fresh.get(path)) for path, place in self.pairs)
        return {place: value for place, value in found if value is not None}

    def _reset(self, td: TensorDictBase, td_reset: TensorDictBase) -> TensorDictBase:
        fresh = super()._reset(td, td_reset)
        env: Any = self.container
        masks = collect_reset_masks(td, env.done_levels, env.full_done_spec)
        for path, place in self.pairs:
            level, kept = rules.governing_level(path[:-1], masks), td.get(as_key(path), None)
            if level and kept is not None:  # the place is not below that level, as the path is
                value = fresh.get(as_key(place))
                mask = rules.reduce_mask(masks[level], value.shape, td.batch_dims)
                fresh.set(as_key(place), rules.choose(mask, value, kept))
        return fresh

    def outwards(self, td: TensorDictBase) -> TensorDictBase:
        """Show a root as transforms behind this one see it, or the other way round."""
        return self._inv_call(td.copy())

    def _inv_call(self, td: TensorDictBase) -> TensorDictBase:
        for pair in self.pairs:
            values = [td.get(as_key(path), None) for path in pair]
            for path, own, other in zip(pair, values, reversed(values), strict=True):
                if other is not None:
                    td.set(as_key(path), other)
                elif own is not None:
                    take_out(td, path)
        return td

    _reset_env_preprocess = _inv_call

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        states = input_spec["full_state_spec"].clone()
        for path, place in self.pairs:
            leaf = states[as_key(path)]
            take_out(states, path)
            states[as_key(place)] = leaf
        input_spec["full_state_spec"] = states
        return input_spec

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        shown = output_spec["full_observation_spec"].clone()
        for path, place in self.pairs:
            leaf = _shown_leaf(output_spec, path)
            assert leaf is not None
            shown[as_key(place)] = leaf.clone()
        output_spec["full_observation_spec"] = shown
        return output_spec


def _shown_leaf(outputs: Composite, path: Path) -> TensorSpec | None:
    kinds = ("full_observation_spec", "full_reward_spec")
    found = (outputs[kind].get(as_key(path), None) for kind in kinds if kind in outputs.keys())
    return next((leaf for leaf in found if leaf is not None), None)


def can_be_kept(path: Path) -> bool:
    """Check whether memory can travel elsewhere: the state that a stateless env shows as ``state`` cannot."""
    return path[0] != "state" or len(path) == 1


def is_kept(path: Path) -> bool:
    """Check whether an entry is one that `KeptMemory` wrote."""
    return path[0].startswith(_NODE)


def kept_before(transform: Transform, before: Specs, after: Specs) -> KeptMemory | None:
    """Return what must come before a transform so that it leaves memory alone; None where it does anyway.

    A transform that declares another input for an entry gives it back by itself, as one with ``in_keys_inv`` does.

    Args:
        transform: one of an env.
        before, after: input and output spec of the env before it, and behind it.
    """
    (inputs, outputs), (inputs_after, outputs_after) = before, after
    states, states_after = (spec["full_state_spec"] for spec in (inputs, inputs_after))
    given_back = set(map(as_path, [*transform.in_keys_inv, *transform.out_keys_inv]))
    written = set(map(as_path, transform._declared_keys))
    paths: list[Path] = []
    for key, leaf in states.items(True, True):
        path = as_path(key)
        shown, now = _shown_leaf(outputs, path), _shown_leaf(outputs_after, path)
        if shown is None or not can_be_kept(path) or path in given_back:
            continue
        if states_after.get(key, None) == leaf and (path in written or now != shown):
            paths.append(path)
    if not paths:
        return None
    taken = set(map(as_path, outputs["full_observation_spec"].keys(True, True)))
    names = chain([_NODE], (f"{_NODE}_{number}" for number in count(2)))
    node = next(name for name in names if not any((name, *path) in taken for path in paths))
    return KeptMemory(tuple((path, (node, *path)) for path in paths))


def places_of(chain: Sequence[Transform]) -> list[dict[Path, Path]]:
    """Return for each transform of a chain where the memory that its hooks over leaves read travels, by path."""
    places: list[dict[Path, Path]] = []
    moved: dict[Path, Path] = {}  # by what comes later
    for transform in reversed(chain):
        memory: Sequence[Path] = ()
        if isinstance(transform, KeptMemory):
            moved = moved | {path: moved.get(place, place) for path, place in transform.pairs}
        elif isinstance(transform, FusableTransform):
            memory = transform.memory()
        places.append({path: moved.get(path, path) for path in memory})
    return places[::-1]


def memory_of(places: Iterable[Mapping[Path, Path]]) -> list[Path]:
    """List the entries at the root that a chain reads, from what `places_of` returned."""
    return list(dict.fromkeys(place for own in places for place in own.values()))


def uncounted(transform: FusableTransform, seen: Leaves, memory: Leaves | None) -> dict[str, Any]:
    """Return the constants of a transform as they are; see `through`."""
    return {**transform.constants(), **transform.state()}


def through(
    chain: Sequence[FusableTransform],
    places: Sequence[Mapping[Path, Path]],
    leaves: dict[Path, Any],
    root: Mapping[Path, Any] | None,
    constants_of: Callable[[FusableTransform, Leaves, Leaves | None], Mapping[str, Any]],
) -> dict[Path, Any]:
    """Return what rows show behind a chain: after a step from ``root``, or after a reset.

    Args:
        chain: first to last.
        places: what `places_of` returned for it.
        leaves: what the env before shows, shape ``(rows, *event)``, by path.
        root: memory at the root of the step, by place; None after a reset.
        constants_of: returns the constants of a transform, which may count the rows that it sees for that.
    """
    for transform, own in zip(chain, places, strict=True):
        seen = Leaves(leaves, 1)
        if root is None:
            changes = transform.reset_leaves(seen, constants_of(transform, seen, None))
        else:
            handed: dict[Path, Any] = {}
            for path, place in own.items():  # a comprehension is one more call for each transform
                if place in root:
                    handed[path] = root[place]
            memory = Leaves(handed, 1)
            changes = transform.step_leaves(memory, seen, constants_of(transform, seen, memory))
        leaves = with_changes(leaves, changes)
    return leaves
