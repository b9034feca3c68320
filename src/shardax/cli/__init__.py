"""The command line. A command makes an `Answer`, which is shown or written as JSON; `app.py` lists the commands."""

from shardax.cli.app import main as main
