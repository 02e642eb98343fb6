"""Entries made by a function of the user's, and hashes of entries with the way back.

Conventions
    plain  what is inside a NonTensorData or a stack of them: an object, or a list with one for each row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase

from envkit.data.arguments import as_bool, require_callable
from envkit.data.plain import from_plain, plain
from envkit.errors import MissingKeyError, StatisticsError
from envkit.specs import NonTensor, TensorSpec, Unbounded, make_composite_from_td
from envkit.transforms.core.leafwise import LeafTransform
from envkit.transforms.core.transform import Keys


class UnaryTransform(LeafTransform):
    """Write what a function makes of each entry.

    The function is also called with values of zeros (or the example of a spec without tensors) when specs are
    read: what it gives then says which spec the outcome has. It is an unbounded one.

    Args:
        in_keys, out_keys: entries the env gives, and where the outcomes go.
        in_keys_inv, out_keys_inv: actions and states of the env, and the user's entries they are made of.
        fn: function of a value (a tensor, or the object of an entry without tensors) that gives a tensor, a
            TensorDict, a string or another object.
        inv_fn: function that makes an entry of the env of the user's; ``fn`` by default.
        use_raw_nontensor: hand over entries without tensors as `NonTensorData`.

    Example:
        >>> from envkit import GymEnv, UnaryTransform
        >>> length = UnaryTransform(
        ...     in_keys=["observation"], out_keys=["length"], fn=lambda value: value.norm()
        ... )
        >>> env = GymEnv("CartPole-v1").append_transform(length)
        >>> env.rollout(3)["length"].shape
        torch.Size([3])
        >>> env.close()
    """

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        *,
        fn: Callable[[Any], Any],
        inv_fn: Callable[[Any], Any] | None = None,
        use_raw_nontensor: bool = False,
    ):
        super().__init__(in_keys, out_keys, in_keys_inv, out_keys_inv)
        is_inverse_alone = inv_fn is not None and not self.in_keys
        require_callable("fn", fn, is_optional=is_inverse_alone)
        require_callable("inv_fn", inv_fn, is_optional=True)
        self.fn: Callable[..., Any] = fn
        self.inv_fn = fn if inv_fn is None else inv_fn
        self.use_raw_nontensor = as_bool("use_raw_nontensor", use_raw_nontensor)

    @property
    def only_adds_done(self) -> bool:  # type: ignore[override]
        """False where the function writes done flags."""
        parent = self.parent
        return parent is None or not set(self.out_keys) & set(parent.done_keys)

    def _as_python(self, value: object) -> Any:
        if self.use_raw_nontensor or not isinstance(value, NonTensorData | NonTensorStack):
            return value
        return value.tolist()  # a list for a batch, also where all rows share one object

    def _apply_transform(self, value: object) -> Any:
        return self.fn(self._as_python(value))

    def _inv_apply_transform(self, value: Any) -> Any:
        return self.inv_fn(self._as_python(value))

    def _leaf_after(self, leaf: TensorSpec) -> TensorSpec:
        return self._spec_of(self.fn(self._example(leaf)), leaf)

    _leaf_before = _leaf_after

    def _example(self, leaf: TensorSpec) -> Any:
        return self._as_python(leaf.zero())

    def _spec_of(self, value: object, leaf: TensorSpec) -> TensorSpec:
        batch = self._batch
        if isinstance(value, TensorDictBase):
            return make_composite_from_td(value)
        if isinstance(value, torch.Tensor):
            return Unbounded(value.shape, value.device, value.dtype)
        example = value[0] if isinstance(value, list) and batch else value
        return NonTensor(batch, leaf.device, example_data=example)


class Hash(UnaryTransform):
    """Write a hash of each entry, and on the way in find the entry that a hash was made of.

    Args:
        in_keys, out_keys: entries of the env, and their hashes.
        in_keys_inv, out_keys_inv: entries of the env, and the hashes the user gives for them.
        hash_fn: function ``(value)``, or ``(value, seed)`` where there is a seed, that gives a tensor;
            `reproducible_hash` by default.
        seed: second argument of the function.
        use_raw_nontensor: see `UnaryTransform`.
        repertoire: the values by their hashes, as tuples; it is filled by what is hashed, and may be shared.
            There is one by default where there are inverse keys.

    Raises:
        StatisticsError: (a RuntimeError) a value is looked for, but there is no repertoire.
        MissingKeyError: the repertoire does not have it.

    Example:
        >>> from tensordict import TensorDict
        >>> from envkit import Hash
        >>> data = Hash(in_keys=["text"], out_keys=["hash"])(TensorDict(text="a move"))
        >>> data["hash"].shape, data["hash"].dtype
        (torch.Size([32]), torch.uint8)
    """

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_keys_inv: Keys = None,
        out_keys_inv: Keys = None,
        *,
        hash_fn: Callable[..., torch.Tensor] | None = None,
        seed: Any | None = None,
        use_raw_nontensor: bool = False,
        repertoire: dict[tuple[int, ...], Any] | None = None,
    ):
        hashes = self.reproducible_hash if hash_fn is None else hash_fn
        super().__init__(
            in_keys,
            out_keys,
            in_keys_inv,
            out_keys_inv,
            fn=hashes,
            use_raw_nontensor=use_raw_nontensor,
        )
        self.seed = seed
        self.repertoire = {} if repertoire is None and self.in_keys_inv else repertoire

    def _hashed(self, value: object) -> torch.Tensor:
        return self.fn(value) if self.seed is None else self.fn(value, self.seed)

    def _apply_transform(self, value: object) -> torch.Tensor:
        return self.call_hash_fn(self._as_python(value))

    def _inv_apply_transform(self, value: torch.Tensor) -> Any:
        return self.get_input_from_hash(value)

    def _leaf_after(self, leaf: TensorSpec) -> TensorSpec:
        return self._spec_of(self._hashed(self._example(leaf)), leaf)

    _leaf_before = _leaf_after

    def call_hash_fn(self, value: object) -> torch.Tensor:
        """Hash a value, and note it in the repertoire, if there is one.

        Args:
            value: of an in_key, a tensor or an object.
        """
        found = self._hashed(value)
        if self.repertoire is not None:
            self.repertoire[self.hash_to_repertoire_key(found)] = value
        return found

    def get_input_from_hash(self, hash_tensor: torch.Tensor) -> Any:
        """Return the value that a hash was made of.

        Args:
            hash_tensor: of a value that was hashed.

        Example:
            >>> from envkit import Hash
            >>> hashing = Hash(in_keys=["text"], out_keys=["hash"], repertoire={})
            >>> hashing.get_input_from_hash(hashing.call_hash_fn("a move"))
            'a move'
        """
        if self.repertoire is None:
            raise StatisticsError(
                "Hash has no repertoire, which holds the value of each hash. Pass repertoire={} before "
                "anything is hashed."
            )
        key = self.hash_to_repertoire_key(hash_tensor)
        if key not in self.repertoire:
            raise MissingKeyError(
                f"the hash {key} is not among the {len(self.repertoire)} values of the repertoire. Pass the hash of a value "
                "that this transform has hashed."
            )
        return self.repertoire[key]

    @staticmethod
    def hash_to_repertoire_key(hash_tensor: torch.Tensor) -> Any:
        """Write a hash as nested tuples of numbers, the keys of the repertoire.

        Args:
            hash_tensor: a tensor of numbers.

        Example:
            >>> import torch
            >>> from envkit import Hash
            >>> Hash.hash_to_repertoire_key(torch.tensor([[1, 2], [3, 4]]))
            ((1, 2), (3, 4))
        """
        return _tuples(hash_tensor.tolist())

    @staticmethod
    def reproducible_hash(string: object, seed: Any | None = None) -> torch.Tensor:
        """Return the SHA-256 of a string, after a seed: uint8, shape (32,).

        None counts as an empty string, any other object as what ``str`` makes of it.

        Args:
            string: text, or an object.
            seed: text or a number that changes all hashes; None: none.

        Example:
            >>> from envkit import Hash
            >>> Hash.reproducible_hash("a move").shape
            torch.Size([32])
        """
        text = "" if string is None else str(string)
        text = text if seed is None else f"{seed}{text}"
        return torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)

    def get_extra_state(self) -> dict[Any, Any] | None:
        """Return the repertoire, for `state_dict`, in the form that `plain` gives it."""
        return plain(self.repertoire, "the repertoire of Hash")

    def set_extra_state(self, state: dict[Any, Any] | None) -> None:
        """Take a repertoire over, from `load_state_dict`."""
        self.repertoire = from_plain(state)


def _tuples(numbers: object) -> Any:
    return tuple(map(_tuples, numbers)) if isinstance(numbers, list) else numbers
