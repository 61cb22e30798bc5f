"""The examples of the page about the device run on it."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "check-on-a-simulated-npu.md"


def test_the_examples_run():
    found = re.findall(r"^```python \{\.no-run\}\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    examples = "\n".join(text for text in found if text.startswith(">>>"))
    test = doctest.DocTestParser().get_doctest(examples, {}, PAGE.name, str(PAGE), 0)
    runner = doctest.DocTestRunner(
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False
    )
    report: list[str] = []
    result = runner.run(test, out=report.append)
    assert not result.failed, "".join(report)
    assert result.attempted > 15
