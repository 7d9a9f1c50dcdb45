"""A client of AWS without a proxy, in a network where AWS' names lead to loopback. Argument: a folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.payloads.s3.test_aws import IN_EUROPE, everything, hosts
from tests.servers.s3.aws import Aws
from tests.servers.s3.servers import MotoServer

with MotoServer() as server, Aws(server, Path(sys.argv[1]) / "aws", port=443) as aws:
    aws.make("my-bucket", "eu-central-1")
    os.environ.update(aws.user().environ | {"AWS_CA_BUNDLE": aws.ca})
    everything(IN_EUROPE)
    [(host, region)] = hosts(aws)
    print(host, region)
