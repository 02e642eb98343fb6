"""One batch over several devices: every program runs shard by shard, and no shard waits for another.

Conventions
    shard   equal, neighbouring rows: device i holds rows ``i * n // devices`` onwards.
    spec    a `PartitionSpec`; ROWS and its fellows say which axis of an array the rows are.

Decided here: programs run under `jax.shard_map`, so XLA cannot introduce communication that was not
asked for. Data enters and leaves on one device, as torch tensors do, part by part; a run as one program crosses once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from envkit.errors import ArgumentError, ArgumentTypeError
from envkit_bridges.dlpack import jax_device_of, torch_device_of
from envkit_bridges.jax.compilation import jit_with_note

if TYPE_CHECKING:
    from envkit.functional.structure import PyTree

AXIS = "rows"
ROWS = PartitionSpec(AXIS)
FLAGS = PartitionSpec(None, AXIS)
EVERYWHERE = PartitionSpec()


def after_time(spec: PartitionSpec) -> PartitionSpec:
    """Return the spec of arrays with time in front."""
    return PartitionSpec(None, *spec)


class Shards:
    """Devices that share a batch.

    Args:
        devices: JAX devices of this process, or what torch calls them ("cuda:1").

    Raises:
        ArgumentError: none is given, one twice, one of another process, or of several platforms.
        ArgumentTypeError: ``devices`` is no list of devices.
    """

    def __init__(self, devices: Sequence[Any]):
        if not isinstance(devices, Sequence) or isinstance(devices, str):
            raise ArgumentTypeError(
                f"devices is {devices!r} of type {type(devices).__name__}, but must be a list of devices. "
                "Pass jax.local_devices(), or some of them."
            )
        for device in devices:
            if not isinstance(device, jax.Device | torch.device | str):
                raise ArgumentTypeError(
                    f"devices holds {device!r} of type {type(device).__name__}; expected devices of JAX, or torch's names of "
                    "them. Pass jax.local_devices(), or some of them: jax.local_devices()[:2]."
                )
        jax_devices = [
            device if isinstance(device, jax.Device) else jax_device_of(torch.device(device))
            for device in devices
        ]
        process = jax.process_index()
        if others := [device for device in jax_devices if device.process_index != process]:
            raise ArgumentError(
                f"devices holds {others}, of another process; expected devices of this one, process {process}. Pass "
                "jax.local_devices(): each process runs its own part of a batch."
            )
        if (
            not jax_devices
            or len(set(jax_devices)) != len(jax_devices)
            or len({d.platform for d in jax_devices}) > 1
        ):
            raise ArgumentError(
                f"devices={list(devices)} must be different devices of one platform, at least one. "
                "Pass jax.local_devices(), or some of them."
            )
        self.devices = tuple(jax_devices)
        self._mesh = Mesh(np.asarray(jax_devices), (AXIS,))

    def __reduce__(self) -> tuple[Any, ...]:
        return _shards_of, ([(device.platform, device.id) for device in self.devices],)

    def check(self, rows: int, device: torch.device | None, *, requires_grad: bool) -> None:
        """Refuse what cannot be spread.

        Raises:
            ArgumentError: the rows are no multiple of the devices, data is to be elsewhere than on the first
                of them, or gradients are wanted.
        """
        count, first = len(self.devices), torch_device_of(self.devices[0])
        if device != first:
            raise ArgumentError(
                f"data is to be on {device}, but the first of the devices is {first}. Leave device= out, or "
                f"pass {str(first)!r}."
            )
        if rows % count:
            raise ArgumentError(
                f"a batch of {rows} rows cannot be spread evenly over {count} devices. Choose a "
                f"batch_size that is a multiple of {count}."
            )
        if requires_grad:
            raise ArgumentError(
                "no gradients are computed over several devices. Pass requires_grad=False, or one device."
            )

    def jit(
        self,
        function: Callable[..., Any],
        what: str,
        takes: tuple[Any, ...],
        gives: object,
        *,
        static: int,
    ) -> Callable[..., Any]:
        """Jit a function that runs on every shard at the same time.

        Args:
            function: works on some rows.
            what: how its compilation is announced.
            takes: a spec, or a tree of specs, for each argument but the static ones.
            gives: the same for what it returns.
            static: how many arguments in front are static.

        Returns:
            A function that takes arguments wherever they are, and gives results on the first device.
        """

        def spread(*args: object) -> PyTree:
            fixed, arrays = args[:static], args[static:]
            on_shard = jax.shard_map(
                lambda *local: function(*fixed, *local),
                mesh=self._mesh,
                in_specs=takes,
                out_specs=gives,
                check_vma=False,
            )
            return on_shard(*arrays)

        compiled = jit_with_note(spread, what, static_argnums=tuple(range(static)))

        def hand_out(args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (*args[:static], *self._placed(args[static:], takes))

        joined = jax.jit(lambda parts: jax.tree.map(_join, gives, *parts, is_leaf=_is_spec))

        def call(*args: object) -> PyTree:
            return joined(self._parts_of(compiled(*hand_out(args))))

        call.lower = lambda *args: compiled.lower(*hand_out(args))  # type: ignore[attr-defined]
        return call

    def _placed(self, arguments: tuple[Any, ...], takes: tuple[Any, ...]) -> tuple[Any, ...]:
        """Place arguments where the shards want them."""

        def place(spec: PartitionSpec, tree: object) -> PyTree:
            return jax.device_put(tree, NamedSharding(self._mesh, spec))

        return jax.tree.map(place, takes, arguments, is_leaf=_is_spec)

    def _parts_of(self, results: object) -> list[Any]:
        """Move the part of each device to the first one, from GPU to GPU: a whole array would go through the host."""

        def part(device: object) -> PyTree:
            return jax.tree.map(lambda leaf: _on(leaf, device), results)

        return [jax.device_put(part(device), self.devices[0]) for device in self.devices]


def _on(leaf: jax.Array, device: object) -> jax.Array:
    """Return what of an array lies on a device."""
    return next(shard.data for shard in leaf.addressable_shards if shard.device == device)


def _join(spec: PartitionSpec, *parts: object) -> PyTree:
    """Put the rows of all devices behind each other."""
    axis = tuple(spec).index(AXIS)
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis), *parts)


def _is_spec(tree: object) -> bool:
    return isinstance(tree, PartitionSpec)


def _shards_of(named: list[tuple[str, int]]) -> Shards:
    """Find the devices of `Shards` that come from another process."""
    devices = {(device.platform, device.id): device for device in jax.devices(named[0][0])}
    missing = [
        f"{platform}:{number}" for platform, number in named if (platform, number) not in devices
    ]
    if missing:
        raise ArgumentError(
            f"an env that was spread over {len(named)} devices needs {missing}, which this process does not "
            "see. Build it here, with devices=jax.devices()."
        )
    return Shards([devices[name] for name in named])
