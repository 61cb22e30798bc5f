"""Every broken plugin is caught by the one rule it breaks, and no good one by any."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from sconv_contract.check import check
from sconv_contract.findings import Severity
from sconv_contract.rules import RULES
from sconv_contract.target import locate


def _report(folder, **options):
    return check(locate(str(folder)), **options)


def _shown(report):
    return "\n".join(f"{one.path}:{one.line} {one.rule} {one.message}" for one in report.findings)


def test_a_broken_plugin_is_caught_by_the_rule_that_it_breaks(broken_case, tmp_path):
    report = _report(broken_case.unpack(tmp_path), strict=True)
    assert {one.rule for one in report.findings} == {broken_case.rule}, _shown(report)
    assert not report.clean
    for one in report.findings:
        assert (tmp_path / one.path).exists()
        assert one.message
        assert one.fix
    is_error = RULES[broken_case.rule].text.severity is Severity.ERROR
    assert _report(tmp_path).clean is not is_error


def test_a_good_plugin_has_no_finding(good_case, tmp_path):
    report = _report(good_case.unpack(tmp_path), strict=True)
    assert not report.findings, _shown(report)
    assert report.clean
    assert any(subject.startswith("class sconv_npu") for subject in report.subjects)


def test_a_factory_that_is_not_followed_says_what_to_write(corpus, tmp_path):
    (case,) = [one for one in corpus[0] if one.name == "factory_that_looks_a_class_up"]
    (found,) = _report(case.unpack(tmp_path)).findings
    assert found.fix.startswith("Let each return call a class by its name")


def test_a_private_import_says_what_to_write(corpus, tmp_path):
    (case,) = [one for one in corpus[0] if one.name == "imports_of_an_older_skeleton"]
    dense, pool = _report(case.unpack(tmp_path)).findings
    assert dense.message == "sconv.dense is private to sconv-core"
    assert dense.fix == "Write: from sconv.plugin import TorchBackend (it was DenseBackend)."
    assert pool.fix == "Write: from sconv import ConvStatePool."


def test_the_corpus_is_as_large_as_it_claims(corpus):
    broken, good = corpus
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    claimed = re.search(r"(\d+) broken ones.*?(\d+) unusual ones", readme, re.DOTALL)
    assert claimed is not None
    assert (len(broken), len(good)) == (int(claimed[1]), int(claimed[2]))
    assert len(broken) >= 40
    assert len(good) >= 15
    assert len({case.name for case in broken + good}) == len(broken) + len(good)


def test_no_rule_can_be_removed_unnoticed(corpus, tmp_path):
    """Without a rule, a plugin that breaks it passes: each rule alone keeps some case."""
    broken, _ = corpus
    by_rule = defaultdict(list)
    for case in broken:
        by_rule[case.rule].append(case)
    assert by_rule.keys() == RULES.keys()
    for rule, cases in by_rule.items():
        others = [other for other in RULES if other != rule]
        folder = cases[0].unpack(tmp_path / rule)
        assert _report(folder, rules=others, strict=True).clean, rule
        assert not _report(folder, rules=[rule], strict=True).clean, rule
