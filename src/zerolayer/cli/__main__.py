"""`python -m zerolayer.cli`, for where the installed command is not on the path."""

from zerolayer.cli.main import main

main()
