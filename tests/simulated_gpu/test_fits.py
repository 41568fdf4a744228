"""What the source of a program says about trainings besides the one that is searched."""

import runpy
import sys
from types import SimpleNamespace

import pytest

from lightning_batchmem.simulated_gpu.fits import notes_about_other_fits

ONE = """
trainer.fit(
    1
)
"""
# The first line of a text is empty.
TWO = """
trainer.fit(1)
trainer.fit(2)
"""
OTHER_TRAINERS = """
trainer.fit(1)
head_trainer.fit(1)
Trainer(max_epochs=3).fit(2)
scaler.fit([1, 2])
"""
LATER_LINES_COUNT_TOO = """
def train_all():
    trainer.fit(2)

def train_head():
    trainer.fit(1)

train_head()
"""
IN_A_FUNCTION = """
def train(model):
    trainer.fit(model)

def run():
    train(1)
    train(2)

run()
"""
IN_A_METHOD = """
class Runner:
    def train(self):
        trainer.fit(1)

    def run(self):
        self.train()
        self.train()

Runner().run()
"""
IN_A_LOOP = """
for fold in range(5):
    if fold:
        trainer.fit(fold)
"""
A_FUNCTION_IN_A_LOOP = """
def train(model):
    for epoch in range(3):
        pass
    trainer.fit(model)
while True:
    train(1)
"""
BESIDE_A_LOOP = """
for fold in range(5):
    pass
trainer.fit(1)
model.train(1)
"""


# Its name is that of no file, or of a file with something else.
FROM_ELSEWHERE = """
exec(compile("def train(): trainer.fit(1)", "{name}", "exec"))
train()
train()
"""


class FitError(Exception):
    pass


@pytest.fixture
def notes_of(tmp_path):
    """What is said of a program when it calls ``fit`` for the first time."""

    def notes(text):
        (tmp_path / "train.py").write_text(text)
        found = []

        def fit(*arguments):
            found.append(notes_about_other_fits(sys._getframe(1)))
            raise FitError

        trainer = SimpleNamespace(fit=fit)
        with pytest.raises(FitError):
            runpy.run_path(str(tmp_path / "train.py"), {"trainer": trainer})
        return found[0]

    return notes


@pytest.mark.parametrize("text", [ONE, BESIDE_A_LOOP])
def test_nothing_is_said_of_a_single_fit(notes_of, text):
    assert notes_of(text) == []


@pytest.mark.parametrize("name", ["<string>", "page.html"])
def test_code_without_a_source_is_passed_over(notes_of, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "page.html").write_text("{% for")
    more = "Only the first Trainer.fit is searched: line 4 of train.py calls train too."
    assert notes_of(FROM_ELSEWHERE.format(name=name)) == [more]


@pytest.mark.parametrize(
    ("text", "places"),
    [
        (TWO, "line 3 of train.py calls fit too"),
        (
            OTHER_TRAINERS,
            "line 3 of train.py calls fit too; line 4 of train.py calls fit too",
        ),
        (LATER_LINES_COUNT_TOO, "line 3 of train.py calls fit too"),
        (IN_A_FUNCTION, "line 7 of train.py calls train too"),
        (IN_A_METHOD, "line 8 of train.py calls train too"),
        (IN_A_LOOP, "line 4 of train.py calls fit in a loop"),
        (A_FUNCTION_IN_A_LOOP, "line 7 of train.py calls train in a loop"),
    ],
)
def test_another_fit_is_named_with_its_line(notes_of, text, places):
    assert notes_of(text) == [f"Only the first Trainer.fit is searched: {places}."]
