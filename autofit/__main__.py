"""`python -m autofit`, for where the program is not on the PATH."""

from autofit.cli.main import main

main()
