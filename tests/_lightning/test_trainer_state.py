"""Attributes and methods that are replaced for a while, and calls before a method."""

import pytest

from lightning_batchmem._lightning.trainer_state import call_once_before, replaced


class Owner:
    own = "of the class"

    def method(self) -> str:
        return self.own


def test_methods_of_the_class_and_attributes_of_the_object_come_back() -> None:
    owner = Owner()
    owner.own = "of the object"
    with replaced(owner, own="new", method=lambda: 1):
        assert (owner.own, owner.method()) == ("new", 1)
    assert (owner.own, owner.method()) == ("of the object", "of the object")
    assert vars(owner) == {"own": "of the object"}


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_call_once_before_a_method_that_is_wrapped_later_is_made_once(is_cancelled: bool) -> None:
    owner = Owner()
    calls = []
    cancel = call_once_before(owner, "method", lambda: calls.append("before"))
    calling = owner.method

    def wrapper() -> None:
        calls.append("wrapper")
        calling()

    vars(owner)["method"] = wrapper
    if is_cancelled:
        cancel()
    owner.method()
    owner.method()
    assert calls == ["wrapper", *([] if is_cancelled else ["before"]), "wrapper"]
    assert vars(owner) == {"method": wrapper}
