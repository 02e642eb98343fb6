"""The keys of an environment, read from its specs.

Conventions
    key    a string when it is not nested, else a tuple of strings.
    lists  leaf keys, sorted by depth, then by dot-joined name; read again after specs have changed.
    level  a node of the data tree that owns done leaves, named by its path: () is the root.
"""

from __future__ import annotations

from envkit import rules
from envkit.data.paths import Key, as_key, as_path, leaf_paths
from envkit.env.declared import SpecHolder
from envkit.env.table import SpecTable, levels_of
from envkit.errors import MissingKeyError

__all__ = ["KeyLists"]


class KeyLists(SpecHolder):
    """The part of an environment that names its entries."""

    def _keys_of(self, kind: str) -> list[Key]:
        spec_name = f"full_{kind}_spec"
        return self._cached(
            f"{kind}_keys", lambda: [as_key(path) for path in leaf_paths(getattr(self, spec_name))]
        )

    @property
    def action_keys(self) -> list[Key]:
        """Leaf keys of the action spec."""
        return self._keys_of("action")

    @property
    def reward_keys(self) -> list[Key]:
        """Leaf keys of the reward spec."""
        return self._keys_of("reward")

    @property
    def observation_keys(self) -> list[Key]:
        """Leaf keys of the observation spec."""
        return self._keys_of("observation")

    @property
    def state_keys(self) -> list[Key]:
        """Leaf keys of the state spec."""
        return self._keys_of("state")

    @property
    def done_keys(self) -> list[Key]:
        """Leaf keys of the done spec."""
        return self._keys_of("done")

    @property
    def action_key(self) -> Key:
        """The only action key; KeyError when there are several."""
        return self._only("action", self.action_keys)

    @property
    def reward_key(self) -> Key:
        """The only reward key; KeyError when there are several."""
        return self._only("reward", self.reward_keys)

    @property
    def done_key(self) -> Key:
        """The only key whose last part is ``"done"``; KeyError when several levels have one."""
        return self._only("done", [key for key in self.done_keys if as_path(key)[-1] == "done"])

    def _only(self, kind: str, keys: list[Key]) -> Key:
        if len(keys) != 1:
            raise MissingKeyError(
                f"env.{kind}_key needs exactly one {kind} entry, but the env has {keys}. "
                f"Use env.{kind}_keys, or name the key you mean."
            )
        return keys[0]

    @property
    def done_levels(self) -> dict[tuple[str, ...], list[str]]:
        """Names of the done leaves of each level, by the level's path, by depth."""

        return (
            self._table.levels if self._spec_locked else levels_of(leaf_paths(self.full_done_spec))
        )

    @property
    def _table(self) -> SpecTable:
        """What steps ask of the specs; see `table`."""
        table = self.__dict__.get("_held_table")
        if table is None:
            table = SpecTable.of(self)
            if self._spec_locked:
                self.__dict__["_held_table"] = table
        return table

    @property
    def reset_keys(self) -> list[Key]:
        """One ``(*level, "_reset")`` for each level that has done leaves."""
        return [as_key((*level, rules.RESET)) for level in self.done_levels]

    @property
    def done_keys_groups(self) -> list[list[Key]]:
        """The done leaves of each level, parallel to `reset_keys`."""
        return [
            [as_key((*level, name)) for name in names] for level, names in self.done_levels.items()
        ]
