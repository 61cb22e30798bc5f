"""``sconv verify``: what it is asked, and where the answer goes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .behaviour.command import run_behaviour
from .behaviour.rules import BEHAVIOUR
from .check import check, chosen_rules
from .expected import read_expectations
from .report import FORMATS
from .rules import RULES
from .rules.every import EVERY
from .target import TargetError, locate
from .tree import scan_tree

__all__ = ["verify"]

_CLEAN, _FOUND, _FAILED = 0, 1, 2


def verify(argv: Sequence[str]) -> int:
    """Run ``sconv verify``: 0 clean, 1 findings, 2 it could not be checked."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        if options.explain is not None:
            return _explain(options.explain)
        if options.list:
            return _list()
        if options.tree is not None:
            if options.hook is None:
                parser.error("--tree needs --hook NAME")
            return _tree(options)
        if options.behaviour is not None:
            return _behaviour(options)
        if options.target is None:
            parser.error("name a folder, a distribution or an entry point")
        return _static(options)
    except TargetError as exc:
        print(f"sconv verify: {exc}", file=sys.stderr)
        return _FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sconv verify",
        description="Check that a plugin keeps the contract. Its source is read, never imported, so"
        " neither torch nor the hardware is needed.",
    )
    parser.add_argument(
        "target", nargs="?", help="a source folder, an installed distribution or an entry point"
    )
    parser.add_argument("--format", choices=FORMATS, help="default: text; github in its CI")
    parser.add_argument("--output", metavar="FILE", help="write the report there")
    parser.add_argument("--select", metavar="RULES", default="", help="only these, as in SCV1,SCV3")
    parser.add_argument("--ignore", metavar="RULES", default="", help="not these")
    parser.add_argument("--strict", action="store_true", help="warnings fail too")
    parser.add_argument(
        "--search-path",
        metavar="DIR",
        action="append",
        default=[],
        help="where packages lie that the target builds on",
    )
    parser.add_argument("--list", action="store_true", help="list the rules")
    parser.add_argument("--explain", metavar="RULE", help="print a rule's page")
    parser.add_argument("--tree", metavar="DIR", help="compare calls and definitions of --hook")
    parser.add_argument("--hook", metavar="NAME", help="the method that --tree looks for")
    parser.add_argument(
        "--behaviour", metavar="NAME", help="run the behaviour suite on an installed backend"
    )
    return parser


def _static(options: argparse.Namespace) -> int:
    rules = chosen_rules(RULES, _ids(options.select), _ids(options.ignore))
    target = locate(options.target)
    report = check(
        target,
        rules=rules,
        expectations=read_expectations(target.pyproject),
        search_paths=[Path(path).resolve() for path in options.search_path],
        strict=options.strict,
    )
    _write(FORMATS[_format(options)](report), options.output)
    return _CLEAN if report.clean else _FOUND


def _tree(options: argparse.Namespace) -> int:
    report = scan_tree(Path(options.tree), options.hook)
    _write(FORMATS[_format(options)](report), options.output)
    return _CLEAN if report.clean else _FOUND


def _behaviour(options: argparse.Namespace) -> int:
    rules = chosen_rules(BEHAVIOUR, _ids(options.select), _ids(options.ignore))
    project = locate(options.behaviour).pyproject
    report = run_behaviour(options.behaviour, expectations=read_expectations(project), rules=rules)
    _write(FORMATS[_format(options)](report), options.output)
    return _CLEAN if report.clean else _FOUND


def _explain(rule: str) -> int:
    if rule not in EVERY:
        raise TargetError(f"there is no rule {rule!r}; sconv verify --list names them all")
    known = EVERY[rule]
    print(f"{known.id} {known.name} ({known.severity.value})\n\n{known.summary}")
    if known.why:
        print(f"\nWhy: {known.why}\n\nBroken by:\n")
        print("\n".join(f"    {line}" for line in known.example.splitlines()))
    else:
        print("\nAsked by the behaviour suite: sconv verify --behaviour NAME")
    print(f"\nFix: {known.fix}")
    return _CLEAN


def _list() -> int:
    for rule in EVERY.values():
        print(f"{rule.id}  {rule.severity.value:<8} {rule.name}: {rule.summary}")
    return _CLEAN


def _ids(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _format(options: argparse.Namespace) -> str:
    if options.format is not None:
        return str(options.format)
    in_actions = os.environ.get("GITHUB_ACTIONS") == "true" and options.output is None
    return "github" if in_actions else "text"


def _write(text: str, output: str | None) -> None:
    if output is None:
        print(text)
    else:
        Path(output).write_text(text + "\n", encoding="utf-8")
