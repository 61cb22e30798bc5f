#!/usr/bin/env bash
# Run the adapter's tests with the oldest and the newest transformers of the range that pyproject.toml
# gives, each in a throwaway environment on top of the one that `python` is of. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")"

needed() { # needed ATTRIBUTE: of the requirement of transformers
    python - "$1" <<'PYTHON'
import sys, tomllib
from packaging.requirements import Requirement

project = tomllib.load(open("pyproject.toml", "rb"))["project"]
found = next(r for r in map(Requirement, project["dependencies"]) if r.name == "transformers")
oldest = next(s.version for s in found.specifier if s.operator == ">=")
print({"oldest": f"transformers=={oldest}.0", "newest": str(found)}[sys.argv[1]])
PYTHON
}

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
sites="$(python -c 'import site; print("; ".join(f"site.addsitedir({p!r})" for p in site.getsitepackages()))')"
for end in oldest newest; do
    python3 -m venv "$work/$end"
    echo "import site; $sites" >"$("$work/$end/bin/python" -c 'import site; print(site.getsitepackages()[0])')/below.pth"
    "$work/$end/bin/python" -m pip install --quiet --no-deps --ignore-installed "$(needed "$end")"
    "$work/$end/bin/python" -c "import transformers; print('$end: transformers', transformers.__version__)"
    "$work/$end/bin/python" -m pytest -q -p no:cacheprovider -n 0 tests "$@"
done
