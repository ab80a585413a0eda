"""Write the table of model families into docs/pretrained.md, one row for each file in tricycle/pretrained/families.

    python tools/family_table.py          write the table
    python tools/family_table.py --check  exit with 1 where the table is out of date

Both columns come from `Family`: its `model_types` and `models`.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import groupby

import reading_list

PAGE = reading_list.ROOT / "docs" / "pretrained.md"
BEGIN, END = "<!-- families: written by tools/family_table.py -->\n", "<!-- end of the families -->\n"


def table() -> str:
    """Return a Markdown table of the values of `model_type` and the names of the models, in the order of the code."""
    from tricycle.pretrained.families import ALL_FAMILIES

    rows = ["| `model_type` | models |", "|:---|:---|"]
    for _, group in groupby(ALL_FAMILIES, lambda family: family.to_config.__module__):
        families = list(group)
        kinds = dict.fromkeys(kind for family in families for kind in family.model_types)
        models = dict.fromkeys(family.models for family in families if family.models)
        rows.append(f"| {', '.join(f'`{kind}`' for kind in kinds)} | {', '.join(models)} |")
    return "\n".join(rows) + "\n"


page_with_table = partial(reading_list.page_with_table, begin=BEGIN, end=END, new_table=table)

if __name__ == "__main__":
    sys.exit(reading_list.main(sys.argv[1:], PAGE, page_with_table))
