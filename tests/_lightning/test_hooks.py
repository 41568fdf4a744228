"""Attributes that are replaced for a while."""

from lightning_batchmem._lightning.hooks import replaced


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
