"""Text that is written token by token, as an env whose states are told apart by a hash of their history.

The hash of a history that grows by a token is made of the hash before and that token: equal histories have
equal hashes, and no prefix is hashed again. So trees of texts can be kept by hashes alone.

Conventions
    observation  int64, shape (*batch, length): the tokens so far; a step makes it longer by one.
    action       int64, shape (*batch, 1): the next token.
    hashing      int64, shape (*batch, 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, Unpack

import torch
from tensordict import TensorDict, TensorDictBase

from envkit.arrays.integers import as_int
from envkit.data.paths import Key
from envkit.env.base import EnvBase
from envkit.env.options import EnvOptions
from envkit.envs.seeded_env import Undrawn
from envkit.errors import (
    ArgumentError,
    ArgumentTypeError,
    InputError,
    OptionError,
    StepMaskError,
    UnknownStateError,
)
from envkit.specs import Categorical, Composite, NonTensor, Unbounded
from envkit.specs.annotations import Device, EnvData, require_memory
from envkit_bridges.worlds.native.siphash import siphash
from envkit_bridges.worlds.native.texts import written

HASHING = "hashing"


class Tokenizer(Protocol):
    """Protocol of objects that turn text into tokens and back; those of Hugging Face do."""

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""
        ...

    def __call__(self, text: object, /) -> Any:
        """Return the tokens of a string, or of each string of a list."""
        ...

    def decode(self, tokens: object, /) -> Any:
        """Return the string of some tokens."""
        ...

    def batch_decode(self, rows: object, /) -> Any:
        """Return the strings of rows of tokens."""
        ...


class LLMHashingEnv(Undrawn, EnvBase):
    """Write text; never done, and without a reward until a transform adds one.

    Args:
        vocab_size: number of tokens; None asks the tokenizer.
        hashing_module: function of int64 (*batch, n) that gives int64 (*batch,); SipHash by default, the same in
            every process.
        observation_key: of the tokens.
        text_output: show what the tokens say as text; this needs a tokenizer.
        tokenizer: called with a string or a list of them it gives tokens, as a tensor, lists, or a mapping that holds
            them under ``input_ids``; it has ``decode``, ``batch_decode``, and ``vocab_size`` where that is not given.
        text_key: of the text; None shows none.
        device: where data is.
        **options: see `envkit.env.options.EnvOptions`.

    A reset needs the tokens of a prompt in the data; `make_tensordict` makes it of text. All rows of a batch are
    equally long, so a step takes all of them.

    Raises:
        OptionError: (a TypeError) neither ``vocab_size`` nor ``tokenizer`` is given.
        ArgumentTypeError: (a TypeError) ``tokenizer`` or ``hashing_module`` cannot be used as one.
        UnknownStateError: (a RuntimeError) at a reset: there is no prompt.
        InputError: (a ValueError) at a reset: the prompt holds what is no token.
        StepMaskError: (a RuntimeError) at a step: only some rows are to be stepped.
        InputError: (a ValueError) at a step: the action is no token.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from envkit import LLMHashingEnv
        >>> env = LLMHashingEnv(vocab_size=100)
        >>> tokens = torch.tensor([[5, 7], [8, 9]])
        >>> prompt = TensorDict(observation=tokens, batch_size=[2])
        >>> td = env.rand_step(env.reset(prompt))
        >>> td["next", "observation"].shape, td["next", "hashing"].shape
        (torch.Size([2, 3]), torch.Size([2, 1]))
        >>> td["next", "observation"][:, :2]
        tensor([[5, 7],
                [8, 9]])
    """

    shows = "Print its text, or its tokens"
    _batch_locked = False
    _has_no_reward = True

    def __init__(
        self,
        vocab_size: int | None = None,
        *,
        hashing_module: Callable[[torch.Tensor], torch.Tensor] | None = None,
        observation_key: Key = "observation",
        text_output: bool = True,
        tokenizer: Tokenizer | None = None,
        text_key: Key | None = "text",
        device: Device | None = None,
        **options: Unpack[EnvOptions],
    ):
        super().__init__(device=device, **options)
        require_memory(self.device, type(self).__name__)
        _require_use(tokenizer, hashing_module, vocab_size)
        if vocab_size is None:
            if tokenizer is None:
                raise OptionError(
                    "LLMHashingEnv does not know how many tokens there are. Pass vocab_size=, or a tokenizer."
                )
            vocab_size = tokenizer.vocab_size
        size = as_int("vocab_size", vocab_size, least=1, meaning="the number of tokens")
        self.observation_key, self.tokenizer = observation_key, tokenizer
        self.text_key = text_key if text_output and tokenizer is not None else None
        self._hash = siphash if hashing_module is None else hashing_module
        place = {"device": self.device, "dtype": torch.int64}
        state = Composite({HASHING: Unbounded((1,), **place)})
        state[observation_key] = Categorical(size, (-1,), **place)
        shown = state.clone()
        if self.text_key is not None:
            shown[self.text_key] = NonTensor((), self.device, example_data="", batched=True)
        self.observation_spec_unbatched = shown
        self.state_spec_unbatched = state
        self.action_spec_unbatched = Categorical(size, (1,), **place)
        self.vocab_size = size

    def make_tensordict(self, input: str | list[str]) -> EnvData:
        """Begin with a text, or with a batch of texts of equally many tokens.

        Returns:
            The result of `reset`, batch size ``()`` for a string and ``(n,)`` for a list of n.

        Raises:
            UnknownStateError: (a RuntimeError) there is no tokenizer.
            ArgumentError: (a ValueError) the texts have different numbers of tokens.
        """
        if self.tokenizer is None:
            raise UnknownStateError(
                "make_tensordict() makes tokens of text, but there is no tokenizer. Pass tokenizer= to "
                "LLMHashingEnv, or the tokens to reset()."
            )
        tokens = self.tokenizer(input)
        tokens = _as_tokens(tokens["input_ids"] if isinstance(tokens, Mapping) else tokens)
        shape = torch.Size([]) if isinstance(input, str) else torch.Size([len(input)])
        td = TensorDict(batch_size=shape, device=self.device)
        return self.reset(td.set(self.observation_key, tokens.reshape(*shape, tokens.shape[-1])))

    def _reset(self, td: TensorDictBase | None) -> TensorDictBase:
        tokens = None if td is None else td.get(self.observation_key, None)
        if tokens is None or td is None:
            raise UnknownStateError(
                f"a reset of LLMHashingEnv begins with a prompt, but the data has no {self.observation_key!r}. "
                "Pass its tokens under that key, or env.make_tensordict('text')."
            )
        _require_tokens(tokens, self.vocab_size)
        tokens = tokens.to(torch.int64, copy=True)
        return self._shown(tokens, self._hash(tokens), td.batch_size)

    def _step(self, td: TensorDictBase) -> TensorDictBase:
        action = self._action_inputs["action"].take(td.get("action", None), td.batch_size)
        tokens = torch.cat([td.get(self.observation_key), action], -1)
        hashing = self._hash(torch.cat([td[HASHING], action], -1))
        return self._shown(tokens, hashing, td.batch_size)

    def _masked_next(self, td: TensorDictBase, mask: torch.Tensor) -> TensorDictBase:
        if bool(mask.any()) and not bool(mask.all()):
            raise StepMaskError(
                f"a _step mask leaves out {int((~mask).sum())} of {mask.numel()} rows, but those that are stepped "
                "grow longer than these. Step these rows alone: env.step(td[mask])."
            )
        return super()._masked_next(td, mask)

    def _shown(
        self, tokens: torch.Tensor, hashing: torch.Tensor, shape: torch.Size
    ) -> TensorDictBase:
        never = torch.zeros(*shape, 1, dtype=torch.bool, device=tokens.device)
        out = {HASHING: hashing.reshape(*shape, 1), "done": never, "terminated": never.clone()}
        td = TensorDict(out, shape, device=self.device).set(self.observation_key, tokens)
        if self.text_key is not None and self.tokenizer is not None:
            rows = tokens.reshape(-1, tokens.shape[-1])
            texts = self.tokenizer.batch_decode(rows) if shape else [self.tokenizer.decode(tokens)]
            td.set(self.text_key, written(texts, shape))
        return td

    def _set_seed(self, seed: int) -> None:
        """Only actions are random."""


def _require_use(tokenizer: object, hashing_module: object, vocab_size: int | None) -> None:
    asked = ["decode", "batch_decode", "__call__"]
    if vocab_size is None:
        asked.insert(0, "vocab_size")
    missing = [name for name in asked if not hasattr(tokenizer, name)]
    if tokenizer is not None and missing:
        raise ArgumentTypeError(
            f"tokenizer is of type {type(tokenizer).__name__}, which has no {', no '.join(missing)}. "
            "Pass an object that gives tokens when it is called with text, and has "
            f"{', '.join(asked[:-2])} and batch_decode."
        )
    if hashing_module is not None and not callable(hashing_module):
        raise ArgumentTypeError(
            f"hashing_module is {hashing_module!r}, of type {type(hashing_module).__name__}, which cannot be called. "
            "Pass a function of int64 (*batch, n) that gives int64 (*batch,), or None for SipHash."
        )


def _require_tokens(tokens: torch.Tensor, vocab_size: int) -> None:
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise InputError(
            f"the prompt is of dtype {tokens.dtype}, but tokens are integers. Convert it: prompt.long()."
        )
    unknown = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if unknown.numel():
        raise InputError(
            f"the prompt holds {int(unknown[0])}, but tokens go from 0 to {vocab_size - 1}. Pass a larger vocab_size, or "
            "the tokens of a tokenizer that fits."
        )


def _as_tokens(tokens: object) -> torch.Tensor:
    try:
        return torch.as_tensor(tokens, dtype=torch.int64)
    except (ValueError, TypeError) as error:
        raise ArgumentError(
            f"the tokenizer gave {tokens!r}, which is no tensor of tokens: texts of a batch must have equally many. "
            "Pad them, or begin with each text by itself."
        ) from error
