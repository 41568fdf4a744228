"""The figure of the README: its line is that of benchmarks.published_law."""

import json

import pytest

from benchmarks.law_figure import BENCH, CARD, Law, draw_law
from benchmarks.published_law import MILABENCH, prediction


def test_the_line_predicts_as_the_table_of_all_benches():
    law = Law.of_milabench()
    rows = json.loads(MILABENCH.read_text())["cards"][CARD][BENCH]
    known = prediction(BENCH, rows)
    largest = known.largest_size
    assert law.predicted_gib(largest) == pytest.approx(known.predicted_mib / 1024)
    assert len(law.fitted_gib) == known.sizes
    assert largest not in law.fitted_gib


def test_the_size_is_the_largest_within_the_limit():
    law = Law({1: 3.0, 4: 6.0, 8: 10.5}, intercept_gib=2.0, slope_gib=1.0, limit_gib=9.5)
    assert law.chosen_size == 7
    assert law.predicted_gib(7) <= law.limit_gib < law.predicted_gib(8)
    assert list(law.fitted_gib) == [1, 4]


def test_the_figure_is_drawn_in_light_and_dark(tmp_path, capsys):
    draw_law(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["law-dark.png", "law-light.png"]
    assert f"{Law.of_milabench().chosen_size} samples within the limit" in capsys.readouterr().out
