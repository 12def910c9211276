"""Imports transformers in a process of this library's own, without what it does twice. It changes something in it for a
moment, which a library may not do in the process of its user: only the command line does it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def import_quickly() -> None:
    """Import transformers; where it was imported before, do nothing.

    transformers 5 lists the 1,700 files of its models, which it reads for that, when it is imported, and once more with
    the first model, as what it remembers of the first time are 128 of their 550 folders. Here the second list is the
    first one, which takes .2 s less.
    """
    if "transformers" in sys.modules:
        return
    import transformers
    from transformers.utils import import_utils

    utils: Any = import_utils
    models = Path(str(transformers.__file__)).parent / "models"
    stock = getattr(utils, "create_import_structure_from_path", None)
    if stock is None:  # another version of transformers
        return

    def listed(path: str | Path) -> Any:
        return stock(models if Path(path) == models / "__init__.py" else path)  # the whole is remembered by this path

    utils.create_import_structure_from_path = listed
    try:
        import transformers.models
    finally:
        utils.create_import_structure_from_path = stock
