"""Every operation on specs of every kind gives the same in both libraries.

`KEPT` lists by name of a line of `docs/deviations.md` for which kinds of specs an operation differs; the last
tests show one example of each line, and a slow one that no entry for a leaf is there in vain.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack

from tests.reference.compare import OURS, check_same, check_works_alike, difference, differs
from tests.reference.specs.operations import OF_ALL, OF_TREES
from tests.reference.specs.recipes import LEAF_KINDS, choices, composites, leaves, stacks

FAMILIES = {
    **{kind: leaves(kinds=[kind]) for kind in LEAF_KINDS},
    "composite": composites(),
    "stack": stacks(),
    "choice": choices(),
}
OPERATIONS = dict.fromkeys(FAMILIES, OF_ALL) | {"composite": {**OF_ALL, **OF_TREES}}

KEPT: dict[str, dict[str, tuple[str, ...]]] = {
    "all-specs-answer": {
        "flatten": ("multi-categorical", "composite"),
        "unflatten": ("multi-categorical", "composite"),
        "project beyond": ("masked", "one-hot", "multi-one-hot", "composite"),
        "what is beyond is changed in place": ("composite",),
        "what lies beyond is in": ("masked",),
        "memoized encode": ("object", "composite"),
        "to_one_hot": ("flag", "one-hot", "multi-one-hot", "masked one-hot", "binary", "composite"),
        "to_categorical": ("one-hot", "multi-one-hot", "masked one-hot", "binary", "composite"),
        "to_one_hot_spec": ("binary", "composite"),
        "to_categorical_spec": ("binary", "composite"),
        "cardinality": ("unbounded", "unbounded integers"),
    },
    "integers-are-counted": {
        "enumerate": ("bounded integers", "binary", "composite"),
        "cardinality": ("bounded integers", "binary", "composite"),
    },
    "masks-follow": {
        "what lies beyond is in": ("masked one-hot",),
        "to another dtype": ("masked",),
    },
    "values-have-the-dtype": {"enumerate": ("flag",), "ones written": ("composite",)},
    "objects-are-not-repeated": {
        "zeros in front": ("object", "composite"),
        "ones in front": ("object", "composite"),
        "shape assigned": ("object",),
        "to_numpy": ("object", "composite"),
    },
    "empty-trees-stay": {"one": ("composite",), "pop": ("composite",)},
}
MASKS_LOST = (  # theirs have no mask after these
    *("expand", "expand with a tuple", "expand to itself", "reshape to itself", "view", "flatten"),
    *("unflatten", "squeeze", "unbind", "index", "negative index", "slice", "index with a list"),
    *("index with a tensor", "new axis", "index_select", "stack", "to_one_hot_spec"),
)
SAME_FOR_STACKS = (  # theirs have few operations on stacks
    *(
        "itself",
        "ndim",
        "expand",
        "expand with a tuple",
        "expand to itself",
        "unsqueeze",
        "squeeze",
    ),
    *("stack", "clone", "equals its clone", "equals others", "equals its deep copy"),
    *("index out of range", "index_select out of range"),
    *("equals its pickle", "to another dtype", "to the CPU", "to nothing", "clear_device_", "repr"),
)

NOT_OF_CHOICES = (  # theirs have none of these, list members one by one, and forget a shape that is assigned
    *(
        "one",
        "ones in front",
        "project beyond",
        "unbind",
        "index",
        "negative index",
        "slice",
        "new axis",
    ),
    *(
        "index with a list",
        "index with a tensor",
        "index out of range",
        "index_select",
        "enumerate",
    ),
    *("cardinality", "to_one_hot", "to_one_hot_spec", "to_categorical", "to_categorical_spec"),
    "shape assigned",
)


def agreeing(family: str) -> dict:
    """The operations that give the same for a family of specs."""
    kept = {op for table in KEPT.values() for op, families in table.items() if family in families}
    if family == "masked":
        kept |= set(MASKS_LOST)
    if family == "choice":
        kept |= set(NOT_OF_CHOICES)
    if family == "stack":
        kept |= set(OF_ALL) - set(SAME_FOR_STACKS)
    return {name: op for name, op in OPERATIONS[family].items() if name not in kept}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_operation_gives_the_same(family):
    operations = agreeing(family)

    @settings(max_examples=40, derandomize=True)
    @given(recipe=FAMILIES[family], name=st.sampled_from(sorted(operations)))
    def check(recipe, name):
        check_same(lambda n: operations[name](n, recipe(n)))

    check()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", LEAF_KINDS)
def test_all_operations_give_the_same_but_those_kept_which_do_not(family):
    operations, unlike = agreeing(family), set()

    @settings(max_examples=20, suppress_health_check=list(HealthCheck))
    @given(recipe=FAMILIES[family])
    def check(recipe):
        for operation in operations.values():
            check_same(lambda n, operation=operation: operation(n, recipe(n)))
        for name in OPERATIONS[family].keys() - operations.keys() - unlike:
            if difference(lambda n, name=name: OPERATIONS[family][name](n, recipe(n))):
                unlike.add(name)

    check()
    assert unlike == OPERATIONS[family].keys() - operations.keys()


# -- one example of each line ----------------------------------------------------------


def test_every_spec_answers():
    differs("all-specs-answer", lambda n: n.MultiCategorical([2, 3]).expand(2, 3, 2).flatten(0, 1))
    differs("all-specs-answer", lambda n: n.Unbounded(3).numel())
    differs("all-specs-answer", lambda n: n.Unbounded(3).cardinality())
    differs("all-specs-answer", lambda n: n.Bounded(0, 1, (3,)).is_in(None))
    differs("all-specs-answer", lambda n: n.Composite(a=n.OneHot(3)).to_categorical_spec())
    differs(
        "all-specs-answer",
        lambda n: torch.stack([n.Bounded(0, 1, (4,)), n.Bounded(0, 2, (4,))]).reshape(2, 2, 2),
    )
    differs("all-specs-answer", lambda n: n.OneHot(3).project(torch.zeros(3, dtype=torch.bool)))


def test_integers_are_counted():
    differs("integers-are-counted", lambda n: n.Bounded(0, 3, (), dtype=torch.int64).cardinality())
    differs("integers-are-counted", lambda n: n.Binary(3).enumerate())
    differs("integers-are-counted", lambda n: n.Composite().cardinality())


def test_masks_follow():
    mask = torch.tensor([True, False, True])

    differs("masks-follow", lambda n: n.Categorical(3, mask=mask).expand(2))
    differs("masks-follow", lambda n: n.OneHot(3, mask=mask).is_in(torch.tensor([0, 1, 0]).bool()))


def test_values_have_the_dtype_of_their_spec():
    differs("values-have-the-dtype", lambda n: n.Categorical(2, dtype=torch.bool).enumerate())


def test_objects_are_not_repeated():
    differs("objects-are-not-repeated", lambda n: n.NonTensor((1,), example_data="a").zero((2,)))
    differs("objects-are-not-repeated", lambda n: tuple(n.NonTensor().shape))


def test_specs_are_moved_to_the_device_of_their_tree():
    def moved(library):
        tree = library.Composite(device="meta")
        tree["a", "b"] = library.Bounded(0, 1, (3,), device="cpu")
        return str(tree["a", "b"].device), str(tree["a", "b"].space.low.device)

    def from_elsewhere(library):
        return str(
            library.Composite({"a": library.Unbounded(3, device="meta")}, device="cpu")["a"].device
        )

    assert "envkit: ['meta', 'meta']" in differs("specs-are-moved", moved)
    assert "envkit: 'cpu'" in differs("specs-are-moved", from_elsewhere)


def test_empty_trees_stay():
    differs("empty-trees-stay", lambda n: n.Composite(a=n.Composite(), b=n.Unbounded(1)).one())
    differs("empty-trees-stay", lambda n: bool(n.Composite()))


def test_names_are_kept():
    def of_a_child(n):
        inner = n.Composite(shape=(2, 3), names=["a", "b"])
        return n.Composite(inner=inner, shape=(2,), names=["row"])["inner"].names

    differs("names-are-kept", of_a_child)
    differs(
        "names-are-kept",
        lambda n: n.Composite(shape=(4, 2), names=["a", "b"]).reshape(2, 2, 2).names,
    )
    differs("names-are-kept", lambda n: n.Composite(shape=(2,), names=["a"]).rand((3,)).names)


def test_misuse_is_refused():
    differs("misuse-is-refused", lambda n: n.OneHot(4).unflatten(0, (2, 2)))
    differs("misuse-is-refused", lambda n: n.MultiOneHot([2, 2])[:1])
    differs("misuse-is-refused", lambda n: n.Composite(a=None).lock_().pop("a"))
    differs("misuse-is-refused", lambda n: n.Categorical(0))
    differs("misuse-is-refused", lambda n: n.CatTensors(["a", "b"], "both", dim=0))


def test_a_dynamic_axis_is_made_in_a_copy():
    def after(n):
        spec = n.Unbounded((4, 3))
        spec.make_neg_dim(0)
        return spec

    differs("dynamic-axes-in-copies", after)
    differs("dynamic-axes-in-copies", lambda n: n.Unbounded((4, 3)).expand(-1, 3))


def test_choices_are_among_leaves():
    def choice(n):
        return n.Choice([n.Categorical(2), n.Categorical(3)])

    differs("choices-are-among-leaves", lambda n: choice(n).project(torch.tensor(7)))
    differs("choices-are-among-leaves", lambda n: n.Choice([n.Composite(), n.Composite()]).zero())
    differs("choices-are-among-leaves", lambda n: choice(n).cardinality())
    assert choice(OURS).zero() == 0


@pytest.mark.parametrize("kind", ["data", "stacks"])
def test_objects_are_drawn_and_counted_alike(kind):
    words = [NonTensorData(w) for w in "abc"] if kind == "data" else [NonTensorStack("a", "b")] * 2

    check_works_alike(lambda n: n.Choice(list(words)).num_choices)
    check_works_alike(lambda n: plain_words(n.Choice(list(words)).rand()))
    if kind == "data":  # equal stacks count once here
        check_works_alike(lambda n: n.Choice(list(words)).cardinality())


def plain_words(data):
    return data.data if isinstance(data, NonTensorData) else data.tolist()


def test_a_value_is_looked_for_in_a_spec():
    differs("values-are-in-specs", lambda n: n.Unbounded(3).zero() in n.Unbounded(3))


def test_rows_that_are_spelled_are_not_spelled_again():
    differs(
        "spelled-rows", lambda n: n.MultiOneHot([2, 2]).encode(torch.tensor([0, 1, 1, 0]).bool())
    )


def test_what_a_cast_would_change_is_not_encoded():
    differs(
        "encoding-keeps-numbers",
        lambda n: n.Unbounded((1,), dtype=torch.uint8).encode(torch.tensor([300])),
    )
