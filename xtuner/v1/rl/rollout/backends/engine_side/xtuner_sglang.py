"""Starts SGLang's server, in its environment, with a key that neither the command line nor the log shows; and takes
new weights there."""

import logging
import os
import runpy
import sys
from contextlib import suppress
from typing import Any


def take_weights(model: Any, update: list[tuple[str, Any]]) -> None:
    """SGLang's `custom_weight_loader`: load the update that waits at a Unix socket, whose address is given as the name
    of the one tensor that came.

    An error would end the server. The sender has been told of it, so it is only logged here.
    """
    from xtuner_weights import Update, take_update

    def load(buckets: Update) -> None:
        for bucket in buckets:
            model.load_weights(bucket)

    ((address, _),) = update
    try:
        take_update(address, next(model.parameters()).device, load)
    except Exception:
        logging.getLogger(__name__).exception("an update of the weights went wrong")


def tell_sums() -> None:
    """Let what SGLang answers for checksums be `xtuner_sums.describe`'s: its hashes cannot be added up over what it
    keeps in one piece."""
    from sglang.srt.utils import weight_checker
    from xtuner_sums import describe

    def sum_of(tensor: Any) -> str:
        return " ".join(map(str, describe([("", tensor)])[""]))

    weight_checker._hash_tensor = sum_of


def main() -> None:
    """The arguments are the server's; the key is in XTUNER_ENGINE_KEY."""
    key = os.environ.pop("XTUNER_ENGINE_KEY")
    make_record = logging.getLogRecordFactory()

    def without_key(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        if key in f"{record.msg} {record.args}":
            record.msg, record.args = record.getMessage().replace(key, "(key)"), None
        return record

    logging.setLogRecordFactory(without_key)
    sys.argv.append(f"--api-key={key}")  # one word: it may begin with a dash
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":  # its processes import this file too
    main()
else:
    with suppress(ImportError):  # older versions have no checksums
        tell_sums()
