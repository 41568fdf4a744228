import pytest

from lightning_batchmem.profile.run_folder import RunFolder


def made(directory):
    """The folder of another run, whose CSV is closed."""
    folder = RunFolder(directory)
    folder.csv.close()
    return folder


def test_each_run_has_its_own_file(tmp_path):
    names = [made(tmp_path).path.name for _ in "123"]
    expected = ["memory_per_batch.csv", "memory_per_batch_1.csv", "memory_per_batch_2.csv"]
    assert names == expected


def test_a_link_to_nothing_keeps_its_name(tmp_path):
    (tmp_path / "memory_per_batch.csv").symlink_to(tmp_path / "deleted")
    assert made(tmp_path).path.name == "memory_per_batch_1.csv"


def test_other_files_have_the_number_of_the_csv(tmp_path):
    made(tmp_path)
    folder = made(tmp_path)
    folder.write("memory_summary.json", "{}")
    assert (tmp_path / "memory_summary_1.json").read_text() == "{}"
    (tmp_path / "batch_plan_1.json").mkdir()
    files = set(tmp_path.iterdir())
    with pytest.warns(UserWarning, match=r"batch_plan_1\.json could not be written"):
        folder.write("batch_plan.json", "{}")
    assert set(tmp_path.iterdir()) == files


def test_a_link_with_the_name_of_a_file_is_not_followed(tmp_path):
    private = tmp_path / "private"
    private.write_text("private")
    (tmp_path / "run").mkdir()
    link = tmp_path / "run" / "batch_plan.json"
    link.symlink_to(private)
    made(tmp_path / "run").write("batch_plan.json", "{}")
    assert private.read_text() == "private"
    assert (link.is_symlink(), link.read_text()) == (False, "{}")
