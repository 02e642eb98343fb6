"""pgx's board games, card games and MinAtar as stateless envs: players take turns, one step a move.

Conventions
    player   index of a seat, 0 to ``num_players - 1``. Who moves first in an episode, each game draws.
    state    pgx's own without its observation, which the data shows; and the key from which steps draw chance (dice, cards).
    illegal  an action that ``legal_action_mask`` does not allow. pgx ends the game then: the player who took it is paid
             a penalty, the others share it.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack, get_args
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import torch

from envkit.data.arguments import require_option
from envkit.env.facts import Facts
from envkit.errors import ArgumentError, RenderingError
from envkit.functional import Discrete, Timestep
from envkit.specs import Categorical
from envkit.specs.annotations import Device
from envkit_bridges.jax.options import JaxOptions
from envkit_bridges.jax.simulator import DrawingState, SimulatorCore, SimulatorEnv
from envkit_bridges.libraries import (
    EnvNames,
    Simulator,
    no_object_of,
    quietly,
    require,
    require_name,
    require_quietly,
)
from envkit_bridges.offscreen import be_silent

if TYPE_CHECKING:
    from envkit.functional.structure import PyTree

Illegal = Literal["raise", "library"]
_ILLEGAL, _PLAYER = "illegal_action", "current_player"
_HREF = "{http://www.w3.org/1999/xlink}href"
_FONT = "DejaVu Sans Mono"  # comes with matplotlib
# fonts with a box for every letter
_BOXES = frozenset(("Last Resort", "Last Resort High-Efficiency"))
_LEAST = 240  # pixels of a side of a PNG picture, whose own are cells


@dataclass(frozen=True)
class PgxCore(SimulatorCore):
    """A game of pgx as a `StatelessEnv`.

    ``action_space``: the moves of the game, legal ones or not.
    """

    action_space: Any = None
    action_masks: ClassVar = (((), ("action_mask",)),)

    @property
    def reward_shape(self) -> dict[str, tuple[int, ...]]:
        """One of the player who moved, and one of each player."""
        return {"reward": (), "player_reward": (self.env.num_players,)}

    def reset(self, key: jax.Array) -> tuple[DrawingState, Timestep]:
        """Begin a game by pgx's ``init``."""
        episode, draws = jax.random.split(key)
        state = self.env.init(episode)
        return DrawingState(_bare(state), draws, jnp.int32(0)), _shown(state, False)

    def step(self, state: DrawingState, action: jax.Array) -> tuple[DrawingState, Timestep]:
        """Move by pgx's ``step``; its key is that of this step."""
        before = state.inner
        after = self.env.step(before, action, state.key)
        paid = {"reward": after.rewards[before.current_player], "player_reward": after.rewards}
        is_illegal = jnp.logical_not(before.legal_action_mask[action])
        return state.after(_bare(after)), _shown(after, is_illegal, paid)

    def render(self, states: Sequence[Any]) -> list[np.ndarray]:
        """Draw by pgx's own drawings; those of shogi need a font with Japanese letters."""
        frames = []
        for state in states:
            whole = jax.tree.map(jnp.asarray, state)
            whole = whole.replace(observation=self.env.observe(whole))
            with quietly():
                drawing = whole.to_svg()
            frames.append(frame_of(drawing))
        return frames


def _bare(state: PyTree) -> PyTree:
    """Remove the observation, which no step reads: a program would carry it twice."""
    return state.replace(observation=None)


def _shown(state: PyTree, is_illegal: PyTree, paid: PyTree = 0.0) -> Timestep:
    observation = {
        "observation": state.observation,
        "action_mask": state.legal_action_mask,
        _PLAYER: state.current_player.astype(jax.dtypes.canonicalize_dtype(jnp.int64)),
        _ILLEGAL: jnp.asarray(is_illegal)[None],
    }
    truncated = state.truncated & jnp.logical_not(state.terminated)
    return Timestep(observation, paid, state.terminated, truncated)


class PgxOptions(JaxOptions, total=False):
    """Keywords of pgx's games, those of every env over JAX (`envkit_bridges.jax.options.JaxOptions`) included.

    Args:
        illegal: what follows an illegal action. "raise": an error, after the step, or after the run that it is part of.
            "library": what pgx does, see `PgxWrapper`.
        categorical_action_encoding: moves as integers, or one-hot.
    """

    illegal: Illegal
    categorical_action_encoding: bool


class PgxWrapper(SimulatorEnv):
    """Give a game object of pgx the TensorDict interface, for any batch size. One step is a move of one player.

    Entries beside ``observation``, which is what the player sees who is to move, at the root and under ``next``:

    - ``action_mask``: bool (*batch, actions), the legal actions; all are where the game is over. Random actions are
      legal ones.
    - ``current_player``: int64 (*batch,), who is to move.
    - ``illegal_action``: bool (*batch, 1), under ``next`` whether the action of this step was illegal.

    Under ``next`` alone: ``reward``, float32 (*batch, 1), that of the player who moved, and ``player_reward``, float32
    (*batch, players), that of each.

    An illegal action is an error after the step or the run, see `envkit_bridges.worlds.pgx.PgxOptions`. With ``illegal="library"`` pgx's rule
    applies: the game is over, and the player who took it is paid a penalty, -1 in most games.

    Args:
        env: a game of pgx, as `pgx.make` gives it.
        device: where data and simulation are; None takes the CPU.
        **options: see `envkit_bridges.worlds.pgx.PgxOptions`.

    Unknown public attributes are looked up on the game.

    Raises:
        ArgumentTypeError: (a TypeError) ``env`` is no game of pgx.
        ArgumentError: ``illegal`` is none of the two, or ``action_repeat`` would make a move for several players.

    Example:
        >>> import pgx
        >>> from envkit import PgxWrapper
        >>> env = PgxWrapper(pgx.make("connect_four"), batch_size=[3])
        >>> data = env.rollout(5)
        >>> data["next", "player_reward"].shape
        torch.Size([3, 5, 2])
    """

    libname = "pgx"

    def __init__(
        self, env: Simulator, *, device: Device | None = None, **options: Unpack[PgxOptions]
    ):
        if not isinstance(env, require("pgx").Env):
            raise no_object_of("a game object of pgx", "Pgx", env)
        keywords: dict[str, Any] = {"categorical_action_encoding": True, **options}
        self.illegal: Illegal = keywords.pop("illegal", "raise")
        fix = "Pass 'raise' for an error after an illegal action, or 'library' for what pgx does."
        require_option("illegal", self.illegal, get_args(Illegal), fix=fix)
        if env.num_players > 1 and keywords.get("action_repeat", 1) != 1:
            raise ArgumentError(
                f"action_repeat is {keywords['action_repeat']}, but the {env.num_players} players of {env.id!r} take turns: "
                "an action of one would be repeated by the others. Leave action_repeat out."
            )
        state = jax.eval_shape(env.init, jax.eval_shape(lambda: jax.random.PRNGKey(0)))
        core = PgxCore(env, self._maker, Discrete(state.legal_action_mask.shape[0]))
        super().__init__(core, device=device, **keywords)
        self._engine.settings.illegal = _ILLEGAL if self.illegal == "raise" else None

    def _declare(self) -> None:
        super()._declare()
        players = Categorical(
            self._env.num_players, shape=self.batch_size, dtype=torch.int64, device=self.device
        )
        shown = self.full_observation_spec.clone()
        shown[_PLAYER] = players
        self.observation_spec = shown
        self._engine.wide = {(_PLAYER,): torch.int64}

    def _find_facts(self) -> Facts:
        facts = super()._find_facts()
        return replace(facts, infos=facts.infos | {(_ILLEGAL,)})


def env_names() -> list[str]:
    """List the games that `pgx.make` knows."""
    return sorted(require_quietly("pgx").available_envs())


class PgxEnv(PgxWrapper):
    """Make a game of pgx by name; see `PgxWrapper` for its entries.

    Args:
        env_name: its name, e.g. "connect_four".
        device: where data and simulation are; None takes the CPU.
        **options: see `envkit_bridges.worlds.pgx.PgxOptions`.

    Raises:
        ArgumentError: (a ValueError) pgx has no game of that name.

    Example:
        >>> from envkit import PgxEnv
        >>> env = PgxEnv("tic_tac_toe", batch_size=[3])
        >>> env.reset()["action_mask"].shape
        torch.Size([3, 9])
    """

    available_envs: ClassVar[Sequence[str]] = EnvNames(env_names)  # type: ignore[assignment]

    def __init__(
        self, env_name: str, *, device: Device | None = None, **options: Unpack[PgxOptions]
    ):
        require_name("pgx", env_name, env_names())
        self.env_name, self._maker = env_name, partial(_game, env_name)
        super().__init__(self._maker(), device=device, **options)


def _game(name: str) -> Simulator:
    with quietly():
        return require("pgx").make(name)


def frame_of(drawing: str) -> np.ndarray:
    """Draw an SVG text on white.

    pygame draws the shapes of an SVG file, and neither letters nor pictures inside it. So letters become outlines, drawn
    with matplotlib's fonts, and drawings inside a drawing become a part of it, before pygame sees it. A drawing that
    shows a PNG picture is that picture.

    Args:
        drawing: shapes, text, and drawings and PNG pictures as ``data:`` URIs.

    Returns:
        uint8 (H, W, 3), of the size that the drawing says.

    Raises:
        MissingLibraryError: (an ImportError) pygame or matplotlib is not installed.
        RenderingError: (a RuntimeError) no font here has one of its letters.

    Example:
        >>> from envkit_bridges.worlds.pgx import frame_of
        >>> dot = '<circle cx="4" cy="4" r="3" fill="red"/>'
        >>> svg = f'<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8">{dot}</svg>'
        >>> frame_of(svg)[4, 4].tolist()
        [255, 0, 0]
    """
    root = _tree_of(drawing)
    for parent in list(root.iter()):
        for place, child in enumerate(list(parent)):
            if child.tag == "text":
                parent[place] = _outlined(child)
            elif child.tag == "image":
                kind, _, data = child.attrib[_HREF].partition("base64,")
                if "svg" not in kind:
                    return _enlarged(_pixels(base64.b64decode(data), "picture.png"))
                parent[place] = _inlined(child, base64.b64decode(data))
    return _pixels(ElementTree.tostring(root), "drawing.svg")


def _tree_of(drawing: str | bytes) -> ElementTree.Element:
    """Read an SVG file; pygame knows tags without a namespace only."""
    root = ElementTree.fromstring(drawing)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root


def _pixels(file: bytes, name: str) -> np.ndarray:
    be_silent()
    pygame: Any = require_quietly("pygame")
    drawn = pygame.image.load(io.BytesIO(file), name)
    page = pygame.Surface(drawn.get_size())
    page.fill("white")
    page.blit(drawn, (0, 0))
    return pygame.surfarray.array3d(page).swapaxes(0, 1).copy()


def _enlarged(cells: np.ndarray) -> np.ndarray:
    times = -(-_LEAST // min(cells.shape[:2]))
    return cells.repeat(times, 0).repeat(times, 1)


def _inlined(image: ElementTree.Element, file: bytes) -> ElementTree.Element:
    """Return a drawing inside a drawing as a group of shapes, as large as there is room for, in the middle."""
    inner = _tree_of(file)
    sizes = inner.attrib.get("viewBox", f"0 0 {inner.get('width')} {inner.get('height')}").split()
    left, top, width, height = map(float, sizes)
    x, y, wide, high = (_number(image.get(name, "0")) for name in ("x", "y", "width", "height"))
    scale = min(wide / width, high / height)
    x, y = x + (wide - scale * width) / 2, y + (high - scale * height) / 2
    own = {key: value for key, value in inner.attrib.items() if key in ("fill", "stroke", "style")}
    place = f"translate({x - scale * left} {y - scale * top}) scale({scale})"
    group = ElementTree.Element("g", {**own, "transform": place})
    group.extend(list(inner))
    return group


def _outlined(text: ElementTree.Element) -> ElementTree.Element:
    """Return a line of text as one shape."""
    letters = text.text or ""
    size = _number(text.get("font-size", "16"))
    outline: Any = require("matplotlib.textpath").TextPath(
        (0, 0), letters, size, prop=_font(letters)
    )
    steps = "".join(
        f"{'MLQC'[min(code, 4) - 1] if code < 5 else 'Z'}{' '.join(map(str, points)) if code < 5 else ''}"
        for points, code in outline.iter_segments(simplify=False)
    )
    x, y = (_number(text.get(name, "0")) for name in ("x", "y"))
    shown = {key: value for key, value in text.attrib.items() if key in ("fill", "style")}
    place = f"{text.get('transform', '')} translate({x} {y}) scale(1 -1)".strip()
    return ElementTree.Element("path", {**shown, "d": steps, "transform": place})


def _number(text: str) -> float:
    return float(text.removesuffix("px"))


@lru_cache
def _font(letters: str) -> Any:
    """Find a font that has these letters, matplotlib's own first."""
    manager: Any = require("matplotlib.font_manager")
    own = manager.findfont(_FONT)
    others = (font.fname for font in manager.fontManager.ttflist if font.name not in _BOXES)
    for file in (own, *others):
        charmap = manager.get_font(file).get_charmap()
        if all(ord(letter) in charmap for letter in letters):
            return manager.FontProperties(fname=file)
    raise RenderingError(
        f"the drawing has the letters {letters!r}, and no font here has them. Install one that does, for Chinese and "
        "Japanese letters e.g. Noto Sans CJK (Debian, Ubuntu: apt-get install fonts-noto-cjk)."
    )
