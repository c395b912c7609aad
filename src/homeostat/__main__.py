"""`python -m homeostat` is the command `homeostat`, also for `torchrun -m homeostat`."""

from homeostat.cli.main import main

if __name__ == "__main__":
    main()
