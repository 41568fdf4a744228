from lightning_batchmem.plan.notes import Note, in_order


def test_kinds_have_an_order_and_each_kind_keeps_its_own():
    notes = [
        Note("search", "z"),
        Note("risk", "grows"),
        Note("search", "a"),
        Note("training", "changes"),
    ]
    assert [note.text for note in in_order(notes)] == ["changes", "grows", "z", "a"]


def test_a_kind_of_a_later_version_comes_last():
    later = Note("of a later version", "new")
    assert in_order([later, Note("search", "old")]) == (Note("search", "old"), later)


def test_a_note_appears_once_and_an_empty_one_never():
    note = Note("limit", "long samples")
    assert in_order([note, Note("search", ""), Note("limit", "long samples")]) == (note,)
    assert str(note) == "long samples"
