"""The corpus: the Python standard library's own source, as byte tokens.

Needs nothing but the standard library to collect, so that any interpreter's library can be packed
into a file and trained on elsewhere::

    python3.13 data.py corpus.json.gz
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import platform
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

# `site-packages` is not the library. `encodings` and `pydoc_data` are generated tables and help
# text, in which nothing looks like a program.
EXCLUDED = frozenset({"site-packages", "encodings", "pydoc_data"})
HELD_OUT_ONE_IN = 20
RULE = (
    "every UTF-8 *.py file below sysconfig's stdlib path, its tests included, in order of relative "
    f"path; without the directories {', '.join(sorted(EXCLUDED))}; "
    f"held out: sha256(relative path) % {HELD_OUT_ONE_IN} == 0"
)


def is_held_out(path: str) -> bool:
    """Whether a file is kept from training; depends on its path alone."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest(), "big") % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class Corpus:
    """Source files by relative path, and the Python version that they come from."""

    python: str
    files: dict[str, str]

    @classmethod
    def of_this_interpreter(cls) -> Corpus:
        """Read the library of the running interpreter."""
        root = Path(sysconfig.get_paths()["stdlib"])
        files = {}
        for file in root.rglob("*.py"):
            path = file.relative_to(root)
            if EXCLUDED.isdisjoint(path.parts):
                try:
                    files[path.as_posix()] = file.read_bytes().decode()
                except UnicodeDecodeError:
                    continue
        return cls(platform.python_version(), dict(sorted(files.items())))

    @classmethod
    def load(cls, file: Path) -> Corpus:
        """Read what `save` wrote."""
        return cls(**json.loads(gzip.decompress(file.read_bytes())))

    def save(self, file: Path) -> None:
        """Write one compressed JSON file."""
        content = json.dumps({"python": self.python, "files": self.files})
        file.write_bytes(gzip.compress(content.encode(), mtime=0))

    @cached_property
    def train(self) -> list[str]:
        """Texts to train on."""
        return [text for path, text in self.files.items() if not is_held_out(path)]

    @cached_property
    def held_out(self) -> list[str]:
        """Texts that training never sees."""
        return [text for path, text in self.files.items() if is_held_out(path)]

    def describe(self) -> dict[str, object]:
        """Say what a reader needs to get the same corpus again and to know that it is the same."""
        digest = hashlib.sha256()
        for path, text in self.files.items():
            digest.update(path.encode() + b"\0" + text.encode() + b"\0")
        return {
            "source": f"standard library of CPython {self.python}",
            "rule": RULE,
            "sha256": digest.hexdigest(),
            "train_files": len(self.train),
            "train_bytes": sum(len(text.encode()) for text in self.train),
            "held_out_files": len(self.held_out),
            "held_out_bytes": sum(len(text.encode()) for text in self.held_out),
        }


def main() -> None:
    """Pack the running interpreter's library."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("file", type=Path, help="where to write, for example corpus.json.gz")
    corpus = Corpus.of_this_interpreter()
    corpus.save(parser.parse_args().file)
    print(json.dumps(corpus.describe(), indent=2))


if __name__ == "__main__":
    main()
