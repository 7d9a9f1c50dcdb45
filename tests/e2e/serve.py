"""`vllm serve`: the command itself wants a package of the name vllm, which builds for a CPU have not."""

from __future__ import annotations

import sys


def main() -> None:
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser, command = FlexibleArgumentParser(), ServeSubcommand()
    command.subparser_init(parser.add_subparsers())
    args = parser.parse_args(["serve", *sys.argv[1:]])
    command.validate(args)
    command.cmd(args)


if __name__ == "__main__":
    main()
