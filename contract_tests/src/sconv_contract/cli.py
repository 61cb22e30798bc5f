"""``sconv verify``: what it is asked, and where the answer goes."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from sconv.cli.terminal import CommandParser
from sconv.messages import one_line, one_line_error

from .behaviour import hardware, simulated
from .behaviour.command import run_behaviour
from .check import check, chosen_rules
from .expected import read_expectations
from .report import FORMATS
from .rules import RULES, TEXTS
from .rules.behaviour import BEHAVIOUR
from .target import TargetError, locate
from .tree.scan import scan_tree

__all__ = ["parser", "verify"]

_CLEAN, _FOUND, _FAILED = 0, 1, 2


def verify(argv: Sequence[str]) -> int:
    """Run ``sconv verify``: 0 clean, 1 findings, 2 it could not be checked."""
    command = parser()
    options = command.parse_args(argv)
    try:
        if options.explain is not None:
            return _explain(options.explain)
        if options.list:
            return _list()
        if sum(one is not None for one in (options.target, options.tree, options.behaviour)) > 1:
            command.error("name one thing: a target, --tree DIR or --behaviour NAME")
        if options.tree is not None:
            if options.hook is None:
                command.error("--tree needs --hook NAME")
            if not options.hook.isidentifier():
                command.error(f"--hook {options.hook!r} is no method's name")
            return _tree(options)
        if options.simulated is not None and (options.on_hardware or options.behaviour is None):
            command.error("--simulated goes with --behaviour NAME, and not with --on-hardware")
        if options.on_hardware:
            return _on_hardware(options, argv)
        if options.print:
            command.error("--print goes with --on-hardware")
        if options.behaviour is not None:
            return _behaviour(options, argv)
        if options.target is None:
            command.error("name a folder, a distribution or an entry point")
        return _static(options)
    except TargetError as exc:
        print(f"sconv verify: {one_line(str(exc))}", file=sys.stderr)
    except BrokenPipeError:
        raise  # whoever reads has what was wanted
    except OSError as exc:
        print(f"sconv verify: {one_line_error(exc)}", file=sys.stderr)
    except Exception:
        # Python's own exit code for it is 1, which says that there are findings.
        traceback.print_exc()
        print("sconv verify: that is a fault of sconv-contract, not of yours", file=sys.stderr)
    return _FAILED


def parser() -> argparse.ArgumentParser:
    """Return what reads the command's line."""
    parser = CommandParser(
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
    parser.add_argument(
        "--simulated",
        choices=simulated.SIMULATED,
        help="with --behaviour: in a process that has a simulated device of this type",
    )
    parser.add_argument(
        "--on-hardware",
        action="store_true",
        help="print how a backend is proven on its device, and do it where the device is",
    )
    parser.add_argument("--print", action="store_true", help="with --on-hardware: print it alone")
    return parser


def _static(options: argparse.Namespace) -> int:
    rules = chosen_rules(RULES, _ids(options.select), _ids(options.ignore))
    target = locate(options.target)
    report = check(
        target,
        rules=rules,
        expectations=read_expectations(target.pyproject),
        search_paths=[Path(os.path.realpath(path)) for path in options.search_path],
        strict=options.strict,
    )
    _write(FORMATS[_format(options)](report), options.output)
    return _CLEAN if report.clean else _FOUND


def _tree(options: argparse.Namespace) -> int:
    report = scan_tree(Path(options.tree), options.hook)
    _write(FORMATS[_format(options)](report), options.output)
    return _CLEAN if report.clean else _FOUND


def _behaviour(options: argparse.Namespace, argv: Sequence[str]) -> int:
    if options.simulated is None:
        return _run_behaviour(options, options.behaviour, [])
    code = simulated.verify_in_child(argv)
    if code is not None:
        return code
    subject = simulated.simulated_subject(options.behaviour)
    return _run_behaviour(options, options.behaviour, [subject])


def _on_hardware(options: argparse.Namespace, argv: Sequence[str]) -> int:
    name = options.behaviour or options.target
    if name is None:
        for device in ("npu", "cuda"):
            print("\n".join(hardware.recipe_for(device).lines("NAME")))
        if options.print:
            return _CLEAN
        raise TargetError("name a backend to do it: sconv verify --on-hardware NAME")
    recipe = hardware.recipe_for(hardware.device_of(name))
    if not options.print:
        code = hardware.verify_in_child(recipe, argv)
        if code is not None:
            return code
    if options.print or options.output is not None or _format(options) == "text":
        print("\n".join(recipe.lines(name)))
    if options.print:
        return _CLEAN
    return _run_behaviour(options, name, [hardware.hardware_subject(recipe, name)])


def _run_behaviour(options: argparse.Namespace, name: str, subjects: Sequence[str]) -> int:
    rules = chosen_rules(BEHAVIOUR, _ids(options.select), _ids(options.ignore))
    known = read_expectations(locate(name).pyproject)
    report = run_behaviour(name, expectations=known, rules=rules, subjects=subjects)
    _write(FORMATS[_format(options)](report), options.output)
    return _CLEAN if report.clean else _FOUND


def _explain(rule: str) -> int:
    if rule not in TEXTS:
        raise TargetError(f"there is no rule {rule!r}; sconv verify --list names them all")
    known = TEXTS[rule]
    print(f"{known.id} {known.name} ({known.severity.value})\n\n{known.summary}")
    if known.why:
        print(f"\nWhy: {known.why}\n\nBroken by:\n")
        print("\n".join(f"    {line}" for line in known.example.splitlines()))
    else:
        print("\nAsked by the behaviour suite: sconv verify --behaviour NAME")
    print(f"\nFix: {known.fix}")
    return _CLEAN


def _list() -> int:
    for rule in TEXTS.values():
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
        try:
            Path(output).write_text(text + "\n", encoding="utf-8")
        except OSError as exc:
            raise TargetError(f"the report cannot be written: {exc}") from exc
