"""What the README shows is what its training prints, on the stub."""

import re

from tests.helpers.cuda_stub import needs_stub
from tests.helpers.readme_training import README, what_it_prints


@needs_stub
def test_the_readme_has_the_plan_that_its_training_prints(tmp_path):
    (shown,) = re.findall(
        r"^```text\n(BatchFinder: .*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL
    )
    assert shown in what_it_prints(tmp_path)
