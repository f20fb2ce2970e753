"""Starts LMDeploy's server, in its environment: with a key that neither the command line nor the log shows, and with
what its engine can do but its requests cannot ask for."""

import os
import sys


def extend_requests() -> None:
    """/generate takes a seed and a least number of tokens: `GenerationConfig` has them, under these names, and what a
    request says goes there by name."""
    from lmdeploy.serve.openai import protocol

    class GenerateReqInput(protocol.GenerateReqInput):
        random_seed: int | None = None
        min_new_tokens: int | None = None

    protocol.GenerateReqInput = GenerateReqInput


def main() -> None:
    """The arguments are those of `lmdeploy`; the key is in XTUNER_ENGINE_KEY."""
    key = os.environ.pop("XTUNER_ENGINE_KEY")
    extend_requests()
    sys.argv.append(f"--api-keys={key}")  # one word: it may begin with a dash
    from lmdeploy.cli import run

    run()


if __name__ == "__main__":  # its processes import this file too
    main()
