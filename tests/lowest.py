"""Print the lowest release that pyproject.toml allows of every requirement, as constraints for pip. Run as a script."""

import re
import tomllib
from itertools import chain
from pathlib import Path


def lowest(requirements):
    """What `name>=version` says, as `name==version`; the package's own extras left out."""
    for requirement in requirements:
        if requirement.startswith("qbound["):
            continue
        limit = re.match(r"([\w.-]+)>=([\d.]+)", requirement)
        assert limit, f"{requirement}: no lower limit"
        yield f"{limit[1]}=={limit[2]}"


def main():
    declared = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))
    project = declared["project"]
    extras = project["optional-dependencies"].values()
    for constraint in sorted(
        set(lowest(chain(declared["build-system"]["requires"], project["dependencies"], *extras)))
    ):
        print(constraint)


if __name__ == "__main__":
    main()
