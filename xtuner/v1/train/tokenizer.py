"""The tokenizer of a run."""

from pathlib import Path
from typing import Any

from xtuner.v1.utils import first_line


def load_tokenizer(folder: str | Path) -> Any:
    """What transformers makes of a Hugging Face folder.

    Raises:
        ValueError: it can make nothing of it.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:  # of any kind: it does not look at what it reads
        missing = "" if (Path(folder) / "tokenizer.json").is_file() else "tokenizer.json is not there, and "
        raise ValueError(
            f"tokenizer_path={str(folder)!r}: {missing}transformers cannot read the tokenizer "
            f"({type(error).__name__}: {first_line(error)}). Download its files again."
        ) from error
