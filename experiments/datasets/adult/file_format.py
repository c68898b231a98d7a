"""The files of Adult: lines of fields, numbers and categories, and a label at the end of each."""

from collections.abc import Iterator
from pathlib import Path

from experiments.datasets.errors import RawFileError

__all__ = ["COLUMNS", "LABELS", "MISSING", "one_hot_names", "one_hot_row", "ordinal_row", "rows"]

MISSING = "?"
LABELS = ("<=50K", ">50K")

# Categories in the order of adult.names, MISSING last where it occurs; None for a column of numbers.
COLUMNS: dict[str, tuple[str, ...] | None] = {
    "age": None,
    "workclass": (
        *("Private", "Self-emp-not-inc", "Self-emp-inc", "Federal-gov", "Local-gov", "State-gov", "Without-pay"),
        *("Never-worked", MISSING),
    ),
    "fnlwgt": None,
    "education": (
        *("Bachelors", "Some-college", "11th", "HS-grad", "Prof-school", "Assoc-acdm", "Assoc-voc", "9th", "7th-8th"),
        *("12th", "Masters", "1st-4th", "10th", "Doctorate", "5th-6th", "Preschool"),
    ),
    "education-num": None,
    "marital-status": (
        *("Married-civ-spouse", "Divorced", "Never-married", "Separated", "Widowed", "Married-spouse-absent"),
        "Married-AF-spouse",
    ),
    "occupation": (
        *("Tech-support", "Craft-repair", "Other-service", "Sales", "Exec-managerial", "Prof-specialty"),
        *("Handlers-cleaners", "Machine-op-inspct", "Adm-clerical", "Farming-fishing", "Transport-moving"),
        *("Priv-house-serv", "Protective-serv", "Armed-Forces", MISSING),
    ),
    "relationship": ("Wife", "Own-child", "Husband", "Not-in-family", "Other-relative", "Unmarried"),
    "race": ("White", "Asian-Pac-Islander", "Amer-Indian-Eskimo", "Other", "Black"),
    "sex": ("Female", "Male"),
    "capital-gain": None,
    "capital-loss": None,
    "hours-per-week": None,
    "native-country": (
        *("United-States", "Cambodia", "England", "Puerto-Rico", "Canada", "Germany", "Outlying-US(Guam-USVI-etc)"),
        *("India", "Japan", "Greece", "South", "China", "Cuba", "Iran", "Honduras", "Philippines", "Italy", "Poland"),
        *("Jamaica", "Vietnam", "Mexico", "Portugal", "Ireland", "France", "Dominican-Republic", "Laos", "Ecuador"),
        *("Taiwan", "Haiti", "Columbia", "Hungary", "Guatemala", "Nicaragua", "Scotland", "Thailand", "Yugoslavia"),
        *("El-Salvador", "Trinadad&Tobago", "Peru", "Hong", "Holand-Netherlands", MISSING),
    ),
}
CODES = [
    None if categories is None else {category: code for code, category in enumerate(categories)}
    for categories in COLUMNS.values()
]


def rows(path: Path) -> Iterator[tuple[list[int], int]]:
    """The rows of a file: numbers and codes of categories in the order of COLUMNS, and the code of the label.

    The first line of adult.test is a comment, labels there end in a full stop, and both files end in a blank line.
    """
    for number, line in enumerate(path.read_text(encoding="ascii").splitlines(), start=1):
        if line.strip() and not line.startswith("|"):
            try:
                yield _row(line)
            except ValueError as error:
                raise RawFileError(f"{path}, line {number}: {error}") from error


def ordinal_row(row: list[int]) -> list[int]:
    """One number a column: 14."""
    return row


def one_hot_row(row: list[int]) -> list[int]:
    """One number a column of numbers, and one a category: 1 for that of the row, else 0."""
    result = []
    for value, categories in zip(row, COLUMNS.values(), strict=True):
        result += [value] if categories is None else [int(value == code) for code in range(len(categories))]
    return result


def one_hot_names() -> list[str]:
    """What the numbers of `one_hot_row` are: a column, or a column and its category."""
    return [
        name if category is None else f"{name}={category}"
        for name, categories in COLUMNS.items()
        for category in categories or (None,)
    ]


def _row(line: str) -> tuple[list[int], int]:
    *fields, label = (field.strip() for field in line.split(","))
    if len(fields) != len(COLUMNS):
        raise ValueError(f"expected {len(COLUMNS)} fields and a label; found {len(fields) + 1} in all")
    label = label.removesuffix(".")
    if label not in LABELS:
        raise ValueError(f"expected the label {' or '.join(LABELS)}; found {label!r}")
    values = [_value(*entry) for entry in zip(COLUMNS, CODES, fields, strict=True)]
    return values, LABELS.index(label)


def _value(name: str, codes: dict[str, int] | None, field: str) -> int:
    if codes is None:
        if not field.isdecimal():
            raise ValueError(f"{name}: expected a number; found {field!r}")
        return int(field)
    if field not in codes:
        raise ValueError(f"{name}: expected one of {', '.join(codes)}; found {field!r}")
    return codes[field]
