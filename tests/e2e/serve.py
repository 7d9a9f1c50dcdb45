"""`vllm serve` for tests.e2e.nursery: the command itself wants a package of the name vllm, which builds for a
CPU have not."""

from __future__ import annotations

from collections.abc import Sequence

from tests.believing import believe_writers
from tests.e2e import engine_patches


def main(arguments: Sequence[str]) -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    engine_patches.fork_processes()
    believe_writers()
    parser, command = FlexibleArgumentParser(), ServeSubcommand()
    command.subparser_init(parser.add_subparsers())
    args = parser.parse_args(["serve", *arguments])
    command.validate(args)
    command.cmd(args)
